"""The communicators of one set of devices, local ranks of one clique, and what runs on them."""

import hashlib
import logging
import threading

from libc.string cimport memset

from ncclpy.abi.driver cimport CUstream
from ncclpy.core.abort cimport ABORT_DEADLINE
from ncclpy.core.communicator cimport Communicator
from ncclpy.core.lower cimport Steps, lacks, lower
from ncclpy.core.operation cimport Operation
from ncclpy.core.stream cimport Stream
from ncclpy.core.wait cimport FOREVER, now
from ncclpy.engine.launcher cimport Launch
from ncclpy.engine.message cimport around, words_of
from ncclpy.engine.work cimport Work
from ncclpy.manager.gathering cimport Gathering, Participant

from ncclpy.core.creation import get_unique_id
from ncclpy.core.errors import NcclAborted
from ncclpy.core.group import Group
from ncclpy.core.types import UniqueId
from ncclpy.engine.launcher import abort_aside

_log = logging.getLogger("ncclpy.manager")


cdef class Clique:
    """Communicators that were made together, found again by the key they were made for.

    Parameters
    ----------
    manager : Manager
        Which owns it.
    key : hashable
        The communicator key; the devices on one node.
    devices : tuple of int
        The local devices, in the order of their ranks.
    ranks : tuple of int
        The rank of each device.
    nranks : int
        The number of ranks on all nodes.
    site : str
        Where the manager was made, for warnings.
    """

    def __init__(self, manager, key, devices, ranks, int nranks, site):
        self.manager = manager
        self.site = site
        self.key = key
        self.devices = devices
        self.ranks = ranks
        self.nranks = nranks
        self.state = MAKING
        self.comms = []
        self.streams = []
        self.waiting = []
        self.launches = set()

    def make(self, unique_id, config):
        """Make the communicators, in a thread of its own: other nodes may be late.

        Parameters
        ----------
        unique_id : bytes
            The communicator key of several nodes; empty on one, which makes its own.
        config : Config or None
            NCCL's configuration.
        """
        thread = threading.Thread(target=self._make, args=(unique_id, config), name="ncclpy-init", daemon=True)
        thread.start()

    def _make(self, unique_id, config):
        made, error = [], None
        try:
            uid = UniqueId.from_bytes(unique_id) if unique_id else get_unique_id()
            self.name = hashlib.blake2b(bytes(uid), digest_size=4).hexdigest()
            with Group():
                for rank, device in zip(self.ranks, self.devices, strict=True):
                    comm = Communicator.init(self.nranks, rank, uid, device=device, config=config, abortable=True)
                    made.append(comm)
                    (<Communicator>comm).site = self.site  # its line is this thread's
        except BaseException as failure:  # told to all who wait for it
            error = failure
        self.manager._made(self, made, error)

    cdef list ready(self, list comms, list streams):
        """Take the communicators over and launch what has waited for them; return that, to be let go of."""
        self.comms, self.streams = comms, streams
        self.state = MADE
        waiting, self.waiting = self.waiting, []
        for gathering in waiting:
            self.launch(gathering)
        return waiting

    def fail(self, error):
        """Fail what waits for communicators that cannot be made; outside the Manager's lock."""
        cdef Gathering gathering
        self.state = GONE
        waiting, self.waiting = self.waiting, []
        for gathering in waiting:
            gathering.end(error)
            gathering.let_go()

    cdef int take(self, Gathering gathering) except -1:
        """Launch a collective, as soon as the communicators are there."""
        if self.state == MADE:
            return self.launch(gathering)
        gathering.since = now()
        self.waiting.append(gathering)
        return 0

    def overdue(self):
        """Return the gatherings whose timeout has passed while the communicators were being made."""
        cdef Gathering gathering
        cdef double moment = now()
        return [gathering for gathering in self.waiting if moment - gathering.since >= gathering.timeout]

    def patience(self):
        """Return the shortest timeout of what waits for the communicators."""
        cdef Gathering gathering
        return min([gathering.timeout for gathering in self.waiting], default=FOREVER)

    cdef int launch(self, Gathering gathering) except -1:
        """Put a collective on the devices; what goes wrong is its participants', not the caller's."""
        cdef Launch launch = Launch(self)
        self.launches.add(launch)
        try:
            self._fill(launch, gathering)
            launch.start()
        except BaseException as error:
            self.launches.discard(launch)
            gathering.end(error)
        return 0

    cdef int _fill(self, Launch launch, Gathering gathering) except -1:
        """Add the participants, which stand in the order of the ranks."""
        cdef Participant participant
        cdef Communicator comm
        cdef Operation operation
        cdef size_t i
        cdef double moment = now()
        launch.kept = (self.comms, self.streams)
        for i, participant in enumerate(gathering.participants):
            comm = self.comms[i]
            participant.work.limit = FOREVER if gathering.timeout == FOREVER else moment + gathering.timeout
            participant.work.gathering = None
            participant.work.entry.communicator = self.name
            participant.work.entry.sequence = self.sequence
            participant.work.entry.rank = comm.rank
            participant.work.entry.root = gathering.root
            participant.work.entry.nranks = comm.nranks
            _describe(&operation, gathering, participant, (<Stream>self.streams[i]).raw)
            _add(launch, comm, &operation, participant.work)
        self.sequence += 1
        return 0

    def launch_done(self, launch):
        """Note that all works of a launch are done."""
        self.launches.discard(launch)

    def launch_failed(self, launch, error):
        """Leave the manager's cache: these communicators are aborted, the next use makes new ones."""
        self.manager._lost(self)
        failure = NcclAborted(
            around("the communicator was aborted, since another collective on it failed: ", words_of(error), "")
        )
        for other in list(self.launches):
            if other is not launch:
                (<Launch>other).end(failure)

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

        The Manager's lock is not held, but nobody finds these communicators any more.
        """
        self.state = GONE
        comms, self.comms = self.comms, []
        for launch in list(self.launches):
            (<Launch>launch).end(error)
        self.fail(error)
        return comms

    def close(self):
        """Close the communicators; nothing may run on them."""
        self.state = GONE
        comms, self.comms = self.comms, []
        # NCCL may let a rank wait for the others when it is destroyed.
        threads = [threading.Thread(target=_close, args=(comm,), name="ncclpy-close", daemon=True) for comm in comms]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(ABORT_DEADLINE)
        if any(thread.is_alive() for thread in threads):
            abort_aside(comms, f"they were not closed after {ABORT_DEADLINE:g} s").join(ABORT_DEADLINE)


def _close(comm):
    try:
        comm.close()
    except Exception:  # nobody could do more about it; its memory stays with NCCL
        _log.warning("closing %r failed", comm, exc_info=True)
        comm.abort()


cdef tuple ranks_of(Gathering gathering):
    """Return the ranks of the participants, which stand in their order."""
    cdef Participant one
    if gathering.communicator_key:
        return tuple([(<Participant>one).global_rank for one in gathering.participants])
    return tuple(range(len(gathering.participants)))


cdef int check_members(Clique clique, Gathering gathering, tuple devices) except -1:
    """Raise if a communicator key comes with other devices or ranks than when its communicators were made."""
    ranks = ranks_of(gathering)
    if devices != clique.devices or ranks != clique.ranks or gathering.num_global != clique.nranks:
        raise ValueError(gathering.say(
            f"its communicator key stands for ranks {list(clique.ranks)} of {clique.nranks} on devices "
            f"{list(clique.devices)}, not for ranks {list(ranks)} of {gathering.num_global} on devices "
            f"{list(devices)}; other members need a key of their own"
        ))
    return 0


cdef int _describe(Operation* o, Gathering gathering, Participant participant, CUstream stream) except -1:
    memset(o, 0, sizeof(Operation))
    o.kind = gathering.kind
    o.datatype = gathering.datatype
    o.op = gathering.op
    o.root = gathering.root
    o.send = participant.send
    o.recv = participant.recv
    o.count = gathering.count
    o.stream = stream
    return 0


cdef int _add(Launch launch, Communicator comm, const Operation* operation, Work work) except -1:
    """Add an operation to a launch; what an older NCCL lacks, as what stands for it."""
    cdef Steps steps
    cdef size_t i
    if not lacks(operation.kind):
        return launch.add(work, comm, operation, work.ready)
    steps = lower(operation, comm.rank, comm.nranks, None, None)
    for i in range(steps.count - 1):
        launch.add_before(comm, &steps.operations[i], NULL if i else work.ready)
    launch.add(work, comm, &steps.operations[steps.count - 1], work.ready if steps.count == 1 else NULL)
    return 0
