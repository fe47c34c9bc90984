"""Memory that the processes of one machine share for `check=`: messages of two ranks, and an exchange for collectives.

It has no name (`memfd_create`): it is opened through a descriptor of the process that made it, and is freed with the
last process that maps it, however these processes end.

Each rank has memory of its own: a page with a word that it sleeps on, and then pages for each other rank, with a ring
of notes that only that other rank writes. So a rank sleeps in one place, whichever peer it waits for, and two ranks
can exchange messages before the other ranks have arrived. Pages that were never written take no memory.

A note is valid once its number is written, which is written last: a process that is killed before that leaves no note.
The memory of a process that has ended stays with the processes that have mapped it. Only threads that check held-back
messages sleep on the word of a rank's memory, and each of them has a reference to that memory meanwhile.

The exchange has for each rank a ring of short notes by number. The rank writes one, with a digest, for every
collective; a rank that is ahead of the others overwrites its oldest notes. The exchange also has two slots for a
rank's full notes, for the comparisons in which the rank waits. Two are enough: the rank reuses the slot of one
comparison only after the next one, at which all other ranks have arrived, and so have read the slot.
"""

import fcntl
import json
import mmap
import os
import secrets
import stat

from libc.stddef cimport size_t
from libc.stdint cimport uint64_t
from libc.string cimport memcpy, memset, strlen

from ncclpy.core.runtime.wait cimport now
from ncclpy.engine.native cimport add, load as word_of, swap


def read_offer(packed):
    """Return what a process offers: its machine and, if it has memory, how peers open it (`reopen`).

    Raises
    ------
    KeyError, TypeError, ValueError
        If it is not such an offer.
    """
    fields = json.loads(packed)
    offer = {"machine": str(fields["machine"]), "pid": int(fields.get("pid", 0))}
    if "fd" in fields:
        offer.update(fd=int(fields["fd"]), token=bytes.fromhex(fields["token"]))
    return offer


def create_memory(name, length):
    """Make memory of so many bytes; return its descriptor and the random token that it begins with."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, length)
        # A process that reads beyond the end of a file is killed (SIGBUS), so no process may shorten this one.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        token = secrets.token_bytes(TOKEN)
        os.pwrite(fd, token, 0)
        return fd, token
    except BaseException:
        os.close(fd)
        raise


def reopen(pid, fd, token, length):
    """Return a new descriptor of the memory that another process of this machine has open.

    Raises
    ------
    OSError
        If it cannot be opened, or is other memory.
    """
    own = os.open(f"/proc/{int(pid)}/fd/{int(fd)}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(own)
        # In another container the pid may be another process's, and the descriptor another file.
        is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_size == length
        if not is_ours or os.pread(own, TOKEN, 0) != token:
            raise OSError(f"descriptor {fd} of process {pid} is not the group's shared memory")
        return own
    except BaseException:
        os.close(own)
        raise


cdef extern from "ncclpy/engine/native.h" nogil:
    void relax "ncclpy_relax"()

cdef extern from "sched.h" nogil:
    int sched_yield()

cdef size_t _PAGE = mmap.PAGESIZE

cdef enum:
    _NOTES = 63  # with the ring's head they fill three pages of 4 KiB

#: Seconds that a polling thread spins before it yields the core between two polls.
cdef double _SPIN_BEFORE_YIELD = 4e-6

cdef struct _Ring:
    uint64_t taken  # notes that the reader has taken
    int writer_waits  # whether the writer has to be woken when a note is taken
    char rest[52]
    Note notes[_NOTES]

cdef size_t _PAGES = (sizeof(_Ring) + _PAGE - 1) // _PAGE


cdef size_t _length(size_t size):
    """Return the bytes of one rank's memory in a group of so many ranks."""
    return (1 + size * _PAGES) * _PAGE


cdef class MappedPages:
    """Some pages of a rank's memory, mapped."""

    def __init__(self, int fd, size_t first, size_t pages=1):
        if self.base != NULL:
            raise RuntimeError("a page is mapped once")
        self.length = pages * _PAGE
        self.base = <char*>map_shared(fd, first * _PAGE, self.length)
        if self.base == NULL:
            raise OSError("the group's shared memory cannot be mapped")

    def __dealloc__(self):
        if self.base != NULL:
            munmap(self.base, self.length)


cdef void _wake(WakeupWord* wakeup_word) noexcept:
    # The GIL is kept, as in `RingPair.wake_peer`: the wake-up does not block, and a thread that released the GIL could
    # wait long to get it back while it holds a group's lock.
    add(&wakeup_word.changes, 1)
    if word_of(&wakeup_word.sleepers):
        wake_shared(&wakeup_word.changes)


