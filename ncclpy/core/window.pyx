"""Windows: memory that all ranks of a communicator register together, so that NCCL can reach each other's part."""

import weakref

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
from ncclpy.core.buffers cimport HOST_MEMORY, NO_FRAMEWORK, Buffer
from ncclpy.core.check cimport check
from ncclpy.core.datatypes cimport ITEMSIZE, ElementType, name_of, of_anything
from ncclpy.core.group cimport current_group
from ncclpy.core.handle cimport WAS_ABORTED
from ncclpy.core.library cimport host_engine, host_hold_window, host_let_window_go, nccl, require
from ncclpy.core.lifecycle cimport Lifecycle
from ncclpy.core.operation cimport WINDOW, Operation
from ncclpy.core.watch cimport check_alive, finish
from ncclpy.core.shape cimport read_on_device
from ncclpy.core.state cimport READY
from ncclpy.core.submit cimport check_makes, make_alone
from ncclpy.core.ending cimport LET_WINDOW_GO, Upkeep
from ncclpy.core.wait cimport deadline_after

from ncclpy.core.errors import NcclError, NcclUnsupported, not_copied
from ncclpy.core.types import as_integer

# On the host engine, by communicator and address: the memory of this process's windows, as long as somebody keeps it. A
# rank that looks at another one's part does.
_parts = weakref.WeakValueDictionary()


cdef class _Kept:
    def __init__(self, buffer):
        self.buffer = buffer


