"""Observers of communicators: hooks before calls, failures, other ranks.

Who has something to do with a communicator, but must not wait for its lock, says so in a word (`wanted`) that each call
looks at. It is let in under the lock, right before the call. And it learns when what was issued is over: behind each call
an event is recorded. One event is enough, as NCCL runs the operations of one communicator one after the other, on
whichever streams they are.
"""

import weakref

from ncclpy.abi.driver cimport (
    CUDA_SUCCESS, CU_EVENT_DISABLE_TIMING, CU_STREAM_CAPTURE_STATUS_NONE, CUstreamCaptureMode, CUstreamCaptureStatus,
)
from ncclpy.core.runtime.device cimport relax, restore
from ncclpy.core.runtime.library cimport driver

from ncclpy.errors import NcclRemoteError, NcclTimeout


cdef extern from *:
    """
    /* How many calls this thread is inside of whose outcome is told as a whole. */
    static __thread int ncclpy_wholes = 0;
    """
    int ncclpy_wholes


cdef class FailureListener:
    """The interface of a listener."""

    cpdef int named(self, int nranks, int rank) except -1:
        raise NotImplementedError

    cpdef int failed(self, object error, bint wait, bint ended=False) except -1:
        raise NotImplementedError

    cpdef int finish(self) except -1:
        raise NotImplementedError


listener = None


cdef int set_listener(FailureListener new) except -1:
    """Have a listener told from now on."""
    global listener
    listener = new
    return 0


def failure_listener():
    """Return the listener, None without one."""
    return listener


cdef int tell_failed(object error, bint wait=True) except -1:
    if listener is None or ncclpy_wholes or not isinstance(error, (NcclTimeout, NcclRemoteError)):
        return 0
    return listener.failed(error, wait)


cdef void begin_whole() noexcept nogil:
    global ncclpy_wholes
    ncclpy_wholes += 1


cdef void end_whole() noexcept nogil:
    global ncclpy_wholes
    ncclpy_wholes -= 1


cdef bint in_whole() noexcept nogil:
    return ncclpy_wholes > 0


cdef class Fellows:
    """The interface to the other ranks of a communicator: `peers/fellows.py` implements it."""

    cpdef Fellows of_part(self, object comm):
        raise NotImplementedError

    cpdef int explain(self, object error) except -1:
        raise NotImplementedError

    cpdef int tell(self, str text, str kind) except -1:
        raise NotImplementedError

    cpdef int confirm(self) except -1:
        raise NotImplementedError

    cpdef bint wait_until_heard(self) except -1:
        raise NotImplementedError

    cpdef bint has_ended(self) except -1:
        raise NotImplementedError

    cpdef int leave(self) except -1:
        raise NotImplementedError

    cpdef int left(self, double seconds) except -1:
        raise NotImplementedError


cdef bint settle(Tenant* tenant, CUcontext context) noexcept nogil:
    cdef int i
    tenant.context = <void*>context
    for i in range(2):
        if driver.cuEventCreate == NULL or driver.cuEventCreate(
            <CUevent*>&tenant.events[i], CU_EVENT_DISABLE_TIMING
        ) != CUDA_SUCCESS:
            move_out(tenant)
            return False
    return True


cdef void move_out(Tenant* tenant) noexcept nogil:
    cdef int i
    for i in range(2 if driver.cuEventDestroy_v2 != NULL else 0):  # not in a forked child
        if tenant.events[i] != NULL:
            driver.cuEventDestroy_v2(<CUevent>tenant.events[i])
            tenant.events[i] = NULL


cdef void enter(Tenant* tenant, ncclComm_t comm) noexcept nogil:
    """Let it in, on the communicator's device; what it does there disturbs no capture."""
    cdef CUcontext saved = NULL
    cdef CUstreamCaptureMode mode
    if tenant.unknown:  # NCCL works on the communicator in the background: at the next call then
        return
    driver.cuCtxGetCurrent(&saved)
    driver.cuCtxSetCurrent(<CUcontext>tenant.context)
    mode = relax()
    tenant.enter(tenant, <void*>comm)
    restore(mode)
    driver.cuCtxSetCurrent(saved)


cdef void follow(Tenant* tenant, CUstream stream, bint issued) noexcept nogil:
    """Put an event behind what was issued, also by a call that has failed; what is captured runs when its graph does."""
    cdef CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE
    cdef CUcontext saved = NULL
    cdef bint entered = <size_t>stream <= 2  # a default stream is the current device's
    if not issued:  # NCCL does so in the background
        tenant.unknown = 1
        return
    if entered:
        driver.cuCtxGetCurrent(&saved)
        entered = <void*>saved != tenant.context
        if entered:
            driver.cuCtxSetCurrent(<CUcontext>tenant.context)
    if driver.cuStreamIsCapturing(stream, &status) != CUDA_SUCCESS or status != CU_STREAM_CAPTURE_STATUS_NONE:
        tenant.caught(tenant)
    elif driver.cuEventRecord(<CUevent>tenant.events[tenant.current], stream) == CUDA_SUCCESS:
        tenant.known = 1
        tenant.unknown = 0  # this one runs behind it
    else:
        tenant.unknown = 1
    if entered:
        driver.cuCtxSetCurrent(saved)


cdef class Landlord:
    """The interface of the memory registry, which has a hook at each communicator."""

    cdef int is_ready(self, object handle) except -1:
        raise NotImplementedError

    cdef int was_ended(self, object handle) except -1:
        raise NotImplementedError


cdef Landlord _landlord = None
cdef object _ready = weakref.WeakSet()


cdef list everyone():
    return list(_ready)


cdef int set_landlord(Landlord new) except -1:
    """Have this object told from now on; None ends that."""
    global _landlord
    _landlord = new
    return 0


cdef int tell_ready(object handle) except -1:
    cdef Landlord landlord = _landlord
    _ready.add(handle)
    if landlord is not None:
        landlord.is_ready(handle)
    return 0


cdef int tell_ended(object handle) except -1:
    """Have a communicator's state say that its tenant has aborted it, and why."""
    cdef Landlord landlord = _landlord
    return 0 if landlord is None else landlord.was_ended(handle)
