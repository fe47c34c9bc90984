"""Shared by all benchmarks: workers, the machine, results."""
