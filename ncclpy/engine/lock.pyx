"""A lock under which no code of users runs.

A key's ``__eq__`` or a finaliser may take a lock of its own, which another thread holds while it waits for ours: both
would wait for ever. What runs in a *quiet stretch*, under a `Lock` or in the monitor, is compiled code only. It
compares, hashes and shows nothing of a user's class, calls nothing written in Python, and hands on, instead of
dropping, what may be the last reference to an object of the user. One thing remains: up to Python 3.11 any allocation
of a container may start a collection of garbage, whose finalisers are anybody's, and from 3.12 on any bytecode may.
The collector is off for the length of the stretch.
"""

import os

from ncclpy.abi.locks cimport (
    DEBUG_LOCKS,
    LOCK_MANAGER,
    lock_wanted,
    mutex_destroy,
    mutex_init,
    mutex_lock,
    mutex_trylock,
    mutex_unlock,
)

cdef extern from "Python.h":
    int PyGC_Disable()
    int PyGC_Enable()

cdef int _depth = 0  # of stretches, in all threads: one may give the GIL up, to make an event for instance
cdef bint _collects = False  # whether the collector was on before the first of them


cdef void begin_quiet() noexcept:
    """Begin a stretch in which no code of users may run."""
    global _depth, _collects
    if _depth == 0:
        _collects = PyGC_Disable()
    _depth += 1


cdef bint is_quiet() noexcept:
    return _depth > 0


cdef void end_quiet() noexcept:
    global _depth
    _depth -= 1
    if _depth == 0 and _collects:
        PyGC_Enable()


cdef class Lock:
    """A lock that cannot be entered twice; while it is held no code of users may run.

    Nothing waits for it while it holds the GIL.
    """

    def __cinit__(self):
        mutex_init(&self.mutex, LOCK_MANAGER)

    def __dealloc__(self):
        mutex_destroy(&self.mutex)

    def __enter__(self):
        self.enter()

    def __exit__(self, *exception):
        self.leave()

    cdef int enter(self) except -1:
        if DEBUG_LOCKS:  # also where nobody has to be waited for
            with nogil:
                lock_wanted(LOCK_MANAGER, &self.mutex)
        if mutex_trylock(&self.mutex) != 0:
            with nogil:
                mutex_lock(&self.mutex)
        begin_quiet()
        return 0

    cdef void leave(self) noexcept:
        end_quiet()
        mutex_unlock(&self.mutex)


def _forked():
    """In the child the threads that were in a stretch do not exist."""
    global _depth
    if _depth and _collects:
        PyGC_Enable()
    _depth = 0


os.register_at_fork(after_in_child=_forked)
