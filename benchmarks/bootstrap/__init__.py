"""Stores: what a key costs, and what it takes until all have met."""
