"""The floor that every other stands on: from a Python object to one C call."""
