"""``ncclpy run``: start one process for each rank, and leave none behind."""
