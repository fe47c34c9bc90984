"""What the engine calls in layers above it, and texts that are made when they are read.

Showing a key runs its ``__repr__``, which may take any lock and any time. So a text with a key in it is made when
somebody reads it, in the thread of that reader; until then it is a `Message`. Keys of plain types are shown at once.

A room knows the rooms below it and none above. Where news has to go up, from a work to its launch, from there to the
communicators that it ran on and on to who keeps them, the lower room calls a method of a class that is declared here,
and the upper one builds on that class. Each method is called with the GIL.
"""

cimport cython
from cpython.ref cimport PyObject
from libc.stdint cimport uintptr_t

from ncclpy.errors import NcclError
from ncclpy.engine.recorder import show, text_of


# Errors of Python's own that are raised for what ranks disagree about.
cdef tuple _PLAIN = (TypeError, ValueError, RuntimeError)

# Tuples in tuples that are looked into.
cdef int _DEPTH = 4


cdef bint is_plain(object value, int depth=_DEPTH) noexcept:
    """Return whether a key is of Python's own types through and through."""
    cdef type kind = type(value)
    if kind is str or kind is int or kind is bytes or kind is float or kind is bool or value is None:
        return True
    if kind is not tuple or depth == 0:
        return False
    for item in <tuple>value:
        if not is_plain(item, depth - 1):
            return False
    return True


@cython.final
cdef class Message:
    """The text of an error that names a key, made when it is read."""

    def __str__(self):
        if self.text is None:
            self.text = self.before + show(self.key) + self.after
        return self.text

    def __repr__(self):
        return repr(str(self))

    def __reduce__(self):
        return str, (str(self),)


cdef object message(str before, object key, str after):
    """Return a text with a key in it."""
    cdef Message made
    if is_plain(key):
        return before + <str>show(key) + after
    made = Message.__new__(Message)
    made.before, made.key, made.after = before, key, after
    return made


cdef object around(str before, object words, str after):
    """Return a text around another one."""
    cdef Message made, inner
    if type(words) is not Message:
        return before + <str>words + after
    inner = words
    made = Message.__new__(Message)
    made.before, made.key, made.after = before + inner.before, inner.key, inner.after + after
    return made


cdef object ended_by(object words, cut, str after):
    """Return a text, whose last part `cut` returns without what is to go, with another end."""
    cdef Message made, inner
    if type(words) is not Message:
        return cut(words) + after
    inner = words
    made = Message.__new__(Message)
    made.before, made.key, made.after = inner.before, inner.key, cut(inner.after) + after
    return made


cdef object with_sentence(object error, str sentence):
    """Return a copy of an error with another sentence at its end; the error itself if it says that already.

    Works that have failed together share an error; those that were called at one place share the copy as well, however
    many they are.
    """
    cdef dict copies
    if not _takes(error, sentence):
        return error
    error.__traceback__ = None  # which has frames, in which arrays hang, and is seen by nobody: the copy is raised
    copies = error.__dict__.setdefault("_copies", {})
    made = copies.get(sentence)
    if made is None:
        made = type(error)(error.args[0])
        made.__dict__.update(error.__dict__)
        made.__dict__.pop("_copies", None)
        made.__cause__, made.__context__ = error.__cause__, error.__context__
        made.__suppress_context__ = error.__suppress_context__
        add_sentence(made, sentence)
        made = copies.setdefault(sentence, made)  # another thread may have been here
    return made


cdef int add_sentence(object error, str sentence) except -1:
    """Have an error end with another sentence, unless it says that already."""
    if _takes(error, sentence):
        error.args = (ended_by(words_of(error), _without_stop, f". {sentence}"),)
    return 0


cdef bint _takes(object error, str sentence) except -1:
    """Return whether an error is of a class that has a text for its only argument, without this sentence."""
    if sentence is None or not (isinstance(error, NcclError) or type(error) in _PLAIN) or len(error.args) != 1:
        return False
    words = error.args[0]
    if type(words) is Message:
        return sentence not in (<Message>words).after
    return isinstance(words, str) and sentence not in words


def _without_stop(text):
    return text.rstrip(". ")


cdef object words_of(object error):
    """Return what an error says, without asking a key for its text."""
    if isinstance(error, BaseException) and len(error.args) == 1 and type(error.args[0]) is Message:
        return error.args[0]
    return text_of(error)


