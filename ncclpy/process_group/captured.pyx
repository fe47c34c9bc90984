"""Operations whose producer's stream is being captured: they become part of the user's CUDA graph.

They are issued on that very stream by the thread that asks for them, so that no other stream and no event of ours is
in the graph, and the monitor knows nothing of them. They run when the graph is launched, of which we hear nothing.
"""

from cpython.exc cimport PyErr_CheckSignals
from cpython.ref cimport PyObject
from libc.stdint cimport uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from ncclpy.abi.driver cimport CUcontext, CUstreamCaptureMode
from ncclpy.abi.nccl cimport ncclSuccess
from ncclpy.core.capture cimport relax, restore
from ncclpy.core.check cimport nccl_error
from ncclpy.core.device cimport enter_device, leave_device
from ncclpy.core.handle cimport Handle
from ncclpy.core.library cimport nccl, require
from ncclpy.core.operation cimport NOT_THERE, function_of
from ncclpy.core.stream cimport is_captured
from ncclpy.core.stretch cimport Step, Stretch, make_calls
from ncclpy.core.wait cimport SLICE, deadline_after, now
from ncclpy.engine.launcher cimport Launch
from ncclpy.engine.native cimport load, store
from ncclpy.engine.recorder cimport LAUNCHED
from ncclpy.engine.work cimport Work
from ncclpy.process_group.connection cimport Connection
from ncclpy.process_group.request cimport Request

from ncclpy.core.errors import NcclAborted, NcclTimeout, NcclUnsupported


cdef CUstream captured_of(set streams, int device) except? NULL:
    """Return one of the streams if they are being captured, NULL if none is."""
    captured = [stream for stream in streams if is_captured(<CUstream><uintptr_t>stream, device)]
    if not captured:
        return NULL
    if len(captured) < len(streams):
        raise ValueError(
            f"producer: {len(captured)} of the {len(streams)} streams that produce the inputs of this coalescing block "
            "are being captured; an operation is in one graph or in none: give it inputs of captured streams only"
        )
    return <CUstream><uintptr_t>captured[0]


cdef object capture(Connection connection, Request request):
    """Make the calls of a request on streams that are being captured; its work is then a captured one."""
    cdef Handle comm
    cdef Work work = request.work
    cdef Stretch calls
    cdef CUcontext saved
    cdef Step* steps
    cdef size_t i
    cdef double deadline = deadline_after(request.limit)
    _await_launches(connection, deadline)
    if not connection.comms:  # an abort has taken it
        return NcclAborted(work.say("was not captured: its communicator was aborted"))
    comm = connection.comms[0]
    if load(&comm.troubled):
        return NcclAborted(work.say("was not captured: a call before it on this communicator has failed"))
    if comm.nonblocking:
        raise ValueError(f"{comm!r} is nonblocking, as NCCL_COMM_BLOCKING=0 makes it; such a one cannot be captured")
    require(<void*>nccl.ncclGroupStart, b"ncclGroupStart")
    steps = <Step*>calloc(request.count + 1, sizeof(Step))
    if steps == NULL:
        raise MemoryError
    for i in range(request.count):
        steps[i].operation = request.steps[i]
        steps[i].handle = <PyObject*>comm
    memset(&calls, 0, sizeof(Stretch))
    calls.steps, calls.stride, calls.count = <char*>steps, sizeof(Step), request.count
    calls.grouped = request.count > 1
    calls.watched, calls.limit = True, request.limit  # NCCL may wait in it for other ranks, to connect them
    try:
        saved = enter_device(connection.devices[0])
        try:
            _call(&calls, work, deadline)
        finally:
            leave_device(saved)
        if calls.result != ncclSuccess:
            store(&comm.troubled, 1)
            return _error(&calls, comm, work)
    finally:
        free(steps)
        free(calls.words)
    work.entry.communicator, work.entry.rank, work.entry.nranks = connection.name, comm.rank, comm.nranks
    work.become_captured(request.steps[0].stream if request.count else NULL)
    return None


cdef int _await_launches(Connection connection, double deadline) except -1:
    """Wait until the calls of what was begun before are made, which a lane may still have before it."""
    cdef Work work
    for launch in list(connection.launches):
        for each in list((<Launch>launch).works):
            work = each
            if not work._wait_for(LAUNCHED, deadline):
                raise NcclTimeout(work.say(
                    "was begun before this operation, which is to be captured, and is not launched yet; the capture "
                    "goes on without it"
                ))
    return 0


cdef int _call(Stretch* calls, Work work, double deadline) except -1:
    """Make the calls, when the threads before this one are through with the communicator."""
    cdef CUstreamCaptureMode mode
    cdef bint made
    while True:
        with nogil:
            mode = relax()  # NCCL may allocate; what is captured stays what it is
            made = make_calls(calls, min(now() + SLICE, deadline))
            restore(mode)
        if made:
            return 0
        PyErr_CheckSignals()  # nothing was called: whoever raises here leaves nothing behind
        if now() >= deadline:
            raise NcclTimeout(work.say("was not captured in time: another thread is inside its communicator"))


cdef object _error(const Stretch* calls, Handle comm, Work work):
    """Return what NCCL has against it as an exception."""
    cdef size_t failed = min(calls.failed, calls.count - 1)
    cdef const char* function = function_of((<Step*>calls.steps)[failed].operation.kind)
    if <int>calls.result == NOT_THERE:
        return NcclUnsupported(work.say(f"was not captured: the loaded NCCL has no {function.decode()}"))
    try:
        comm.raise_if_aborted(calls.result, function)
    except Exception as error:
        return error
    return nccl_error(calls.result, function, calls.words, work.say("was not captured"))
