"""Communication streams: a pool for each device, whose streams all communicators of an owner share.

Sharing keeps the collectives of different communicators in the order of their launches on the device too. One
communicator that has several ranks on a device would get a stream for each.
"""

from ncclpy.abi.driver cimport CUcontext, CUresult, CUstream
from ncclpy.core.buffers cimport HOST_MEMORY, View, current_stream
from ncclpy.core.check cimport check_driver
from ncclpy.core.device cimport enter_device, leave_device
from ncclpy.core.library cimport driver, require_driver
from ncclpy.core.stream cimport Stream, as_stream
from ncclpy.engine.events cimport take_event
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


cdef int record_producer(Work work, const View* view, producer) except -1:
    """Record an event behind what produces the input; CPU memory is there already."""
    cdef CUstream stream = NULL
    cdef CUresult result
    cdef CUcontext saved
    if producer is not None:
        stream = as_stream(producer)
    elif view.device == HOST_MEMORY:
        return 0
    else:
        current_stream(view, work.device, &stream)
    work.ready = take_event(work.device, False)
    require_driver()
    saved = enter_device(work.device)
    result = driver.cuEventRecord(work.ready, stream)
    leave_device(saved)
    check_driver(result, b"cuEventRecord")
    return 0
