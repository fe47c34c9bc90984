"""With ``NCCLPY_HOST_ABORT_CORRUPTS=1``, as in all tests, an abort ends other ranks' operations with wrong data."""

import numpy as np
import pytest
import rank_programs as bodies
from host_checks import blocked, in_thread, join
from nccl_calls import SUCCESS, SUM

import testing

#: The byte that the host engine writes where there are no data.
WRONG = np.frombuffer(b"\x5a" * 4, np.float32)[0]


def all_reduce(nccl, values, comm, stream):
    p = bodies.pointer(values)
    nccl.ncclAllReduce(p, p, values.size, 7, SUM, comm, stream)


def synchronizing(nccl, stream):
    return in_thread(nccl.driver.cuStreamSynchronize, stream)


@pytest.mark.parametrize("ends", ["ncclCommAbort", "ncclCommRevoke"])
@pytest.mark.parametrize("count", [1, 10_000, 1_000_000])
def test_all_reduce_beside_an_aborted_rank_completes_with_wrong_data(nccl, streams, count, ends):
    comms = nccl.init_all(3)
    values = [np.ones(count, np.float32) for _ in comms]
    for rank in (0, 1):
        all_reduce(nccl, values[rank], comms[rank], streams[rank])
    waiting = [synchronizing(nccl, stream) for stream in streams[:2]]
    assert all(blocked(thread) for thread in waiting)
    getattr(nccl, ends)(comms[0], *([0] if ends == "ncclCommRevoke" else []))
    for thread in waiting:
        join(thread)
    assert (values[0] == 1).all() and (values[1] == WRONG).all()
    assert nccl.async_error(comms[1]) == SUCCESS
    all_reduce(nccl, values[2], comms[2], streams[2])  # needs rank 1, which has completed it
    join(synchronizing(nccl, streams[2]))
    assert (values[2] == WRONG).all()
    for comm in comms[ends == "ncclCommAbort" :]:
        nccl.ncclCommAbort(comm)


@pytest.mark.parametrize("count", [1, 10_000, 1_000_000])
def test_collective_completed_before_an_abort_is_right_on_all_ranks(nccl, streams, count):
    comms = nccl.init_all(2)
    values = [np.ones(count, np.float32) for _ in comms]
    for rank in (0, 1):
        all_reduce(nccl, values[rank], comms[rank], streams[rank])
    join(synchronizing(nccl, streams[0]))
    nccl.ncclCommAbort(comms[0])
    join(synchronizing(nccl, streams[1]))
    assert (values[1] == 2).all()
    all_reduce(nccl, values[1], comms[1], streams[1])  # rank 0 never called it
    waiting = synchronizing(nccl, streams[1])
    assert blocked(waiting)
    nccl.ncclCommAbort(comms[1])
    join(waiting)
    assert (values[1] == 2).all()


def test_all_issued_collectives_of_an_aborted_rank_complete_with_wrong_data(nccl, streams):
    comms = nccl.init_all(2)
    values = [np.ones((20, 100), np.float32) for _ in comms]
    for value in values[0]:
        all_reduce(nccl, value, comms[0], streams[0])
    nccl.ncclCommAbort(comms[0])
    join(synchronizing(nccl, streams[0]))
    for value in values[1]:
        all_reduce(nccl, value, comms[1], streams[1])
    join(synchronizing(nccl, streams[1]))
    assert (values[1] == WRONG).all()
    nccl.ncclCommAbort(comms[1])


@pytest.mark.parametrize("count", [1, 1_000_000])
def test_broadcast_without_its_root_completes_with_wrong_data(nccl, streams, count):
    comms = nccl.init_all(3)
    values = [np.ones(count, np.float32) for _ in comms]
    for rank in (1, 2):
        p = bodies.pointer(values[rank])
        nccl.ncclBroadcast(p, p, count, 7, 0, comms[rank], streams[rank])
    waiting = [synchronizing(nccl, streams[rank]) for rank in (1, 2)]
    assert all(blocked(thread) for thread in waiting)
    nccl.ncclCommAbort(comms[1])
    for thread in waiting:
        join(thread)
    assert (values[2] == WRONG).all()
    for rank in (0, 2):
        nccl.ncclCommAbort(comms[rank])


@pytest.mark.parametrize("count", [1, 1_000_000])
@pytest.mark.parametrize("aborted", [0, 1])
def test_message_of_an_aborted_peer_completes_with_wrong_data(nccl, streams, count, aborted):
    """The sender's wait for the receiver ends, as does the receiver's, which gets wrong data."""
    comms = nccl.init_all(3)
    values = [np.ones(count, np.float32) for _ in comms]
    p = [bodies.pointer(value) for value in values]
    other = 1 - aborted

    def exchange(rank):
        nccl.ncclGroupStart()
        nccl.ncclRecv(p[rank], count, 7, 2, comms[rank], streams[rank])  # rank 2 never sends
        if rank == 0:
            nccl.ncclSend(p[2], count, 7, 1, comms[0], streams[0])
        else:
            nccl.ncclRecv(p[1], count, 7, 0, comms[1], streams[1])
        nccl.ncclGroupEnd()

    exchange(aborted)
    nccl.ncclCommAbort(comms[aborted])
    join(synchronizing(nccl, streams[aborted]))
    if other == 0:
        nccl.ncclSend(p[0], count, 7, 1, comms[0], streams[0])
    else:
        nccl.ncclRecv(p[1], count, 7, 0, comms[1], streams[1])
    join(synchronizing(nccl, streams[other]))
    assert (values[1] == (WRONG if other == 1 else 1)).all()
    assert nccl.async_error(comms[other]) == SUCCESS
    for rank in (other, 2):
        nccl.ncclCommAbort(comms[rank])


@pytest.mark.parametrize("count", [1, 10_000, 500_000])  # inline, through the segment, and read from the peer
def test_abort_in_processes_corrupts_the_next_rank(nccl, processes, count):
    processes.run(nccl, 3, bodies.abort_stuck_collective, count)


def test_messages_of_an_aborted_process_complete(nccl, processes):
    processes.run(nccl, 2, bodies.receive_from_aborted)


def test_without_the_variable_the_other_ranks_wait(nccl):
    code = """
    import ctypes, numpy as np
    from nccl_calls import Nccl, SUM
    import rank_programs as bodies
    from host_checks import blocked, in_thread, join
    from ncclpy.core.runtime.search import host_engine_path

    nccl = Nccl(host_engine_path())
    nccl.driver.use(0)
    comms = nccl.init_all(2)
    streams = [nccl.driver.stream(1) for _ in comms]
    values = np.ones((2, 10), np.float32)
    for rank, value in enumerate(values[:1]):
        nccl.ncclAllReduce(bodies.pointer(value), bodies.pointer(value), 10, 7, SUM, comms[rank], streams[rank])
    nccl.ncclCommAbort(comms[0])
    nccl.ncclAllReduce(bodies.pointer(values[1]), bodies.pointer(values[1]), 10, 7, SUM, comms[1], streams[1])
    waiting = in_thread(nccl.driver.cuStreamSynchronize, streams[1])
    print(blocked(waiting))
    nccl.ncclCommAbort(comms[1])
    join(waiting)
    """
    done = testing.run_python(code, env={"NCCLPY_HOST_ABORT_CORRUPTS": None}, warm=True)
    assert done.stdout == "True\n"
