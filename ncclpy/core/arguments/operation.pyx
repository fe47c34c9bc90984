"""One NCCL call as a value: it is issued at once, or recorded by a group and issued with others."""

from ncclpy.abi.driver cimport CUcontext
from ncclpy.abi.nccl cimport (
    ncclConfig_t,
    ncclDataType_t,
    ncclInProgress,
    ncclInvalidArgument,
    ncclRedOp_t,
    ncclSuccess,
    ncclUnhandledCudaError,
    ncclWaitSignalDesc_t,
    ncclWindow_t,
)
from ncclpy.core.runtime.library cimport driver, require_nccl_function, nccl, raise_nccl
from ncclpy.core.arguments.datatypes cimport ITEMSIZE


cdef ncclResult_t issue(const Operation* operation) noexcept nogil:
    """Make the call; return NOT_THERE if the table lacks the function."""
    cdef const Operation* o = operation
    cdef ncclDataType_t datatype = <ncclDataType_t>o.datatype
    cdef ncclRedOp_t op = <ncclRedOp_t>o.op
    if o.kind == ALL_REDUCE:
        if nccl.ncclAllReduce != NULL:
            return nccl.ncclAllReduce(o.send, o.recv, o.count, datatype, op, o.comm, o.stream)
    elif o.kind == BROADCAST:
        if nccl.ncclBroadcast != NULL:
            return nccl.ncclBroadcast(o.send, o.recv, o.count, datatype, o.root, o.comm, o.stream)
    elif o.kind == REDUCE:
        if nccl.ncclReduce != NULL:
            return nccl.ncclReduce(o.send, o.recv, o.count, datatype, op, o.root, o.comm, o.stream)
    elif o.kind == ALL_GATHER:
        if nccl.ncclAllGather != NULL:
            return nccl.ncclAllGather(o.send, o.recv, o.count, datatype, o.comm, o.stream)
    elif o.kind == REDUCE_SCATTER:
        if nccl.ncclReduceScatter != NULL:
            return nccl.ncclReduceScatter(o.send, o.recv, o.count, datatype, op, o.comm, o.stream)
    elif o.kind == ALL_TO_ALL:
        if nccl.ncclAlltoAll != NULL:
            return nccl.ncclAlltoAll(o.send, o.recv, o.count, datatype, o.comm, o.stream)
    elif o.kind == GATHER or o.kind == SCATTER:
        if nccl.ncclSend != NULL and nccl.ncclRecv != NULL and nccl.ncclGroupStart != NULL:
            return _rooted(o)
    elif o.kind == SEND:
        if nccl.ncclSend != NULL:
            return nccl.ncclSend(o.send, o.count, datatype, o.root, o.comm, o.stream)
    elif o.kind == RECV:
        if nccl.ncclRecv != NULL:
            return nccl.ncclRecv(o.recv, o.count, datatype, o.root, o.comm, o.stream)
    elif o.kind == SENDRECV:
        if nccl.ncclSend != NULL and nccl.ncclRecv != NULL and nccl.ncclGroupStart != NULL:
            return _issue_pair(o)
    elif o.kind == PUT_SIGNAL:
        if nccl.ncclPutSignal != NULL:  # NCCL refuses NULL, the value for a closed window
            return nccl.ncclPutSignal(
                o.send, o.count, datatype, o.root, (<ncclWindow_t*>o.recv)[0], o.offset, o.op, 0, 0, o.comm, o.stream
            )
    elif o.kind == SIGNAL:
        if nccl.ncclSignal != NULL:
            return nccl.ncclSignal(o.root, o.op, 0, 0, o.comm, o.stream)
    elif o.kind == WAIT_SIGNAL:
        if nccl.ncclWaitSignal != NULL:
            return nccl.ncclWaitSignal(<int>o.count, <ncclWaitSignalDesc_t*>o.recv, o.comm, o.stream)
    elif o.kind == WINDOW:
        if nccl.ncclCommWindowRegister != NULL:
            return nccl.ncclCommWindowRegister(o.comm, <void*>o.send, o.count, <ncclWindow_t*>o.recv, o.op)
    else:
        return _issue_init(o)
    return <ncclResult_t>NOT_THERE


cdef ncclResult_t _issue_pair(const Operation* o) noexcept nogil:
    """Make a send and a receive in an NCCL group; if NCCL refuses one, the group launches nothing, and fails too."""
    cdef const Operation* r = o.receive
    cdef ncclResult_t result, ended
    result = nccl.ncclGroupStart()
    if result != ncclSuccess:
        return result
    result = nccl.ncclSend(o.send, o.count, <ncclDataType_t>o.datatype, o.root, o.comm, o.stream)
    if _is_accepted(result):
        result = nccl.ncclRecv(r.recv, r.count, <ncclDataType_t>r.datatype, r.root, o.comm, o.stream)
    ended = nccl.ncclGroupEnd()
    return ended if _is_accepted(result) else result


