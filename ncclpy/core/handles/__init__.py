"""One communicator: its state, who observes it, its watchdog, its abort."""
