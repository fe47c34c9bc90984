"""Shared by tests of buffers: valid calls, and the check that a call is refused before it reaches NCCL."""

from __future__ import annotations

import contextlib

import pytest

import ncclpy
import testing

REJECTED = (TypeError, ValueError)


@contextlib.contextmanager
def rejects(argument, *words, kind=REJECTED):
    """Expect a plain error with a message that names the argument and has every word."""
    with pytest.raises(kind) as caught:
        yield caught
    assert not isinstance(caught.value, ncclpy.NcclError)
    message = str(caught.value)
    for word in (argument, *words):
        assert word.lower() in message.lower(), f"{word!r} is not in {message!r}"


def quickly(call, *args, **options):
    """Call from a thread: a call that is not rejected would hang here."""
    return testing.run_with_deadline(lambda: call(*args, **options), 10)


# Every call with a valid pair of buffers for two ranks, as (method, elements of send, elements of recv).
PAIRS = [
    ("all_reduce", 8, 8),
    ("reduce", 8, 8),
    ("broadcast", 8, 8),
    ("all_gather", 8, 16),
    ("reduce_scatter", 16, 8),
    ("all_to_all", 16, 16),
    ("gather", 8, 16),
    ("scatter", 16, 8),
]


def read_only(array):
    array.flags.writeable = False
    return array
