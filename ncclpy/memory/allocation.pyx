"""Allocations of registered memory, and the allocator behind pools.

A framework's allocator asks for segments under a lock of its own, perhaps without the GIL, and gives them back in the same
way. So no Python runs in `ncclpy_segment_alloc` and `ncclpy_segment_free`, and they wait for no communicator: what comes is
registered by each communicator's next call, what goes is seen to by the reaper.
"""

import importlib
import itertools
import math
import operator

import numpy as np

from libc.stdint cimport uint64_t, uintptr_t
from libcpp.vector cimport vector

from ncclpy.abi.driver cimport (
    CU_EVENT_DISABLE_TIMING, CU_STREAM_CAPTURE_STATUS_NONE, CUcontext, CUevent, CUstream, CUstreamCaptureMode,
    CUstreamCaptureStatus,
)
from ncclpy.abi.nccl cimport ncclInvalidUsage, ncclResult_t, ncclSuccess
from ncclpy.core.arguments.buffers cimport Buffer
from ncclpy.core.runtime.library cimport check, driver, host_engine, nccl, require
from ncclpy.core.runtime.device cimport as_device, context_of, relax, restore, switch_back, switch_device
from ncclpy.core.handles.handle cimport Handle
from ncclpy.memory.residency cimport (
    check_added, dismiss, enlist, free_some, open_registry, part, segments, wake_reaper,
)
from ncclpy.memory.segments cimport ADDED, Segment

from ncclpy.errors import not_copied
from ncclpy.types import as_integer


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


cdef extern from *:
    """
    /* What frameworks find by name in this library, and the pool that a thread is in. */
    static void *(*ncclpy_take)(size_t nbytes, int device);
    static void (*ncclpy_give)(void *pointer, int device, void *stream);
    static thread_local uint64_t ncclpy_pool = 0;

    extern "C" __attribute__((visibility("default"))) void *ncclpy_segment_alloc(size_t nbytes, int device, void *) {
      return ncclpy_take(nbytes, device);
    }
    extern "C" __attribute__((visibility("default"))) void ncclpy_segment_free(
        void *pointer, size_t, int device, void *stream) {
      ncclpy_give(pointer, device, stream);
    }
    """
    void* (*ncclpy_take)(size_t, int) noexcept nogil
    void (*ncclpy_give)(void*, int, void*) noexcept nogil
    uint64_t this_pool "ncclpy_pool"
    void* ncclpy_segment_alloc(size_t, int, void*) nogil
    void ncclpy_segment_free(void*, size_t, int, void*) nogil

#: The names under which this library has the two functions: ``void *alloc(size_t nbytes, int device, void *stream)``, which
#: returns NULL if there is not so much memory, and ``void free(void *pointer, size_t nbytes, int device, void *stream)``.
ALLOC, FREE = "ncclpy_segment_alloc", "ncclpy_segment_free"
_numbers = itertools.count(1)


cdef int _bring(
    size_t nbytes, int device, uintptr_t* pointer, int* added, uintptr_t* other, size_t* other_bytes
) noexcept nogil:
    """Allocate, and enter it into the registry. Returns a result of NCCL's, and in `added` whether it is there."""
    cdef void* made = NULL
    cdef CUcontext saved = NULL
    cdef CUstreamCaptureMode mode
    cdef ncclResult_t result
    added[0] = ADDED
    if nccl.ncclMemAlloc == NULL or segments == NULL or not switch_device(device, &saved):
        return ncclInvalidUsage
    mode = relax()
    result = nccl.ncclMemAlloc(&made, nbytes)
    if result != ncclSuccess and segments.has_leaving():  # the reaper may not have come to it
        free_some()
        result = nccl.ncclMemAlloc(&made, nbytes)
    if result == ncclSuccess:
        added[0] = segments.add(<uintptr_t>made, nbytes, device, True, other, other_bytes, this_pool)
        if added[0] != ADDED:
            nccl.ncclMemFree(made)
    restore(mode)
    switch_back(saved)
    pointer[0] = <uintptr_t>made
    return result


