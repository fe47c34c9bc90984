"""The host engine checks its arguments, reports errors and ends communicators as NCCL does."""

import ctypes
import os
import subprocess
import sys

import numpy as np
import pytest
import rank_programs as bodies
from driver_calls import Gate
from host_checks import blocked, hangs_by_mismatch, in_thread, join, refused, start, sum_ones, wait_for, wait_ready
from host_ranks import as_threads
from nccl_calls import (
    INTERNAL,
    INVALID_ARGUMENT,
    INVALID_USAGE,
    MAX,
    REMOTE,
    SCALAR_HOST,
    SUCCESS,
    SUM,
    UNHANDLED_CUDA,
    VERSION,
    CollConfig,
    Config,
    SimInfo,
    UniqueId,
)
from paths import SUPPORT


def test_version_and_error_strings(nccl):
    version = ctypes.c_int()
    nccl.ncclGetVersion(ctypes.byref(version))
    assert version.value == VERSION
    strings = [nccl.library.ncclGetErrorString(code).decode() for code in range(10)]
    assert strings[0] == "no error"
    assert strings[8:] == ["timeout", "unknown result code"]
    assert ctypes.c_char.in_dll(nccl.library, "ncclpyHostEngine")
    refused(INVALID_ARGUMENT, "version argument is NULL", nccl.ncclGetVersion, None)
    refused(INVALID_ARGUMENT, "out argument is NULL", nccl.ncclGetUniqueId, None)


def test_operations_with_invalid_arguments_are_refused(nccl, comms, streams):
    value = np.ones(4, np.float32)
    p, comm, stream = bodies.pointer(value), comms[0], streams[0]
    for call in (
        lambda root: nccl.ncclReduce(p, p, 4, 7, SUM, root, comm, stream),
        lambda root: nccl.ncclBroadcast(p, p, 4, 7, root, comm, stream),
        lambda root: nccl.ncclGather(p, p, 4, 7, root, comm, stream),
        lambda root: nccl.ncclScatter(p, p, 4, 7, root, comm, stream),
        lambda root: nccl.ncclSend(p, 4, 7, root, comm, stream),
        lambda root: nccl.ncclRecv(p, 4, 7, root, comm, stream),
    ):
        refused(INVALID_ARGUMENT, "invalid root 7 (root should be in the 0..3 range)", call, 7)
        refused(INVALID_ARGUMENT, "invalid root -1", call, -1)
    reduce = nccl.ncclAllReduce
    refused(INVALID_ARGUMENT, "AllReduce : invalid type 12", reduce, p, p, 4, 12, SUM, comm, stream)
    refused(INVALID_ARGUMENT, "AllReduce : invalid type -1", reduce, p, p, 4, -1, SUM, comm, stream)
    refused(INVALID_ARGUMENT, "invalid reduction operation -1", reduce, p, p, 4, 7, -1, comm, stream)
    refused(INVALID_ARGUMENT, "reduction operation 9999999 unknown", reduce, p, p, 4, 7, 9999999, comm, stream)
    refused(INVALID_ARGUMENT, "comm argument is NULL", reduce, p, p, 4, 7, SUM, None, stream)
    refused(INVALID_ARGUMENT, "is not a communicator", reduce, p, p, 4, 7, SUM, 0x1234560, stream)
    refused(INVALID_ARGUMENT, "sendbuff argument is NULL", reduce, None, p, 4, 7, SUM, comm, stream)
    refused(INVALID_ARGUMENT, "recvbuff argument is NULL", reduce, p, None, 4, 7, SUM, comm, stream)
    refused(UNHANDLED_CUDA, "is not a stream", reduce, p, p, 4, 7, SUM, comm, 0x777)
    refused(INVALID_USAGE, "send to self without a matching recv", nccl.ncclSend, p, 4, 7, 0, comm, stream)
    refused(INVALID_USAGE, "recv to self without a matching send", nccl.ncclRecv, p, 4, 7, 0, comm, stream)
    # More bytes than an address can hold: in one block, or in the blocks of four ranks.
    refused(INVALID_ARGUMENT, "count 4611686018427387904", reduce, p, p, 2**62, 7, SUM, comm, stream)
    refused(INVALID_ARGUMENT, "count 4611686018427387904", nccl.ncclSend, p, 2**62, 7, 1, comm, stream)
    refused(INVALID_ARGUMENT, "of 4 ranks", nccl.ncclAllGather, p, p, 2**60, 7, comm, stream)
    # Operations of no elements complete at once, whatever their pointers.
    assert reduce(None, None, 0, 7, SUM, comm, stream) == SUCCESS
    nccl.driver.cuStreamSynchronize(stream)
    assert sum_ones(nccl, comms, streams) == 4


