"""What a call costs the caller, and what an import does."""
