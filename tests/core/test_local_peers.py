"""Ranks of one communicator in one process, closed one after the other where NCCL has the first one wait for all."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import numpy as np
import pytest

import ncclpy
import ncclpy.core.ending
import testing

#: NCCL before 2.31 does not wait in ncclCommFinalize; this fault plan makes the host engine wait there.
WAITS = "rank=0 call=CommFinalize nth=1 do=delay:{}"


@pytest.fixture
def look_early(monkeypatch):
    """Check after 0.1 s, not after 1 s, whether an end waits for ranks of this process."""
    monkeypatch.setattr(ncclpy.core.ending, "_UNKNOWN_PATIENCE", 0.1)


@pytest.mark.parametrize("options", [{}, {"timeout": 20}, {"config": ncclpy.Config(blocking=False)}])
def test_communicators_of_one_thread_are_closed_one_after_the_other(arrays, options):
    """With NCCL 2.31 and newer on GPUs the first close would wait for the second without end."""
    testing.need_devices(2)
    comms = ncclpy.Communicator.init_all([0, 1], **options)
    testing.wait_for(lambda: all([comm.is_ready() for comm in comms]), "two communicators")
    testing.all_ones(arrays, comms)
    with ncclpy.group():
        children = [comm.split(0) for comm in comms]
    testing.wait_for(lambda: all([child.is_ready() for child in children]), "their children")
    testing.all_ones(arrays, children)
    testing.run_with_deadline(lambda: [comm.close() for comm in [*children, *comms]], 20)
    assert all(comm.closed for comm in [*children, *comms])


def test_close_that_waits_for_a_local_rank_is_left_to_nccl(host_engine, arrays, comms2, look_early):
    testing.all_ones(arrays, comms2)
    with ncclpy.faults(WAITS.format("1500ms")):
        begun = time.monotonic()
        comms2[0].close()
        assert time.monotonic() - begun < 1.3 and comms2[0].closed
        comms2[0].close()
        comms2[0].abort()
        comms2[1].close()  # and this close waits for the end of the first
        assert time.monotonic() - begun > 1.4


def test_close_waits_for_issued_operations(host_engine, arrays, comms2, look_early):
    """While an operation may still touch its arrays, close() waits, even if other ranks of the process are open."""
    testing.all_ones(arrays, comms2)
    array = np.ones(3)
    stream = ncclpy.Stream(0)
    comms2[0].all_reduce(array, stream=stream)  # rank 1 calls late
    closing = threading.Thread(target=comms2[0].close)
    closing.start()
    closing.join(0.5)
    assert closing.is_alive()
    other = np.ones(3)
    comms2[1].all_reduce(other)
    closing.join(20)
    assert not closing.is_alive() and array[0] == 2
    stream.close()


def test_close_waits_for_a_rank_that_is_closed_at_the_same_time(host_engine, arrays, comms2, look_early):
    testing.all_ones(arrays, comms2)
    with ncclpy.faults(WAITS.format("800ms")):
        begun = time.monotonic()
        testing.close_all(comms2)
        assert time.monotonic() - begun > 0.7


def test_abort_ends_closes_that_wait_for_its_rank(host_engine, arrays, look_early):
    comms = ncclpy.Communicator.init_all([0, 1], timeout=60)
    testing.all_ones(arrays, comms)
    with ncclpy.faults("rank=0 call=CommFinalize nth=1 do=hang"):
        comms[0].close()
        assert comms[0].closed
        gone = weakref.ref(comms[0])
        begun = time.monotonic()
        comms[1].abort()
        del comms
        testing.wait_for(lambda: gc.collect() is not None and gone() is None, "its end")
        assert time.monotonic() - begun < 15


def test_closed_communicators_are_not_kept(host_engine):
    comms = ncclpy.Communicator.init_all([0, 1])
    gone = [weakref.ref(comm) for comm in comms]
    testing.close_all(comms)
    del comms
    gc.collect()
    assert [each() for each in gone] == [None, None]


#: Ends as strict as NCCL's. As the host engine is newer than 2.31, a close then waits for all ranks of the process.
STRICT = {"NCCLPY_HOST_STRICT_ENDS": "1"}
BEGIN = """
import faulthandler, threading, time, warnings
import numpy as np
import ncclpy, testing

