"""What registered memory costs: calls on it, segments that come and go, allocations from a pool."""
