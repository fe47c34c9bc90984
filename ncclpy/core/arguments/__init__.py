"""From Python's arguments to a checked operation."""
