"""The communicators of one set of devices, local ranks of one clique, and the launches on them."""

import logging
import threading

from libc.stdlib cimport calloc, free

from ncclpy.core.abort cimport ABORT_DEADLINE
from ncclpy.core.device cimport relax
from ncclpy.core.communicator cimport Communicator
from ncclpy.core.datatypes cimport ITEMSIZE
from ncclpy.core.operation cimport has_root
from ncclpy.engine.fence cimport believe, fence
from ncclpy.engine.launcher cimport Launch, new_launch
from ncclpy.engine.protocols cimport around, words_of
from ncclpy.engine.work cimport Work

from ncclpy.core.creation import get_unique_id
from ncclpy.core.errors import NcclAborted
from ncclpy.core.group import Group
from ncclpy.core.types import UniqueId
from ncclpy.engine.launcher import abort_aside
from ncclpy.core.stream_readers import raise_in_readers

# The table of signatures: its size at first and at most, and at how many places each may be.
cdef enum:
    _FEW = 32
    _MOST = 2048
    _WAYS = 4

_log = logging.getLogger("ncclpy.engine")


cdef class Clique(LaunchOwner):
    """Communicators that were made together, and what runs on them.

    Parameters
    ----------
    owner : CliqueOwner
        Who is told when they are made and when they are lost.
    key : hashable
        What they are found by.
    devices : tuple of int
        The local devices, in the order of their ranks.
    ranks : tuple of int
        The rank of each device.
    nranks : int
        The number of ranks on all nodes.
    site : str
        Where their owner was made, for warnings.
    """

    def __init__(self, CliqueOwner owner not None, key, devices, ranks, int nranks, site):
        self.owner = owner
        self.site = site
        self.key = key
        self.devices = devices
        self.ranks = ranks
        self.nranks = nranks
        self.state = MAKING
        self.comms = []
        self.begun = []
        self.streams = []
        self.launches = set()

    def __dealloc__(self):
        free(self.familiar)

    def make(self, unique_id, config):
        """Make the communicators, in a thread of its own: other nodes may be late.

        Parameters
        ----------
        unique_id : bytes
            Of the clique; empty if these are all of its ranks: then one is made.
        config : Config or None
            NCCL's configuration.
        """
        thread = threading.Thread(target=self._make, args=(unique_id, config), name="ncclpy-init", daemon=True)
        thread.start()

    def _make(self, unique_id, config):
        relax()
        made, error = [], None
        try:
            uid = UniqueId.from_bytes(unique_id) if unique_id else get_unique_id()
            with Group():
                for rank, device in zip(self.ranks, self.devices, strict=True):
                    comm = Communicator.init(self.nranks, rank, uid, device=device, config=config, abortable=True)
                    made.append(comm)
                    (<Communicator>comm).site = self.site  # its line is this thread's
                    self.name = (<Communicator>comm).group_name
                self.begun = made
                if self.state == GONE:  # an abort before this has not seen them
                    raise NcclAborted("the communicators were aborted while they were made")
        except BaseException as failure:  # told to all who wait for it
            error = failure
        self.owner.clique_made(self, made, error)
        self.begun = []

    cdef list ready(self, list comms, list streams):
        """Take over the communicators and the streams for them; return what had waited for that, to be let go of."""
        self.comms, self.streams = comms, streams
        self.kept = (comms, streams)
        self.state = MADE
        return []

    cdef int fail(self, object error) except -1:
        """Fail what waits for communicators that cannot be made, or are gone; under no lock."""
        self.state = GONE
        return 0

    cdef Launch begin(self):
        """Return a launch on these communicators, to be filled and started."""
        cdef Launch launch = new_launch(self)
        launch.kept = self.kept
        self.launches.add(launch)
        return launch

    cdef int start(self, Launch launch, const Operation* operation) except -1:
        """Start a launch of such an operation on all devices: in this thread only if one like it has run here.

        NCCL connects the ranks when it first needs that, and waits for them all: in a lane it may.
        """
        launch.signature = signature_of(operation)
        return launch.start(self.knows(launch.signature))

    cdef bint knows(self, unsigned long long signature) noexcept:
        return self._place_with(signature, signature) != NULL

    cdef int learn(self, unsigned long long signature) noexcept:
        """Remember a signature of what has run here; in a full table it takes another one's place."""
        cdef unsigned long long* place = self._place_with(signature, 0)
        while place == NULL and self._grow():
            place = self._place_with(signature, 0)
        if place == NULL and self.capacity:
            place = self._places_of(signature) + self.nreplaced % _WAYS
            self.nreplaced += 1
        if place != NULL:
            place[0] = signature
        return 0

    cdef bint _grow(self) noexcept:
        """Double the table; return whether that may be and there was memory for it."""
        cdef size_t i, before = self.capacity, capacity = 2 * before if before else _FEW
        cdef unsigned long long* old = self.familiar
        cdef unsigned long long* place
        cdef unsigned long long* grown = NULL
        if capacity <= _MOST:
            grown = <unsigned long long*>calloc(capacity, sizeof(unsigned long long))
        if grown == NULL:
            return False
        self.familiar, self.capacity = grown, capacity
        for i in range(before):
            place = self._place_with(old[i], 0) if old[i] else NULL
            if place != NULL:
                place[0] = old[i]
        free(old)
        return True

    cdef unsigned long long* _place_with(self, unsigned long long signature, unsigned long long wanted) noexcept:
        """Return the place with this in it, of those at which a signature may be; NULL if there is none."""
        cdef size_t i
        cdef unsigned long long* places
        if self.capacity == 0:
            return NULL
        places = self._places_of(signature)
        for i in range(_WAYS):
            if places[i] == wanted:
                return places + i
        return NULL

    cdef unsigned long long* _places_of(self, unsigned long long signature) noexcept:
        """Return the first of the places at which a signature may be; the capacity is a power of two."""
        cdef size_t hashed = <size_t>((signature * 0x9E3779B97F4A7C15ULL) >> 32)
        return self.familiar + (hashed & (self.capacity - 1) & ~<size_t>(_WAYS - 1))

    cdef int fence(self) except -1:
        """Believe no end of an operation any more."""
        cdef Communicator comm
        for comm in self.comms:
            fence(comm)
        return 0

    cdef int believe(self, int seen) except -1:
        """Believe them again: they were not ended when this process had been stopped so often."""
        cdef Communicator comm
        for comm in self.comms:
            believe(comm, seen)
        return 0

    cdef int note_readers(self, set readers) except -1:
        """Collect the threads that have a stream wait for what runs, and wait for none of it themselves."""
        cdef Work work
        waiters = set()
        for launch in list(self.launches):
            for work in (<Launch>launch).members():
                if work.is_settled():
                    continue
                if work.reader:
                    readers.add(work.reader)
                if work.waiter:
                    waiters.add(work.waiter)
        readers -= waiters  # their wait raises the error
        return 0

    cdef int tell_readers(self, set readers, object error) except -1:
        """Have an error raised in such threads, before the communicators are aborted; not in the one that ends them."""
        readers.discard(threading.get_ident())
        raise_in_readers(readers, 0, error)
        return 0

    cdef int forget(self, Launch launch) except -1:
        """Forget a launch that could not be started."""
        self.launches.discard(launch)
        return 0

    cdef int launch_done(self, Together launch) except -1:
        """Note that all works of a launch are done."""
        cdef Launch done = launch
        self.launches.discard(launch)
        if not done.failing and not self.knows(done.signature):
            self.learn(done.signature)
        return 0

    cdef int launch_failed(self, Together launch, object error) except -1:
        """Leave the owner's cache: these communicators are aborted, the next use makes new ones."""
        self.owner.clique_lost(self)
        failure = NcclAborted(
            around("the communicator was aborted, since another collective on it failed: ", words_of(error), "")
        )
        failure.ranks = getattr(error, "ranks", None)
        for other in list(self.launches):
            if other is not launch:
                (<Launch>other).end(failure)
        return 0

    @property
    def idle(self):
        """Whether nothing runs or waits on it."""
        return self.state == MADE and not self.launches

    @property
    def alive(self):
        """Whether it is made or being made."""
        return self.state != GONE

    @property
    def in_flight(self):
        """How many collectives are launched and not done."""
        return len(self.launches)

    def abort(self, error):
        """Fail what runs or waits with `error`, and return the communicators, which have yet to be aborted.

        The owner's lock is not held, but nobody finds these communicators any more.
        """
        self.state = GONE
        comms, self.comms, self.kept = self.comms, [], None
        for launch in list(self.launches):
            (<Launch>launch).end(error)
        self.fail(error)
        return comms or list(self.begun)

    def close(self):
        """Close the communicators; nothing may run on them."""
        self.state = GONE
        comms, self.comms, self.kept = self.comms, [], None
        # NCCL may let a rank wait for the others when it is destroyed.
        threads = [threading.Thread(target=_close, args=(comm,), name="ncclpy-close", daemon=True) for comm in comms]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(ABORT_DEADLINE)
        if any(thread.is_alive() for thread in threads):
            abort_aside(comms, f"they were not closed after {ABORT_DEADLINE:g} s").join(ABORT_DEADLINE)


cdef unsigned long long signature_of(const Operation* o) noexcept:
    cdef size_t nbytes = o.count * ITEMSIZE[o.datatype]
    cdef int size = 0, root = o.root if has_root(o.kind) else 0
    while nbytes:
        nbytes >>= 1
        size += 1
    # 5 bits, 7, 5, 8, one that makes it another number than 0, and 32 for the root.
    return (
        1ULL << 31 | o.kind | <unsigned long long>size << 5 | <unsigned long long>o.datatype << 12
        | <unsigned long long>(o.op & 0xFF) << 17 | <unsigned long long><unsigned int>root << 32
    )


def _close(comm):
    relax()
    try:
        comm.close()
    except Exception:  # nobody could do more about it; its memory stays with NCCL
        _log.warning("closing %r failed", comm, exc_info=True)
        comm.abort()
