"""With ``NCCLPY_HOST_CHECKS=1``, as in all tests, nearly certain defects are errors that name the user of the
memory.
"""

import ctypes
import threading

import numpy as np
import pytest
from driver_calls import DriverError, Gate
from host_checks import in_thread, join, refused, start
from host_ranks import as_threads
from nccl_calls import INVALID_ARGUMENT, INVALID_USAGE, SUM, NcclError

FLOAT32, SYMMETRIC = 7, 1
COUNT = 256
ILLEGAL_STATE = 401


def allocate(nccl, nbytes=4 * COUNT):
    pointer = ctypes.c_void_p()
    nccl.ncclMemAlloc(ctypes.byref(pointer), nbytes)
    return pointer.value


def register(nccl, comm, pointer, nbytes=4 * COUNT):
    handle = ctypes.c_void_p()
    nccl.ncclCommRegister(comm, pointer, nbytes, ctypes.byref(handle))
    return handle.value


def window_of(nccl, comm, pointer, nbytes=4 * COUNT, flags=SYMMETRIC):
    window = ctypes.c_void_p()
    nccl.ncclCommWindowRegister(comm, pointer, nbytes, ctypes.byref(window), flags)
    return window.value


def refuses_to_free(nccl, pointer, *words):
    """Check that no call frees the memory, and that all report why."""
    for word in words:
        refused(INVALID_USAGE, word, nccl.ncclMemFree, pointer)
    with pytest.raises(DriverError) as error:
        nccl.driver.cuMemFree_v2(pointer)
    assert error.value.code == ILLEGAL_STATE
    text = nccl.driver.text("cuGetErrorString", ILLEGAL_STATE)
    assert [word for word in words if word not in text] == [], text
    (ctypes.c_char * 1).from_address(pointer)[0] = b"x"  # still accessible


@pytest.fixture
def comm(nccl):
    (comm,) = nccl.init_all(1)
    yield comm
    nccl.library.ncclCommAbort(comm)


@pytest.fixture
def stream(nccl):
    return nccl.driver.stream(1)


# Registered memory


@pytest.mark.parametrize("end", ["ncclCommDeregister", "ncclCommAbort", "ncclCommDestroy"])
def test_registered_memory_is_not_freed(nccl, end):
    (comm,) = nccl.init_all(1)
    pointer = allocate(nccl)
    handle = register(nccl, comm, pointer + 16, 100)
    words = (
        f"1024 bytes at {pointer:#x} on device 0",
        f"100 bytes at {pointer + 16:#x}",
        "rank 0 of communicator of 1",
    )
    refuses_to_free(nccl, pointer, "ncclCommRegister", "deregister it first", *words)
    getattr(nccl, end)(*([comm, handle] if end == "ncclCommDeregister" else [comm]))
    nccl.ncclMemFree(pointer)
    if end == "ncclCommDeregister":
        nccl.ncclCommDestroy(comm)


@pytest.mark.parametrize("end", ["ncclCommWindowDeregister", "ncclCommAbort", "ncclCommDestroy"])
def test_memory_of_a_window_is_not_freed(nccl, end):
    (comm,) = nccl.init_all(1)
    pointer = allocate(nccl)
    window = window_of(nccl, comm, pointer)
    refuses_to_free(nccl, pointer, "ncclCommWindowRegister of rank 0")
    getattr(nccl, end)(*([comm, window] if end == "ncclCommWindowDeregister" else [comm]))
    nccl.ncclMemFree(pointer)
    if end == "ncclCommWindowDeregister":
        nccl.ncclCommDestroy(comm)


def test_registered_host_memory_is_not_freed(nccl, comm):
    pointer = nccl.driver.pinned(4096)
    handle = register(nccl, comm, pointer)
    with pytest.raises(DriverError):
        nccl.driver.cuMemFreeHost(pointer)
    nccl.ncclCommDeregister(comm, handle)
    nccl.driver.cuMemFreeHost(pointer)


def test_memory_registered_with_two_communicators_needs_both_deregistrations(nccl, comm):
    (other,) = nccl.init_all(1)
    pointer = allocate(nccl)
    handles = [register(nccl, each, pointer) for each in (comm, other)]
    nccl.ncclCommDeregister(comm, handles[0])
    refuses_to_free(nccl, pointer, "ncclCommRegister")
    nccl.ncclCommDestroy(other)
    nccl.ncclMemFree(pointer)


