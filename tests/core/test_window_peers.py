"""Other ranks' parts of a window, as buffers; and the windows of a suspended communicator."""

from __future__ import annotations

import gc
import threading
import weakref

import ml_dtypes
import numpy as np
import pytest
from buffer_checks import rejects
from windows import World

import ncclpy
import testing
from ncclpy import bindings
from ncclpy.core.runtime import device as device_module
from ncclpy.testing import run_ranks

COUNT = 64


@pytest.fixture(autouse=True)
def peers():
    testing.need_function("ncclGetPeerDevicePointer")


class Watched(np.ndarray):
    """An array of which weak references can be made."""


def make_world(nranks, dtype=np.float32, **options):
    """Return a world in which each array is filled with its rank and can have weak references."""
    return World(nranks, COUNT, lambda rank: np.full(COUNT, rank, dtype).view(Watched), **options)


@pytest.fixture
def world(host_engine):
    with make_world(3, timeout=20) as three:
        yield three


def test_parts_of_all_ranks(world):
    for window in world.windows:
        for rank in range(3):
            part = window.peer(rank)
            view = np.asarray(part)
            assert view.dtype == np.float32 and view.shape == (COUNT,) and (view == rank).all()
            assert part.nbytes == 4 * COUNT and part.pointer == world.arrays[rank].ctypes.data
    np.asarray(world.windows[0].peer(2))[5] = 42
    assert world.arrays[2][5] == 42


@pytest.mark.parametrize("dtype", ["complex64", "bool", "int16", "bfloat16", "float64"])
def test_part_has_the_type_of_the_own_part(host_engine, dtype):
    with make_world(2, np.dtype(getattr(ml_dtypes, dtype, dtype))) as world:
        view = np.asarray(world.windows[0].peer(1))
        assert view.dtype == world.arrays[1].dtype and len(view) == COUNT and (view == world.arrays[1]).all()


