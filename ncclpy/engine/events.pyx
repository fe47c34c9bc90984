"""A pool of events for each device. Creating one costs as much as a launch; recording one again costs nothing more."""

from libcpp.vector cimport vector

from ncclpy.abi.driver cimport CU_EVENT_DISABLE_TIMING, CUcontext, CUresult
from ncclpy.core.check cimport check_driver
from ncclpy.core.device cimport enter_device, leave_device
from ncclpy.core.library cimport driver, require_driver

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