cdef class Together:
    """What the works of one launch share: they report to it, and one that fails takes the others with it.

    Below: `work`, `monitor`. Above: `launcher`.
    """

    cdef int settled(self, object work) except -1:
        """Note that a work has come to its end.

        In any thread, also the monitor's, and under any lock down to the Manager's: it runs compiled code only.
        """
        raise NotImplementedError

    cdef int fail(self, object error) except -1:
        """Fail all works that are not done and abort their communicators.

        In a thread for errands, under no lock: it may run Python, wait for the Manager's lock and start threads.
        """
        raise NotImplementedError

    cdef list members(self):
        """Return the works that have yet to come to their end, those that it does not keep as well."""
        found = list(self.works)
        if self.loose != NULL:
            found.append(<object>self.loose)
        if self.more_loose is not None:
            for address in self.more_loose:
                found.append(<object><PyObject*><uintptr_t>address)
        return found

    cdef bint has_members(self) noexcept:
        return bool(self.works) or self.loose != NULL or bool(self.more_loose)

    cdef int loosen(self, object work) except -1:
        """Know a work from now on without keeping it; `forget` comes before it goes. In a caller's thread."""
        if self.loose == NULL:
            self.loose = <PyObject*>work
        else:
            if self.more_loose is None:
                fresh = set()  # to make one may run the garbage collector, and with it other threads
                if self.more_loose is None:
                    self.more_loose = fresh
            self.more_loose.add(<uintptr_t><PyObject*>work)
        if work in self.works:
            self.works.remove(work)
        return 0

    cdef int forget(self, object work) except -1:
        """Know a work no more that was loosened. Called where `settled` is, and like that one."""
        if self.loose == <PyObject*>work:
            self.loose = NULL
        elif self.more_loose is not None:
            self.more_loose.discard(<uintptr_t><PyObject*>work)
        return 0

    cdef object cause_of(self, object error):
        """Return what is behind an error: who sees that a communicator is gone may not know why. In any thread."""
        return error

    cdef bint is_spared(self) noexcept:
        """Return whether its communicators stay as they are when it fails. In any thread, under any lock."""
        return False


cdef class LaunchOwner:
    """What a launch tells of itself.

    Below: `launcher`. Above: `clique`.
    """

    cdef int launch_done(self, Together launch) except -1:
        """Note that all works of a launch are done. Called where `Together.settled` is, and like that one."""
        raise NotImplementedError

    cdef int launch_failed(self, Together launch, object error) except -1:
        """See to it that nobody takes the communicators of a failed launch for idle ones; they are aborted next.

        An owner that `spares` them aborts none, and what else runs on them goes on; one that `aborts` does so itself, later.
        Return whether all works of the launch were done in the meantime: then nothing is aborted.

        Called where `Together.fail` is, and like that one, before the works of the launch fail.
        """
        raise NotImplementedError


cdef class CliqueOwner:
    """What a set of communicators tells of itself.

    Below: `clique`. Above: the Manager.
    """

    cdef int clique_made(self, LaunchOwner clique, list comms, object error) except -1:
        """Take communicators over, or what came of the attempt to make them and the error.

        In the thread that has made them, or in the caller's if there is no such thread; under no lock.
        """
        raise NotImplementedError

    cdef int clique_lost(self, LaunchOwner clique) except -1:
        """Forget communicators that are about to be aborted. Called where `LaunchOwner.launch_failed` is."""
        raise NotImplementedError


cdef class Awaited:
    """What a work waits for before it is launched.

    Below: `work`. Above: the Manager's gatherings.
    """

    cdef str missing(self):
        """Return who has not come. In a thread that waits for the work, under no lock; it may show keys."""
        raise NotImplementedError

    cdef int may_wait(self) except -1:
        """Raise in a thread that would wait for itself, and do what takes an instant for the launch to come.

        In a thread that is about to wait for the work, under no lock.
        """
        return 0


cdef class Deputy:
    """The monitor's part.

    Below: `work`. Above: `monitor`.
    """

    cdef int stand_in(self) except -1:
        """Do it here if the monitor's thread has ended; return whether it has. In any thread, under no lock."""
        return False

    cdef int loosen(self, object work) except -1:
        """Keep a launched work no longer in the list of those that wait for their lanes. In a caller's thread."""
        return 0


deputy = Deputy()
