"""What the ranks of one machine bring to their collectives, in memory that all of them have.

Each rank has a ring of short notes by number, a digest each, which it writes for every collective; who is ahead of the
others overwrites its oldest. And it has two places for whole notes, of the comparisons that it waits in: it comes to the
next but one when all others are at the next, and so through with this one.
"""

import os

from libc.stddef cimport size_t
from libc.stdint cimport uint64_t
from libc.string cimport memcpy

from ncclpy.core.runtime.wait cimport now
from ncclpy.engine.native cimport add, load as word_of
from ncclpy.process_group.check.mailbox cimport (
    TOKEN,
    load_shared as load,
    map_shared,
    munmap,
    sleep_shared,
    store_shared as store,
    wake_shared,
)

from ncclpy.process_group.check.mailbox import create as create_memory, reopen

cdef extern from "ncclpy/engine/native.h" nogil:
    void relax "ncclpy_relax"()

cdef extern from "sched.h" nogil:
    int sched_yield()

cdef enum:
    _RING = 1024
    _HEAD = 4096
    #: What `look` says: not all are there; all bring the same; somebody brings something else, or messages.
    _WAITS = 0
    _ALIKE = 1
    _TO_COMPARE = 2
    #: How a rank came to a collective.
    _PASSED = 0
    _COMPARES = 1
    _HAS_MESSAGES = 2
    _LEFT = 3

#: Seconds that a rank looks before it gives way in between, and before it sleeps: others have just begun the same call,
#: but may need this one's core for that.
cdef double _AT_HAND = 4e-6
cdef double _SPIN = 60e-6


cdef struct _Short:
    uint64_t number  # plus 1; 0 while it is written
    uint64_t digest
    uint64_t how


cdef struct _Whole:
    uint64_t number  # plus 1
    uint64_t length


cdef struct _Head:
    char token[TOKEN]
    int changes
    int sleepers


cdef size_t _room(size_t size):
    """Return how long a whole note may be: its messages are two a rank, its parts one."""
    return 4096 - sizeof(_Whole) + 64 * size


cdef size_t _stride(size_t size):
    return _RING * sizeof(_Short) + 2 * (sizeof(_Whole) + _room(size))


cdef uint64_t digest_of(bytes calls):
    cdef uint64_t digest = 14695981039346656037ULL
    cdef const unsigned char* at = calls
    cdef Py_ssize_t i
    for i in range(len(calls)):
        digest = (digest ^ at[i]) * 1099511628211ULL
    return digest


def create(size):
    """Return a descriptor of new memory for so many ranks, and the word that it is known by."""
    return create_memory("ncclpy-check", _HEAD + size * _stride(size))


def attach(pid, fd, token, rank, size):
    """Return a rank's board in the memory that a process of this machine has under a descriptor.

    Raises
    ------
    OSError
        If it cannot be had, or is another one.
    """
    own = reopen(pid, fd, token, _HEAD + size * _stride(size))
    try:
        return SharedBoard(own, rank, size)
    finally:
        os.close(own)


