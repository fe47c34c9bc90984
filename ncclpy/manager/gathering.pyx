"""One collective while its participants come together: what they agree on, and who is missing."""

cimport cython

from ncclpy.core.buffers cimport View
from ncclpy.core.collectives cimport type_name
from ncclpy.core.operation cimport ALL_REDUCE, BROADCAST, GATHER, REDUCE, REDUCE_SCATTER, SCATTER
from ncclpy.core.wait cimport FOREVER, now

from ncclpy.core.types import ReduceOp
from ncclpy.engine.recorder import method_name, show


@cython.freelist(64)
@cython.final
cdef class Key:
    """What a collective is called, hashed once: whatever its class says later, it is found and taken away again."""

    def __hash__(self):
        return self.hashed

    def __eq__(self, Key other not None):
        return self.hashed == other.hashed and (self.value is other.value or bool(self.value == other.value))


cdef Key new_key(object value):
    """Return the key of a value; raise what its class does if it cannot be hashed."""
    cdef Key key = Key.__new__(Key)
    try:
        key.hashed = hash(value)
    except TypeError as error:
        raise TypeError(f"key: {error}; pass a str, an int or a tuple of such") from None
    key.value = value
    return key


@cython.freelist(64)
cdef class Participant:
    """What one device brings to a collective."""


cdef bint _rooted(int kind) noexcept:
    return kind == BROADCAST or kind == REDUCE or kind == GATHER or kind == SCATTER


cdef bint _reduces(int kind) noexcept:
    return kind == ALL_REDUCE or kind == REDUCE or kind == REDUCE_SCATTER


