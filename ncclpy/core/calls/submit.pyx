"""Calls on one communicator: made at once, or recorded by the group that is open in this thread."""

from cpython.exc cimport PyErr_CheckSignals

from ncclpy.abi.driver cimport CUstream
from ncclpy.abi.locks cimport LOCK_COMM, lock_wanted
from ncclpy.abi.nccl cimport ncclInProgress, ncclResult_t, ncclSuccess
from ncclpy.core.handles cimport handle as _handles
from ncclpy.core.runtime.device cimport lend_device, take_device_back
from ncclpy.core.calls.group cimport open_group
from ncclpy.core.handles.handle cimport (
    LOCK_BUSY, WAS_ABORTED, CallTracer, explain_and_report, lock_within, record_behind_call, resume_reports,
    run_hook_if_wanted, suppress_reports,
)
from ncclpy.core.runtime.library cimport host_engine, nccl
from ncclpy.core.handles.state cimport ABORTED, READY, Mark
from ncclpy.core.arguments.operation cimport SENDRECV, WINDOW, function_of, issue, raise_issue
from ncclpy.core.handles.watch cimport (
    Waiting,
    begin_wait,
    check_alive,
    end_wait,
    forget_wait,
    finish,
    give_up,
    make_wait,
    raise_if_fenced,
    wait_stream,
)
from ncclpy.core.runtime.wait cimport SLICE, deadline_after, now


cdef bint can_submit_pair() noexcept:
    return open_group() == NULL and nccl.ncclGroupStart != NULL and nccl.ncclSend != NULL and nccl.ncclRecv != NULL


cdef int submit(
    Handle handle, Operation* operation, object send, object recv, bint wait_host, double limit
) except -1:
    """Make a call at once, or have the thread's group record it.

    With `wait_host` the caller has no stream to wait for: the call, or the end of the group, returns once the
    operation has run.
    """
    cdef ncclResult_t result
    cdef Group group
    if open_group() != NULL:
        group = <Group>open_group()
        group.record(handle, operation, send, recv)
        if wait_host:
            group.wait_for(handle, operation.stream, limit)
        if operation.kind == WINDOW:
            group.may_block = True
        group.watched = group.watched or handle.in_flight.watched
        return 0
    if _handles.tracer is not None:
        return _submit_traced(_handles.tracer, handle, operation, send, recv, wait_host, limit)
    if wait_host:
        return _submit_and_wait(handle, operation, send, recv, limit)
    result = <ncclResult_t>_call_in_turn(handle, operation, limit)
    if result != ncclSuccess:
        return _complete_call(handle, operation, send, recv, False, limit, result)
    return 0


cdef int _submit_traced(
    CallTracer tracer, Handle handle, Operation* operation, object send, object recv, bint wait_host, double limit
) except -1:
    """Make a call at once, and report it to the tracer."""
    cdef Operation* reported = _reported_call(operation)
    # The lock is not taken yet, so this sequence is an estimate: a dump shows it while the call is stuck.
    reported.sequence = handle.sequence
    noted = tracer.begin(handle, reported, None)
    suppress_reports()
    try:
        if wait_host:
            _submit_and_wait(handle, operation, send, recv, limit)
        else:
            result = <ncclResult_t>_call_in_turn(handle, operation, limit)
            if result != ncclSuccess:
                _complete_call(handle, operation, send, recv, False, limit, result)
    except BaseException as error:
        resume_reports()
        tracer.end(noted, reported, False, error)
        explain_and_report([handle], error)
        tracer.explain(noted, error)
        raise
    resume_reports()
    return tracer.end(noted, reported, wait_host, None)


cdef int _submit_and_wait(Handle handle, Operation* operation, object send, object recv, double limit) except -1:
    """Make a call and wait for its operation.

    The call counts in `Handle.waiters` too, so a close waits for the call and for the wait.
    """
    cdef ncclResult_t result
    cdef Waiting waiting
    if handle.state != READY:  # another thread may have begun a close while this one checked the buffers
        check_alive(handle)
    raise_if_fenced(handle, function_of(operation.kind))
    handle.waiters += 1
    try:
        begin_wait(&waiting, handle, function_of(operation.kind), deadline_after(limit), None)
        with nogil:  # once for call and wait: releasing and taking the GIL takes as long as ncclpy's other work here
            result = _call(handle, operation, True, limit, 0)
            if result == ncclSuccess:
                make_wait(&waiting, operation.stream)
        if result == ncclSuccess:
            try:
                end_wait(&waiting)
            except BaseException as error:
                _hold_unfinished(handle, operation, send, recv, error)
                raise
        else:
            if <int>result == LOCK_BUSY:
                result = <ncclResult_t>_call_later(handle, operation, True, limit)
            _complete_call(handle, operation, send, recv, True, limit, result)
        if handle.status.is_noting:
            handle.note_arrival(_reported_call(operation))
    finally:
        forget_wait(&waiting, handle)
        handle.waiters -= 1
    return 0


cdef inline Operation* _reported_call(Operation* operation) noexcept nogil:
    """Return the operation that is reported: for a pair the receive, since its source is what the rank waits for."""
    if operation.kind == SENDRECV:
        return operation.receive
    return operation


cdef inline int _call_in_turn(Handle handle, Operation* operation, double limit) except? -1:
    """Make a call at once, or when other threads have released the communicator."""
    cdef ncclResult_t result
    with nogil:
        result = _call(handle, operation, False, limit, 0)
    return <int>result if <int>result != LOCK_BUSY else _call_later(handle, operation, False, limit)


