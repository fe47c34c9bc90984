from ncclpy.abi.driver cimport CUstream
from ncclpy.core.arguments.buffers cimport View
from ncclpy.core.arguments.operation cimport Operation
from ncclpy.core.arguments.validation cimport Lowered
from ncclpy.engine.work cimport Work
from ncclpy.process_group.connection cimport Request


cdef class Block


# The owner of coalescing blocks: told when a thread enters or leaves a block; `launches` is whether the owner then
# launches the block's operations.
cdef class BlockOwner:
    cdef int open_block(self, Block block) except -1
    cdef int shut_block(self, Block block, bint launches) except -1


# The operations that a thread begins in a coalescing block.
cdef class Block:
    cdef BlockOwner owner
    cdef int rank  # of the owner's group
    cdef int size
    cdef Request request
    cdef Work work
    cdef list held
    cdef object outputs  # a list; for `sendrecv` the receiving array
    cdef list kinds  # of the operations, in their order
    cdef list ends  # for each operation, how many steps the request had once it was added
    cdef set producers  # streams, as numbers
    cdef bint begun

    cdef object _clash(self)
    cdef str _operation_name(self, size_t place)
    cdef int add(self, const Operation* operation, Lowered lowered, const View* view, held, output, producer, int tag) except -1
    # Have the stream of the group wait for what produces the inputs.
    cdef int record(self, CUstream stream) except -1
    cdef bint record_captured(self) except -1


cdef Block new_block(BlockOwner owner, Request request, int rank, int size)
