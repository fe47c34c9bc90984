# distutils: language = c++
"""One rank's end of the control plane; and for tests and benchmarks `Node`, which has no connections and no thread.

The C++ in native/ needs no GIL.
"""

import os
import threading

from cpython.exc cimport PyErr_CheckSignals
from cpython.pythread cimport PyThread_get_thread_ident
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.deque cimport deque
from libcpp.memory cimport make_shared, shared_ptr
from libcpp.string cimport string
from libcpp.utility cimport pair
from libcpp.vector cimport vector
from posix.time cimport timespec

from ncclpy.errors import NcclAborted

cdef extern from "<string_view>" namespace "std" nogil:
    cdef cppclass string_view:
        string_view(const char*, size_t)

cdef extern from "<poll.h>" nogil:
    cdef struct pollfd:
        int fd
        short events
        short revents

    const short POLLIN
    int ppoll(pollfd*, unsigned long, const timespec*, const void*)

cdef extern from "<sys/prctl.h>" nogil:
    const int PR_SET_TIMERSLACK
    int prctl(int, unsigned long, unsigned long, unsigned long, unsigned long)

cdef extern from "ncclpy/bootstrap/native/clock.hpp" namespace "ncclpy::store" nogil:
    double now()

cdef extern from "ncclpy/bootstrap/native/descriptors.hpp" namespace "ncclpy::store" nogil:
    int generation()

cdef extern from "native/node.hpp" namespace "ncclpy::coordinator" nogil:
    const uint32_t kSets

    cdef cppclass Bits:
        void add(size_t)
        vector[uint32_t] list() except +
        void write(Writer&) except +

    Bits read_bits "ncclpy::coordinator::Bits::read_all"(string_view, size_t) except +ValueError

    cdef cppclass Writer:
        string take() except +

    cdef enum class Kind:
        run
        mismatch
        after_join
        overdue
        stalled
        all_joined
        group
        closing
        ended

    cdef struct Part:
        string fixed
        Bits ranks

    cdef struct Neighbour:
        string key
        Bits ranks

    cdef cppclass Record:
        Kind kind
        uint32_t group
        string key
        string fixed
        vector[string] owns
        vector[Part] parts
        vector[Neighbour] near
        Bits have
        Bits missing
        double seconds
        int64_t rank
        string reason

    cdef enum class Brought:
        taken
        twice
        closing
        joined
        ended
        no_group

    cdef cppclass Counters:
        uint64_t brought
        uint64_t runs
        uint64_t hits
        uint64_t frames
        uint64_t evicted
        uint64_t bytes_up
        uint64_t bytes_down

    cdef cppclass Place:
        uint32_t rank
        uint32_t size
        cbool root
        vector[pair[uint32_t, Bits]] children

    cdef cppclass NativeNode "ncclpy::coordinator::Node":
        NativeNode(Place, size_t, double, double) except +
        Brought bring(uint32_t, string, string, string, cbool, double) except +
        Brought join() except +
        void shut_down(cbool, const string&) except +
        void launched(uint32_t) except +
        void from_child(size_t, string_view, double) except +ValueError
        void from_parent(string_view, double) except +ValueError
        void lost_child(size_t, const string&) except +
        void lost_parent(uint32_t, const string&) except +
        deque[string] up
        deque[string] down
        deque[vector[Record]] records
        double look(double) except +
        void settle() except +
        cbool pending()
        size_t condemned()
        Counters counters

cdef extern from "native/control.hpp" namespace "ncclpy::coordinator" nogil:
    cdef cppclass Options:
        size_t cache
        double timeout
        double stall_after
        double silence

    cdef cppclass Peer:
        uint32_t rank
        int fd

    cdef enum class Next "ncclpy::coordinator::Control::Next":
        frame
        nothing
        over

    cdef cppclass NativeControl "ncclpy::coordinator::Control":
        NativeControl(const Place&, const Options&, Peer, const vector[int]&) except +
        cbool start() except +
        Brought bring(uint32_t, const string&, const string&, const string&, cbool) except +
        cbool try_bring(uint32_t, const string&, const string&, const string&, cbool, Brought&) except +
        Brought join() except +
        void shut_down(cbool, const string&) except +
        void launched(uint32_t) except +
        Bits have(uint32_t, const string&) except +
        Counters counters() except +
        Next next(vector[Record]&, double) except +
        void close(cbool)

cdef dict _NAMES = {
    <int>Kind.run: "run", <int>Kind.mismatch: "mismatch", <int>Kind.after_join: "after_join", <int>Kind.overdue: "overdue",
    <int>Kind.stalled: "stalled", <int>Kind.all_joined: "all_joined", <int>Kind.group: "group",
    <int>Kind.closing: "closing", <int>Kind.ended: "ended",
}

