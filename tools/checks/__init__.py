"""Checks of the source that no linter has: python -m tools.checks [NAME…], from the root of the repository.

Each module here is one group of checks with a function ``check(root)``, which yields a `Problem` for each finding.
"""
