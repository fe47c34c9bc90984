"""Texts of deadlines: which ranks have arrived at what a communicator waits for, and which have not."""

from __future__ import annotations

import ctypes
import os
import threading

import numpy as np
import pytest
from host_checks import in_thread, join, start, wait_for
from nccl_calls import SUM, NcclError

import ncclpy
import testing

FLOAT32 = 7


@pytest.fixture
def who(nccl):
    """Return a function that returns the host engine's report on a communicator."""
    nccl.library.ncclpyHostStragglers.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]
    nccl.library.ncclpyHostStragglers.restype = ctypes.c_size_t

    def ask(comm, size=4096):
        text = ctypes.create_string_buffer(size)
        length = nccl.library.ncclpyHostStragglers(comm, text, size)
        assert len(text.value) == min(length, size - 1)
        return text.value.decode()

    return ask


@pytest.fixture
def init_all(nccl):
    """Init as `Nccl.init_all`; abort the remaining communicators at the end of the test."""
    made = []

    def init_all(nranks):
        comms = nccl.init_all(nranks)
        made.extend(comms)
        return comms

    yield init_all
    abort_all(nccl, made)


def reduce(nccl, comm, stream, value):
    nccl.ncclAllReduce(value.ctypes.data, value.ctypes.data, value.size, FLOAT32, SUM, comm, stream)


def abort_all(nccl, comms):
    for comm in comms:
        nccl.library.ncclCommAbort(comm)


def test_collective_names_arrived_and_missing_ranks(nccl, who, init_all, streams):
    comms = init_all(4)
    value = [np.ones(3, np.float32) for _ in comms]
    assert [who(comm) for comm in comms] == [""] * 4
    for rank in range(4):
        reduce(nccl, comms[rank], streams[rank], value[rank])
    for stream in streams:
        nccl.driver.cuStreamSynchronize(stream)
    assert [who(comm) for comm in comms] == [""] * 4, "it is over"
    for rank in (0, 2):
        reduce(nccl, comms[rank], streams[rank], value[rank])
    other = f"(process {os.getpid()}, last call AllReduce, 1 before this one, in no operation of this communicator)"
    missing = f"missing: 1 {other}, 3 {other}; of this process: 1, 3 (are the calls in one group()?)"
    expected = f"AllReduce: arrived: 0, 2; {missing}"
    wait_for(lambda: who(comms[0]) == who(comms[2]) == expected)
    assert who(comms[1]) == "", "it waits for nobody"
    assert who(comms[0], 12) == "AllReduce: " and who(comms[0], 1) == ""
    abort_all(nccl, comms)
    with pytest.raises(NcclError):
        nccl.ncclGroupEnd()
    said = nccl.last_error()
    assert who(comms[0]) == "" and nccl.last_error() == said != "", "no communicator, no trace of the question"


def test_missing_rank_is_reported_with_its_current_call(nccl, who, init_all, streams):
    comms = init_all(4)
    value = [np.ones(3, np.float32) for _ in comms]
    reduce(nccl, comms[0], streams[0], value[0])
    nccl.ncclRecv(value[1].ctypes.data, 3, FLOAT32, 2, comms[1], streams[1])
    nccl.ncclCommAbort(comms[2])
    # Queued after an operation of another communicator on its stream.
    others = init_all(4)
    reduce(nccl, others[3], streams[3], value[3])
    reduce(nccl, comms[3], streams[3], value[3])
    wait_for(lambda: "1 (process" in who(comms[0]) and "in Recv" in who(comms[0]) and who(others[3]))
    text = who(comms[0])
    assert text.startswith("AllReduce: arrived: 0; missing: 1 (process ")
    assert f"2 (process {os.getpid()}, no call yet, aborted)" in text
    assert f"3 (process {os.getpid()}, last call this AllReduce, still queued on its stream)" in text
    assert text.endswith("of this process: 1 (are the calls in one group()?)"), "3 has made the call, 2 is gone"
    wait_for(lambda: who(comms[1]).startswith("Recv: missing: 2 (process "))
    assert who(comms[3]) == "AllReduce is still queued on its stream, behind other work"


def test_messages_name_the_awaited_peers(nccl, who, init_all, streams):
    comms = init_all(3)
    value = np.ones(6, np.float32)
    nccl.ncclGroupStart()
    for peer in (1, 2):
        nccl.ncclRecv(value[peer:].ctypes.data, 1, FLOAT32, peer, comms[0], streams[0])
    nccl.ncclGroupEnd()
    wait_for(lambda: who(comms[0]).startswith("Recv: missing: 1 (process"))
    assert ", 2 (process" in who(comms[0])
    nccl.ncclSend(value.ctypes.data, 1, FLOAT32, 0, comms[1], streams[1])
    wait_for(lambda: who(comms[0]).startswith("Recv: missing: 2 (process"))
    nccl.ncclSend(value.ctypes.data, 1, FLOAT32, 0, comms[2], streams[2])
    wait_for(lambda: who(comms[0]) == "")
    for comm in comms:
        nccl.ncclCommDestroy(comm)


def test_init_names_the_missing_ranks(nccl, who):
    comms = [ctypes.c_void_p() for _ in range(6)]
    uid = nccl.unique_id()

    def init(rank):
        nccl.driver.use(rank)
        with pytest.raises(NcclError, match="aborted"):
            nccl.init_into(comms[rank], 6, uid, rank)

    threads = [in_thread(init, rank) for rank in (0, 2)]
    expected = "initialisation: arrived: 0, 2; missing: 1, 3-5, which have not joined with this unique id"
    wait_for(lambda: comms[0].value and comms[2].value and who(comms[0]) == who(comms[2]) == expected)
    abort_all(nccl, [comms[0], comms[2]])
    for thread in threads:
        join(thread)


