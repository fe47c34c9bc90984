"""What runs under managers and process groups: work handles, the monitor, launch order, plans, the recorder."""
