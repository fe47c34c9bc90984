"""Mismatched operations: the same error on all ranks, and the coordinator stays usable."""

from __future__ import annotations

import re
import threading

import numpy as np
import pytest
from coordinator_ranks import run_coordinators
from group_ranks import DEADLINE

import ncclpy
import testing
from ncclpy.coordinator.keys import key_of, names_of
from ncclpy.coordinator.signature import Kind, Signature, as_error, pack, pack_all, unpack, unpack_all


def failure(work):
    error = work.exception(DEADLINE)
    assert isinstance(error, ncclpy.NcclError)
    return error


def bring_differently(brings, size=3):
    """Have each rank bring its own operation; return the errors, after checking that the coordinator still works."""

    def body(coordinator):
        work = brings[coordinator.rank](coordinator)
        error = failure(work)
        array = np.ones(2)
        coordinator.all_reduce("x", array).wait(DEADLINE)  # under the same name
        assert array.tolist() == [size, size]
        return error

    return run_coordinators(size, body)


@pytest.mark.parametrize(
    "odd, said",
    [
        (lambda c: c.all_reduce("x", np.ones(4)), "all_reduce 'x': dtype float32 on ranks 0, 2, float64 on rank 1"),
        (lambda c: c.all_reduce("x", np.ones((2, 2), np.float32)), "shape (4,) on ranks 0, 2, (2, 2) on rank 1"),
        (lambda c: c.all_reduce("x", np.ones(4, np.float32), "max"), "op sum on ranks 0, 2, max on rank 1"),
        (
            lambda c: c.all_reduce("x", np.ones(4, np.float32), prescale=0.5),
            "prescale none on ranks 0, 2, 0.5 on rank 1",
        ),
        (
            lambda c: c.broadcast("x", np.ones(4, np.float32)),
            "operation 'x': operation all_reduce on ranks 0, 2, broadcast on rank 1",
        ),
        (lambda c: c.barrier("x"), "operation all_reduce on ranks 0, 2, barrier on rank 1"),
        (
            lambda c: c.all_reduce_sparse("x", np.zeros(1, np.int64), np.ones(1)),
            "operation all_reduce on ranks 0, 2, all_reduce_sparse on rank 1",
        ),
    ],
)
def test_every_rank_gets_every_value(odd, said):
    even = lambda c: c.all_reduce("x", np.ones(4, np.float32))  # noqa: E731
    errors = bring_differently([even, odd, even])
    assert said in str(errors[0])
    assert len({testing.without_line(str(error)) for error in errors}) == 1
    assert [each.ranks for each in errors[0].ranks] == [(0, 2), (1,)]
    assert errors[0].result == ncclpy.Result.INVALID_USAGE


def test_all_differences_are_listed():
    errors = bring_differently(
        [
            lambda c: c.all_reduce("x", np.ones(4, np.float32)),
            lambda c: c.all_reduce("x", np.ones(3), "max"),
            lambda c: c.all_reduce("x", np.ones(4, np.int32), "max"),
        ]
    )
    text = str(errors[0])
    assert "dtype float32 on rank 0, float64 on rank 1, int32 on rank 2" in text
    assert "op sum on rank 0, max on ranks 1-2; " in text
    assert "shape (4,) on ranks 0, 2, (3,) on rank 1" in text


