from cpython.ref cimport PyObject

from ncclpy.abi.driver cimport CUcontext, CUevent, CUstream
from ncclpy.abi.locks cimport mutex_t
from ncclpy.abi.nccl cimport ncclComm_t, ncclResult_t
from ncclpy.core.arguments.operation cimport Operation
from ncclpy.core.handles.state cimport InitState, Mark, Marks, Ranges
from ncclpy.core.runtime.wait cimport Waiting


# What is told of failures and of this process's ranks: the module that writes dumps, where they were asked for.
cdef class FailureListener:
    # A communicator or a process group of so many ranks is being made, in which this process has that rank.
    cpdef int named(self, int nranks, int rank) except -1
    # An operation has failed or, if `ended`, a process group has ended by the error. With `wait` in the thread that raises
    # the error, under no lock; without, in any thread, which is not held up.
    cpdef int failed(self, object error, bint wait, bint ended=*) except -1
    # An error is about to end the process: wait until what was told is written, for a bounded time.
    cpdef int finish(self) except -1


cdef FailureListener listener  # None without one
cdef int set_listener(FailureListener new) except -1

# Tell of an error of an operation, if it is NcclTimeout or NcclRemoteError.
cdef int tell_failed(object error, bint wait=*) except -1

# Between these, in one thread, nothing is told: the caller of these two tells of the outcome.
cdef void suppress_reports() noexcept nogil
cdef void resume_reports() noexcept nogil
cdef bint reports_suppressed() noexcept nogil


# The other ranks of a communicator: an interface by which core asks a layer above what they do.
cdef class PeerStatusHook:
    # Those of a communicator that was made of some of these ranks; None if they cannot be asked.
    cpdef PeerStatusHook of_part(self, object comm)
    # Have an error of an operation say what the ranks do; in the thread that raises it, which holds no lock. It takes
    # some seconds at most, and raises what a signal handler does, nothing else.
    cpdef int explain(self, object error) except -1
    # Three steps of the thread that aborts the communicator. Tell them why it is; confirm that this rank takes no end of an
    # operation for a success any more; and wait until they have confirmed, those that can. Then the abort may come, or, if
    # that returns False, the process ends, and nothing is to be aborted.
    cpdef int tell(self, str text, str kind) except -1
    cpdef int confirm(self) except -1
    cpdef bint wait_until_heard(self) except -1
    # Whether one of them has ended it, as far as that is known or has to be asked: before a result is handed out.
    cpdef bint has_ended(self) except -1
    # Tell them that this rank gives the communicator up, and go on; a wait for that to have been told.
    cpdef int leave(self) except -1
    cpdef int left(self, double seconds) except -1


cdef extern from "ncclpy/core/handles/precall_hook.h" nogil:
    # A hook before each call of a communicator, in memory that its handle keeps.
    ctypedef struct PreCallHook "ncclpy_precall_hook":
        int known
        int unknown
        int current
        void** events
        void* context
        void (*enter)(PreCallHook* precall_hook, void* comm) noexcept nogil
        void (*caught)(PreCallHook* precall_hook) noexcept nogil
        void (*over)(PreCallHook* precall_hook) noexcept nogil
    bint wants "ncclpy_hook_is_wanted"(const PreCallHook* precall_hook)
    bint has_ended "ncclpy_hook_is_aborting"(const PreCallHook* precall_hook)
    void ends "ncclpy_hook_set_aborting"(PreCallHook* precall_hook)
    # A weak reference to a communicator for threads without the GIL.
    ctypedef struct WeakHandle "ncclpy_weak_handle":
        void* target
    WeakHandle* new_weak_handle "ncclpy_weak_handle_new"(void* target)
    bint pin_handle "ncclpy_weak_handle_pin"(WeakHandle* weak)
    void unpin_handle "ncclpy_weak_handle_unpin"(WeakHandle* weak)
    void revoke_weak_handle "ncclpy_weak_handle_revoke"(WeakHandle* weak)
    void free_weak_handle "ncclpy_weak_handle_free"(WeakHandle* weak)


# Before a call, and behind it: under the communicator's lock.
cdef inline void run_if_wanted(PreCallHook* precall_hook, ncclComm_t comm) noexcept nogil:
    if wants(precall_hook):
        enter(precall_hook, comm)


