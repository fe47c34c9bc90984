"""Events of streams, and fences between a producer's stream and an operation's.

A kernel of NCCL that sees its communicator's abort flag leaves its wait, and passes on to the next rank what it has. So
a rank whose neighbour aborts sees its own operation end like any other, with wrong data. Where ranks have a channel
beside NCCL they therefore abort in two steps: first all hear that the communicator ends, and each stops to believe ends
that it sees from then on; only then does a rank abort (docs/guides/failures.md). A communicator
without such a channel is always believed.

A process that stands still (SIGSTOP, a machine that sleeps) hears nothing, and the others do not wait for it for ever.
When it goes on it believes nothing before it has asked.
"""

import weakref

from libcpp.vector cimport vector

from ncclpy.abi.driver cimport CU_EVENT_DISABLE_TIMING, CUcontext, CUresult
from ncclpy.core.runtime.library cimport check_driver, driver, require_driver
from ncclpy.core.runtime.device cimport enter_device, leave_device
from ncclpy.core.handles.handle cimport BELIEVED, FENCED, Handle
from ncclpy.core.runtime.wait cimport FOREVER
from ncclpy.engine.callbacks cimport errands, ring
from ncclpy.engine.native cimport add, load, now


# By twice the device's ordinal, plus one for those that measure time. The GIL guards them.
cdef vector[vector[CUevent]] _free


cdef CUevent take_event(int device, bint timing) except NULL:
    """Return an event that nobody uses; it may still carry what it was recorded for last."""
    cdef size_t index = 2 * device + timing
    cdef CUevent event = NULL
    cdef CUresult result
    cdef CUcontext saved
    if index < _free.size() and _free[index].size():
        event = _free[index].back()
        _free[index].pop_back()
        return event
    require_driver()
    saved = enter_device(device)
    with nogil:
        result = driver.cuEventCreate(&event, 0 if timing else CU_EVENT_DISABLE_TIMING)
    leave_device(saved)
    check_driver(result, b"cuEventCreate")
    return event


cdef int give_event(int device, bint timing, CUevent event) except -1:
    """Put an event back. The pool never shrinks: its size is the most that was in flight."""
    cdef size_t index = 2 * device + timing
    if event == NULL:
        return 0
    if index >= _free.size():
        _free.resize(index + 1)
    _free[index].push_back(event)
    return 0


# Other ranks wait for a silent rank for a second at least. A process that was stopped for half of that asks the store.
cdef double _STILL = 0.5

# How often the monitor has a turn, also where nothing is in flight: what is launched after a stop may have ended during it.
cdef double _TURNS = 0.2
cdef int stops = 0
cdef double _turn = 0  # when the monitor has run last; 0 while no communicator needs that
cdef int _told = 0
cdef object _listeners = weakref.WeakSet()


cdef bint is_doubted(Handle handle) noexcept nogil:
    if handle.fenced:  # another rank of this process was aborted: between those no store is needed
        return True
    if handle.contact == BELIEVED:
        return False
    if handle.contact == FENCED:
        return True
    note_turn(now())
    return handle.contact != load(&stops)


cdef void note_turn(double moment) noexcept nogil:
    global _turn
    if _turn == 0:  # no communicator needs it
        return
    if moment - _turn > _STILL:
        add(&stops, 1)
        ring()
    _turn = moment


cdef double next_turn() noexcept nogil:
    return _turn + _TURNS if _turn != 0 else FOREVER


cdef int tell_of_stops() except -1:
    global _told
    if load(&stops) == _told:
        return 0
    _told = load(&stops)
    for listener in list(_listeners):  # each by itself: a store may not answer
        errands.give(listener.ask_after_stop)
    return 0


cdef int fence(Handle handle) except -1:
    handle.contact = FENCED
    return 0


cdef int believe(Handle handle, int seen) except -1:
    if handle.contact != FENCED:
        handle.contact = seen
    return 0


def listen(listener):
    """Have ``listener.ask_after_stop()`` called, in a thread for errands, when the process has stood still."""
    global _turn
    if _turn == 0:
        _turn = now()
        ring()
    _listeners.add(listener)
