from cpython.ref cimport PyObject

from ncclpy.abi.locks cimport mutex_t


# Whether a key consists of Python's own plain types only, with tuples nested at most `depth` deep: hashing, comparing
# or showing such a key runs no code of users.
cdef bint is_plain(object value, int depth=*) noexcept


cdef class LazyText:
    cdef str before
    cdef object key
    cdef str after
    cdef str text


# A text with a key in it: a str if the key is plain, else a LazyText.
cdef object message(str before, object key, str after)

# The text `before + words + after`; a LazyText if `words` is one.
cdef object enclosed(str before, object words, str after)

# A text with another end: `cut` is called with the text, or with the part behind the key of a LazyText, and returns it
# without the old end; then `after` is appended.
cdef object with_end(object words, cut, str after)

# A copy of an error with another sentence at its end; the error itself if the sentence is None or cannot be added (the
# error has it already, or is of a class that cannot be copied here).
cdef object with_sentence(object error, str sentence)

# Add a sentence, if that is possible, to the end of an error in place; only the caller may refer to the error.
cdef int add_sentence(object error, str sentence) except -1

# What an error says, as a str or a LazyText.
cdef object words_of(object error)


# Interfaces by which modules call modules above them. Each method is called with the GIL; its docstring says in which
# thread and under which locks.


# What the works of one launch report to.
cdef class LaunchGroup:
    cdef list works  # works with a reference each; a settled work stays until all are settled
    cdef PyObject* weak_work  # address of one further work, without a reference, or NULL
    cdef set more_weak_works  # addresses of more such works, None if there are none

    cdef int settled(self, object work) except -1
    cdef int fail(self, object error) except -1
    cdef list members(self)
    cdef bint has_members(self) noexcept
    cdef int hold_weakly(self, object work) except -1
    cdef int forget(self, object work) except -1
    cdef object cause_of(self, object error)
    cdef bint is_report_only(self) noexcept


# The owner of the communicators that a launch runs on.
cdef class LaunchOwner:
    cdef bint report_only  # a failure is only reported: nothing is aborted
    cdef bint self_aborting  # the owner, not the launch, aborts: after the other ranks have been told of the end
    cdef int launch_done(self, LaunchGroup launch) except -1
    cdef int launch_failed(self, LaunchGroup launch, object error) except -1


# The owner of sets of communicators (`CommunicatorSet`).
cdef class SetOwner:
    cdef int set_made(self, LaunchOwner comm_set, list comms, object error) except -1
    cdef int set_lost(self, LaunchOwner comm_set) except -1


# What a work waits for before its launch.
cdef class Awaited:
    cdef str missing(self)
    cdef int may_wait(self) except -1


# Runs the monitor's work in the calling thread, once the monitor thread has ended.
cdef class MonitorProxy:
    cdef int run_inline(self) except -1
    cdef int forget_unlaunched(self, object work) except -1


cdef MonitorProxy monitor_proxy


# Begin and end a quiet stretch, in which no code of users may run. Both need the GIL. A quiet stretch never waits for
# another thread's Python code.
cdef void begin_quiet() noexcept
cdef void end_quiet() noexcept

# Whether any thread is in a quiet stretch.
cdef bint is_quiet() noexcept


cdef class Lock:
    cdef mutex_t mutex

    cdef int enter(self) except -1
    cdef void leave(self) noexcept


# A count of wake-ups, the word on which the monitor sleeps. After a change of anything that the monitor reads,
# wake_monitor() is called.
cdef int wakeups
cdef int listening  # whether the monitor sleeps on `wakeups`
cdef void wake_monitor() noexcept nogil
cdef void wait_for_wakeup(int seen, double seconds) noexcept nogil

# A sleep of the monitor that wake_monitor() does not end; hurry_monitor() does.
cdef void idle_wait(double seconds) noexcept nogil
cdef void hurry_monitor() noexcept nogil

# Whether the monitor has the GIL and is working.
cdef int monitor_has_gil

# Called by the monitor: works with callbacks are in flight (`expect_callbacks`), or no longer (`expect_no_callbacks`).
cdef void expect_callbacks() noexcept nogil
cdef void expect_no_callbacks() noexcept nogil
cdef bint expects_callbacks() noexcept nogil

# When the monitor next calls check_executors().
cdef double next_check


# A thread of an executor.
cdef class Member:
    cdef unsigned long thread
    cdef double since  # when it began its present task or callback
    cdef object callback  # the user's callback that it runs, or None
    cdef object work  # the Work that this callback was called with
    cdef bint warned  # whether a warning has named this callback


# A queue of tasks and the threads that run them.
cdef class Executor:
    cdef readonly str name
    cdef object queue
    cdef Member leading  # the thread that takes tasks; the others sleep or run a long task
    cdef list members
    cdef int word  # futex on which idle threads sleep
    cdef int idle  # how many threads have no task and do not look for one
    cdef int asleep  # how many idle threads sleep in the kernel, without polling
    cdef bint waking  # whether a thread was woken or started and has not begun yet
    cdef double waking_since

    # Queue a task; in any thread with the GIL, under any lock.
    cdef int submit(self, object task) except -1
    # Wake or start a thread if tasks are queued and no thread takes them.
    cdef int ensure_leader(self) except -1
    # How long the leading thread's task may take before another thread leads.
    cdef double _grace(self) noexcept
    cdef int _wake_or_start(self) except -1
    cdef void _rest(self, int seen, double seconds) noexcept nogil
    cdef int _serve(self, Member me) except -1
    cdef int _run(self, object task) except -1
    # Run all queued tasks in this thread.
    cdef int run_here(self) except -1


# Runs users' code: callbacks, warnings, finalisers.
cdef Executor user_executor

# Runs internal tasks that need Python: failing works, timers.
cdef Executor internal_executor
cdef int check_executors() except -1

# Note that this thread begins a user's callback, or has returned from it.
cdef int begin_callback(object callback, object work) except -1
cdef int end_callback(object callback) except -1

# Before this thread waits: if it is the leading thread of the callbacks' executor, another one leads.
cdef int step_aside() except -1

# Show an exception that no caller can handle.
cdef int report_exception() except -1
