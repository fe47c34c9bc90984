"""CPU arrays that are staged through device memory, as GPUs need it; here on the host engine."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref

import numpy as np
import pytest
from coordinator_ranks import run_coordinators
from group_ranks import DEADLINE
from producer_streams import Gate, Side
from test_coordinator_streams import Streamed
from test_random_programs import run

import ncclpy
import testing
from ncclpy.coordinator import buffers


@pytest.fixture(autouse=True)
def copies_forced(host_engine):
    buffers.force_copies_to_device()
    yield
    buffers.force_copies_to_device(False)


@pytest.mark.parametrize(
    "seed", [*range(100, 106), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(106, 112))]
)
def test_random_program(seed):
    run(seed, fusion_bytes=(64 << 20, 2000, 0)[seed % 3])


def test_every_array_is_copied():
    def body(coordinator):
        rank = coordinator.rank
        arrays = [np.full(n, 1.0 + rank, np.float32) for n in (3, 5 << 20, 7)]
        for step in range(3):
            works = [coordinator.all_reduce(f"{i}", array, "max") for i, array in enumerate(arrays)]
            works.append(coordinator.broadcast("b", np.full(4, rank, np.int16), root=1))
            for work in works:
                work.wait(DEADLINE)
            assert works[-1].result().tolist() == [1] * 4
            assert all((array == 2).all() for array in arrays), step
        scattered = coordinator.reduce_scatter("s", np.arange(6.0), "average").result(DEADLINE)
        gathered = coordinator.all_gather("g", np.full(rank, rank, np.complex128)).result(DEADLINE)
        return scattered.tolist(), gathered.tolist()

    assert run_coordinators(2, body) == [([0, 1, 2], [1]), ([3, 4, 5], [1])]


def test_sparse_sum():
    def body(coordinator):
        rank = coordinator.rank
        indices = np.array([[rank, 5], [1, 2]], np.int64)
        got = []
        for step in range(3):  # reuses the staging slots
            values = np.full((2, 3), 1.0 + rank + step, np.float32)
            indices, sums = coordinator.all_reduce_sparse("x", indices, values).result(DEADLINE)
            got.append((indices.tolist(), sums[:, 0].tolist()))
            indices = np.array([[rank, 5], [1, 2]], np.int64)
        return got

    wanted = [([[0, 1, 5], [1, 1, 2]], [1.0 + s, 2.0 + s, 3.0 + 2 * s]) for s in range(3)]
    assert run_coordinators(2, body) == [wanted, wanted]


def test_scale_and_join():
    def body(coordinator):
        if coordinator.rank == 0:
            return coordinator.join(DEADLINE)
        array = np.array([4.0, 2.0])
        coordinator.all_reduce("x", array, "average", prescale=0.5).wait(DEADLINE)
        assert array.tolist() == [2.0, 1.0]
        coordinator.all_reduce("x", array, "prod").wait(DEADLINE)
        assert array.tolist() == [2.0, 1.0]
        return coordinator.join(DEADLINE)

    assert run_coordinators(2, body) == [1, 1]


class Falls:
    """A plane that aborts its group before a launch: after the copies in, which wait for the array."""

    def __init__(self, plane):
        self.plane = plane

    def __getattr__(self, name):
        return getattr(self.plane, name)

    def all_reduce(self, part, op, factor):
        return self.plane.fuse([Falling(self.plane, part)], part.datatype, op, factor, part.on_device)


def test_launch_that_fails_twice_ends_every_work():
    """An error during the handling of a failure is reported too, and every work ends."""

    class Broken(Falls):
        def fuse(self, *arguments):
            raise MemoryError("no event")

        def all_reduce(self, *arguments):
            raise MemoryError("no event")

        def abandon(self, error):
            raise MemoryError("nor for its end")

    def body(coordinator):
        if coordinator.rank == 0:
            coordinator._session.all_ranks.plane = Broken(coordinator._session.all_ranks.plane)
        coordinator.barrier("both").wait(DEADLINE)
        errors = [coordinator.all_reduce("x", np.ones(4)).exception(DEADLINE)]
        with pytest.raises(ncclpy.NcclAborted):
            for step in range(1000):  # until the coordinator has ended
                errors.append(coordinator.all_reduce(f"{step}", np.ones(4)).exception(DEADLINE))
        coordinator.close(DEADLINE)
        return [each is not None for each in errors]

    for found in run_coordinators(2, body, shut=False):
        assert all(found)


class Falling:
    def __init__(self, plane, part):
        self.plane, self.part = plane, part

    def __iter__(self):
        return iter((self.part, self.part.count))

    def __getitem__(self, place):  # called for the size of a launch
        self.plane.group.abort("it falls")
        return self.part.count


def test_arrays_being_copied_for_failed_launch_are_held():
    def body(coordinator):
        side, gate = Side(0, 64), Gate(0)
        coordinator.all_reduce("x", Streamed(side)).wait(DEADLINE)
        coordinator._session.all_ranks.plane = Falls(coordinator._session.all_ranks.plane)
        gate.shut(side.stream)
        array = Streamed(side)
        gone = weakref.ref(array)
        work = coordinator.all_reduce("x", array)
        del array
        with pytest.raises(ncclpy.NcclError, match="it falls"):
            work.wait(DEADLINE)
        del work  # and its error, as the traceback holds the frames
        for _ in range(5):
            gc.collect()
            time.sleep(0.04)
            assert gone() is not None, "the device may still read it"
        gate.open()
        testing.wait_for(lambda: (gc.collect(), gone() is None)[1], "the array's end")
        gate.close()
        coordinator.close(DEADLINE)
        side.close()
        return True

    assert run_coordinators(1, body, shut=False) == [True]


def test_end_during_staging_holds_arrays(controls):
    """Arrays being copied in are held until the copies are done, and every work ends."""
    meet = threading.Barrier(2)

    def body(coordinator):
        coordinator.all_reduce("warm", np.ones(4)).wait(DEADLINE)
        if coordinator.rank == 1:
            coordinator._session._run = dict.clear
        meet.wait(DEADLINE)
        works = [coordinator.all_reduce(f"{i}", np.ones(1 << 12)) for i in range(10)]
        meet.wait(DEADLINE)
        if coordinator.rank == 1:
            controls.lose(1)
        errors = [work.exception(DEADLINE) for work in works if coordinator.rank == 0]
        assert {testing.without_line(str(each)) for each in errors} <= {str(coordinator.error)}
        assert not errors or (isinstance(errors[0], ncclpy.NcclRemoteError) and errors[0].ranks == (1,))
        if coordinator.rank == 1:
            with contextlib.suppress(ncclpy.NcclAborted):  # its works were not asked; some may wait for others yet
                coordinator.close(DEADLINE)
        coordinator.close(DEADLINE)
        return True

    assert run_coordinators(2, body, shut=False) == [True, True]
