"""Adapters to other packages. Only this package imports them, each in a module of its own, when it is needed."""
