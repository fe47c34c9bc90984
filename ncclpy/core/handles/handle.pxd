from cpython.ref cimport PyObject

from ncclpy.abi.driver cimport CUcontext, CUevent, CUstream
from ncclpy.abi.locks cimport mutex_t
from ncclpy.abi.nccl cimport ncclComm_t, ncclResult_t
from ncclpy.core.arguments.operation cimport Operation
from ncclpy.core.handles.state cimport AbortState, CallStatus, InFlight, InitState, Mark, Registrations
from ncclpy.core.runtime.wait cimport Waiting


# A listener for failures and for the ranks of this process: the module that writes dumps, if dumps are enabled.
cdef class FailureListener:
    # A communicator or a process group of `nranks` ranks is being made, in which this process is rank `rank`.
    cpdef int note_rank(self, int nranks, int rank) except -1
    # `error` has failed an operation or, if `ended`, ended a process group. With `wait` the calling thread holds no
    # lock, and is about to raise the error or to set it in threads that read by a stream. Without `wait` any thread
    # may call this, and the method must not block.
    cpdef int failed(self, object error, bint wait, bint ended=*) except -1
    # An error is about to end the process: wait, for a bounded time, until what was reported is written.
    cpdef int finish(self) except -1


cdef FailureListener listener  # None without one
cpdef int set_listener(FailureListener new) except -1

# Report an operation's error to the listener, if it is NcclTimeout or NcclRemoteError.
cdef int report_failure(object error, bint wait=*) except -1

# Between these two calls `report_failure` and `Handle.explain` do nothing in the calling thread: the caller explains
# and reports the outcome itself. The calls nest.
cdef void suppress_reports() noexcept nogil
cdef void resume_reports() noexcept nogil
cdef bint reports_suppressed() noexcept nogil


# The interface by which core asks a layer above what the other ranks of a communicator do.
cdef class PeerStatusHook:
    # The hook for a communicator that was made of some or all of these ranks; None if they cannot be asked.
    cpdef PeerStatusHook of_part(self, object comm)
    # Add to an operation's error what the ranks do. The calling thread holds no lock, and is about to raise the error
    # or to set it in threads that read by a stream. The call takes some seconds at most; the only exceptions that it
    # raises are those of signal handlers.
    cpdef int explain(self, object error) except -1
    # Three steps of the thread that aborts the communicator: `tell` the other ranks the reason; `confirm` to them that
    # this rank counts no operation that ends from now on as successful; `wait_until_heard`, for some seconds, until
    # the other ranks have confirmed this too. `wait_until_heard` returns True if the thread may then abort the
    # communicator, and False if the process is ending: then nothing must be aborted.
    cpdef int tell(self, str text, str kind) except -1
    cpdef int confirm(self) except -1
    cpdef bint wait_until_heard(self) except -1
    # Whether another rank has ended the communicator; called before a result is handed out. The store is asked only if
    # this process may have been stopped (SIGSTOP): a process that was not stopped has been told of the end.
    cpdef bint has_ended(self) except -1
    # `leave` begins to tell the other ranks that this rank gives the communicator up;
    # `wait_until_left` waits until they are told.
    cpdef int leave(self) except -1
    cpdef int wait_until_left(self, double seconds) except -1


cdef extern from "ncclpy/core/handles/precall_hook.h" nogil:
    # A hook that a communicator's calls run; its memory is kept by `Handle.hook_keeper`.
    ctypedef struct PreCallHook "ncclpy_precall_hook":
        int has_event
        int lacks_event
        int current
        void** events
        void* context
        void (*run)(PreCallHook* precall_hook, void* comm) noexcept nogil
        void (*note_capture)(PreCallHook* precall_hook) noexcept nogil
        void (*note_ended)(PreCallHook* precall_hook) noexcept nogil
    bint is_hook_wanted "ncclpy_hook_is_wanted"(const PreCallHook* precall_hook)
    bint is_hook_aborting "ncclpy_hook_is_aborting"(const PreCallHook* precall_hook)
    void set_hook_aborting "ncclpy_hook_set_aborting"(PreCallHook* precall_hook)
    # A weak reference to a communicator for threads without the GIL.
    ctypedef struct WeakHandle "ncclpy_weak_handle":
        void* target
    WeakHandle* new_weak_handle "ncclpy_weak_handle_new"(void* target)
    bint pin_handle "ncclpy_weak_handle_pin"(WeakHandle* weak)
    void unpin_handle "ncclpy_weak_handle_unpin"(WeakHandle* weak)
    void revoke_weak_handle "ncclpy_weak_handle_revoke"(WeakHandle* weak)
    void free_weak_handle "ncclpy_weak_handle_free"(WeakHandle* weak)


