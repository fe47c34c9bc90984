"""What belongs to one communicator: reduction operators of one's own and registered buffers."""

from libc.stdint cimport uintptr_t
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
from ncclpy.core.handle cimport WAS_ABORTED
from ncclpy.core.library cimport nccl, require
from ncclpy.core.progress cimport check_alive

import numpy as np

from ncclpy.core.errors import not_copied
from ncclpy.core.types import DataType, as_datatype


cdef class CustomOp:
    """Multiply each rank's input by a scalar and sum (`ncclRedOpCreatePreMulSum`).

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
    """Keep a buffer registered with a communicator (`ncclCommRegister`) until `close`.

    `Communicator.register` makes it. The communicator holds the buffer until then; close it before memory is freed.
    """

    def __init__(self, Lifecycle comm not None, buffer):
        cdef View view
        cdef ncclResult_t result = <ncclResult_t>WAS_ABORTED
        read_view(buffer, &view, "buffer")
        check_alive(comm)
        require(<void*>nccl.ncclCommRegister, b"ncclCommRegister")
        with nogil:
            if comm.lock_alive():
                result = nccl.ncclCommRegister(comm.raw, view.pointer, view.nbytes, &self.raw)
                comm.unlock()
        comm.check_call(result, b"ncclCommRegister")
        self.buffer = buffer
        self.address = <uintptr_t>view.pointer
        self.nbytes = view.nbytes
        self.kept = comm.keep(buffer)  # a registration that is dropped is still one
        self.comm = comm
        comm.resources.add(self)

    @property
    def handle(self):
        """The handle of the registration as an int; 0 if NCCL had no use for registering this memory."""
        return <uintptr_t>self.raw

    @property
    def closed(self):
        """Whether the buffer is no longer registered."""
        return self.comm is None

    def close(self):
        """Deregister the buffer (`ncclCommDeregister`); twice does nothing."""
        cdef Lifecycle comm = self.comm
        cdef ncclResult_t result = ncclSuccess
        if comm is None:
            return
        self.comm = self.buffer = None
        require(<void*>nccl.ncclCommDeregister, b"ncclCommDeregister")
        with nogil:
            if self.raw != NULL and comm.lock_alive():
                result = nccl.ncclCommDeregister(comm.raw, self.raw)
                comm.unlock()
        check(result, b"ncclCommDeregister", comm.raw)
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
