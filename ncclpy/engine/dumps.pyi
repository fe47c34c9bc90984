# Nothing of it is for Python but its import, which looks at NCCLPY_DUMP_ON_TIMEOUT.