# `run_hook_if_wanted` runs before a call and `record_behind_call` after it, both under the communicator's lock.
cdef inline void run_hook_if_wanted(PreCallHook* precall_hook, ncclComm_t comm) noexcept nogil:
    if is_hook_wanted(precall_hook):
        run_hook(precall_hook, comm)


cdef void run_hook(PreCallHook* precall_hook, ncclComm_t comm) noexcept nogil
cdef void record_behind_call(PreCallHook* precall_hook, CUstream stream, bint issued) noexcept nogil

# Make the hook's events. `context` must be current. Return False if the driver cannot make them.
cdef bint make_events(PreCallHook* precall_hook, CUcontext context) noexcept nogil
cdef void destroy_events(PreCallHook* precall_hook) noexcept nogil


# The interface of the memory registry. `note_ready` tells the registry of a communicator that has become ready;
# `note_aborted` notes in the handle that the communicator's hook has aborted it, and why.
cdef class HookOwner:
    cdef int note_ready(self, object handle) except -1
    cdef int note_aborted(self, object handle) except -1


# The communicators of this process that have become ready, also closed and aborted ones, as long as their handles exist.
# A new `HookOwner` begins with those that are still open.
cdef list ready_handles()
cdef int set_hook_owner(HookOwner new) except -1
# Add a communicator that has become ready to `ready_handles`, and call `HookOwner.note_ready`.
cdef int tell_ready(object handle) except -1
cdef int note_hook_abort(object handle) except -1


# Observer of the calls that communicators make for users, singly or at the end of a group.
cdef class CallTracer:
    # The Python line that this thread executes. A group asks for it when an operation is added, and passes it to
    # `begin` when the group ends and NCCL is called. For a call outside a group `call_site` is None, and `begin` finds
    # the line.
    cdef object call_site(self)
    # Called before a call of NCCL. The result is passed to `end` as `noted`. `begin` and `end` run in the thread that
    # makes the call, under none of ncclpy's locks.
    cdef object begin(self, Handle handle, const Operation* operation, object call_site)
    # Called after the call of NCCL. `done`: the operation's data have been waited for; otherwise it may still run on
    # its stream.
    cdef int end(self, object noted, const Operation* operation, bint done, object error) except -1
    # The result of `begin` for an operation; None if the tracer does not have it, or not any more.
    cdef object find(self, Handle handle, const Operation* operation)
    # Add to an operation's error where the operation was called, before any other reader sees the error. If `noted` is
    # None, do nothing.
    cdef int explain(self, object noted, object error) except -1


# None while there is no observer.
cdef CallTracer tracer
cdef int set_call_tracer(CallTracer new) except -1

# Results of ncclpy's own functions, besides the values of ncclResult_t.
cdef enum:
    PAST_DEADLINE = -2
    WAS_ABORTED = -3  # NCCL was not called, because the communicator was aborted or closed
    SLICE_OVER = -4  # a slice of polling is over: run signal handlers, then poll again
    LOCK_BUSY = -5  # NCCL was not called, because another thread holds the communicator's lock

# Values of `CallStatus.failing`: why operations are not finished.
cdef enum:
    LATE = 1  # a deadline has passed, and the last operation has not ended
    BROKEN = 2  # an error other than a passed deadline: the last operation has ended without a result

# Values of `Handle.trust`, see engine.work: whether an operation that ends counts as successful. TRUSTED: always.
# FENCED: never again. Any other value is a number of stops: operations count as successful while it equals the number
# of times that this process was stopped (`engine.work.stops`). After a further stop the store is asked whether the
# communicator has ended; if it has not, the new number is stored.
cdef enum:
    TRUSTED = -1
    FENCED = -2


