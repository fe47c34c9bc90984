"""Calls of NCCL: a single call, a batch of calls, a group."""
