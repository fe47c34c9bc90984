"""C headers, with .pxd files, of NCCL, the CUDA driver, DLPack and interfaces between compiled parts of ncclpy."""
