"""Damaged values under the keys of a rendezvous: an error names the key."""

from __future__ import annotations

import struct

import pytest

import ncclpy
from ncclpy.bootstrap import LocalStore, StoreDamaged
from ncclpy.bootstrap.store_barrier import gather

LONG = 20.0  # seconds that only a hang takes
BASE = "\0meeting/m\0"


@pytest.fixture
def store():
    with LocalStore() as made:
        yield made


@pytest.mark.parametrize("junk", [b"\xff\xfe", b"", b"-1", b"1e3", "\u0663".encode()])
def test_invalid_round_number_is_an_error(store, junk):
    store.set(BASE + "round", junk)
    with pytest.raises(StoreDamaged, match=r"meeting/m.*round") if junk else pytest.raises(ncclpy.NcclTimeout):
        gather(store, "m", 0, 2, b"mine", 0.05)


@pytest.mark.parametrize(
    "junk",
    [
        b"",
        b"\1",
        struct.pack("<Q", 1 << 60),
        struct.pack("<QQQ", 3, 0, 0),
        struct.pack("<QQQ", 2, 1, 1 << 62) + b"ab",
        struct.pack("<QQQ", 2, 1, 0),
        struct.pack("<QQQ", 2, 1, 1) + b"abc",
    ],
)
def test_invalid_values_of_meeting_are_an_error(store, junk):
    store.set(BASE + "0/done", junk)
    with pytest.raises(StoreDamaged, match=r"meeting/m.*done"):
        gather(store, "m", 0, 2, b"mine", LONG)


def test_invalid_count_and_late_ranks_are_an_error(store):
    store.set(BASE + "0/count", b"1")  # of a rank that does not continue
    for key, junk in (("late", b"1 two"), ("count", b"many")):
        store.set(BASE + "0/" + key, junk)
        with pytest.raises(ncclpy.NcclError) as caught:
            gather(store, "m", 0, 3, b"mine", 0.05)
        assert isinstance(caught.value, StoreDamaged) == (key == "late"), caught.value


def test_key_without_rank_counts_as_no_rank(store):
    store.set(BASE + "0/value/x", b"")
    store.set(BASE + "0/value/" + "9" * 30, b"")
    with pytest.raises(ncclpy.NcclTimeout, match="rank 1 of 2 did not arrive"):
        gather(store, "m", 0, 2, b"mine", 0.05)
