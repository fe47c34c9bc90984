"""Run the command line: ``python -m ncclpy``."""

import sys

from ncclpy.cli.main import main

if __name__ == "__main__":  # spawned workers import this module under another name
    sys.exit(main())
