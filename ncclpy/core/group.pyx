"""Groups: several calls that NCCL starts as one.

A group records what is called inside its block and makes the calls when the outermost block ends, between
`ncclGroupStart` and `ncclGroupEnd`, all in one stretch without the GIL. NCCL itself cannot take a call back once it is
inside a group; recording can, so an exception inside the block launches nothing.
"""

cimport cython
from cpython.ref cimport Py_DECREF, Py_INCREF, Py_XDECREF, PyObject
from libc.stdint cimport uintptr_t
from libc.stdlib cimport free, realloc

from ncclpy.abi.driver cimport CUstream
from ncclpy.abi.nccl cimport (
    NCCL_UNDEF_FLOAT,
    NCCLPY_SIM_INFO_MAGIC,
    ncclInProgress,
    ncclResult_t,
    ncclSimInfo_t,
    ncclSuccess,
)
from ncclpy.core.check cimport raise_nccl
from ncclpy.core.config cimport struct_version
from ncclpy.core.handle cimport (
    ABORT_DEADLINE,
    ABORTED,
    READY,
    WAS_ABORTED,
    abort_handles,
    deadline_after,
    in_lock_order,
    lock_all,
    unlock_all,
)
from ncclpy.core.library cimport nccl, require
from ncclpy.core.operation cimport INIT_RANK, function_of, issue, raise_issue

from ncclpy.core.errors import NcclAborted, not_copied

cdef extern from *:
    """
    /* The outermost group of this thread; the reference is held by the thread while the block lasts. */
    static __thread PyObject* ncclpy_current_group = NULL;
    """
    PyObject* ncclpy_current_group


cdef Group current_group():
    """Return the outermost group of the calling thread, or None."""
    if ncclpy_current_group == NULL:
        return None
    return <Group>ncclpy_current_group


cdef int submit(Handle handle, Operation* operation, object send, object recv, bint wait_host) except -1:
    """Make a call at once, or have the thread's group record it.

    With `wait_host` the data are in CPU memory that has no stream: the call, or the group's end, returns when they
    are there.
    """
    cdef ncclResult_t result
    if ncclpy_current_group != NULL:
        (<Group>ncclpy_current_group).record(handle, operation, send, recv)
        if wait_host:
            (<Group>ncclpy_current_group).waits.append((handle, <uintptr_t>operation.stream))
        return 0
    with nogil:
        handle.lock()
        operation.comm = handle.raw
        if operation.comm == NULL:
            result = <ncclResult_t>WAS_ABORTED
        else:
            result = issue(operation)
        handle.unlock()
    if result != ncclSuccess:
        _not_done(handle, operation.kind, result)
    if wait_host:
        handle.wait_stream(
            operation.stream, function_of(operation.kind).decode(), deadline_after(handle.limit)
        )
    return 0


cdef int _not_done(Handle handle, int kind, ncclResult_t result) except -1:
    """Poll an operation that NCCL issues in the background, or raise for one that it refused."""
    if result == ncclInProgress:
        return handle.finish(function_of(kind).decode(), deadline_after(handle.limit))
    handle.raise_if_aborted(result, function_of(kind))
    return raise_issue(result, kind, handle.raw)


cdef int check_makes(Group group, str what) except -1:
    """Refuse to make something in a group that calls NCCL never, or many times."""
    if group.simulate:
        raise ValueError(f"a {what} cannot be made inside group(simulate=True)")
    if group.keeps:
        raise ValueError(f"a {what} cannot be made inside plan.record(): a plan is launched many times")
    return 0


cdef int give_birth(Handle parent, Handle child, Operation* operation) except -1:
    """Make the call that makes `child`, or have the thread's group record it. `parent` is None for a new clique."""
    cdef ncclResult_t result
    cdef Handle locked = child if parent is None else parent
    if ncclpy_current_group != NULL:
        group = <Group>ncclpy_current_group
        check_makes(group, "communicator")
        group.record(locked, operation, None, None)
        group.births.append((group.count - 1, child))
        return 0
    with nogil:
        locked.lock()
        operation.comm = locked.raw
        result = <ncclResult_t>WAS_ABORTED if parent is not None and locked.raw == NULL else issue(operation)
        locked.unlock()
    if result != ncclSuccess and result != ncclInProgress:
        child.unborn()
        if <int>result == WAS_ABORTED:
            return locked.check_call(result, function_of(operation.kind))
        return raise_issue(result, operation.kind, NULL)
    return child.born(result)


