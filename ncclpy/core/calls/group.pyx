"""Groups of calls, and waits for all communicators of a group.

A group records what is called inside its block. When the outermost block ends, it makes the calls between
`ncclGroupStart` and `ncclGroupEnd`, in one batch without the GIL. NCCL itself cannot withdraw a call from a group, but
a recorded call can be dropped: an exception inside the block launches nothing.

If one member, a communicator of the group, fails, its error is added to a list. The others are still waited for, until
their deadlines or, without a deadline, for GROUP_PATIENCE seconds; so the failures of all members are reported.
"""

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from cpython.ref cimport PyObject, Py_DECREF, Py_INCREF, Py_XDECREF
from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy

from ncclpy.abi.driver cimport CUstream
from ncclpy.abi.nccl cimport NCCLPY_SIM_INFO_MAGIC, NCCL_UNDEF_FLOAT, ncclInProgress, ncclSuccess
from ncclpy.core.handles cimport handle as _handles
from ncclpy.core.handles.abort cimport (
    ABORT_DEADLINE, abort_and_report, abort_handles, abort_late, aborted_together, end_call, is_stray,
)
from ncclpy.core.runtime.library cimport abort_preempts, nccl, nccl_error, require
from ncclpy.core.arguments.config cimport struct_version
from ncclpy.core.handles.handle cimport (
    CallTracer, count_waits, explain_and_report, in_lock_order, resume_reports, suppress_reports,
)
from ncclpy.core.arguments.operation cimport NOT_THERE, WINDOW, function_of, raise_issue
from ncclpy.core.arguments.validation cimport Extents, digest, digest_begun, known_apart, method_of, note_apart, shared_memory_error
from ncclpy.core.handles.state cimport ABORTED, DEFERRED, FAILED, FINALIZED, INIT_PENDING, INITIALISING, READY
from ncclpy.core.runtime.stream cimport hold
from ncclpy.core.calls.batch cimport record_behind_late_calls, make_calls, note_arrival
from ncclpy.core.runtime.wait cimport FOREVER, SLICE, Call, as_timeout, deadline_after, now, pause
from ncclpy.core.handles.watch cimport (
    Waiting, begin_wait, end_init, check_alive, end_wait, finish, forget_wait, give_up, make_wait, poll_once,
    raise_if_fenced, wait_stream,
)

from ncclpy.errors import NcclError, attach, not_copied


cdef extern from *:
    """
    /* The outermost group of this thread; the reference is held by the thread while the block lasts. */
    static __thread PyObject* ncclpy_current_group = NULL;
    """
    PyObject* ncclpy_current_group

# The most operations of a group for which an error names the call site.
cdef int MAX_EXPLAINED = 3


cdef PyObject* open_group() noexcept nogil:
    return ncclpy_current_group


def in_group():
    """Return whether the calling thread has a group open, so that its calls are made when the group ends."""
    return ncclpy_current_group != NULL


cdef Group current_group():
    """Return the outermost group of the calling thread, or None."""
    if ncclpy_current_group == NULL:
        return None
    return <Group>ncclpy_current_group


