"""`sendrecv`: a send and a receive that need each other, as one call."""

from __future__ import annotations

import gc
import sys

import numpy as np
import pytest

import conformance
import ncclpy
import testing

LONG = 60.0


@pytest.fixture(params=conformance.worlds(), ids="{}ranks".format)
def comms(request):
    yield from testing.communicators(request.param)


def in_threads(comms, call):
    testing.run_threads(len(comms), lambda rank: call(rank.rank, comms[rank.rank]), comms=comms)


def in_one_group(comms, call):
    def body():
        with ncclpy.group():
            for rank, comm in enumerate(comms):
                call(rank, comm)

    testing.run_with_deadline(body)


@pytest.mark.parametrize("each", [in_threads, in_one_group])
@pytest.mark.parametrize("count", [1, 1000, 100_000])
def test_around_a_ring(comms, arrays, each, count):
    """Every rank sends its number to the next one, in a message of a length of its own."""
    n = len(comms)
    sends = [arrays.make(np.full(count + r, r + 1, np.float32), comm.device) for r, comm in enumerate(comms)]
    recvs = [arrays.make(np.zeros(count + (r - 1) % n, np.float32), comm.device) for r, comm in enumerate(comms)]

    def call(r, comm):
        comm.sendrecv(arrays.argument(sends[r]), (r + 1) % n, arrays.argument(recvs[r]), (r - 1) % n)

    each(comms, call)
    for r, recv in enumerate(recvs):
        assert (arrays.read(recv) == (r - 1) % n + 1).all()


def test_two_types_and_sizes(host_engine, comms2):
    """The send and the receive differ in type and size."""
    there, back = np.arange(3, dtype=np.int8), np.arange(5.0)
    first, second = np.empty(5), np.empty(3, np.int8)
    with ncclpy.group():
        comms2[0].sendrecv(there, 1, first, 1)
        comms2[1].sendrecv(back, 0, second, 0)
    assert first.tolist() == back.tolist() and second.tolist() == there.tolist()


def test_sendrecv_matches_a_send_and_a_receive(host_engine, comms2):
    here, there = np.array([1.0]), np.array([2.0])
    got = [np.zeros(1), np.zeros(1)]

    def call(rank, comm):
        if rank == 0:
            comm.sendrecv(here, 1, got[0], 1)
            return
        with ncclpy.group():
            comm.recv(got[1], 0)
            comm.send(there, 0)

    in_threads(comms2, call)
    assert got[0] == 2 and got[1] == 1


def test_to_oneself(comm1, arrays):
    send, recv = arrays.make(np.arange(4.0), comm1.device), arrays.make(np.zeros(4), comm1.device)
    comm1.sendrecv(arrays.argument(send), 0, arrays.argument(recv), 0)
    ncclpy.synchronize(comm1.device, timeout=LONG)
    assert arrays.read(recv).tolist() == [0, 1, 2, 3]


def test_sendrecv_in_a_group_is_two_calls(host_engine, comm1):
    send, recv = np.ones(2), np.zeros(2)
    with pytest.raises(KeyError):
        with ncclpy.group() as group:
            comm1.sendrecv(send, 0, recv, 0)
            assert "2 calls recorded" in repr(group)
            raise KeyError
    assert recv.tolist() == [0, 0], "nothing was launched"
    with ncclpy.group():
        comm1.sendrecv(send, 0, recv, 0)
        assert recv.tolist() == [0, 0]
    assert recv.tolist() == [1, 1]


def test_plan_records_sendrecv(host_engine, comm1):
    send, recv = np.ones(2), np.zeros(2)
    plan = ncclpy.Plan()
    with plan.record():
        comm1.sendrecv(send, 0, recv, 0)
    for value in (3.0, 4.0):
        send[:] = value
        plan.launch()
        ncclpy.synchronize(comm1.device, timeout=LONG)
        assert recv.tolist() == [value, value]


def test_memory_with_and_without_a_stream(host_engine, comm1):
    """The call waits for the array in CPU memory; the device memory needs only its stream."""
    pointer = ncclpy.core.runtime.device.allocate(16, comm1.device)
    there = ncclpy.Buffer(pointer, 2, "float64", device=comm1.device)
    testing.write(pointer, np.array([5.0, 6.0]), comm1.device)
    here = np.zeros(2)
    comm1.sendrecv(there, 0, here, 0)
    assert here.tolist() == [5, 6]
    ncclpy.core.runtime.device.free(pointer)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (lambda a, b: (a, 2, b, 0), "dest: rank 2 does not exist"),
        (lambda a, b: (a, 0, b, -1), "source: rank -1 does not exist"),
        (lambda a, b: (a[::2], 0, b, 0), "send: "),
        (lambda a, b: (a, 0, b[::2], 0), "recv: "),
        (lambda a, b: (a, 0, np.broadcast_to(b, (4,)), 0), "recv: "),
    ],
)
def test_arguments_that_do_not_fit_are_refused(host_engine, comm1, arguments, words):
    a, b = np.zeros(4), np.zeros(4)
    with pytest.raises((TypeError, ValueError), match=words):
        comm1.sendrecv(*arguments(a, b))
    comm1.sendrecv(a, 0, b, 0)


def test_read_only_receive_buffer_is_refused(host_engine, comm1):
    closed = np.zeros(2)
    closed.flags.writeable = False
    with pytest.raises(ValueError, match="recv: "):
        comm1.sendrecv(np.ones(2), 0, closed, 0)
    comm1.sendrecv(closed, 0, np.ones(2), 0)