cdef bint _is_woken(WakeupWord* wakeup_word, int seen, double until) noexcept nogil:
    cdef double begin = now()
    while word_of(&wakeup_word.changes) == seen:
        if now() >= until:
            return False
        if now() - begin > _SPIN_BEFORE_YIELD:
            sched_yield()
        else:
            relax()
    return True


cdef class RingSet:
    """One rank's memory. Its descriptor stays open, since peers open the memory when they first need it.

    Parameters
    ----------
    size : int
        How many ranks the group has.
    """

    def __init__(self, int size):
        if self.wakeup_word != NULL:
            raise RuntimeError("a RingSet is initialised once")
        self.size, self.owner, self.fd = size, os.getpid(), -1
        self.wakeup_word = &self.own_word
        memset(&self.own_word, 0, sizeof(WakeupWord))
        try:
            self.fd, self.token = create_memory("ncclpy-check-messages", _length(size))
            self.head = MappedPages(self.fd, 0)
            self.wakeup_word = <WakeupWord*>self.head.base
        except OSError:  # the messages are exchanged through the store
            self.close()

    def __dealloc__(self):
        self.close()

    cdef dict offered(self):
        return {} if self.fd < 0 else {"pid": self.owner, "fd": self.fd, "token": self.token.hex()}

    cdef int change_count(self) noexcept:
        return word_of(&self.wakeup_word.changes)

    cdef void wake(self) noexcept:
        _wake(self.wakeup_word)

    cdef int wait(self, int seen, double seconds) except -1:
        cdef WakeupWord* wakeup_word = self.wakeup_word
        add(&wakeup_word.sleepers, 1)
        with nogil:
            if word_of(&wakeup_word.changes) == seen:
                sleep_shared(&wakeup_word.changes, seen, seconds)
        add(&wakeup_word.sleepers, -1)
        return 0

    cdef void watch(self) noexcept:
        add(&self.wakeup_word.watchers, 1)

    cdef bint is_woken(self, int seen, double until) noexcept:
        cdef bint woken
        with nogil:
            woken = _is_woken(self.wakeup_word, seen, until)
        return woken

    cdef void leave(self, int seen) noexcept:
        cdef WakeupWord* wakeup_word = self.wakeup_word
        add(&wakeup_word.watchers, -1)
        if word_of(&wakeup_word.changes) != seen:  # peers that saw this watcher have woken no sleeper
            _wake(wakeup_word)

    cdef void expect(self, bint expects) noexcept:
        swap(&self.wakeup_word.expects, expects)

    cdef int close(self) except -1:
        """Close the descriptor, so that no more peers can open the memory. Mappings stay."""
        cdef int fd = self.fd
        self.fd = -1
        if fd >= 0 and os is not None and os.getpid() == self.owner:  # in a forked child it may be another file
            os.close(fd)
        return 0


def attach_rings(RingSet rings not None, int rank, int peer, pid, fd, token):
    """Return a rank's `RingPair` with a peer, from what the peer has `offered`.

    Raises
    ------
    OSError
        If this rank has no memory, or the peer's memory cannot be opened or is other memory.
    """
    cdef RingPair pair = RingPair.__new__(RingPair)
    if rings.fd < 0:
        raise OSError("this rank has no shared memory")
    own = reopen(pid, fd, token, _length(rings.size))
    try:
        pair.wakeup, pair.outbox = MappedPages(own, 0), MappedPages(own, 1 + rank * _PAGES, _PAGES)
        pair.inbox = MappedPages(rings.fd, 1 + peer * _PAGES, _PAGES)
    finally:
        os.close(own)
    return pair


cdef class RingPair:
    """One rank's end of the memory that two ranks share; `attach_rings` makes it."""

    cdef bint put(self, Note* note) noexcept:
        cdef _Ring* ring = <_Ring*>self.outbox.base
        cdef Note* slot
        if self.written - load_shared(&ring.taken) >= _NOTES:
            swap(&ring.writer_waits, 1)
            if self.written - load_shared(&ring.taken) >= _NOTES:  # still full: the reader will see `writer_waits`
                return False
        slot = &ring.notes[self.written % _NOTES]
        slot.place, slot.count, slot.channel = note.place, note.count, note.channel
        slot.kind, slot.tag = note.kind, note.tag
        memcpy(slot.type, note.type, strlen(note.type) + 1)
        self.written += 1
        store_shared(&slot.number, self.written)
        return True

    cdef void wake_peer(self) noexcept:
        cdef WakeupWord* wakeup_word = <WakeupWord*>self.wakeup.base
        # Before the counters are read: a thread sets its counter before it reads `changes`.
        add(&wakeup_word.changes, 1)
        if word_of(&wakeup_word.expects) and word_of(&wakeup_word.sleepers) and not word_of(&wakeup_word.watchers):
            wake_shared(&wakeup_word.changes)

    cdef bint next(self, Note* note) noexcept:
        cdef _Ring* ring = <_Ring*>self.inbox.base
        cdef Note* slot = &ring.notes[self.read % _NOTES]
        if load_shared(&slot.number) != self.read + 1:
            return False
        note[0] = slot[0]
        note.type[MAX_NAME] = 0
        self.read += 1
        store_shared(&ring.taken, self.read)
        if word_of(&ring.writer_waits) and swap(&ring.writer_waits, 0):
            self.wake_peer()
        return True


