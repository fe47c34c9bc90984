"""What wakes the thread that writes dumps: whoever calls `ring`, and SIGUSR2.

Python runs its handlers of signals in the main thread alone, once that comes back to Python, which it does not while it
is stuck in a call. This one is C: it counts, and wakes a thread of ours.
"""

from ncclpy.engine.native cimport add, load, sleep_on, wake

cdef extern from * nogil:
    """
    #include <errno.h>
    #include <signal.h>
    #include <string.h>

    #include "ncclpy/engine/native.h"

    static int ncclpy_bell = 0;
    static int ncclpy_signals = 0;

    static void ncclpy_on_signal(int number) {
      int saved = errno;
      (void)number;
      ncclpy_add(&ncclpy_signals, 1);
      ncclpy_add(&ncclpy_bell, 1);
      ncclpy_wake(&ncclpy_bell);
      errno = saved;
    }

    /* Returns 1, 0 if somebody handles or ignores the signal already, or -1. */
    static int ncclpy_take_signal(int number) {
      struct sigaction there, ours;
      if (sigaction(number, NULL, &there) != 0) return -1;
      if (there.sa_flags & SA_SIGINFO || there.sa_handler != SIG_DFL) return 0;
      memset(&ours, 0, sizeof ours);
      ours.sa_handler = ncclpy_on_signal;
      ours.sa_flags = SA_RESTART;
      sigemptyset(&ours.sa_mask);
      return sigaction(number, &ours, NULL) == 0 ? 1 : -1;
    }
    """
    int ncclpy_bell
    int ncclpy_signals
    int ncclpy_take_signal(int number)


def ring():
    """Wake who waits, or have them not begin to."""
    add(&ncclpy_bell, 1)
    wake(&ncclpy_bell)


def rung():
    """Return how often it was rung, for `wait`."""
    return load(&ncclpy_bell)


def signals():
    """Return how many signals have come."""
    return load(&ncclpy_signals)


def wait(int seen, double seconds):
    """Sleep for so many seconds, until it was rung more often than `seen`."""
    with nogil:
        sleep_on(&ncclpy_bell, seen, seconds)


def take_signal(int number):
    """Have a signal ring from now on; return whether it does: not if somebody handles or ignores it already."""
    cdef int taken = ncclpy_take_signal(number)
    if taken < 0:
        raise ValueError(f"signal {number} cannot be handled")
    return taken == 1
