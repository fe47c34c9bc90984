"""Memory of NCCL's own allocator, with an owner."""

from libc.stdint cimport uintptr_t

from ncclpy.core.buffers cimport Buffer
from ncclpy.core.device cimport as_device
from ncclpy.core.library cimport host_engine
from ncclpy.memory.allocator cimport new_segment
from ncclpy.memory.residency cimport dismiss

import importlib
import math
import operator

import numpy as np

from ncclpy.core.errors import not_copied
from ncclpy.core.types import as_integer


cdef tuple _FRAMEWORKS = ("torch", "cupy", "numpy")


cdef class _Block:
    """Memory that is freed when nobody has it any more: out of each communicator first that may use it."""

    cdef uintptr_t pointer

    def __dealloc__(self):
        if self.pointer != 0:
            with nogil:
                dismiss(self.pointer)


cdef class Allocation(Buffer):
    """Allocation()
--

Memory of NCCL's allocator (`ncclMemAlloc`), registered on every communicator of its device.

    `memory.alloc` makes it. Arrays over it keep it alive: it is freed when neither this object nor an array or buffer has
    it any more, and when what communicators were asked for until then is over. So it can be let go of at any time; what
    other kernels do with it has to be over, as with any memory.

    It is a `Buffer` of bytes, which communicators take as it is; `numpy.asarray` (host engine), ``torch.from_dlpack``,
    ``cupy.from_dlpack`` and ``__cuda_array_interface__`` read it without a copy, and `buffer` gives it another data type.
    """

    cdef bint lent  # its address was read from this object
    cdef bint closing  # closed, or to be when whoever has read its address has let it go
    cdef object __weakref__

    def __init__(self):
        raise TypeError("Allocation(...) makes none: use memory.alloc(nbytes) or memory.empty(shape, dtype)")

    @property
    def pointer(self):
        """The address of the first byte."""
        return self._share().pointer

    @property
    def closed(self):
        """Whether it was given back by `close`."""
        return self.closing

    def buffer(self, dtype="uint8", count=None, offset=0):
        """Return a part of it as a `Buffer`, which keeps the memory alive.

        Parameters
        ----------
        dtype : DataType, str or numpy.dtype
            The data type.
        count : int, optional
            The number of elements; as many as there is room for by default.
        offset : int
            Where it begins, in bytes.
        """
        cdef _Block block = self._share()
        itemsize = Buffer(block.pointer, 1, dtype).nbytes
        offset = operator.index(offset)
        if not 0 <= offset <= self.nbytes:
            raise ValueError(f"offset: {offset} is outside of {self!r}")
        room = (self.nbytes - offset) // itemsize
        count = room if count is None else operator.index(count)
        if not 0 <= count <= room:
            raise ValueError(
                f"count: {count} elements of {itemsize} bytes at offset {offset} do not fit into {self!r}"
            )
        return Buffer(block.pointer + offset, count, dtype, device=self.device, owner=block)

    cdef int hold(self, _Block block, size_t nbytes, int device) except -1:
        Buffer.__init__(self, block.pointer, nbytes, "uint8", device=device, owner=block)
        return 0

    cdef _Block _share(self):
        if self.closing:
            raise ValueError("this allocation is closed; arrays made from it before are as good as ever")
        return <_Block>self.owner

    def close(self):
        """Give this object's share back; twice does nothing. The memory goes with the last array that has it.

        A plan or an open group that has it recorded, and not launched yet, has this object alone: close it behind them.
        """
        self.closing = True
        self.view.pointer = NULL
        if not self.lent:
            self.owner = None

    def __array__(self, dtype=None, copy=None):
        return self.buffer().__array__(dtype, copy)

    @property
    def __cuda_array_interface__(self):
        """What CuPy, numba and others read of memory of a GPU; CPU memory has none."""
        described = self.buffer().__cuda_array_interface__
        self.lent = True  # who reads this keeps the object that it was read from
        return described

    def __dlpack__(self, **options):
        """Return a DLPack capsule of the bytes."""
        return self.buffer().__dlpack__(**options)

    def __dlpack_device__(self):
        """Return the type and the ordinal of the device for DLPack."""
        return self.buffer().__dlpack_device__()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def __reduce__(self):
        raise not_copied(self, "send the contents, or make one in each process with memory.alloc()")

    def __repr__(self):
        where = "closed" if self.closing else f"at {<uintptr_t>self.view.pointer:#x}"
        return f"<ncclpy.memory.Allocation of {self.nbytes} bytes on device {self.device}, {where}>"


def alloc(nbytes, device=None):
    """Allocate memory that NCCL can register, of which each communicator of the device is told (`ncclMemAlloc`).

    Parameters
    ----------
    nbytes : int
        Size in bytes, at least 1. On GPUs NCCL takes whole pages of 2 MiB.
    device : int, optional
        The ordinal; the current device by default.

    Returns
    -------
    Allocation

    Raises
    ------
    NcclError
        If there is not so much memory.
    NcclUnsupported
        Before NCCL 2.19.
    """
    cdef Allocation made = Allocation.__new__(Allocation)
    cdef _Block block = _Block()
    number = as_integer(nbytes, "nbytes", 1, (1 << 62) - 1)
    ordinal = as_device(device)
    block.pointer = new_segment(number, ordinal)
    made.hold(block, number, ordinal)
    return made


def empty(shape, dtype="float32", *, device=None, framework=None):
    """Return an array over memory that NCCL can register; the memory goes with the last array that has it.

    Parameters
    ----------
    shape : int or sequence of int
        Its shape.
    dtype : DataType, str or numpy.dtype
        Its data type.
    device : int, optional
        The ordinal; the current device by default.
    framework : {"torch", "cupy", "numpy"}, optional
        Whose array it is: numpy's by default on the host engine, torch's on GPUs.

    Returns
    -------
    array
        Not initialised.
    """
    lengths = (operator.index(shape),) if hasattr(shape, "__index__") else tuple(map(operator.index, shape))
    if any(length < 0 for length in lengths):
        raise ValueError(f"shape: {lengths} has a negative length")
    if framework is None:
        framework = "numpy" if host_engine else "torch"
    if framework not in _FRAMEWORKS:
        raise ValueError(f"framework: {framework!r} is none of {', '.join(map(repr, _FRAMEWORKS))}")
    count = math.prod(lengths)
    itemsize = Buffer(1, 1, dtype).nbytes
    buffer = alloc(max(1, count * itemsize), device).buffer(dtype, count)
    array = np.asarray(buffer) if framework == "numpy" else importlib.import_module(framework).from_dlpack(buffer)
    return array.reshape(lengths)