# Seconds of one slice of a wait: in the main thread, which runs signal handlers after it, and in other threads.
cdef double _SLICE = 0.1, _LONG_SLICE = 60.0


cdef tuple _ranks(Bits& bits):
    return tuple(bits.list())


cdef tuple _record(Record& record):
    """Return a record as a tuple: the name of its kind, and the fields of that kind."""
    name = _NAMES[<int>record.kind]
    if record.kind == Kind.run:
        owns = tuple([<bytes>own for own in record.owns])
        return name, record.group, <bytes>record.key, <bytes>record.fixed, owns, _ranks(record.have)
    if record.kind == Kind.mismatch:
        parts = tuple([(<bytes>part.fixed, _ranks(part.ranks)) for part in record.parts])
        return name, record.group, <bytes>record.key, parts
    if record.kind == Kind.after_join:
        return name, record.group, <bytes>record.key, <bytes>record.fixed, _ranks(record.have)
    if record.kind == Kind.overdue:
        return name, record.group, <bytes>record.key, <bytes>record.fixed, _ranks(record.have), _ranks(record.missing)
    if record.kind == Kind.stalled:
        near = tuple([(<bytes>each.key, _ranks(each.ranks)) for each in record.near])
        return (
            name, record.group, <bytes>record.key, <bytes>record.fixed, _ranks(record.have), _ranks(record.missing),
            record.seconds, near,
        )
    if record.kind == Kind.all_joined:
        return name, record.rank
    if record.kind == Kind.group:
        return name, record.group, _ranks(record.have)
    if record.kind == Kind.closing:
        return name, record.rank, (<bytes>record.reason).decode(errors="replace")
    return name, record.rank, _ranks(record.have), (<bytes>record.reason).decode(errors="replace")


cdef list _records(vector[Record]& records):
    return [_record(record) for record in records]


cdef Place _place(uint32_t rank, uint32_t size, bint root, children) except *:
    cdef Place place
    cdef pair[uint32_t, Bits] child
    place.rank, place.size, place.root = rank, size, root
    for number, below in children:
        child = pair[uint32_t, Bits]()
        child.first = number
        for each in below:
            child.second.add(each)
        place.children.push_back(child)
    return place


cdef string _set_key(tuple ranks) except *:
    """Return the key by which a new process set is agreed on."""
    cdef Bits members
    cdef Writer out
    for rank in ranks:
        members.add(rank)
    members.write(out)
    return out.take()


class AlreadyAsked(ValueError):
    """Report a request that this rank has made before and that the ranks have not agreed on yet."""


cdef int _check(Brought brought, str what) except -1:
    if brought == Brought.taken:
        return 0
    if brought == Brought.twice:
        raise AlreadyAsked(f"{what}: this rank has it in flight already")
    if brought == Brought.joined:
        raise ValueError(f"{what}: this rank has joined, and brings nothing until all have")
    if brought == Brought.no_group:
        raise ValueError(f"{what}: this rank does not belong to that set of ranks")
    raise NcclAborted(f"{what}: the coordinator " + ("is shutting down" if brought == Brought.closing else "has ended"))


cdef dict _counted(Counters& counters):
    return {
        "brought": counters.brought, "runs": counters.runs, "hits": counters.hits, "frames": counters.frames,
        "evicted": counters.evicted, "bytes_up": counters.bytes_up, "bytes_down": counters.bytes_down,
    }


def be_punctual():
    """Have this thread's sleeps end on time, not up to 50 us later, which is the kernel's default timer slack."""
    prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)


def await_readable(descriptors, double seconds):
    """Sleep until a descriptor has something to read, or for `seconds`; return the descriptors that have.

    A signal ends the sleep early; the result is then empty.

    The wait is exact to the microsecond, where Python's polls count milliseconds, and takes any descriptors, where
    Python's select takes none above 1023.
    """
    cdef vector[pollfd] polled
    cdef pollfd each
    cdef timespec limit
    cdef int ready
    for descriptor in descriptors:
        each.fd, each.events, each.revents = descriptor, POLLIN, 0
        polled.push_back(each)
    limit.tv_sec = <long>seconds
    limit.tv_nsec = <long>((seconds - limit.tv_sec) * 1e9)
    with nogil:
        ready = ppoll(polled.data(), polled.size(), &limit, NULL)
    return [one.fd for one in polled if one.revents] if ready > 0 else []


def ranks_of_set(bytes key not None, int size):
    """Return the ranks of a new process set from its key; `size` is the number of all ranks."""
    cdef Bits members = read_bits(string_view(<const char*>key, len(key)), size)
    return _ranks(members)


#: The set number under which new process sets are agreed on.
SETS = int(kSets)