def test_part_as_another_type(world):
    window = world.windows[0]
    assert np.asarray(window.peer(1, "int8")).tobytes() == world.arrays[1].tobytes()
    assert window.peer(1, np.complex128).count == COUNT // 2  # in NCCL's elements: two per complex number
    assert np.asarray(window.peer(1, np.complex128)).shape == (COUNT // 4,)
    assert window.peer(1, ncclpy.DataType.INT64).count == COUNT // 2
    with ncclpy.group():
        odd = [comm.window(np.zeros(6, np.uint8)) for comm in world.comms]
    with rejects("dtype", "the 6 bytes of the window are not a whole number of float32"):
        odd[0].peer(1, "float32")
    with rejects("dtype"):
        window.peer(1, "no type")


def test_wrong_ranks_and_closed_windows_are_refused(world):
    window = world.windows[0]
    for rank in (-1, 3):
        with rejects("rank", "does not exist"):
            window.peer(rank)
    with rejects("rank", kind=TypeError):
        window.peer("0")
    window.close()
    with pytest.raises(ValueError, match="closed"):
        window.peer(1)
    world.comms[1].abort()
    with pytest.raises((ncclpy.NcclAborted, ValueError)):
        world.windows[1].peer(0)
    world.comms[2].close()
    with pytest.raises(ValueError, match="closed"):
        world.windows[2].peer(0)
    with pytest.raises(ValueError, match="closed"):
        ncclpy.Window.__new__(ncclpy.Window).peer(0)


def test_argument_that_closes_the_window_is_noticed(world):
    window = world.windows[0]

    class Closing:
        def __index__(self):
            window.close()
            return 1

    with pytest.raises(ValueError, match="closed"):
        window.peer(Closing())


def test_parts_of_different_sizes(host_engine):
    """NCCL's documentation requires equal sizes; where a rank has less, no other rank reaches beyond its part."""
    testing.run_python(
        """
        import numpy as np
        import pytest

        import ncclpy
        from windows import World

        with World(2, make=lambda rank: np.zeros((64, 16)[rank], np.float32)) as world:
            with pytest.raises(ncclpy.NcclError, match="beyond the 64 bytes of rank 1"):
                world.windows[0].peer(1)
            assert world.windows[1].peer(0).count == 16
            with pytest.raises(ncclpy.NcclError, match="beyond the 64 bytes of rank 1"):
                world.comms[0].put_signal(world.arrays[0], world.windows[0], 1)
            with ncclpy.group(simulate=True):
                world.comms[0].put_signal(world.arrays[0][:4], world.windows[0], 1)
                world.comms[0].wait_signal(1)
            assert not world.arrays[1].any()
        """,
        env={"NCCLPY_HOST_CHECKS": None},  # which refuse such windows
        warm=True,
    )


def test_view_keeps_the_array_of_another_rank(world):
    """The array stays when its owner has closed the window and everything else, and is freed with the view."""
    view = np.asarray(world.windows[0].peer(1))
    gone = weakref.ref(world.arrays[1])
    del world.arrays[1]
    for comm in world.comms:
        comm.abort()
        comm.close()
    world.windows.clear()
    gc.collect()
    assert gone() is not None and (view == 1).all()
    del view
    gc.collect()
    assert gone() is None


def test_view_keeps_memory_that_was_freed(world):
    pointers = [bindings.mem_alloc(1 << 20) for _ in world.comms]
    with ncclpy.group():
        windows = [comm.window((p, 1 << 20, "uint8")) for comm, p in zip(world.comms, pointers, strict=True)]
    view = np.asarray(windows[0].peer(1))
    view[:] = 7
    for window in windows:
        window.close()
    for pointer in pointers:
        bindings.mem_free(pointer)
    again = [bindings.mem_alloc(1 << 20) for _ in range(8)]
    for pointer in again:
        np.asarray(ncclpy.Buffer(pointer, 1 << 20, "uint8"))[:] = 9
    assert (view == 7).all()  # no later allocation got that memory
    for pointer in again:
        bindings.mem_free(pointer)


def test_views_made_while_windows_are_closed_are_whole_or_refused(host_engine):
    """Threads view parts while the owners close them: each gets the part, or the error that it is closed."""
    with make_world(2, timeout=20) as world:
        array = np.zeros(COUNT, np.float32)
        over = threading.Event()
        problems = []
        seen = [0]
        current = list(world.windows)

        def look():
            while not over.is_set():
                try:
                    view = np.asarray(current[0].peer(0))
                    seen[0] += 1
                    assert len(view) == COUNT
                except ValueError as error:
                    if "closed" not in str(error):
                        problems.append(error)
                except BaseException as error:
                    problems.append(error)

        threads = [threading.Thread(target=look) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(20):
            current[0].close()
            with ncclpy.group():
                made = [comm.window(array) for comm in world.comms]
            current[0] = made[0]
            made[1].close()
        over.set()
        for thread in threads:
            thread.join()
        assert not problems and seen[0]


def in_processes(comm):
    """Write to each other's parts, and read the part of a rank that has closed its window."""
    pointer = bindings.mem_alloc(8 * COUNT)
    window = comm.window(ncclpy.Buffer(pointer, COUNT, "float64"))
    for peer in range(comm.nranks):
        np.asarray(window.peer(peer))[comm.rank] = 10 * comm.rank + peer
    comm.barrier()
    mine = np.asarray(window.buffer)[: comm.nranks].tolist()
    left = np.asarray(window.peer((comm.rank - 1) % comm.nranks))
    comm.barrier()
    window.close()
    bindings.mem_free(pointer)
    comm.barrier()
    return mine, left[: comm.nranks].tolist()


def polls_a_word(comm):
    """Poll a word in this rank's part of the window: a wait outside of NCCL, which can be ended."""
    pointer = bindings.mem_alloc(4096)
    window = comm.window(ncclpy.Buffer(pointer, 512, "int64"))
    word = np.asarray(window.buffer)
    word[0] = 0
    comm.barrier()
    np.asarray(window.peer((comm.rank + 1) % comm.nranks))[0] = comm.rank + 5
    testing.wait_for(lambda: word[0] != 0, "the word")
    comm.barrier()
    return int(word[0])


def parts_and_words(comm):
    return *in_processes(comm), polls_a_word(comm)


def test_parts_among_processes(host_engine):
    n = 3
    for rank, (mine, left, word) in enumerate(run_ranks(n, parts_and_words, processes=True)):
        assert mine == [10 * r + rank for r in range(n)]
        assert left == [10 * r + (rank - 1) % n for r in range(n)]
        assert word == (rank - 1) % n + 5


def test_view_is_freed_in_a_forked_child(host_engine):
    """The destructor of the view runs in a process without an engine."""
    testing.run_python(
        """
        import os, numpy as np, ncclpy
        comms = ncclpy.Communicator.init_all([0, 1])
        with ncclpy.group():
            windows = [comm.window(np.full(8, comm.rank)) for comm in comms]
        view = np.asarray(windows[0].peer(1))
        child = os.fork()
        if child == 0:
            ok = view[0] == 1
            del view
            os._exit(0 if ok else 1)
        assert os.waitpid(child, 0)[1] == 0
        for comm in comms:
            comm.abort()
        """,
        warm=True,
    )


# Suspended communicators.

UNGUARDED = {"config": ncclpy.Config(blocking=False), "timeout": 20}


@pytest.mark.parametrize("options", [{"timeout": 20}, {"abortable": True}], ids=str)
def test_communicator_that_shares_memory_with_a_guard_is_not_suspended(host_engine, options):
    """NCCL refuses a communicator that shares memory, so ncclpy refuses it beforehand, on every engine."""
    with make_world(1, **options) as world:
        with pytest.raises(ValueError, match="shares memory with its guard"):
            world.comms[0].suspend()
        world.comms[0].barrier()


def test_windows_stay_while_a_communicator_is_suspended(host_engine):
    with make_world(2, **UNGUARDED) as world:
        registrations = [comm.register(np.ones(COUNT)) for comm in world.comms]
        world.comms[0].signal(1)  # waited for after the resume
        view = np.asarray(world.windows[0].peer(1))
        together = threading.Barrier(2)

        def rank(rank):
            comm = world.comms[rank.rank]
            comm.suspend()
            assert comm.memory_stats()["suspended"] and comm.async_error() == ncclpy.Result.SUCCESS
            assert "suspended" in repr(comm) and not comm.closed
            together.wait(20)
            world.arrays[rank.rank][:] = 5 + rank.rank  # the user's memory stays usable
            together.wait(20)
            comm.resume()
            assert not comm.memory_stats()["suspended"]

        testing.run_threads(2, rank, comms=world.comms)
        assert (view == 6).all()
        world.comms[0].put_signal(world.arrays[0][:2], world.windows[0], 1)
        world.comms[1].wait_signal(0, count=2)
        assert view[:3].tolist() == [5, 5, 6]
        for made in (*registrations, *world.windows):
            made.close()


REFUSED = {
    "all_reduce": lambda comm, array, window: comm.all_reduce(array),
    "put_signal": lambda comm, array, window: comm.put_signal(array, window, 1),
    "signal": lambda comm, array, window: comm.signal(1),
    "wait_signal": lambda comm, array, window: comm.wait_signal(1),
    "window": lambda comm, array, window: comm.window(array),
    "register": lambda comm, array, window: comm.register(array),
    "peer": lambda comm, array, window: window.peer(1),
    "barrier": lambda comm, array, window: comm.barrier(),
    "split": lambda comm, array, window: comm.split(0),
    "finalize": lambda comm, array, window: comm.finalize(),
    "suspend": lambda comm, array, window: comm.suspend(),
}


def test_suspended_communicator_refuses_calls(host_engine):
    """Calls are refused before any of these functions of the engine is called."""
    with make_world(2, **UNGUARDED) as world:
        plan = ncclpy.Plan()
        with plan.record():
            for comm, array in zip(world.comms, world.arrays, strict=True):
                comm.all_reduce(array)
        with pytest.raises(ValueError, match="not suspended"):
            world.comms[0].resume()
        testing.run_threads(2, lambda rank: world.comms[rank.rank].suspend(), comms=world.comms)
        functions = (
            "AllReduce PutSignal Signal WaitSignal CommWindowRegister CommRegister CommSplit CommFinalize CommSuspend"
        )
        watched = "; ".join(f"call={name} nth=* do=delay:0us" for name in functions.split())
        with pytest.warns(RuntimeWarning, match="has not happened"), ncclpy.faults(watched) as faults:
            for call in REFUSED.values():
                with pytest.raises(ValueError, match=r"is suspended; call resume\(\)"):
                    call(world.comms[0], world.arrays[0], world.windows[0])
            with pytest.raises(ValueError, match="is suspended"):
                plan.launch()
            with pytest.raises(ValueError, match="is suspended"), ncclpy.group():
                world.comms[0].all_reduce(world.arrays[0])
            assert not faults.fired
        testing.run_threads(2, lambda rank: world.comms[rank.rank].resume(), comms=world.comms)
        plan.launch()
        assert (world.arrays[0] == 1).all()


@pytest.mark.parametrize("end", ["close", "abort", "windows"])
def test_suspended_communicator_can_be_closed_or_aborted(host_engine, end):
    with make_world(2, **UNGUARDED) as world:

        def rank(rank):
            comm = world.comms[rank.rank]
            comm.suspend()
            if end == "windows":
                world.windows[rank.rank].close()
                comm.resume()
                comm.barrier()
            getattr(comm, "abort" if end == "abort" else "close")()
            assert comm.closed

        testing.run_threads(2, rank, comms=world.comms)


def test_failed_suspension_leaves_the_communicator_ready(host_engine):
    with make_world(1) as world:
        comm = world.comms[0]
        with ncclpy.faults("call=CommSuspend do=error"), pytest.raises(ncclpy.NcclError):
            comm.suspend()
        comm.barrier()
        comm.suspend()
        with ncclpy.faults("call=CommResume do=error"), pytest.raises(ncclpy.NcclError):
            comm.resume()
        with pytest.raises(ValueError, match="suspended"):
            comm.barrier()
        comm.resume()
        comm.barrier()


def test_parts_on_any_engine(comms2):
    """On GPUs: where NCCL supports windows and the other GPU's memory can be reached."""
    testing.need_function("ncclCommWindowRegister")

    def rank(rank):
        comm = comms2[rank.rank]
        with device_module.using(comm.device):
            pointer = bindings.mem_alloc(4096)
            window = comm.window(ncclpy.Buffer(pointer, 1024, "float32", device=comm.device))
            testing.write(pointer, np.full(1024, comm.rank + 1, np.float32), comm.device)
            comm.barrier()
            if window.handle:
                part = window.peer(1 - comm.rank)
                assert part.count == 1024
                assert (testing.read(part.pointer, 1024, np.float32, comm.device) == 2 - comm.rank).all()
            comm.barrier()
            window.close()
            bindings.mem_free(pointer)

    testing.run_threads(2, rank, comms=comms2)
