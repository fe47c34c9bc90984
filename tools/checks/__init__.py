"""Checks of the source that no linter knows: python -m tools.checks [NAME…], from the root of the repository.

Each module here is one group of checks with a function ``check(root)``, which yields what is wrong as a `Problem`.
"""