def test_missing_peer_times_out(host_engine):
    """The deadline ends the call, the error names it, and memory that may still be written is held."""
    comms = ncclpy.Communicator.init_all([0, 1], timeout=0.2)
    send, recv = np.ones(100_000), np.zeros(100_000)
    with pytest.raises(ncclpy.NcclTimeout, match="ncclGroupEnd"):
        comms[0].sendrecv(send, 1, recv, 1)
    assert comms[0].closed or not comms[0].is_ready()
    for comm in comms:
        comm.abort()


def test_peers_that_disagree_raise(host_engine, comms2):
    def call(rank, comm):
        with pytest.raises(ncclpy.NcclError, match="the ranks do not agree"):
            comm.sendrecv(np.ones(2), 1 - rank, np.zeros(2 + rank), 1 - rank)
            comm.sendrecv(np.ones(2), 1 - rank, np.zeros(2), 1 - rank)  # rank 0's receive fits, so it is told later

    in_threads(comms2, call)
    for comm in comms2:
        comm.abort()


def ask(comm):
    """Poll, as an event loop would, until the communicator has an error, and raise it by the next call."""
    testing.wait_for(lambda: comm.async_error() is not None)
    comm.barrier()


# The next calls of ranks 0 and 2. By then, or meanwhile, rank 1 has found that the message does not fit.
GOING_ON = {
    "barrier": lambda comm: comm.barrier(),
    "split": lambda comm: comm.split(0),
    "send": lambda comm: comm.send(np.zeros(1 << 18), 2 - comm.rank),
    "recv": lambda comm: comm.recv(np.zeros(1), 2 - comm.rank),
    "nothing but to ask": ask,
}


def go_on(rank):
    """Return this rank's errors for a message that does not fit, by the next call of ranks 0 and 2 and by count."""
    whole, found = rank.init(timeout=LONG), {}
    for name, call in GOING_ON.items():
        for count in (3, 1 << 18):  # 3 elements are sent in one piece, 1 << 18 are read in place
            comm = ncclpy.Communicator.init(3, rank.rank, rank.unique_id(), device=rank.device, timeout=LONG)
            try:
                if rank.rank == 0:
                    comm.send(np.zeros(count, np.float32), 1)
                elif rank.rank == 1:
                    comm.recv(np.zeros(count), 0)
                if rank.rank != 1:
                    call(comm)
                found[name, count] = "nothing"
            except ncclpy.NcclError as error:
                found[name, count] = (type(error), error.result, str(error).partition("last error: ")[2])
            whole.barrier()
            comm.abort()
    return found


@pytest.mark.parametrize("run", [testing.run_threads, testing.run_processes], ids=["threads", "processes"])
def test_message_that_does_not_fit_is_an_error_on_all_ranks(host_engine, run):
    told = (
        "the ranks do not agree: rank 0 sends {0} float32 to rank 1, which receives {0} float64 (communicator of 3 "
        f"ranks) [NCCL {'.'.join(map(str, ncclpy.library().version))}]"
    )
    for found in run(3, go_on):
        assert found == {
            (name, count): (ncclpy.NcclError, ncclpy.Result.INVALID_USAGE, told.format(count))
            for name in GOING_ON
            for count in (3, 1 << 18)
        }


def test_refused_call_launches_nothing(host_engine, comm1):
    """The fault refuses the receive: the end of the group launches the send neither, and raises the same error."""
    send, recv = np.ones(2), np.zeros(2)
    with ncclpy.faults("rank=0 call=Recv do=error"):
        with pytest.raises(ncclpy.NcclError):
            comm1.sendrecv(send, 0, recv, 0)
    assert recv.tolist() == [0, 0]
    comm1.sendrecv(send, 0, recv, 0)
    assert recv.tolist() == [1, 1]


def test_nonblocking_communicators(host_engine):
    config = ncclpy.Config(blocking=False)
    with ncclpy.group():
        comms = ncclpy.Communicator.init_all([0, 1], config=config)
    for comm in comms:
        comm.wait_ready(LONG)
    got = [np.zeros(3), np.zeros(3)]

    in_threads(comms, lambda rank, comm: comm.sendrecv(np.full(3, rank + 1.0), 1 - rank, got[rank], 1 - rank))
    assert got[0].tolist() == [2, 2, 2] and got[1].tolist() == [1, 1, 1]
    for comm in comms:
        comm.close()


def test_recorder_has_sendrecv_as_one_call(host_engine, comms2):
    recorder = ncclpy.recorder
    recorder.resize(100)
    recorder.record_all()
    try:

        def call(rank, comm):
            comm.sendrecv(np.ones(3), 1 - rank, np.zeros(2, np.int8) if rank else np.zeros(3), 1 - rank)

        with pytest.raises(ncclpy.NcclError, match="This rank called sendrecv #1 at"):
            in_threads(comms2, call)
        entries = recorder.snapshot()["entries"]
        assert sorted((each["rank"], each["operation"], each["root"], each["count"]) for each in entries) == [
            (0, "sendrecv", 1, 3), (1, "sendrecv", 0, 2),
        ]  # fmt: skip
    finally:
        recorder.record_all(False)
        recorder.resize(2000)
        for comm in comms2:
            comm.abort()


def test_sendrecv_keeps_no_reference(host_engine, comm1):
    send, recv = np.ones(2), np.zeros(2)
    comm1.sendrecv(send, 0, recv, 0)
    gc.collect()
    assert sys.getrefcount(send) == 2 and sys.getrefcount(recv) == 2
