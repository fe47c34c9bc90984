from ncclpy.abi.driver cimport CUevent, CUstream
from ncclpy.core.runtime.wait cimport Call


cdef CUstream as_stream(object stream) except? NULL
cdef CUstream as_stream_of(object stream, int device) except? NULL


cdef class Stream:
    cdef CUstream raw
    cdef readonly int device
    cdef object __weakref__


cdef class Event:
    cdef CUevent raw
    cdef readonly int device
    cdef readonly bint timing
    cdef object __weakref__


# A wait for everything that is queued on a device, in a thread of its own.
cdef class DeviceWait(Call):
    cdef int device


cdef Stream owner_of(CUstream raw)

# Whether a stream is being captured into a graph; it raises where that capture was invalidated.
cdef bint is_captured(CUstream stream, int device) except -1

# An event recorded behind what the stream has queued; None if that is done, or cannot be asked while it is captured.
cdef object event_behind(CUstream stream, int device)


# Keep objects until all of `until` are over: threads that have ended, Calls that have returned, Events that are
# reached. What is over already is not kept. `what` is for people.
cdef int hold(list objects, list until, object what) except -1
