"""Puts into windows, signals and waits for them: from what the caller says to a checked operation."""

from libc.stdint cimport uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from ncclpy.abi.nccl cimport ncclUint8, ncclWaitSignalDesc_t
from ncclpy.core.library cimport nccl, require
from ncclpy.core.operation cimport PUT_SIGNAL, SIGNAL, WAIT_SIGNAL
from ncclpy.core.overlap cimport lie_apart
from ncclpy.core.shape cimport read_on_device
from ncclpy.core.start cimport root_rank
from ncclpy.core.window cimport Window, lies_in_window

from ncclpy.core.errors import not_copied
from ncclpy.core.types import as_integer

# The most bytes that anything has.
cdef object _MOST = 2**63 - 1


cdef int shape_put(
    Handle comm, Operation* o, View* s, object send, object window, object peer, object offset, object signal
) except -1:
    """Fill in a put; of an empty buffer only the signal is left."""
    cdef size_t at
    cdef char* target
    require(<void*>nccl.ncclPutSignal, b"ncclPutSignal")
    # What is the caller's own code comes first: it could close the window.
    o.root = root_rank(comm.nranks, peer, "peer")
    o.op = as_integer(signal, "signal", 0)
    at = as_integer(offset, "offset", 0, _MOST)
    read_on_device(send, s, "send", comm.device)
    if type(window) is not Window:
        raise TypeError(f"window: expected a Window of this communicator, got {window!r}")
    (<Window>window).check_usable(comm)
    if at > (<Window>window).view.nbytes or s.nbytes > (<Window>window).view.nbytes - at:
        raise ValueError(
            f"send: {s.nbytes} bytes at offset {at} reach beyond the {(<Window>window).view.nbytes} bytes of the window"
        )
    if s.nbytes and not lies_in_window(comm, <Window>window, s):
        raise ValueError(
            "send: the buffer does not lie in a symmetric window of this communicator, which is where NCCL can put from: "
            "register it with comm.window(), or copy it into one"
        )
    target = <char*>(<Window>window).view.pointer + at
    if o.root == comm.rank and not lie_apart(s.pointer, s.nbytes, target, s.nbytes):
        raise ValueError(
            f"send: it overlaps what this put writes in window, whose peer {o.root} is this rank: send is {s.nbytes} bytes "
            f"at {<uintptr_t>s.pointer:#x}, and offset {at} is at {<uintptr_t>target:#x}"
        )
    o.kind = PUT_SIGNAL if s.nbytes else SIGNAL
    o.datatype = s.datatype
    o.send = s.pointer
    o.recv = (<Window>window).cell
    o.count = s.count
    o.offset = at
    return 0


cdef int shape_signal(Handle comm, Operation* o, object peer, object signal) except -1:
    """Fill in a signal alone."""
    require(<void*>nccl.ncclSignal, b"ncclSignal")
    o.root = root_rank(comm.nranks, peer, "peer")
    o.op = as_integer(signal, "signal", 0)
    o.kind = SIGNAL
    o.datatype = <int>ncclUint8
    o.send = o.recv = NULL
    o.count = 0
    return 0


cdef Signals shape_wait(Handle comm, Operation* o, object peers, object signal, object count):
    """Fill in a wait; who keeps the operation keeps the descriptors that are returned."""
    cdef Signals wanted
    require(<void*>nccl.ncclWaitSignal, b"ncclWaitSignal")
    wanted = Signals.__new__(Signals)
    wanted.fill(comm, peers, as_integer(signal, "signal", 0), as_integer(count, "count", 1))
    o.kind = WAIT_SIGNAL
    o.datatype = <int>ncclUint8
    o.op = 0
    o.send = NULL
    o.recv = wanted.rows
    o.count = wanted.count
    return wanted


cdef class Signals:
    """Own the descriptors of a wait, as long as the operation can be made."""

    def __dealloc__(self):
        free(self.rows)

    def __reduce__(self):
        raise not_copied(self, "call wait_signal where it is waited")

    cdef int fill(self, Handle comm, object peers, int signal, int count) except -1:
        cdef size_t i
        cdef Py_ssize_t n
        cdef list ranks = [root_rank(comm.nranks, each, "peers") for each in _listed(peers)]
        if not ranks:
            raise ValueError("peers: there is no rank to wait for")
        for n in range(1, len(ranks)):
            if ranks[n] in ranks[:n]:
                raise ValueError(f"peers: rank {ranks[n]} stands there twice; count= says for how many signals to wait")
        self.rows = <ncclWaitSignalDesc_t*>malloc(len(ranks) * sizeof(ncclWaitSignalDesc_t))
        if self.rows == NULL:
            raise MemoryError
        memset(self.rows, 0, len(ranks) * sizeof(ncclWaitSignalDesc_t))
        self.count = len(ranks)
        for i in range(self.count):
            self.rows[i].opCnt, self.rows[i].peer, self.rows[i].sigIdx = count, ranks[i], signal
        return 0


cdef list _listed(object peers):
    """Return one rank, or several, as a list."""
    if hasattr(type(peers), "__index__") and not getattr(peers, "ndim", 0):
        return [peers]
    try:
        return list(peers)
    except TypeError:
        raise TypeError(f"peers: expected a rank or a sequence of ranks, got {peers!r}") from None