def test_error_in_a_group_launches_nothing(nccl, comms, streams):
    values = [np.ones(4, np.float32) for _ in comms]
    nccl.ncclGroupStart()
    for comm, stream, value in zip(comms, streams, values, strict=False):
        p = bodies.pointer(value)
        nccl.ncclAllReduce(p, p, 4, 7, SUM, comm, stream)
    refused(INVALID_ARGUMENT, "invalid type 99", nccl.ncclAllReduce, 8, 8, 4, 99, SUM, comms[0], streams[0])
    nccl.ncclGroupStart()
    assert nccl.ncclGroupEnd() == SUCCESS
    refused(INVALID_ARGUMENT, "invalid type 99", nccl.ncclGroupEnd)
    for stream in streams:
        nccl.driver.cuStreamSynchronize(stream)
    assert all((value == 1).all() for value in values)
    refused(INVALID_USAGE, "not in a group call", nccl.ncclGroupEnd)
    assert sum_ones(nccl, comms, streams) == 4


def test_group_starts_at_its_outermost_end(nccl, comms, streams):
    values = [np.ones(4, np.float32) for _ in comms]
    nccl.ncclGroupStart()
    for comm, stream, value in zip(comms, streams, values, strict=False):
        nccl.ncclGroupStart()
        p = bodies.pointer(value)
        nccl.ncclAllReduce(p, p, 4, 7, SUM, comm, stream)
        nccl.ncclGroupEnd()
    for stream in streams:
        nccl.driver.cuStreamSynchronize(stream)
    assert all((value == 1).all() for value in values)
    nccl.ncclGroupEnd()
    for stream in streams:
        nccl.driver.cuStreamSynchronize(stream)
    assert all((value == 4).all() for value in values)


def test_init_with_invalid_arguments_is_refused(nccl):
    uid = UniqueId.from_buffer_copy(nccl.unique_id())
    comm = ctypes.c_void_p()
    out = ctypes.byref(comm)
    refused(INVALID_ARGUMENT, "Invalid rank requested : 2/2", nccl.ncclCommInitRank, out, 2, uid, 2)
    refused(INVALID_ARGUMENT, "Invalid rank requested : -1/2", nccl.ncclCommInitRank, out, 2, uid, -1)
    refused(INVALID_ARGUMENT, "nranks=0", nccl.ncclCommInitRank, out, 0, uid, 0)
    refused(INVALID_ARGUMENT, "newcomm argument is NULL", nccl.ncclCommInitRank, None, 1, uid, 0)
    refused(
        INVALID_ARGUMENT, "nId = 3, nranks=2", nccl.ncclCommInitRankScalable, out, 2, 0, 3, ctypes.byref(uid), None
    )
    refused(INVALID_ARGUMENT, "not made by ncclGetUniqueId", nccl.ncclCommInitRank, out, 1, UniqueId(), 0)
    refused(INVALID_ARGUMENT, "comms argument is NULL", nccl.ncclCommInitAll, None, 1, None)
    refused(INVALID_ARGUMENT, "Invalid device count requested : -1", nccl.ncclCommInitAll, out, -1, None)
    two = (ctypes.c_void_p * 2)()
    refused(INVALID_ARGUMENT, "Invalid device 99", nccl.ncclCommInitAll, two, 2, (ctypes.c_int * 2)(0, 99))
    refused(INVALID_USAGE, "Duplicate GPU", nccl.ncclCommInitAll, two, 2, (ctypes.c_int * 2)(1, 1))
    assert comm.value is None
    assert list(two) == [None, None]
    # The refused calls have not used the id.
    nccl.ncclCommDestroy(nccl.init(1, bytes(uid), 0))


