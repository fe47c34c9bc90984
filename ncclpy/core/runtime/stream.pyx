"""Streams and events, and the arrays that are in use on them after a wait has ended early.

The thread that makes a call keeps its arrays alive while it waits. If the wait ends early, this module takes over the
arrays (`hold`) and keeps them until neither NCCL nor a device can access them any more, for good if necessary. Calls
that end normally do not use `hold`, and pay nothing for it.
"""

import os
import time
import weakref

from libc.stdint cimport uintptr_t

from ncclpy.abi.driver cimport (
    CUDA_ERROR_NOT_READY, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, CUDA_SUCCESS, CU_EVENT_DISABLE_TIMING,
    CU_EVENT_WAIT_DEFAULT, CU_STREAM_CAPTURE_STATUS_INVALIDATED, CU_STREAM_CAPTURE_STATUS_NONE, CU_STREAM_LEGACY,
    CU_STREAM_NON_BLOCKING, CU_STREAM_PER_THREAD, CUcontext, CUresult, CUstreamCaptureStatus,
)
from ncclpy.core.runtime.library cimport check_driver, driver, require_driver
from ncclpy.core.runtime.device cimport as_device, enter_device, leave_device
from ncclpy.core.runtime.wait cimport Call, as_timeout, begin_thread, deadline_after, wait_for_event, wait_for_stream

from ncclpy.errors import NcclTimeout, not_copied, seconds
from ncclpy.types import as_integer


# Functions that read the handle of a stream object, by exact type; filled when a type is first seen.
cdef dict _readers = {}


cdef CUstream as_stream(object stream) except? NULL:
    """Return the handle of a stream: an int, a `Stream`, or an object that `_reader_of` can read."""
    cdef object reader
    if type(stream) is int:
        return _from_int(stream)
    if type(stream) is Stream:
        return stream_handle_of(<Stream>stream)
    reader = _readers.get(type(stream))
    if reader is None:
        reader = _reader_of(stream)
        _readers[type(stream)] = reader
    return _from_int(int(reader(stream)))


cdef CUstream _from_int(object handle) except? NULL:
    try:
        return <CUstream><uintptr_t>handle
    except OverflowError:
        raise ValueError(f"stream: {handle} is not a stream handle: it lies outside the range of addresses") from None


cdef CUstream as_stream_of(object stream, int device) except? NULL:
    """Return the handle of a stream that must be on `device`; only for an ncclpy `Stream` the device is checked."""
    if type(stream) is Stream and (<Stream>stream).device != device:
        raise ValueError(f"stream: it is on device {(<Stream>stream).device}, this communicator on device {device}")
    return as_stream(stream)


cdef object _reader_of(object stream):
    """Return the function that reads the handle from objects of this type; no library is imported to find it."""
    kind = type(stream)
    if hasattr(kind, "cuda_stream"):  # torch: an attribute, cheaper than its protocol and older
        return lambda stream: stream.cuda_stream
    protocol = getattr(kind, "__cuda_stream__", None)
    if protocol is not None:
        if callable(protocol):
            return lambda stream: stream.__cuda_stream__()[1]
        return lambda stream: stream.__cuda_stream__[1]  # a property, as in early cuda.core
    if hasattr(kind, "ptr"):  # CuPy before it had the protocol
        return lambda stream: stream.ptr
    if hasattr(kind, "__index__") or (hasattr(kind, "__int__") and not hasattr(kind, "__float__")):
        return int  # numpy ints; cuda.bindings' CUstream and cudaStream_t; but no floats
    raise TypeError(
        f"stream: expected an int, ncclpy.Stream, a cuda.bindings handle or an object with __cuda_stream__, "
        f"got {kind.__module__}.{kind.__qualname__}"
    )


# Open `Stream` objects by handle: code that is given only a handle can keep the stream and see that it is closed.
cdef object _open = weakref.WeakValueDictionary()


cdef Stream owner_of(CUstream raw):
    """Return the `Stream` object of this handle; None if ncclpy has not made the stream, or if it was closed."""
    return _open.get(<uintptr_t>raw)


cdef CUstream stream_handle_of(Stream stream) except? NULL:
    """Return the CUstream of a `Stream`; raise ValueError if it is closed."""
    if stream.raw == NULL:
        raise ValueError("stream: this ncclpy.Stream is closed")
    require_driver()  # a forked child is refused here
    return stream.raw


