"""What is in flight keeps its memory: the one owner of arrays that somebody may still touch.

Whoever makes a call holds its arrays while it waits. A wait that ends early hands them over to this module, which
keeps them until neither NCCL nor a device can reach them any more, and for good where that never comes. In the steady
state nothing comes here, so that calls pay nothing for it.
"""

import os
import time

from ncclpy.core.stream cimport Event
from ncclpy.core.wait cimport Call, begin_thread

cdef list _held = []  # of (objects, until, what); changed under the GIL only, in one step each
cdef bint _watching = False  # changed under the GIL only, in one step with the last look at what is held


cdef int hold(list objects, list until, object what) except -1:
    """Keep `objects` until all of `until` are over."""
    global _watching
    waited_for = [each for each in until if not _is_over(each)]
    if not waited_for:
        return 0
    _held.append((objects, waited_for, what))
    if not _watching:
        _watching = True
        try:
            begin_thread(_watch)
        except RuntimeError:  # no more threads: what is held stays so until the next one comes here
            _watching = False
    return 0


def in_flight():
    """Return what is kept since a wait for it ended early, a line each, for people."""
    return [what for _, _, what in list(_held)]


cdef bint _is_over(object each) except -1:
    if isinstance(each, Call):
        return (<Call>each).done
    try:
        return (<Event?>each).is_done()
    except Exception:  # a device that has failed says so of every event, and runs nothing any more
        return True


cdef bint _is_needed() noexcept:
    """Return whether something is held still; whoever holds something next starts the watch anew, if not."""
    global _watching
    _watching = len(_held) != 0
    return _watching


def _watch():
    """Let go of what is over, until nothing is left."""
    pause = 0.001
    while _is_needed():
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
        for entry in list(_held):
            if all([_is_over(each) for each in entry[1]]):
                _forget(entry)
                pause = 0.001
        entry = None  # let go of here, and not when the next one is looked at


cdef int _forget(tuple entry) except -1:
    """Take an entry away, by what it is: list.remove() would compare arrays."""
    cdef Py_ssize_t i
    for i in range(len(_held)):
        if _held[i] is entry:
            del _held[i]
            return 0
    return 0


def _forked():
    """In the child nothing runs that could touch the memory, and nothing can be asked."""
    global _watching
    _watching = False
    del _held[:]


os.register_at_fork(after_in_child=_forked)
