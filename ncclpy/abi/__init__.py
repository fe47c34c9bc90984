"""The C side, declared by hand: nccl_abi.h, driver_abi.h and their .pxd files."""
