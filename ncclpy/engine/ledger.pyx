"""What a rank does in a process group, as the others are told it: by Python, or by a thread that needs no GIL."""

import json

from cpython.pycapsule cimport PyCapsule_New
from libc.stdio cimport snprintf
from libc.time cimport time_t

from ncclpy.core.operation cimport GROW, function_of
from ncclpy.engine.native cimport now

from ncclpy.core.types import DataType, ReduceOp

cdef extern from "<time.h>" nogil:
    struct timespec:
        time_t tv_sec
        long tv_nsec

    int CLOCK_REALTIME
    int clock_gettime(int clock, timespec* time)

cdef enum:
    #: What is longer than any standing.
    _ROOM = 1024

# By number: asking the enums takes longer than all the rest of an entry of the recorder.
DTYPES = tuple([member.name.lower() for member in DataType])
_OPS = tuple([member.name.lower() for member in ReduceOp])

# C name of an operation to the name of its method.
_METHODS = {
    "ncclAllReduce": "all_reduce",
    "ncclBroadcast": "broadcast",
    "ncclReduce": "reduce",
    "ncclAllGather": "all_gather",
    "ncclReduceScatter": "reduce_scatter",
    "ncclAlltoAll": "all_to_all",
    "ncclGather": "gather",
    "ncclScatter": "scatter",
    "ncclSend": "send",
    "ncclRecv": "recv",
    "ncclPutSignal": "put_signal",
    "ncclSignal": "signal",
    "ncclWaitSignal": "wait_signal",
}


def method_name(int kind):
    """Return the method's name of a kind of operation."""
    return _METHODS.get(function_of(kind).decode(), "operation")


def op_name(int code):
    """Return the name of a reduction."""
    return _OPS[code] if code < len(_OPS) else f"operator {code}"


# The same without the GIL; the tuples keep the text.
cdef const char* _kinds[64]
cdef const char* _types[64]
cdef const char* _reductions[64]
cdef tuple _texts = (
    [method_name(kind).encode() for kind in range(GROW + 1)], [name.encode() for name in DTYPES],
    [name.encode() for name in _OPS],
)
cdef int _nkinds = len(_texts[0]), _ntypes = len(_texts[1]), _nreductions = len(_texts[2])


cdef int _fill(const char** table, list texts) except -1:
    for i, text in enumerate(texts):
        table[i] = text
    return 0


_fill(_kinds, _texts[0])
_fill(_types, _texts[1])
_fill(_reductions, _texts[2])


cdef int _write(char* at, size_t room, const ncclpy_noted* what) noexcept nogil:
    """Write an operation by the names of process_group's `Began`; return its length."""
    cdef int kind = what.call & 0xffff, datatype = what.call >> 16 & 0xffff
    cdef int op = <int><unsigned int>(what.beside >> 32), root = <int><unsigned int>what.beside
    cdef const char* name = b"operation"
    cdef const char* dtype = b"unknown"
    cdef char reduction[40]
    cdef char number[24]
    if what.call >> 32 & 1:
        name = b"barrier"
    elif kind < _nkinds:
        name = _kinds[kind]
    if datatype < _ntypes:
        dtype = _types[datatype]
    if op < 0:
        snprintf(reduction, sizeof(reduction), b"null")
    elif op < _nreductions:
        snprintf(reduction, sizeof(reduction), b"\"%s\"", _reductions[op])
    else:
        snprintf(reduction, sizeof(reduction), b"\"operator %d\"", op)
    if root < 0:
        snprintf(number, sizeof(number), b"null")
    else:
        snprintf(number, sizeof(number), b"%d", root)
    return snprintf(
        at, room, b"{\"operation\":\"%s\",\"seq\":%lld,\"dtype\":\"%s\",\"count\":%llu,\"op\":%s,\"root\":%s}",
        name, <long long>what.sequence, dtype, <unsigned long long>what.count, reduction, number,
    )


cdef int _write_or_null(char* at, size_t room, const char* name, bint there, const ncclpy_noted* what) noexcept nogil:
    cdef int length = snprintf(at, room, b"\"%s\":", name)
    if there:
        return length + _write(at + length, room - length, what)
    return length + snprintf(at + length, room - length, b"null")


cdef int _write_moment(char* at, size_t room, const char* name, double moment) noexcept nogil:
    """Write a moment of the wall clock. Not by %f, whose point may be a comma where the user is at home."""
    cdef long long micros = <long long>(moment * 1e6)
    return snprintf(at, room, b",\"%s\":%lld.%06lld", name, micros // 1000000, micros % 1000000)


cdef size_t _tell(void* ledger, char* at, size_t room, size_t* lasting) noexcept nogil:
    """Write a standing as JSON, but for the last brace, and return its length; 0 if it cannot be read.

    The first `lasting` bytes change only if the rank goes on.
    """
    cdef ncclpy_standing found
    cdef timespec wall
    cdef double began, real
    cdef int length
    if room < _ROOM or not ncclpy_ledger_read(<const ncclpy_ledger*>ledger, &found):
        return 0
    at[0] = b"{"
    length = 1 + _write_or_null(at + 1, room - 1, b"current", found.has_current, &found.current)
    at[length] = b","
    length += 1
    length += _write_or_null(at + length, room - length, b"finished", found.has_finished, &found.finished)
    if found.has_current and found.current.call & NCCLPY_BEHIND:
        length += snprintf(at + length, room - length, b",\"behind\":true")
    lasting[0] = length
    clock_gettime(CLOCK_REALTIME, &wall)
    real = wall.tv_sec + wall.tv_nsec * 1e-9
    if found.has_current or found.has_finished:
        began = ncclpy_moment_of(found.current.began if found.has_current else found.finished.done)
        length += _write_moment(at + length, room - length, b"since", real - (now() - began))
    else:
        length += snprintf(at + length, room - length, b",\"since\":null")
    return length + _write_moment(at + length, room - length, b"at", real)


cdef class Ledger:
    """What this rank has begun in one process group and not finished, and what it has finished last."""

    def __cinit__(self):
        self.ledger = ncclpy_ledger_new()
        if self.ledger == NULL:
            raise MemoryError
        self.given.what, self.given.tell = self.ledger, _tell

    def __dealloc__(self):
        if self.ledger != NULL:
            ncclpy_ledger_leave(self.ledger)

    def standing(self):
        """Return the standing as JSON knows it: ``current``, ``finished`` and ``since``.

        And ``behind``, where what produces the input of the current one is not through.
        """
        cdef char at[_ROOM]
        cdef size_t lasting, length = _tell(self.ledger, at, sizeof(at), &lasting)  # with the GIL nobody writes
        found = json.loads(at[:length] + b"}")
        del found["at"]  # now
        return found

    def source(self):
        """Return what a store's client tells the standing by, as long as this object lives."""
        return PyCapsule_New(&self.given, b"ncclpy.source", NULL)

    cdef object last_finished(self):
        return self.ledger.rows[0].finished.sequence if self.ledger.rows[0].last else None
