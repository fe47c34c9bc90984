"""memory.pool: arrays in segments of a pool, and windows over them after all ranks have compared their allocations."""

from __future__ import annotations

import gc
import threading
import time

import numpy as np
import pytest
from leak_check import is_allocated

import ncclpy
import testing
from ncclpy import memory
from ncclpy.bootstrap import LocalStore
from ncclpy.memory.pool import difference


def run(nranks, body, **options):
    """Call ``body(comm)`` in one thread per rank, each with a communicator that can be ended."""
    return testing.run_threads(nranks, lambda rank: body(rank.init(timeout=30, **options)))


def test_allocations_inside_belong_to_the_pool(comm1, registry, host_engine):
    pool = memory.pool("numpy", comm1)
    outside = memory.empty(10, device=comm1.device)
    with pool:
        first = memory.empty(100, device=comm1.device)
        with pool:  # again
            second = memory.empty(200, device=comm1.device)
    third = pool.empty((5, 2), "float64")
    assert (third.shape, third.dtype) == ((5, 2), np.float64)
    at = [array.__array_interface__["data"][0] for array in (first, second, third)]
    assert pool.segments == [(at[0], 400, comm1.device), (at[1], 800, comm1.device), (at[2], 80, comm1.device)]
    comm1.all_reduce(first)
    assert set(pool.segments) < set(registry.registered(comm1)) and outside is not None
    assert pool.windows == [] and pool.commit() == [] and not pool.symmetric
    pool.close()
    pool.close()
    assert pool.closed and pool.resource is None
    first[:] = 7  # arrays outlive the pool
    for use in (pool.__enter__, pool.commit, lambda: pool.empty(3)):
        with pytest.raises(ValueError, match="closed"):
            use()


def test_other_threads_are_not_inside_the_pool(comm1, host_engine):
    with memory.pool("numpy", comm1) as pool:
        arrays = []
        thread = threading.Thread(target=lambda: arrays.append(memory.empty(10, device=0)))
        thread.start()
        thread.join()
        assert pool.segments == [] and arrays


def test_nested_pools(comm1, host_engine):
    outer, inner = memory.pool("numpy", comm1), memory.pool("numpy", comm1)
    with outer:
        a = memory.empty(1)
        with pytest.raises(KeyError), inner:
            b = memory.empty(2)
            raise KeyError
        c = memory.empty(3)
    assert [[n for _, n, _ in pool.segments] for pool in (outer, inner)] == [[4, 12], [8]]
    del a, b, c


def test_windows_are_registered_when_the_block_ends(host_engine):
    def body(comm):
        pool = memory.pool("numpy", comm, symmetric=True)
        with pool:
            arrays = [memory.empty(n, device=comm.device) for n in (100, 300)]
            assert pool.windows == []
        assert [window.buffer.nbytes for window in pool.windows] == [400, 1200] and all(w.handle for w in pool.windows)
        for array in arrays:
            array[:] = comm.rank + 1
            comm.all_reduce(array)
            assert (array == 6).all()
        before = pool.windows
        with pool:  # registers nothing twice
            pass
        assert pool.windows == before and pool.commit() == []
        with pool:
            arrays.append(memory.empty(7, device=comm.device))
        assert pool.windows[:2] == before and len(pool.windows) == 3
        comm.barrier()
        arrays[2][:] = comm.rank
        comm.barrier()
        seen = [np.asarray(pool.windows[2].peer(rank, "float32")).tolist() for rank in range(3)]
        comm.barrier()
        pool.close()
        assert all(window.closed for window in before)
        return seen

    for seen in run(3, body):
        assert seen == [[float(rank)] * 7 for rank in range(3)]


def test_world_of_one_needs_no_deadline(comm1, host_engine):
    pool = memory.pool("numpy", comm1, symmetric=True)
    array = pool.empty(100)
    (window,) = pool.commit()
    assert window.buffer.nbytes == 400 and pool.windows == [window]
    comm1.all_reduce(array)
    pool.close()
    assert window.closed


