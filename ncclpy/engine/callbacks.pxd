from cpython.ref cimport PyObject

from ncclpy.abi.locks cimport mutex_t


# Whether a key is of Python's own plain types, which run no code of users when hashed, compared or shown.
cdef bint is_plain(object value, int depth=*) noexcept


cdef class Message:
    cdef str before
    cdef object key
    cdef str after
    cdef str text


# A text with a key in it: at once if the key is plain, else a Message.
cdef object message(str before, object key, str after)

# A text around another one, which may be a Message.
cdef object around(str before, object words, str after)

# A text, which may be a Message, with another end.
cdef object ended_by(object words, cut, str after)

# An error with another sentence at its end, which only this error has: a copy, unless it says that already.
cdef object with_sentence(object error, str sentence)

# The same in place: for an error that only the caller has.
cdef int add_sentence(object error, str sentence) except -1

# What an error says, as a str or a Message.
cdef object words_of(object error)


# What rooms of the engine ask of those that are built on them. Each method is called with the GIL; its docstring says
# in which thread and under which lock.


# What the works of one launch report to.
cdef class Together:
    cdef list works  # that it keeps until they are done
    cdef PyObject* loose  # one that it knows and does not keep, or NULL
    cdef set more_loose  # the addresses of more of them, None if there are none

    cdef int settled(self, object work) except -1
    cdef int fail(self, object error) except -1
    cdef list members(self)
    cdef bint has_members(self) noexcept
    cdef int loosen(self, object work) except -1
    cdef int forget(self, object work) except -1
    cdef object cause_of(self, object error)
    cdef bint is_spared(self) noexcept


# Whose communicators a launch runs on.
cdef class LaunchOwner:
    cdef bint spares  # what fails is told alone: nothing is aborted
    cdef bint aborts  # it sees to the aborts itself, when the other ranks have heard, or does without
    cdef int launch_done(self, Together launch) except -1
    cdef int launch_failed(self, Together launch, object error) except -1


# The owner of sets of communicators.
cdef class SetOwner:
    cdef int set_made(self, LaunchOwner comm_set, list comms, object error) except -1
    cdef int set_lost(self, LaunchOwner comm_set) except -1


# What a work waits for before its launch.
cdef class Awaited:
    cdef str missing(self)
    cdef int may_wait(self) except -1


# What does the monitor's part in any thread, once the monitor thread has ended.
cdef class MonitorProxy:
    cdef int run_inline(self) except -1
    cdef int loosen(self, object work) except -1


cdef MonitorProxy monitor_proxy


# Stretches in which no code of users may run; with the GIL, and none of them may wait for another thread's Python.
cdef void begin_quiet() noexcept
cdef void end_quiet() noexcept

# Whether such a stretch is on, in any thread.
cdef bint is_quiet() noexcept


cdef class Lock:
    cdef mutex_t mutex

    cdef int enter(self) except -1
    cdef void leave(self) noexcept


# How often the monitor was to wake, the word on which it sleeps: wake_monitor() follows what is put where it looks.
cdef int wakeups
cdef int listening  # whether it does
cdef void wake_monitor() noexcept nogil
cdef void wait_for_wakeup(int seen, double seconds) noexcept nogil

# A sleep that wake_monitor() does not end, and what does.
cdef void idle_wait(double seconds) noexcept nogil
cdef void hurry_monitor() noexcept nogil

# Whether the monitor has the GIL and is at work.
cdef int attending

# The monitor tells of works with callbacks that are on their way, and when there are none any more.
cdef void expect() noexcept nogil
cdef void expect_none() noexcept nogil
cdef bint is_expecting() noexcept nogil

# When the monitor next looks after the executors.
cdef double attention


# A thread of an executor.
cdef class Member:
    cdef unsigned long thread
    cdef double since  # when it began with what it runs
    cdef object callback  # of the user that it is in
    cdef object work  # which it was called with
    cdef bint named  # in a warning


# A queue of tasks and the threads that run them.
cdef class Executor:
    cdef readonly str name
    cdef object queue
    cdef Member leading  # the one that takes tasks; the others sleep, or are in a task for long
    cdef list members
    cdef int word  # to sleep on
    cdef int idle
    cdef int asleep  # how many of these sleep deeply
    cdef bint called  # whether one is on its way
    cdef double called_at

    cdef int submit(self, object task) except -1
    cdef int look_after(self) except -1
    cdef double _grace(self) noexcept
    cdef int _call(self) except -1
    cdef void _rest(self, int seen, double seconds) noexcept nogil
    cdef int _serve(self, Member me) except -1
    cdef int run_here(self) except -1


# Runs the users' code: callbacks, warnings, finalisers.
cdef Executor user_executor

# Runs internal tasks that take Python: works that fail, timers.
cdef Executor internal_executor
cdef int look_after_executors() except -1

# Note that this thread begins with a callback of the user, or has come back from it.
cdef int begin_callback(object callback, object work) except -1
cdef int end_callback(object callback) except -1

# Before this thread waits: if it runs callbacks, another one goes on with them.
cdef int step_aside() except -1

# Show an exception that nobody can answer for.
cdef int tell() except -1
