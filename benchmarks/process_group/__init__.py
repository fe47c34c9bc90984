"""The costs of a process group."""