@pytest.mark.parametrize(
    "sizes, words",
    [
        ({1: [100, 200], 2: [100, 300]}, "number 1 has 200 bytes on rank 0 and 300 bytes on rank 2"),
        (
            {1: [100]},
            "number 1 has 200 bytes on rank 0 and none on rank 1 (of 2 and 1 that have no window)",
        ),
        ({1: [100, 200, 5]}, "number 2 has none on rank 0 and 5 bytes on rank 1"),
        ({2: []}, "number 0 has 100 bytes on rank 0 and none on rank 2"),
        ({2: [200, 100]}, "number 0 has 100 bytes on rank 0 and 200 bytes on rank 2"),
    ],
)
def test_difference_is_an_error_on_every_rank(host_engine, sizes, words):
    def body(comm):
        pool = memory.pool("numpy", comm, symmetric=True)
        pool.__enter__()
        arrays = [memory.empty(n, "uint8", device=comm.device) for n in sizes.get(comm.rank, [100, 200])]
        begun = time.monotonic()
        with pytest.raises(ValueError, match="different segments") as caught:
            pool.__exit__(None, None, None)
        assert time.monotonic() - begun < 10
        assert words in str(caught.value) and "nothing was registered" in str(caught.value)
        assert pool.windows == []
        # The pool is unchanged: once the lists are the same, the commit succeeds.
        del arrays
        gc.collect()
        kept = pool.empty(64, "uint8")
        assert len(pool.commit()) == 1
        comm.barrier()  # the communicator is still usable
        pool.close()
        return kept

    run(3, body)


def test_rank_that_does_not_commit_is_a_timeout(host_engine):
    def body(comm):
        pool = memory.pool("numpy", comm, symmetric=True)
        array = pool.empty(10)
        comm.barrier()
        if comm.rank == 0:
            begun = time.monotonic()
            with pytest.raises(ncclpy.NcclTimeout):
                pool.commit(timeout=0.5)
            assert 0.3 < time.monotonic() - begun < 5
            assert pool.windows == []
            waited.set()
        assert waited.wait(testing.LONG)  # an earlier abort would end the wait instead
        pool.close()
        comm.abort()
        return array

    waited = threading.Event()
    run(2, body)


def test_exception_registers_nothing(comm1, host_engine):
    pool = memory.pool("numpy", comm1, symmetric=True)
    with pytest.raises(KeyError), pool:
        array = memory.empty(10)
        raise KeyError
    assert pool.windows == [] and len(pool.segments) == 1
    assert len(pool.commit()) == 1 and array is not None
    pool.close()


def test_window_keeps_its_segment(comm1, registry, host_engine):
    """Whatever the framework frees, the memory is freed with the window."""
    pool = memory.pool("numpy", comm1, symmetric=True)
    with pool:
        array = memory.empty(5000)
    pointer = array.__array_interface__["data"][0]
    del array
    assert not registry.drain(0.2) and is_allocated(pointer) and pool.segments == []
    assert registry.counters()["leaving"] == 1 and len(pool.windows) == 1
    pool.close()
    assert registry.drain() and not is_allocated(pointer)


@pytest.mark.parametrize("end", ["close", "abort"])
def test_windows_end_with_their_communicator(registry, host_engine, end):
    comm = ncclpy.Communicator.init_all([0], abortable=True)[0]
    pool = memory.pool("numpy", comm, symmetric=True)
    with pool:
        array = memory.empty(5000)
    pointer = array.__array_interface__["data"][0]
    getattr(comm, end)()
    array[:] = 3
    del array
    pool.close()
    del pool
    gc.collect()
    assert registry.drain() and not is_allocated(pointer)


def symmetric_pool(comm, count=3):
    """Return a symmetric pool over `comm`, and `count` arrays in it."""
    pool = memory.pool("numpy", comm, symmetric=True)
    return pool, [pool.empty(10 + n) for n in range(count)]


def test_close_that_fails_closes_the_other_windows(comm1, host_engine):
    class Stubborn:
        """A window that cannot be closed at the first try."""

        def __init__(self, window):
            self.window, self.tried = window, False

        closed = property(lambda self: self.window.closed)

        def close(self):
            if not self.tried:
                self.tried = True
                raise ncclpy.NcclError(f"not {self.window.buffer.nbytes}")
            self.window.close()

    pool, arrays = symmetric_pool(comm1, 4)
    windows = pool.commit()
    pool._windows = {
        number: Stubborn(window) if n < 2 else window for n, (number, window) in enumerate(pool._windows.items())
    }
    with pytest.raises(ncclpy.NcclError, match="not 40") as caught:
        pool.close()
    assert caught.value.__notes__ == ["also NcclError: not 44"] and arrays
    assert [window.closed for window in windows] == [False, False, True, True] and pool.closed
    pool.close()
    assert all(window.closed for window in windows)


