"""Tenants: what lives beside a communicator and wants in before its next call, as segments that are to be registered.

Who has something to do with a communicator, but must not wait for its lock, says so in a word (`wanted`) that each call
looks at. It is let in under the lock, right before the call. And it learns when what was issued is over: behind each call
an event is recorded. One event is enough, as NCCL runs the operations of one communicator one after the other, on
whichever streams they are.
"""

import weakref

from ncclpy.abi.driver cimport (
    CU_EVENT_DISABLE_TIMING,
    CU_STREAM_CAPTURE_STATUS_NONE,
    CUDA_SUCCESS,
    CUstreamCaptureMode,
    CUstreamCaptureStatus,
)
from ncclpy.core.capture cimport relax, restore
from ncclpy.core.library cimport driver


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
    """Nobody in particular; who takes tenants builds on it."""

    cdef int is_ready(self, object handle) except -1:
        raise NotImplementedError

    cdef int was_ended(self, object handle) except -1:
        raise NotImplementedError


cdef Landlord _landlord = None
cdef object _ready = weakref.WeakSet()


cdef list everyone():
    return list(_ready)


cdef int set_landlord(Landlord new) except -1:
    """Have another one told from now on; None for nobody."""
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