def test_init_all_checks_its_device_list(nccl):
    comms = (ctypes.c_void_p * 3)()
    nccl.ncclCommInitAll(comms, 3, (ctypes.c_int * 3)(5, 2, 7))
    assert [nccl.get("ncclCommCuDevice", comm) for comm in comms] == [5, 2, 7]
    assert nccl.driver.get("cuCtxGetDevice", ctypes.c_int) == 0
    for comm in comms:
        nccl.ncclCommDestroy(comm)


def test_scalable_init_uses_the_first_id(nccl):
    ids = [UniqueId.from_buffer_copy(nccl.unique_id()) for _ in range(2)]
    array = (UniqueId * 2)(*ids)

    def body(rank):
        comm = ctypes.c_void_p()
        nccl.ncclCommInitRankScalable(ctypes.byref(comm), rank.nranks, rank.rank, 2, array, None)
        return comm.value

    for comm in as_threads(nccl, 2, body):
        nccl.ncclCommDestroy(comm)


@pytest.mark.parametrize("where", ["threads", "processes"])
def test_two_ranks_on_one_device_are_refused(nccl, processes, where):
    run = as_threads if where == "threads" else processes.run
    for code, text in run(nccl, 2, bodies.init_on_device_zero):
        assert code == INVALID_USAGE
        assert text == "Duplicate GPU detected : rank 0 and rank 1 both on device 0"


def test_same_device_number_on_different_machines_is_accepted(nccl, processes):
    assert processes.run(nccl, 2, bodies.reduce_on_device_zero_of_own_machine) == [[3.0] * 8] * 2


def test_unique_id_used_twice_is_refused(nccl):
    uid = nccl.unique_id()
    comm = nccl.init(1, uid, 0)
    refused(INVALID_USAGE, "rank 0 has already joined", nccl.init, 1, uid, 0)
    nccl.ncclCommDestroy(comm)
    refused(INVALID_USAGE, "already used for a communicator", nccl.init, 1, uid, 0)


def test_ranks_with_different_sizes_are_refused(nccl):
    uid = nccl.unique_id()
    comm = ctypes.c_void_p()
    thread = in_thread(lambda: nccl.library.ncclCommInitRank(ctypes.byref(comm), 2, UniqueId.from_buffer_copy(uid), 0))
    assert blocked(thread)
    refused(INVALID_ARGUMENT, "there are 3 ranks, another one said 2", nccl.init, 3, uid, 1)
    nccl.ncclCommAbort(comm)
    assert join(thread) == INTERNAL


def test_unique_id_of_a_dead_process_is_refused(nccl, tmp_path):
    code = (
        "from nccl_calls import Nccl\n"
        "from ncclpy.core.runtime.search import host_engine_path\n"
        "print(Nccl(host_engine_path()).unique_id().hex())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT)}
    # Outside the source tree, where ncclpy is not built.
    output = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    refused(INVALID_USAGE, "has ended", nccl.init, 1, bytes.fromhex(output.stdout.strip()), 0)


def test_many_unused_ids_and_communicators_leave_nothing_open(nccl):
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    def mappings():
        with open("/proc/self/maps") as maps:
            return sum("ncclpy" in line and "memfd" in line for line in maps)

    nccl.ncclCommDestroy(nccl.init(1, nccl.unique_id(), 0))
    before = descriptors(), mappings()
    for _ in range(50):
        assert nccl.init_all(0) == []
        comms = nccl.init_all(2)
        for comm in comms:
            nccl.ncclCommDestroy(comm)
        comm = nccl.init(1, nccl.unique_id(), 0)
        nccl.ncclCommAbort(comm)
    assert (descriptors(), mappings()) == before


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"blocking": 2}, "blocking attribute value 2"),
        ({"cgaClusterSize": -3}, "cgaClusterSize attribute value -3"),
        ({"minCTAs": 0}, "min/max channels attribute value 0/"),
        ({"minCTAs": 8, "maxCTAs": 4}, "min/max channels attribute value 8/4"),
        ({"splitShare": 5}, "splitShare attribute value 5"),
        ({"CTAPolicy": 9}, "CTAPolicy attribute value 9"),
        ({"nChannelsPerNetPeer": 1000}, "nChannelsPerNetPeer attribute value 1000"),
        ({"graphUsageMode": 3}, "graphUsageMode attribute value 3"),
        ({"magic": 1}, "not initialized via NCCL_CONFIG_INITIALIZER"),
        ({"size": 8}, "not initialized via NCCL_CONFIG_INITIALIZER"),
    ],
)
def test_invalid_config_is_refused(nccl, values, words):
    refused(INVALID_ARGUMENT, words, nccl.init, 1, nccl.unique_id(), 0, Config(**values))


