"""Texts that name a key of the user.

Showing a key runs its ``__repr__``, which may take any lock and any time. So a text with a key in it is made when
somebody reads it, in the thread of that reader; until then it is a `Message`. Keys of plain types are shown at once.
"""

cimport cython

from ncclpy.core.errors import NcclError
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
