"""Paths in the source tree."""

import os
from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent


def with_support() -> str:
    """Return the PYTHONPATH with which a program finds the modules of tests/support."""
    return os.pathsep.join(filter(None, [str(SUPPORT), os.environ.get("PYTHONPATH")]))
