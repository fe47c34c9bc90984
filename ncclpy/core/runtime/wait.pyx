"""Waiting: the clock, deadlines, and waits that a signal handler or a deadline can end.

A wait for a device polls in slices, between which signal handlers run. A call of NCCL that can block for long is made
in a thread of its own, and the caller waits for that thread in slices.
"""

import _thread
import atexit
import os
import threading
import time

from cpython.exc cimport PyErr_CheckSignals
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, nanosleep, timespec

from ncclpy.abi.driver cimport CUDA_ERROR_NOT_READY, CUDA_SUCCESS
from ncclpy.core.runtime.device cimport relax
from ncclpy.core.runtime.library cimport driver, stream_wait

cdef extern from "pthread.h" nogil:
    unsigned long pthread_self()
    int pthread_setname_np(unsigned long, const char*)

cdef extern from "<time.h>" nogil:
    int CLOCK_MONOTONIC_COARSE

cdef extern from "sched.h" nogil:
    int sched_yield()

cdef extern from *:
    """
    #include <stdio.h>
    #include <stdlib.h>
    #include <unistd.h>

    /* Number of threads that are inside a call of NCCL which may never return. */
    static int ncclpy_calls = 0;
    /* The exit status that replaces 0, see exit_with(). */
    static int ncclpy_status = 0;

    /* Ends the process at once if such a thread still runs: destructors of NCCL and CUDA would free memory that the
       thread uses. Also replaces the exit status 0 by ncclpy_status. */
    static void ncclpy_leave_at_once(int status, void* unused) {
      (void)unused;
      if (status == 0) status = ncclpy_status;
      if (__atomic_load_n(&ncclpy_calls, __ATOMIC_SEQ_CST) == 0) {
        if (status == ncclpy_status && status != 0) exit(status); /* glibc runs the handlers that are left */
        return;
      }
      fflush(stdout); /* not all streams: a thread that reads stdin holds the lock of stdin */
      fflush(stderr);
      _exit(status);
    }

    /* Registers ncclpy_leave_at_once. Called at the end of Python: exit handlers run in reverse order, so this one
       runs before the destructors that were registered earlier. */
    static void ncclpy_leave_before_destructors(void) {
    #ifdef __GLIBC__
      on_exit(ncclpy_leave_at_once, NULL);
    #else
      (void)ncclpy_leave_at_once;
    #endif
    }
    """
    int ncclpy_calls
    int ncclpy_status
    void ncclpy_leave_before_destructors()

cdef extern from *:
    """
    #include <limits.h>

    static unsigned long ncclpy_this_thread(void) {
      /* The TLS model initial-exec saves a call of the loader. Because ncclpy is loaded by dlopen, variables of this
         model must be few and small. */
      static __thread unsigned long number __attribute__((tls_model("initial-exec"))) = 0;
      if (__builtin_expect(number == 0, 0)) {
        PyThreadState* state = PyGILState_GetThisThreadState();
        if (state == NULL) return ULONG_MAX; /* Python does not know the thread */
        number = (unsigned long)PyThreadState_GetID(state);
      }
      return number;
    }

    /* Finds a thread by its number or, if that is 0, by its ident. The GIL keeps the thread from ending. */
    static PyThreadState* ncclpy_find_thread(unsigned long number, unsigned long ident) {
      PyThreadState* state = PyInterpreterState_ThreadHead(PyInterpreterState_Get());
      for (; state != NULL; state = PyThreadState_Next(state))
        if (number != 0 ? (unsigned long)PyThreadState_GetID(state) == number : state->thread_id == ident) break;
      return state;
    }

    /* Returns a new reference to the frame that a thread executes, or NULL. The garbage collector is off meanwhile, so
       no finaliser runs here, and no other thread can leave its frame. */
    static PyObject* ncclpy_frame_of(unsigned long ident) {
      int was_enabled = PyGC_Disable();
      PyThreadState* state = ncclpy_find_thread(0, ident);
      PyObject* frame = state == NULL ? NULL : (PyObject*)PyThreadState_GetFrame(state);
      if (was_enabled) PyGC_Enable();
      return frame;
    }
    """
    ctypedef struct PyThreadState:
        unsigned long thread_id
    unsigned long ncclpy_this_thread() nogil
    PyThreadState* ncclpy_find_thread(unsigned long number, unsigned long ident)
    unsigned long PyThreadState_GetID(PyThreadState*)
    int PyThreadState_SetAsyncExc(unsigned long ident, PyObject* kind)
    PyObject* ncclpy_frame_of(unsigned long ident)