cdef inline ncclResult_t _call(
    Handle handle, Operation* operation, bint wait_host, double limit, double until
) noexcept nogil:
    """Make a call under the communicator's lock and return its result.

    Return LOCK_BUSY if another thread holds the lock until `until`, and WAS_ABORTED if the communicator has ended.
    """
    cdef ncclResult_t result
    cdef Mark* mark
    cdef bint lent
    lock_wanted(LOCK_COMM, &handle.mutex)
    if not lock_within(&handle.mutex, until):
        return <ncclResult_t>LOCK_BUSY
    operation.comm = handle.raw
    operation.sequence = handle.sequence
    handle.sequence += 1
    if operation.kind == SENDRECV:
        operation.receive.comm, operation.receive.sequence = operation.comm, handle.sequence
        handle.sequence += 1
    if handle.status.is_noting:
        handle.note(_reported_call(operation))
    lent = not host_engine and lend_device(handle.device)  # the host engine needs no current device
    if handle.precall_hook != NULL and operation.comm != NULL and handle.state != ABORTED:
        run_hook_if_wanted(handle.precall_hook, operation.comm)
    if operation.comm == NULL or handle.state == ABORTED:
        result = <ncclResult_t>WAS_ABORTED
    elif handle.in_flight.watched:
        # With `wait_host` the calling thread enforces the deadline itself.
        mark = handle.enter_call(_reported_call(operation), limit) if not wait_host else NULL
        result = issue(operation)
        handle.leave_call(mark, result == ncclSuccess)
    else:
        result = issue(operation)
    if handle.precall_hook != NULL:
        record_behind_call(handle.precall_hook, operation.stream, result != ncclInProgress)
    if lent:
        take_device_back()
    handle.unlock()
    return result


cdef int _call_later(Handle handle, Operation* operation, bint wait_host, double limit) except? -1:
    """Make a call once other threads have released the communicator's lock; run signal handlers until then.

    If the lock is not released within `limit` seconds, abort the communicator and raise NcclTimeout.
    """
    cdef ncclResult_t result
    cdef double started = now(), deadline = deadline_after(limit)
    while True:
        with nogil:
            result = _call(handle, operation, wait_host, limit, min(now() + SLICE, deadline))
        if <int>result != LOCK_BUSY:
            return <int>result
        PyErr_CheckSignals()  # nothing was called yet: if a handler raises, nothing needs to be ended
        if now() >= deadline:
            give_up(handle, function_of(operation.kind).decode(), now() - started)


cdef int _complete_call(
    Handle handle, Operation* operation, object send, object recv, bint wait_host, double limit, ncclResult_t result
) except -1:
    """Wait until NCCL has issued an operation and, with `wait_host`, until it has run; raise its error.

    If the wait ends early, hold the operation's arrays.
    """
    cdef const char* what = function_of(operation.kind)
    try:
        if result == ncclInProgress:
            finish(handle, what.decode(), deadline_after(limit))
            if handle.precall_hook != NULL:
                _record_behind_late_call(handle, operation.stream)
        elif result != ncclSuccess:
            handle.raise_if_aborted(result, what)
            raise_issue(result, operation.kind, handle.raw)
        if wait_host:
            wait_stream(handle, operation.stream, what, deadline_after(limit))
    except BaseException as error:
        # SENDRECV is a group: its end may fail after a part was launched.
        if result == ncclSuccess or result == ncclInProgress or operation.kind == SENDRECV:
            _hold_unfinished(handle, operation, send, recv, error)
        else:
            handle.explain(error)
        raise
    return 0


cdef int _hold_unfinished(Handle handle, Operation* operation, object send, object recv, object error) except -1:
    """Hold the arrays of an operation that may still run although its wait has ended."""
    what = function_of(operation.kind).decode()
    handle.hold([send, recv], operation.stream, f"arrays of {what} on {handle!r}")
    handle.explain(error)
    return 0


cdef int _record_behind_late_call(Handle handle, CUstream stream) except -1:
    """Report to the pre-call hook an operation that NCCL has issued only after its call had returned."""
    with nogil:
        if handle.lock_alive():
            record_behind_call(handle.precall_hook, stream, True)
            handle.unlock()
    return 0


cdef int check_may_make(Group group, str what) except -1:
    """Refuse to make an object in a group that never calls NCCL (simulate) or does so many times (a plan)."""
    if group.simulate:
        raise ValueError(f"a {what} cannot be made inside group(simulate=True)")
    if group.is_plan:
        raise ValueError(f"a {what} cannot be made inside plan.record(): a plan is launched many times")
    return 0


cdef int issue_init(Handle parent, Handle child, Operation* operation) except -1:
    """Make the call that makes `child`, or have the thread's group record it; `parent` is None without a parent."""
    cdef Group group
    if open_group() != NULL:
        group = <Group>open_group()
        check_may_make(group, "communicator")
        return _record_init(group, parent, child, operation)
    group = Group()
    group.bare = True
    try:
        _record_init(group, parent, child, operation)
        group.finish()
    finally:
        group.drop(0)
    return 0


cdef int make_alone(Handle handle, Operation* operation, object send, object recv) except -1:
    """Make one call that waits for other ranks, in a thread of its own, or have the thread's group record it."""
    cdef Group group
    if open_group() != NULL:
        return submit(handle, operation, send, recv, False, handle.limit)
    group = Group()
    group.bare = group.may_block = True
    try:
        group.record(handle, operation, send, recv)
        group.finish()
    finally:
        group.drop(0)
    return 0


cdef int _record_init(Group group, Handle parent, Handle child, Operation* operation) except -1:
    group.record(child if parent is None else parent, operation, None, None)
    group.inits.append((group.count - 1, child))
    group.may_block = True
    return 0
