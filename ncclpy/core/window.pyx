"""Objects of one communicator: reduction operators, registered buffers, and windows."""

import weakref

import numpy as np

from libc.stdint cimport uintptr_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

from ncclpy.abi.nccl cimport (
    NCCL_WIN_COLL_SYMMETRIC, NCCL_WIN_STRICT_ORDERING, ncclDataType_t, ncclInProgress, ncclRedOp_t, ncclResult_t,
    ncclScalarDevice, ncclScalarHostImmediate, ncclScalarResidence_t, ncclSuccess, ncclWindow_t,
)
from ncclpy.core.arguments.buffers cimport HOST_MEMORY, NO_FRAMEWORK, Buffer, View, read_view
from ncclpy.core.arguments.datatypes cimport BYTES, ITEMSIZE, ElementType, encoded, name_of, of_anything
from ncclpy.core.ending cimport DEREGISTER_WINDOW, CommCall
from ncclpy.core.calls.group cimport current_group
from ncclpy.core.handles.handle cimport WAS_ABORTED, Handle, run_hook_if_wanted, lock_within
from ncclpy.core.runtime.library cimport check, host_engine, host_hold_window, host_release_window, nccl, require
from ncclpy.core.lifecycle cimport Lifecycle
from ncclpy.core.arguments.operation cimport WINDOW, Operation
from ncclpy.core.handles.state cimport ABORTED, READY
from ncclpy.core.calls.submit cimport check_may_make, make_alone
from ncclpy.core.arguments.validation cimport read_on_device
from ncclpy.core.runtime.wait cimport deadline_after
from ncclpy.core.handles.watch cimport check_alive, finish

from ncclpy.errors import NcclError, NcclUnsupported, not_copied
from ncclpy.types import DataType, as_datatype, as_integer


cdef class CustomOp:
    """CustomOp(comm, scalar, dtype)
--

Multiply each rank's input by a scalar and sum (`ncclRedOpCreatePreMulSum`).

    `Communicator.pre_mul_sum` makes it. It works only on its own communicator and data type, and is freed by `close`
    or together with the communicator.

    Attributes
    ----------
    datatype : int
        The number of its `DataType`.
    """

    def __init__(self, Lifecycle comm not None, scalar, dtype):
        cdef View view
        cdef double[2] storage  # 16 bytes, aligned for any scalar
        cdef void* pointer = <void*>storage
        cdef ncclScalarResidence_t residence = ncclScalarHostImmediate
        cdef ncclRedOp_t made
        cdef ncclResult_t result = <ncclResult_t>WAS_ABORTED
        datatype = as_datatype(dtype)
        cdef ncclDataType_t raw_type = <ncclDataType_t><int>datatype
        if isinstance(scalar, (int, float, np.generic)):
            data = encoded(_without_numpy_type(scalar), datatype, "scalar")
            memcpy(pointer, <const char*>data, len(data))
        else:
            read_view(scalar, &view, "scalar")
            if view.count != 1 or view.datatype != <int>datatype or view.flavour >= BYTES:
                raise ValueError(
                    f"scalar: expected one element of {datatype.name.lower()}, got {view.count // view.unit} of "
                    f"{name_of(view.datatype, view.flavour)}"
                )
            pointer = view.pointer
            residence = ncclScalarHostImmediate if view.device == HOST_MEMORY else ncclScalarDevice
            self.scalar = scalar
        check_alive(comm)
        require(<void*>nccl.ncclRedOpCreatePreMulSum, b"ncclRedOpCreatePreMulSum")
        with nogil:
            if comm.lock_alive():
                result = nccl.ncclRedOpCreatePreMulSum(
                    &made, pointer, raw_type, residence, comm.raw
                )
                comm.unlock()
        comm.check_call(result, b"ncclRedOpCreatePreMulSum")
        self.datatype = datatype
        self.number = <int>made
        self.comm = comm
        comm.resources.add(self)

    cdef int code(self) except -1:
        if self.comm is None:
            raise ValueError("op: this operator is closed")
        return self.number

    @property
    def handle(self):
        """The `ncclRedOp_t` as an int; after `close` a `ValueError` is raised."""
        return self.code()

    def close(self):
        """Free the operator (`ncclRedOpDestroy`); a second call does nothing."""
        cdef Lifecycle comm = self.comm
        cdef ncclResult_t result = ncclSuccess
        if comm is None:
            return
        self.comm = None
        require(<void*>nccl.ncclRedOpDestroy, b"ncclRedOpDestroy")
        with nogil:
            if comm.lock_alive():
                result = nccl.ncclRedOpDestroy(<ncclRedOp_t>self.number, comm.raw)
                comm.unlock()
        check(result, b"ncclRedOpDestroy", comm.raw)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def __reduce__(self):
        raise not_copied(self, "make one with Communicator.pre_mul_sum() for each communicator")

    def __repr__(self):
        return f"<ncclpy.CustomOp {DataType(self.datatype).name.lower()}{' (closed)' if self.comm is None else ''}>"