@cython.freelist(16)
cdef class Gathering:
    """The participants of one key. The first one sets what all others must agree with; the first error stays."""

    def __cinit__(self, Key key, int kind, int num_local, int num_global, bytes communicator_key, bint signalled):
        self.key = key
        self.kind = kind
        self.num_local = num_local
        self.num_global = num_global
        self.communicator_key = communicator_key
        self.signalled = signalled
        self.participants = []
        self.since = now()
        self.timeout = FOREVER
        self.root = -1

    cdef int check(
        self, Participant participant, int kind, int num_local, int num_global, bytes communicator_key
    ) except -1:
        """Compare a participant with the first one and with all that came before; the first difference is the error."""
        cdef Participant other
        if self.error is not None:
            return 0
        what = None
        if communicator_key != self.communicator_key:
            what = self._differ("communicator key", _short(self.communicator_key), _short(communicator_key), participant)
        elif self.num_local == self.num_global and self.communicator_key:
            what = (
                f"a communicator key was given, but all {self.num_global} participants are on this node; it is for "
                "collectives of several nodes"
            )
        elif self.num_local < self.num_global and not self.communicator_key:
            what = (
                f"{self.num_local} of {self.num_global} participants are on this node, and no communicator key was "
                "given; one node makes it with generate_communicator_key() and gives it to the others"
            )
        elif self.communicator_key and len(self.communicator_key) != 128:
            what = f"a communicator key has 128 bytes, not {len(self.communicator_key)}"
        elif kind != self.kind:
            what = self._differ("operation", method_name(self.kind), method_name(kind), participant)
        elif num_local != self.num_local:  # first: by default num_global is num_local
            what = self._differ("number of local participants (num_local)", self.num_local, num_local, participant)
        elif num_global != self.num_global:
            what = self._differ("number of participants (num_global)", self.num_global, num_global, participant)
        elif self.arrived >= self.num_local:
            what = f"one participant too many, on device {participant.device}: {self.num_local} have come already"
        elif self.arrived:
            what = self._check_data(participant)
        if what is None:
            for other in self.participants:
                if other.device == participant.device:
                    what = (
                        f"two participants on device {participant.device}; each has a device of its own, and a key is "
                        "free again when its participants have come"
                    )
                elif participant.global_rank >= 0 and other.global_rank == participant.global_rank:
                    what = (
                        f"two participants of global rank {participant.global_rank}, on devices {other.device} and "
                        f"{participant.device}"
                    )
                elif (other.global_rank < 0) != (participant.global_rank < 0):
                    what = (
                        f"some participants say their global rank and some do not: device {other.device} "
                        f"{_says(other)}, device {participant.device} {_says(participant)}"
                    )
        if what is None and self.num_local < self.num_global and participant.global_rank < 0:
            what = f"the participant on device {participant.device} has no global_rank, which several nodes need"
        if what is None and participant.global_rank >= self.num_global:
            what = f"global rank {participant.global_rank} on device {participant.device}: there are {self.num_global}"
        if what is None and _rooted(self.kind):
            what = self._check_root(participant)
        if what is not None:
            self.error = ValueError(f"key {self.shown()}: {what}")
        return 0

    def _check_data(self, Participant participant):
        if participant.datatype != self.datatype or participant.flavour != self.flavour:
            return self._differ(
                "data type", _type(self.datatype, self.flavour),
                _type(participant.datatype, participant.flavour), participant,
            )
        if participant.count != self.count:
            return self._differ("element count", self.count, participant.count, participant)
        if _reduces(self.kind) and participant.op != self.op:
            return self._differ("reduction operator", _op(self.op), _op(participant.op), participant)
        return None

    def _check_root(self, Participant participant):
        cdef Participant other
        if participant.is_root:
            for other in self.participants:
                if other.is_root:
                    return f"two roots: devices {other.device} and {participant.device}"
        if participant.root >= self.num_global:
            return f"root {participant.root} on device {participant.device}: there are {self.num_global} ranks"
        for other in self.participants:
            if participant.root >= 0 and other.root >= 0 and other.root != participant.root:
                return self._differ("root", other.root, participant.root, participant, other)
        return None

    def _differ(self, what, first, second, Participant participant, Participant other=None):
        if other is None and self.participants:
            other = self.participants[0]
        before = f"device {other.device} came first with {first}" if other is not None else f"it began with {first}"
        return f"the participants do not agree on the {what}: {before}, device {participant.device} brings {second}"

    cdef int join(self, Participant participant) except -1:
        """Count a participant in, whether or not it fits: all are waited for."""
        if not self.participants:
            self.datatype = participant.datatype
            self.flavour = participant.flavour
            self.count = participant.count
            self.op = participant.op
        self.participants.append(participant)
        self.arrived += 1
        return 0

    cdef bint is_ready(self) noexcept:
        """Return whether all local participants have come and, with several nodes, may start."""
        return self.arrived >= self.num_local and (
            self.signalled or self.num_local == self.num_global or self.error is not None
        )

    cdef int settle_roots(self) except -1:
        """Sort the participants by rank and find the root's; an error if there is none or two disagree."""
        cdef Participant participant
        cdef int rank
        if len(self.participants) > 1:
            self.participants.sort(key=_rank_and_device)
        if not _rooted(self.kind) or self.error is not None:
            return 0
        found = None
        for index, participant in enumerate(self.participants):
            rank = participant.global_rank if participant.global_rank >= 0 else index
            if participant.is_root:
                if participant.root >= 0 and participant.root != rank:
                    self.error = ValueError(
                        f"key {self.shown()}: the participant on device {participant.device} is the root and has rank "
                        f"{rank}, but says that the root is {participant.root}"
                    )
                    return 0
                found = (rank, participant.device)
        for participant in self.participants:
            if participant.root >= 0:
                if found is not None and found[0] != participant.root:
                    self.error = ValueError(
                        f"key {self.shown()}: two roots: device {found[1]} is one, of rank {found[0]}, and device "
                        f"{participant.device} says that it is rank {participant.root}"
                    )
                    return 0
                if found is None and self.num_local == self.num_global:
                    self.error = ValueError(
                        f"key {self.shown()}: device {participant.device} says that the root is rank {participant.root}, "
                        "which has not come as the root"
                    )
                    return 0
                found = (participant.root, participant.device)
        if found is None:
            more = "" if self.num_local == self.num_global else "; where it is on another node, root= must say its rank"
            self.error = ValueError(f"key {self.shown()}: no root among the participants{more}")
            return 0
        self.root = found[0]
        return 0

    cdef int end(self, object error) except -1:
        """Fail every participant with the same error."""
        cdef Participant participant
        participants, self.participants = self.participants, []
        for participant in participants:
            participant.work.settle(error)
        return 0

    def shown(self):
        """Return the key as text."""
        return show(self.key.value)

    def missing(self):
        """Say in words what it waits for."""
        cdef Participant participant
        if self.arrived >= self.num_local:
            if self.num_local < self.num_global and not self.signalled:
                return f"signal_multi_node_ready({self.shown()})"
            return "its communicator"
        here = sorted([participant.device for participant in self.participants])
        more = self.num_local - self.arrived
        return f"{more} more local participant{'' if more == 1 else 's'}; devices {here} have come"

    def as_dict(self):
        """Return what `Manager.pending` and a dump of the recorder tell of it."""
        cdef Participant participant
        return {
            "key": self.shown(),
            "operation": method_name(self.kind),
            "since": self.since,
            "arrived": sorted([participant.device for participant in self.participants]),
            "num_local": self.num_local,
            "missing": max(0, self.num_local - self.arrived),
            "waits_for": self.missing(),
        }


def _says(Participant participant not None):
    return "does not" if participant.global_rank < 0 else f"is {participant.global_rank}"


def _short(bytes communicator_key):
    return communicator_key.hex()[:16] or "none"


cdef object _type(int datatype, int flavour):
    cdef View view
    view.datatype = datatype
    view.flavour = flavour
    return type_name(&view)


def _op(int op):
    return ReduceOp(op).name.lower()


def _rank_and_device(Participant participant not None):
    return participant.global_rank, participant.device
