"""Windows: memory that all ranks of a communicator register together, so that NCCL can reach each other's part."""

from libc.stdint cimport uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from ncclpy.abi.nccl cimport (
    NCCL_WIN_COLL_SYMMETRIC,
    NCCL_WIN_STRICT_ORDERING,
    ncclInProgress,
    ncclResult_t,
    ncclSuccess,
    ncclWindow_t,
)
from ncclpy.core.buffers cimport View
from ncclpy.core.check cimport check
from ncclpy.core.group cimport current_group
from ncclpy.core.handle cimport WAS_ABORTED
from ncclpy.core.library cimport nccl, require
from ncclpy.core.lifecycle cimport Lifecycle
from ncclpy.core.operation cimport WINDOW, Operation
from ncclpy.core.progress cimport check_alive, finish
from ncclpy.core.shape cimport read_on_device
from ncclpy.core.state cimport READY
from ncclpy.core.submit cimport check_makes, make_alone
from ncclpy.core.upkeep cimport LET_WINDOW_GO, Upkeep
from ncclpy.core.wait cimport deadline_after

from ncclpy.core.errors import NcclError

from ncclpy.core.errors import not_copied


cdef class Window:
    """Keep a buffer registered as this rank's part of a window (`ncclCommWindowRegister`) until `close`.

    `Communicator.window` makes it. It holds the buffer; close it before the memory is freed.
    """

    def __init__(self, Lifecycle comm not None, buffer, *, bint symmetric=True, bint strict_ordering=False):
        cdef View view
        cdef Operation operation
        cdef int flags = (
            (NCCL_WIN_COLL_SYMMETRIC if symmetric else 0) | (NCCL_WIN_STRICT_ORDERING if strict_ordering else 0)
        )
        if self.cell != NULL:
            raise RuntimeError("a Window is initialised once")
        check_alive(comm)
        read_on_device(buffer, &view, "buf", comm.device)
        if view.nbytes == 0:
            raise ValueError("buf: a window needs memory, and this buffer has no elements")
        require(<void*>nccl.ncclCommWindowRegister, b"ncclCommWindowRegister")
        group = current_group()
        if group is not None:
            check_makes(group, "window")
        self.cell = <ncclWindow_t*>calloc(1, sizeof(ncclWindow_t))
        if self.cell == NULL:
            raise MemoryError
        self.background = comm.nonblocking or not comm.owned
        self.buffer = buffer
        self.comm = comm
        self.group = group
        memset(&operation, 0, sizeof(operation))
        operation.kind = WINDOW
        operation.send = view.pointer
        operation.count = view.nbytes
        operation.op = flags
        operation.recv = self.cell
        self.kept = comm.keep(buffer)  # a window that is dropped is still one
        try:
            make_alone(comm, &operation, buffer, self)  # a group keeps this object, and with it the cell
        except NcclError:
            if comm.state == READY:  # NCCL has refused it; after an abort nobody knows
                comm.unkeep(self.kept)
            raise
        comm.resources.add(self)

    def __dealloc__(self):
        # Whoever stopped waiting, by an interrupt or an abort, does not know when NCCL writes: then the memory stays.
        if self.cell != NULL and (self.cell[0] != NULL or not self.background):
            free(self.cell)

    cdef bint recorded(self) noexcept:
        """Return whether the group that makes the window is still to end."""
        cdef Group group = self.group
        return group is not None and group.writes_to(self)

    @property
    def handle(self):
        """The `ncclWindow_t` as an int; 0 until the group has ended, and where NCCL supports no windows."""
        return <uintptr_t>self.cell[0] if self.comm is not None else 0

    @property
    def closed(self):
        """Whether the buffer is no longer registered."""
        return self.comm is None

    def close(self):
        """Deregister this rank's part (`ncclCommWindowDeregister`); twice does nothing.

        All ranks must be done with what uses the window.

        Raises
        ------
        ValueError
            If the group that makes the window has not ended yet.
        """
        cdef Lifecycle comm = self.comm
        cdef ncclResult_t result = ncclSuccess
        cdef ncclWindow_t window
        cdef Upkeep call
        if comm is None:
            return
        if self.recorded():
            raise ValueError("this window is made when its group ends; close it after that")
        window = self.cell[0]
        self.comm = self.buffer = self.group = None
        require(<void*>nccl.ncclCommWindowDeregister, b"ncclCommWindowDeregister")
        if window != NULL:
            call = Upkeep()
            call.comm, call.kind, call.window = comm, LET_WINDOW_GO, window
            call.see_through("ncclCommWindowDeregister", comm.limit)
            result = call.result
        if result == ncclInProgress:
            finish(comm, "ncclCommWindowDeregister", deadline_after(comm.limit))
        elif <int>result != WAS_ABORTED:
            check(result, b"ncclCommWindowDeregister", comm.raw)
        comm.unkeep(self.kept)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if kind is None or not self.recorded():  # the group's own end is for the exception to reach
            self.close()

    def __reduce__(self):
        raise not_copied(self, "make one with Communicator.window() in each process")

    def __repr__(self):
        if self.comm is None:
            return "<ncclpy.Window (closed)>"
        return f"<ncclpy.Window {self.handle:#x} of {self.comm!r}>"
