"""The cost of a call for the caller, and the cost of an import."""