def test_error_string_does_not_repeat_an_old_refusal(nccl, comm, stream):
    pointer = allocate(nccl)
    register(nccl, comm, pointer)
    refuses_to_free(nccl, pointer, "ncclCommRegister")
    graph = ctypes.c_void_p()
    with pytest.raises(DriverError) as error:
        nccl.driver.cuStreamEndCapture(stream, ctypes.byref(graph))
    assert error.value.code == ILLEGAL_STATE
    assert "state" in nccl.driver.text("cuGetErrorString", ILLEGAL_STATE)
    nccl.ncclCommAbort(comm)
    nccl.ncclMemFree(pointer)


# Memory in use


def operations(nccl, comm, rank, stream, other):
    """Return by name what each operation of two ranks does with this rank's `send` and `recv`."""
    return {
        "AllReduce": lambda s, r: nccl.ncclAllReduce(s, r, 16, FLOAT32, SUM, comm, stream),
        "Reduce": lambda s, r: nccl.ncclReduce(s, r, 16, FLOAT32, SUM, rank, comm, stream),
        "Broadcast": lambda s, r: nccl.ncclBroadcast(s, r, 16, FLOAT32, 0, comm, stream),
        "AllGather": lambda s, r: nccl.ncclAllGather(s, r, 16, FLOAT32, comm, stream),
        "ReduceScatter": lambda s, r: nccl.ncclReduceScatter(s, r, 16, FLOAT32, SUM, comm, stream),
        "AlltoAll": lambda s, r: nccl.ncclAlltoAll(s, r, 16, FLOAT32, comm, stream),
        "Gather": lambda s, r: nccl.ncclGather(s, r, 16, FLOAT32, 0, comm, stream),
        "Scatter": lambda s, r: nccl.ncclScatter(s, r, 16, FLOAT32, 0, comm, stream),
        "Send": lambda s, r: nccl.ncclSend(s, 16, FLOAT32, 0, comm, stream),
        "Recv": lambda s, r: nccl.ncclRecv(r, 16, FLOAT32, 0, comm, stream),
        "two streams": lambda s, r: grouped(
            nccl,
            lambda: nccl.ncclSend(s, 16, FLOAT32, 0, comm, stream),
            lambda: nccl.ncclRecv(r, 16, FLOAT32, 0, comm, other),
        ),
    }


def grouped(nccl, *calls):
    nccl.ncclGroupStart()
    for call in calls:
        call()
    nccl.ncclGroupEnd()


OPERATIONS = list(operations(None, None, 0, None, None))


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name not in ("Send", "Recv")])
def test_memory_of_an_unfinished_operation_is_not_freed(nccl, comm, stream, name):
    other = nccl.driver.stream(1)
    send, recv, bystander = (allocate(nccl) for _ in range(3))
    with Gate(nccl.driver, stream) as gate:
        operations(nccl, comm, 0, stream, other)[name](send, recv)
        for pointer in (send, recv):
            at = f"64 bytes at {pointer:#x}"
            refuses_to_free(nccl, pointer, "of 16 float32", "rank 0 of communicator of 1 ranks", at, "is not done")
        nccl.ncclMemFree(bystander)
        gate.open()
    for one in (stream, other):
        nccl.driver.cuStreamSynchronize(one)
    nccl.ncclMemFree(send)
    nccl.driver.cuMemFree_v2(recv)


@pytest.mark.parametrize("name", ["Send", "Recv", "AllReduce", "AllGather", "ReduceScatter"])
def test_memory_of_an_operation_without_its_peer_is_not_freed(nccl, name):
    """A wait would not help: each rank frees memory that the peer's absence keeps in use. Its last bytes count too."""
    comms, rank = nccl.init_all(2), 1
    send, recv = allocate(nccl), allocate(nccl)
    shift = 4 * COUNT - 128  # two blocks fit: the second one is the last that the operation accesses
    nccl.driver.use(1)
    stream = nccl.driver.stream(1)
    operations(nccl, comms[rank], rank, stream, None)[name](send + shift, recv + shift)
    used = {"Send": [send], "Recv": [recv]}.get(name, [send, recv])
    for pointer in (send, recv):
        if pointer in used:
            refuses_to_free(nccl, pointer, f"{name} of 16 float32", "rank 1 of communicator of 2 ranks")
        else:
            nccl.ncclMemFree(pointer)
    nccl.ncclCommAbort(comms[rank])  # ends the operation
    for pointer in used:
        nccl.ncclMemFree(pointer)
    nccl.ncclCommAbort(comms[0])