@cython.freelist(8)
cdef class Group:
    """Group(simulate=False, timeout=None)
--

Record the calls of a ``with`` block and start them together when the outermost block ends.

    Parameters
    ----------
    simulate : bool, optional
        Launch nothing: `estimated_time_us` tells afterwards how long NCCL thinks the group would take on the device
        (`ncclGroupSimulateEnd`, NCCL 2.22).
    timeout : float, optional
        Seconds that each wait at the group's end may take, instead of the communicators' own. Every communicator of
        the group must be one that can be ended: made with ``timeout=`` or ``abortable=True``, or nonblocking.

    Notes
    -----
    If a communicator of the group fails, the others are still waited for, each until its deadline (for 5 s if it has
    none); then the first error is raised, with the others as notes. If a signal handler raises after NCCL was called,
    all are aborted.
    """

    def __cinit__(self, bint simulate=False, timeout=None):
        self.simulate = simulate
        self.limit = as_timeout(timeout)
        self.held, self.capacity = self.inline_slots, INLINE_SLOTS

    def __dealloc__(self):
        self.drop(0)
        if self.held != self.inline_slots:
            free(self.held)
        free(self.calls.message)

    cdef int record(self, Handle handle, const Operation* operation, object send, object recv) except -1:
        """Append one operation; its communicator and buffers live at least until the group ends."""
        cdef Held* held
        if self.count == self.capacity:
            self._grow()
        if self.recent != <PyObject*>handle:
            self.note_communicator(handle)
        held = &self.held[self.count]
        held.step.operation = operation[0]
        Py_INCREF(handle)
        Py_INCREF(send)
        Py_INCREF(recv)
        held.step.handle = <PyObject*>handle
        held.send = <PyObject*>send
        held.recv = <PyObject*>recv
        self.count += 1
        if _handles.tracer is not None:
            self._note_place()
        return 0

    def _note_place(self):
        """Note where the last operation was recorded."""
        cdef Py_ssize_t before = self.count - 1
        cdef list places = self.places or []
        places += [None] * (before - len(places))  # operations recorded before there was a tracer
        del places[before:]  # places of operations that were dropped
        places.append((<CallTracer>_handles.tracer).call_site())
        self.places = places

    cdef list kept_objects(self):
        """Return what the operations keep alive."""
        cdef size_t i
        found = []
        for i in range(self.count):
            found.append((<object>self.held[i].step.handle, <object>self.held[i].send, <object>self.held[i].recv))
        return found

    cdef bint writes_to(self, object recv) noexcept:
        """Return whether a recorded operation has this object as its receive buffer."""
        cdef size_t i
        for i in range(self.count):
            if self.held[i].recv == <PyObject*>recv:
                return True
        return False

    cdef int wait_for(self, Handle handle, CUstream stream, double limit) except -1:
        """Have the group's end wait for the communicator's own stream, on which the caller has no means to wait."""
        if self.awaited != <PyObject*>handle or self.awaited_stream != stream or self.awaited_limit != limit:
            self.waits.append((handle, <uintptr_t>stream, limit))
            self.awaited, self.awaited_stream, self.awaited_limit = <PyObject*>handle, stream, limit
        return 0

    def _grow(self):
        """Make space for more operations."""
        cdef size_t capacity = max(self.capacity * 2, <size_t>64)
        cdef Held* grown = <Held*>realloc(NULL if self.held == self.inline_slots else self.held, capacity * sizeof(Held))
        if grown == NULL:
            raise MemoryError
        if self.held == self.inline_slots:
            memcpy(grown, self.inline_slots, self.count * sizeof(Held))
        self.held, self.capacity = grown, capacity

    cdef int note_communicator(self, Handle handle) except -1:
        """Note a communicator of the group. The lists are made here, so that an empty group costs almost nothing."""
        if self.handles is None:
            self.handles = []
            self.inits = []
            self.waits = []
        if handle not in self.handles:
            self.handles.append(handle)
        self.recent = <PyObject*>handle
        return 0

    cdef int drop(self, size_t start) noexcept:
        """Drop the operations from `start` on, with their references."""
        cdef size_t i
        cdef size_t count = self.count
        self.count = min(start, count)  # first: dropping a reference may run any Python code
        for i in range(start, count):
            Py_XDECREF(self.held[i].step.handle)
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
                raise ValueError("group(simulate=True) is not allowed inside a group that is not simulated")
            self.outer_count = self.outer.count
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
                _forget(self.outer, self.outer_count)
            self.outer = None
            return
        set_current(NULL)
        try:
            if kind is not None:
                _forget(self, 0)
            elif self.count or self.is_plan:
                self.finish()
        finally:
            to_abort = self.to_abort
            self.recent = self.awaited = NULL
            self.handles = self.inits = self.waits = self.to_abort = self.places = None
            self.drop(0)
            Py_DECREF(self)
            # Whether or not the calls succeeded: a communicator with `abort_at_end` is always aborted.
            if to_abort is not None:
                abort_and_leave(to_abort, ABORT_DEADLINE, "aborted in a group")

    def __reduce__(self):
        raise not_copied(self, "open a new one where the calls are made")

    def __repr__(self):
        cdef size_t count = self.count
        if self.outer is not None:
            count = self.outer.count - self.outer_count
        kind = "ncclpy.group" if not self.simulate else "ncclpy.group(simulate=True)"
        return f"<{kind}, {f'{count} calls recorded' if self.entered else 'not entered'}>"

    cdef int finish(self) except -1:
        """Make the recorded calls; a plan keeps them instead."""
        return _launch(self)

    cdef int abort_at_end(self, Handle handle) except -1:
        """Abort this communicator together with the others when the group ends."""
        if self.to_abort is None:
            self.to_abort = []
        self.to_abort.append(handle)
        return 0


