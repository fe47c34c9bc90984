"""The NCCL half of the host engine against numpy: threads, processes and one thread for all ranks."""

import ctypes

import numpy as np
import pytest
import rank_programs as bodies
from host_ranks import as_threads
from nccl_calls import MAX, SUM

SMALL = [1, 3, 100]
COPIES = list(range(12))
LARGE_TYPES = [0, 7, 9]
EIGHT = {8}  # runs with all types: they take as long as all others together


def worlds(*numbers, long=()):
    """Parametrise by where the ranks run, each setting once: as threads, one process each, or two threads a process.

    A number in `long` runs in campaigns only. A process each for more than three ranks is slow.
    """
    found = []
    for n in [*numbers, *long]:
        for place in ("threads", "processes", "mixed")[: min(n, 3)]:
            slow = (place == "processes" and n > 3) or (place == "mixed" and n != 4)
            marks = [pytest.mark.campaign] if n in long else [pytest.mark.slow] * slow
            found.append(pytest.param(place, n, id=f"{place}-{n}", marks=marks))
    return pytest.mark.parametrize(("run", "nranks"), found, indirect=["run"])


@pytest.fixture
def run(request, nccl, processes):
    """Return a function that runs a body as the given number of ranks."""

    def run(nranks, body, *arguments):
        if request.param == "threads":
            return as_threads(nccl, nranks, body, *arguments)
        placement = [rank // 2 for rank in range(nranks)] if request.param == "mixed" else None
        return processes.run(nccl, nranks, body, *arguments, placement=placement)

    return run


@worlds(1, 2, 3, 4, long=EIGHT)
def test_reductions_equal_numpy(run, nranks):
    run(nranks, bodies.every_reduction, SMALL, COPIES)
    run(nranks, bodies.every_reduction, [3001], LARGE_TYPES)


@worlds(1, 2, 3, 4, long=EIGHT)
def test_copying_collectives_equal_numpy(run, nranks):
    run(nranks, bodies.every_copy, [*SMALL, 3001], COPIES)


@worlds(2, 3)
def test_large_collectives_equal_numpy(run, nranks):
    run(nranks, bodies.every_reduction, [300_007], [7])
    run(nranks, bodies.every_copy, [300_007], [7])


@worlds(1, 2, 4)
def test_pre_mul_sum_equals_numpy(run, nranks):
    run(nranks, bodies.pre_mul_sum, [1, 100, 5000])


@pytest.mark.parametrize("code", [6, 9, 10, 11])
def test_small_floats_round_as_ml_dtypes_does(nccl, code):
    as_threads(nccl, 2, bodies.every_bit_pattern, code)


@worlds(1, 2, 3, long=EIGHT)
def test_messages_equal_numpy(run, nranks):
    run(nranks, bodies.all_pairs, [1, 0, 1000, 300_001, 17])


@worlds(2, 4)
def test_ring_of_messages_equals_numpy(run, nranks):
    run(nranks, bodies.ring, 10)
    run(nranks, bodies.ring, 200_000)


@worlds(2, 4, 8)
def test_split_collectives_equal_numpy(run, nranks):
    run(nranks, bodies.splits)


@worlds(2, 4)
def test_operations_on_several_streams_keep_their_order(run, nranks):
    run(nranks, bodies.many_operations, 100)


@pytest.mark.parametrize("nranks", [1, 2, 8])
def test_one_thread_drives_all_ranks(nccl, nranks):
    """Init, several operations, messages and the end, all from one thread, as nccl-tests does."""
    comms = nccl.init_all(nranks)
    streams = []
    for device in range(nranks):
        nccl.driver.use(device)
        streams.append(nccl.driver.stream(1))
    inputs = bodies.inputs_of(nranks, 1000, 7)
    sums = [np.zeros(1000, np.float32) for _ in comms]
    largest = [np.zeros(1000, np.float32) for _ in comms]
    left = [np.zeros(1000, np.float32) for _ in comms]
    nccl.ncclGroupStart()
    for rank, comm in enumerate(comms):
        nccl.ncclGroupStart()
        send, stream = bodies.pointer(inputs[rank]), streams[rank]
        nccl.ncclAllReduce(send, bodies.pointer(sums[rank]), 1000, 7, SUM, comm, stream)
        nccl.ncclSend(send, 1000, 7, (rank + 1) % nranks, comm, stream)
        nccl.ncclRecv(bodies.pointer(left[rank]), 1000, 7, (rank - 1) % nranks, comm, stream)
        nccl.ncclAllReduce(send, bodies.pointer(largest[rank]), 1000, 7, MAX, comm, stream)
        nccl.ncclGroupEnd()
    nccl.ncclGroupEnd()
    for stream in streams:
        nccl.driver.cuStreamSynchronize(stream)
    for rank in range(nranks):
        bodies.expect(sums[rank], bodies.reduced(inputs, SUM), "sum")
        bodies.expect(largest[rank], bodies.reduced(inputs, MAX), "max")
        bodies.expect(left[rank], inputs[rank - 1], "from the left")
    for comm in reversed(comms):
        nccl.ncclCommDestroy(comm)


def test_one_thread_initialises_all_ranks_in_a_group(nccl):
    uid = nccl.unique_id()
    comms = [ctypes.c_void_p() for _ in range(4)]
    nccl.ncclGroupStart()
    for rank, comm in enumerate(comms):
        nccl.driver.use(rank)
        nccl.init_into(comm, 4, uid, rank)
    nccl.ncclGroupEnd()
    assert [nccl.get("ncclCommUserRank", comm) for comm in comms] == [0, 1, 2, 3]
    nccl.ncclGroupStart()
    children = [ctypes.c_void_p() for _ in comms]
    for rank, comm in enumerate(comms):
        nccl.ncclCommSplit(comm, rank // 2, 0, ctypes.byref(children[rank]), None)
    nccl.ncclGroupEnd()
    assert [nccl.get("ncclCommUserRank", comm) for comm in children] == [0, 1, 0, 1]
    for comm in comms + children:
        nccl.ncclCommDestroy(comm)
