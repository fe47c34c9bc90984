"""The confirmation of other ranks that a rank waits for before it aborts."""

from __future__ import annotations

import threading

import pytest

from ncclpy.bootstrap import LocalStore
from ncclpy.peers import confirmation
from ncclpy.peers.confirmation import Confirmation


@pytest.fixture
def exits(monkeypatch):
    made = threading.Event()
    monkeypatch.setattr(confirmation, "_exits", made)
    return made


@pytest.mark.parametrize("ends", [False, True])
def test_rank_without_store_aborts_unless_its_process_ends(exits, monkeypatch, ends):
    """Python closes its stores at exit, when the others cannot be told, and the exit ends the process's kernels."""
    monkeypatch.setattr(confirmation, "_STOPPED", 0.05)
    store = LocalStore()
    mine = Confirmation(store, [0], 2, lambda rank: "lives")
    store.close()
    if ends:
        exits.set()
    assert mine.wait() is not ends


def test_rank_of_exiting_process_does_not_abort(exits):
    store = LocalStore()
    mine = Confirmation(store, [0], 2, lambda rank: "lives")
    store.close()
    threading.Timer(0.1, exits.set).start()
    assert mine.wait() is False
