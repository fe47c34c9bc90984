from ncclpy.abi.driver cimport CUcontext
from ncclpy.abi.nccl cimport ncclComm_t, ncclConfig_t, ncclResult_t, ncclUniqueId, cudaStream_t

cdef enum:
    ALL_REDUCE
    BROADCAST
    REDUCE
    ALL_GATHER
    REDUCE_SCATTER
    ALL_TO_ALL
    GATHER
    SCATTER
    SEND
    RECV
    PUT_SIGNAL  # to the peer `root`, `offset` bytes into the window that `recv` points to, with signal `op`
    SIGNAL  # to the peer `root`, signal `op`
    # A send and the operation at `receive`, made together in an NCCL group; a ncclpy group never records it. The
    # receive has this kind too, since status and flight recorder show only the receive.
    SENDRECV
    WAIT_SIGNAL  # `count` descriptors (ncclWaitSignalDesc_t) at `recv`
    WINDOW  # `count` bytes at `send`, flags in `op`; NCCL writes the window to `recv`
    INIT_RANK  # from here on the call makes a communicator
    SPLIT
    SHRINK
    GROW


# The arguments of a call that makes a communicator. They stay on the heap until NCCL has written `new_comm`.
cdef struct InitArgs:
    ncclConfig_t config
    bint inherits  # NCCL is given no configuration, so the child inherits the parent's
    ncclUniqueId id
    bint has_id
    int nranks
    int rank
    int color
    int key
    int* exclude
    int nexclude
    int flags
    CUcontext context  # of the communicator's device
    ncclComm_t new_comm  # receives the communicator or, if it gets one, its guard


# One NCCL call with its arguments: what a communicator submits, a group records and a plan keeps.
cdef struct Operation:
    int kind
    int datatype
    int op  # or the signal, or the flags of a WINDOW
    int root  # or the peer: of a SENDRECV the rank that it sends to, of its `receive` the rank that sends
    const void* send
    void* recv
    size_t count
    size_t offset  # PUT_SIGNAL only
    ncclComm_t comm
    cudaStream_t stream
    InitArgs* init_args
    Operation* receive  # SENDRECV only
    long long sequence  # its number among the calls of its communicator, once it is made


# Whether a kind of operation has a root or a peer (`has_root`, only for kinds before WINDOW), and whether it has an
# operator (`reduces`). If not, `root` or `op` has no meaning.
cdef inline bint has_root(int kind) noexcept nogil:
    return (
        kind != ALL_REDUCE and kind != ALL_GATHER and kind != REDUCE_SCATTER and kind != ALL_TO_ALL
        and kind != WAIT_SIGNAL
    )


cdef inline bint reduces(int kind) noexcept nogil:
    return kind == ALL_REDUCE or kind == REDUCE or kind == REDUCE_SCATTER


# Whether a kind of operation is a single send or receive.
cdef inline bint is_pair(int kind) noexcept nogil:
    return kind == SEND or kind == RECV


# A result that ncclResult_t does not have: the function table lacks the function, because NCCL is too old, the host
# engine leaves it out, or the process was forked.
cdef enum:
    NOT_THERE = -1

# Make the call; return NOT_THERE if the table lacks the function.
cdef ncclResult_t issue(const Operation* operation) noexcept nogil

# The name of the C function for a kind of operation. ncclGather and ncclScatter are named although the operations are
# made of ncclSend and ncclRecv; a SENDRECV has the name ncclGroupEnd.
cdef const char* function_of(int kind) noexcept nogil

# Raise the exception for the result of a failed `issue`.
cdef int raise_issue(ncclResult_t result, int kind, ncclComm_t comm) except -1 with gil