cdef object _without_numpy_type(object scalar):
    """Return a number without its numpy type, except for numpy floats, which may hold more than Python's float."""
    if isinstance(scalar, (int, float, np.floating)):
        return scalar
    if isinstance(scalar, (np.integer, np.bool_)):
        return int(scalar)
    if scalar.dtype.kind == "V" and scalar.dtype.fields is None:  # the small floats of ml_dtypes
        return float(scalar)
    raise TypeError(f"scalar: expected a number or a buffer, got {scalar!r}")


cdef class Registration:
    """Registration(comm, buffer)
--

Keep a buffer registered with a communicator (`ncclCommRegister`) until `close`.

    `Communicator.register` makes it. The communicator keeps the buffer alive until `close`; close the registration
    before the memory is freed, and after the operations that use the buffer are done.

    Notes
    -----
    A buffer within another one that is registered with the communicator uses that registration: the handle is the
    same, and the last of the two to be closed deregisters it. Until then the communicator keeps the buffer that was
    registered first. A `Graph` counts as well: buffers of captured operations stay registered until the graph is
    closed.
    """

    def __init__(self, Lifecycle comm not None, buffer):
        cdef View view
        cdef ncclResult_t result = <ncclResult_t>WAS_ABORTED
        if self.buffer_key:
            raise RuntimeError("a Registration is initialised once")
        read_view(buffer, &view, "buffer")
        check_alive(comm)
        require(<void*>nccl.ncclCommRegister, b"ncclCommRegister")
        # The communicator keeps the buffer: the memory stays registered even if this object is dropped.
        self.buffer_key = comm.registrations.keep(buffer)
        with nogil:
            if comm.lock_alive():
                if comm.precall_hook != NULL:
                    # The hook may register a larger range that contains this buffer: `register` then shares it.
                    run_hook_if_wanted(comm.precall_hook, comm.raw)
                result = comm.registrations.register(
                    comm.raw, view.pointer, view.nbytes, self.buffer_key, &self.raw, &self.range
                )
                comm.unlock()
        if result != ncclSuccess:
            comm.release_buffer(self.buffer_key)
        comm.check_call(result, b"ncclCommRegister")
        self.buffer = buffer
        self.address = <uintptr_t>view.pointer
        self.nbytes = view.nbytes
        self.comm = comm
        comm.resources.add(self)

    @property
    def handle(self):
        """The handle of the registration as an int; 0 if NCCL did not need to register this memory."""
        return <uintptr_t>self.raw

    @property
    def closed(self):
        """Whether `close` was called, by the program or by the close of the communicator."""
        return self.comm is None

    def close(self):
        """Deregister the buffer (`ncclCommDeregister`), unless another buffer or a graph uses its registration.

        A second call does nothing.
        """
        cdef Lifecycle comm = self.comm
        cdef ncclResult_t result = ncclSuccess
        cdef bint gone = True
        if comm is None:
            return
        self.comm = self.buffer = None
        require(<void*>nccl.ncclCommDeregister, b"ncclCommDeregister")
        with nogil:
            if comm.lock_alive():
                result = comm.registrations.release(comm.raw, self.range, &gone)
                comm.unlock()
        check(result, b"ncclCommDeregister", comm.raw)
        if gone:
            comm.release_buffer(self.range)
        if self.buffer_key != self.range:  # equal if this object's buffer is the registered range
            comm.release_buffer(self.buffer_key)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def __reduce__(self):
        raise not_copied(self, "register the buffer with Communicator.register() where it is used")

    def __repr__(self):
        if self.comm is None:
            return "<ncclpy.Registration (closed)>"
        return f"<ncclpy.Registration of {self.nbytes} bytes at {self.address:#x} with {self.comm!r}>"


cdef class HeldRanges:
    """Keep ranges registered for captured operations, even if their `Registration` objects are closed."""

    def __dealloc__(self):
        free(self.numbers)

    cdef int let_go(self, double until) except -1:
        cdef size_t i, count = self.count
        cdef ncclResult_t result = ncclSuccess, released
        cdef bint gone
        cdef Handle comm = self.comm
        cdef bint locked
        self.count = 0
        for i in range(count):
            gone = False
            with nogil:
                # After an abort there is nothing to do: the ranges are no longer registered.
                locked = comm.state != ABORTED and lock_within(&comm.mutex, until)
                if locked:
                    released = ncclSuccess
                    if comm.raw != NULL and comm.state != ABORTED:
                        released = comm.registrations.release(comm.raw, self.numbers[i], &gone)
                    if result == ncclSuccess:
                        result = released
                    comm.unlock()
            if gone and released == ncclSuccess:
                comm.release_buffer(self.numbers[i])
        return check(result, b"ncclCommDeregister", comm.raw)


