"""``ncclpy perf``: time a collective over a sweep of sizes and check its results.

Flags, sizes, bandwidth formulas and columns are the same as in NVIDIA's nccl-tests, so that figures can be compared.
"""
