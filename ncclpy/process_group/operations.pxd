from ncclpy.abi.driver cimport CUstream
from ncclpy.core.arguments.buffers cimport View
from ncclpy.core.arguments.operation cimport Operation
from ncclpy.core.arguments.validation cimport Lowered, Spread
from ncclpy.engine.work cimport Work
from ncclpy.process_group.connection cimport Request


cdef class Operations:
    cdef readonly int rank
    cdef readonly int size
    cdef readonly int device

    # Begin an operation, or the group of them that stands for it if `lowered` is not None. Of `view` are the producer's
    # stream, the type and the size; `held` and `output` are the work's: what it keeps alive and what it results in. The
    # tag is -1 but for sends and receives.
    cdef Work begin(
        self, const Operation* operation, Lowered lowered, const View* view, held, output, producer, timeout, int tag
    )
    cdef Work _plain(self, const Operation* operation, const View* view, held, output, producer, timeout)
    cdef Work _spread(self, Spread spread, output, producer, timeout)
    cdef int _op_of(self, object op, const View* view) except -1


# Who has blocks open.
cdef class BlockOwner(Operations):
    cdef int open_block(self, Block block) except -1
    cdef int shut_block(self, Block block, bint launches) except -1


# What a thread begins in a coalescing block.
cdef class Block:
    cdef BlockOwner owner
    cdef Request request
    cdef Work work
    cdef list held
    cdef list outputs
    cdef list kinds  # of the operations, in their order
    cdef list ends  # how many steps the request had behind each
    cdef set producers  # streams, as numbers
    cdef bint begun

    cdef object _clash(self)
    cdef str _called(self, size_t place)
    cdef int add(self, const Operation* operation, Lowered lowered, const View* view, held, output, producer, int tag) except -1
    # Have the stream of the group wait for what produces the inputs.
    cdef int record(self, CUstream stream) except -1
    cdef bint record_captured(self) except -1


cdef Block new_block(BlockOwner owner, Request request)
