"""One Python function for each C function of NCCL; `ncclpy.bindings` is the public name."""
