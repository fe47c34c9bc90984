from ncclpy.core.arguments.buffers cimport View
from ncclpy.core.arguments.operation cimport Operation
from ncclpy.core.arguments.validation cimport Fingerprint
from ncclpy.engine.launcher cimport CommunicatorSet, Launch
from ncclpy.engine.callbacks cimport Awaited
from ncclpy.engine.work cimport Work


cdef class Key:
    cdef object value
    cdef Py_hash_t hashed
    cdef bint plain
    cdef bint is_lookup  # a look-up with this key is in progress, and no dict holds the key yet
    cdef list keys_to_compare  # keys that the look-up met and only a user's ``__eq__`` can compare; usually None
    cdef list unequal_keys  # keys that were found to differ from this key, or None
    cdef Key equal_key  # the key that was found to equal this key, or None

    cdef int compare(self) except -1
    cdef int end_lookup(self) except -1


cdef Key new_key(object value)


cdef class Participant:
    cdef Work work
    cdef Fingerprint call
    cdef const void* send
    cdef void* recv
    cdef size_t count  # of the collective, as NCCL counts
    cdef int device
    cdef int global_rank
    cdef int root  # the rank that this participant names as the root's, -1 for none
    cdef bint is_root
    # The participant's arguments that concern the whole collective.
    cdef int num_local
    cdef int num_global
    cdef bytes communicator_key  # empty for none
    cdef double limit  # seconds; -1 means the Manager's timeout

    cdef int bring(self, const Operation* operation, const View* view) except -1


cdef class Gathering(Awaited):
    cdef Key key
    cdef Fingerprint call  # of the first participant
    cdef size_t count
    cdef int root
    cdef int num_local
    cdef int num_global
    cdef bytes communicator_key
    cdef bint signalled
    cdef bint warned  # whether a warning has named it
    cdef list participants
    cdef list failed_participants  # participants with failed works, for `let_go` to release; or None
    cdef bint listed  # whether it is in its Manager's dict; a gathering that is complete at once never is
    cdef object error
    cdef double since  # when it began, or when it began to wait for its communicators
    cdef double timeout  # seconds; the shortest timeout of a participant
    cdef int arrived

    # Compare a participant with the earlier ones; the first difference becomes `error`.
    cdef int check(self, Participant participant) except -1
    # Count a participant in, even one that does not agree.
    cdef int join(self, Participant participant) except -1
    # Whether all local participants have arrived and, with several nodes, the signal too (or there is an error).
    cdef bint is_ready(self) noexcept
    # Sort the participants by rank and find the root; compare their memory. A contradiction becomes `error`.
    cdef int settle_roots(self) except -1
    cdef int settle_memory(self) except -1
    cdef int _compare_memory(self, Operation* o) except -1
    cdef str _operation_name(self, size_t place)
    # Fail every participant. `let_go` must follow, where users' code may run: it releases the participants' buffers.
    cdef int end(self, object error) except -1
    cdef int let_go(self) except -1
    # A text with the key before it.
    cdef object say(self, str what)
    # The error of a key that lacks participants, or its signal, at its deadline.
    cdef object overdue(self)
    cdef str _waits_for(self, bint shows_key)


cdef Gathering new_gathering(Key key, Participant first, bint signalled)


# A task that logs keys that have been waiting for long: loggers and keys may run users' code.
cdef class Stalled:
    cdef list gatherings
    cdef double moment


cdef class DeviceSet(CommunicatorSet):
    cdef list waiting  # gatherings that are complete before the communicators are made
    cdef object run_rendezvous  # runs the rendezvous in the store, returns the `CommunicatorStatus`; None without a store
    cdef object peer_status  # the `CommunicatorStatus`, after the rendezvous and until these ranks leave; else None
    cdef object leave_message  # the arguments of `CommunicatorStatus.leave` when these ranks left; None before
    cdef dict oplogs  # by rank, an `OpLog` of what each rank here begins; None without a store
    cdef bint in_rendezvous  # whether the rendezvous is not over yet
    cdef bint making  # whether communicators with a rendezvous are not made yet; False without a rendezvous
    cdef dict manager_gatherings  # the dict of the Manager's gatherings, by key
    cdef object end_error  # the error by which another process has ended the communicators, or None
    cdef set informed  # the threads in which the failure of the communicators was raised
    cdef bint end_begun  # whether the end of the communicators, or a close, has begun
    # The thread that tells the other processes of the end and then aborts the communicators, or that only tells the
    # other processes; or None.
    cdef readonly object end_thread
    cdef object __weakref__

    # If there is a store and there are other processes, prepare the rendezvous that precedes the making of the
    # communicators.
    cdef int prepare_rendezvous(self, object store, dict gatherings, Gathering gathering) except -1
    # Add to an error what the ranks do, if they have a store.
    cdef int inquire(self, object error) except -1
    # Let the error share `informed`, so that each thread is given one error of these communicators.
    cdef int note_failure(self, object error) except -1
    cdef int _fence_and_note(self, set readers) except -1
    # Have a collective wait for the communicators, which are still being made.
    cdef int wait(self, Gathering gathering) except -1
    # Launch a collective; return the launch if `here` allows it and the caller must make the calls.
    cdef Launch launch(self, Gathering gathering, bint here)
    cdef int _fill(self, Launch launch, Gathering gathering) except -1


# The ranks of the participants, in the order of these.
cdef tuple ranks_of(Gathering gathering)
# Raise if a communicator key is used with other devices or ranks than when its communicators were made.
cdef int check_members(DeviceSet device_set, Gathering gathering, tuple devices) except -1