def test_config_of_older_and_newer_releases_is_read(nccl):
    # 2.14's struct ends after `blocking`; the memory behind it must not be read.
    old = Config(size=24, version=21400, blocking=1, splitShare=77, minCTAs=-5)
    nccl.ncclCommDestroy(nccl.init(1, nccl.unique_id(), 0, old))
    newer = Config(size=ctypes.sizeof(Config) + 64, version=VERSION + 1000, minCTAs=2, maxCTAs=4)
    nccl.ncclCommDestroy(nccl.init(1, nccl.unique_id(), 0, newer))


def test_queries_return_size_rank_and_device(nccl, comms):
    for function in ("ncclCommCount", "ncclCommCuDevice", "ncclCommUserRank", "ncclCommGetAsyncError"):
        refused(INVALID_ARGUMENT, "comm argument is NULL", nccl.get, function, None)
        refused(INVALID_ARGUMENT, "argument is NULL", getattr(nccl, function), comms[0], None)
    assert [nccl.get("ncclCommUserRank", comm) for comm in comms] == [0, 1, 2, 3]
    assert nccl.async_error(comms[0]) == SUCCESS


def test_destroyed_communicator_refuses_calls(nccl):
    comm = nccl.init(1, nccl.unique_id(), 0)
    assert nccl.ncclCommFinalize(comm) == SUCCESS
    refused(INVALID_ARGUMENT, "finalized or revoked before", nccl.ncclCommFinalize, comm)
    nccl.ncclCommDestroy(comm)
    for function in (nccl.ncclCommDestroy, nccl.ncclCommFinalize, nccl.ncclCommAbort):
        refused(INVALID_ARGUMENT, "destroyed or aborted", function, comm)
        assert function(None) == SUCCESS
    refused(INVALID_ARGUMENT, "destroyed or aborted", nccl.ncclAllReduce, 8, 8, 1, 7, SUM, comm, None)


def test_second_destroy_in_a_group_is_not_counted_for_another_communicator(nccl):
    """The other communicator of this process still reports its peer's death."""
    uid = nccl.unique_id()
    peer = start("comm = init(3, 2, sys.argv[1])\nsay('in')\ntime.sleep(60)", uid.hex())
    comms = [ctypes.c_void_p(), ctypes.c_void_p()]

    def init(rank):
        nccl.driver.use(rank)
        nccl.init_into(comms[rank], 3, uid, rank)

    for thread in [in_thread(init, rank) for rank in range(2)]:
        join(thread)
    assert peer.stdout.readline() == "in\n"
    nccl.ncclGroupStart()
    nccl.ncclCommDestroy(comms[0])
    nccl.ncclCommDestroy(comms[0])
    nccl.ncclGroupEnd()
    peer.kill()
    peer.communicate()
    wait_for(lambda: nccl.async_error(comms[1]) == REMOTE)
    nccl.ncclCommAbort(comms[1])


def test_destroy_in_any_order_waits_for_queued_work(nccl, streams):
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        comms = nccl.init_all(4)
        values = [np.ones(200_000, np.float32) for _ in comms]
        for _ in range(3):
            nccl.ncclGroupStart()
            for comm, stream, value in zip(comms, streams, values, strict=False):
                p = bodies.pointer(value)
                nccl.ncclAllReduce(p, p, 200_000, 7, SUM, comm, stream)
            nccl.ncclGroupEnd()
        for rank in order:
            nccl.ncclCommDestroy(comms[rank])
        # The last destroy has waited for all operations.
        assert all((value == 64).all() for value in values)


