from ncclpy.abi.driver cimport CUcontext, CUstreamCaptureMode


# Switch this thread to relaxed capture mode: its driver calls then invalidate no stream capture, not even one of its
# own. Return the previous mode, for `restore`.
cdef CUstreamCaptureMode relax() noexcept nogil
cdef void restore(CUstreamCaptureMode mode) noexcept nogil


# The calling thread's current device; 0 if it has no context.
cdef int current_device() except -2

# The primary context of a device, retained on first use.
cdef CUcontext context_of(int ordinal) except NULL

# The number of devices; the driver is asked only once.
cdef int known_devices() except -1

# The ordinal that an object stands for; None is the current device.
cdef int as_device(object device) except -2

# Make a device current; `leave_device` restores the previous context, which `enter_device` returns (it may be NULL).
cdef CUcontext enter_device(int ordinal) except? NULL
cdef int leave_device(CUcontext saved) except -1

# Make a device current in a thread that has no current device, for a call of NCCL. If `lend_device` returns True, the
# caller must call `take_device_back`, which leaves the thread without a device again. If it returns False, nothing was
# changed: the thread has a current device, or the device's context is not retained yet (`context_of`).
cdef bint lend_device(int ordinal) noexcept nogil
cdef void take_device_back() noexcept nogil

# As `enter_device` and `leave_device`, but without the GIL. `switch_device` returns whether the device is current.
cdef bint switch_device(int ordinal, CUcontext* saved) noexcept nogil
cdef void switch_back(CUcontext saved) noexcept nogil
