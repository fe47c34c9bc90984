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
    cdef bint sought  # it is being looked for; keys that only its class or theirs can tell from it go to `doubts`
    cdef list doubts  # None while there are none, as most keys never have any
    cdef list others  # keys that it was compared with and does not equal, or None
    cdef Key same  # the key that it was compared with and equals

    cdef int compare(self) except -1
    cdef int found(self) except -1


cdef Key new_key(object value)


cdef class Participant:
    cdef Work work
    cdef Fingerprint call
    cdef const void* send
    cdef void* recv
    cdef size_t count  # of the collective, as NCCL counts it
    cdef int device
    cdef int global_rank
    cdef int root  # what it says: -1 for nothing
    cdef bint is_root
    # What it says of all: how many there are, where they meet, how long it waits for them.
    cdef int num_local
    cdef int num_global
    cdef bytes communicator_key  # empty for none
    cdef double limit  # in seconds; -1 is what the Manager has

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
    cdef bint warned
    cdef list participants
    cdef list ended  # participants whose works have failed, to be let go of; or None
    cdef bint listed  # in its Manager's dict: whoever completes it need not be
    cdef object error
    cdef double since
    cdef double timeout  # seconds; the shortest that a participant has asked for
    cdef int arrived

    cdef int check(self, Participant participant) except -1
    cdef int join(self, Participant participant) except -1
    cdef bint is_ready(self) noexcept
    cdef int settle_roots(self) except -1
    cdef int settle_memory(self) except -1
    cdef int _compare_memory(self, Operation* o) except -1
    cdef str _called(self, size_t place)
    cdef int end(self, object error) except -1
    cdef int let_go(self) except -1
    cdef object say(self, str what)
    cdef object overdue(self)
    cdef str _waits_for(self, bint shows_key)


cdef Gathering new_gathering(Key key, Participant first, bint signalled)


# Logs keys that have been waiting for long: loggers and keys are the users'.
cdef class Stalled:
    cdef list gatherings
    cdef double moment


cdef class Ensemble(CommunicatorSet):
    cdef list waiting  # gatherings that are ready before the communicators are
    cdef object meets  # waits for the processes that these are of and returns their `CommunicatorStatus`; None without a store
    cdef object peer_status  # that, once they have met and until these leave; else None
    cdef object left  # what these told when they left, None before
    cdef dict ledgers  # of what each rank here begins, by rank; None without a store
    cdef bint meeting  # they have yet to meet there
    cdef bint making  # they have yet to be made, of ranks that are on several processes
    cdef dict gathered  # the Manager's gatherings
    cdef bint over  # their end has begun, and is told to the other processes
    cdef readonly object ending  # the thread that aborts the communicators once all have heard, if it does
    cdef object __weakref__

    cdef int meet_in(self, object store, dict gatherings, Gathering gathering) except -1
    cdef int inquire(self, object error) except -1
    cdef int wait(self, Gathering gathering) except -1
    cdef Launch launch(self, Gathering gathering, bint here)
    cdef int _fill(self, Launch launch, Gathering gathering) except -1


cdef tuple ranks_of(Gathering gathering)
cdef int check_members(Ensemble ensemble, Gathering gathering, tuple devices) except -1
