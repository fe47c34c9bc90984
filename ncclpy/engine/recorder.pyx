"""The flight recorder of operations, and the operation log of operations in flight, which is read without the GIL.

With `record_all` it also records the calls of plain communicators.

The thread that advances an operation writes its entry; a dump only reads memory, so a stuck device cannot block it.
"""

import _thread
import hashlib
import json
import os
import re
import socket
import time

cimport cython
from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_New
from cpython.pythread cimport PyThread_get_thread_ident
from libc.stdio cimport snprintf
from libc.time cimport time_t

from ncclpy.core.arguments.datatypes cimport ITEMSIZE
from ncclpy.core.handles.handle cimport Handle, CallTracer, set_call_tracer
from ncclpy.core.arguments.operation cimport GROW, WAIT_SIGNAL, Operation, function_of, has_root, reduces
from ncclpy.engine.native cimport now

from ncclpy.core.runtime import library as _library
from ncclpy.errors import NcclError
from ncclpy.types import DataType, ReduceOp, as_integer as _as_integer
from ncclpy.engine.stack import in_short, python_stack


cdef extern from "<time.h>" nogil:
    struct timespec:
        time_t tv_sec
        long tv_nsec

    int CLOCK_REALTIME
    int clock_gettime(int clock, timespec* found)

cdef enum:
    #: Bytes that suffice for any status as JSON.
    _STATUS_BYTES = 1024

# Names, indexed by number: looking a name up in its enum would take longer than all else that an entry needs.
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
    "ncclGroupEnd": "sendrecv",
    "ncclPutSignal": "put_signal",
    "ncclSignal": "signal",
    "ncclWaitSignal": "wait_signal",
}


def method_name(int kind):
    """Return the method's name for a kind of operation."""
    return _METHODS.get(function_of(kind).decode(), "operation")


def op_name(int code):
    """Return the name of a reduction operator."""
    return _OPS[code] if code < len(_OPS) else f"operator {code}"


# The same names for use without the GIL; `_texts` keeps the memory alive.
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


cdef int _write(char* at, size_t space, const ncclpy_op* what) noexcept nogil:
    """Write an operation as JSON with the names of `OperationInfo` (peers/rank_state.py); return its length."""
    cdef int kind = what.call & 0xffff, datatype = what.call >> 16 & 0xffff
    cdef int op = <int><unsigned int>(what.op_and_root >> 32), root = <int><unsigned int>what.op_and_root
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
        at, space, b"{\"operation\":\"%s\",\"seq\":%lld,\"dtype\":\"%s\",\"count\":%llu,\"op\":%s,\"root\":%s}",
        name, <long long>what.sequence, dtype, <unsigned long long>what.count, reduction, number,
    )


cdef int _write_or_null(char* at, size_t space, const char* name, bint present, const ncclpy_op* what) noexcept nogil:
    cdef int length = snprintf(at, space, b"\"%s\":", name)
    if present:
        return length + _write(at + length, space - length, what)
    return length + snprintf(at + length, space - length, b"null")


