"""Bodies of ranks in tests of the host engine: every collective compared with numpy, in threads and in processes."""

import ctypes
import functools
import mmap
import os
import threading
import time

import ml_dtypes
import numpy as np
from nccl_calls import AVG, MAX, MIN, PROD, SCALAR_DEVICE, SCALAR_HOST, SUCCESS, SUM, NcclError

DTYPES = [
    np.int8,
    np.uint8,
    np.int32,
    np.uint32,
    np.int64,
    np.uint64,
    np.float16,
    np.float32,
    np.float64,
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
]
OPS = [SUM, PROD, MAX, MIN, AVG]


def is_small_float(dtype):
    return np.dtype(dtype).itemsize < 4 and not np.issubdtype(dtype, np.integer)


def once(most):
    """Cache results of a function; of ranks that are threads one computes a result, and the others wait for it."""

    def decorate(function):
        kept, lock = functools.lru_cache(most)(function), threading.Lock()

        @functools.wraps(function)
        def call(*arguments):
            with lock:
                return kept(*arguments)

        return call

    return decorate


@once(32)  # for each operation, in place and out of place
def inputs_of(nranks, count, code, seed=0):
    """Return every rank's input, the same in every process; it is read-only."""
    dtype = DTYPES[code]
    random = np.random.default_rng([seed, nranks, count, code])
    if np.issubdtype(dtype, np.integer):
        inputs = [np.frombuffer(random.bytes(count * np.dtype(dtype).itemsize), dtype) for _ in range(nranks)]
    else:
        made = np.float64 if dtype == np.float64 else np.float32
        inputs = [random.standard_normal(count, made).astype(dtype, copy=False) for _ in range(nranks)]
    for each in inputs:
        each.flags.writeable = False
    return inputs


@once(64)
def result_of(nranks, count, code, op, block=None):
    """Return NCCL's result for these inputs, or for one rank's part of them; it is read-only."""
    if block is None:
        result = reduced(inputs_of(nranks, count, code), op)
    else:
        mine = slice(block * count, (block + 1) * count)
        result = reduced([each[mine] for each in inputs_of(nranks, count * nranks, code)], op)
    result.flags.writeable = False
    return result


