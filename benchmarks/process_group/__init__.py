"""What a process group costs."""