cdef HeldRanges hold_ranges(Handle handle, set addresses):
    cdef HeldRanges held = HeldRanges()
    cdef size_t i, count = len(addresses)
    cdef uintptr_t* wanted = <uintptr_t*>malloc((count + 1) * sizeof(uintptr_t))
    if wanted == NULL:
        raise MemoryError
    for i, address in enumerate(addresses):
        wanted[i] = address
    held.comm = handle
    with nogil:
        handle.lock()
        held.numbers = handle.registrations.hold(wanted, count, &held.count)
        handle.unlock()
    free(wanted)
    if held.numbers == NULL:
        raise MemoryError
    return held


# On the host engine: the `_PartMemory` of each window part of this process, by communicator and address. An entry
# lives as long as the part is registered or a buffer from `Window.peer` reads it.
_part_memories = weakref.WeakValueDictionary()


cdef class _PartMemory:
    def __init__(self, buffer):
        self.buffer = buffer


cdef class Window:
    """Window(comm, buffer, *, symmetric=True, strict_ordering=False)
--

Keep a buffer registered as this rank's part of a window (`ncclCommWindowRegister`) until `close`.

    `Communicator.window` makes it. The communicator keeps the buffer alive until `close`; close the window before the
    memory is freed.
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
            check_may_make(group, "window")
        self.cell = <ncclWindow_t*>calloc(1, sizeof(ncclWindow_t))
        if self.cell == NULL:
            raise MemoryError
        self.nccl_may_write = comm.nonblocking or not comm.owned
        self.memory = _PartMemory(buffer)
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
        # The window stays registered even if this object is dropped.
        self.buffer_key = comm.registrations.keep(self.memory)
        if symmetric:
            start = <uintptr_t>view.pointer
            comm.registrations.windows[self.buffer_key] = (start, start + view.nbytes)
        try:
            make_alone(comm, &operation, buffer, self)  # a group keeps this object, and with it the cell
        except NcclError:
            if comm.state == READY:  # NCCL has refused the window; after an abort it may be registered
                comm.release_buffer(self.buffer_key)
            raise
        comm.resources.add(self)
        if host_engine:
            _part_memories[comm.group_name, <uintptr_t>view.pointer] = self.memory

    def __dealloc__(self):
        # If an interrupt or an abort has ended the wait for the window early, NCCL may still write the cell: then it
        # is never freed.
        if self.cell != NULL and (self.cell[0] != NULL or not self.nccl_may_write):
            free(self.cell)

    cdef bint is_pending(self) noexcept:
        """Return whether the group that makes the window has not ended yet."""
        cdef Group group = self.group
        return group is not None and group.writes_to(self)

    cdef bint is_used_by_open_group(self) noexcept:
        """Return whether the group that is open in this thread has recorded calls that use the window."""
        cdef Group group = current_group()
        return group is not None and group.writes_to(self)

    cdef int check_usable(self, Handle comm) except -1:
        if self.comm is None:
            raise ValueError("window: it is closed")
        if self.comm is not comm:
            raise ValueError(f"window: it was made by another communicator, {self.comm!r}")
        if self.cell[0] == NULL:
            if self.is_pending():
                raise ValueError("window: it is made when its group ends; use it after that")
            raise NcclUnsupported("window: NCCL supports no windows between these devices (its handle is 0)")
        return 0

    @property
    def buffer(self):
        """This rank's buffer; None when the window is closed."""
        cdef _PartMemory memory = self.memory
        return None if memory is None else memory.buffer

    def peer(self, rank, dtype=None):
        """Return another rank's part of the window as a buffer (`ncclGetPeerDevicePointer`, NCCL 2.29.2).

        Any kernel can read and write it, over NVLink; on the host engine it is CPU memory, for `numpy.asarray`.
        Accesses are not synchronised: the program must order the accesses of different ranks, for example by signals.

        Parameters
        ----------
        rank : int
            The rank of the part; this rank's own is allowed.
        dtype : DataType, str or numpy.dtype, optional
            The data type of the buffer; by default that of this rank's buffer.

        Returns
        -------
        Buffer
            A buffer of as many bytes as this rank's part. On GPUs it is valid until the window is closed on either
            rank. On the host engine it stays readable after that.

        Raises
        ------
        ValueError
            If there is no such rank, the window is closed or not made yet, or its size is no multiple of that of
            `dtype`.
        NcclUnsupported
            If this device cannot address that rank's memory, for example on another machine, or if NCCL is older
            than 2.29.2.
        """
        cdef Lifecycle comm
        cdef _PeerPart part = _PeerPart.__new__(_PeerPart)
        cdef Buffer made
        cdef View view
        cdef void* pointer = NULL
        cdef ncclResult_t result = <ncclResult_t>WAS_ABORTED
        cdef ElementType element
        cdef int number = as_integer(rank, "rank")
        require(<void*>nccl.ncclGetPeerDevicePointer, b"ncclGetPeerDevicePointer")
        view = self.view
        if dtype is not None:
            of_anything(dtype, &element, "dtype")
            view.datatype, view.flavour, view.unit = element.datatype, element.flavour, element.unit
            if view.nbytes % (view.unit * ITEMSIZE[view.datatype]):
                raise ValueError(
                    f"dtype: the {view.nbytes} bytes of the window are not a whole number of "
                    f"{name_of(view.datatype, view.flavour)}"
                )
            view.count = view.nbytes // ITEMSIZE[view.datatype]
        comm = self.comm  # read after the calls above, which may close the window
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
                    # Ask for the last byte, since the host engine returns no address beyond what the rank registered.
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
            part.memory = _part_memories.get((comm.group_name, <uintptr_t>pointer))
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
        """The `ncclWindow_t` as an int; 0 before the group's end, after `close`, and if NCCL supports no windows."""
        return <uintptr_t>self.cell[0] if self.comm is not None else 0

    @property
    def closed(self):
        """Whether `close` was called, by the program or by the close of the communicator."""
        return self.comm is None

    def close(self):
        """Deregister this rank's part (`ncclCommWindowDeregister`); a second call does nothing.

        All operations that use the window must have ended on all ranks.

        Raises
        ------
        ValueError
            If the group that makes the window has not ended yet, or if the open group has recorded calls that use the
            window.
        """
        cdef Lifecycle comm = self.comm
        cdef ncclResult_t result = ncclSuccess
        cdef CommCall call
        if comm is None:
            return
        if self.is_pending():
            raise ValueError("this window is made when its group ends; close it after that")
        if self.is_used_by_open_group():
            raise ValueError("calls that the open group has recorded use this window; close it when the group has ended")
        require(<void*>nccl.ncclCommWindowDeregister, b"ncclCommWindowDeregister")
        self.comm = self.memory = self.group = None
        if self.cell[0] != NULL:
            self.nccl_may_write = False  # NCCL has written the cell
            call = CommCall()
            call.comm, call.kind, call.window, call.window_owner = comm, DEREGISTER_WINDOW, self.cell, self
            call.run_blocking("ncclCommWindowDeregister", comm.limit)
            result = call.result
        if result == ncclInProgress:
            finish(comm, "ncclCommWindowDeregister", deadline_after(comm.limit))
        elif <int>result != WAS_ABORTED:
            check(result, b"ncclCommWindowDeregister", comm.raw)
        comm.release_buffer(self.buffer_key)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        # After an exception, a window that an open group makes or uses stays open: close() would raise ValueError and
        # so hide the exception.
        if kind is None or not (self.is_pending() or self.is_used_by_open_group()):
            self.close()

    def __reduce__(self):
        raise not_copied(self, "make one with Communicator.window() in each process")

    def __repr__(self):
        if self.comm is None:
            return "<ncclpy.Window (closed)>"
        return f"<ncclpy.Window {self.handle:#x} of {self.comm!r}>"


cdef class _PeerPart:
    """Keep a rank's part of a window mapped for a buffer from `Window.peer`; on GPUs nothing can keep it mapped."""

    cdef void* held  # what `host_hold_window` returned; NULL on GPUs
    cdef _PartMemory memory  # host engine: the part's memory, if the rank is in this process; else None

    def __dealloc__(self):
        if self.held != NULL:
            host_release_window(self.held)


cdef bint lies_in_window(Handle comm, Window first, const View* view) except -1:
    cdef uintptr_t begin, end, at = <uintptr_t>view.pointer
    if first.symmetric:
        begin = <uintptr_t>first.view.pointer
        if begin <= at and at - begin <= first.view.nbytes and view.nbytes <= first.view.nbytes - (at - begin):
            return True
    for begin, end in list(comm.registrations.windows.values()):
        if begin <= at and at <= end and view.nbytes <= end - at:
            return True
    return False
