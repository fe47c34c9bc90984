"""NCCL's allocator with a place in the registry: for `memory.alloc`, and without the GIL for allocators of frameworks.

A framework's allocator asks for segments under a lock of its own, perhaps without the GIL, and gives them back in the same
way. So no Python runs in `ncclpy_segment_alloc` and `ncclpy_segment_free`, and they wait for no communicator: what comes is
registered by each communicator's next call, what goes is seen to by the reaper.
"""

import itertools

from libc.stdint cimport uint64_t, uintptr_t
from libcpp.vector cimport vector

from ncclpy.abi.driver cimport (
    CU_EVENT_DISABLE_TIMING,
    CU_STREAM_CAPTURE_STATUS_NONE,
    CUcontext,
    CUevent,
    CUstream,
    CUstreamCaptureMode,
    CUstreamCaptureStatus,
)
from ncclpy.abi.nccl cimport ncclInvalidUsage, ncclResult_t, ncclSuccess
from ncclpy.core.capture cimport relax, restore
from ncclpy.core.check cimport check
from ncclpy.core.device cimport as_device, context_of, switch_back, switch_device
from ncclpy.core.handle cimport Handle
from ncclpy.core.library cimport driver, nccl, require
from ncclpy.memory.residency cimport check_added, enlist, free_some, open_registry, part, segments, wake_reaper
from ncclpy.memory.segments cimport ADDED, Segment

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
