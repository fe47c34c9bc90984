from ncclpy.abi.driver cimport CUstreamCaptureMode


# From here on this thread's calls of the driver disturb no capture, its own neither; returns what `restore` takes.
cdef CUstreamCaptureMode relax() noexcept nogil
cdef void restore(CUstreamCaptureMode mode) noexcept nogil