cdef class Control:
    """One rank's end of the control plane, with its connections and its thread.

    Parameters
    ----------
    rank, size : int
        This rank's number, and the number of ranks.
    parent : (int, int) or None
        The parent's rank and the descriptor of a stream socket to it; None at the root. The descriptors of parent and
        children are taken over, even if this raises.
    children : list of (int, tuple of int, int)
        For each child its rank, the ranks of its subtree, and the descriptor of a socket to it.
    cache : int
        How many operations the response cache holds, the same on all ranks.
    timeout : float
        Seconds after which an operation that not all ranks have brought fails on all ranks; 0 is never.
    stall_after : float
        Seconds after which the root reports such an operation.
    silence : float
        Seconds after which a silent rank counts as lost.
    """

    cdef readonly int rank
    cdef readonly int size
    cdef shared_ptr[NativeControl] control
    cdef int fork_generation
    cdef unsigned long main_thread

    def __cinit__(
        self, int rank, int size, parent, list children not None, *, cache, double timeout, double stall_after,
        double silence=30.0
    ):
        cdef Options options
        cdef Place place
        cdef Peer above
        cdef vector[int] fds
        above.rank, above.fd = parent or (0, -1)
        for each in children:
            fds.push_back(each[2])
        self.rank, self.size = rank, size
        self.fork_generation = generation()
        self.main_thread = threading.main_thread().ident
        try:
            options.cache, options.timeout, options.stall_after, options.silence = cache, timeout, stall_after, silence
            place = _place(rank, size, parent is None, [(each[0], each[1]) for each in children])
            self.control = make_shared[NativeControl](place, options, above, fds)
        except BaseException:  # such as MemoryError for a huge cache; nothing else owns the descriptors now
            if above.fd >= 0:
                os.close(above.fd)
            for fd in fds:
                os.close(fd)
            raise
        if not self.control.get().start():
            raise OSError("a coordinator's thread, or its eventfd, cannot be made; see ulimit -u and ulimit -n")

    def __dealloc__(self):
        if self.control.get() == NULL:
            return
        if self.fork_generation != generation():
            new shared_ptr[NativeControl](self.control)  # never freed: a forked child must not touch it
            return
        with nogil:
            self.control.get().close(False)

    cdef int _refuse_in_fork(self) except -1:
        if self.fork_generation != generation():
            raise RuntimeError("this process is a fork: the coordinator belongs to its parent")
        return 0

    def bring(
        self, uint32_t group, bytes key not None, bytes fixed not None, bytes own not None, bint joinable
    ):
        """Bring an operation; `next` returns the response.

        Parameters
        ----------
        group : int
            The number of a process set; 0 is all ranks.
        key : bytes
            The key of the operation, the same on all ranks.
        fixed : bytes
            What must be the same on all ranks.
        own : bytes
            This rank's own data, which all ranks receive.
        joinable : bool
            Whether the operation is defined if ranks have joined.
        """
        cdef Brought brought
        cdef string name = key, same = fixed, mine = own
        self._refuse_in_fork()
        # If the mutex is free, this thread keeps the GIL for these microseconds. If it released the GIL, it might have
        # to wait until another thread releases the GIL again.
        if not self.control.get().try_bring(group, name, same, mine, joinable, brought):
            with nogil:
                brought = self.control.get().bring(group, name, same, mine, joinable)
        if brought != Brought.taken:
            _check(brought, repr(key.decode(errors="replace")))

    def define(self, tuple ranks not None):
        """Bring a new process set, of which this rank is a member."""
        cdef Brought brought
        cdef string key = _set_key(ranks)
        self._refuse_in_fork()
        with nogil:
            brought = self.control.get().bring(kSets, key, string(), string(), False)
        _check(brought, f"the set of ranks {ranks}")

    def join(self):
        """Bring nothing more until all have joined; join once all that this rank has brought runs or has failed."""
        cdef Brought brought
        self._refuse_in_fork()
        with nogil:
            brought = self.control.get().join()
        if brought == Brought.twice:
            raise AlreadyAsked("join: this rank has joined")
        _check(brought, "join")

    def shutdown(self, bint drain, str reason not None):
        """End the control plane of all ranks: at once or, with `drain`, after the operations that all have brought."""
        cdef string words = reason.encode(errors="replace")
        self._refuse_in_fork()
        with nogil:
            self.control.get().shut_down(drain, words)

    def launched(self, uint32_t group):
        """Report that a frame's operations of a set were launched; the root then sends the set's next operations."""
        self._refuse_in_fork()
        with nogil:
            self.control.get().launched(group)

    def have(self, uint32_t group, bytes key not None):
        """Return the ranks that are known here to have brought an operation; none if it does not wait here."""
        cdef string name = key
        cdef Bits found
        self._refuse_in_fork()
        with nogil:
            found = self.control.get().have(group, name)
        return _ranks(found)

    def counters(self):
        """Return this rank's counters by name."""
        cdef Counters counted
        self._refuse_in_fork()
        with nogil:
            counted = self.control.get().counters()
        return _counted(counted)

    def next(self, double timeout):
        """Wait for the next frame; return its records, [] if none arrives in time, None after the last frame."""
        cdef vector[Record] records
        cdef double deadline = now() + timeout, until
        cdef double slice = _SLICE if PyThread_get_thread_ident() == self.main_thread else _LONG_SLICE
        cdef Next found
        self._refuse_in_fork()
        while True:
            until = min(deadline, now() + slice)
            with nogil:
                found = self.control.get().next(records, until)
            if found == Next.frame:
                return _records(records)
            if found == Next.over:
                return None
            PyErr_CheckSignals()
            if now() >= deadline:
                return []

    def close(self):
        """Close the connections; in a forked child, do nothing.

        If the coordinator has not ended on all ranks, the others count this rank as lost.
        """
        if self.fork_generation != generation():
            return
        with nogil:
            self.control.get().close(True)


