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
