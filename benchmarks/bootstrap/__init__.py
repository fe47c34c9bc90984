"""Stores: the cost of a key, and the time of a rendezvous of all ranks."""