cdef int _write_moment(char* at, size_t space, const char* name, double moment) noexcept nogil:
    """Write a moment of the wall clock. Not with %f: its decimal point depends on the locale."""
    cdef long long micros = <long long>(moment * 1e6)
    return snprintf(at, space, b",\"%s\":%lld.%06lld", name, micros // 1000000, micros % 1000000)


cdef size_t _write_status(void* oplog, char* at, size_t space, size_t* lasting) noexcept nogil:
    """Write a status as JSON without the closing brace, and return its length; 0 if it cannot be read.

    The first `lasting` bytes change only if the rank makes progress. A space of less than `_STATUS_BYTES` gives 0 too.
    """
    cdef ncclpy_status found
    cdef timespec wall
    cdef double began, real
    cdef int length
    if space < _STATUS_BYTES or not ncclpy_oplog_read(<const ncclpy_oplog*>oplog, &found):
        return 0
    at[0] = b"{"
    length = 1 + _write_or_null(at + 1, space - 1, b"current", found.has_current, &found.current)
    at[length] = b","
    length += 1
    length += _write_or_null(at + length, space - length, b"finished", found.has_finished, &found.finished)
    if found.has_current and found.current.call & NCCLPY_BLOCKED_ON_INPUT:
        length += snprintf(at + length, space - length, b",\"blocked_on_input\":true")
    lasting[0] = length
    clock_gettime(CLOCK_REALTIME, &wall)
    real = wall.tv_sec + wall.tv_nsec * 1e-9
    if found.has_current or found.has_finished:
        began = ncclpy_moment_of(found.current.began if found.has_current else found.finished.done)
        length += _write_moment(at + length, space - length, b"since", real - (now() - began))
    else:
        length += snprintf(at + length, space - length, b",\"since\":null")
    return length + _write_moment(at + length, space - length, b"at", real)


cdef class OpLog:
    """What a rank has begun and not finished, and what it has finished last.

    In one process group, or on one communicator of a Manager with a store.
    """

    def __cinit__(self):
        self.oplog = ncclpy_oplog_new()
        if self.oplog == NULL:
            raise MemoryError
        self.publisher_source.what, self.publisher_source.tell = self.oplog, _write_status

    def __dealloc__(self):
        if self.oplog != NULL:
            ncclpy_oplog_leave(self.oplog)

    def status(self):
        """Return the status with JSON's types: ``current``, ``finished`` and ``since``.

        Also ``blocked_on_input``, if what produces the input of the current operation is not done.
        """
        cdef char at[_STATUS_BYTES]
        cdef size_t lasting, length = _write_status(self.oplog, at, sizeof(at), &lasting)  # the GIL excludes writers
        found = json.loads(at[:length] + b"}")
        del found["at"]  # the time of this call
        return found

    def source(self):
        """Return a capsule by which a store's client publishes the status; this object must outlive it."""
        return PyCapsule_New(&self.publisher_source, b"ncclpy.source", NULL)

    cdef object last_finished(self):
        return self.oplog.lists[0].finished.sequence if self.oplog.lists[0].finished_order else None


cdef extern from "ncclpy/engine/site.h":
    PyObject* ncclpy_frame()
    object ncclpy_frame_code(object frame)
    PyObject* ncclpy_frame_back(object frame)
    int ncclpy_frame_at(object frame)
    PyObject* ncclpy_code_file(object code)
    int ncclpy_code_line(object code, int at)

cdef extern from "Python.h":
    PyObject* PyDict_GetItem(object, PyObject*)
    void Py_XDECREF(PyObject*)

# The search for the caller's line skips up to `_MAX_FRAMES` Python frames in files of ncclpy, torch and cupyx.
# `_is_inner` caches, for up to `_MAX_FILES` files, whether a file's frames are skipped.
cdef str _PACKAGE_DIRECTORY = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
cdef tuple _SKIPPED_DIRECTORIES = ("-packages/torch/", "-packages/cupyx/")
cdef dict _is_inner = {}
cdef int _MAX_FILES = 4096, _MAX_FRAMES = 12

# The most characters of a file's name, of which the end is kept.
cdef int _MAX_FILE_NAME = 200

# The most characters of a key that are shown.
cdef int _MAX_KEY = 300
_STATES = ("pending", "launched", "completed", "failed", "called", "captured")
cdef list _ring = [None] * 2000
cdef long long _recorded = 0

# Called for a dump: each returns a list of operations that are still being gathered.
_gatherers = []
#: In JSON of a dump, where an entry begins.
_ENTRY = re.compile(r'(\[|\},) ?(?=\{"\w)')

# (teller, forget): `teller()` returns a list of this process's groups, `forget()` forgets those that have failed.
_group_sources = []


@cython.freelist(256)
@cython.final
cdef class Entry:
    """One recorded operation."""

    def __dealloc__(self):
        if self.oplog != NULL:
            self.done(False, 0.0)
            ncclpy_oplog_leave(self.oplog)

    cdef int note(self, ncclpy_oplog* oplog) except -1:
        """Note the operation in an operation log, with its present values; do nothing if it was noted before."""
        cdef ncclpy_op what
        if self.oplog != NULL:
            return 0
        what.sequence, what.count = self.sequence, self.count
        what.began, what.done = ncclpy_bits_of(self.created), 0
        what.call = call_of(self.operation, self.datatype, self.is_barrier)
        what.op_and_root = op_and_root_of(self.op, self.root)
        # NULL if out of memory: the log then lacks the operation.
        self.noted = ncclpy_oplog_begin(oplog, self.pair, &what)
        ncclpy_oplog_use(oplog)
        self.oplog = oplog
        return 0

    cdef int done(self, bint succeeded, double moment) except -1:
        """Note in the operation log that the operation has ended, and whether it succeeded."""
        cdef ncclpy_note* noted = self.noted
        if noted != NULL:
            self.noted = NULL
            ncclpy_oplog_end(self.oplog, self.pair, noted, succeeded, moment)
        return 0

    cdef void set_blocked(self, bint blocked) noexcept:
        """Note in the operation log whether the device still waits for what produces the input."""
        if self.noted != NULL:
            ncclpy_oplog_set_blocked(self.oplog, self.noted, blocked)

    def _as_dict(self):
        return {
            "id": self.id,
            "launch": None if self.launch < 0 else self.launch,
            "key": None if self.key is None else show(self.key),
            "operation": called(self),
            "op": None if self.op < 0 else op_name(self.op),
            "dtype": DTYPES[self.datatype],
            "count": self.count,
            "nbytes": self.nbytes,
            "root": None if self.root < 0 else self.root,
            "tag": None if self.tag < 0 else self.tag,
            "communicator": self.communicator,
            "sequence": None if self.sequence < 0 else self.sequence,
            "rank": None if self.rank < 0 else self.rank,
            "nranks": self.nranks,
            "device": self.device,
            "thread": self.thread,
            "site": _site_of(self),
            "state": _STATES[self.state],
            "created": self.created,
            "launched": self.launched or None,
            "completed": self.completed or None,
            "error": None if self.error is None else str(self.error),
        }


cdef str called(Entry entry):
    return "barrier" if entry.is_barrier else method_name(entry.operation)


def show(key):
    """Return the ``repr`` of a key, or `object`'s if that raises: the error that names the key must not be lost.

    A long one is cut and gets a digest of the whole, so that two keys still look different.
    """
    try:
        text = repr(key)
    except BaseException as error:  # raised by the user's class
        _pass_on(error)
        return object.__repr__(key)
    if len(text) <= _MAX_KEY:
        return text
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=4).hexdigest()
    return f"{text[:_MAX_KEY // 2]}... ({len(text)} characters, digest {digest})"