cdef class Window:
    """Window(comm, buffer, *, symmetric=True, strict_ordering=False)
--

Keep a buffer registered as this rank's part of a window (`ncclCommWindowRegister`) until `close`.

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
        self.memory = _Kept(buffer)
        self.view = view
        self.symmetric = symmetric
        self.comm = comm
        self.group = group
        memset(&operation, 0, sizeof(operation))
        operation.kind = WINDOW
        operation.send = view.pointer
        operation.count = view.nbytes
        operation.op = flags
        operation.recv = self.cell
        self.kept = comm.keep(self.memory)  # a window that is dropped is still one
        if symmetric:
            comm.windows[self.kept] = (<uintptr_t>view.pointer, <uintptr_t>view.pointer + view.nbytes)
        try:
            make_alone(comm, &operation, buffer, self)  # a group keeps this object, and with it the cell
        except NcclError:
            if comm.state == READY:  # NCCL has refused it; after an abort nobody knows
                comm.unkeep(self.kept)
            raise
        comm.resources.add(self)
        if host_engine:
            _parts[comm.group_name, <uintptr_t>view.pointer] = self.memory

    def __dealloc__(self):
        # Whoever stopped waiting, by an interrupt or an abort, does not know when NCCL writes: then the memory stays.
        if self.cell != NULL and (self.cell[0] != NULL or not self.background):
            free(self.cell)

    cdef bint recorded(self, bint uses) noexcept:
        """Return whether the group that makes the window is still to end; or the open group has calls that use it."""
        cdef Group group = self.group if not uses else current_group()
        return group is not None and group.writes_to(self)

    cdef int check_usable(self, Handle comm) except -1:
        if self.comm is None:
            raise ValueError("window: it is closed")
        if self.comm is not comm:
            raise ValueError(f"window: it was made by another communicator, {self.comm!r}")
        if self.cell[0] == NULL:
            if self.recorded(False):
                raise ValueError("window: it is made when its group ends; use it after that")
            raise NcclUnsupported("window: NCCL supports no windows between these devices (its handle is 0)")
        return 0

    @property
    def buffer(self):
        """The buffer that is this rank's part; None when the window is closed."""
        cdef _Kept memory = self.memory
        return None if memory is None else memory.buffer

    def peer(self, rank, dtype=None):
        """Return another rank's part of the window as a buffer (`ncclGetPeerDevicePointer`, NCCL 2.29.2).

        Kernels of any kind read and write it, over NVLink; on the host engine it is CPU memory, for `numpy.asarray`.
        Nothing waits for anybody: who may touch what, and when, is for the program to settle, by signals for one.

        Parameters
        ----------
        rank : int
            Whose part; this rank's own as well.
        dtype : DataType, str or numpy.dtype, optional
            As what it is read; by default that of this rank's buffer.

        Returns
        -------
        Buffer
            As many bytes as this rank's part. On GPUs it is valid until the window is closed here or there. On the
            host engine it may be read after that too.

        Raises
        ------
        ValueError
            If there is no such rank, the window is closed or not made yet, or `dtype` does not divide its size.
        NcclUnsupported
            If this device does not reach that rank's memory, as it lies on another machine, or NCCL is older.
        """
        cdef Lifecycle comm
        cdef _Part part = _Part.__new__(_Part)
        cdef Buffer made
        cdef View view
        cdef void* pointer = NULL
        cdef ncclResult_t result = <ncclResult_t>WAS_ABORTED
        cdef ElementType asked
        cdef int number = as_integer(rank, "rank")
        require(<void*>nccl.ncclGetPeerDevicePointer, b"ncclGetPeerDevicePointer")
        view = self.view
        if dtype is not None:
            of_anything(dtype, &asked, "dtype")
            view.datatype, view.flavour, view.unit = asked.datatype, asked.flavour, asked.unit
            if view.nbytes % (view.unit * ITEMSIZE[view.datatype]):
                raise ValueError(
                    f"dtype: the {view.nbytes} bytes of the window are no whole number of "
                    f"{name_of(view.datatype, view.flavour)}"
                )
            view.count = view.nbytes // ITEMSIZE[view.datatype]
        comm = self.comm  # what was called until here may have closed it
        if comm is None:
            raise ValueError("this window is closed")
        check_alive(comm)
        if not 0 <= number < comm.nranks:
            raise ValueError(f"rank: rank {number} does not exist, there are {comm.nranks} (0 to {comm.nranks - 1})")
        self.check_usable(comm)
        with nogil:
            if comm.lock_alive():
                if self.cell[0] != NULL:
                    if host_hold_window != NULL:
                        part.held = host_hold_window(self.cell[0], number)
                    # Of the last byte: the engine says whether the rank has registered as much.
                    result = nccl.ncclGetPeerDevicePointer(self.cell[0], view.nbytes - 1, number, &pointer)
                comm.unlock()
        if <int>result == WAS_ABORTED and comm.state == READY:
            raise ValueError("this window is closed")
        comm.check_call(result, b"ncclGetPeerDevicePointer")
        if pointer == NULL:
            raise NcclUnsupported(
                f"{self!r}: device {comm.device} does not reach the memory of rank {number}; put_signal does"
            )
        pointer = <char*>pointer - (view.nbytes - 1)
        view.pointer = pointer
        if host_engine:
            part.memory = _parts.get((comm.group_name, <uintptr_t>pointer))
        view.readonly = False
        view.framework = NO_FRAMEWORK
        if view.device != HOST_MEMORY:
            view.device = comm.device
        made = Buffer.__new__(Buffer)
        made.view = view
        made.keep_name()
        made.owner = part
        return made

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
        cdef Upkeep call
        if comm is None:
            return
        if self.recorded(False):
            raise ValueError("this window is made when its group ends; close it after that")
        if self.recorded(True):
            raise ValueError("calls that the open group has recorded use this window; close it when the group has ended")
        require(<void*>nccl.ncclCommWindowDeregister, b"ncclCommWindowDeregister")
        self.comm = self.memory = self.group = None
        if self.cell[0] != NULL:
            self.background = False  # it has been written
            call = Upkeep()
            call.comm, call.kind, call.window, call.keeps = comm, LET_WINDOW_GO, self.cell, self
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
        if kind is None or not (self.recorded(False) or self.recorded(True)):  # the group's own end is for the exception to reach
            self.close()

    def __reduce__(self):
        raise not_copied(self, "make one with Communicator.window() in each process")

    def __repr__(self):
        if self.comm is None:
            return "<ncclpy.Window (closed)>"
        return f"<ncclpy.Window {self.handle:#x} of {self.comm!r}>"


cdef class _Part:
    """Keep a rank's part of a window where it is, as far as that goes, for those who look at it."""

    cdef void* held  # by the host engine
    cdef _Kept memory  # of a rank of this process

    def __dealloc__(self):
        if self.held != NULL:
            host_let_window_go(self.held)


cdef bint lies_in_window(Handle comm, Window first, const View* view) except -1:
    cdef uintptr_t begin, end, at = <uintptr_t>view.pointer
    if first.symmetric:
        begin = <uintptr_t>first.view.pointer
        if begin <= at and at - begin <= first.view.nbytes and view.nbytes <= first.view.nbytes - (at - begin):
            return True
    for begin, end in list(comm.windows.values()):
        if begin <= at and at <= end and view.nbytes <= end - at:
            return True
    return False