def test_last_byte_of_an_operation_is_checked(nccl):
    """The second block of a gather lies in another allocation than its first, as far as the check can tell."""
    comms = nccl.init_all(2)
    nccl.driver.use(1)
    stream = nccl.driver.stream(1)
    send, recv = allocate(nccl), allocate(nccl, 1 << 16)
    nccl.ncclAllGather(send, recv, 16, FLOAT32, comms[1], stream)
    refuses_to_free(nccl, recv, f"128 bytes at {recv:#x}")
    refuses_to_free(nccl, send, f"64 bytes at {send:#x}")
    for comm in comms:
        nccl.ncclCommAbort(comm)
    nccl.ncclMemFree(send)
    nccl.ncclMemFree(recv)


@pytest.mark.parametrize("end", ["ncclCommAbort", "ncclCommRevoke"])
def test_memory_of_an_aborted_operation_is_freed(nccl, stream, end):
    (comm,) = nccl.init_all(1)
    pointer = allocate(nccl)
    with Gate(nccl.driver, stream) as gate:
        nccl.ncclAllReduce(pointer, pointer, 16, FLOAT32, SUM, comm, stream)
        refuses_to_free(nccl, pointer, "AllReduce")
        getattr(nccl, end)(*([comm] if end == "ncclCommAbort" else [comm, 0]))
        nccl.ncclMemFree(pointer)
        gate.open()
    nccl.driver.cuStreamSynchronize(stream)
    if end == "ncclCommRevoke":
        nccl.ncclCommAbort(comm)


def test_free_waits_for_copies_or_is_refused(nccl, stream):
    """cuMemFree waits for copies, as CUDA does; ncclMemFree waits for nothing."""
    a, b, c = (allocate(nccl) for _ in range(3))
    gate = Gate(nccl.driver, stream)
    nccl.driver.cuMemcpyAsync(a, b, 64, stream)
    nccl.driver.cuMemsetD8Async(c, 1, 64, stream)
    for pointer, word in ((a, "cuMemcpyAsync"), (b, "cuMemcpyAsync"), (c, "cuMemsetD8Async")):
        refused(INVALID_USAGE, f"{word} uses 64 bytes at {pointer:#x}", nccl.ncclMemFree, pointer)
    freed = in_thread(nccl.driver.cuMemFree_v2, a)
    gate.open()
    join(freed)
    nccl.driver.cuStreamSynchronize(stream)
    nccl.ncclMemFree(b)
    nccl.ncclMemFree(c)


def test_memory_of_a_running_graph_is_not_freed(nccl, comm, stream):
    driver = nccl.driver
    pointer, copied, source = (allocate(nccl) for _ in range(3))
    graph, runnable = ctypes.c_void_p(), ctypes.c_void_p()
    driver.cuStreamBeginCapture_v2(stream, 1)
    nccl.ncclAllReduce(pointer, pointer, 16, FLOAT32, SUM, comm, stream)
    driver.cuMemcpyAsync(copied, source, 64, stream)
    driver.cuStreamEndCapture(stream, ctypes.byref(graph))
    driver.cuGraphInstantiateWithFlags(ctypes.byref(runnable), graph, 0)
    for _ in range(2):
        gate = Gate(driver, stream)
        driver.cuGraphLaunch(runnable, stream)
        refuses_to_free(nccl, pointer, "AllReduce")
        refused(INVALID_USAGE, "cuMemcpyAsync", nccl.ncclMemFree, copied)
        gate.open()
        driver.cuStreamSynchronize(stream)
    for each in (pointer, copied, source):
        nccl.ncclMemFree(each)
    driver.cuGraphExecDestroy(runnable)
    driver.cuGraphDestroy(graph)