def test_finalize_waits_for_issued_work(nccl, streams):
    comms = nccl.init_all(2)
    values = [np.ones(200_000, np.float32) for _ in comms]
    nccl.ncclGroupStart()
    for comm, stream, value in zip(comms, streams, values, strict=False):
        nccl.ncclAllReduce(bodies.pointer(value), bodies.pointer(value), 200_000, 7, SUM, comm, stream)
    nccl.ncclGroupEnd()
    nccl.ncclCommFinalize(comms[0])
    assert (values[0] == 2).all()
    nccl.ncclCommFinalize(comms[1])
    for comm in comms:
        nccl.ncclCommDestroy(comm)


def test_collectives_with_config_equal_plain_ones(nccl, comms, streams):
    """Every nccl*Config call does what its plain variant does, with a configuration and without one."""
    for config in (None, ctypes.byref(CollConfig(minCTAs=1, maxCTAs=2, algSelection=b"ring"))):
        send, recv = [np.ones(8, np.float32) for _ in comms], [np.zeros(32, np.float32) for _ in comms]
        nccl.ncclGroupStart()
        for rank, (comm, stream) in enumerate(zip(comms, streams, strict=False)):
            s, r = bodies.pointer(send[rank]), recv[rank]
            nccl.ncclAllReduceConfig(s, bodies.pointer(r, 0), 2, 7, SUM, comm, stream, config)
            nccl.ncclBroadcastConfig(s, bodies.pointer(r, 2), 2, 7, 1, comm, stream, config)
            nccl.ncclReduceConfig(s, bodies.pointer(r, 4), 2, 7, SUM, 2, comm, stream, config)
            nccl.ncclAllGatherConfig(s, bodies.pointer(r, 6), 2, 7, comm, stream, config)
            nccl.ncclReduceScatterConfig(s, bodies.pointer(r, 14), 2, 7, SUM, comm, stream, config)
            nccl.ncclAlltoAllConfig(s, bodies.pointer(r, 16), 1, 7, comm, stream, config)
            nccl.ncclGatherConfig(s, bodies.pointer(r, 20), 2, 7, 0, comm, stream, config)
            nccl.ncclScatterConfig(s, bodies.pointer(r, 28), 2, 7, 0, comm, stream, config)
        nccl.ncclGroupEnd()
        for rank, stream in enumerate(streams):
            nccl.driver.cuStreamSynchronize(stream)
            expected = (
                [4, 4, 1, 1] + [4 * (rank == 2)] * 2 + [1] * 8 + [4, 4] + [1] * 4 + [int(rank == 0)] * 8 + [1, 1]
            )
            assert list(recv[rank][:30]) == expected
    single = nccl.init(1, nccl.unique_id(), 0)
    p = bodies.pointer(send[0])
    for values, words in (
        ({"magic": 5}, "not initialized via NCCL_COLLCONFIG_INITIALIZER"),
        ({"maxCTAs": 1000}, "maxCTAs attribute value 1000"),
        ({"minCTAs": 3, "maxCTAs": 2}, "min/max channels attribute value 3/2"),
        ({"CTAPolicy": 8}, "CTAPolicy attribute value 8"),
        ({"forceAlgSelection": 7}, "forceAlgSelection attribute value 7"),
    ):
        wrong = CollConfig(**values)
        call = nccl.ncclAllReduceConfig
        refused(INVALID_ARGUMENT, words, call, p, p, 1, 7, SUM, single, streams[0], ctypes.byref(wrong))
    nccl.ncclCommDestroy(single)


@pytest.mark.parametrize("blocking", [1, 0])
def test_launch_event_is_recorded_in_the_stream_of_the_call(nccl, blocking):
    """The default stream is that of the communicator's device, whichever device is current at the launch."""
    nccl.driver.use(1)
    comm = ctypes.c_void_p()
    nccl.init_into(comm, 1, nccl.unique_id(), 0, Config(blocking=blocking))
    assert wait_ready(nccl, comm) == SUCCESS
    event = nccl.driver.event()
    value = np.ones(1, np.float32)
    config = CollConfig(launchCompletionEvent=event)
    with Gate(nccl.driver, None):
        nccl.driver.use(0)
        p = bodies.pointer(value)
        nccl.ncclAllReduceConfig(p, p, 1, 7, SUM, comm, None, ctypes.byref(config))
        assert wait_ready(nccl, comm) == SUCCESS, nccl.last_error(comm)
        assert not nccl.driver.ready("cuEventQuery", event)
    nccl.driver.cuEventSynchronize(event)
    nccl.ncclCommDestroy(comm)