def text_of(error):
    """Return the text of an exception, or its class's name if that raises."""
    try:
        return str(error)
    except BaseException as failure:  # raised by the user's class
        _pass_on(failure)
        return type(error).__name__


cdef int _pass_on(object error) except -1:
    """Repeat a KeyboardInterrupt later in the main thread, where it interrupts nothing of the recorder."""
    if isinstance(error, KeyboardInterrupt):
        _thread.interrupt_main()
    return 0


cdef Entry new_entry():
    """Return a new entry in the ring, in place of the oldest one."""
    global _recorded
    cdef Entry entry = Entry.__new__(Entry)
    entry.id = _recorded
    entry.launch = entry.sequence = entry.group = -1
    entry.op = entry.root = entry.tag = entry.rank = -1
    entry.thread = PyThread_get_thread_ident()
    entry.created = now()
    note_site(entry)
    if len(_ring):
        _ring[_recorded % len(_ring)] = entry
    _recorded += 1
    return entry


cdef int note_site(Entry entry) except -1:
    """Note the innermost line of this thread's Python code outside ncclpy, torch and cupyx, if there is one.

    The search ends after `_MAX_FRAMES` frames of these packages, with the frame that called them, whichever it is.
    It runs no Python code. It keeps the code object and no frame, since frames keep the user's arrays.
    """
    cdef PyObject* found = ncclpy_frame()
    cdef PyObject* inner
    cdef object frame, code, is_inner
    cdef int frames_left = _MAX_FRAMES
    if found == NULL:
        return 0
    frame = <object>found
    while True:
        code = ncclpy_frame_code(frame)
        inner = PyDict_GetItem(_is_inner, ncclpy_code_file(code))
        is_inner = _is_inner_file(<str>ncclpy_code_file(code)) if inner == NULL else <object>inner
        if is_inner is False or frames_left == 0:
            entry.code, entry.at = code, ncclpy_frame_at(frame)
            return 0
        frames_left -= 1
        found = ncclpy_frame_back(frame)
        if found == NULL:
            return 0
        frame = <object>found
        Py_XDECREF(found)