def put_into_a_neighbour(rank):
    """The target of a put is in use until the peer has the signal; then the peer may free it at once."""
    nccl = rank.nccl
    freed_early = []
    with rank.communicator() as comm:
        for _ in range(20):
            pointer = allocate(nccl)
            window = window_of(nccl, comm, pointer)
            if rank.rank == 0:
                gate = Gate(nccl.driver, rank.stream)
                nccl.ncclPutSignal(pointer, 8, FLOAT32, 1, window, 512, 0, 0, 0, comm, rank.stream)
                with pytest.raises(NcclError) as error:
                    nccl.ncclMemFree(pointer)
                freed_early.append(error.value.code)
                gate.open()
                rank.synchronize()
            else:
                wanted = (ctypes.c_int * 4)(1, 0, 0, 0)
                nccl.ncclWaitSignal(1, ctypes.cast(wanted, ctypes.c_void_p), comm, rank.stream)
                rank.synchronize()
            nccl.ncclCommWindowDeregister(comm, window)
            nccl.ncclMemFree(pointer)
    return freed_early


def test_target_of_a_put_is_not_freed_before_its_signal(nccl):
    assert as_threads(nccl, 2, put_into_a_neighbour) == [[INVALID_USAGE] * 20, []]


# Registered twice


@pytest.mark.parametrize(("at", "size"), [(256, 256), (300, 100), (0, 1024), (0, 257), (511, 1), (500, 300)])
def test_overlapping_registration_is_refused(nccl, comm, at, size):
    pointer = allocate(nccl)
    handle = register(nccl, comm, pointer + 256, 256)
    words = f"{size} bytes at {pointer + at:#x} are registered twice with rank 0 of communicator of 1 ranks"
    refused(INVALID_USAGE, words, register, nccl, comm, pointer + at, size)
    refused(INVALID_USAGE, f"256 bytes at {pointer + 256:#x}", register, nccl, comm, pointer + at, size)
    nccl.ncclCommDeregister(comm, handle)
    nccl.ncclCommDeregister(comm, register(nccl, comm, pointer + at, size))
    nccl.ncclMemFree(pointer)


def test_separate_registrations_are_accepted(nccl, comm):
    pointer = allocate(nccl)
    (other,) = nccl.init_all(1)
    handles = [register(nccl, comm, pointer + at, 256) for at in (256, 0, 512, 768)]
    register(nccl, other, pointer)  # another communicator is independent
    window_of(nccl, comm, pointer)  # as is a window
    assert len(set(handles)) == 4
    for one in (comm, other):
        nccl.ncclCommAbort(one)
    nccl.ncclMemFree(pointer)


def test_concurrent_registrations_of_one_buffer_succeed_once(nccl, comm):
    pointer = allocate(nccl)
    ready, outcomes = threading.Barrier(8), []

    def body(number):
        ready.wait()
        try:
            outcomes.append(register(nccl, comm, pointer + number, 100))
        except NcclError as error:
            assert "registered twice" in error.text
            outcomes.append(None)

    for _ in range(20):
        threads = [in_thread(body, number) for number in range(8)]
        for thread in threads:
            join(thread)
        (handle,) = [each for each in outcomes if each is not None]
        assert len(outcomes) == 8
        outcomes.clear()
        nccl.ncclCommDeregister(comm, handle)
    nccl.ncclMemFree(pointer)


def test_overlapping_window_is_refused(nccl, comm):
    pointer = allocate(nccl)
    window = window_of(nccl, comm, pointer, 512)
    refused(
        INVALID_USAGE,
        f"100 bytes at {pointer + 500:#x} are registered twice",
        window_of,
        nccl,
        comm,
        pointer + 500,
        100,
    )
    window_of(nccl, comm, pointer + 500, 100, flags=0)  # a window with other flags
    window_of(nccl, comm, pointer + 512, 100)
    nccl.ncclCommWindowDeregister(comm, window)
    window_of(nccl, comm, pointer, 512)
    nccl.ncclCommAbort(comm)
    nccl.ncclMemFree(pointer)


# Windows of several sizes


def windows_of_several_sizes(rank):
    nccl, outcome = rank.nccl, None
    pointer = allocate(nccl)
    with rank.communicator() as comm:
        try:
            window_of(nccl, comm, pointer, 512 if rank.rank == 2 else 256)
        except NcclError as error:
            outcome = error.code, error.text
        nccl.ncclMemFree(pointer)  # nothing is registered
        memory = np.full(4, rank.rank, np.float32)
        nccl.ncclAllReduce(memory.ctypes.data, memory.ctypes.data, 4, FLOAT32, SUM, comm, rank.stream)
        rank.synchronize()
        assert memory.tolist() == [3.0] * 4  # the communicator still works
    return outcome


