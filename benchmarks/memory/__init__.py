"""The costs of registered memory: calls on it, adding and removing segments, allocations from a pool."""