cdef int abort_and_leave(list handles, double timeout, object reason) except -1:
    """Abort communicators, each with its `aborted_together`, and tell their ranks' status that this rank leaves."""
    cdef Handle handle
    together = [each for handle in handles for each in aborted_together(handle)]
    try:
        abort_handles(together, timeout, reason)
    finally:
        for handle in handles:
            if handle.peer_status is not None:
                handle.peer_status.leave()
    return 0


cdef int set_current(PyObject* group) noexcept:
    global ncclpy_current_group
    ncclpy_current_group = group
    return 0


cdef int _forget(Group group, size_t start) except -1:
    """Drop the operations from `start` on, which have not reached NCCL, and the communicators that they would make."""
    cdef Handle child
    cdef size_t i
    if group.count == start:
        return 0
    for index, child in group.inits:
        if index >= start:
            _cancel_init(child)
    group.inits = [each for each in group.inits if each[0] < start]
    group.drop(start)
    group.handles = []
    for i in range(start):
        if <object>group.held[i].step.handle not in group.handles:
            group.handles.append(<object>group.held[i].step.handle)
    group.waits = [wait for wait in group.waits if wait[0] in group.handles]
    group.recent = group.awaited = NULL
    return 0


cdef int check_together(list handles, set newborn) except -1:
    """Raise for a communicator that cannot be used, and for a mixture that NCCL does not take in a group.

    A communicator that NCCL is still making is waited for. One from `from_handle` is not checked for a mixture.
    """
    cdef Handle handle
    for handle in handles:
        if handle.state != READY and (newborn is None or id(handle) not in newborn):
            check_alive(handle)
        if handle.in_background() != (<Handle>handles[0]).in_background() and handle.owned:
            raise ValueError(
                "NCCL takes either blocking or nonblocking communicators in a group, and makes those with timeout= or "
                f"abortable=True in the background; this group mixes {handle!r} and {handles[0]!r}"
            )
    return 0


cdef int check_memory(Group group) except -1:
    """Raise if an operation writes memory that another one uses: a group runs its operations at the same time."""
    cdef uint64_t group_digest
    cdef int nranks
    cdef Handle handle
    cdef Held* held = group.held
    cdef Held* end = held + group.count
    if group.count < 2:
        return 0
    nranks = (<Handle>group.handles[0]).nranks
    if len(group.handles) > 1:
        for handle in group.handles:
            if handle.nranks != nranks:  # the sizes of what is read and written depend on it
                return _compare_memory(group)
    group_digest = digest_begun(nranks)
    while held != end:
        group_digest = digest(group_digest, &held.step.operation)
        held += 1
    if not known_apart(group_digest):  # otherwise a group with the same operations was checked before
        _compare_memory(group)
        note_apart(group_digest)
    return 0


cdef int _compare_memory(Group group) except -1:
    cdef Extents extents = Extents()
    cdef Held* held
    cdef size_t i
    for i in range(group.count):
        held = &group.held[i]
        if held.send != <PyObject*>None or held.recv != <PyObject*>None:  # a barrier uses no memory of the caller
            extents.add_operation(&held.step.operation, (<Handle>held.step.handle).nranks, i)
    if extents.clash():
        raise shared_memory_error(
            &extents.first, &extents.second, _operation_name(group, extents.second.place),
            _operation_name(group, extents.first.place),
        )
    return 0


