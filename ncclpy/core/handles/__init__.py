"""One communicator: its state, its observers, its watchdog, its abort."""