cdef class Handle:
    cdef int state  # changed by `become` alone
    cdef bint was_ready  # it is READY or was at some time
    cdef int trust  # TRUSTED, FENCED or a number of stops
    cdef ncclComm_t raw
    cdef ncclComm_t guard  # its abort ends this communicator's calls; NULL if there is none
    cdef bint guard_aborted  # then nothing that NCCL does for this communicator waits for another rank
    cdef mutex_t mutex
    cdef mutex_t gate  # taken to remove `raw` or `guard` from the handle, and to use them without `mutex`
    cdef bint nonblocking  # NCCL's calls may return ncclInProgress
    cdef bint owned  # ncclpy has made it and destroys it; False for `Communicator.from_handle`
    cdef bint revoked  # revoked, or about to be: operations on it may never end
    cdef readonly int rank
    cdef readonly int nranks
    cdef readonly int device
    # Waits.
    cdef bint returns_when_made  # init, split and similar calls return only when NCCL is done
    cdef double limit  # default timeout of operations, initialisation and close, in seconds; FOREVER for none
    cdef Waiting* first_wait  # the waits under way, the newest first; guarded by the GIL
    cdef int waiters  # waits under way or about to begin; a close waits until it is 0
    cdef bint main_is_waiting  # the main thread waits, so a signal handler may run on top of that wait
    # The communicator's other ranks in this process.
    cdef bint freed_by_own_abort  # result of `abort.is_freed` for this rank alone, for threads without the GIL
    cdef bint fenced  # one of them was aborted or is about to be: an operation that ends from now on is no success
    cdef int engine_failed  # atomic: a call from a launch has failed; launches make no other call on this communicator
    cdef AbortState abort_state
    cdef InFlight in_flight
    # The pre-call hook, or NULL, and the object that owns its memory; both stay as long as this handle.
    cdef PreCallHook* precall_hook
    cdef object hook_keeper
    cdef WeakHandle* weak  # for threads of the hook's owner without the GIL
    # Origin.
    cdef InitState init_state  # None for a communicator that ncclpy has not made
    cdef object config  # passed by the caller or inherited from the parent; None for NCCL's defaults
    cdef bint abortable  # abortable=True was passed by the caller or inherited
    cdef object site  # where it was made
    cdef Handle parent
    cdef void* parent_pointer  # the parent as a pointer, for polling without the GIL
    # Dependent objects.
    cdef object children  # WeakSet
    cdef list making  # children that NCCL still makes: they must be kept alive
    cdef object resources  # WeakSet of operators, registrations and graphs, closed with the communicator
    cdef Registrations registrations
    cdef object stream  # for memory that has no stream
    cdef size_t scratch  # device memory of the barrier, 0 until used
    # For a recorder: all ranks number their calls alike, so that records of several ranks can be compared.
    cdef str group_name  # the same on all ranks; None if that is not known
    cdef long long sequence  # number of calls made on it; guarded by the mutex
    # Status for the other ranks, if they and this rank can ask each other.
    cdef PeerStatusHook peer_status  # or None
    cdef CallStatus status
    cdef int descendants  # number of communicators made from it, to name the next one
    cdef object __weakref__

    # Move to another state if `may_become` allows this; return whether the state was changed.
    cdef bint become(self, int to) except -1
    # Raise if no operation can be called. INITIALISING is accepted, as READY is: `watch.check_alive` waits for its
    # end.
    cdef int check_state(self) except -1

    # Locks, and calls of NCCL under them.
    cdef void lock(self) noexcept nogil
    cdef void unlock(self) noexcept nogil
    cdef bint lock_alive(self) noexcept nogil
    # Remove `raw` from the handle and return it, to destroy or abort it; NULL if another thread has done so.
    cdef ncclComm_t detach_handle(self) noexcept nogil
    # The guard; NULL if there is none, or if it was removed. With `take` it is removed from the handle.
    cdef ncclComm_t guard_handle(self, bint take) noexcept nogil
    # Called under the lock before (`enter` or `enter_call`) and after (`leave_call`) a call of NCCL, so that the
    # watchdog sees how long the call takes. `enter_call` also marks the operation on its stream, if the communicator
    # has marks, and returns the mark, or NULL. `issued`: the call has returned ncclSuccess.
    cdef void enter(self, double limit) noexcept nogil
    # `thread` is the thread for which the calling thread makes the call; 0 if it makes the call for itself.
    cdef Mark* enter_call(self, const Operation* operation, double limit, unsigned long thread=*) noexcept nogil
    cdef void leave_call(self, Mark* mark, bint issued) noexcept nogil
    # `note` notes a call for the other ranks, under the lock. `note_arrival` notes that a call's data are there; it
    # needs the GIL and not the lock, under which another thread may be stuck.
    cdef void note(self, const Operation* operation) noexcept nogil
    cdef int note_arrival(self, const Operation* operation) except -1

    # Ask NCCL once for the state of a communicator that is made. For one that is being made use `watch.poll_once`.
    cdef ncclResult_t peek(self) noexcept nogil
    cdef int read_properties(self) except -1
    # The communicator to ask why this one failed, and NCCL's message for the error that polling has found; or NULL.
    cdef ncclComm_t error_source(self) noexcept
    cdef const char* last_error_text(self) noexcept

    # Take over what NCCL has written to `new_comm` of `init_state`: the communicator, or its guard.
    cdef void take_new_comm(self) noexcept nogil

    # Whether an abort ends any call and any operation of it.
    cdef bint can_be_ended(self) noexcept
    cdef int check_endable(self, object what) except -1
    # Whether NCCL makes its calls in the background; NCCL refuses to mix such calls with others in a group.
    cdef bint in_background(self) noexcept
    # Called after a call of NCCL has returned ncclInProgress: warn if the communicator is a blocking one with a guard.
    cdef int note_in_progress(self) except -1

    # Errors.
    cdef int check_call(self, ncclResult_t result, const char* function) except -1
    cdef int raise_if_aborted(self, ncclResult_t result, const char* function) except -1
    cdef object aborted_error(self, object what)
    cdef object timeout_error(self, object what, double waited)
    # Add what the other ranks do, if they can be asked, to an error that they may have caused.
    cdef int explain(self, object error) except -1
    # Note in `status` the first operation that the device has not ended. An abort ends such an operation without
    # executing it, so the operation must be noted before an abort. Without marks, or if the lock is not free within
    # MARKS_PATIENCE seconds, do nothing.
    cdef void update_unfinished(self) noexcept nogil
    # Called with the GIL before the abort of a local peer: note in each wait whether its stream has run dry by now, so
    # that its data are valid. Return False if a stream has not run dry and may still do so: the caller should ask
    # again. Note nothing, and return True, if an abort has begun already. If the communicator has failed, return True
    # and note that no data are valid.
    cdef bint note_drained_waits(self) noexcept
    # The threads that have begun an operation which the device has not ended, and that are in no call and no wait of
    # the communicator: they read by a stream. At most MOST_READERS; none if the communicator has no marks, or if the
    # marks cannot be read because another thread holds the lock for longer than READERS_PATIENCE.
    cdef set readers(self)
    cdef size_t _threads_marked(self, unsigned long* threads) noexcept nogil
    # Note that the calling thread is about to raise the communicator's error. The error is then not also set as an
    # asynchronous exception in that thread, as in threads that read by a stream.
    cdef int note_informed(self) except -1

    cdef CUstream own_stream(self) except NULL
    # Drop the reference to one buffer that NCCL has registered, or to all of them.
    cdef int release_buffer(self, long long number) except -1
    cdef int release_buffers(self) except -1
    # Keep objects, and this handle, until the threads that abort the communicator have returned and what the stream
    # has queued is done.
    cdef int hold(self, list objects, CUstream stream, object what) except -1
    # The name of a communicator that is made from this one; None if this one has no name. `suffix` tells which ranks
    # belong to the new communicator.
    cdef str name_next(self, str suffix)


# Note in communicators that `error` has failed them; do nothing if it is no NcclError. To be called before an abort,
# so that `CallStatus` has the operation that the abort will end.
cdef int note_failure(list handles, object error) except -1

# Have the communicators' `PeerStatusHook` explain an error, unless `wait` is False, and call `report_failure`.
cdef int explain_and_report(list handles, object error, bint wait=*) except -1

# Take a lock, with repeated attempts until the moment `until`; return whether it was taken. There is at least one
# attempt.
cdef bint lock_within(mutex_t* mutex, double until) noexcept nogil

# The handles in the order in which every thread takes their locks. The caller frees the array, and keeps the handles
# in it alive.
cdef PyObject** in_lock_order(list handles) except NULL

# Add `by` to `Handle.waiters` for each (handle, ...): 1 before the calls that are waited for are made, -1 when the
# waits are over. A thread that closes a communicator waits for them.
cdef int count_waits(list waits, int by) except -1

# Seconds that a check of the marks waits for the communicator's lock.
cdef double MARKS_PATIENCE
cdef bint on_main_thread() noexcept nogil