cdef ncclResult_t _issue_rooted(const Operation* o) noexcept nogil:
    """Make the sends and receives of a gather or a scatter; if the count is 0, make none on any rank.

    If the root's parts are not adjacent, the root calls `validation.lower` instead. Both ways yield the same sends and
    receives, so the other ranks need not know which way the root takes. Only the root has both buffers; on the other
    ranks `part` is NULL. If the root works in place, it does not send to itself.
    """
    cdef ncclDataType_t datatype = <ncclDataType_t>o.datatype
    cdef bint is_gather = o.kind == GATHER
    cdef char* part = <char*>o.recv if is_gather else <char*>o.send
    cdef char* own = <char*>o.send if is_gather else <char*>o.recv
    cdef size_t size = o.count * <size_t>ITEMSIZE[o.datatype]
    cdef bint in_place
    cdef int peer, nranks = 0
    cdef ncclResult_t result, ended
    if o.count == 0:
        return ncclSuccess
    if part == NULL:
        if is_gather:
            return nccl.ncclSend(o.send, o.count, datatype, o.root, o.comm, o.stream)
        return nccl.ncclRecv(o.recv, o.count, datatype, o.root, o.comm, o.stream)
    result = nccl.ncclCommCount(o.comm, &nranks)
    if result == ncclSuccess:
        result = nccl.ncclGroupStart()
    if result != ncclSuccess:
        return result
    in_place = part + <size_t>o.root * size == own
    for peer in range(nranks):
        if not (in_place and peer == o.root) and _is_accepted(result):
            if is_gather:
                result = nccl.ncclRecv(part, o.count, datatype, peer, o.comm, o.stream)
            else:
                result = nccl.ncclSend(part, o.count, datatype, peer, o.comm, o.stream)
        part += size
    if not in_place and _is_accepted(result):
        if is_gather:
            result = nccl.ncclSend(own, o.count, datatype, o.root, o.comm, o.stream)
        else:
            result = nccl.ncclRecv(own, o.count, datatype, o.root, o.comm, o.stream)
    ended = nccl.ncclGroupEnd()
    return ended if _is_accepted(result) else result


# Called through a pointer: gcc would inline it into `issue`, where its registers cost all other kinds 11 instructions.
cdef ncclResult_t (*_rooted)(const Operation* o) noexcept nogil
_rooted = _issue_rooted


cdef inline bint _is_accepted(ncclResult_t result) noexcept nogil:
    return result == ncclSuccess or result == ncclInProgress


cdef ncclResult_t _issue_init(const Operation* o) noexcept nogil:
    """Make the call that makes a communicator, with the communicator's device current, as NCCL requires."""
    cdef InitArgs* args = o.init_args
    cdef CUcontext saved = NULL
    cdef ncclResult_t result = <ncclResult_t>NOT_THERE
    cdef ncclConfig_t* config = NULL if args.inherits else &args.config
    if nccl.ncclCommInitRankConfig == NULL:
        return result
    if driver.cuCtxGetCurrent(&saved) != 0 or driver.cuCtxSetCurrent(args.context) != 0:
        return ncclUnhandledCudaError
    if o.kind == INIT_RANK:
        result = nccl.ncclCommInitRankConfig(&args.new_comm, args.nranks, args.id, args.rank, config)
    elif o.kind == SPLIT and nccl.ncclCommSplit != NULL:
        result = nccl.ncclCommSplit(o.comm, args.color, args.key, &args.new_comm, config)
    elif o.kind == SHRINK and nccl.ncclCommShrink != NULL:
        result = nccl.ncclCommShrink(o.comm, args.exclude, args.nexclude, &args.new_comm, config, args.flags)
    elif o.kind == GROW and nccl.ncclCommGrow != NULL:
        result = nccl.ncclCommGrow(
            o.comm, args.nranks, &args.id if args.has_id else NULL, args.rank, &args.new_comm, config
        )
    driver.cuCtxSetCurrent(saved)
    return result


cdef const char* function_of(int kind) noexcept nogil:
    """Return the name of the C function for a kind of operation, see the declaration."""
    if kind == ALL_REDUCE:
        return b"ncclAllReduce"
    if kind == BROADCAST:
        return b"ncclBroadcast"
    if kind == REDUCE:
        return b"ncclReduce"
    if kind == ALL_GATHER:
        return b"ncclAllGather"
    if kind == REDUCE_SCATTER:
        return b"ncclReduceScatter"
    if kind == ALL_TO_ALL:
        return b"ncclAlltoAll"
    if kind == GATHER:
        return b"ncclGather"
    if kind == SCATTER:
        return b"ncclScatter"
    if kind == SEND:
        return b"ncclSend"
    if kind == RECV:
        return b"ncclRecv"
    if kind == SENDRECV:
        return b"ncclGroupEnd"
    if kind == PUT_SIGNAL:
        return b"ncclPutSignal"
    if kind == SIGNAL:
        return b"ncclSignal"
    if kind == WAIT_SIGNAL:
        return b"ncclWaitSignal"
    if kind == WINDOW:
        return b"ncclCommWindowRegister"
    if kind == INIT_RANK:
        return b"ncclCommInitRankConfig"
    if kind == SPLIT:
        return b"ncclCommSplit"
    if kind == SHRINK:
        return b"ncclCommShrink"
    return b"ncclCommGrow"


cdef int raise_issue(ncclResult_t result, int kind, ncclComm_t comm) except -1 with gil:
    """Raise the exception for the result of a failed `issue`."""
    cdef const char* function = function_of(kind)
    if <int>result == NOT_THERE:
        require_nccl_function(function)
        result = ncclInvalidArgument  # not reached: require_nccl_function raises
    return raise_nccl(result, function, comm)
