"""How costs grow with ranks, processes and keys."""
