"""What belongs to one communicator: reduction operators of one's own and registered buffers."""

from libc.stdint cimport uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from ncclpy.abi.nccl cimport (
    ncclDataType_t,
    ncclRedOp_t,
    ncclResult_t,
    ncclScalarDevice,
    ncclScalarHostImmediate,
    ncclScalarResidence_t,
    ncclSuccess,
)
from ncclpy.core.buffers cimport HOST_MEMORY, View, read_view
from ncclpy.core.check cimport check
from ncclpy.core.datatypes cimport BYTES, encoded, name_of
from ncclpy.core.handle cimport WAS_ABORTED, Handle, lock_within
from ncclpy.core.library cimport nccl, require
from ncclpy.core.watch cimport check_alive
from ncclpy.core.state cimport ABORTED
from ncclpy.core.observers cimport let_in

import numpy as np

from ncclpy.core.errors import not_copied
from ncclpy.core.types import DataType, as_datatype


cdef class CustomOp:
    """CustomOp(comm, scalar, dtype)
--

Multiply each rank's input by a scalar and sum (`ncclRedOpCreatePreMulSum`).

    `Communicator.pre_mul_sum` makes it. It works on its own communicator and data type only, and is given back with
    `close` or together with the communicator.

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
            data = encoded(_plain(scalar), datatype, "scalar")
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
        """The `ncclRedOp_t` as an int."""
        return self.code()

    def close(self):
        """Give the operator back (`ncclRedOpDestroy`); twice does nothing."""
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


cdef object _plain(object scalar):
    """Return a number without its numpy type, but for floats, which may hold more than Python's."""
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

    `Communicator.register` makes it. The communicator holds the buffer until then; close it before memory is freed, and
    when what uses it is done.

    Notes
    -----
    A buffer that lies in one that is registered with the communicator already uses that registration: the handle is
    the same, and the last of them to be closed deregisters it. Until then the communicator holds the buffer that was
    registered first. A `Graph` counts as well: what a captured operation sends from or receives in stays registered
    until the graph is closed.
    """

    def __init__(self, Lifecycle comm not None, buffer):
        cdef View view
        cdef ncclResult_t result = <ncclResult_t>WAS_ABORTED
        if self.kept:
            raise RuntimeError("a Registration is initialised once")
        read_view(buffer, &view, "buffer")
        check_alive(comm)
        require(<void*>nccl.ncclCommRegister, b"ncclCommRegister")
        self.kept = comm.keep(buffer)  # a registration that is dropped is still one
        with nogil:
            if comm.lock_alive():
                if comm.tenant != NULL:
                    let_in(comm.tenant, comm.raw)  # what is to be registered anyway comes first, and is shared
                result = comm.ranges.register(
                    comm.raw, view.pointer, view.nbytes, self.kept, &self.raw, &self.range
                )
                comm.unlock()
        if result != ncclSuccess:
            comm.unkeep(self.kept)
        comm.check_call(result, b"ncclCommRegister")
        self.buffer = buffer
        self.address = <uintptr_t>view.pointer
        self.nbytes = view.nbytes
        self.comm = comm
        comm.resources.add(self)

    @property
    def handle(self):
        """The handle of the registration as an int; 0 if NCCL had no use for registering this memory."""
        return <uintptr_t>self.raw

    @property
    def closed(self):
        """Whether `close` was called."""
        return self.comm is None

    def close(self):
        """Deregister the buffer (`ncclCommDeregister`) if nobody else uses its registration; twice does nothing."""
        cdef Lifecycle comm = self.comm
        cdef ncclResult_t result = ncclSuccess
        cdef bint gone = True
        if comm is None:
            return
        self.comm = self.buffer = None
        require(<void*>nccl.ncclCommDeregister, b"ncclCommDeregister")
        with nogil:
            if comm.lock_alive():
                result = comm.ranges.release(comm.raw, self.range, &gone)
                comm.unlock()
        check(result, b"ncclCommDeregister", comm.raw)
        if gone:
            comm.unkeep(self.range)
        if self.kept != self.range:  # else it is what is registered
            comm.unkeep(self.kept)

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
    """Hold registrations beside those who have made them, for what was captured."""

    def __dealloc__(self):
        free(self.numbers)

    cdef int let_go(self, double until) except -1:
        cdef size_t i, left = self.count
        cdef ncclResult_t result = ncclSuccess, one
        cdef bint gone
        cdef Handle comm = self.comm
        cdef bint locked
        self.count = 0
        for i in range(left):
            gone = False
            with nogil:
                locked = comm.state != ABORTED and lock_within(&comm.mutex, until)  # an aborted one has nothing left
                if locked:
                    one = ncclSuccess
                    if comm.raw != NULL and comm.state != ABORTED:
                        one = comm.ranges.release(comm.raw, self.numbers[i], &gone)
                    if result == ncclSuccess:
                        result = one
                    comm.unlock()
            if gone and one == ncclSuccess:
                comm.unkeep(self.numbers[i])
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
        held.numbers = handle.ranges.hold(wanted, count, &held.count)
        handle.unlock()
    free(wanted)
    if held.numbers == NULL:
        raise MemoryError
    return held
