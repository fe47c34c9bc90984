from ncclpy.abi.driver cimport CUcontext, CUstreamCaptureMode


# From now on this thread's driver calls invalidate no stream capture, not even its own; returns the mode for
# `restore`.
cdef CUstreamCaptureMode relax() noexcept nogil
cdef void restore(CUstreamCaptureMode mode) noexcept nogil


cdef int current_device() except -2
cdef CUcontext context_of(int ordinal) except NULL
cdef int known_devices() except -1
cdef int as_device(object device) except -2
cdef CUcontext enter_device(int ordinal) except? NULL
cdef int leave_device(CUcontext saved) except -1
cdef bint lend_device(int ordinal) noexcept nogil
cdef void take_device_back() noexcept nogil
cdef bint switch_device(int ordinal, CUcontext* saved) noexcept nogil
cdef void switch_back(CUcontext saved) noexcept nogil