cdef class Node:
    """A rank's node in the tree, without connections: the caller carries its frames to other nodes.

    Parameters
    ----------
    rank, size : int
        This rank's number, and the number of ranks.
    root : bool
        Whether the rank has no parent.
    children : list of (int, tuple of int)
        For each child its rank, and the ranks of its subtree.
    cache, timeout, stall_after
        As for `Control`.
    """

    cdef NativeNode* node

    def __cinit__(
        self, int rank, int size, bint root, list children not None, *, size_t cache, double timeout=0.0,
        double stall_after=60.0
    ):
        self.node = new NativeNode(_place(rank, size, root, children), cache, timeout, stall_after)

    def __dealloc__(self):
        del self.node

    def bring(self, uint32_t group, bytes key not None, bytes fixed not None, bytes own=b"", bint joinable=True, double time=0.0):
        """Bring an operation."""
        cdef Brought brought = self.node.bring(group, key, fixed, own, joinable, time)
        self.node.settle()
        _check(brought, repr(key))

    def define(self, tuple ranks not None, double time=0.0):
        """Bring a new process set."""
        cdef Brought brought = self.node.bring(kSets, _set_key(ranks), string(), string(), False, time)
        self.node.settle()
        _check(brought, f"the set of ranks {ranks}")

    def join(self):
        """Bring nothing more until all have joined."""
        cdef Brought brought = self.node.join()
        self.node.settle()
        _check(brought, "join")

    def shutdown(self, bint drain, bytes reason not None):
        """End the control plane of all ranks; see `Control.shutdown`."""
        self.node.shut_down(drain, reason)
        self.node.settle()

    def launched(self, uint32_t group):
        """Report that a frame's operations were launched."""
        self.node.launched(group)
        self.node.settle()

    def from_child(self, size_t child, bytes frame not None, double time=0.0):
        """Process a frame from a child; raise ValueError if it is malformed."""
        self.node.from_child(child, string_view(<const char*>frame, len(frame)), time)
        self.node.settle()

    def from_parent(self, bytes frame not None, double time=0.0):
        """Process a frame from the parent; raise ValueError if it is malformed."""
        self.node.from_parent(string_view(<const char*>frame, len(frame)), time)
        self.node.settle()

    def lost_child(self, size_t child):
        """Note that the connection to a child is lost."""
        self.node.lost_child(child, b"has ended")
        self.node.settle()

    def lost_parent(self, uint32_t rank):
        """Note that the connection to the parent is lost."""
        self.node.lost_parent(rank, b"has ended")
        self.node.settle()

    def look(self, double time):
        """Report operations that wait for long or are overdue; return when to look again, or infinity."""
        next = self.node.look(time)
        self.node.settle()
        return next

    def up(self):
        """Remove and return the frames for the parent."""
        frames = [<bytes>frame for frame in self.node.up]
        self.node.up.clear()
        return frames

    def down(self):
        """Remove and return the frames for the children, each of which gets all of them."""
        frames = [<bytes>frame for frame in self.node.down]
        self.node.down.clear()
        return frames

    def records(self):
        """Remove and return the records for this rank: a list for each frame, and for what arises here."""
        frames = [_records(frame) for frame in self.node.records]
        self.node.records.clear()
        return frames

    def pending(self):
        """Return whether an operation, or this rank's `join`, waits here."""
        return self.node.pending()

    def condemned(self):
        """Return how many overdue operations are kept, to be failed here if this rank brings them after all."""
        return self.node.condemned()

    def counters(self):
        """Return this rank's counters by name."""
        return _counted(self.node.counters)