cdef str _operation_name(Group group, size_t place):
    """Return the name of an operation of the group, for errors."""
    cdef Step* step = &group.held[place].step
    return f"operation {place + 1} of {group.count} ({method_of(step.operation.kind)} of rank {(<Handle>step.handle).rank})"


cdef bint _make_calls(Group group, PyObject** locked, size_t nlocked, double until) noexcept nogil:
    """Make the recorded calls; return False if other threads hold locks of the communicators until `until`."""
    cdef CallBatch* calls = &group.calls
    calls.steps = <char*>group.held
    calls.stride = sizeof(Held)
    calls.count = group.count
    calls.handles, calls.nhandles = locked, nlocked
    calls.grouped = not group.bare
    calls.watched = calls.marked = group.watched and not group.simulate
    calls.limit = -1 if group.limit == FOREVER else group.limit
    calls.simulated = &group.info if group.simulate else NULL
    return make_calls(calls, until)


cdef int _make_in_turn(Group group, PyObject** locked, size_t nlocked, Waiting* waiting, CUstream stream) except -1:
    """Make the calls when other threads have released the communicators; signal handlers run meanwhile.

    If `waiting` is not NULL, wait for the stream after the calls: the GIL is released once for calls and wait, as it
    is for a single call. If the communicators are not released in time, abort and raise NcclTimeout.
    """
    cdef bint made
    cdef double started = now(), deadline = started + _limit_of(group, group.handles)
    while True:
        with nogil:
            made = _make_calls(group, locked, nlocked, min(now() + SLICE, deadline))
            if made and waiting != NULL and group.calls.result == ncclSuccess:
                make_wait(waiting, stream)
        if made:
            return 0
        PyErr_CheckSignals()
        if now() >= deadline:
            give_up(<Handle>group.handles[0], "ncclGroupEnd", now() - started)
        if waiting != NULL:  # the time of the wait begins with the calls
            begin_wait(
                waiting, <Handle>waiting.handle, waiting.what, now() + (waiting.deadline - waiting.started), group.handles
            )


cdef double _limit_of(Group group, list concerned) noexcept:
    """Return the seconds that the calls of a group may take: its own limit, or the least of its communicators."""
    cdef Handle handle
    cdef double limit = group.limit
    if limit == FOREVER:
        for handle in concerned:
            limit = min(limit, handle.limit)
    return limit


cdef class _BatchCall(Call):
    """The calls of a group that wait for other ranks, in a thread of their own."""

    cdef Group group
    cdef PyObject** locked
    cdef size_t nlocked

    def __dealloc__(self):
        free(self.locked)

    cdef int make(self) except -1:
        with nogil:
            _make_calls(self.group, self.locked, self.nlocked, FOREVER)
        return 0


cdef int _call_in_thread(Group group) except -1:
    """Make the calls in another thread and wait for it until the least deadline; signal handlers run meanwhile."""
    cdef _BatchCall batch = _BatchCall()
    cdef Handle handle
    cdef double started = now()
    batch.group = group
    batch.locked = in_lock_order(group.handles)
    batch.nlocked = len(group.handles)
    concerned = [child for _, child in group.inits] + group.handles
    batch.start("ncclpy-call")
    for _, child in group.inits:
        (<Handle>child).init_state.nccl_may_write = True
    try:
        if batch.wait(started + _limit_of(group, concerned)):
            return 0
        handle = concerned[0]
        what = "ncclGroupEnd" if not group.bare else function_of(group.held[0].step.operation.kind).decode()
        raise handle.timeout_error(what, now() - started)
    except BaseException as error:
        why = f"a call was left early: {type(error).__name__}"
        try:
            end_call(concerned, batch, [child for _, child in group.inits], why, error)
        finally:  # also after a second Ctrl-C
            hold([group.kept_objects(), concerned, group], [batch], f"objects that a call may still use: {why}")
        raise


cdef int _launch(Group group) except -1:
    """Make the recorded calls; wait for communicators that are made and for the streams in `waits`."""
    if _handles.tracer is not None and not group.simulate:
        return _launch_traced(group, _handles.tracer)
    return _launch_and_wait(group)


