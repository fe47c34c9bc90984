"""Early ends of operations and coordinators: the same error on every rank, and every work ends."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import time
import warnings

import numpy as np
import pytest
import thread_ranks
from coordinator_ranks import run_coordinators
from group_ranks import DEADLINE

import ncclpy
import testing
from ncclpy.bootstrap import LocalStore
from ncclpy.coordinator import Coordinator
from ncclpy.core.runtime import device as device_module


def test_overdue_operation_is_an_error_on_all():
    ended = threading.Barrier(3)

    def body(coordinator):
        if coordinator.rank != 1:
            work = coordinator.all_reduce("grad", np.ones(2))
            waits = r"is pending after 0.05 s; it waits for ranks? .*1 to bring it"
            with pytest.raises(ncclpy.NcclTimeout, match=waits):
                work.wait(0.05)
            error = work.exception(DEADLINE)
            assert isinstance(error, ncclpy.NcclTimeout) and error.missing == [1]
            assert "all_reduce 'grad': rank 1 did not bring it within 300 ms, ranks 0, 2 did" in str(error)
        ended.wait(DEADLINE)
        array = np.ones(1)
        coordinator.all_reduce("after", array).wait(DEADLINE)
        return array[0]

    assert run_coordinators(3, body, timeout=0.3) == [3.0] * 3


def test_stall_warning_lists_similar_names(caplog):
    caplog.set_level(logging.WARNING, "ncclpy.coordinator")

    def body(coordinator):
        mine = coordinator.all_reduce("layer/1/weight" if coordinator.rank else "layer/1/weights", np.ones(1))
        deadline = time.monotonic() + DEADLINE
        while len(caplog.records) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        other = coordinator.all_reduce("layer/1/weights" if coordinator.rank else "layer/1/weight", np.ones(1))
        mine.wait(DEADLINE)
        other.wait(DEADLINE)
        return coordinator.stats()["stalls"]

    assert run_coordinators(2, body, stall_after=0.2)[0] >= 2
    text = "\n".join(record.getMessage() for record in caplog.records)
    assert "all_reduce 'layer/1/weights': rank 1 has not brought it after 2" in text and "rank 0 waits for it" in text
    assert "\n    'layer/1/weights'  brought by rank 0\n    'layer/1/weight'   brought by rank 1" in text


@pytest.mark.parametrize("drain", [True, False])
def test_shutdown_ends_pending_operations_with_its_rank_and_reason(drain):
    called = [threading.Event(), threading.Event()]
    ready = threading.Barrier(3)

    def body(coordinator):
        rank = coordinator.rank
        done = np.ones(2)
        coordinator.all_reduce("done", done).wait(DEADLINE)
        if rank == 2:
            ready.wait(DEADLINE)
            coordinator._close(DEADLINE, drain, "the data are bad")
            with pytest.raises(ncclpy.NcclAborted, match="does nothing more"):
                coordinator.barrier("x")
            coordinator.close()  # which it is
            return None
        works = [coordinator.all_reduce("x", np.ones(2)), coordinator.barrier("y")]
        works[0].add_done_callback(lambda work: called[rank].set())
        ready.wait(DEADLINE)
        errors = [work.exception(DEADLINE) for work in works]
        assert {testing.without_line(str(error)) for error in errors} == {str(coordinator.error)}
        assert called[rank].wait(DEADLINE)
        for call in (
            lambda: coordinator.all_reduce("z", np.ones(1)),
            lambda: coordinator.join(1),
            lambda: coordinator.process_set([0, 1, 2], 1),
        ):
            with pytest.raises(ncclpy.NcclAborted, match="ended by rank 2: the data are bad") as raised:
                call()
            assert raised.value.__cause__ is coordinator.error
        coordinator.close(DEADLINE)
        return testing.without_line(str(errors[0]))

    texts = run_coordinators(3, body, shut=False)
    assert texts[0] == texts[1] == "coordinator 'coordinator' was ended by rank 2: the data are bad"


def test_two_ranks_that_shut_down_at_once_are_one_end_and_no_callback_is_lost():
    together = threading.Barrier(3)

    def body(coordinator):
        called, told = [], threading.Event()

        def note(work):
            called.append(work)
            if len(called) == 100:
                told.set()

        works = [coordinator.all_reduce(f"{coordinator.rank}/{i}", np.ones(2)) for i in range(100)]
        for work in works:
            work.add_done_callback(note)
        together.wait(DEADLINE)
        if coordinator.rank < 2:
            with contextlib.suppress(ncclpy.NcclAborted):  # unless the other one was first
                coordinator.close(DEADLINE, reason=f"rank {coordinator.rank} says so")
        texts = {str(work.exception(DEADLINE)) for work in works}
        assert told.wait(DEADLINE) and {id(work) for work in called} == {id(work) for work in works}
        coordinator.close(DEADLINE)
        return texts

    first, *others = run_coordinators(3, body, shut=False)
    assert others == [first] * 2 and len(first) == 1
    assert any(f"ended by rank {rank}: rank {rank} says so" in text for rank in (0, 1) for text in first)


def test_shutdown_raises_when_own_operations_did_not_run():
    brought = threading.Barrier(2)

    def body(coordinator):
        array = np.ones(2)
        if coordinator.rank == 0:
            work = coordinator.all_reduce("alone", array)
            brought.wait(DEADLINE)
            with pytest.raises(ncclpy.NcclAborted, match="Not all ranks had brought 'alone': these did not run"):
                coordinator.close(DEADLINE)
            assert isinstance(work.exception(DEADLINE), ncclpy.NcclAborted)
        else:
            brought.wait(DEADLINE)
        coordinator.close(DEADLINE)  # this rank had brought nothing, or knows of it

    run_coordinators(2, body, shut=False)


def test_shutdown_without_draining_raises_nothing():
    brought = threading.Barrier(2)

    def body(coordinator):
        work = coordinator.all_reduce(f"of rank {coordinator.rank}", np.ones(2))
        brought.wait(DEADLINE)
        coordinator.abort(timeout=DEADLINE)
        return type(work.exception(DEADLINE))

    assert run_coordinators(2, body, shut=False) == [ncclpy.NcclAborted] * 2


def test_draining_shutdown_runs_operations_that_all_brought():
    """The first operation waits for its communicator: mostly it is not yet launched when rank 2 shuts down."""
    brought = threading.Barrier(3)

    def body(coordinator):
        array = np.ones(2)
        work = coordinator.all_reduce("all", array)
        brought.wait(DEADLINE)
        if coordinator.rank == 2:
            coordinator.close(DEADLINE, reason="enough")
        assert work.exception(DEADLINE) is None
        coordinator.close(DEADLINE)
        return array.tolist()

    assert run_coordinators(3, body, shut=False) == [[3, 3]] * 3


def test_exception_in_with_block_ends_coordinator_on_all():
    brought = threading.Event()

    def body(coordinator):
        if coordinator.rank == 0:
            with pytest.raises(KeyError), coordinator:
                brought.wait(DEADLINE)
                raise KeyError("lost")
            return ""
        work = coordinator.all_reduce("x", np.ones(1))
        brought.set()
        return str(work.exception(DEADLINE))

    def whole(coordinator):
        text = body(coordinator)
        coordinator.close(DEADLINE)
        return text

    _, text = run_coordinators(2, whole, shut=False)
    assert "ended by rank 0: KeyError: 'lost'" in text


def test_lost_rank_is_named(controls):
    ready = threading.Barrier(3)

    def body(coordinator):
        works = [coordinator.all_reduce(f"{i}", np.ones(1)) for i in range(3)] if coordinator.rank else []
        ready.wait(DEADLINE)
        if coordinator.rank == 0:
            controls.lose(0)
        for work in works:
            error = work.exception(DEADLINE)
            assert isinstance(error, ncclpy.NcclRemoteError) and error.ranks == (0,)
            assert "rank 0 is gone" in str(error)
        with pytest.raises(ncclpy.NcclAborted, match=r"rank 0 is gone|its control plane is closed"):
            while True:
                coordinator.barrier("again").wait(DEADLINE)
                time.sleep(0.01)
        coordinator.close(DEADLINE)
        return True

    assert run_coordinators(3, body, shut=False) == [True] * 3


def test_shutdown_after_a_known_loss_raises_when_own_operations_did_not_run(controls):
    """Nothing has given the program the error before, and its array is not reduced."""

    def body(coordinator):
        coordinator.all_reduce("first", np.ones(1)).wait(DEADLINE)
        if coordinator.rank:
            coordinator.all_reduce("second", np.ones(1))
        ready.wait(DEADLINE)
        if coordinator.rank == 0:
            controls.lose(0)
        testing.wait_for(lambda: coordinator._session._over.is_set(), "the end")
        if coordinator.rank:
            with pytest.raises(ncclpy.NcclRemoteError, match=r"rank 0 is gone.*Not all ranks had brought 'second'"):
                coordinator.close(DEADLINE)
        coordinator.close(DEADLINE)
        return True

    ready = threading.Barrier(3)
    assert run_coordinators(3, body, shut=False) == [True] * 3


def test_call_of_idle_rank_raises_class_of_failure_once(controls):
    """A rank that had brought nothing raises the same class as the others; then its program knows of the failure."""

    def body(coordinator):
        coordinator.all_reduce("first", np.ones(1)).wait(DEADLINE)
        ready.wait(DEADLINE)
        if coordinator.rank == 0:
            controls.lose(0)
        else:
            testing.wait_for(lambda: coordinator._session.error is not None, "the end")
            for kind in (ncclpy.NcclRemoteError, ncclpy.NcclAborted):
                with pytest.raises(kind, match="rank 0 is gone"):
                    coordinator.barrier("again")
        coordinator.close(DEADLINE)
        return True

    ready = threading.Barrier(3)
    assert run_coordinators(3, body, shut=False) == [True] * 3


@pytest.mark.parametrize("sizes", [[1 << 16], [1, 2, 3]])
def test_running_operation_ends_with_lost_rank(controls, sizes):
    """Rank 1 does not launch an operation that all have brought, since it has died; unfused and fused."""

    def body(coordinator):
        # NCCL connects the ranks in their first operation, which would keep rank 0 in the launch.
        coordinator.all_reduce("first", np.ones(1)).wait(DEADLINE)
        if coordinator.rank == 1:
            coordinator._session._run = dict.clear
        names, arrays = [f"{size}" for size in sizes], [np.ones(size) for size in sizes]
        work = coordinator.grouped_all_reduce(names, arrays)[-1]
        if coordinator.rank == 1:
            testing.wait_for(lambda: not coordinator._session.pending, "for all ranks to bring the operations")
            controls.lose(1)
        else:
            error = work.exception(DEADLINE)
            assert testing.without_line(str(error)) == str(coordinator.error)
            assert isinstance(error, ncclpy.NcclRemoteError) and error.ranks == (1,)
            assert "rank 1 is gone" in str(error)
        coordinator.close(DEADLINE)
        return True

    assert run_coordinators(2, body, shut=False) == [True] * 2


def test_launch_that_finds_its_group_ended_has_the_error_of_the_coordinator(controls):
    """A launch may begin while the session ends the group of its data plane: users do not know that group."""

    def body(coordinator):
        coordinator.all_reduce("first", np.ones(1)).wait(DEADLINE)
        group = coordinator._session._members[0].plane.group
        if coordinator.rank == 1:
            coordinator._session._run = dict.clear
        work = coordinator.all_reduce("in flight", np.ones(1))
        if coordinator.rank == 1:
            testing.wait_for(lambda: not coordinator._session.pending, "for both ranks to bring the operation")
            controls.lose(1)
        else:
            work.exception(DEADLINE)
            with pytest.raises(ncclpy.NcclRemoteError) as caught:
                group.all_reduce(np.ones(1))
            assert caught.value is coordinator.error
        coordinator.close(DEADLINE)
        return True

    assert run_coordinators(2, body, shut=False) == [True] * 2


def test_failed_launch_ends_coordinator_on_all(monkeypatch):
    from ncclpy.coordinator import calls

    def body(coordinator):
        if coordinator.rank == 0:
            monkeypatch.setattr(calls.AllGather, "launch", _no_memory)
        coordinator.barrier("ready").wait(DEADLINE)
        error = coordinator.all_gather("x", np.ones(3)).exception(DEADLINE)
        later = coordinator.error
        deadline = time.monotonic() + DEADLINE
        while later is None and time.monotonic() < deadline:
            later = coordinator.error
        coordinator.close(DEADLINE)
        return str(error), str(later)

    for error, later in run_coordinators(2, body, shut=False):
        assert "could not be launched: MemoryError" in later
        assert "MemoryError" in error


def _no_memory(call, plane, owns, absent):
    raise MemoryError("no space for the result")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("warning", ["always", "error"])
def test_dropped_coordinator_is_reported(warning):
    meet = threading.Barrier(2)

    def rank(number):
        with device_module.using(number):
            coordinator = Coordinator((store, number, 2))
            coordinator.barrier("x").wait(DEADLINE)
            meet.wait(DEADLINE)
            if number == 0:
                del coordinator
                gc.collect()
                return
            try:
                found.append(str(coordinator.barrier("y").exception(DEADLINE)))
            except ncclpy.NcclAborted as error:
                found.append(str(error))
            coordinator.close(DEADLINE)

    store, found = LocalStore(), []
    with warnings.catch_warnings(record=True) as caught:  # of all threads: the warning hook belongs to the process
        warnings.simplefilter(warning)
        thread_ranks.run_ranks(2, rank, DEADLINE)
    said = [str(each.message) for each in caught if each.category is ResourceWarning]
    assert warning == "error" or (len(said) == 1 and "was never closed" in said[0])
    [heard] = found
    assert "dropped without close" in heard


def test_missing_ranks_are_named():
    with pytest.raises(ncclpy.NcclTimeout, match=r"rank 1 .*did not arrive .*within 200 ms") as raised:
        Coordinator((LocalStore(), 0, 2), timeout=0.2)
    assert raised.value.missing == [1]


@pytest.mark.parametrize(
    "options, error, said",
    [
        ({"engine": "mpi"}, ValueError, "'mpi' .*: pass an MPI communicator as the transport"),
        ({"engine": "gloo"}, ValueError, "expected 'auto'"),
        ({"engine": "nccl"}, ncclpy.NcclUnsupported, "got 'nccl', but 'host' is loaded"),
        ({"fusion_bytes": -1}, ValueError, "fusion_bytes"),
    ],
)
def test_options_are_checked(host_engine, options, error, said):
    with pytest.raises(error, match=said):
        Coordinator((LocalStore(), 0, 1), **options)


@pytest.mark.parametrize(
    "transport, error, said",
    [
        (None, TypeError, "expected a ProcessGroup, "),
        ((LocalStore(), 2, 2), ValueError, "rank 2 of 2"),
        ((LocalStore(), 0), TypeError, "expected a ProcessGroup, "),
    ],
)
def test_transports_are_checked(transport, error, said):
    with pytest.raises(error, match=said):
        Coordinator(transport)


def test_nothing_is_left_behind():
    def body(coordinator):
        part = coordinator.process_set([0, 1], DEADLINE)
        part.barrier("x").wait(DEADLINE)
        coordinator.grouped_all_reduce(["a", "b"], [np.ones(1), np.ones(2)])
        return True

    run_coordinators(2, body)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith("ncclpy-coordinator")]
        if not left:
            break
        time.sleep(0.01)
    assert not left
