"""A batch of calls: lock, check, ncclGroupStart, issue, ncclGroupEnd, poll.

Only this module calls NCCL for several operations together: for a group's end, a plan, a captured graph, and a launch
of a Manager or a process group, in any thread. (`operation.issue` makes the calls of one operation, for some kinds a
group of sends and receives.) All of it runs without the GIL, except `note_arrival`.
"""

from ncclpy.abi.nccl cimport ncclComm_t, ncclInProgress, ncclSuccess
from ncclpy.abi.locks cimport LOCK_COMM, lock_wanted
from ncclpy.core.runtime.library cimport host_engine, copy_last_error, nccl
from ncclpy.core.runtime.device cimport lend_device, take_device_back
from ncclpy.core.handles.handle cimport (
    PAST_DEADLINE, WAS_ABORTED, Handle, lock_within, record_behind_call, run_hook_if_wanted,
)
from ncclpy.core.arguments.operation cimport INIT_RANK, NOT_THERE, WINDOW, issue
from ncclpy.core.handles.state cimport ABORTED
from ncclpy.core.handles.watch cimport poll_once
from ncclpy.core.runtime.wait cimport FOREVER, now

cdef extern from "sched.h" nogil:
    int sched_yield()


cdef bint make_calls(CallBatch* batch, double until) noexcept nogil:
    cdef size_t i
    cdef ncclResult_t result
    cdef char* at = batch.steps
    cdef bint watched = False, precall_hooks = False, lent
    if not _lock(batch, until):
        return False
    batch.failed = batch.count
    result = _fill_operations(batch, &watched, &precall_hooks)
    watched = watched and batch.watched
    if result == ncclSuccess:
        lent = not host_engine and batch.count and lend_device((<Handle>step_of(batch, 0).handle).device)
        if watched:
            _begin_watching(batch)
        if precall_hooks:
            _run_hooks(batch)
        if batch.grouped:
            result = nccl.ncclGroupStart() if nccl.ncclGroupStart != NULL else <ncclResult_t>NOT_THERE
        if result == ncclSuccess:
            for i in range(batch.count):
                result = issue(&(<Step*>at).operation)
                if result != ncclSuccess and result != ncclInProgress:
                    batch.failed = i
                    break
                at += batch.stride
            if batch.grouped:
                result = _end_group(batch, result)
        if watched:
            _end_watching(batch, result == ncclSuccess)
        if precall_hooks:
            _record_behind_calls(batch, result != ncclInProgress)
        if lent:
            take_device_back()
    batch.result = result
    batch.message = copy_last_error(result)
    _unlock(batch, <size_t>-1)
    return True


cdef ncclResult_t _end_group(const CallBatch* batch, ncclResult_t refused) noexcept nogil:
    """End the group, or its simulation; return `refused` if a call was refused: then NCCL's end launches nothing."""
    cdef ncclResult_t ended
    if batch.simulated != NULL:
        ended = nccl.ncclGroupSimulateEnd(batch.simulated)
    else:
        ended = nccl.ncclGroupEnd()
    return ended if batch.failed == batch.count else refused


cdef inline char* _handles(const CallBatch* batch, size_t* count, size_t* pitch) noexcept nogil:
    """Return the address of the first handle, how many there are, and the bytes from one to the next."""
    if batch.handles != NULL:
        count[0], pitch[0] = batch.nhandles, sizeof(PyObject*)
        return <char*>batch.handles
    count[0], pitch[0] = batch.count, batch.stride
    return <char*>&(<Step*>batch.steps).handle


cdef bint _lock(const CallBatch* batch, double until) noexcept nogil:
    """Take the locks of the communicators, each once, in the order of their addresses."""
    cdef size_t i, count, pitch
    cdef char* at = _handles(batch, &count, &pitch)
    cdef PyObject* last = NULL
    for i in range(count):
        if (<PyObject**>at)[0] != last:
            last = (<PyObject**>at)[0]
            if until == FOREVER:
                (<Handle>last).lock()
            else:
                lock_wanted(LOCK_COMM, &(<Handle>last).mutex)
                if not lock_within(&(<Handle>last).mutex, until):
                    _unlock(batch, i)
                    return False
        at += pitch
    return True


cdef void _unlock(const CallBatch* batch, size_t nlocked) noexcept nogil:
    """Release the locks of the first `nlocked` entries."""
    cdef size_t i, count, pitch
    cdef char* at = _handles(batch, &count, &pitch)
    cdef PyObject* last = NULL
    for i in range(min(nlocked, count)):
        if (<PyObject**>at)[0] != last:
            last = (<PyObject**>at)[0]
            (<Handle>last).unlock()
        at += pitch