cdef class Stream:
    """Stream(device=None, *, priority=0)
--

Own an ordered queue of work on a device (`cuStreamCreateWithPriority`).

    It does not synchronise with the legacy default stream.

    Parameters
    ----------
    device : int, optional
        The ordinal; the current device by default.
    priority : int, optional
        Lower numbers go first; the driver clamps it to the device's range.
    """

    def __init__(self, device=None, *, priority=0):
        cdef int ordinal = as_device(device)
        cdef int level = as_integer(priority, "priority")
        cdef CUresult result
        cdef CUcontext saved
        if self.raw != NULL:
            raise RuntimeError("a Stream is initialised once")
        saved = enter_device(ordinal)
        with nogil:
            result = driver.cuStreamCreateWithPriority(&self.raw, CU_STREAM_NON_BLOCKING, level)
        leave_device(saved)
        check_driver(result, b"cuStreamCreateWithPriority")
        self.device = ordinal
        _open[<uintptr_t>self.raw] = self

    @property
    def handle(self):
        """The `CUstream` as an int; it raises once the stream is closed."""
        return <uintptr_t>stream_handle_of(self)

    def __cuda_stream__(self):
        """Return ``(protocol version, handle)``, for other libraries."""
        return 0, <uintptr_t>stream_handle_of(self)

    def synchronize(self, timeout=None):
        """Wait until everything queued so far has run (`cuStreamQuery`); signal handlers run meanwhile.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait. After that `NcclTimeout` is raised, and queued work continues.
        """
        cdef double limit = as_timeout(timeout)
        raise_unless_done(
            wait_for_stream(stream_handle_of(self), deadline_after(limit)), b"cuStreamQuery", self, limit
        )

    def is_done(self):
        """Return whether everything queued so far has run (`cuStreamQuery`)."""
        cdef CUstream raw = stream_handle_of(self)
        cdef CUresult result
        with nogil:
            result = driver.cuStreamQuery(raw)
        if result == CUDA_ERROR_NOT_READY:
            return False
        check_driver(result, b"cuStreamQuery")
        return True

    def wait(self, Event event not None):
        """Let work queued from now on wait for `event`; the CPU does not wait (`cuStreamWaitEvent`)."""
        cdef CUstream raw = stream_handle_of(self)
        cdef CUevent handle = event_handle_of(event)
        with nogil:
            check_driver(driver.cuStreamWaitEvent(raw, handle, CU_EVENT_WAIT_DEFAULT), b"cuStreamWaitEvent")

    def record(self, Event event=None):
        """Record an event behind what is queued so far and return it.

        Parameters
        ----------
        event : Event, optional
            The event to record; by default a new one, without timing.
        """
        if event is None:
            event = Event(self.device)
        event.record(self)
        return event

    @property
    def closed(self):
        """Whether `close` was called."""
        return self.raw == NULL

    def close(self):
        """Destroy the stream; work already queued still runs (`cuStreamDestroy`)."""
        cdef CUstream raw = self.raw
        cdef CUresult result
        if raw == NULL:
            return
        self.raw = NULL
        _open.pop(<uintptr_t>raw, None)
        require_driver()
        with nogil:
            result = driver.cuStreamDestroy_v2(raw)
        check_driver(result, b"cuStreamDestroy_v2")

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def __dealloc__(self):
        # Destroying a stream is local and does not wait. After a fork the table is empty and nothing is called.
        if self.raw != NULL and driver.cuStreamDestroy_v2 != NULL:
            with nogil:
                driver.cuStreamDestroy_v2(self.raw)

    def __reduce__(self):
        raise not_copied(self, "make one where it is used, or pass its handle within this process")

    def __repr__(self):
        state = "closed" if self.raw == NULL else f"handle={<uintptr_t>self.raw:#x}"
        return f"<ncclpy.Stream device={self.device} {state}>"


cdef CUevent event_handle_of(Event event) except? NULL:
    """Return the CUevent of an `Event`; raise ValueError if it is closed."""
    if event.raw == NULL:
        raise ValueError("event: this ncclpy.Event is closed")
    require_driver()
    return event.raw


cdef class StreamPool:
    """Make streams for communication at their first use, and keep them.

    Parameters
    ----------
    high_priority : bool
        Whether the work of these streams has precedence over the work of other streams.
    """

    def __init__(self, bint high_priority=False):
        self.streams = {}
        self.high_priority = high_priority

    def of(self, int device, int index=0):
        """Return stream number `index` of a device."""
        cdef object found = self.streams.get((device, index))
        if found is None:
            # A lower number is a higher priority; the driver clamps it to its own range.
            found = Stream(device, priority=-100 if self.high_priority else 0)
            found = self.streams.setdefault((device, index), found)  # another thread may have added one meanwhile
        return found

    def close(self):
        """Drop the streams; each is destroyed when no operation in flight needs it any more."""
        self.streams = {}