@cython.freelist(8)
cdef class Group:
    """Record the calls of a ``with`` block and start them together when the outermost block ends.

    Parameters
    ----------
    simulate : bool, optional
        Launch nothing: `estimated_time_us` tells afterwards how long NCCL thinks the group would take on the device
        (`ncclGroupSimulateEnd`, NCCL 2.22).
    """

    def __cinit__(self, bint simulate=False):
        self.simulate = simulate

    def __dealloc__(self):
        self.drop(0)
        free(self.operations)
        free(self.held)

    cdef int record(self, Handle handle, const Operation* operation, object send, object recv) except -1:
        """Append one operation; its communicator and buffers live at least until the group ends."""
        cdef Held* held
        if self.count == self.capacity:
            self._grow()
        if self.recent != <PyObject*>handle:
            self.meet(handle)
        self.operations[self.count] = operation[0]
        held = &self.held[self.count]
        Py_INCREF(handle)
        Py_INCREF(send)
        Py_INCREF(recv)
        held.handle = <PyObject*>handle
        held.send = <PyObject*>send
        held.recv = <PyObject*>recv
        self.count += 1
        return 0

    cdef bint writes_to(self, object recv) noexcept:
        """Return whether an operation that is recorded here writes to this object."""
        cdef size_t i
        for i in range(self.count):
            if self.held[i].recv == <PyObject*>recv:
                return True
        return False

    def _grow(self):
        """Make room for more operations."""
        cdef size_t capacity = self.capacity * 2 if self.capacity else 64
        cdef void* grown = realloc(self.operations, capacity * sizeof(Operation))
        if grown == NULL:
            raise MemoryError
        self.operations = <Operation*>grown
        grown = realloc(self.held, capacity * sizeof(Held))
        if grown == NULL:
            raise MemoryError
        self.held = <Held*>grown
        self.capacity = capacity

    cdef int meet(self, Handle handle) except -1:
        """Note another communicator. The lists are made here: an empty group costs next to nothing."""
        if self.handles is None:
            self.handles = []
            self.births = []
            self.waits = []
        if handle not in self.handles:
            self.handles.append(handle)
        self.recent = <PyObject*>handle
        return 0

    cdef int drop(self, size_t mark) noexcept:
        """Let go of what the operations from `mark` on keep alive."""
        cdef size_t i
        cdef size_t count = self.count
        self.count = min(mark, count)  # first: letting go may run anything
        for i in range(mark, count):
            Py_XDECREF(self.held[i].handle)
            Py_XDECREF(self.held[i].send)
            Py_XDECREF(self.held[i].recv)
        return 0

    def __enter__(self):
        if self.entered:
            raise RuntimeError("this group was entered before; make a new one with ncclpy.group()")
        self.entered = True
        if ncclpy_current_group != NULL:
            self.outer = <Group>ncclpy_current_group
            if self.simulate and not self.outer.simulate:
                raise ValueError("group(simulate=True) cannot stand inside a group that is not simulated")
            self.mark = self.outer.count
            return self
        Py_INCREF(self)
        set_current(<PyObject*>self)
        return self

    def __exit__(self, kind, error, traceback):
        cdef Group outermost = self if self.outer is None else self.outer
        if ncclpy_current_group != <PyObject*>outermost:
            raise RuntimeError("this group is not open in this thread: it was left already, or entered in another one")
        if self.outer is not None:
            if kind is not None:
                _forget(self.outer, self.mark)
            self.outer = None
            return
        set_current(NULL)
        try:
            if kind is not None:
                _forget(self, 0)
            else:
                if self.count:
                    self.finish()
                if self.aborts is not None:
                    abort_handles(self.aborts, ABORT_DEADLINE, "aborted in a group")
        finally:
            self.recent = NULL
            self.handles = self.births = self.waits = self.aborts = None
            self.drop(0)
            Py_DECREF(self)

    def __reduce__(self):
        raise not_copied(self, "open a new one where the calls are made")

    def __repr__(self):
        cdef size_t count = self.count
        if self.outer is not None:
            count = self.outer.count - self.mark
        kind = "ncclpy.group" if not self.simulate else "ncclpy.group(simulate=True)"
        return f"<{kind}, {f'{count} calls recorded' if self.entered else 'not entered'}>"

    cdef int finish(self) except -1:
        """Make the recorded calls; a plan keeps them instead."""
        return _launch(self)

    cdef int abort_at_end(self, Handle handle) except -1:
        """Abort this communicator together with the others when the group ends."""
        if self.aborts is None:
            self.aborts = []
        self.aborts.append(handle)
        return 0