cdef class SharedBoard:
    """Notes of all ranks in shared memory, as one of them writes and reads them; `attach` makes it."""

    cdef char* base
    cdef size_t length
    cdef readonly int rank
    cdef readonly int size
    cdef long long comparisons

    shared = True

    def __init__(self, int fd, int rank, int size):
        if self.base != NULL:
            raise RuntimeError("a board is made once")
        self.rank, self.size = rank, size
        self.length = _HEAD + size * _stride(size)
        self.base = <char*>map_shared(fd, 0, self.length)
        if self.base == NULL:
            raise OSError("the group's shared memory cannot be mapped")

    def __dealloc__(self):
        if self.base != NULL:
            munmap(self.base, self.length)

    cdef _Short* short_of(self, int rank, uint64_t number) noexcept nogil:
        cdef size_t stride = _RING * sizeof(_Short) + 2 * (4096 + 64 * <size_t>self.size)
        return <_Short*>(self.base + _HEAD + rank * stride) + number % _RING

    cdef _Whole* whole_of(self, int rank, int which) noexcept nogil:
        cdef size_t place = 4096 + 64 * <size_t>self.size
        return <_Whole*>(<char*>self.short_of(rank, 0) + _RING * sizeof(_Short) + which * place)

    def put(self, uint64_t number, bytes calls not None, bytes note, bint has_messages):
        """Note what this rank brings to a collective; with a whole note it waits for the others there."""
        cdef _Short* short = self.short_of(self.rank, number)
        cdef _Whole* whole
        if note is not None:
            whole = self.whole_of(self.rank, self.comparisons & 1)
            self.comparisons += 1
            store(&whole.number, 0)
            whole.length = len(note)
            if whole.length <= _room(self.size):
                memcpy(<char*>whole + sizeof(_Whole), <char*>note, whole.length)
            store(&whole.number, number + 1)
        store(&short.number, 0)
        short.digest = digest_of(calls)
        short.how = _PASSED if note is None else _HAS_MESSAGES if has_messages else _COMPARES
        store(&short.number, number + 1)
        self._tell()

    def leave(self, uint64_t number, note):
        """Take back that this rank waits for the others."""
        cdef _Short* short = self.short_of(self.rank, number)
        store(&short.how, _LEFT)
        self._tell()

    cdef int _tell(self) except -1:
        cdef _Head* head = <_Head*>self.base
        add(&head.changes, 1)
        if word_of(&head.sleepers):
            with nogil:
                wake_shared(&head.changes)
        return 0

    cdef int state(self, uint64_t number, uint64_t digest) noexcept nogil:
        cdef int rank, found = _ALIKE
        cdef _Short* short
        cdef uint64_t there
        for rank in range(self.size):
            short = self.short_of(rank, number)
            there = load(&short.number)
            if there < number + 1:
                return _WAITS
            if there > number + 1 or short.digest != digest or short.how >= _HAS_MESSAGES or load(&short.number) != there:
                found = _TO_COMPARE  # or it is being overwritten
        return found

    def look(self, uint64_t number, bytes calls not None, double seconds):
        """Wait for the other ranks for so many seconds; return 1 if all bring these calls, 2 if one does not or has
        messages, 0 if some are not there.
        """
        cdef uint64_t digest = digest_of(calls)
        cdef _Head* head = <_Head*>self.base
        cdef int found, seen
        cdef double begin, waited
        found = self.state(number, digest)
        if found != _WAITS:
            return found
        with nogil:
            begin = now()
            while True:
                found = self.state(number, digest)
                waited = now() - begin
                if found != _WAITS or waited > _SPIN:
                    break
                if waited > _AT_HAND:
                    sched_yield()
                else:
                    relax()
            add(&head.sleepers, 1)
            while found == _WAITS and now() - begin < seconds:
                seen = word_of(&head.changes)
                found = self.state(number, digest)
                if found == _WAITS:
                    sleep_shared(&head.changes, seen, seconds - (now() - begin))
            add(&head.sleepers, -1)
        return found

    def brought(self, uint64_t number):
        """Return what each rank brings: its note; the digest of one that it has brought before; None if it is too far
        ahead, False if it is not there or has left. A note that is too long is empty.
        """
        cdef _Short* short
        cdef _Whole* whole
        cdef int rank, which
        cdef uint64_t there
        found = []
        for rank in range(self.size):
            short = self.short_of(rank, number)
            there = load(&short.number)
            if there != number + 1:
                found.append(None if there > number + 1 else False)
            elif short.how == _LEFT:
                found.append(False)
            elif short.how == _PASSED:
                found.append(int(short.digest))
            else:
                note = None
                for which in range(2):
                    whole = self.whole_of(rank, which)
                    if load(&whole.number) == number + 1:
                        note = b"" if whole.length > _room(self.size) else (<char*>whole + sizeof(_Whole))[:whole.length]
                found.append(note)
        return found

    def absent(self, uint64_t number):
        """Return who is not there."""
        return [rank for rank in range(self.size) if load(&self.short_of(rank, number).number) < number + 1]

    def too_long(self, bytes note not None):
        """Return whether a note is longer than its place."""
        return <size_t>len(note) > _room(self.size)

    def close(self):
        """Do nothing: the memory goes when nobody refers to it."""


def digest(bytes calls not None):
    """Return what stands for calls in short notes."""
    return int(digest_of(calls))
