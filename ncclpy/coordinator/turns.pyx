"""The steps of one process set, one after the other: by the thread that brings them, as long as none has to wait."""

import threading
import time
from collections import deque

cdef enum:
    _NOBODY = 0
    _HERE = 1  # who brought them
    _ASIDE = 2  # the queue's thread

# Seconds between two looks whether a step is ready, at first and in the end.
cdef double _SOON = 200e-6, _LATER = 5e-3


cdef class Turn:
    """One step."""

    cdef bint is_ready(self) except -1:
        """Return whether it can be taken without a wait for other ranks; it may wait a moment for that."""
        return True

    cdef int take(self) except -1:
        """Take it; it raises nothing."""
        raise NotImplementedError


cdef class Turns:
    """A queue of steps that are taken in their order, by one thread at a time.

    To wake a thread costs more than a launch. So who brings steps takes them himself, up to the first that would have
    to wait, for a communicator that is being made, say: from there on a thread of the queue's own goes on, and other
    sets' steps are not held up.

    Who takes the steps is decided under the GIL, by what runs no code of Python's. The condition is there to sleep by.

    Parameters
    ----------
    name : str
        Of its thread.
    trouble : callable
        ``trouble(error)`` is called with what a step raises, which is a defect; the others are taken all the same.
    """

    def __init__(self, str name not None, trouble):
        self.name, self.trouble = name, trouble
        self.steps = deque()
        self.changed = threading.Condition(threading.Lock())
        self.thread = None
        self.taker, self.ended = _NOBODY, False

    def __len__(self):
        """Return how many steps are not taken."""
        return len(self.steps)

    cdef int add(self, list steps) except -1:
        """Take steps here, or leave them to the queue's thread."""
        cdef Turn step
        self.steps.extend(steps)
        if self.taker != _NOBODY:
            return 0
        self.taker = _HERE
        while True:
            if not self.steps:
                self.taker = _NOBODY
                return 0
            step = self.steps[0]
            if not self._is_ready(step):
                return self._leave_to_thread()
            self.steps.popleft()
            self._take(step)

    cdef bint _is_ready(self, Turn step) except -1:
        try:
            return step.is_ready()
        except BaseException as error:
            self.trouble(error)
            return True  # it is not to hold up the others, whose ends these may be

    cdef int _take(self, Turn step) except -1:
        try:
            step.take()
        except BaseException as error:
            self.trouble(error)
        return 0

    cdef int put_first(self, Turn step) except -1:
        """Have a step be taken next; from within a step."""
        self.steps.appendleft(step)
        return 0

    cdef int _leave_to_thread(self) except -1:
        with self.changed:
            self.taker = _ASIDE
            if self.thread is None:
                self.thread = threading.Thread(target=self._go_on, name=self.name, daemon=True)
                self.thread.start()
            else:
                self.changed.notify_all()
        return 0

    def _go_on(self):
        cdef Turn step
        while True:
            with self.changed:
                while self.taker != _ASIDE:
                    if self.ended:
                        return
                    self.changed.wait()
            while True:
                with self.changed:
                    if not self.steps:
                        self.taker = _NOBODY
                        self.changed.notify_all()
                        break
                step = self.steps[0]
                self._wait_for(step)
                self.steps.popleft()
                self._take(step)

    cdef int _wait_for(self, Turn step) except -1:
        """Wait until a step waits for nobody: a driver's call that does holds up what others call meanwhile."""
        cdef double pause = _SOON
        while not self._is_ready(step):
            time.sleep(pause)
            pause = min(2 * pause, _LATER)
        return 0

    def end(self, double timeout):
        """Wait until all that was added is taken, and end the thread; return whether that is so in time.

        By who brings the steps.
        """
        with self.changed:
            self.ended = True
            self.changed.notify_all()
            return self.changed.wait_for(lambda: self.taker == _NOBODY, timeout)