cdef class Event:
    """Event(device=None, *, timing=False)
--

Own a mark in a stream's order (`cuEventCreate`).

    Parameters
    ----------
    device : int, optional
        The ordinal; the current device by default. An event is recorded on streams of its own device; streams of any
        device may wait for it.
    timing : bool, optional
        Whether `elapsed_time` can be called; without it recording is cheaper.
    """

    def __init__(self, device=None, *, bint timing=False):
        cdef int ordinal = as_device(device)
        cdef CUresult result
        cdef CUcontext saved
        if self.raw != NULL:
            raise RuntimeError("an Event is initialised once")
        saved = enter_device(ordinal)
        with nogil:
            result = driver.cuEventCreate(&self.raw, 0 if timing else CU_EVENT_DISABLE_TIMING)
        leave_device(saved)
        check_driver(result, b"cuEventCreate")
        self.device = ordinal
        self.timing = timing

    @property
    def handle(self):
        """The `CUevent` as an int; it raises once the event is closed."""
        return <uintptr_t>event_handle_of(self)

    def record(self, stream=None):
        """Record the event behind what `stream` has queued so far (`cuEventRecord`).

        Parameters
        ----------
        stream : optional
            Any stream object or handle; the legacy default stream of the event's device by default.
        """
        cdef CUevent event = event_handle_of(self)
        cdef CUstream raw = NULL if stream is None else as_stream(stream)
        cdef CUresult result
        cdef CUcontext saved = enter_device(self.device)
        with nogil:
            result = driver.cuEventRecord(event, raw)
        leave_device(saved)
        check_driver(result, b"cuEventRecord")

    def is_done(self):
        """Return whether the last record has been reached; an event never recorded is done (`cuEventQuery`)."""
        cdef CUevent event = event_handle_of(self)
        cdef CUresult result
        with nogil:
            result = driver.cuEventQuery(event)
        if result == CUDA_ERROR_NOT_READY:
            return False
        check_driver(result, b"cuEventQuery")
        return True

    def synchronize(self, timeout=None):
        """Wait until the last record has been reached (`cuEventQuery`); signal handlers run meanwhile.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait. After that `NcclTimeout` is raised, and queued work continues.
        """
        cdef double limit = as_timeout(timeout)
        raise_unless_done(wait_for_event(event_handle_of(self), deadline_after(limit)), b"cuEventQuery", self, limit)

    def elapsed_time(self, Event end not None):
        """Return the device time from this event to `end` in milliseconds (`cuEventElapsedTime`).

        Both events must have been made with ``timing=True`` and be done.
        """
        cdef float milliseconds = 0
        cdef CUevent first = event_handle_of(self), last = event_handle_of(end)
        if not self.timing or not end.timing:
            raise ValueError("elapsed_time needs events made with ncclpy.Event(timing=True)")
        with nogil:
            check_driver(driver.cuEventElapsedTime(&milliseconds, first, last), b"cuEventElapsedTime")
        return milliseconds

    @property
    def closed(self):
        """Whether `close` was called."""
        return self.raw == NULL

    def close(self):
        """Destroy the event (`cuEventDestroy`)."""
        cdef CUevent raw = self.raw
        if raw == NULL:
            return
        self.raw = NULL
        require_driver()
        with nogil:
            check_driver(driver.cuEventDestroy_v2(raw), b"cuEventDestroy_v2")

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def __dealloc__(self):
        if self.raw != NULL and driver.cuEventDestroy_v2 != NULL:
            with nogil:
                driver.cuEventDestroy_v2(self.raw)

    def __reduce__(self):
        raise not_copied(self, "make one where it is used, or pass its handle within this process")

    def __repr__(self):
        state = "closed" if self.raw == NULL else f"handle={<uintptr_t>self.raw:#x}"
        return f"<ncclpy.Event device={self.device} {state}>"


# The shortest wait for a device, in seconds: with a shorter timeout, such as 0, the waiting thread must still have the
# time to find that nothing is queued.
cdef double _MIN_DEVICE_WAIT = 0.01


cdef class DeviceWait(Call):

    cdef int make(self) except -1:
        cdef CUcontext saved = enter_device(self.device)
        cdef CUresult result
        with nogil:
            result = driver.cuCtxSynchronize()
        leave_device(saved)
        return check_driver(result, b"cuCtxSynchronize")