def test_pool_closed_while_a_commit_waits_for_its_turn(comm1, host_engine):
    pool, arrays = symmetric_pool(comm1)
    pool._check_open()
    refused = []

    def commit():
        with pytest.raises(ValueError, match="closed"):
            pool.commit()
        refused.append(True)

    with pool._lock:
        thread = threading.Thread(target=commit)
        thread.start()
        time.sleep(0.1)  # the thread has seen that the pool is open
        pool.close()
    thread.join(10)
    assert refused and pool.windows == [] and arrays


@pytest.mark.parametrize("call", ["close", "commit"])
@pytest.mark.parametrize("late", [False, True])
def test_signal_handler_in_the_middle_of_a_commit(host_engine, call, late):
    """The commit is in the main thread, where handlers run; the other rank commits only after the handler."""
    testing.run_python(
        f"""
        import signal, threading, time
        import ncclpy
        from ncclpy import memory
        ncclpy.use("host")
        comms = ncclpy.Communicator.init_all([0, 1], timeout=20)
        pools = [memory.pool("numpy", comm, symmetric=True) for comm in comms]
        arrays = [pool.empty(10) for pool in pools]
        first, said, handled, seen = pools[0], [], threading.Event(), []

        def handler(*_):
            if not handled.is_set():
                try:
                    first.{call}()
                except RuntimeError as error:
                    said.append(str(error))
                handled.set()

        def other():
            if not {late}:
                time.sleep(0.15)
                signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
                handled.wait(10)
            seen.extend(pools[1].commit())

        signal.signal(signal.SIGUSR1, handler)
        signal.alarm(30)
        if {late}:  # beneath the making of windows
            compare = first._compare
            def compare_and_raise(*arguments):
                compare(*arguments)
                signal.raise_signal(signal.SIGUSR1)
            first._compare = compare_and_raise
        thread = threading.Thread(target=other)
        thread.start()
        try:
            made = first.commit()
        except ValueError as error:
            assert "closed" in str(error) and "{call}" == "close"
        else:
            assert len(made) == 1 and "{call}" == "commit"
        thread.join()
        assert len(seen) == 1 and handled.is_set()
        assert len(first.windows) == ("{call}" == "commit") and first.closed == ("{call}" == "close")
        assert len(said) == ("{call}" == "commit")
        for pool in pools:
            pool.close()
        for comm in comms:
            comm.abort()
        """,
        warm=True,
    )


def test_pool_of_a_process_group(host_engine):
    store = LocalStore()

    def body(rank):
        with ncclpy.ProcessGroup(store, rank.rank, 2, device=rank.device, timeout=30) as group:
            pool = memory.pool("numpy", group, symmetric=True)
            with pool:
                array = memory.empty(256, device=rank.device)
            assert len(pool.windows) == 1
            array[:] = rank.rank
            group.all_reduce(array).wait(20)
            assert (array == 1).all()
            odd = pool.empty(8 + rank.rank)
            with pytest.raises(ValueError, match="number 0 has 32 bytes on rank 0 and 36 bytes on rank 1"):
                pool.commit(20)
            group.barrier().wait(20)
            pool.close()
            return odd

    testing.run_threads(2, body)


def test_many_segments(host_engine):
    def body(comm):
        pool = memory.pool("numpy", comm, symmetric=True)
        with pool:
            arrays = [memory.empty(n + 1, "uint8", device=comm.device) for n in range(50)]
        assert [window.buffer.nbytes for window in pool.windows] == list(range(1, 51))
        comm.barrier()
        pool.close()
        return arrays

    run(2, body)


def test_bad_arguments(comms2, host_engine):
    comm = comms2[0]
    for arguments, error, words in (
        (("nonsense", comm), ValueError, "'nonsense' is none of 'torch', 'cupy', 'numpy'"),
        (("rmm", comm), ValueError, "'rmm' is none of"),
        (("torch", comm), ncclpy.NcclUnsupported, "host engine does not have; memory.pool"),
        (("cupy", comm), ncclpy.NcclUnsupported, "host engine does not have"),
        (("numpy", 5), TypeError, "expected a Communicator or a ProcessGroup, got 5"),
    ):
        with pytest.raises(error, match=words):
            memory.pool(*arguments)
    with pytest.raises(ValueError, match="abortable=True"):
        memory.pool("numpy", comm, symmetric=True)
    shown = repr(memory.pool("numpy", comm))
    assert "numpy on device 0, 0 segments, 0 windows" in shown


def test_differences_in_words():
    assert "rank 1 has 2 windows in this pool already, rank 0 has 1" in difference([(1, [5]), (2, [5])])
    assert "number 0 has 5 bytes on rank 0 and 6 bytes on rank 1" in difference([(0, [5, 1]), (0, [6, 1])])