cdef void enter(PreCallHook* precall_hook, ncclComm_t comm) noexcept nogil
cdef void follow(PreCallHook* precall_hook, CUstream stream, bint issued) noexcept nogil

# Its events, in the current context; False if the driver has none.
cdef bint settle(PreCallHook* precall_hook, CUcontext context) noexcept nogil
cdef void destroy_events(PreCallHook* precall_hook) noexcept nogil


# The memory registry: it is told of communicators that are ready, and says why its hook has aborted one.
cdef class HookOwner:
    cdef int is_ready(self, object handle) except -1
    cdef int was_ended(self, object handle) except -1


# The communicators of this process that are ready: `HookOwner` begins with these when it is set.
cdef list ready_handles()
cdef int set_hook_owner(HookOwner new) except -1
cdef int tell_ready(object handle) except -1
cdef int tell_ended(object handle) except -1


# An observer of the calls that communicators make for users, each alone or at the end of a group.
cdef class CallTracer:
    # Where this thread's Python is, for `begin`: a group's operations are recorded before they are called.
    cdef object here(self)
    # Before a call: returns what `end` is given. Both in the calling thread, under none of the locks of ncclpy.
    cdef object begin(self, Handle handle, const Operation* operation, object here)
    # When it has come back: `done` where its data have been waited for, else it goes on, on its stream.
    cdef int end(self, object noted, const Operation* operation, bint done, object error) except -1
    # What `begin` has returned for an operation, None if that is not known any more.
    cdef object find(self, Handle handle, const Operation* operation)
    # Have an error of an operation say where it was called; before others see it. None: nothing.
    cdef int explain(self, object noted, object error) except -1


# None while there is no observer.
cdef CallTracer tracer
cdef int set_call_tracer(CallTracer new) except -1

# Results of ours beside ncclResult_t, of polling.
cdef enum:
    PAST_DEADLINE = -2
    WAS_ABORTED = -3
    SLICE_OVER = -4
    LOCK_BUSY = -5

# Why operations are not finished.
cdef enum:
    LATE = 1  # a deadline has passed, for what has no end
    BROKEN = 2  # something has failed: what was last begun has an end, and no result

# Of whom the ends of operations are believed, see engine.fence; others carry how often the process had stood still when
# the other ranks were asked last.
cdef enum:
    BELIEVED = -1
    FENCED = -2


