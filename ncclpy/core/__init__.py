"""The lowest layer of the package: from a Python object to one C call."""
