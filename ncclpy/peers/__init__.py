"""What the ranks of a process group, or of a communicator, know of each other across processes."""