cdef class Handle:
    cdef int state  # changed by `become` alone
    cdef int contact  # BELIEVED, FENCED or a count
    cdef ncclComm_t raw
    cdef ncclComm_t guard  # whose abort ends this communicator's calls, or NULL
    cdef bint guard_aborted  # that guard was aborted: what NCCL still does for this one waits for no other rank
    cdef mutex_t mutex
    cdef mutex_t gate  # see detach_handle
    cdef bint nonblocking  # NCCL's calls may return ncclInProgress
    cdef bint owned
    cdef bint revoked  # or it is about to be: what runs on it may not come to its end
    cdef readonly int rank
    cdef readonly int nranks
    cdef readonly int device
    # How it is waited for.
    cdef bint waits  # init, split and the like return only when NCCL is done
    cdef double limit  # seconds that any wait of this communicator may take; FOREVER for none
    cdef Waiting* waits_now  # the waits under way, the newest first; by the GIL
    cdef int waiters  # threads that wait for its private stream, or are about to
    cdef bint main_waits  # the main thread is one of them, so that a signal handler may run beneath that wait
    # Of its other ranks in this process: an abort of this one alone frees it (`abort.is_freed`), for who has no GIL; one was
    # aborted.
    cdef bint frees_alone
    cdef bint local_peer_aborted
    cdef bint fenced  # another rank of this process is about to be aborted: no end of an operation is a success any more
    cdef object abort_of_local_peer  # and the error of such an operation
    cdef bint readers_told  # threads that wait for it by a stream have its error, or get it from the engine
    cdef set informed  # threads in which a call has raised that it has ended; or None
    # Its end before its time.
    cdef int engine_failed  # a call of the engine's has failed: no other of its is made
    cdef object reason  # why it was aborted
    cdef object abort_error  # the exception that tells why it was aborted, for later calls
    cdef list aborting  # the threads that abort it, of the last abort
    # For the watcher, of a communicator that can be ended and has a deadline.
    cdef bint watched
    cdef Marks* marks
    cdef double in_call_since  # since when a thread is in a call of NCCL; 0 if none is
    cdef double in_call_limit
    cdef bint in_call_on_main  # it is the main thread
    cdef double shortest_limit  # the shortest deadline of any operation
    # What lives beside it, or NULL, and the object that it is in; they stay as long as this.
    cdef PreCallHook* precall_hook
    cdef object hook_keeper
    cdef WeakHandle* weak  # for threads of the hook's owner without the GIL
    # Where it comes from.
    cdef InitState init_state  # what it was made in; None of a handle that ncclpy has not made
    cdef object config  # that was asked for, and that children inherit
    cdef bint abortable  # it was asked for by name
    cdef object site  # where it was made
    cdef Handle parent
    cdef void* asked  # the parent as a pointer, for polling without the GIL
    # What hangs on it.
    cdef object children  # WeakSet
    cdef list making  # children that NCCL still makes: they must not go
    cdef object resources  # WeakSet of operators, registrations and graphs, closed with the communicator
    cdef dict registered  # buffers that NCCL has registered, by a number; they stay until it lets go of them
    cdef long long registrations  # how many there were
    cdef Ranges ranges  # what `register` has registered; guarded by its mutex
    cdef dict windows  # by the same number, (address, end) of the symmetric ones
    cdef object stream  # for memory that has no stream
    cdef size_t scratch  # device memory of the barrier, 0 until used
    # For a recorder: ranks count alike, so that their calls can be laid side by side.
    cdef str group_name  # the same on all ranks; None if that is not known
    cdef long long sequence  # calls made on it; guarded by its mutex
    # For the other ranks, where they can ask and be asked.
    cdef PeerStatusHook peer_status  # or None
    cdef bint told  # each call is noted for them
    cdef Operation latest  # the last call; guarded by the mutex, as is the next
    cdef double began  # when it was made
    cdef long long arrived  # the last call whose data were waited for, and came, -1 if there is none; by the GIL
    cdef double ended  # when they came; by the GIL
    cdef bint unissued  # NCCL has returned an error from the last call; guarded by the mutex
    cdef bint marked  # it has a mark, or the group that it is of; guarded by the mutex
    # The first operation that the device was not done with when the marks were last looked at, if it was begun (not 0).
    cdef Operation unfinished
    cdef double unfinished_since
    cdef str failed_as  # the name of the class of what has failed, or None
    cdef int failing  # an error is being raised, see below: what was begun was not finished
    cdef bint idle_at_end  # this rank was in no call when another one ended it
    cdef int descendants  # communicators that were made from it, to name the next one
    cdef object __weakref__

    # Move to another state; False, and no move, if it is over, or there already.
    cdef bint become(self, int to) except -1
    # Raise in a state in which no operation is taken. What is being made may take one when it is.
    cdef int check_state(self) except -1

    # Its locks, and a call of NCCL under them.
    cdef void lock(self) noexcept nogil
    cdef void unlock(self) noexcept nogil
    cdef bint lock_alive(self) noexcept nogil
    cdef ncclComm_t detach_handle(self) noexcept nogil
    # The guard, NULL if there is none or it was taken; and from then on it is gone, if `take` says so.
    cdef ncclComm_t guard_handle(self, bint take) noexcept nogil
    # Around a call of NCCL under the lock, for the watcher; `enter_call` marks the stream as well, `enter` does not.
    cdef void enter(self, double limit) noexcept nogil
    # for a thread that waits for this one, or, if that is 0, for itself.
    cdef Mark* enter_call(self, const Operation* operation, double limit, unsigned long thread=*) noexcept nogil
    cdef void leave_call(self, Mark* mark, bint issued) noexcept nogil
    # Note a call for the other ranks, under the lock; and that the data of one are there, with the GIL: another thread
    # may be stuck under the lock.
    cdef void note(self, const Operation* operation) noexcept nogil
    cdef int note_arrival(self, const Operation* operation) except -1

    # What NCCL says of it, asked once.
    cdef ncclResult_t poll_once(self) noexcept nogil
    cdef ncclResult_t poll_init(self) noexcept nogil
    cdef ncclResult_t peek(self) noexcept nogil
    cdef int ask_who(self) except -1
    # Who knows why it failed, and what NCCL says of the error that polling has found, or NULL.
    cdef ncclComm_t speaker(self) noexcept
    cdef const char* last_words(self) noexcept
    cdef ncclResult_t _ask_maker(self) noexcept nogil

    # While it is made.
    cdef void take_cell(self) noexcept nogil
    cdef int called(self) except -1  # the call that makes it has begun in another thread
    cdef int cancel_init(self) except -1  # the group in which it was to be made came to nothing
    # Whether NCCL has made it all the same, and it is in nobody's hands: then this takes it over, to be aborted.
    cdef bint is_stray(self) noexcept
    cdef bint is_in_parent(self) noexcept  # it is a child of which only its parent knows
    cdef bint adopt_late_handle(self, bint called) except -1
    cdef bint _take_cell_late(self, bint called) noexcept nogil

    # How it can be ended: whether an abort ends any call and any operation of it; everything that has to be aborted
    # for that, itself included.
    cdef bint can_be_ended(self) noexcept
    cdef list tied(self)
    cdef int check_endable(self, object what) except -1
    # Whether NCCL makes its calls in the background, which it does not mix with others in a group.
    cdef bint in_background(self) noexcept
    # A call of it has returned ncclInProgress.
    cdef int was_in_progress(self) except -1

    # Errors.
    cdef int check_call(self, ncclResult_t result, const char* function) except -1
    cdef int raise_if_aborted(self, ncclResult_t result, const char* function) except -1
    cdef object aborted_error(self, object what)
    cdef object timeout_error(self, object what, double waited)
    # Have an error that the others may have a part in say what they do, where they can be asked.
    cdef int explain(self, object error) except -1
    # Look what the device has ended so far: an abort ends the rest without doing it.
    cdef void look_at_marks(self) noexcept nogil
    # Note in each wait whether its stream has run dry, so that its data do not come from the abort that follows; return
    # whether all have. With the GIL.
    cdef bint look_at_waits(self) noexcept
    # The threads that have begun an operation which the device has not ended, and that are in no call of the communicator's.
    cdef set readers(self)
    cdef size_t _threads_marked(self, unsigned long* threads) noexcept nogil
    # The calling thread is about to raise that the communicator has ended: it need not be told as a reader.
    cdef int inform(self) except -1
    # What `stream_readers` knows it by, and the other ranks of this process.
    cdef object subject(self)

    # What hangs on it: its private stream, buffers that NCCL has registered; and objects that are kept until the
    # communicator and, where one is given, the stream can touch them no more.
    cdef CUstream own_stream(self) except NULL
    cdef long long keep(self, object buffer) except -1
    cdef int unkeep(self, long long number) except -1
    cdef int unkeep_all(self) except -1
    cdef int hold(self, list objects, CUstream stream, object what) except -1
    # The name of one that is made from this one, with a mark of those who belong to it.
    cdef str name_next(self, str mark)


# Note that communicators are to be aborted for what an error says, if it is one of NCCL's.
cdef int note_failure(list handles, object error) except -1

# Have the communicators' `PeerStatusHook` explain an error, and tell listeners of it if it is NcclTimeout.
cdef int tell_trouble(list handles, object error, bint wait=*) except -1

# Take a lock unless that takes until a moment; return whether it was taken.
cdef bint lock_within(mutex_t* mutex, double until) noexcept nogil

# The locks of several communicators, taken by all threads in one order. The array is for `free`; the caller keeps the
# handles in it alive.
cdef PyObject** in_lock_order(list handles) except NULL

# Count the waits that calls are made for, of (handle, ...), before they are made; and with -1 when they are over: who
# closes a communicator waits for them.
cdef int count_waits(list waits, int by) except -1

# How long a look at what the device has ended waits for a thread that is inside the communicator, in seconds.
cdef double LOOK_PATIENCE
cdef bint on_main_thread() noexcept nogil
