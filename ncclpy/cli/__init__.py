"""The command line: ``ncclpy info`` and ``ncclpy perf``."""