cdef enum:
    _RING = 1024
    _HEAD = 4096
    #: Results of `look`: ranks are missing; all bring the same; a rank brings something else, or messages.
    _MISSING = 0
    _SAME = 1
    _TO_COMPARE = 2
    #: How a rank takes part in a collective: it does not wait; it compares; it compares messages too; it has left.
    _PASSED = 0
    _COMPARES = 1
    _HAS_MESSAGES = 2
    _LEFT = 3

#: Seconds that a rank polls before it sleeps, as other ranks often begin the same call at the same time. Meanwhile it
#: yields the core (`_SPIN_BEFORE_YIELD`), which these ranks may need.
cdef double _SPIN = 60e-6

cdef struct _ShortNote:
    uint64_t number  # the collective's number plus 1; 0 while the note is written
    uint64_t digest
    uint64_t how

cdef struct _FullNote:
    uint64_t number  # as in `_ShortNote`
    uint64_t length

cdef struct _Head:
    char token[TOKEN]
    int changes
    int sleepers


cdef size_t _note_bytes(size_t size) noexcept nogil:
    """Return how many bytes a full note may have: space for two messages and one part count per rank."""
    return 4096 - sizeof(_FullNote) + 64 * size


cdef size_t _stride(size_t size) noexcept nogil:
    return _RING * sizeof(_ShortNote) + 2 * (sizeof(_FullNote) + _note_bytes(size))


cdef uint64_t digest_of(bytes calls):
    cdef uint64_t digest = 14695981039346656037ULL
    cdef const unsigned char* at = calls
    cdef Py_ssize_t i
    for i in range(len(calls)):
        digest = (digest ^ at[i]) * 1099511628211ULL
    return digest


def create_exchange(size):
    """Make the memory of an exchange for so many ranks; return its descriptor and token."""
    return create_memory("ncclpy-check", _HEAD + size * _stride(size))


def attach_exchange(pid, fd, token, rank, size):
    """Return a rank's view of the exchange that a process of this machine has open under a descriptor.

    Raises
    ------
    OSError
        If it cannot be opened, or is other memory.
    """
    own = reopen(pid, fd, token, _HEAD + size * _stride(size))
    try:
        return SharedExchange(own, rank, size)
    finally:
        os.close(own)


