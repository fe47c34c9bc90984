"""Communication streams: a pool for each device, whose streams all communicators of an owner share.

Sharing keeps the collectives of different communicators in the order of their launches on the device too. One
communicator that has several ranks on a device would get a stream for each.
"""

from ncclpy.abi.driver cimport CU_EVENT_WAIT_DEFAULT, CUDA_SUCCESS, CUcontext, CUevent, CUresult, CUstream
from ncclpy.core.buffers cimport HOST_MEMORY, View, current_stream
from ncclpy.core.check cimport check_driver
from ncclpy.core.device cimport enter_device, leave_device
from ncclpy.core.library cimport driver, require_driver
from ncclpy.core.stream cimport Stream, as_stream
from ncclpy.engine.fence cimport give_event, take_event
from ncclpy.engine.work cimport Work


cdef class StreamPool:
    """Communication streams, made on first use.

    Parameters
    ----------
    high_priority : bool
        Whether their work goes before that of other streams.
    """

    def __init__(self, bint high_priority=False):
        self.streams = {}
        self.high_priority = high_priority

    def of(self, int device, int index=0):
        """Return stream number `index` of a device."""
        cdef object found = self.streams.get((device, index))
        if found is None:
            # Lower numbers go first; the driver takes its own lowest for what is below it.
            found = Stream(device, priority=-100 if self.high_priority else 0)
            found = self.streams.setdefault((device, index), found)  # another thread may have been faster
        return found

    def close(self):
        """Let go of the streams; each is destroyed when nothing on its way needs it any more."""
        self.streams = {}


cdef bint find_producer(const View* view, int device, producer, CUstream* stream) except -1:
    """Find the stream that produces an input; False if there is none: CPU memory is there already."""
    if producer is not None:
        stream[0] = as_stream(producer)
        return True
    if view.device == HOST_MEMORY:
        return False
    current_stream(view, device, stream)
    return True


cdef int record_producer(Work work, const View* view, producer) except -1:
    """Record an event behind what produces the input, for the work's own stream to wait for."""
    cdef CUstream stream = NULL
    if find_producer(view, work.device, producer, &stream):
        record_behind(work, stream)
    return 0


cdef int record_behind(Work work, CUstream stream) except -1:
    work.producer, work.has_producer = stream, True
    work.ready = take_event(work.device, False)
    _record(work.device, work.ready, stream, NULL, False)
    return 0


cdef int wait_behind(CUstream waits, int device, CUstream stream) except -1:
    """Let a stream wait for what is on another one now."""
    cdef CUevent event = take_event(device, False)
    try:
        _record(device, event, stream, waits, True)
    finally:
        give_event(device, False, event)  # a wait that was enqueued does not mind that it is recorded again
    return 0


cdef int _record(int device, CUevent event, CUstream stream, CUstream waits, bint wait) except -1:
    cdef CUresult result
    require_driver()
    cdef CUcontext saved = enter_device(device)
    with nogil:
        result = driver.cuEventRecord(event, stream)
        if result == CUDA_SUCCESS and wait:
            result = driver.cuStreamWaitEvent(waits, event, CU_EVENT_WAIT_DEFAULT)
    leave_device(saved)
    check_driver(result, b"cuEventRecord")
    return 0
