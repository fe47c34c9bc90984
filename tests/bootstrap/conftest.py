"""Fixtures for tests of stores."""

from concurrent.futures import ThreadPoolExecutor

import foreign_stores  # noqa: F401 - registers kinds before the suite looks which there are
import pytest

from ncclpy.bootstrap import TCPStore

LONG = 20.0  # seconds that only a hang takes


@pytest.fixture
def pool():
    with ThreadPoolExecutor(24) as pool:
        yield pool


@pytest.fixture
def serve():
    """Return a function that makes a serving store, closed after the test."""
    made = []

    def make(host="127.0.0.1", port=0, **options):
        made.append(TCPStore(host, port, serve=True, **{"linger": 0, "timeout": LONG, **options}))
        return made[-1]

    yield make
    for store in made:
        store.close()