cdef extern from * nogil:
    int __atomic_add_fetch(int*, int, int)
    const int __ATOMIC_SEQ_CST

# NULL, CU_STREAM_LEGACY and CU_STREAM_PER_THREAD.
cdef enum:
    _LAST_DEFAULT = 2

# Number of threads that were started and do not run yet; changed with the GIL.
cdef int _starting = 0

FOREVER = float("inf")
LEAVE = -1.0
SLICE = 0.1


cdef double now() noexcept nogil:
    """Return the monotonic clock in seconds."""
    cdef timespec t
    clock_gettime(CLOCK_MONOTONIC, &t)
    return t.tv_sec + t.tv_nsec * 1e-9


cdef double coarse_now() noexcept nogil:
    """Return the monotonic clock, some milliseconds late at most, at a quarter of the cost of `now`."""
    cdef timespec t
    clock_gettime(CLOCK_MONOTONIC_COARSE, &t)
    return t.tv_sec + t.tv_nsec * 1e-9


cdef double as_timeout(object timeout) except? -2.0:
    """Return a timeout in seconds; None is FOREVER."""
    if timeout is None:
        return FOREVER
    cdef double seconds
    try:
        seconds = timeout
    except TypeError:
        raise TypeError(f"timeout: expected seconds >= 0 or None, got {timeout!r}") from None
    except OverflowError:  # an int that is no float any more
        return FOREVER if timeout > 0 else as_timeout(-1)
    if not seconds >= 0:
        raise ValueError(f"timeout: expected seconds >= 0 or None, got {timeout!r}")
    return seconds


cdef double deadline_after(double timeout) noexcept nogil:
    """Return the moment at which a wait of `timeout` seconds that starts now is over."""
    return FOREVER if timeout == FOREVER else now() + timeout


cdef void pause(double waited) noexcept nogil:
    """Yield during the first millisecond of a wait; after that sleep for a hundredth of the time waited, at most 1 ms.

    So a wait ends late by at most 1% of its length and the time that the system adds to a sleep (50 us). Sleeps for a
    tenth of the time waited, from 0.2 ms on, cost 2 to 8% in benchmarks that wait for several operations together.
    """
    cdef timespec t
    if waited < 1e-3:
        sched_yield()
        return
    t.tv_sec = 0
    t.tv_nsec = 1_000_000 if waited > 0.1 else <long>(waited * 1e7)
    nanosleep(&t, NULL)


cdef CUresult await_stream(CUstream stream, Tick tick, void* argument) noexcept nogil:
    """Wait until a stream has run dry."""
    cdef CUresult result
    cdef double started, due, seconds
    if stream_wait != NULL:  # the host engine: the waiting thread does the work
        return stream_wait(stream, tick, argument)
    started = due = now()
    while True:
        result = driver.cuStreamQuery(stream)
        if result != CUDA_ERROR_NOT_READY:
            return result
        if now() >= due:
            seconds = tick(argument)
            if seconds < 0:
                return result
            due = now() + seconds
        pause(now() - started)


cdef bint has_drained(CUstream stream) noexcept nogil:
    return <size_t>stream > _LAST_DEFAULT and driver.cuStreamQuery(stream) == CUDA_SUCCESS


ctypedef CUresult (*Ask)(void*) noexcept nogil


cdef CUresult _ask_stream(void* stream) noexcept nogil:
    return driver.cuStreamQuery(<CUstream>stream)


cdef CUresult _ask_event(void* event) noexcept nogil:
    return driver.cuEventQuery(<CUevent>event)


cdef int _poll(Ask ask, void* what, double deadline) except? -1:
    """Call `ask` until its result is not CUDA_ERROR_NOT_READY, or the deadline has passed."""
    cdef CUresult result
    cdef double started = now(), until
    while True:
        until = min(now() + SLICE, deadline)
        with nogil:
            result = ask(what)
            while result == CUDA_ERROR_NOT_READY and now() < until:
                pause(now() - started)
                result = ask(what)
        if result != CUDA_ERROR_NOT_READY or now() >= deadline:
            return <int>result
        PyErr_CheckSignals()


cdef int wait_for_stream(CUstream stream, double deadline) except? -1:
    return _poll(_ask_stream, <void*>stream, deadline)


