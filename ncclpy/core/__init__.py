"""The lowest layer of the package: from Python objects to calls of NCCL."""
