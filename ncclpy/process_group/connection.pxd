from ncclpy.abi.driver cimport CUstream
from ncclpy.core.arguments.buffers cimport View
from ncclpy.core.communicator cimport Communicator
from ncclpy.core.arguments.operation cimport Operation
from ncclpy.core.arguments.validation cimport Fingerprint, Lowered
from ncclpy.engine.launcher cimport CommunicatorSet, Launch
from ncclpy.engine.callbacks cimport Awaited, SetOwner
from ncclpy.engine.work cimport Work


cdef enum:
    BARRIER = -2  # marks a barrier, as the tag: collectives have no tags


# What the ranks compare of one call, or of one block of calls.
cdef class CallSignature:
    cdef bytes calls  # the collectives, packed; must be the same on all ranks
    cdef list messages  # (peer, kind, type, count, tag): must match the messages of that peer, in order

    cdef int add(
        self, const Operation* operation, Lowered lowered, const View* view, int rank, int nranks, int tag
    ) except -1
    # Return the calls and messages as a note for other ranks, see check/mismatch.py.
    cdef bytes packed(self)
    # Add a collective to `calls`: `name` is the name of its data type, `uneven` whether the counts of its parts may
    # differ, `parts` the `nparts` counts that all ranks know, packed.
    cdef int note(self, const Fingerprint* found, str name, int uneven, size_t nparts, bytes parts) except -1


cdef CallSignature new_call_signature()


# A call on a communicator of a group: one operation, or several with one launch and one work.
cdef class Request:
    cdef Work work
    cdef double limit  # seconds from its launch
    cdef long long epoch  # of the group when it was made, see `Lifecycle.number`
    cdef Operation first_step  # where `steps` points while there is one operation; no allocation is needed then
    cdef Operation* steps
    cdef size_t count
    cdef size_t capacity
    cdef bint point_to_point  # all of its operations are sends and receives
    cdef Fingerprint call  # the fingerprint of a single call, not of a block
    cdef CallSignature call_signature  # compared with the other ranks' signatures; None without `check`
    cdef list expected  # with `check`, its messages that wait for their match: ((channel, number), peer, message)
    cdef double since  # the moment from which its limit counts while it is held; 0 until its communicator is made
    cdef Request partner  # of a message from this rank to itself: the request of the other half, once it is known

    cdef int add(self, const Operation* operation) except -1
    cdef int fail(self, object error) except -1
    cdef bint is_one_message_with(self, int rank) noexcept  # whether it is one send or receive, with this rank
    cdef int add_all(self, Lowered lowered) except -1
    cdef unsigned long long signature(self) noexcept  # a hash of what NCCL's choice of an algorithm depends on


cdef Request new_request(Work work, double limit)


# The owner of connections. `connection_failed` is called when a launch on one has failed, in the thread that calls
# `LaunchOwner.launch_failed`.
cdef class ConnectionOwner(SetOwner):
    cdef int connection_failed(self, Connection connection, object error) except -1


cdef class Connection(CommunicatorSet):
    cdef readonly str label
    cdef str title
    # Two callables: for the rendezvous, which returns the unique id, and for forgetting it.
    cdef tuple rendezvous_calls
    cdef double limit  # seconds for the rendezvous and for making the communicator
    cdef long long epoch  # see `Lifecycle.number`
    cdef int peer  # of a pair: the peer's rank in the group; -1 for the communicator of all ranks
    cdef int rank  # of this process in the communicator
    cdef list members  # its ranks in the group
    cdef int attempts  # how often this rank has tried to disconnect it
    cdef object making  # the communicator, or the part that a split makes of it, while NCCL makes it; for an abort
    cdef object memory  # device memory for the first exchange of a pair
    cdef list waiting
    cdef str unmade  # its name in the recorder until it is made
    cdef dict messages  # the number of sends and receives that coalescing blocks have begun, by peer
    cdef list held  # requests held back until their messages are compared, and all requests behind them
    cdef Awaited awaited
    cdef readonly object settled  # an event, set once it is made or cannot be made
    cdef object failure  # the error with which it has ended
    cdef CUstream stream
    cdef set overdue  # with on_error="report": weak references to failed works that the device may still run

    # The number of `overdue` works that are not over.
    cdef Py_ssize_t count_overdue(self) except -1
    # Whether a work on it is not over.
    cdef bint has_unsettled(self) except -1
    # How many requests wait for it, launches run on it, and works on it are overdue.
    cdef Py_ssize_t pending(self) except -1
    # Whether it can be closed: it is made, no work on it is overdue, and it has no error that its peers would have to
    # be told.
    cdef bint is_well(self) except -1
    # Raise for an operation on a communicator that is gone.
    cdef int refuse(self) except -1

    cdef int _check_wanted(self) except -1
    cdef int set_up(self, Communicator comm) except -1
    cdef int count_messages(self, Request request) except -1
    cdef Launch launch_or_queue(self, Request request)
    cdef Launch launch(self, Request request, bint by_caller)
    cdef int _fill(self, Request request, object launch, double moment) except -1


# One of these streams, given as numbers, if all are being captured; NULL if none is. Raise ValueError if only some are.
cdef CUstream captured_of(set streams, int device) except? NULL

# Capture a request into the user's graph, on the streams of its steps. Return None, or the error with which the group
# has to fail: an error of NCCL, or NcclAborted if the communicator is unusable. Raise if nothing was called and the
# communicator is usable.
cdef object capture(Connection connection, Request request)
