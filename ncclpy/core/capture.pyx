"""Capture of streams into CUDA graphs, by whoever: what we do meanwhile is not to invalidate it.

While a stream is captured in global mode, CUDA refuses calls that it holds to be unsafe (to ask an event, to allocate)
in all threads, in thread-local mode in the thread that captures, and invalidates the capture. What we do does not touch
the captured stream, so it is done in relaxed mode: a thread of ours for as long as it lives, one of the user's around
the call.
"""

from ncclpy.abi.driver cimport CU_STREAM_CAPTURE_MODE_RELAXED
from ncclpy.core.library cimport driver


cdef CUstreamCaptureMode relax() noexcept nogil:
    """Have CUDA take this thread's calls for safe, and return how it took them before."""
    cdef CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED
    if driver.cuThreadExchangeStreamCaptureMode != NULL:
        driver.cuThreadExchangeStreamCaptureMode(&mode)
    return mode


cdef void restore(CUstreamCaptureMode mode) noexcept nogil:
    if driver.cuThreadExchangeStreamCaptureMode != NULL:
        driver.cuThreadExchangeStreamCaptureMode(&mode)
