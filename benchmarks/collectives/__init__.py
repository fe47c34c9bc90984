"""How fast collectives move data, beside rivals, nccl-tests and MPI."""