cdef object _is_inner_file(str file):
    if len(_is_inner) >= _MAX_FILES:  # code made at run time may have a new file name each time
        _is_inner.clear()
    inner = file.startswith(_PACKAGE_DIRECTORY)
    for each in _SKIPPED_DIRECTORIES:
        inner = inner or each in file
    _is_inner[file] = inner
    return inner


cdef str _site_of(Entry entry):
    if entry.code is None:
        return None
    file = <object>ncclpy_code_file(entry.code)
    return f"{file[-_MAX_FILE_NAME:]}:{ncclpy_code_line(entry.code, entry.at)}"


cdef str where_called(Entry entry):
    """Return a sentence that says where this rank called an operation, None if that is unknown."""
    if entry.code is None:
        return None
    number = f" #{entry.sequence}" if entry.sequence >= 0 else ""
    return f"This rank called {called(entry)}{number} at {in_short([_site_of(entry)])}"


cdef Entry unfinished_of(long long group):
    """Return the first operation of a process group that has not ended; None if none is recorded."""
    cdef Entry entry
    cdef Entry first = None
    for entry in list(_ring):
        if entry is None or entry.group != group or entry.state > LAUNCHED:
            continue
        if first is None or entry.id < first.id:
            first = entry
    return first


cdef dict operation_info_of(Entry entry):
    return {
        "operation": called(entry),
        "seq": entry.sequence,
        "dtype": DTYPES[entry.datatype],
        "count": entry.count,
        "op": None if entry.op < 0 else op_name(entry.op),
        "root": None if entry.root < 0 else entry.root,
    }


cdef void note_operation(Entry entry, const Operation* operation, size_t nbytes) noexcept:
    entry.datatype = operation.datatype
    entry.count = operation.count
    entry.nbytes = nbytes
    if reduces(operation.kind):
        entry.op = operation.op
    if has_root(operation.kind):
        entry.root = operation.root


cdef class _Calls(CallTracer):
    """Record the calls of communicators."""

    cdef object call_site(self):
        cdef Entry entry = Entry.__new__(Entry)
        note_site(entry)
        return None if entry.code is None else (entry.code, entry.at)

    cdef object begin(self, Handle handle, const Operation* operation, object call_site):
        cdef Entry entry = new_entry()
        if call_site is not None:
            entry.code, entry.at = call_site
        entry.operation = operation.kind
        # The count of a wait is its number of descriptors, not of elements.
        nbytes = operation.count * ITEMSIZE[operation.datatype] if operation.kind != WAIT_SIGNAL else 0
        note_operation(entry, operation, nbytes)
        entry.device = handle.device
        entry.rank = handle.rank
        entry.nranks = handle.nranks
        entry.communicator = handle.group_name
        entry.sequence = operation.sequence
        return entry

    cdef int end(self, object noted, const Operation* operation, bint done, object error) except -1:
        cdef Entry entry = noted
        entry.launched = now()
        entry.sequence = operation.sequence
        if error is not None:
            entry.error = text_of(error)
        if done or error is not None:
            entry.completed = entry.launched
        entry.state = FAILED if error is not None else COMPLETED if done else CALLED
        return 0

    cdef object find(self, Handle handle, const Operation* operation):
        cdef Entry entry
        for entry in list(_ring):
            if (
                entry is not None and entry.operation == operation.kind and entry.sequence == operation.sequence
                and entry.rank == handle.rank and entry.communicator == handle.group_name and entry.device == handle.device
            ):
                return entry
        return None

    cdef int explain(self, object noted, object error) except -1:
        sentence = None if noted is None else where_called(noted)
        if sentence is not None and isinstance(error, NcclError) and sentence not in str(error):
            error.args = (f"{str(error).rstrip('. ')}. {sentence}",)
        return 0