cdef int set_current(PyObject* group) noexcept:
    global ncclpy_current_group
    ncclpy_current_group = group
    return 0


cdef int _forget(Group group, size_t mark) except -1:
    """Drop what was recorded from `mark` on; nothing of it has reached NCCL."""
    cdef Handle child
    cdef size_t i
    if group.count == mark:
        return 0
    for index, child in group.births:
        if index >= mark:
            child.unborn()
    group.births = [birth for birth in group.births if birth[0] < mark]
    group.drop(mark)
    group.handles = []
    for i in range(mark):
        if <object>group.held[i].handle not in group.handles:
            group.handles.append(<object>group.held[i].handle)
    group.waits = [wait for wait in group.waits if wait[0] in group.handles]
    group.recent = NULL
    return 0


cdef int check_together(list handles, set newborn) except -1:
    """Raise for a communicator that cannot be used, and for a mixture that NCCL takes in no group."""
    cdef Handle handle
    for handle in handles:
        if handle.state != READY and id(handle) not in newborn:
            handle.check_alive()
        if handle.nonblocking != (<Handle>handles[0]).nonblocking and handle.owned:
            raise ValueError(
                "a group holds either blocking or nonblocking communicators, and a timeout makes one nonblocking; "
                f"this one mixes {handle!r} and {handles[0]!r}"
            )
    return 0


cdef int _launch(Group group) except -1:
    """Make the recorded calls between ncclGroupStart and ncclGroupEnd."""
    cdef size_t i, n = group.count, failed = n
    cdef Operation* operations = group.operations
    cdef Handle handle, child
    cdef ncclResult_t result = ncclSuccess
    cdef ncclResult_t ended = ncclSuccess
    cdef ncclSimInfo_t info
    cdef bint simulate = group.simulate
    cdef list handles = group.handles
    cdef PyObject** locked = NULL
    cdef size_t nlocked = len(handles)
    cdef Held* held = group.held
    try:
        require(<void*>nccl.ncclGroupStart, b"ncclGroupStart")
        if simulate:
            require(<void*>nccl.ncclGroupSimulateEnd, b"ncclGroupSimulateEnd")
            info.size = sizeof(info)
            info.magic = NCCLPY_SIM_INFO_MAGIC
            info.version = struct_version()
            info.estimatedTime = NCCL_UNDEF_FLOAT
        check_together(handles, {id(born) for _, born in group.births})
        locked = in_lock_order(handles)
        with nogil:
            lock_all(locked, nlocked)
            for i in range(n):
                operations[i].comm = (<Handle>held[i].handle).raw
                if operations[i].comm == NULL and operations[i].kind < INIT_RANK:
                    result = <ncclResult_t>WAS_ABORTED
                    failed = i
                    break
            if result == ncclSuccess:
                result = nccl.ncclGroupStart()
            if result == ncclSuccess:
                for i in range(n):
                    result = issue(&operations[i])
                    if result != ncclSuccess and result != ncclInProgress:
                        failed = i
                        break
                # A refused call has marked the group: its end launches nothing and returns the same error.
                ended = nccl.ncclGroupSimulateEnd(&info) if simulate else nccl.ncclGroupEnd()
            unlock_all(locked, nlocked)
    except BaseException:
        for _, child in group.births:
            child.unborn()
        raise
    finally:
        free(locked)
    if failed < n or (ended != ncclSuccess and ended != ncclInProgress):
        for _, child in group.births:
            child.unborn()
        if failed < n:
            return _not_done(<Handle>held[failed].handle, operations[failed].kind, result)
        for handle in handles:
            if handle.state == ABORTED:
                raise NcclAborted(f"the group with {handle!r} ended: the communicator was aborted")
        return raise_nccl(ended, b"ncclGroupSimulateEnd" if simulate else b"ncclGroupEnd", NULL)
    if simulate:
        group.estimated_time_us = info.estimatedTime
        return 0
    for _, child in group.births:
        child.born(ended)
    if ended == ncclInProgress:
        for handle in handles:
            if handle.state == READY:
                handle.finish("ncclGroupEnd", deadline_after(handle.limit))
    for handle, stream in dict.fromkeys(group.waits):
        handle.wait_stream(<CUstream><uintptr_t>stream, "ncclGroupEnd", deadline_after(handle.limit))
    return 0
