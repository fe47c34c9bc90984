"""`check=`: the ranks compare their operations before these begin."""