@pytest.mark.parametrize(
    "brings, said",
    [
        (
            [lambda c, r=r: c.broadcast("x", np.ones(2), root=r % 2) for r in range(3)],
            "broadcast 'x': root 0 on ranks 0, 2, 1 on rank 1",
        ),
        (
            [lambda c, r=r: c.all_gather("x", np.ones((2, 3 + r % 2))) for r in range(3)],
            "all_gather 'x': shape behind the first dimension (3,) on ranks 0, 2, (4,) on rank 1",
        ),
        (
            [lambda c, r=r: c.all_to_all("x", np.ones(3), [1, 1, 1] if r == 2 else None) for r in range(3)],
            "all_to_all 'x': send_counts not given on ranks 0-1, given on rank 2",
        ),
        (
            [
                lambda c, r=r: c.all_reduce_sparse("x", np.zeros((2, 1) if r else 1, np.int64), np.ones(1))
                for r in range(3)
            ],
            "all_reduce_sparse 'x': indices (n,) on rank 0, (2, n) on ranks 1-2",
        ),
        (
            [lambda c, r=r: c.grouped_all_reduce(["x", "y"], [np.ones(2), np.ones(2 + r // 2)])[1] for r in range(3)],
            "of 2 operations that were brought together, all_reduce 'y': shape (2,) on ranks 0-1, (3,) on rank 2",
        ),
    ],
)
def test_different_operations_are_a_mismatch(brings, said):
    errors = bring_differently(brings)
    assert said in str(errors[0])
    assert len({testing.without_line(str(error)) for error in errors}) == 1


def test_name_in_flight_is_refused_and_nothing_is_sent(ranks_are_threads):
    meet = threading.Barrier(2)

    def body(coordinator):
        first = np.ones(2)
        if coordinator.rank == 0:
            work = coordinator.all_reduce("x", first)
            with pytest.raises(ValueError, match="name: 'x' is in flight on this rank already"):
                coordinator.all_reduce("x", np.ones(3))
            with pytest.raises(ValueError, match="'x' is in flight"):
                coordinator.grouped_all_reduce(["y", "x"], [np.ones(3), np.ones(3)])
            later = coordinator.all_reduce("y", np.ones(1))  # the refused group has left nothing
        meet.wait(DEADLINE)
        if coordinator.rank == 1:
            work, later = coordinator.all_reduce("x", first), coordinator.all_reduce("y", np.ones(1))
        work.wait(DEADLINE)
        later.wait(DEADLINE)
        return first.tolist(), coordinator.stats()["brought"]

    assert run_coordinators(2, body) == [([2.0, 2.0], 2)] * 2


@pytest.mark.parametrize(("first", "second"), [((0, 4), (2, 6)), ((2, 6), (0, 3)), ((0, 8), (3, 4)), ((3, 4), (0, 8))])
def test_memory_in_flight_is_refused_under_another_name(ranks_are_threads, first, second):
    """Bring overlapping views of one array: the two sums would run at the same time."""
    meet = threading.Barrier(2)

    def body(coordinator):
        memory = np.ones(10)
        if coordinator.rank == 0:
            work = coordinator.all_reduce("x", memory[slice(*first)])
            refused = "the array of 'y' overlaps the array of 'x', which is in use on this rank already"
            with pytest.raises(ValueError, match=refused):
                coordinator.all_reduce("y", memory[slice(*second)])
            with pytest.raises(ValueError, match=refused):
                coordinator.all_gather("y", memory[slice(*second)])
            with pytest.raises(ValueError, match="the array of 'z' overlaps the array of 'y'"):
                coordinator.grouped_all_reduce(["y", "z"], [memory[8:10], memory[9:10]])
            beside = coordinator.all_reduce("y", memory[8:10])
        meet.wait(DEADLINE)
        if coordinator.rank == 1:
            work = coordinator.all_reduce("x", memory[slice(*first)])
            beside = coordinator.all_reduce("y", memory[8:10])
        work.wait(DEADLINE)
        beside.wait(DEADLINE)
        coordinator.all_reduce("y", memory[slice(*second)]).wait(DEADLINE)  # the memory is free again
        return memory.sum()

    overlap = min(first[1], second[1]) - max(first[0], second[0])
    alone = first[1] - first[0] + second[1] - second[0] - 2 * overlap
    total = 10 - 2 - overlap - alone + 2 * 2 + 2 * alone + 4 * overlap
    assert run_coordinators(2, body) == [total] * 2


def test_memory_that_is_only_read_is_brought_under_several_names():
    def body(coordinator):
        memory = np.arange(6.0)
        works = [coordinator.all_gather(f"{at}", memory[at : at + 3]) for at in range(4)]
        return [work.result(DEADLINE).tolist() for work in works]

    assert run_coordinators(2, body) == [[[at, at + 1, at + 2] * 2 for at in range(4)]] * 2


def test_grouped_call_is_refused_as_a_whole():
    def body(coordinator):
        arrays = [np.ones(2), np.ones(3 + coordinator.rank)]
        errors = [failure(work) for work in coordinator.grouped_all_reduce(["a", "b"], arrays)]
        assert errors[0] is errors[1]
        return arrays[0].tolist()

    assert run_coordinators(2, body) == [[1.0, 1.0]] * 2


@pytest.mark.parametrize("names", [("a",), ("",), ("a\0", "b"), ("\ud800",), ("層", "x", "")])
def test_names_survive_encoding_as_keys(names):
    assert names_of(key_of(names)) == names


def test_signatures_survive_encoding():
    signature = Signature(
        Kind.ALL_REDUCE, "complex64", 7, 2, 0, -1, None, True, 0.5, None, (2**40, 3), -1
    )  # 64-bit sizes
    assert unpack(pack(signature)) == signature
    several = (signature, Signature(Kind.BARRIER), Signature(Kind.ALL_TO_ALL, "int8", counted=False, shape=()))
    assert unpack_all(pack_all(several)) == several
    assert signature.elements == 2 * 3 * 2**40


def test_dtype_of_many_fields_is_compared_whole():
    """The type's name is truncated; types that differ only behind the cut are still a mismatch on all ranks."""
    fields = [(f"field_{i}", "f8") for i in range(300)]

    def bring(c):
        array = np.zeros(2, fields)
        if c.rank == 0:
            array["field_299"] = 7
        c.broadcast("table", array, 0).wait(DEADLINE)
        assert array["field_299"].tolist() == [7, 7]
        return c.broadcast("x", np.zeros(2, [*fields[:-1], ("field_299", "i8" if c.rank == 1 else "f8")]))

    errors = bring_differently([bring] * 3)
    cut = r"\[\('field_0', '<f8'\), .*\.\.\. \(300 fields, 2400 bytes, #\w+\)"
    said = re.search(f"broadcast 'x': dtype ({cut}) on ranks 0, 2, ({cut}) on rank 1", str(errors[0]))
    assert said[1] != said[2]
    assert len({testing.without_line(str(error)) for error in errors}) == 1


def test_error_sentence():
    def brought(dtype):
        return pack_all([Signature(Kind.ALL_REDUCE, dtype, op=0, shape=(3,))])

    error = as_error(["grad/7"], [(brought("float32"), (0, 1, 2, 5)), (brought("float64"), (3,))], "here")
    assert "all_reduce 'grad/7': dtype float32 on ranks 0-2, 5, float64 on rank 3" in str(error)
