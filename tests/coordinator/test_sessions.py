"""Sessions with a control plane that is silent or inconsistent: each rank gets the reason, and every wait ends."""

from __future__ import annotations

import functools
import logging
import threading

import numpy as np
import pytest
import thread_ranks
from coordinator_ranks import run_coordinators
from group_ranks import DEADLINE

import ncclpy
import testing
from ncclpy.bootstrap import LocalStore
from ncclpy.coordinator import Coordinator, session
from ncclpy.coordinator.keys import key_of

pytestmark = pytest.mark.usefixtures("ranks_are_threads")


class Changed:
    """A wrapper of an object, with methods that a test can replace."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)


@pytest.mark.parametrize("tells", ["a clock of its own", "the control plane"])
def test_connected_rank_that_does_not_begin_is_named_on_others(monkeypatch, tells):
    """Rank 1 sends its options only after rank 0 has given up."""
    store, given_up, opens = LocalStore(), threading.Event(), session.open_control

    def opened(*arguments, **options):
        if tells == "the control plane":
            options["timeout"] = 0.3
        control = Changed(opens(*arguments, **options))
        if control.rank == 0 and tells == "a clock of its own":
            monkeypatch.setattr(session, "_BEGIN_TIMEOUT", 0.3)  # all ranks are connected by then
        elif control.rank == 1:
            bring = control.bring
            control.bring = lambda *what: given_up.wait(DEADLINE) and bring(*what)
        return control

    monkeypatch.setattr(session, "open_control", opened)

    def rank(number):
        with pytest.raises(ncclpy.NcclError) as caught:
            Coordinator((store, number, 2), device=number)
        given_up.set()
        return caught.value

    raised = thread_ranks.run_ranks(2, rank, DEADLINE)
    assert type(raised[0]) is ncclpy.NcclTimeout and raised[0].missing == [1]
    assert "rank 1 did not " in str(raised[0])
    assert type(raised[1]) is ncclpy.NcclAborted and f"rank 0 could not begin: {raised[0]}" in str(raised[1])
    assert str(raised[0]).startswith("coordinator 'coordinator'"), raised[0]


def not_read(frame):
    raise ZeroDivisionError("a defect")


def not_brought(follow):
    """Return a reader that has a session run an operation that its rank has not brought."""

    def other(frame):
        follow([("run", 0, key_of(["other"]), *record[3:]) if record[0] == "run" else record for record in frame])

    return other


@pytest.mark.parametrize(
    ("defect", "why"),
    [
        (lambda follow: not_read, "reading the control plane failed: ZeroDivisionError('a defect')"),
        (not_brought, "is to run, and rank 0 has not brought it"),
    ],
    ids=["an exception", "a frame that does not fit"],
)
def test_defect_in_the_thread_that_reads_ends_the_coordinator_on_all_ranks(defect, why):
    meet = threading.Barrier(2)

    def body(coordinator):
        coordinator.all_reduce("before", np.ones(2)).wait(DEADLINE)
        meet.wait(DEADLINE)
        if coordinator.rank == 0:
            coordinator._session._execute = defect(coordinator._session._execute)
        meet.wait(DEADLINE)
        error = coordinator.all_reduce("x", np.ones(2)).exception(DEADLINE)
        assert error is not None and why in str(error), error
        if coordinator.rank == 0:
            assert type(coordinator.error) is ncclpy.NcclError
            assert type(coordinator.error.__cause__) in (ZeroDivisionError, RuntimeError)
        with pytest.raises(ncclpy.NcclError, match="does nothing more"):
            coordinator.barrier("behind")
        coordinator.close(DEADLINE)  # all was given back
        return True

    assert run_coordinators(2, body, shut=False) == [True] * 2


def test_part_that_cannot_be_made_ends_the_coordinator_on_all_ranks():
    def body(coordinator):
        if coordinator.rank == 0:
            coordinator._session.backend.part = no_memory
        with pytest.raises((MemoryError, ncclpy.NcclError), match="no space"):
            coordinator.process_set([0, 1], DEADLINE).all_reduce("x", np.ones(2)).wait(DEADLINE)
        testing.wait_for(lambda: coordinator.error is not None, "the end", DEADLINE)
        assert "no space" in str(coordinator.error)
        coordinator.close(DEADLINE)
        return True

    assert run_coordinators(2, body, shut=False) == [True] * 2


def no_memory(*arguments):
    raise MemoryError("no space")


@pytest.mark.parametrize("what", ["backend", "member"])
def test_shutdown_raises_errors_of_release(what):
    """The rest is released nevertheless: the other rank's shutdown returns."""
    meet = threading.Barrier(2)

    def body(coordinator):
        mine = coordinator._session
        if coordinator.rank == 1:
            meet.wait(DEADLINE)
            return coordinator.close(DEADLINE)
        if what == "backend":
            end = mine.backend.end
            mine.backend.end = lambda orderly: (end(orderly), no_memory())
        else:
            member = mine._members[0] = Changed(mine.all_ranks)
            member.close = lambda limit: (member.inner.close(limit), no_memory())
        meet.wait(DEADLINE)
        with pytest.raises(MemoryError, match="no space"):
            coordinator.close(DEADLINE)
        return None

    assert run_coordinators(2, body, shut=False) == [None] * 2


def test_rank_at_the_end_of_its_block_is_not_warned_of_others_at_work(caplog):
    waits = threading.Event()

    def body(coordinator):
        if coordinator.rank == 1:
            assert waits.wait(DEADLINE)
        else:
            seen = functools.partial(
                testing.wait_for, lambda: coordinator.stats()["stalls"] > 0, "it to wait", DEADLINE
            )
            threading.Thread(target=lambda: (seen(), waits.set())).start()

    with caplog.at_level(logging.WARNING, "ncclpy.coordinator"):
        run_coordinators(2, body, stall_after=0.1)
    assert not caplog.records
