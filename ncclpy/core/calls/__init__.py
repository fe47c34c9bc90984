"""Calls of NCCL: one, several at once, a group."""
