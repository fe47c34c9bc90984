"""The command line: ``ncclpy info``, ``ncclpy perf`` and ``ncclpy trace``."""
