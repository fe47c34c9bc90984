"""The command line: ``ncclpy info``, ``perf``, ``trace`` and ``run``."""