def synchronize(device=None, timeout=None):
    """Wait until everything queued on a device has run (`cuCtxSynchronize`); signal handlers run meanwhile.

    Parameters
    ----------
    device : int, optional
        The ordinal; the current device by default.
    timeout : float, optional
        Seconds to wait, at least 0.01. After that `NcclTimeout` is raised, and queued work continues.
    """
    cdef DeviceWait call = DeviceWait()
    cdef double limit = as_timeout(timeout)
    call.device = as_device(device)
    require_driver()
    call.start("ncclpy-wait")
    if not call.wait(deadline_after(max(limit, _MIN_DEVICE_WAIT))):
        raise_unless_done(<int>CUDA_ERROR_NOT_READY, b"cuCtxSynchronize", f"device {call.device}", limit)


cdef bint is_captured(CUstream stream, int device) except -1:
    """Return whether a stream is being captured. The legacy default stream is never captured."""
    cdef CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE
    cdef CUcontext saved = NULL
    cdef CUresult result
    cdef bint entered = stream == CU_STREAM_PER_THREAD  # it stands for a stream of the current context
    if stream == NULL or stream == CU_STREAM_LEGACY:
        return False
    require_driver()
    if entered:
        saved = enter_device(device)
    result = driver.cuStreamIsCapturing(stream, &status)
    if entered:
        leave_device(saved)
    if status == CU_STREAM_CAPTURE_STATUS_INVALIDATED:
        result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    check_driver(result, b"cuStreamIsCapturing")
    return status != CU_STREAM_CAPTURE_STATUS_NONE


cdef object event_behind(CUstream stream, int device):
    """Return an event recorded behind what a stream has queued.

    Return None if that is done, if the stream is being captured, or if the driver is not loaded or reports an error.
    """
    cdef CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE
    cdef CUcontext saved
    cdef CUresult result
    if driver.cuStreamIsCapturing == NULL:
        return None
    saved = enter_device(device)  # `stream` may be a default stream of this device
    with nogil:
        result = driver.cuStreamIsCapturing(stream, &status)
        if result == CUDA_SUCCESS and status == CU_STREAM_CAPTURE_STATUS_NONE:
            result = driver.cuStreamQuery(stream)
    leave_device(saved)
    if result != CUDA_ERROR_NOT_READY:
        return None
    event = Event(device)
    event.record(<uintptr_t>stream)
    return event


cdef int raise_unless_done(int result, const char* function, object what, double limit) except -1:
    """Raise for the result of a wait unless it is a success; NcclTimeout for CUDA_ERROR_NOT_READY."""
    if result == <int>CUDA_ERROR_NOT_READY:
        raise NcclTimeout(
            f"{what} was not done after {seconds(limit)}; only the wait has ended", function=function.decode()
        )
    return check_driver(<CUresult>result, function)


cdef list _held = []  # of (objects, until, what); each change is one step under the GIL
cdef bint _watching = False  # changed under the GIL, in one step with the check of `_held`


cdef int hold(list objects, list until, object what) except -1:
    """Keep `objects` until all of `until` (Calls and Events) are over."""
    global _watching
    waited_for = [each for each in until if not _is_over(each)]
    if not waited_for:
        return 0
    _held.append((objects, waited_for, what))
    if not _watching:
        _watching = True
        try:
            begin_thread(_watch)
        except RuntimeError:  # no more threads: the objects are held until a later `hold` starts a thread
            _watching = False
    return 0


def in_flight():
    """Return descriptions, one line each, of objects that NCCL or a device may still use after a wait ended early."""
    return [what for _, _, what in list(_held)]


cdef bint _is_over(object each) except -1:
    if isinstance(each, Call):
        return (<Call>each).done
    try:
        return (<Event?>each).is_done()
    except Exception:  # a failed device returns its error for every event, and runs nothing any more
        return True


cdef bint _is_needed() noexcept:
    """Return whether objects are still held; if not, the next `hold` starts a new thread."""
    global _watching
    _watching = len(_held) != 0
    return _watching


def _watch():
    """Release entries that are over, until none is left."""
    pause = 0.001
    while _is_needed():
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
        for entry in list(_held):
            if all([_is_over(each) for each in entry[1]]):
                _forget(entry)
                pause = 0.001
        entry = None  # release its objects now, not in the next round


cdef int _forget(tuple entry) except -1:
    """Remove an entry by identity: list.remove() would compare arrays."""
    cdef Py_ssize_t i
    for i in range(len(_held)):
        if _held[i] is entry:
            del _held[i]
            return 0
    return 0


def _forked():
    """Drop all entries: in the child nothing runs that could touch the memory, and the driver cannot be asked."""
    global _watching
    _watching = False
    del _held[:]


os.register_at_fork(after_in_child=_forked)