cdef uintptr_t new_segment(size_t nbytes, int device) except 0:
    cdef uintptr_t pointer = 0, other = 0
    cdef size_t other_bytes = 0
    cdef int added = ADDED
    require(<void*>nccl.ncclMemAlloc, b"ncclMemAlloc")
    open_registry()
    context_of(device)
    with nogil:
        check(<ncclResult_t>_bring(nbytes, device, &pointer, &added, &other, &other_bytes), b"ncclMemAlloc", NULL)
    check_added(added, pointer, nbytes, other, other_bytes)
    return pointer


cdef void* _take(size_t nbytes, int device) noexcept nogil:
    cdef uintptr_t pointer = 0, other = 0
    cdef size_t other_bytes = 0
    cdef int added = ADDED
    if _bring(nbytes if nbytes else 1, device, &pointer, &added, &other, &other_bytes) != ncclSuccess or added != ADDED:
        return NULL
    return <void*>pointer


cdef void _give(void* pointer, int device, void* stream) noexcept nogil:
    """Hand a segment over to the reaper, behind what its allocator's stream has queued: who frees memory trusts that the
    device is waited for, as cudaFree does, and ncclMemFree need not."""
    cdef CUcontext saved = NULL
    cdef CUevent event = NULL
    cdef CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE
    cdef CUstreamCaptureMode mode
    if pointer == NULL or nccl.ncclMemFree == NULL or segments == NULL:  # a forked child has none
        return
    if switch_device(device, &saved):
        mode = relax()
        if (
            driver.cuStreamIsCapturing(<CUstream>stream, &status) == 0
            and status == CU_STREAM_CAPTURE_STATUS_NONE
            and driver.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING) == 0
        ):
            if driver.cuEventRecord(event, <CUstream>stream) != 0 or not segments.hold_until(<uintptr_t>pointer, event):
                driver.cuEventDestroy_v2(event)
        restore(mode)
        switch_back(saved)
    segments.remove(<uintptr_t>pointer, True)
    wake_reaper()


ncclpy_take = _take
ncclpy_give = _give


def open_allocator():
    """Make ready what `ALLOC` needs, and return the path of the library that has it."""
    require(<void*>nccl.ncclMemAlloc, b"ncclMemAlloc")
    open_registry()
    context_of(as_device(None))
    return __file__


def addresses():
    """Return the addresses of the functions `ALLOC` and `FREE`."""
    open_allocator()
    return <uintptr_t>&ncclpy_segment_alloc, <uintptr_t>&ncclpy_segment_free


def take(nbytes, device):
    """Return the address of a new segment; `ncclpy_segment_alloc` for allocators that are written in Python."""
    return new_segment(max(1, nbytes), as_device(device))


def give(uintptr_t pointer, int device, uintptr_t stream=0):
    """Give back what `take` returned: it is freed behind what the stream has queued; `ncclpy_segment_free`."""
    with nogil:
        _give(<void*>pointer, device, <void*>stream)


def adopt(uintptr_t pointer, size_t nbytes, device):
    """Enter memory of others into the registry."""
    enlist(pointer, nbytes, as_device(device))


def disown(uintptr_t pointer, then):
    """Take it away again; `then` is called when no communicator uses it any more, perhaps in another thread."""
    part(pointer, then)


def new_pool():
    """Return the number of a new pool."""
    return next(_numbers)


def enter_pool(uint64_t pool):
    """Have what this thread allocates from now on belong to a pool, 0 for none; return to which it belonged."""
    global this_pool
    before = this_pool
    this_pool = pool
    return before


def segments_of(uint64_t pool):
    """Return (number, pointer, nbytes, device) of the live segments of a pool, in the order in which they came."""
    cdef vector[Segment] seen
    cdef size_t i
    if segments == NULL:
        return []
    seen = segments.of_pool(pool)
    return [(seen[i].number, seen[i].base, seen[i].bytes, seen[i].device) for i in range(seen.size())]


def check_endable(Handle comm not None, what):
    """Raise if what waits for other ranks could not be ended when time is up."""
    comm.check_endable(what)


cdef class Hold:
    """Have a segment stay, although its allocator frees it: a window is over it."""

    cdef uintptr_t base
    cdef uint64_t number

    def __init__(self, number, pointer):
        if segments == NULL or not segments.hold(pointer, number):
            raise LookupError(f"the segment at {pointer:#x} is no longer there")
        self.base, self.number = pointer, number

    def __dealloc__(self):
        if self.number != 0 and segments != NULL:
            with nogil:
                segments.let_go(self.base, self.number)
                wake_reaper()