@pytest.mark.parametrize("placement", [None, [0, 1, 2], [0, 0, 1]], ids=["threads", "processes", "mix"])
def test_windows_of_different_sizes_are_refused(nccl, processes, placement):
    if placement is None:
        outcomes = as_threads(nccl, 3, windows_of_several_sizes)
    else:
        outcomes = processes.run(nccl, 3, windows_of_several_sizes, placement=placement)
    assert len(set(outcomes)) == 1
    code, text = outcomes[0]
    assert code == INVALID_USAGE
    assert "the sizes differ: rank 0 registers 256 bytes, rank 2 512 bytes (communicator of 3 ranks)" in text


# Buffers that overlap


def overlapping(nccl, comm, at, stream=None):
    """Yield calls of rank 1 of 2, and whether NCCL works with their buffers."""
    yield False, nccl.ncclAllReduce, (at, at + 4, 4, FLOAT32, SUM, comm, stream)
    yield False, nccl.ncclReduce, (at + 4, at, 4, FLOAT32, SUM, 1, comm, stream)
    yield False, nccl.ncclBroadcast, (at, at + 8, 4, FLOAT32, 1, comm, stream)
    yield False, nccl.ncclAllGather, (at, at, 4, FLOAT32, comm, stream)
    yield False, nccl.ncclReduceScatter, (at, at, 4, FLOAT32, SUM, comm, stream)
    yield False, nccl.ncclAlltoAll, (at, at, 4, FLOAT32, comm, stream)
    yield False, nccl.ncclGather, (at, at, 4, FLOAT32, 1, comm, stream)
    yield False, nccl.ncclScatter, (at, at, 4, FLOAT32, 1, comm, stream)
    yield True, nccl.ncclReduce, (at, at + 4, 4, FLOAT32, SUM, 0, comm, stream)  # it receives nothing
    yield True, nccl.ncclAllReduce, (at, at + 16, 4, FLOAT32, SUM, comm, stream)
    yield True, nccl.ncclAllGather, (at + 16, at, 4, FLOAT32, comm, stream)
    yield True, nccl.ncclReduceScatter, (at, at + 16, 4, FLOAT32, SUM, comm, stream)
    yield True, nccl.ncclGather, (at + 16, at, 4, FLOAT32, 1, comm, stream)
    yield True, nccl.ncclScatter, (at, at + 16, 4, FLOAT32, 1, comm, stream)


def test_buffers_overlap_only_where_nccl_works_in_place(nccl):
    comms = nccl.init_all(2)
    memory = np.zeros(16, np.float32)
    for allowed, function, arguments in overlapping(nccl, comms[1], memory.ctypes.data):
        if allowed:
            function(*arguments)  # enqueued: the other rank never calls
        else:
            refused(INVALID_ARGUMENT, f"bytes at {arguments[0]:#x}) and recvbuff", function, *arguments)
    for comm in comms:
        nccl.ncclCommAbort(comm)


# Without checks


@pytest.mark.parametrize("value", ["0", ""])
def test_nothing_is_checked_unless_asked_for(monkeypatch, value):
    monkeypatch.setenv("NCCLPY_HOST_CHECKS", value)
    program = start(
        """
        p = ctypes.byref
        nccl.driver.use(0)
        (comm,) = nccl.init_all(1)
        memory, handle, value = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_char_p()
        nccl.ncclMemAlloc(p(memory), 1024)
        os.environ["NCCLPY_HOST_CHECKS"] = "1"  # too late: it is read once
        for _ in range(2):
            nccl.ncclCommRegister(comm, memory, 1024, p(handle))
            nccl.ncclCommWindowRegister(comm, memory, 1024, p(handle), 1)
        nccl.ncclMemFree(memory)
        nccl.ncclParamGetParameter(b"NCCLPY_HOST_CHECKS", p(value), p(ctypes.c_int()))
        say("freed", value.value.decode())
        """
    )
    assert program.communicate(timeout=60)[0] == "freed 0\n"
