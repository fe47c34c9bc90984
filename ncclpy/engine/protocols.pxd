from cpython.ref cimport PyObject


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


# Who keeps sets of communicators.
cdef class CliqueOwner:
    cdef int clique_made(self, LaunchOwner clique, list comms, object error) except -1
    cdef int clique_lost(self, LaunchOwner clique) except -1


# What a work waits for before its launch.
cdef class Awaited:
    cdef str missing(self)
    cdef int may_wait(self) except -1


# Who does the monitor's part in any thread, once the monitor's own has ended.
cdef class Deputy:
    cdef int stand_in(self) except -1
    cdef int loosen(self, object work) except -1


cdef Deputy deputy
