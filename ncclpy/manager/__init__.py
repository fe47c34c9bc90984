"""Gather the participants of a collective by key and launch it when all have come."""
