"""Communicators that cannot be made: the group ends on all ranks, or continues with on_error="report"."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from group_ranks import DEADLINE, run_groups

import ncclpy
import testing
from ncclpy.bootstrap import LocalStore
from ncclpy.core.runtime.stream import StreamPool
from ncclpy.process_group import lifecycle

pytestmark = pytest.mark.usefixtures("host_engine")


def without_streams(monkeypatch):
    """Give rank 0's groups no stream to launch on."""

    class Empty(StreamPool):
        def of(self, device, number):
            if device == 0:
                raise MemoryError("no space for a stream")
            return super().of(device, number)

    monkeypatch.setattr(lifecycle, "StreamPool", Empty)


def without_threads(monkeypatch):
    """Give rank 0 no thread to make a communicator."""
    start = threading.Thread.start

    def started(thread):
        if thread.name == "ncclpy-init" and threading.current_thread().name == "rank 0":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", started)


FAILURES = {
    "stream": (without_streams, "no space for a stream"),
    "thread": (without_threads, "can't start new thread"),
}


@pytest.mark.parametrize("what", FAILURES)
def test_communicator_that_cannot_be_made_ends_the_group_on_all_ranks(monkeypatch, what):
    fails, why = FAILURES[what]
    fails(monkeypatch)

    def body(group):
        error = None
        try:
            error = group.all_reduce(np.ones(2)).exception(DEADLINE)
        except (RuntimeError, ncclpy.NcclError) as raised:  # raised by the call itself
            error = raised
        assert why in str(error), error
        testing.wait_for(lambda: group.error is not None, "the news", DEADLINE)
        return type(group.error), str(group.error)

    (first, _), (second, told) = run_groups(2, body)
    assert issubclass(first, (MemoryError, RuntimeError)) and second is ncclpy.NcclRemoteError
    assert told.startswith(f"process group 'default' was ended by rank 0 of 2: {why}")


@pytest.mark.parametrize("what", FAILURES)
def test_group_with_on_error_report_continues_without_communicator(monkeypatch, caplog, what):
    fails, why = FAILURES[what]
    fails(monkeypatch)
    failed = threading.Event()

    def body(group):
        if group.rank == 1:
            if what == "stream":  # NCCL makes the communicator on both ranks
                group.connect()
            assert failed.wait(DEADLINE)
            return group.error
        with pytest.raises((RuntimeError, MemoryError, ncclpy.NcclError), match=why):
            group.all_reduce(np.ones(2)).wait(DEADLINE)
        with pytest.raises(ncclpy.NcclAborted, match="communicator 'all' was not made, and what was begun on it"):
            group.all_reduce(np.ones(2))
        failed.set()
        return group.error

    assert run_groups(2, body, on_error="report") == [None, None]
    words = "rank 0 of process group 'default' continues, as on_error='report' says, after: "
    testing.wait_for(lambda: words in caplog.text and why in caplog.text, "the log", DEADLINE)


def test_communicator_made_after_close_ends_wait_for_it():
    raised = []

    def connect():
        try:
            group.connect(timeout=DEADLINE)
        except (ValueError, ncclpy.NcclError) as error:
            raised.append(error)

    with ncclpy.faults("call=CommInitRank do=delay:300ms") as faults:
        group = ncclpy.ProcessGroup(LocalStore(), 0, 1, device=0, timeout=DEADLINE)
        thread = threading.Thread(target=connect)
        thread.start()
        testing.wait_for(lambda: faults.fired, "the call of NCCL", DEADLINE)
        group.close(DEADLINE)
        thread.join(DEADLINE)
    assert [type(error) for error in raised] == [ncclpy.NcclAborted] and "was closed" in str(raised[0])
    gone = lambda: "ncclpy-init" not in [each.name for each in threading.enumerate()]  # noqa: E731
    testing.wait_for(gone, "what makes it to end", DEADLINE)