cdef int _launch_traced(Group group, CallTracer tracer) except -1:
    """Do as `_launch_and_wait`, and report the calls to the tracer."""
    cdef size_t i
    cdef Step* step
    cdef list noted = []
    cdef dict earlier = {}
    cdef Py_ssize_t nplaces = 0 if group.places is None else len(group.places)
    waited = {(id(handle), stream) for handle, stream, _ in group.waits}
    for i in range(group.count):
        step = &group.held[i].step
        if step.operation.kind >= WINDOW:
            noted.append(None)
            continue
        # The locks are not taken yet, so this sequence is an estimate: a dump shows it while the calls are stuck.
        handle_id = <uintptr_t>step.handle
        step.operation.sequence = (<Handle>step.handle).sequence + earlier.get(handle_id, 0)
        earlier[handle_id] = earlier.get(handle_id, 0) + 1
        place = group.places[i] if <Py_ssize_t>i < nplaces else None
        noted.append(tracer.begin(<Handle>step.handle, &step.operation, place))
    failure = None
    suppress_reports()
    try:
        _launch_and_wait(group)
    except BaseException as error:
        failure = error
        raise
    finally:
        resume_reports()
        for i in range(group.count):
            step = &group.held[i].step
            if noted[i] is not None:
                done = (id(<object>step.handle), <uintptr_t>step.operation.stream) in waited
                tracer.end(noted[i], &step.operation, done, failure)
        if failure is not None:
            explain_and_report(group.handles + [child for _, child in group.inits], failure)
            _explain(tracer, noted, failure)
    return 0


cdef int _explain(CallTracer tracer, list noted, object error) except -1:
    """Add to an error where the first operations of a group, at most MAX_EXPLAINED, were called."""
    cdef int remaining = MAX_EXPLAINED
    for each in noted:
        if each is not None and remaining > 0:
            tracer.explain(each, error)
            remaining -= 1
    return 0


cdef int _launch_and_wait(Group group) except -1:
    """Do as `_launch_counted`, and count the waits in `Handle.waiters` meanwhile, so that a close waits for them."""
    cdef Waiting waiting
    if not group.waits:
        return _launch_counted(group, NULL)
    waits = group.waits
    count_waits(waits, 1)
    try:
        return _launch_counted(group, &waiting)
    finally:
        forget_wait(&waiting, <Handle>waits[0][0])
        count_waits(waits, -1)


cdef int _launch_counted(Group group, Waiting* wait) except -1:
    """Make the calls and wait for them. `wait` is memory for the wait for a single stream; NULL without `waits`."""
    cdef Handle child
    cdef PyObject** locked = NULL
    cdef size_t nlocked = len(group.handles)
    cdef CallBatch* calls = &group.calls
    cdef Waiting* waiting = NULL
    cdef CUstream stream = NULL
    try:
        require(<void*>nccl.ncclGroupStart, b"ncclGroupStart")
        if group.simulate:
            require(<void*>nccl.ncclGroupSimulateEnd, b"ncclGroupSimulateEnd")
            group.info.size = sizeof(group.info)
            group.info.magic = NCCLPY_SIM_INFO_MAGIC
            group.info.version = struct_version()
            group.info.estimatedTime = NCCL_UNDEF_FLOAT
        check_together(group.handles, {id(child) for _, child in group.inits} if group.inits else None)
        check_memory(group)
        if group.limit != FOREVER:
            for handle in group.handles:
                (<Handle>handle).check_endable("group(timeout=)")
        if not group.simulate:
            for handle, _, _ in group.waits:
                raise_if_fenced(<Handle>handle, b"ncclGroupEnd")
        if group.may_block:
            _call_in_thread(group)
        else:
            if nlocked > 1:  # the steps of a single handle need no order of locks
                locked = in_lock_order(group.handles)
            if len(group.waits) == 1 and not group.simulate:
                handle, awaited, limit = group.waits[0]
                stream = <CUstream><uintptr_t>awaited
                begin_wait(wait, handle, b"ncclGroupEnd", _deadline_of(group, limit, None), group.handles)
                waiting = wait
            _make_in_turn(group, locked, nlocked, waiting, stream)
    except BaseException:
        for _, child in group.inits:
            _cancel_init(child)
        raise
    finally:
        free(locked)
    if calls.failed < group.count or (calls.result != ncclSuccess and calls.result != ncclInProgress):
        for _, child in group.inits:
            _cancel_init(child)
        try:
            _raise_failed(group)
        except BaseException as error:
            abort_and_report([child for _, child in group.inits if is_stray(<Handle>child)], "its group failed", error)
            if abort_preempts:  # only the host engine can have made communicators by then, see is_stray()
                orphan_errors = []
                end_orphans([child for _, child in group.inits], orphan_errors)
                attach(error, orphan_errors)
            if calls.failed == group.count:
                _hold_all(group)
            for handle in group.handles:
                (<Handle>handle).explain(error)
            raise
    if group.simulate:
        group.estimated_time_us = group.info.estimatedTime
        return 0
    if group.inits or group.waits or calls.result == ncclInProgress:
        _await_members(group, waiting if calls.result == ncclSuccess else NULL)
    return 0


