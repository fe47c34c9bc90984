"""Comparisons (`check=`) that end early: by a deadline, by the group's end, or by a failing store."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest
from graphs import Graph
from group_ranks import DEADLINE, run_groups
from test_group_graphs import Side

import ncclpy
import testing
from ncclpy.bootstrap import LocalStore, StoreLost
from ncclpy.process_group.check import shared_memory

pytestmark = pytest.mark.usefixtures("host_engine")


def beside(function):
    """Call a function in a thread; return a function that joins the thread and returns its exception, or None."""
    raised = []

    def body():
        try:
            function()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()

    def join():
        thread.join(DEADLINE)
        assert not thread.is_alive()
        return raised[0] if raised else None

    return join


def begin_block(group):
    """Begin a block that waits for the matching block of the other rank."""
    got = np.zeros(1)
    with group.coalescing() as work:
        group.send(np.full(1, 1.0 + group.rank), 1 - group.rank)
        group.recv(got, 1 - group.rank)
    return work, got


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("end", ["deadline", "abort"])
def test_capture_behind_held_block_ends_with(end):
    """At a deadline nothing is captured, and the group, the block and the capture stay usable."""
    late = threading.Event()

    def body(group):
        side = Side(group)
        array = side.array(1)
        side.warm(array)
        if group.rank == 1:
            assert late.wait(DEADLINE)
            if end == "abort":
                group.abort("enough")
                return None
            return begin_block(group)[0].wait(DEADLINE)
        work, got = begin_block(group)
        with Graph(side.stream) as graph, graph.capture():
            if end == "deadline":
                words = (
                    r"1 operations on communicator 'all' wait to be compared .*the capture continues without this one"
                )
                with pytest.raises(ncclpy.NcclTimeout, match=words):
                    side.all_reduce(array, timeout=0.1)
                assert graph.is_capturing() and group.error is None and group.seq == 1
            else:
                waits = threading.Timer(0.1, late.set)
                waits.start()
                with pytest.raises(ncclpy.NcclAborted, match="enough"):
                    side.all_reduce(array)
        late.set()
        if end == "deadline":
            work.wait(DEADLINE)
            assert got[0] == 2.0
        else:
            assert isinstance(work.exception(DEADLINE), ncclpy.NcclAborted)
        return None

    run_groups(2, body, check="always")


@pytest.mark.parametrize("end", ["deadline", "abort"])
def test_thread_waiting_for_its_turn_to_compare_is_ended_by(end):
    """The first thread, which waits for rank 1, keeps its own deadline."""
    late, both_ready = threading.Event(), threading.Barrier(2)

    def body(group):
        group.all_reduce(np.ones(1)).wait(DEADLINE)
        both_ready.wait(DEADLINE)  # an abort would also end rank 1's wait for this
        if group.rank == 1:
            assert late.wait(DEADLINE)
            return group.all_reduce(np.ones(2)).exception(DEADLINE) if end == "deadline" else None
        first = beside(lambda: group.all_reduce(np.ones(2)).wait(DEADLINE))
        testing.wait_for(lambda: group.state()[0].state == "running", "the first thread to wait", DEADLINE)
        if end == "deadline":
            with pytest.raises(ncclpy.NcclTimeout, match="another thread still waits for the other ranks to call"):
                group.all_reduce(np.ones(3), timeout=0.1)
            assert group.error is None
            late.set()
            return first()
        second = beside(lambda: group.all_reduce(np.ones(3)))
        group.abort("enough")
        late.set()
        for error in (first(), second()):
            assert isinstance(error, ncclpy.NcclAborted) and "enough" in str(error), error
        return None

    assert run_groups(2, body, check="always") == [None, None]


class Failing(LocalStore):
    """A store in which, once `fails` is set, ranks cannot look for the calls of others."""

    fails = False

    def _check(self, keys, deadline):
        if self.fails and any("/check/" in key for key in keys):
            raise StoreLost("the server is gone")
        return super()._check(keys, deadline)


@pytest.mark.parametrize("on_error", ["abort", "report"])
def test_store_that_fails_while_a_message_is_compared_fails_the_message(monkeypatch, caplog, on_error):
    """The group ends with the message, or continues without that communicator."""
    monkeypatch.setattr(shared_memory, "attach_rings", refused)
    store, failed, both_have = Failing(), threading.Event(), threading.Barrier(2)

    def body(group):
        group.all_reduce(np.ones(1)).wait(DEADLINE)
        got = np.zeros(1)
        way = [group.send, group.recv][group.rank]
        way(got, 1 - group.rank).wait(DEADLINE)
        both_have.wait(DEADLINE)
        if group.rank == 0:
            store.fails = True
            error = way(got, 1).exception(DEADLINE)
            store.fails = False
            assert type(error) is StoreLost and "the server is gone" in str(error), error
            failed.set()
        assert failed.wait(DEADLINE)
        if on_error == "abort":
            testing.wait_for(lambda: group.error is not None, "the news", DEADLINE)
            assert "the server is gone" in str(group.error)
        else:
            assert group.error is None
            group.all_reduce(np.ones(1)).wait(DEADLINE)

    run_groups(2, body, store=store, check="always", on_error=on_error)
    if on_error == "report":
        words = "rank 0 of process group 'default' continues, as on_error='report' says, after: the server is gone"
        testing.wait_for(lambda: words in caplog.text, "the log", DEADLINE)


def refused(*offered):
    raise OSError("another machine")


def test_message_without_comparing_thread_ends_the_group(monkeypatch):
    """The peer may have launched the other half, which the next message would match instead."""
    testing.refuse_threads("ncclpy-group-check", monkeypatch.setattr)

    def body(group):
        array = np.full(1, 2.0 - 2 * group.rank)
        way = [group.send, group.recv][group.rank]
        with pytest.raises((RuntimeError, ncclpy.NcclError), match="can't start new thread"):
            way(array, 1 - group.rank).wait(DEADLINE)
        with pytest.raises(ncclpy.NcclError, match="can't start new thread"):
            way(array, 1 - group.rank).wait(DEADLINE)
        with contextlib.suppress(ncclpy.NcclError):
            group.close(5.0)
        return array[0]

    assert run_groups(2, body, check="always") == [2.0, 0.0]
