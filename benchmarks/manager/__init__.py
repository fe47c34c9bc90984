"""The costs of the Manager."""