cdef int _raise_failed(Group group) except -1:
    """Raise the error of the call that failed, or of the group's end."""
    cdef Handle handle
    cdef CallBatch* calls = &group.calls
    cdef int kind
    if calls.failed < group.count:
        handle = <Handle>group.held[calls.failed].step.handle
        kind = group.held[calls.failed].step.operation.kind
        handle.raise_if_aborted(calls.result, function_of(kind))
        if <int>calls.result == NOT_THERE or calls.message == NULL:
            raise_issue(calls.result, kind, handle.raw)
        raise nccl_error(calls.result, function_of(kind), calls.message)
    for handle in group.handles:
        if handle.state == ABORTED:
            raise handle.aborted_error(f"the group with {handle!r} ended: the communicator was aborted")
    raise nccl_error(calls.result, b"ncclGroupSimulateEnd" if group.simulate else b"ncclGroupEnd", calls.message)


cdef double _deadline_of(Group group, double limit, list errors) noexcept:
    return deadline_after(patience(group.limit, limit, errors))


cdef int _await_members(Group group, Waiting* only_wait) except -1:
    """Wait for all members, even if some fail; raise the first error with the others as notes.

    `only_wait`: the wait for the only stream in `waits`, if it was made together with the calls; else NULL.
    """
    cdef Handle handle, child
    cdef list errors = [], children = [], handles = group.handles, together = handles
    if group.inits:  # most groups make no communicator, and each of these lists costs a small group 1% of its time
        children = [child for _, child in group.inits]
        together = children + handles
    try:
        if children:
            for child in children:  # adopt all before waiting for one: NCCL may already be writing any of them
                adopt(errors, child, group.calls.result)
            end_orphans(children, errors)
            polled = [each for each in children if (<Handle>each).returns_when_made or (<Handle>each).nranks == 0]
            poll_inits(polled, group.limit, errors)
        # After a single call that makes a communicator, outside a group, only the new communicator is polled, above.
        if group.calls.result == ncclInProgress and not (group.bare and children):
            for handle in handles:
                if handle.state == READY or handle.state == FINALIZED:  # FINALIZED: a close waits for this group
                    if not children:
                        handle.note_in_progress()
                    await_member(errors, handle, _deadline_of(group, handle.limit, errors))
            if not errors:
                with nogil:
                    record_behind_late_calls(&group.calls)
        for handle, stream, limit in group.waits if len(group.waits) < 2 else dict.fromkeys(group.waits):
            try:
                if only_wait != NULL:
                    end_wait(only_wait)
                else:
                    wait_stream(
                        handle, <CUstream><uintptr_t>stream, b"ncclGroupEnd", _deadline_of(group, limit, errors), together
                    )
                note_arrival(&group.calls, handle)
            except NcclError as error:
                errors.append(error)
                handle.explain(error)
    except BaseException as error:  # raised by a signal handler: end at once, without waiting for the other members
        try:
            to_abort = [each for handle in together for each in aborted_together(<Handle>handle)]
            abort_and_report(to_abort, "a group was left early", error)
        finally:  # also after a second and a third Ctrl-C
            try:
                abort_late(children, "a group was left early")  # children that were not adopted yet
            finally:
                _hold_all(group)
        raise
    if errors:
        _hold_all(group)
        attach(errors[0], errors[1:])
        raise errors[0]
    return 0


