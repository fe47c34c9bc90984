"""The gatherings of one set of devices: they wait for its communicators, and are launched on them."""

from libc.string cimport memset

from ncclpy.abi.driver cimport CUstream
from ncclpy.core.capture cimport relax
from ncclpy.core.communicator cimport Communicator
from ncclpy.core.lower cimport Lowered, lacks, lower
from ncclpy.core.operation cimport Operation
from ncclpy.core.stream cimport Stream
from ncclpy.core.wait cimport FOREVER, now
from ncclpy.engine.clique cimport GONE, MADE
from ncclpy.engine.launcher cimport Launch
from ncclpy.engine.work cimport Work
from ncclpy.manager.gathering cimport Gathering, Participant

# Seconds in which who waits in a store tells who is absent, before the deadline's own error says less.
cdef double _TELLS = 2.0


cdef class Ensemble(Clique):
    """Communicators for gatherings."""

    def __cinit__(self, *args):
        self.waiting = []

    cdef int meet_in(self, object store, Gathering gathering) except -1:
        """Have the processes of these communicators meet in a store, if there is one, before they are made."""
        if store is None or len(self.devices) == self.nranks:
            return 0
        from ncclpy.manager.nodes import Nodes  # most Managers need no store

        self.nodes = Nodes(
            store, gathering.communicator_key, self.ranks, self.nranks, gathering.timeout, _sayer_of(gathering),
            _asker_of(self),
        )
        return 0

    def _make(self, unique_id, config):
        nodes = self.nodes
        if nodes is not None:
            relax()
            try:
                nodes.meet()
            except BaseException as error:  # told to all who wait for it
                self.owner.clique_made(self, [], error)
                return
            finally:
                self.nodes = None
        Clique._make(self, unique_id, config)
        if nodes is not None and self.state == MADE:
            nodes.forget()

    cdef list ready(self, list comms, list streams):
        """Take the communicators over and launch what has waited for them; return that, to be let go of."""
        Clique.ready(self, comms, streams)
        waiting, self.waiting = self.waiting, []
        for gathering in waiting:
            self.launch(gathering)
        return waiting

    cdef int fail(self, object error) except -1:
        """Fail what waits for communicators that cannot be made; outside the Manager's lock."""
        cdef Gathering gathering
        self.state = GONE
        waiting, self.waiting = self.waiting, []
        for gathering in waiting:
            gathering.end(error)
            gathering.let_go()
        return 0

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
        if self.nodes is not None:
            moment -= _TELLS
        return [gathering for gathering in self.waiting if moment - gathering.since >= gathering.timeout]

    def patience(self):
        """Return the shortest timeout of what waits for the communicators."""
        cdef Gathering gathering
        return min([gathering.timeout for gathering in self.waiting], default=FOREVER)

    cdef int launch(self, Gathering gathering) except -1:
        """Put a collective on the devices; what goes wrong is its participants', not the caller's."""
        cdef Launch launch = self.begin()
        cdef Operation operation
        try:
            self._fill(launch, gathering)
            _describe(&operation, gathering, gathering.participants[0], NULL)
            self.start(launch, &operation)
        except BaseException as error:
            self.forget(launch)
            gathering.end(error)
        return 0

    cdef int _fill(self, Launch launch, Gathering gathering) except -1:
        """Add the participants, which stand in the order of the ranks."""
        cdef Participant participant
        cdef Communicator comm
        cdef Operation operation
        cdef size_t i
        cdef double moment = now()
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


def _sayer_of(Gathering gathering not None):
    """Return what makes a text about a collective, with its key."""
    return lambda what: gathering.say(what)


def _asker_of(Ensemble ensemble not None):
    """Return what says whether communicators are still to be made."""
    return lambda: ensemble.state != GONE


cdef tuple ranks_of(Gathering gathering):
    """Return the ranks of the participants, which stand in their order."""
    cdef Participant one
    if gathering.communicator_key:
        return tuple([(<Participant>one).global_rank for one in gathering.participants])
    return tuple(range(len(gathering.participants)))


cdef int check_members(Ensemble ensemble, Gathering gathering, tuple devices) except -1:
    """Raise if a communicator key comes with other devices or ranks than when its communicators were made."""
    ranks = ranks_of(gathering)
    if devices != ensemble.devices or ranks != ensemble.ranks or gathering.num_global != ensemble.nranks:
        raise ValueError(gathering.say(
            f"its communicator key stands for ranks {list(ensemble.ranks)} of {ensemble.nranks} on devices "
            f"{list(ensemble.devices)}, not for ranks {list(ranks)} of {gathering.num_global} on devices "
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
    cdef Lowered lowered
    cdef size_t i
    if not lacks(operation.kind):
        return launch.add(work, comm, operation, work.ready)
    lowered = lower(operation, comm.rank, comm.nranks, None, None)
    for i in range(lowered.count - 1):
        launch.add_before(comm, &lowered.operations[i], NULL if i else work.ready)
    launch.add(work, comm, &lowered.operations[lowered.count - 1], work.ready if lowered.count == 1 else NULL)
    return 0