faulthandler.dump_traceback_later(50, exit=True)
warnings.simplefilter("ignore")  # of faults that have not happened
comms = ncclpy.Communicator.init_all([0, 1], **{options})
testing.wait_for(lambda: all([comm.is_ready() for comm in comms]))
with ncclpy.group():
    for comm in comms:
        comm.all_reduce(np.ones(3))
never = ncclpy.faults("rank=1 call=CommFinalize nth=1+ do=hang")
"""
OPTIONS = ["{}", "{'abortable': True}", "{'config': ncclpy.Config(blocking=False)}"]


def run_strictly(code, options="{}"):
    done = testing.run_python(BEGIN.replace("{options}", options) + code, env=STRICT, warm=True)
    assert done.stdout == "closed\n", done.stdout + done.stderr


@pytest.mark.parametrize("options", OPTIONS)
def test_close_does_not_wait_for_a_local_rank_that_was_aborted(host_engine, options):
    """With NCCL 2.31 and newer on GPUs its end would wait for all ranks of the machine, without end."""
    code = """
array = np.ones(3)
kept = comms[1].register(array)
begun = time.monotonic()
with never as faults:
    comms[0].abort()
    comms[0] = None  # nor is it known any more
    comms[1].close()
    assert not faults.fired, faults.fired
assert time.monotonic() - begun < 5
try:
    comms[1].barrier()
except ValueError as error:
    print("closed" if "is closed" in str(error) else error)
"""
    run_strictly(code, options)


@pytest.mark.parametrize("options", OPTIONS[1:])
def test_abort_ends_the_closes_of_other_ranks(host_engine, options):
    code = """
with never as faults:
    closing = threading.Thread(target=comms[1].close)
    closing.start()
    testing.wait_for(lambda: faults.fired)
    comms[0].abort()
    closing.join(15)
    assert not closing.is_alive()
print("closed" if comms[1].closed else comms)
"""
    run_strictly(code, options)


def test_close_after_a_local_abort_waits_for_issued_operations(host_engine):
    code = """
others = ncclpy.Communicator.init_all([0, 1])
stream = ncclpy.Stream(1)
array = np.ones(3)
others[1].all_reduce(array, stream=stream)  # rank 0 comes late
comms[0].abort()
closing = threading.Thread(target=comms[1].close)
closing.start()
closing.join(0.3)
assert closing.is_alive()
others[0].all_reduce(np.ones(3))
closing.join(15)
assert not closing.is_alive() and array[0] == 2
print("closed" if comms[1].closed else comms)
"""
    run_strictly(code)


def test_wait_for_issued_operations_has_the_deadline_of_the_close(host_engine):
    code = """
others = ncclpy.Communicator.init_all([0, 1])
others[1].all_reduce(np.ones(3), stream=ncclpy.Stream(1))  # rank 0 never comes
comms[0].abort()
begun = time.monotonic()
try:
    comms[1].close(timeout=0.3)
except ncclpy.NcclTimeout:
    assert time.monotonic() - begun < 10
    print("closed" if comms[1].closed else comms, flush=True)
for comm in others:
    comm.abort()
"""
    run_strictly(code, OPTIONS[1])


def test_waiting_call_raises_before_the_abort_returns(host_engine, comm1):
    """The data are complete while another thread is still inside the abort: the waiting call raises at once."""
    ended = []

    def wait():
        with pytest.raises(ncclpy.NcclAborted):
            comm1.all_reduce(np.ones(4), np.zeros(4))
        ended.append(time.monotonic())

    with ncclpy.faults("call=AllReduce nth=1 at=run do=delay:200ms; call=CommAbort do=hang:1200ms"):
        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        time.sleep(0.1)
        comm1.abort()
    waiting.join(10)
    assert ended and time.monotonic() - ended[0] > 0.4