cdef int _hold_all(Group group) except -1:
    """Hold the objects that the operations of a failed group may still touch."""
    cdef const Operation* operation
    cdef Handle handle
    cdef size_t i
    seen = set()
    objects = group.kept_objects()
    for i in range(group.count):
        operation = &group.held[i].step.operation
        handle = <Handle>group.held[i].step.handle
        pair = (<uintptr_t><PyObject*>handle, <uintptr_t>operation.stream)
        if pair not in seen and operation.kind < WINDOW:
            seen.add(pair)
            handle.hold([objects], operation.stream, f"arrays of a group on {handle!r}")
    return 0


# Seconds that the other members of a group that has failed may take if they have no deadline of their own.
cdef double GROUP_PATIENCE = 5.0


cdef double patience(double group_limit, double limit, list errors) noexcept:
    if group_limit != FOREVER:
        limit = group_limit
    return GROUP_PATIENCE if errors and limit == FOREVER else limit


cdef int end_orphans(list children, list errors) except -1:
    """Abort what NCCL has made for children that were aborted during the calls: that abort found no handle."""
    cdef Handle child
    abandoned = [child for child in children if child.state == ABORTED and child.init_state.stage == INIT_PENDING]
    if abandoned:
        try:
            abort_late(abandoned, "aborted while its group ended")
        except NcclError as error:
            errors.append(error)
    return 0


cdef int poll_inits(list children, double group_limit, list errors) except -1:
    """Poll all children that NCCL is making, in turn: each advances only when polled, and may wait for another one."""
    cdef Handle child
    cdef ncclResult_t result
    cdef double started = now(), moment
    making = [(child, started + patience(group_limit, child.limit, errors)) for child in children]
    while True:
        unfinished, late = [], []
        moment = now()
        for child, deadline in making:
            if child.state != INITIALISING:
                if child.state == ABORTED:
                    errors.append(child.aborted_error(f"initialisation of {child!r} ended: the communicator was aborted"))
                continue
            with nogil:
                result = poll_once(child)
            if result != ncclInProgress:
                await_member(errors, child, moment, started)
            elif moment >= deadline:
                late.append(child)
            else:
                if errors:  # another child has failed
                    deadline = min(deadline, deadline_after(patience(group_limit, child.limit, errors)))
                unfinished.append((child, deadline))
        if late:
            _give_up(late, errors, started)
        if not unfinished:
            return 0
        making = unfinished
        with nogil:
            pause(now() - started)
        PyErr_CheckSignals()


cdef int _give_up(list late, list errors, double started) except -1:
    """Abort all children past their deadlines together: after the abort of one alone NCCL would fail the others."""
    cdef Handle child
    failures = [child.timeout_error("initialisation", now() - started) for child in late]
    to_abort = [each for child in late for each in aborted_together(<Handle>child)]
    abort_and_report(to_abort, "initialisation passed its deadline", failures[0])
    errors += failures
    return 0


cdef int adopt(list errors, Handle child, ncclResult_t result) except -1:
    try:
        end_init(child, result)
    except NcclError as error:
        errors.append(error)
    return 0


cdef int await_member(list errors, Handle handle, double deadline, double started=0) except -1:
    try:
        finish(handle, "initialisation" if handle.state == INITIALISING else "ncclGroupEnd", deadline, started)
    except NcclError as error:
        errors.append(error)
    return 0


cdef int _cancel_init(Handle handle) except -1:
    """Note that the group in which this communicator was to be made has failed."""
    if handle.state == DEFERRED:
        handle.become(FAILED)
        if handle.init_state is not None and handle.raw == NULL and handle.guard == NULL:
            handle.init_state.nccl_may_write = False
    return 0