def reduced(inputs, op, scalars=None):
    """Return NCCL's result: small floats are reduced in float32 and rounded once, integers wrap around."""
    dtype = inputs[0].dtype
    wide = [x.astype(np.float32) if is_small_float(dtype) else x for x in inputs]
    with np.errstate(all="ignore"):
        if scalars is not None:
            wide = [x * s.astype(x.dtype) for x, s in zip(wide, scalars, strict=True)]
        result = wide[0].copy()
        for x in wide[1:]:
            if op in (SUM, AVG):
                result = result + x
            elif op == PROD:
                result = result * x
            else:
                result = (np.fmax if op == MAX else np.fmin)(result, x)
        if op == AVG:
            if np.issubdtype(dtype, np.integer):
                truncated = [abs(x) // len(inputs) * (-1 if x < 0 else 1) for x in result.tolist()]
                result = np.array(truncated, dtype=object)
            else:
                result = result / result.dtype.type(len(inputs))
        return result.astype(dtype)


def same(got, expected):
    """Return whether arrays are equal bit for bit, except for the payload of NaNs."""
    if np.array_equal(got.view(np.uint8), expected.view(np.uint8)):
        return True
    if np.issubdtype(got.dtype, np.integer):
        return False
    wide, wide_expected = got.astype(np.float64), expected.astype(np.float64)
    return bool(((wide == wide_expected) | (np.isnan(wide) & np.isnan(wide_expected))).all())


def expect(got, expected, what):
    if same(got, expected):
        return
    wrong = np.flatnonzero(got != expected)
    at = int(wrong[0])
    raise AssertionError(
        f"{what}: {len(wrong)} of {len(got)} wrong, first at {at}: {got[at]}, expected {expected[at]}"
    )


def pointer(array, element=0):
    return array.ctypes.data + element * array.itemsize


def check_reductions(rank, comm, count, code, op, in_place):
    """Check all-reduce, reduce and reduce-scatter of one type, count and operator."""
    nccl, n, me, stream = rank.nccl, rank.nranks, rank.rank, rank.stream
    what = f"count {count}, dtype {np.dtype(DTYPES[code])}, op {op}, in place {in_place}, rank {me} of {n}"
    inputs = inputs_of(n, count, code)
    expected = result_of(n, count, code, op)

    send = inputs[me].copy()
    recv = send if in_place else np.zeros_like(send)
    nccl.ncclAllReduce(pointer(send), pointer(recv), count, code, op, comm, stream)
    rank.synchronize()
    expect(recv, expected, f"all_reduce, {what}")

    root = n - 1
    send = inputs[me].copy()
    recv = (send if in_place else np.zeros_like(send)) if me == root else None
    nccl.ncclReduce(pointer(send), None if recv is None else pointer(recv), count, code, op, root, comm, stream)
    rank.synchronize()
    if me == root:
        expect(recv, expected, f"reduce, {what}")

    blocks = inputs_of(n, count * n, code)
    send = blocks[me].copy()
    recv = np.zeros(count, send.dtype)
    target = pointer(send, me * count) if in_place else pointer(recv)
    nccl.ncclReduceScatter(pointer(send), target, count, code, op, comm, stream)
    rank.synchronize()
    mine = slice(me * count, (me + 1) * count)
    expect(send[mine] if in_place else recv, result_of(n, count, code, op, me), f"reduce_scatter, {what}")


def check_copies(rank, comm, count, code, in_place):
    """Check the collectives that only move data."""
    nccl, n, me, stream = rank.nccl, rank.nranks, rank.rank, rank.stream
    what = f"count {count}, dtype {np.dtype(DTYPES[code])}, in place {in_place}, rank {me} of {n}"
    inputs = inputs_of(n, count, code)
    everything = np.concatenate(inputs)
    blocks = inputs_of(n, count * n, code)
    mine = slice(me * count, (me + 1) * count)

    for root in {0, n - 1}:
        send = inputs[me].copy()
        recv = send if in_place else np.zeros_like(send)
        source = pointer(send) if me == root or in_place else None
        nccl.ncclBroadcast(source, pointer(recv), count, code, root, comm, stream)
        rank.synchronize()
        expect(recv, inputs[root], f"broadcast from {root}, {what}")

        recv = np.zeros_like(everything) if me == root else None
        send = inputs[me].copy()
        if in_place and me == root:
            recv[mine] = send
            source = pointer(recv, me * count)
        else:
            source = pointer(send)
        nccl.ncclGather(source, None if recv is None else pointer(recv), count, code, root, comm, stream)
        rank.synchronize()
        if me == root:
            expect(recv, everything, f"gather to {root}, {what}")

        send = blocks[root].copy() if me == root else None
        recv = np.zeros(count, blocks[root].dtype)
        target = pointer(send, me * count) if in_place and me == root else pointer(recv)
        nccl.ncclScatter(None if send is None else pointer(send), target, count, code, root, comm, stream)
        rank.synchronize()
        expect(send[mine] if in_place and me == root else recv, blocks[root][mine], f"scatter from {root}, {what}")

    recv = np.zeros_like(everything)
    send = inputs[me].copy()
    if in_place:
        recv[mine] = send
    nccl.ncclAllGather(
        pointer(recv, me * count) if in_place else pointer(send), pointer(recv), count, code, comm, stream
    )
    rank.synchronize()
    expect(recv, everything, f"all_gather, {what}")

    recv = np.zeros_like(blocks[me])
    nccl.ncclAlltoAll(pointer(blocks[me]), pointer(recv), count, code, comm, stream)
    rank.synchronize()
    expect(recv, np.concatenate([b[mine] for b in blocks]), f"all_to_all, {what}")


def every_reduction(rank, counts, codes, ops=OPS):
    with rank.communicator() as comm:
        for count in counts:
            for code in codes:
                for op in ops:
                    for in_place in (False, True):
                        check_reductions(rank, comm, count, code, op, in_place)


def large_sums(rank, count):
    """Check large sums of bytes, in place and out of place."""
    with rank.communicator() as comm:
        for in_place in (False, True):
            check_reductions(rank, comm, count, DTYPES.index(np.int8), SUM, in_place)


def every_copy(rank, counts, codes):
    with rank.communicator() as comm:
        for count in counts:
            for code in codes:
                for in_place in (False, True):
                    check_copies(rank, comm, count, code, in_place)


def pre_mul_sum(rank, counts):
    """Check PreMulSum with a different scalar per rank, given immediately or read when the operation runs."""
    nccl, n, me = rank.nccl, rank.nranks, rank.rank
    with rank.communicator() as comm:
        for code, dtype in enumerate(DTYPES):
            scalars = [np.array([r + 2]).astype(dtype) for r in range(n)]
            for residence in (SCALAR_HOST, SCALAR_DEVICE):
                scalar = scalars[me].copy()
                op = ctypes.c_int()
                nccl.ncclRedOpCreatePreMulSum(ctypes.byref(op), pointer(scalar), code, residence, comm)
                for count in counts:
                    inputs = inputs_of(n, count, code)
                    recv = np.zeros_like(inputs[me])
                    nccl.ncclAllReduce(pointer(inputs[me]), pointer(recv), count, code, op.value, comm, rank.stream)
                    rank.synchronize()
                    expect(recv, reduced(inputs, SUM, scalars), f"premulsum {np.dtype(dtype)} count {count}")
                nccl.ncclRedOpDestroy(op.value, comm)


def all_pairs(rank, sizes):
    """Send several messages from every rank to every rank, itself included; receive them in another order."""
    nccl, n, me = rank.nccl, rank.nranks, rank.rank
    message = {}
    for source in range(n):
        for target in range(n):
            for i, size in enumerate(sizes):
                if me in (source, target):
                    random = np.random.default_rng([source, target, i])
                    message[source, target, i] = np.frombuffer(random.bytes(size), np.uint8)
    with rank.communicator() as comm:
        for _ in range(2):
            received = {(s, i): np.zeros(size, np.uint8) for s in range(n) for i, size in enumerate(sizes)}
            nccl.ncclGroupStart()
            for i, size in enumerate(sizes):
                for peer in range(n):
                    sent = message[me, peer, i]
                    nccl.ncclSend(pointer(sent), size, 1, peer, comm, rank.stream)
                for peer in reversed(range(n)):
                    nccl.ncclRecv(pointer(received[peer, i]), size, 1, peer, comm, rank.stream)
            nccl.ncclGroupEnd()
            rank.synchronize()
            for (source, i), got in received.items():
                expect(got, message[source, me, i], f"message {i} from {source} to {me}")


def ring(rank, size):
    """Send to the right and receive from the left without a group, even ranks first; then sum the received data."""
    nccl, n, me = rank.nccl, rank.nranks, rank.rank
    with rank.communicator() as comm:
        mine, got = np.full(size, me, np.int32), np.zeros(size, np.int32)
        calls = [
            lambda: nccl.ncclSend(pointer(mine), size, 2, (me + 1) % n, comm, rank.stream),
            lambda: nccl.ncclRecv(pointer(got), size, 2, (me - 1) % n, comm, rank.stream),
        ]
        for call in calls if me % 2 == 0 else reversed(calls):
            call()
        total = np.zeros(size, np.int32)
        nccl.ncclAllReduce(pointer(got), pointer(total), size, 2, SUM, comm, rank.stream)
        rank.synchronize()
        expect(got, np.full(size, (me - 1) % n, np.int32), f"from the left of {me}")
        expect(total, np.full(size, n * (n - 1) // 2, np.int32), "the sum of all")


def splits(rank):
    """Split by parity with reversed keys, leave rank 0 out of another split, and use parent and children together."""
    nccl, n, me = rank.nccl, rank.nranks, rank.rank
    with rank.communicator() as comm:
        child = nccl.split(comm, me % 2, -me)
        members = [r for r in reversed(range(n)) if r % 2 == me % 2]
        assert nccl.get("ncclCommCount", child) == len(members)
        assert nccl.get("ncclCommUserRank", child) == members.index(me)
        assert nccl.get("ncclCommCuDevice", child) == me
        rest = nccl.split(comm, -1 if me == 0 else 5, 0)
        assert (rest is None) == (me == 0)
        gathered = np.zeros(len(members), np.int32)
        mine, total = np.array([me], np.int32), np.zeros(1, np.int32)
        nccl.ncclAllGather(pointer(mine), pointer(gathered), 1, 2, child, rank.stream)
        nccl.ncclAllReduce(pointer(mine), pointer(total), 1, 2, SUM, comm, rank.stream)
        if rest is not None:
            assert nccl.get("ncclCommUserRank", rest) == me - 1
            nccl.ncclAllReduce(pointer(mine), pointer(mine), 1, 2, MAX, rest, rank.stream)
        rank.synchronize()
        assert list(gathered) == members
        assert total[0] == n * (n - 1) // 2
        assert mine[0] == (0 if me == 0 else n - 1)
        nccl.ncclCommDestroy(child)
        if rest is not None:
            nccl.ncclCommDestroy(rest)


def many_operations(rank, rounds):
    """Queue many operations of changing kinds and sizes on two streams, without a wait in between."""
    nccl, n = rank.nccl, rank.nranks
    other = nccl.driver.stream(1)
    with rank.communicator() as comm:
        value = np.full(3000, 1.0, np.float64)
        tiny = np.full(1, 1.0, np.float64)
        for i in range(rounds):
            # The same buffers on alternating streams: right only if the communicator keeps the order of the calls.
            stream = (rank.stream, other)[i % 2]
            nccl.ncclAllReduce(pointer(value), pointer(value), 3000, 8, AVG, comm, stream)
            nccl.ncclAllReduce(pointer(tiny), pointer(tiny), 1, 8, MAX, comm, stream)
            nccl.ncclBroadcast(pointer(value), pointer(value), 3000, 8, i % n, comm, stream)
        rank.synchronize()
        nccl.driver.cuStreamSynchronize(other)
        assert (value == 1.0).all() and tiny[0] == 1.0


def init_on_device_zero(rank):
    """Return the error of the init of ranks that share a device."""
    rank.nccl.driver.use(0)
    try:
        rank.nccl.init(rank.nranks, rank.uid, rank.rank)
    except NcclError as error:
        return error.code, error.text
    return "no error"


def reduce_on_device_zero_of_own_machine(rank):
    """Return a sum of ranks with the same device number, each on a separate machine by NCCL_HOSTID."""
    nccl = rank.nccl
    nccl.driver.use(0)
    os.environ["NCCL_HOSTID"] = f"machine-{rank.rank}"
    try:
        comm = nccl.init(rank.nranks, rank.uid, rank.rank)
    finally:
        del os.environ["NCCL_HOSTID"]
    value = np.full(8, rank.rank + 1, np.float32)
    nccl.ncclAllReduce(pointer(value), pointer(value), 8, 7, SUM, comm, rank.stream)
    rank.synchronize()
    nccl.ncclCommDestroy(comm)
    return value.tolist()


def await_end_or_error(rank, comm):
    """Wait for the stream; return the async error, with which the stream may hang until an abort."""
    while not rank.nccl.driver.ready("cuStreamQuery", rank.stream):
        if code := rank.nccl.async_error(comm):
            return code
        time.sleep(0.001)
    return rank.nccl.async_error(comm)


def wrong_type(rank, sent, wanted):
    """Send one type and count, receive another; return the async error, and whether the memory is unchanged."""
    nccl = rank.nccl
    value = np.full(32, rank.rank, np.uint8)
    comm = nccl.init(rank.nranks, rank.uid, rank.rank)
    if rank.rank == 0:
        nccl.ncclSend(pointer(value), *sent, 1, comm, rank.stream)
    else:
        nccl.ncclRecv(pointer(value), *wanted, 0, comm, rank.stream)
    code = await_end_or_error(rank, comm)
    nccl.ncclCommAbort(comm)
    return code, bool((value == rank.rank).all())


def wrong_size(rank):
    """Send more than the peer receives; return the async error."""
    nccl = rank.nccl
    value = np.zeros(200_000, np.uint8)
    comm = nccl.init(rank.nranks, rank.uid, rank.rank)
    if rank.rank == 0:
        nccl.ncclSend(pointer(value), 200_000, 1, 1, comm, rank.stream)
    else:
        nccl.ncclRecv(pointer(value), 100_000, 1, 0, comm, rank.stream)
    code = await_end_or_error(rank, comm)
    nccl.ncclCommAbort(comm)
    return code


def abort_stuck_collective(rank, count):
    """Rank 0 aborts before the last rank calls: rank 0's memory is unchanged, the ranks between get wrong data.

    The last rank, which calls after the abort, gets wrong data too.
    """
    nccl = rank.nccl
    comm = nccl.init(rank.nranks, rank.uid, rank.rank)
    value = np.ones(count, np.float32)

    def all_reduce():
        nccl.ncclAllReduce(pointer(value), pointer(value), count, 7, SUM, comm, rank.stream)

    if rank.rank < rank.nranks - 1:
        all_reduce()
    if rank.rank == 0:
        time.sleep(0.2)
        assert not nccl.driver.ready("cuStreamQuery", rank.stream)
        nccl.ncclCommAbort(comm)
        rank.synchronize()
        assert (value == 1).all()
        return
    if rank.rank == rank.nranks - 1:
        time.sleep(0.4)
        all_reduce()
    rank.synchronize()
    assert nccl.async_error(comm) == SUCCESS
    assert (value != 1).all() and (value != rank.nranks).all()
    nccl.ncclCommAbort(comm)


def abort_stuck_messages(rank):
    """Abort a long send to a peer that never receives, and a receive from a peer that never sends."""
    nccl = rank.nccl
    comm = nccl.init(rank.nranks, rank.uid, rank.rank)
    value, other = np.ones(500_000, np.float32), np.zeros(10, np.float32)
    if rank.rank == 0:
        nccl.ncclGroupStart()
        nccl.ncclSend(pointer(value), 500_000, 7, 1, comm, rank.stream)
        nccl.ncclRecv(pointer(other), 10, 7, 2, comm, rank.stream)
        nccl.ncclGroupEnd()
        time.sleep(0.2)
        assert not nccl.driver.ready("cuStreamQuery", rank.stream)
    nccl.ncclCommAbort(comm)
    rank.synchronize()


def receive_from_aborted(rank):
    """Rank 0 aborts in a group of messages; rank 1's receive of the unsent message completes with wrong data."""
    nccl = rank.nccl
    comm = nccl.init(rank.nranks, rank.uid, rank.rank)
    value, sent, wrong = np.ones(500_000, np.float32), np.ones(500_000, np.float32), np.full(10, 1, np.float32)
    if rank.rank == 0:
        nccl.ncclGroupStart()
        nccl.ncclSend(pointer(sent), 500_000, 7, 1, comm, rank.stream)
        nccl.ncclRecv(pointer(wrong), 10, 7, 1, comm, rank.stream)
        nccl.ncclGroupEnd()
        time.sleep(0.2)
        nccl.ncclCommAbort(comm)
        return
    time.sleep(0.4)
    nccl.ncclRecv(pointer(value), 500_000, 7, 0, comm, rank.stream)
    nccl.ncclSend(pointer(wrong), 10, 7, 0, comm, rank.stream)
    rank.synchronize()
    assert (value != 1).any()
    assert nccl.async_error(comm) == SUCCESS
    nccl.ncclCommAbort(comm)


def every_bit_pattern(rank, code):
    """Reduce every pattern of an 8-bit float with every other, or those of a 16-bit float with a permutation."""
    nccl = rank.nccl
    dtype = np.dtype(DTYPES[code])
    with rank.communicator() as comm:
        if dtype.itemsize == 1:
            first, second = (
                np.repeat(np.arange(256, dtype=np.uint8), 256),
                np.tile(np.arange(256, dtype=np.uint8), 256),
            )
        else:
            first = np.arange(65536, dtype=np.uint16)
            second = np.random.default_rng(code).permutation(first)
        inputs = [first.view(dtype), second.view(dtype)]
        for op in OPS:
            got = np.zeros_like(inputs[0])
            nccl.ncclAllReduce(pointer(inputs[rank.rank]), pointer(got), len(got), code, op, comm, rank.stream)
            rank.synchronize()
            expected = reduced(inputs, op)
            expect(got, expected, f"every pattern of {dtype}, op {op}")
            # Signs of zeros must match too.
            zero = (got == 0) & (expected == 0)
            assert (np.signbit(got[zero]) == np.signbit(expected[zero])).all() or op in (MAX, MIN)


def revoked_in_the_middle(rank, nbytes, times, after):
    """Rank 0 revokes while large sums run and frees its memory at once; the revoked communicator is then split."""
    nccl = rank.nccl
    memory = mmap.mmap(-1, nbytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    comm = nccl.init(rank.nranks, rank.uid, rank.rank, None)
    for _ in range(times):
        nccl.ncclAllReduce(address, address, nbytes // 4, 7, SUM, comm, rank.stream)
    if rank.rank == 0:
        time.sleep(after)
    else:
        time.sleep(0.2)  # long after rank 0 has freed its memory
        state = ctypes.c_int()
        nccl.ncclCommGetAsyncError(comm, ctypes.byref(state))
        assert state.value == 0
    nccl.ncclCommRevoke(comm, 0)
    rank.synchronize()
    memory.close()
    child = ctypes.c_void_p()
    nccl.ncclCommSplit(comm, 0, rank.rank, ctypes.byref(child), None)
    one, sums = np.ones(4, np.float32), np.zeros(4, np.float32)
    nccl.ncclAllReduce(pointer(one), pointer(sums), 4, 7, SUM, child, rank.stream)
    rank.synchronize()
    assert sums.tolist() == [rank.nranks] * 4
    nccl.ncclCommDestroy(child)
    nccl.ncclCommDestroy(comm)


def sender_revokes_in_the_middle(rank, nbytes, times, after, done):
    """Rank 0 revokes while rank 1 reads, overwrites its send buffer and makes a file: arrived messages are right."""
    nccl, driver = rank.nccl, rank.nccl.driver
    large = np.ones((1, nbytes) if rank.rank == 0 else (times, nbytes), np.int8)
    small = np.zeros(4, np.int8)  # with a receive too, or the send would be in pieces
    comm = nccl.init(rank.nranks, rank.uid, rank.rank, None)
    events = [driver.event() for _ in range(times)]
    for i, event in enumerate(events):
        nccl.ncclGroupStart()
        if rank.rank == 0:
            nccl.ncclSend(pointer(large), nbytes, 0, 1, comm, rank.stream)
            nccl.ncclRecv(pointer(small), 4, 0, 1, comm, rank.stream)
        else:
            nccl.ncclRecv(pointer(large[i]), nbytes, 0, 0, comm, rank.stream)
            nccl.ncclSend(pointer(small), 4, 0, 0, comm, rank.stream)
        nccl.ncclGroupEnd()
        driver.cuEventRecord(event, rank.stream)
    arrived = None
    if rank.rank == 0:
        while not driver.ready("cuEventQuery", events[0]):
            time.sleep(0.0005)
        time.sleep(after)
        nccl.ncclCommRevoke(comm, 0)
        large[:, nbytes // 4 * 3 :] = 7  # the part read last
        large.fill(7)
        done.touch()
    else:
        while not done.exists():
            time.sleep(0.01)
        time.sleep(0.05)  # time for reads in progress
        assert nccl.async_error(comm) == 0
        arrived = sum(driver.ready("cuEventQuery", event) for event in events)
        assert (large[:arrived] == 1).all()
        nccl.ncclCommRevoke(comm, 0)
    rank.synchronize()
    nccl.ncclCommDestroy(comm)
    for event in events:
        driver.cuEventDestroy_v2(event)
    return arrived
