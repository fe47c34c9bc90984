"""What all benchmarks share: workers, the machine, results."""