cdef ncclResult_t _fill_operations(CallBatch* batch, bint* watched, bint* precall_hooks) noexcept nogil:
    """Fill communicators and sequence numbers into the operations, under the communicators' locks.

    Note the operations for other ranks that may ask; set `watched` and `precall_hooks` if any communicator has a
    watchdog or a pre-call hook. Return WAS_ABORTED if a communicator has ended.
    """
    cdef size_t i
    cdef char* at = batch.steps
    cdef Operation* operation
    cdef PyObject* last = NULL  # values of the last handle are read once for successive steps on it
    cdef ncclComm_t comm = NULL
    cdef long long sequence = 0
    cdef bint aborted = False, noting = False
    cdef int counted = batch.simulated == NULL
    for i in range(batch.count):
        operation = &(<Step*>at).operation
        if (<Step*>at).handle != last:
            if last != NULL:
                (<Handle>last).sequence = sequence
            last = (<Step*>at).handle
            comm = (<Handle>last).raw
            sequence = (<Handle>last).sequence
            aborted = (<Handle>last).state == ABORTED
            noting = (<Handle>last).status.is_noting and counted
            if (<Handle>last).in_flight.watched:
                watched[0] = True
            if (<Handle>last).precall_hook != NULL and counted:
                precall_hooks[0] = True
        # A communicator that this call makes has no handle yet, but may have been aborted before the call began.
        if aborted or (comm == NULL and operation.kind < INIT_RANK):
            batch.failed = i
            return <ncclResult_t>WAS_ABORTED
        operation.comm = comm
        operation.sequence = sequence
        if noting and operation.kind < WINDOW:
            (<Handle>last).note(operation)
        sequence += counted if operation.kind < WINDOW else 0
        at += batch.stride
    if last != NULL:
        (<Handle>last).sequence = sequence
    return ncclSuccess


cdef void _begin_watching(CallBatch* batch) noexcept nogil:
    """Report calls to the watchdog, once for each run of steps on one communicator and stream.

    If the batch is `marked`, each run gets a mark.
    """
    cdef size_t i
    cdef Step* step
    cdef Step* before = NULL
    cdef double limit
    for i in range(batch.count):
        step = step_of(batch, i)
        step.mark = NULL
        if step.operation.kind < WINDOW and (<Handle>step.handle).in_flight.watched and not (
            before != NULL and before.handle == step.handle and before.operation.stream == step.operation.stream
        ):
            limit = (<Handle>step.handle).limit if batch.limit < 0 else batch.limit
            if batch.marked:
                step.mark = (<Handle>step.handle).enter_call(&step.operation, limit, batch.caller)
            else:
                (<Handle>step.handle).enter(limit)
        before = step


cdef void _end_watching(CallBatch* batch, bint issued) noexcept nogil:
    cdef size_t i
    cdef Step* step
    for i in range(batch.count):
        step = step_of(batch, i)
        if step.operation.kind < WINDOW and (<Handle>step.handle).in_flight.watched:
            (<Handle>step.handle).leave_call(step.mark, issued)


cdef void _run_hooks(CallBatch* batch) noexcept nogil:
    """Run the pre-call hooks that are wanted, once for successive steps on one communicator."""
    cdef size_t i
    cdef PyObject* last = NULL
    cdef Step* step
    for i in range(batch.count):
        step = step_of(batch, i)
        if step.handle != last:
            last = step.handle
            if (<Handle>last).precall_hook != NULL and (<Handle>last).raw != NULL:
                run_hook_if_wanted((<Handle>last).precall_hook, (<Handle>last).raw)


cdef void _record_behind_calls(CallBatch* batch, bint issued) noexcept nogil:
    """Report the calls to the pre-call hooks, once for each run of steps on one communicator and stream."""
    cdef size_t i
    cdef Step* step
    cdef Step* before = NULL
    for i in range(batch.count):
        step = step_of(batch, i)
        if not (before != NULL and before.handle == step.handle and before.operation.stream == step.operation.stream):
            if (<Handle>step.handle).precall_hook != NULL and step.operation.kind < WINDOW:
                record_behind_call((<Handle>step.handle).precall_hook, step.operation.stream, issued)
        before = step


cdef void record_behind_late_calls(const CallBatch* batch) noexcept nogil:
    cdef size_t i
    cdef Step* step
    for i in range(batch.count):
        step = step_of(batch, i)
        if (<Handle>step.handle).precall_hook != NULL and step.operation.kind < WINDOW and (<Handle>step.handle).lock_alive():
            record_behind_call((<Handle>step.handle).precall_hook, step.operation.stream, True)
            (<Handle>step.handle).unlock()


cdef void poll_calls(CallBatch* batch) noexcept nogil:
    """Poll the communicators until the calls are issued, have failed or are late.

    The batch gets the first failure. Each step also gets its own result, so that all late communicators can be
    aborted.
    """
    cdef size_t i
    cdef Step* step
    cdef double limit, begun = now()
    batch.result = ncclSuccess
    for i in range(batch.count):
        step = step_of(batch, i)
        limit = batch.limit if batch.limit >= 0 else (<Handle>step.handle).limit
        while True:
            step.polled = poll_once(<Handle>step.handle)
            if step.polled != ncclInProgress:
                break
            if now() - begun > limit:
                step.polled = <ncclResult_t>PAST_DEADLINE
                break
            sched_yield()
        if step.polled != ncclSuccess and batch.result == ncclSuccess:
            batch.result = step.polled
            batch.failed = i
    if batch.result == ncclSuccess:
        record_behind_late_calls(batch)
    batch.message = copy_last_error(batch.result)


cdef int note_arrival(const CallBatch* batch, Handle handle) except -1:
    cdef const Operation* last = NULL
    cdef size_t i
    cdef Step* step
    for i in range(batch.count if handle.status.is_noting else 0):
        step = step_of(batch, i)
        if step.handle == <PyObject*>handle and step.operation.kind < WINDOW:
            last = &step.operation
    return 0 if last == NULL else handle.note_arrival(last)
