"""The ranks of one communicator, as one of their processes sees them by the store."""

from __future__ import annotations

import logging

import pytest

import ncclpy
from ncclpy.bootstrap import LeaseEnded, LocalStore, StoreError, StoreLost
from ncclpy.bootstrap.arrivals import Arrivals
from ncclpy.peers.circle import Circle


def test_process_whose_lease_has_ended_takes_its_communicator_for_ended(monkeypatch):
    """It was stopped for too long: the others go on without it, and it cannot ask whether they have aborted."""
    with LocalStore() as store:
        ended = []
        arrivals = Arrivals(store, "a test", 0, 2)
        circle = Circle(
            store, "all", {0: 0}, 2, lambda rank: {}, {}, arrivals, lambda text, kind: ended.append((text, kind))
        )
        assert not circle.look_for_end()

        def gone(*arguments):
            raise LeaseEnded("this process was stopped")

        monkeypatch.setattr(store, "compare_set", gone)
        assert circle.look_for_end()
        told = ": the other ranks take this process for lost: this process was stopped"
        assert ended == [(told, ncclpy.NcclRemoteError.__name__)]


@pytest.mark.parametrize(("error", "told"), [(StoreLost("the server is gone"), 1), (StoreError("it is closed"), 0)])
def test_beat_that_ends_is_told_unless_the_store_was_closed(monkeypatch, caplog, error, told):
    with LocalStore() as store:
        circle = Circle(
            store, "all", {0: 0}, 2, lambda rank: {}, {}, Arrivals(store, "a test", 0, 2), lambda text, kind: None
        )

        def fails(*arguments):
            raise error

        monkeypatch.setattr(store, "set", fails)
        circle._beat()
        words = "rank 0 of communicator 'all' tells the others no more what it does: the server is gone"
        found = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
        assert found == [words] * told
        caplog.clear()
        circle._over = True
        circle._beat()
        assert not caplog.records
