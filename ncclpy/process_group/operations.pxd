from ncclpy.abi.driver cimport CUstream
from ncclpy.core.arguments.buffers cimport View
from ncclpy.core.arguments.operation cimport Operation
from ncclpy.core.arguments.validation cimport Lowered, VectorCollective
from ncclpy.engine.work cimport Work
from ncclpy.process_group.blocks cimport Block, BlockOwner
from ncclpy.process_group.connection cimport Connection, Request
from ncclpy.process_group.lifecycle cimport Lifecycle


# Begins operations of a group. It ends the group only through `Lifecycle`.
cdef class Submission(BlockOwner):
    cdef Lifecycle group
    cdef dict deadlines  # seconds, by thread, of deadline blocks
    cdef dict blocks  # coalescing blocks, by thread

    # Begin an operation, or the operations that replace it if `lowered` is not None. `view` has the device, the type
    # and the size. `producer` is the stream that produces the input; if it is None, that is the current stream of the
    # view's framework. The work keeps `held` alive, and its result is `output`. The tag is -1 except for sends,
    # receives and barriers.
    cdef Work begin(
        self, const Operation* operation, Lowered lowered, const View* view, held, output, producer, timeout, int tag
    )
    # An empty request with its work.
    cdef Request request(self, int kind, object timeout)
    # Number a request and give it to its communicator; raise if the group has ended or was reconfigured.
    cdef int submit(self, Connection connection, Request request) except -1
    # Put a request into the CUDA graph that its producers' streams are being captured into.
    cdef int capture(self, int peer, Request request) except -1
    # Whether the stream that produces an array is being captured.
    cdef bint captures(self, array, producer) except -1
    # Whether this thread is in a coalescing block.
    cdef bint in_block(self) except -1
    cdef Block block_here(self)
    # A request of this rank to itself with its other half as `partner`; None until that is begun. Called with the
    # group's lock held.
    cdef Request matched(self, Request request)

    cdef int _refuse_nans(self, const Operation* operation, object held, object output, object producer) except -1
    cdef int _number(self, Connection connection, Work work, bint pair) except -1


cdef Submission new_submission(Lifecycle group)


# The methods of `ProcessGroup` that begin operations: a base class, as a Cython class cannot span files.
cdef class Operations:
    cdef Lifecycle lifecycle
    cdef Submission submission
    cdef object __weakref__

    cdef Work _plain(self, const Operation* operation, const View* view, held, output, producer, timeout)
    cdef Work _vector(self, VectorCollective vector, output, producer, timeout)
    cdef int _op_of(self, object op, const View* view) except -1
    cdef Block _block(self, int kind, timeout)
    cdef Work _no_operation(self, int kind, output, stream, timeout)
    cdef int _exchange(
        self, const Operation* send_operation, const View* s, send, dest, const Operation* recv_operation, const View* r,
        recv, source, stream, timeout,
    ) except -1
