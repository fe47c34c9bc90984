"""The speed of collectives, compared with rivals, nccl-tests and MPI."""