def test_simulated_group_launches_nothing(nccl, comms, streams):
    def simulated(count):
        info = SimInfo()
        nccl.ncclGroupStart()
        for comm, stream, value in zip(comms, streams, values, strict=False):
            nccl.ncclAllReduce(bodies.pointer(value), bodies.pointer(value), count, 7, SUM, comm, stream)
        nccl.ncclGroupSimulateEnd(ctypes.byref(info))
        return info.estimatedTime

    values = [np.ones(10_000, np.float32) for _ in comms]
    assert 0 < simulated(1) < simulated(10_000)
    for stream in streams:
        nccl.driver.cuStreamSynchronize(stream)
    assert all((value == 1).all() for value in values)
    nccl.ncclGroupStart()
    words = "not initialized via NCCL_SIM_INFO_INITIALIZER"
    refused(INVALID_ARGUMENT, words, nccl.ncclGroupSimulateEnd, ctypes.byref(SimInfo(magic=1)))
    assert sum_ones(nccl, comms, streams) == 4


def test_user_operators_scale_and_are_checked(nccl, comms, streams):
    scalar, op = np.array([3], np.float32), ctypes.c_int()
    create = nccl.ncclRedOpCreatePreMulSum
    p = bodies.pointer(scalar)
    create(ctypes.byref(op), p, 7, SCALAR_HOST, comms[0])
    x = np.ones(1, np.float32)
    refused(INVALID_ARGUMENT, "unknown", nccl.ncclAllReduce, p, p, 1, 7, op.value, comms[1], streams[1])
    wrong_type = "Data type supplied to user-created ncclRedOp_t does not match"
    refused(INVALID_ARGUMENT, wrong_type, nccl.ncclAllReduce, p, p, 1, 8, op.value, comms[0], streams[0])
    refused(INVALID_ARGUMENT, "unknown to this communicator", nccl.ncclRedOpDestroy, op.value, comms[1])
    refused(INVALID_ARGUMENT, "is a NCCL builtin", nccl.ncclRedOpDestroy, MAX, comms[0])
    refused(INVALID_ARGUMENT, "garbage", nccl.ncclRedOpDestroy, -4, comms[0])
    refused(INVALID_ARGUMENT, "invalid type 50", create, ctypes.byref(op), p, 50, SCALAR_HOST, comms[0])
    refused(INVALID_ARGUMENT, "scalar argument is NULL", create, ctypes.byref(op), None, 7, SCALAR_HOST, comms[0])
    # Destroyed between the call and the end of the group: the operation has a copy of what it needs.
    ops = []
    for comm in comms:
        create(ctypes.byref(op), p, 7, SCALAR_HOST, comm)
        ops.append(op.value)
    nccl.ncclGroupStart()
    out = [np.zeros(1, np.float32) for _ in comms]
    for rank, comm in enumerate(comms):
        nccl.ncclAllReduce(bodies.pointer(x), bodies.pointer(out[rank]), 1, 7, ops[rank], comm, streams[rank])
        nccl.ncclRedOpDestroy(ops[rank], comm)
    nccl.ncclGroupEnd()
    for stream in streams:
        nccl.driver.cuStreamSynchronize(stream)
    assert [value[0] for value in out] == [12] * 4
    late = (p, p, 1, 7, ops[0], comms[0], streams[0])
    refused(INVALID_ARGUMENT, "unknown to this communicator", nccl.ncclAllReduce, *late)
    refused(INVALID_ARGUMENT, "unknown to this communicator", nccl.ncclRedOpDestroy, ops[0], comms[0])


