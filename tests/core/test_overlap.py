"""Memory of sends and receives that overlaps: calls are refused unless NCCL can work in place."""

from __future__ import annotations

import random

import numpy as np
import pytest
from windows import World

import ncclpy
import testing

pytestmark = pytest.mark.usefixtures("host_engine")


def works(comms):
    """Check that the ranks still agree on which operation is next."""
    parts = [np.ones(2) for _ in comms]
    with ncclpy.group():
        for comm, part in zip(comms, parts, strict=True):
            comm.all_reduce(part)
    assert [part.tolist() for part in parts] == [[len(comms)] * 2] * len(comms)


# Calls of rank 1 of 2, over 8 elements; with each the two arguments that its error names, and the reason.
REFUSED = {
    "all_reduce": (lambda c, b: c.all_reduce(b[0:3], b[1:4]), ("recv", "send", "only where recv is send")),
    "all_reduce behind": (lambda c, b: c.all_reduce(b[1:4], b[0:3]), ("recv", "send", "only where recv is send")),
    "reduce": (lambda c, b: c.reduce(b[0:3], b[1:4], root=1), ("recv", "send", "reduce works in place only")),
    "broadcast": (lambda c, b: c.broadcast(b[0:3], b[1:4], root=1), ("recv", "send", "broadcast works in place only")),
    "all_gather": (lambda c, b: c.all_gather(b[1:3], b[0:4]), ("recv", "send", "this rank's part of recv")),
    "all_gather, the other rank's part": (
        lambda c, b: c.all_gather(b[0:2], b[0:4]),
        ("recv", "send", "this rank's part of recv"),
    ),
    "reduce_scatter": (lambda c, b: c.reduce_scatter(b[0:4], b[1:3]), ("recv", "send", "this rank's part of send")),
    "gather": (lambda c, b: c.gather(b[0:2], b[0:4], root=1), ("recv", "send", "this rank's part of recv")),
    "scatter": (lambda c, b: c.scatter(b[0:4], b[0:2], root=1), ("recv", "send", "this rank's part of send")),
    "all_to_all": (lambda c, b: c.all_to_all(b[0:4], b[2:6]), ("recv", "send", "cannot work in place")),
    "all_to_all, one array": (lambda c, b: c.all_to_all(b, b), ("recv", "send", "cannot work in place")),
    "sendrecv": (lambda c, b: c.sendrecv(b[0:4], 0, b[3:7], 0), ("recv", "send", "cannot work in place")),
    "sendrecv, one array": (lambda c, b: c.sendrecv(b, 0, b, 0), ("recv", "send", "cannot work in place")),
    "all_to_all by counts": (
        lambda c, b: c.all_to_all(b, b, [4, 4], [4, 4]),
        ("recv", "send", "cannot work in place"),
    ),
    "all_gather by counts": (
        lambda c, b: c.all_gather(b[0:3], b[0:5], [2, 3]),  # its part begins at 2
        ("recv", "send", "this rank's part of recv"),
    ),
    "all_gather by counts, where parts of one size would lie": (
        lambda c, b: c.all_gather(b[3:6], b[0:5], [2, 3]),
        ("recv", "send", "this rank's part of recv"),
    ),
    "reduce_scatter by counts": (
        lambda c, b: c.reduce_scatter(b[0:5], b[1:4], counts=[2, 3]),
        ("recv", "send", "this rank's part of send"),
    ),
    "all_gather into a list, one array twice": (
        lambda c, b: c.all_gather(np.ones(2), [b[0:2], b[0:2]]),
        ("recv[1]", "recv[0]", "memory of its own"),
    ),
    "all_gather into a list, shifted": (
        lambda c, b: c.all_gather(np.ones(2), [b[1:3], b[0:2]]),
        ("recv[0]", "recv[1]", "memory of its own"),
    ),
    "all_gather into a list, from another part": (
        lambda c, b: c.all_gather(b[1:3], [b[0:2], b[4:6]]),
        ("send", "recv[0]", "only where send is recv[1]"),
    ),
    "reduce_scatter of a list": (
        lambda c, b: c.reduce_scatter([b[0:2], b[2:4]], b[3:5]),
        ("recv", "send[1]", "only where recv is send[1]"),
    ),
    "all_to_all of lists": (
        lambda c, b: c.all_to_all([b[0:2], b[2:4]], [b[6:8], b[1:3]]),
        ("recv[1]", "send[0]", "cannot work in place"),
    ),
    "all_to_all of lists, outputs": (
        lambda c, b: c.all_to_all([b[0:2], b[2:4]], [b[5:7], b[6:8]]),
        ("recv[1]", "recv[0]", "memory of its own"),
    ),
    "gather into a list": (
        lambda c, b: c.gather(b[1:3], [b[0:2], b[4:6]], root=1),
        ("send", "recv[0]", "only where send is recv[1]"),
    ),
    "scatter of a list": (
        lambda c, b: c.scatter([b[0:2], b[2:4]], b[1:3], root=1),
        ("recv", "send[0]", "only where recv is send[1]"),
    ),
    "addresses": (
        lambda c, b: c.all_reduce((b.ctypes.data, 3, "float64"), (b.ctypes.data + 4, 3, "float64")),
        ("recv", "send", "only where recv is send"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_memory_that_overlaps_is_refused_with_both_arguments(comms2, name):
    call, words = REFUSED[name]
    memory = np.arange(8.0)
    with pytest.raises(ValueError, match="overlaps") as caught:
        testing.run_with_deadline(lambda: call(comms2[1], memory))
    assert [word for word in words if word not in str(caught.value)] == [], caught.value
    assert memory.tolist() == list(range(8))
    works(comms2)


@pytest.mark.parametrize("name", ["all_reduce", "all_to_all by counts", "all_gather into a list, shifted"])
@pytest.mark.parametrize("block", [ncclpy.group, lambda: ncclpy.Plan().record()], ids=["group", "plan"])
def test_memory_that_overlaps_is_refused_where_calls_are_recorded(comms2, name, block):
    with pytest.raises(ValueError, match="overlaps"), block():
        REFUSED[name][0](comms2[1], np.arange(8.0))
    works(comms2)


# In-place calls of each rank, over the numbers 10 * rank, 10 * rank + 1, ..., and the values afterwards.
PLACE = [[0, 11], [0, 11]]
IN_PLACE = {
    "all_gather": (lambda c, b: c.all_gather(b[c.rank : c.rank + 1], b), PLACE),
    "all_gather by counts": (lambda c, b: c.all_gather(b[c.rank : c.rank + 1], b, [1, 1]), PLACE),
    "all_gather into a list": (lambda c, b: c.all_gather(b[c.rank : c.rank + 1], [b[:1], b[1:]]), PLACE),
    "gather": (lambda c, b: c.gather(b[c.rank : c.rank + 1], b, root=1), [[0, 1], [0, 11]]),
    "gather into a list": (
        lambda c, b: c.gather(b[c.rank : c.rank + 1], [b[:1], b[1:]], root=1),
        [[0, 1], [0, 11]],
    ),
    "scatter": (lambda c, b: c.scatter(b, b[c.rank : c.rank + 1], root=1), [[10, 1], [10, 11]]),
    "scatter of a list": (
        lambda c, b: c.scatter([b[:1], b[1:]], b[c.rank : c.rank + 1], root=1),
        [[10, 1], [10, 11]],
    ),
    "reduce_scatter": (lambda c, b: c.reduce_scatter(b, b[c.rank : c.rank + 1]), [[10, 1], [10, 12]]),
    "reduce_scatter by counts": (
        lambda c, b: c.reduce_scatter(b, b[c.rank : c.rank + 1], counts=[1, 1]),
        [[10, 1], [10, 12]],
    ),
    "reduce_scatter of a list": (
        lambda c, b: c.reduce_scatter([b[:1], b[1:]], b[c.rank : c.rank + 1]),
        [[10, 1], [10, 12]],
    ),
    "reduce": (lambda c, b: c.reduce(b, b, root=1), [[0, 1], [10, 12]]),
    "broadcast": (lambda c, b: c.broadcast(b, b, root=1), [[10, 11], [10, 11]]),
    "nothing": (lambda c, b: c.all_to_all(b[1:1], b[1:1]), [[0, 1], [10, 11]]),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_calls_of_nccl_are_accepted(comms2, name):
    call, wanted = IN_PLACE[name]
    memory = [np.arange(2) + 10 * comm.rank for comm in comms2]

    def calls():
        with ncclpy.group():
            for comm, part in zip(comms2, memory, strict=True):
                call(comm, part)

    testing.run_with_deadline(calls)
    assert [part.tolist() for part in memory] == wanted


# Operations of one group.


def twice(comm, b):
    comm.all_reduce(b)
    comm.all_reduce(b)


def shifted(comm, b):
    comm.all_reduce(b[0:4])
    comm.all_reduce(b[3:8])


def read_behind(comm, b):
    comm.all_reduce(b[0:4])
    comm.all_gather(b[2:3], b[6:8])


def written_behind(comm, b):
    comm.all_gather(b[2:3], b[6:8])
    comm.all_reduce(b[0:4])


def passed_on(comm, b):
    comm.recv(b, 1 - comm.rank)
    comm.send(b, 1 - comm.rank)


@pytest.mark.parametrize(
    ("calls", "second", "first"),
    [
        (twice, "operation 2 of 2 (all_reduce of rank 1) writes", "operation 1 of 2 (all_reduce of rank 1) writes"),
        (shifted, "operation 2 of 2 (all_reduce of rank 1) writes", "operation 1 of 2 (all_reduce of rank 1) writes"),
        (read_behind, "operation 2 of 2 (all_gather of rank 1) reads", "operation 1 of 2 (all_reduce of rank 1)"),
        (written_behind, "operation 2 of 2 (all_reduce of rank 1) writes", "operation 1 of 2 (all_gather of rank 1)"),
        (passed_on, "operation 2 of 2 (send of rank 1) reads", "operation 1 of 2 (recv of rank 1) writes"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("block", [ncclpy.group, lambda: ncclpy.Plan().record()], ids=["group", "plan"])
def test_group_refuses_an_operation_that_writes_memory_of_another(comms2, calls, second, first, block):
    memory = np.arange(8.0)
    with pytest.raises(ValueError, match="overlap") as caught, block():
        calls(comms2[1], memory)
    assert second in str(caught.value) and first in str(caught.value), caught.value
    assert memory.tolist() == list(range(8))
    works(comms2)


def test_group_refuses_one_array_for_two_ranks(comms2):
    memory = np.ones(4)
    with pytest.raises(ValueError, match=r"all_reduce of rank 1.*all_reduce of rank 0"), ncclpy.group():
        for comm in comms2:
            comm.all_reduce(memory)
    works(comms2)


def test_refused_group_makes_no_communicator(comms2):
    memory = np.ones(4)
    with pytest.raises(ValueError, match="overlap"), ncclpy.group():
        child = comms2[0].split(0)
        twice(comms2[0], memory)
    with pytest.raises(ncclpy.NcclError, match="was never initialised"):
        child.all_reduce(np.ones(1))
    works(comms2)


def test_group_accepts_memory_that_is_only_read_many_times(comms2):
    memory = [np.full(2, comm.rank + 1.0) for comm in comms2]
    results = [np.zeros((3, 2)) for _ in comms2]
    with ncclpy.group():
        for comm, part, result in zip(comms2, memory, results, strict=True):
            comm.all_reduce(part, result[0])
            comm.all_reduce(part, result[2], op="max")
            comm.broadcast(part if comm.rank == 0 else None, result[1])
    assert [result.tolist() for result in results] == [[[3, 3], [1, 1], [2, 2]]] * 2


def test_group_accepts_many_operations_with_memory_in_any_order(comms2):
    order = list(range(40))
    random.Random(7).shuffle(order)
    memory = [np.arange(80.0).reshape(40, 2) + comm.rank for comm in comms2]
    wanted = memory[0] * 2 + 1
    with ncclpy.group():
        for at in order:
            for comm, rows in zip(comms2, memory, strict=True):
                comm.all_reduce(rows[at])
        for comm in comms2:
            comm.barrier()
            comm.barrier()  # a barrier has no memory of the caller
    assert all((rows == wanted).all() for rows in memory)


def test_group_is_checked_again_when_it_changes(comms2):
    """A group that was valid is recognised by everything that decides it: addresses, sizes, types and operations."""
    memory = np.zeros(64, np.uint8)
    at = memory.ctypes.data
    base = [("recv", at, 8, "uint8"), ("recv", at + 8, 8, "uint8"), ("send", at + 16, 8, "uint8")]
    wrong = [
        (0, ("recv", at + 1, 8, "uint8")),
        (0, ("recv", at, 9, "uint8")),
        (0, ("recv", at, 8, "int32")),
        (1, ("recv", at + 9, 8, "uint8")),
        (1, ("send", at + 7, 8, "uint8")),
        (2, ("recv", at + 12, 8, "uint8")),
    ]

    def record(calls):
        with ncclpy.Plan().record():
            for name, start, count, dtype in calls:
                getattr(comms2[0], name)((start, count, dtype), 1)

    for place, other in wrong:
        for _ in range(2):
            record(base)
        changed = [*base[:place], other, *base[place + 1 :]]
        for _ in range(2):
            with pytest.raises(ValueError, match="overlap"):
                record(changed)


@pytest.mark.parametrize("seed", range(20))
def test_group_is_refused_as_each_two_of_its_operations_are(comms2, seed):
    """Random ranges, read or written: a group is refused if and only if two of them conflict."""
    chance = random.Random(seed)
    memory = np.zeros(200)
    spans = []
    for _ in range(chance.randrange(2, 9)):
        start = chance.randrange(190)
        spans.append((start, start + chance.randrange(1, 10), chance.random() < 0.5))
    shared = any(
        (one[2] or other[2]) and one[0] < other[1] and other[0] < one[1]
        for i, one in enumerate(spans)
        for other in spans[:i]
    )
    refused = False
    try:
        with ncclpy.Plan().record():
            for start, end, writes in spans:
                (comms2[0].recv if writes else comms2[0].send)(memory[start:end], 1)
    except ValueError:
        refused = True
    assert refused == shared


def test_put_to_oneself_is_refused_where_it_overlaps():
    testing.need_function("ncclPutSignal")
    with World(2, count=8, timeout=20) as world:
        comm, array, window = world.comms[0], world.arrays[0], world.windows[0]
        with pytest.raises(
            ValueError, match=r"send: overlaps the range of the window that this put writes \(peer 0 is this rank\)"
        ):
            comm.put_signal(array[0:4], window, 0, 8)
        array[:4] = 1, 2, 3, 4
        comm.put_signal(array[0:4], window, 0, 16)
        comm.wait_signal(0)
        assert array.tolist() == [1, 2, 3, 4, 1, 2, 3, 4]
