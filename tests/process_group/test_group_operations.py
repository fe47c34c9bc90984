"""Every operation of a process group, on arrays, lists, and parts of different sizes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from group_ranks import DEADLINE, run_groups

import ncclpy
import testing
from ncclpy.bootstrap import LocalStore

N = 4


def values(rank, count=6, dtype=np.float32):
    return (np.arange(count) % 5 + 1 + rank).astype(dtype)


@pytest.fixture(scope="module")
def size():
    return min(N, max(2, ncclpy.device_count())) if ncclpy.library().engine == "cuda" else N


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("op", ["sum", "max", "min", "prod", "avg"])
def test_all_reduce(arrays, size, op, in_place):
    def body(group):
        send = arrays.make(values(group.rank), group.device)
        recv = send if in_place else arrays.make(np.zeros(6, np.float32), group.device)
        work = group.all_reduce(arrays.argument(send), None if in_place else arrays.argument(recv), op)
        work.wait(DEADLINE)
        return arrays.read(recv)

    stacked = np.stack([values(rank) for rank in range(size)])
    wanted = {"sum": np.sum, "max": np.max, "min": np.min, "prod": np.prod, "avg": np.mean}[op](stacked, axis=0)
    for result in run_groups(size, body):
        np.testing.assert_allclose(result, wanted, rtol=1e-6)


@pytest.mark.parametrize("dtype", testing.DTYPES.values(), ids=str)
def test_all_reduce_of_each_type(arrays, size, dtype):
    op = "max" if dtype.itemsize == 1 and dtype.kind not in "iu" else "sum"  # float8 sums are not exact

    def body(group):
        send = arrays.make(values(group.rank, dtype=dtype), group.device)
        group.all_reduce(arrays.argument(send), op=op).wait(DEADLINE)
        return arrays.read(send)

    for result in run_groups(size, body):
        assert result.dtype == dtype
        everyone = [values(rank, dtype=dtype).astype(np.float64) for rank in range(size)]
        assert (result.astype(np.float64) == (np.max if op == "max" else np.sum)(everyone, axis=0)).all()


def test_reductions_of_bool_and_complex(host_engine):
    def body(group):
        flags = np.array([group.rank == 0, False, True])
        group.all_reduce(flags).wait(DEADLINE)
        numbers = np.array([1 + 2j, group.rank], np.complex64)
        group.all_reduce(numbers).wait(DEADLINE)
        with pytest.raises(ValueError, match="avg of bool"):
            group.all_reduce(flags, op="avg")
        with pytest.raises(ncclpy.NcclUnsupported, match="no bitwise reductions"):
            group.all_reduce(flags, op="band")
        return flags.tolist(), numbers.tolist(), group.seq

    assert run_groups(3, body) == [([True, False, True], [3 + 6j, 3 + 0j], 2)] * 3


@pytest.mark.parametrize("as_list", [False, True])
def test_all_gather_and_reduce_scatter(arrays, size, as_list):
    def body(group):
        rank = group.rank
        part = arrays.make(values(rank, 3), group.device)
        whole = arrays.make(np.zeros(3 * size, np.float32), group.device)
        parts = [arrays.argument(whole[3 * r : 3 * r + 3]) for r in range(size)] if as_list else arrays.argument(whole)
        assert group.all_gather(arrays.argument(part), parts).result(DEADLINE) is parts
        gathered = arrays.read(whole)
        assert group.reduce_scatter(parts, arrays.argument(part), "sum").exception(DEADLINE) is None
        return gathered, arrays.read(part)

    wanted = np.concatenate([values(rank, 3) for rank in range(size)])
    for rank, (gathered, part) in enumerate(run_groups(size, body)):
        assert (gathered == wanted).all()
        assert (part == size * wanted[3 * rank : 3 * rank + 3]).all()


def test_uneven_parts(arrays, size):
    def body(group):
        rank, device = group.rank, group.device
        mine = arrays.make(values(rank, rank + 1), device)
        lists = [arrays.make(np.zeros(r + 1, np.float32), device) for r in range(size)]
        group.all_gather(arrays.argument(mine), [arrays.argument(each) for each in lists]).wait(DEADLINE)
        # All-to-all by counts: rank i sends j + 1 elements to rank j, so rank j gets j + 1 of each.
        send = arrays.make(np.full(sum(range(1, size + 1)), rank, np.float32), device)
        recv = arrays.make(np.full((rank + 1) * size, -1, np.float32), device)
        group.all_to_all(
            arrays.argument(send), arrays.argument(recv), [r + 1 for r in range(size)], [rank + 1] * size
        ).wait(DEADLINE)
        return [arrays.read(each) for each in lists], arrays.read(recv)

    for rank, (lists, recv) in enumerate(run_groups(size, body)):
        assert all((each == values(r, r + 1)).all() for r, each in enumerate(lists))
        assert (recv == np.repeat(np.arange(size), rank + 1)).all()


@pytest.mark.parametrize("root", [0, 1])
def test_operations_with_root(arrays, size, root):
    def body(group):
        rank, device = group.rank, group.device
        sent = arrays.make(values(rank, 4), device)
        group.broadcast(arrays.argument(sent), root=root).wait(DEADLINE)
        reduced = arrays.make(np.zeros(4, np.float32), device)
        work = group.reduce(arrays.argument(sent), arrays.argument(reduced) if rank == root else None, root=root)
        work.wait(DEADLINE)
        assert (work.result() is None) == (rank != root)
        gathered = arrays.make(np.zeros(4 * size, np.float32), device)
        group.gather(arrays.argument(sent), arrays.argument(gathered) if rank == root else None, root).wait(DEADLINE)
        part = arrays.make(np.zeros(4, np.float32), device)
        group.scatter(arrays.argument(gathered) if rank == root else None, arrays.argument(part), root).wait(DEADLINE)
        return arrays.read(sent), arrays.read(reduced), arrays.read(gathered), arrays.read(part)

    for rank, (sent, reduced, gathered, part) in enumerate(run_groups(size, body)):
        assert (sent == values(root, 4)).all() and (part == sent).all()
        assert (reduced == (size if rank == root else 0) * sent).all()
        assert (gathered == (np.tile(sent, size) if rank == root else 0)).all()


@pytest.mark.parametrize("check", ["off", "first", "always"])
def test_gather_and_scatter_take_parts_of_any_size_on_the_root_alone(arrays, size, check):
    root = 1

    def body(group):
        rank, device = group.rank, group.device
        found = []
        for lengths in ([3] * size, list(range(size))):  # equal parts, as in one buffer; different ones, one empty
            mine = arrays.make(values(rank, lengths[rank]), device)
            parts = [arrays.make(np.zeros(each, np.float32), device) for each in lengths]
            listed = [arrays.argument(part) for part in parts] if rank == root else None
            assert group.gather(arrays.argument(mine), listed, root).result(DEADLINE) is listed
            back = arrays.make(np.zeros(lengths[rank], np.float32), device)
            group.scatter(listed, arrays.argument(back), root).wait(DEADLINE)
            found.append(([arrays.read(part).tolist() for part in parts], arrays.read(back).tolist()))
        return found

    for rank, found in enumerate(run_groups(size, body, check=check)):
        for lengths, (parts, back) in zip(([3] * size, range(size)), found, strict=True):
            sent = [values(r, each).tolist() for r, each in enumerate(lengths)]
            assert back == sent[rank]
            assert rank != root or parts == sent


def test_all_to_all(arrays, size):
    def body(group):
        send = arrays.make(np.arange(2 * size, dtype=np.int32) + 100 * group.rank, group.device)
        recv = arrays.make(np.zeros(2 * size, np.int32), group.device)
        group.all_to_all(arrays.argument(send), arrays.argument(recv)).wait(DEADLINE)
        return arrays.read(recv)

    for rank, recv in enumerate(run_groups(size, body)):
        assert recv.tolist() == [100 * r + 2 * rank + i for r in range(size) for i in range(2)]


def test_coalesced_operations_are_one_launch_with_one_number(arrays, size):
    def body(group):
        sends = [arrays.make(values(group.rank, count), group.device) for count in (1, 5, 3)]
        work = group.all_reduce_coalesced([arrays.argument(send) for send in sends])
        assert len(work.result(DEADLINE)) == 3 and group.seq == 1
        wholes = [arrays.make(np.zeros(count * size, np.float32), group.device) for count in (1, 5, 3)]
        group.all_gather_coalesced(map(arrays.argument, sends), map(arrays.argument, wholes)).wait(DEADLINE)
        group.reduce_scatter_coalesced(map(arrays.argument, wholes), map(arrays.argument, sends)).wait(DEADLINE)
        assert group.seq == 3
        return [arrays.read(send) for send in sends]

    for results in run_groups(size, body):
        for count, result in zip((1, 5, 3), results, strict=True):
            assert (result == size * np.sum([values(rank, count) for rank in range(size)], axis=0)).all()


def test_block_without_operation_of_one_rank(host_engine):
    """The idle rank takes part in making the communicator, and its numbers advance as on the other ranks."""

    def body(group):
        parts = [np.full(2 if {group.rank, peer} == {0, 1} else 0, group.rank, np.int32) for peer in range(3)]
        got = [np.full(len(part), -1, np.int32) for part in parts]
        with group.coalescing() as work:
            group.all_to_all(parts, got)
        work.wait(DEADLINE)
        total = np.ones(1)
        group.all_reduce(total).wait(DEADLINE)
        return [each.tolist() for each in got], total[0], group.seq

    assert run_groups(3, body) == [
        ([[], [1, 1], []], 3, 2),
        ([[0, 0], [], []], 3, 2),
        ([[], [], []], 3, 2),
    ]


def test_block_that_raises_launches_nothing(arrays):
    def body(group):
        made = arrays.make(np.ones(3), group.device)
        array = arrays.argument(made)
        with pytest.raises(KeyError), group.coalescing() as work:
            assert group.all_reduce(array) is work
            raise KeyError("mine")
        assert isinstance(work.exception(0), KeyError) and arrays.read(made).tolist() == [1, 1, 1] and group.seq == 0
        with group.coalescing() as work:
            pass
        assert work.result(0) == [] and group.seq == 0
        with group.coalescing() as work:
            with pytest.raises(ValueError, match="the block's"):
                group.all_reduce(array, timeout=1)
            with pytest.raises(ValueError, match="within coalescing"), group.coalescing():
                pass
            group.all_reduce(array)
        work.wait(DEADLINE)
        return arrays.read(made).tolist()

    assert run_groups(2, body) == [[2, 2, 2]] * 2


def test_bad_arguments_begin_nothing(host_engine):
    def body(group):
        read_only = np.ones(2)
        read_only.flags.writeable = False
        for error, words, call in (
            (ValueError, "read-only", lambda: group.all_reduce(read_only)),
            (TypeError, "data type", lambda: group.all_reduce(np.ones(2), np.ones(2, np.float32))),
            (ValueError, "rank 7 does not exist", lambda: group.broadcast(np.ones(2), root=7)),
            (ValueError, "= 4 elements", lambda: group.all_gather(np.ones(2), np.ones(3))),
            (ValueError, "pass both", lambda: group.all_to_all(np.ones(2), np.ones(2), [1, 1])),
            (ncclpy.NcclUnsupported, "any source", lambda: group.recv(np.ones(2), -1)),
            (ValueError, "seconds >= 0", lambda: group.all_reduce(np.ones(2), timeout=-1)),
        ):
            with pytest.raises(error, match=words):
                call()
        return group.seq

    assert run_groups(2, body) == [0, 0]


def test_barrier_waits_for_all():
    begun = threading.Event()

    def body(group):
        group.barrier().wait(DEADLINE)
        if group.rank == 0:
            work = group.barrier()
            testing.wait_for(lambda: work.state == "launched")
            assert not work.is_completed()
            begun.set()
        else:
            assert begun.wait(DEADLINE)
            work = group.barrier()
        assert work.result(DEADLINE) is None

    run_groups(2, body)


def test_two_groups_interleaved_from_two_threads_each(host_engine):
    """Groups that several threads of each rank make and use at once are matched across ranks by name."""
    store = LocalStore()

    def rank(rank, which):
        with ncclpy.ProcessGroup(store, rank, 2, device=rank, name=which, timeout=DEADLINE / 2) as group:
            array = np.ones(10)
            for _ in range(20):
                group.all_reduce(array).wait(DEADLINE)
            return array[0]

    with ThreadPoolExecutor(8) as pool:
        made = [pool.submit(rank, r, which) for which in ("a", "b", "a", "b/0") for r in (1, 0)]
        assert [each.result(DEADLINE) for each in made] == [2.0**20] * 8


def test_thread_does_not_wait_for_its_own_block(arrays):
    def body(group):
        array = arrays.make(np.ones(4, np.float32), group.device)
        with group.coalescing() as work:
            group.all_reduce(arrays.argument(array))
            for wait in (work.wait, work.result, work.synchronize, work.exception):
                with pytest.raises(RuntimeError, match="wait for it after the block"):
                    wait()
            waits = pool.submit(work.wait, DEADLINE)  # another thread may wait
            with pytest.raises(ncclpy.NcclTimeout, match="it waits for the end of its coalescing block"):
                pool.submit(work.wait, 0.05).result()
        waits.result()
        return arrays.read(array).tolist()

    with ThreadPoolExecutor(4) as pool:
        assert run_groups(2, body) == [[2.0] * 4] * 2


OVERLAPPING = {
    "all_reduce": lambda g, b: g.all_reduce(b[0:4], b[1:5]),
    "all_gather": lambda g, b: g.all_gather(b[1:3], b[0:4]),
    "all_gather into a list": lambda g, b: g.all_gather(np.ones(2), [b[0:2], b[1:3]]),
    "reduce_scatter": lambda g, b: g.reduce_scatter(b[0:4], b[1:3]),
    "all_to_all": lambda g, b: g.all_to_all(b[0:4], b[2:6]),
    "all_to_all with counts": lambda g, b: g.all_to_all(b[0:4], b[0:4], [2, 2], [2, 2]),
    "gather": lambda g, b: g.gather(b[1:3], b[0:4], root=g.rank),
    "scatter": lambda g, b: g.scatter(b[0:4], b[1:3], root=g.rank),
}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_overlapping_memory_is_refused_before_anything_begins(host_engine, name):
    def body(group):
        memory = np.arange(6.0)
        with pytest.raises(ValueError, match=r"overlaps (send|recv)"):
            OVERLAPPING[name](group, memory)
        assert memory.tolist() == list(range(6)) and group.seq == 0
        group.all_reduce(memory).wait(DEADLINE)
        return memory.tolist()

    assert run_groups(2, body) == [[0, 2, 4, 6, 8, 10]] * 2


def exchange_in_place(group, b):
    with group.coalescing():
        group.send(b, 1 - group.rank)
        group.recv(b, 1 - group.rank)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda g, b: g.all_reduce_coalesced([b, b]), ("2 of 2 (all_reduce) writes", "1 of 2 (all_reduce) writes")),
        (lambda g, b: g.all_reduce_coalesced([b[:3], b[3:], b[2:4]]), ("3 of 3 (all_reduce) writes",)),
        (lambda g, b: g.all_gather_coalesced([b[:1], b[:1]], [b[2:4], b[3:5]]), ("2 of 2 (all_gather) writes",)),
        (exchange_in_place, ("2 of 2 (recv) writes", "1 of 2 (send) reads")),
    ],
)
def test_block_refuses_memory_written_by_one_operation_and_used_by_another(host_engine, call, words):
    def body(group):
        memory = np.arange(6.0)
        with pytest.raises(ValueError, match="overlap") as caught:
            call(group, memory)
        assert [word for word in words if word not in str(caught.value)] == [], caught.value
        assert memory.tolist() == list(range(6)) and group.seq == 0
        with group.coalescing() as work:  # the refused block has left nothing begun
            group.all_reduce(memory)
        work.wait(DEADLINE)
        return (memory / 2).tolist()[:2]

    assert run_groups(2, body) == [[0, 1]] * 2


def test_block_accepts_memory_that_its_operations_only_read(host_engine):
    def body(group):
        memory, parts = np.arange(4.0), [np.zeros(2), np.zeros(2)]
        group.reduce_scatter_coalesced([memory, memory], parts).wait(DEADLINE)
        return [part.tolist() for part in parts]

    assert run_groups(2, body) == [[[0, 2]] * 2, [[4, 6]] * 2]