cdef int wait_for_event(CUevent event, double deadline) except? -1:
    return _poll(_ask_event, <void*>event, deadline)


cdef void name_this_thread(const char* name) noexcept nogil:
    pthread_setname_np(pthread_self(), name)


cdef unsigned long this_thread() noexcept nogil:
    return ncclpy_this_thread()


def number_of_this_thread():
    """Return `this_thread` for Python code."""
    return ncclpy_this_thread()


def number_of_thread(unsigned long ident):
    """Return the number of the thread that has an ident of `threading`, 0 if there is none."""
    cdef PyThreadState* state = ncclpy_find_thread(0, ident)
    return 0 if state == NULL else PyThreadState_GetID(state)


def frame_of_thread(unsigned long ident):
    """Return the frame that a thread executes, None if there is no such thread.

    `sys._current_frames` may deadlock on Python 3.11: it holds CPython's lock of all threads while it makes frames,
    which can start the garbage collector, and a finaliser lets another thread run that waits for the lock.
    """
    cdef PyObject* frame = ncclpy_frame_of(ident)
    if frame == NULL:
        return None
    found = <object>frame
    Py_DECREF(found)  # the call has returned a new reference
    return found


def set_exception(unsigned long number, object kind):
    """Set the asynchronous exception of a thread, or clear it if `kind` is None; return whether the thread was found.

    The GIL is held meanwhile: the thread cannot end, and no other thread can get its ident.
    """
    cdef PyThreadState* state = ncclpy_find_thread(number, 0)
    if state == NULL:
        return False
    return PyThreadState_SetAsyncExc(state.thread_id, NULL if kind is None else <PyObject*>kind) != 0


cdef int begin_thread(object function) except -1:
    """Start a thread in one step. The end of the process waits, for up to a second, until every started thread runs.

    When Python finalizes, it frees objects that a new thread reads first; threads that already run are stopped safely.
    """
    global _starting
    _starting += 1
    try:
        _thread.start_new_thread(_begin, (function,))
    except BaseException:
        _starting -= 1
        raise
    return 0


def _begin(function):
    global _starting
    _starting -= 1
    function()


@atexit.register
def _end_of_process():
    cdef double end = now() + 1.0
    while _starting > 0 and now() < end:
        time.sleep(0.0005)
    ncclpy_leave_before_destructors()


def exit_with(int status):
    """Have the process end with this status instead of 0; to be called before Python ends. This needs glibc."""
    global ncclpy_status
    ncclpy_status = status


def _forked():
    global _starting, ncclpy_calls, ncclpy_status
    _starting = ncclpy_calls = ncclpy_status = 0


os.register_at_fork(after_in_child=_forked)


cdef class Call:
    """A call in a thread of its own, which is left behind if no caller waits for it any longer."""

    def __cinit__(self):
        self.ended = threading.Lock()

    cdef int make(self) except -1:
        raise NotImplementedError

    cdef int start(self, str name) except -1:
        """Start the thread. Either the thread runs or this raises; no signal handler can raise in between.

        (Thread.start() of `threading` waits for its thread: Ctrl-C may end it without telling whether the thread
        runs.)
        """
        self.ended.acquire()
        self.name = name.encode()
        try:
            begin_thread(self._run)
        except BaseException:
            self.ended.release()
            raise
        return 0

    cdef int run_here(self) except -1:
        """Make the call in this thread, where it may block: for a caller that could start no other thread."""
        self.ended.acquire()
        self._make()
        return 0

    def _run(self):
        name_this_thread(self.name)
        relax()
        self._make()

    def _make(self):
        if not self.is_service:
            __atomic_add_fetch(&ncclpy_calls, 1, __ATOMIC_SEQ_CST)
        try:
            self.make()
        except BaseException as error:  # `wait` raises it
            self.failure = error
        if not self.is_service:
            __atomic_add_fetch(&ncclpy_calls, -1, __ATOMIC_SEQ_CST)
        self.done = True
        self.ended.release()

    cdef bint wait(self, double deadline) except -1:
        """Return whether the call has ended by the deadline, and raise its exception, if it raised one."""
        # A signal that arrives while Python waits for the lock ends that wait at once; a signal that arrived just
        # before does not, so Python waits in slices.
        while True:
            PyErr_CheckSignals()
            if self.ended.acquire(timeout=max(0.0, min(deadline - now(), SLICE))):
                break
            if now() >= deadline:
                return False
        self.ended.release()
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        return True
