from ncclpy.abi.driver cimport CUevent, CUstream
from ncclpy.core.runtime.wait cimport Call


# The CUDA handle of a stream that is given as an int, a `Stream`, or an object of another library. `as_stream_of`
# raises if an ncclpy `Stream` is not on `device`; for other objects the device is not known.
cdef CUstream as_stream(object stream) except? NULL
cdef CUstream as_stream_of(object stream, int device) except? NULL


cdef class Stream:
    cdef CUstream raw
    cdef readonly int device
    cdef object __weakref__


cdef class StreamPool:
    cdef dict streams
    cdef readonly bint high_priority


cdef class Event:
    cdef CUevent raw
    cdef readonly int device
    cdef readonly bint timing
    cdef object __weakref__


# A wait for everything that is queued on a device, in a thread of its own.
cdef class DeviceWait(Call):
    cdef int device


# The `Stream` object of a handle; None if ncclpy has not made the stream, or if it was closed.
cdef Stream owner_of(CUstream raw)

# Whether a stream is being captured into a graph; raises if the capture was invalidated.
cdef bint is_captured(CUstream stream, int device) except -1

# An event recorded behind what the stream has queued; None if all of that is done, if the stream is being captured, or
# if the driver is not loaded or reports an error.
cdef object event_behind(CUstream stream, int device)


# Keep objects until all of `until` are over: Calls that have returned, Events that are reached or about which the
# driver reports an error. If all are over already, nothing is kept. `what` describes the objects for `in_flight`.
cdef int hold(list objects, list until, object what) except -1