cdef class SharedExchange:
    """The notes of all ranks in shared memory, as one rank writes and reads them; `attach_exchange` makes it."""

    cdef char* base
    cdef size_t length
    cdef readonly int rank
    cdef readonly int size
    cdef long long comparisons

    shared = True

    def __init__(self, int fd, int rank, int size):
        if self.base != NULL:
            raise RuntimeError("a SharedExchange is initialised once")
        self.rank, self.size = rank, size
        self.length = _HEAD + size * _stride(size)
        self.base = <char*>map_shared(fd, 0, self.length)
        if self.base == NULL:
            raise OSError("the group's shared memory cannot be mapped")

    def __dealloc__(self):
        if self.base != NULL:
            munmap(self.base, self.length)

    cdef _ShortNote* short_note_of(self, int rank, uint64_t number) noexcept nogil:
        cdef size_t stride = _stride(<size_t>self.size)
        return <_ShortNote*>(self.base + _HEAD + rank * stride) + number % _RING

    cdef _FullNote* full_note_of(self, int rank, int which) noexcept nogil:
        cdef size_t place = sizeof(_FullNote) + _note_bytes(<size_t>self.size)
        return <_FullNote*>(<char*>self.short_note_of(rank, 0) + _RING * sizeof(_ShortNote) + which * place)

    def put(self, uint64_t number, bytes calls not None, bytes note, bint has_messages):
        """Write this rank's short note for a collective and, if the rank waits for the others, the full `note`.

        A `note` that is too long leaves its slot marked with its length only.
        """
        cdef _ShortNote* short_note = self.short_note_of(self.rank, number)
        cdef _FullNote* full_note
        if note is not None:
            full_note = self.full_note_of(self.rank, self.comparisons & 1)
            self.comparisons += 1
            store_shared(&full_note.number, 0)
            full_note.length = len(note)
            if full_note.length <= _note_bytes(self.size):
                memcpy(<char*>full_note + sizeof(_FullNote), <char*>note, full_note.length)
            store_shared(&full_note.number, number + 1)
        store_shared(&short_note.number, 0)
        short_note.digest = digest_of(calls)
        short_note.how = _PASSED if note is None else _HAS_MESSAGES if has_messages else _COMPARES
        store_shared(&short_note.number, number + 1)
        self._tell()

    def leave(self, uint64_t number, note):
        """Mark that this rank does not wait for the others any more; `note` is not used."""
        cdef _ShortNote* short_note = self.short_note_of(self.rank, number)
        store_shared(&short_note.how, _LEFT)
        self._tell()

    cdef int _tell(self) except -1:
        cdef _Head* head = <_Head*>self.base
        add(&head.changes, 1)
        if word_of(&head.sleepers):
            with nogil:
                wake_shared(&head.changes)
        return 0

    cdef int state(self, uint64_t number, uint64_t digest) noexcept nogil:
        cdef int rank, found = _SAME
        cdef _ShortNote* short_note
        cdef uint64_t stored
        for rank in range(self.size):
            short_note = self.short_note_of(rank, number)
            stored = load_shared(&short_note.number)
            if stored < number + 1:
                return _MISSING
            if stored > number + 1 or short_note.digest != digest or short_note.how >= _HAS_MESSAGES or load_shared(&short_note.number) != stored:
                found = _TO_COMPARE  # other calls, messages, or a rank that has left; or the note is being overwritten
        return found

    def look(self, uint64_t number, bytes calls not None, double seconds):
        """Wait for the other ranks, so many seconds at most.

        Returns 1 if all bring these calls, 2 if a rank brings something else or messages, 0 if some are missing.
        """
        cdef uint64_t digest = digest_of(calls)
        cdef _Head* head = <_Head*>self.base
        cdef int found, seen
        cdef double begin, waited
        found = self.state(number, digest)
        if found != _MISSING:
            return found
        with nogil:
            begin = now()
            while True:
                found = self.state(number, digest)
                waited = now() - begin
                if found != _MISSING or waited > _SPIN:
                    break
                if waited > _SPIN_BEFORE_YIELD:
                    sched_yield()
                else:
                    relax()
            add(&head.sleepers, 1)
            while found == _MISSING and now() - begin < seconds:
                seen = word_of(&head.changes)
                found = self.state(number, digest)
                if found == _MISSING:
                    sleep_shared(&head.changes, seen, seconds - (now() - begin))
            add(&head.sleepers, -1)
        return found

    def brought(self, uint64_t number):
        """Return what each rank brings.

        For a rank that waits, that is its full note, empty if the note was too long; for a rank that did not wait, the
        digest of its calls. None if the rank is so far ahead that its short or full note is overwritten; False if the
        rank is missing or has left.
        """
        cdef _ShortNote* short_note
        cdef _FullNote* full_note
        cdef int rank, which
        cdef uint64_t stored
        found = []
        for rank in range(self.size):
            short_note = self.short_note_of(rank, number)
            stored = load_shared(&short_note.number)
            if stored != number + 1:
                found.append(None if stored > number + 1 else False)
            elif short_note.how == _LEFT:
                found.append(False)
            elif short_note.how == _PASSED:
                found.append(int(short_note.digest))
            else:
                note = None
                for which in range(2):
                    full_note = self.full_note_of(rank, which)
                    if load_shared(&full_note.number) == number + 1:
                        note = (
                            b"" if full_note.length > _note_bytes(self.size)
                            else (<char*>full_note + sizeof(_FullNote))[:full_note.length]
                        )
                found.append(note)
        return found

    def absent(self, uint64_t number):
        """Return the ranks that are missing."""
        return [rank for rank in range(self.size) if load_shared(&self.short_note_of(rank, number).number) < number + 1]

    def too_long(self, bytes note not None):
        """Return whether a full note is longer than its slot."""
        return <size_t>len(note) > _note_bytes(self.size)

    def close(self):
        """Do nothing: the memory is unmapped with its last reference."""


def digest(bytes calls not None):
    """Return the digest that stands for calls in short notes."""
    return int(digest_of(calls))