def record_all(enabled=True):
    """Record the calls of plain communicators too, or stop doing so.

    They are recorded when they are made, each alone or at the end of a group; launches of plans and graphs are not.
    An entry has the line of the program that made the call (the error of a failed call names it too); the name of the
    communicator, the same on all ranks (but another on ranks that `join` a grown communicator); and the number of the
    call on the communicator, which counts unrecorded calls too. The entry's state is ``"pending"`` during the call of
    NCCL (the call's number may then be too small, if several threads call at once), ``"completed"`` if the call has
    waited for data in CPU memory, ``"failed"`` with the error, and otherwise ``"called"``: whether the device is done
    is not checked.

    Parameters
    ----------
    enabled : bool, optional
        Whether to record them. A call then costs about 0.15 us more, and nothing otherwise.
    """
    set_call_tracer(_Calls() if enabled else None)


def resize(capacity):
    """Keep this many entries from now on, none with 0; forget what was recorded.

    Parameters
    ----------
    capacity : int
        The number of entries; 2,000 unless set.
    """
    global _ring, _recorded
    capacity = _as_integer(capacity, "capacity", 0)
    _ring = [None] * capacity
    _recorded = 0
    for _, forget in _group_sources:
        forget()


def snapshot(reason=None):
    """Return what is recorded, as `dump` writes it.

    Parameters
    ----------
    reason : str, optional
        Why the snapshot is made, for its reader.

    Returns
    -------
    dict
        With JSON's types only.
    """
    cdef long long first
    ring, recorded = _ring, _recorded
    first = max(0, recorded - len(ring))
    entries = [entry for entry in (ring[number % len(ring)] for number in range(first, recorded)) if entry is not None]
    loaded = _library.loaded()
    # Read one right after the other: by the pair a reader converts moments of one clock to the other.
    wall, monotonic = time.time(), now()
    return {
        "format": "ncclpy-recorder",
        "version": 1,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "wall": wall,
        "monotonic": monotonic,
        "clock": clock_id(),
        "engine": loaded.engine if loaded else None,
        "nccl": ".".join(map(str, loaded.version)) if loaded else None,
        "reason": reason,
        "stack": python_stack(),
        "capacity": len(ring),
        "recorded": recorded,
        "entries": [(<Entry>entry)._as_dict() for entry in entries],
        "gathering": [item for gatherer in list(_gatherers) for item in gatherer()],
        "groups": [group for teller, _ in list(_group_sources) for group in teller()],
    }


def clock_id():
    """Return the identity of the monotonic clock, which processes with the same identity share; None if not known."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot}/{os.stat('/proc/self/ns/time').st_ino}"  # a time namespace has an offset of its own
    except OSError:
        return None


def dump(path=None, *, reason=None):
    """Return what is recorded as JSON, for ``ncclpy trace``.

    It reads memory only and never waits for a device.

    Parameters
    ----------
    path : str or os.PathLike, optional
        A file to write it to as well.
    reason : str, optional
        Why the dump is made, for its reader.

    Returns
    -------
    str
    """
    # One line for each entry: json's own indent runs in Python, and takes four times as long. `_ENTRY` matches nothing
    # inside a string: a quote that ends a string is not followed by a letter.
    text = _ENTRY.sub("\\1\n", json.dumps(snapshot(reason))) + "\n"
    if path is not None:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    return text


def add_gatherer(gatherer):
    """Have dumps include what `gatherer()` returns: a list of operations that are still being gathered."""
    _gatherers.append(gatherer)


def remove_gatherer(gatherer):
    """Undo `add_gatherer`; do nothing if the gatherer is absent, as those of the parent are in a forked child."""
    if gatherer in _gatherers:
        _gatherers.remove(gatherer)


def add_group_source(teller, forget):
    """Have dumps include what `teller()` returns: a list of this process's groups.

    `forget()` is called when the recorded entries are forgotten.
    """
    _group_sources.append((teller, forget))


# A forked child gathers none of the parent's operations.
os.register_at_fork(after_in_child=_gatherers.clear)