def test_memory_and_registrations_are_checked(nccl, comms):
    pointer = ctypes.c_void_p()
    nccl.ncclMemAlloc(ctypes.byref(pointer), 1000)
    assert pointer.value % 256 == 0
    handle = ctypes.c_void_p()
    nccl.ncclCommRegister(comms[0], pointer, 1000, ctypes.byref(handle))
    register = nccl.ncclCommRegister
    refused(INVALID_ARGUMENT, "buff argument is NULL", register, comms[0], None, 10, ctypes.byref(handle))
    refused(INVALID_ARGUMENT, "handle argument is NULL", register, comms[0], pointer, 10, None)
    refused(INVALID_ARGUMENT, "reach beyond their allocation", register, comms[0], pointer, 5000, ctypes.byref(handle))
    refused(INVALID_USAGE, "Could not find handle", nccl.ncclCommDeregister, comms[1], handle)
    nccl.ncclCommDeregister(comms[0], handle)
    refused(INVALID_USAGE, "Could not find handle", nccl.ncclCommDeregister, comms[0], handle)
    assert nccl.ncclCommDeregister(comms[0], None) == SUCCESS
    nccl.ncclMemFree(pointer)
    refused(UNHANDLED_CUDA, "was not allocated", nccl.ncclMemFree, pointer)
    pinned = nccl.driver.pinned(100)
    refused(UNHANDLED_CUDA, "was not allocated", nccl.ncclMemFree, pinned)
    nccl.driver.cuMemFreeHost(pinned)
    refused(UNHANDLED_CUDA, "ptr argument is NULL", nccl.ncclMemAlloc, None, 10)
    assert nccl.ncclMemFree(None) == SUCCESS


def test_mismatched_collectives_set_an_async_error(nccl, streams):
    comms = nccl.init_all(2)
    buffers = [np.ones(1000, np.float32) for _ in comms]
    nccl.ncclGroupStart()
    for rank, comm in enumerate(comms):
        p = bodies.pointer(buffers[rank])
        nccl.ncclAllReduce(p, p, 1000 - rank, 7, SUM, comm, streams[rank])
    nccl.ncclGroupEnd()
    waiting = [hangs_by_mismatch(nccl, comm, stream) for comm, stream in zip(comms, streams, strict=False)]
    for comm in comms:
        text = nccl.last_error(comm)
        assert "rank 0 calls AllReduce of 1000 float32 (sum), rank 1 calls AllReduce of 999 float32 (sum)" in text
        refused(INVALID_USAGE, "the ranks do not agree", nccl.get, "ncclCommCount", comm)
        nccl.ncclCommAbort(comm)
    for thread in waiting:
        join(thread)
    assert all((buffer == 1).all() for buffer in buffers)


def test_message_of_the_wrong_size_sets_an_async_error(nccl, processes, streams):
    comms = nccl.init_all(2)
    value = np.zeros(100, np.uint8)
    nccl.ncclGroupStart()
    nccl.ncclSend(bodies.pointer(value), 100, 1, 1, comms[0], streams[0])
    nccl.ncclRecv(bodies.pointer(value), 90, 1, 0, comms[1], streams[1])
    nccl.ncclGroupEnd()
    for comm, stream in zip(comms, streams, strict=False):
        hangs_by_mismatch(nccl, comm, stream)
        assert "rank 0 sends 100 uint8 to rank 1, which receives 90 uint8" in nccl.last_error(comm)
        nccl.ncclCommAbort(comm)
    assert processes.run(nccl, 2, bodies.wrong_size)[1] == INVALID_USAGE


@pytest.mark.parametrize("sent, wanted", [((8, 7), (4, 8)), ((4, 7), (4, 2))], ids=["same-bytes", "same-count"])
def test_message_of_another_type_sets_an_async_error(nccl, processes, streams, sent, wanted):
    """A message with the expected number of bytes, but of another type: float32 into float64, float32 into int32."""
    comms = nccl.init_all(2)
    source, target = np.ones(32, np.uint8), np.zeros(32, np.uint8)
    nccl.ncclGroupStart()
    nccl.ncclSend(bodies.pointer(source), *sent, 1, comms[0], streams[0])
    nccl.ncclRecv(bodies.pointer(target), *wanted, 0, comms[1], streams[1])
    nccl.ncclGroupEnd()
    names = {2: "int32", 7: "float32", 8: "float64"}
    words = f"rank 0 sends {sent[0]} {names[sent[1]]} to rank 1, which receives {wanted[0]} {names[wanted[1]]}"
    for comm, stream in zip(comms, streams, strict=False):
        hangs_by_mismatch(nccl, comm, stream)
        assert words in nccl.last_error(comm)
        nccl.ncclCommAbort(comm)
    assert not target.any()
    assert processes.run(nccl, 2, bodies.wrong_type, sent, wanted)[1] == (INVALID_USAGE, True)
