"""``ncclpy perf``: time a collective over a sweep of sizes and check what it computed.

Flags, sizes, bandwidth formulas and columns are those of NVIDIA's nccl-tests, so that figures can be compared.
"""
