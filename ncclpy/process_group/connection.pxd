from ncclpy.abi.driver cimport CUstream
from ncclpy.core.arguments.buffers cimport View
from ncclpy.core.communicator cimport Communicator
from ncclpy.core.arguments.operation cimport Operation
from ncclpy.core.arguments.validation cimport Fingerprint, Lowered
from ncclpy.engine.launcher cimport CommunicatorSet, Launch
from ncclpy.engine.callbacks cimport Awaited, SetOwner
from ncclpy.engine.work cimport Work


cdef enum:
    BARRIER = -2  # in the place of a tag, which a collective has none of


# What other ranks compare one call, or one block of calls, with.
cdef class Signature:
    cdef bytes calls  # all ranks bring the same
    cdef list messages  # (peer, kind, type, count, tag): each meets one of that peer's, in their order

    cdef int add(
        self, const Operation* operation, Lowered lowered, const View* view, int rank, int nranks, int tag
    ) except -1
    # All of it as bytes, for other ranks.
    cdef bytes packed(self)
    cdef int note(self, const Fingerprint* found, str name, int uneven, size_t nparts, bytes parts) except -1


cdef Signature new_signature()


# What one call of a group asks of its communicator: one operation, or several that are one launch and one work.
cdef class Request:
    cdef Work work
    cdef double limit  # seconds from its launch
    cdef long long epoch  # in which it was made, see `Lifecycle.number`
    cdef Operation one
    cdef Operation* steps
    cdef size_t count
    cdef size_t capacity
    cdef bint point_to_point  # all of it is
    cdef Fingerprint call  # of what is no block
    cdef Signature brought  # what other ranks compare it with; None if nothing is compared
    cdef list expected  # (channel, number, peer, message) of each message that it is held back for
    cdef double since  # when it began to be waited for
    cdef Request partner  # a receive from this rank, of its send to itself

    cdef int add(self, const Operation* operation) except -1
    cdef int fail(self, object error) except -1
    cdef bint is_alone_with(self, int rank) noexcept  # one operation, with this rank of its communicator
    cdef int add_all(self, Lowered lowered) except -1
    cdef unsigned long long signature(self) noexcept


cdef Request new_request(Work work, double limit)


# Whose connection has failed with what was launched on it. Called where `LaunchOwner.launch_failed` is.
cdef class ConnectionOwner(SetOwner):
    cdef int connection_failed(self, Connection connection, object error) except -1


cdef class Connection(CommunicatorSet):
    cdef readonly str label
    cdef str title
    cdef tuple meet  # what returns the unique id, once all ranks are there, and what forgets that
    cdef double limit  # seconds in which that and the communicator have to be done
    cdef long long epoch  # see `Lifecycle.number`
    cdef int peer  # in the group, of a pair; -1 if it is with all ranks
    cdef int rank  # of this one in it
    cdef list members  # its ranks in the group
    cdef int attempts  # to give it back
    cdef object making  # the communicator until it is taken over
    cdef object memory  # device memory that a pair has exchanged a byte in
    cdef list waiting
    cdef str unmade  # what the recorder calls it until it is made
    cdef list held  # what is not to be launched before messages were compared, and all behind it
    cdef Awaited awaited
    cdef readonly object settled  # an event: it is made, or cannot be made
    cdef object failure  # what has become of it
    cdef CUstream stream
    cdef set overdue  # weak references to works that have failed and that the device may not be done with, of an owner that goes on

    # How many of those there are.
    cdef Py_ssize_t late(self) except -1
    # Whether a work on it has yet to come to its end.
    cdef bint waits_here(self) except -1
    # How many operations wait for it or are under way on it.
    cdef Py_ssize_t pending(self) except -1
    # Whether it can be closed: nothing went wrong on it that its peers would have to know of.
    cdef bint is_well(self) except -1
    # Raise for an operation on a communicator that is gone.
    cdef int refuse(self) except -1

    cdef int _check_wanted(self) except -1
    cdef int call(self, Communicator comm) except -1
    cdef Launch take(self, Request request)
    cdef Launch launch(self, Request request, bint here)
    cdef int _fill(self, Request request, object launch, double moment) except -1


# The one of these streams, as numbers, that stands for all if they are being captured; NULL if none of them is.
cdef CUstream captured_of(set streams, int device) except? NULL

# Put a request into the user's graph, on the streams that its steps have. Raises where nothing was called;
# returns what went wrong in NCCL, or None.
cdef object capture(Connection connection, Request request)