@pytest.mark.parametrize("call", ["split", "shrink", "suspend"])
def test_control_calls_name_the_missing_ranks(nccl, who, init_all, call):
    comms = init_all(3)

    def make():
        with pytest.raises(NcclError, match="aborted"):
            if call == "split":
                nccl.split(comms[1], 0, 0)
            elif call == "shrink":
                excluded = (ctypes.c_int * 1)(2)
                nccl.ncclCommShrink(comms[1], excluded, 1, ctypes.byref(ctypes.c_void_p()), None, 0)
            else:
                nccl.ncclCommSuspend(comms[1], 1)

    thread = in_thread(make)
    missing = "0 (process" if call == "shrink" else "arrived: 1; missing: 0 (process"
    wait_for(lambda: f"Comm{call.capitalize()}: " in who(comms[1]) and missing in who(comms[1]))
    assert ("2 (process" in who(comms[1])) == (call != "shrink"), "an excluded rank is not waited for"
    abort_all(nccl, comms)
    join(thread)


def test_report_does_not_wait_for_a_call_that_holds_the_communicator(nccl, who, init_all):
    """A waiting split holds all locks that it can hold."""
    comms = init_all(2)
    thread = in_thread(nccl.split, comms[0], 0, 0)
    wait_for(lambda: who(comms[0]) != "")
    answers = []
    asker = threading.Thread(target=lambda: answers.extend(who(comms[0]) for _ in range(100)))
    asker.start()
    asker.join(20)
    assert len(answers) == 100 and all("CommSplit: arrived: 0; missing: 1" in answer for answer in answers)
    abort_all(nccl, comms)
    with pytest.raises(NcclError, match="aborted"):
        join(thread)


def test_timeout_text_names_the_stragglers(nccl):
    """Through `ncclpy`: three ranks in three processes, one of which closes after two operations and one sleeps."""
    uid = ncclpy.get_unique_id()
    late, closed = (
        start(
            "import ncclpy\n"
            f"comm = ncclpy.Communicator.init(3, {rank}, bytes.fromhex(sys.argv[1]), device={rank}, timeout=60)\n"
            f"for _ in range({operations}): comm.all_reduce(np.ones(4, np.float32))\n"
            + ("comm.close()\n" if rank == 2 else "")
            + "say('done')\nsys.stdin.readline()\nos._exit(0)",
            bytes(uid).hex(),
        )
        for rank, operations in ((1, 2), (2, 2))
    )
    comm = ncclpy.Communicator.init(3, 0, uid, device=0, timeout=60)
    value = np.ones(4, np.float32)
    comm.all_reduce(value)
    comm.all_reduce(value)
    for process in (late, closed):
        assert process.stdout.readline() == "done\n"
    with pytest.raises(ncclpy.NcclTimeout) as caught:
        comm.all_reduce(value, timeout=1)
    text = str(caught.value)
    assert (
        f"AllReduce: arrived: 0; missing: 1 (process {late.pid}, last call AllReduce, 1 before this one, in no "
        f"operation of this communicator), 2 (process {closed.pid}, last call AllReduce, 1 before this one, closed)"
        in text
    )
    assert "group()" not in text
    for process in (late, closed):
        process.communicate("\n", timeout=30)


def test_rank_blocked_in_another_communicator_is_not_reported_as_idle(nccl, who, init_all, streams):
    """Each of two communicators waits for a rank that is in the other one."""
    first, second = init_all(2), init_all(2)
    value = [np.ones(3, np.float32) for _ in range(2)]
    reduce(nccl, first[0], streams[0], value[0])
    reduce(nccl, second[1], streams[1], value[1])
    for comm, rank in (first[0], 1), (second[1], 0):
        blocked = (
            f"{rank} (process {os.getpid()}, no call yet, blocked in AllReduce of another communicator of 2 ranks)"
        )
        wait_for(lambda comm=comm, blocked=blocked: blocked in who(comm))


def test_report_has_no_engine_number_beside_the_operation_number():
    """Texts with ncclpy's own operation numbers."""
    comms = ncclpy.Communicator.init_all([0, 1], timeout=1.0)
    value = np.ones(2)
    comms[0].broadcast(value, root=0)
    with pytest.raises(ncclpy.NcclTimeout) as caught:
        comms[0].all_reduce(value)
    assert "AllReduce: arrived: 0; missing: 1" in str(caught.value) and "#" not in str(caught.value)
    testing.abort_all(comms)


def test_missing_rank_of_this_process_hints_at_a_group():
    comms = ncclpy.Communicator.init_all([0, 1], timeout=1.5)
    with pytest.raises(ncclpy.NcclTimeout, match=r"missing: 1 .*are the calls in one group\(\)\?"):
        comms[0].all_reduce(np.ones(2))
    testing.abort_all(comms)


def test_unfinished_child_is_reported_by_its_parent():
    comms = ncclpy.Communicator.init_all([0, 1], timeout=1.5)
    with pytest.raises(ncclpy.NcclTimeout, match=r"CommSplit: arrived: 0; missing: 1 \(process"):
        comms[0].split(0)
    testing.abort_all(comms)
