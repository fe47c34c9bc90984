"""One collective while its participants come together: what they agree on, and who is missing."""

import logging

cimport cython
from libc.stdint cimport uint64_t
from libc.string cimport memset

from ncclpy.core.arguments.buffers cimport View
from ncclpy.core.arguments.validation cimport (
    COUNT, OPERATOR, TYPE, Extents, check_layout, difference, digest, digest_begun, known_apart, note_apart,
    shared_memory_error, take_fingerprint, type_of,
)
from ncclpy.core.arguments.operation cimport Operation, has_root, reduces
from ncclpy.core.runtime.wait cimport FOREVER, now
from ncclpy.engine.protocols cimport Awaited, is_plain, message

from ncclpy.errors import NcclTimeout
from ncclpy.types import ReduceOp
from ncclpy.engine.recorder import method_name, show

_log = logging.getLogger("ncclpy.manager")

# Kept here: an enum's member is looked up by Python.
cdef dict _OPERATORS = {int(op): op.name.lower() for op in ReduceOp}


@cython.freelist(64)
@cython.final
cdef class Key:
    """What a collective is called; whatever its class says later, it is found and taken away again.

    It is hashed once, outside all locks, and compared there too, unless both keys are of plain types: a look-up in a
    dict under a lock notes whom the key would have to be compared with, and takes it to be different. If nothing was
    found and there are such doubts, `compare` asks outside the lock, and the look-up is made again, until it finds the
    key or has no doubts: so two that bring equal keys at the same time meet.
    """

    def __hash__(self):
        return self.hashed

    def __eq__(self, Key other not None):
        cdef Key seeker, met, one
        if self is other:
            return True
        if self.hashed != other.hashed:
            return False
        if self.value is other.value:
            return True
        if self.plain and other.plain:
            return self.value == other.value
        seeker, met = (self, other) if self.sought else (other, self)
        if not seeker.sought:  # both are in the dict
            return False
        if seeker.same is met:
            return True
        if seeker.others is not None:
            for one in seeker.others:
                if one is met:
                    return False
        if seeker.doubts is None:
            seeker.doubts = []
        seeker.doubts.append(met)
        return False

    cdef int compare(self) except -1:
        """Ask the classes of the keys in doubt; outside all locks."""
        cdef Key met
        doubts, self.doubts = self.doubts, None
        if self.others is None:
            self.others = []
        for met in doubts or ():
            if met.value == self.value:
                self.same = met
                return 0
            self.others.append(met)
        return 0

    cdef int found(self) except -1:
        """Forget what it was compared with; outside all locks."""
        self.sought = False
        self.same = None
        self.doubts = self.others = None
        return 0


cdef Key new_key(object value):
    """Return the key of a value; raise what its class does if it cannot be hashed."""
    cdef Key key = Key.__new__(Key)
    try:
        key.hashed = hash(value)
    except TypeError as error:
        raise TypeError(f"key: {error}; pass a str, an int or a tuple of such") from None
    key.value = value
    key.plain = is_plain(value)
    key.sought = True
    return key


@cython.freelist(64)
cdef class Participant:
    """What one device brings to a collective."""

    cdef int bring(self, const Operation* operation, const View* view) except -1:
        """Take over what its buffers have been found to be."""
        take_fingerprint(&self.call, operation, view)
        self.call.root = -1  # who it is need not be known to all yet
        self.send, self.recv = operation.send, operation.recv
        self.count = operation.count
        return 0


cdef class Gathering(Awaited):
    """The participants of one key. The first one sets what all others must agree with; the first error stays."""

    cdef int check(self, Participant participant) except -1:
        """Compare a participant with the first one and all that came before; the first difference is the error."""
        cdef Participant other
        if self.error is not None:
            return 0
        what = None
        if participant.communicator_key != self.communicator_key:
            keys = _short(self.communicator_key), _short(participant.communicator_key)
            what = self._differ("communicator key", keys[0], keys[1], participant)
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
        elif participant.call.kind != self.call.kind:
            kinds = method_name(self.call.kind), method_name(participant.call.kind)
            what = self._differ("operation", kinds[0], kinds[1], participant)
        elif participant.num_local != self.num_local:  # first: by default num_global is num_local
            what = self._differ(
                "number of local participants (num_local)", self.num_local, participant.num_local, participant
            )
        elif participant.num_global != self.num_global:
            what = self._differ(
                "number of participants (num_global)", self.num_global, participant.num_global, participant
            )
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
        if what is None and has_root(self.call.kind):
            what = self._check_root(participant)
        if what is not None:
            self.error = ValueError(self.say(what))
        return 0

    def _check_data(self, Participant participant):
        cdef int found = difference(&self.call, &participant.call)
        if found == TYPE:
            return self._differ("data type", type_of(&self.call), type_of(&participant.call), participant)
        if found == COUNT:
            return self._differ("element count", self.call.count, participant.call.count, participant)
        if found == OPERATOR:
            return self._differ("reduction operator", _op(self.call.op), _op(participant.call.op), participant)
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
            self.call, self.count = participant.call, participant.count
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
        if not has_root(self.call.kind) or self.error is not None:
            return 0
        found = None
        for index, participant in enumerate(self.participants):
            rank = participant.global_rank if participant.global_rank >= 0 else index
            if participant.is_root:
                if participant.root >= 0 and participant.root != rank:
                    self.error = ValueError(self.say(
                        f"the participant on device {participant.device} is the root and has rank {rank}, but says "
                        f"that the root is {participant.root}"
                    ))
                    return 0
                found = (rank, participant.device)
        for participant in self.participants:
            if participant.root >= 0:
                if found is not None and found[0] != participant.root:
                    self.error = ValueError(self.say(
                        f"two roots: device {found[1]} is one, of rank {found[0]}, and device {participant.device} "
                        f"says that it is rank {participant.root}"
                    ))
                    return 0
                if found is None and self.num_local == self.num_global:
                    self.error = ValueError(self.say(
                        f"device {participant.device} says that the root is rank {participant.root}, which has not "
                        "come as the root"
                    ))
                    return 0
                found = (participant.root, participant.device)
        if found is None:
            more = "" if self.num_local == self.num_global else "; if it is on another node, root= must say its rank"
            self.error = ValueError(self.say(f"no root among the participants{more}"))
            return 0
        self.root = found[0]
        return 0

    cdef int settle_memory(self) except -1:
        """Compare the participants' memory, now that their ranks are known: one launch runs all of them at once."""
        cdef Participant participant
        cdef Operation o
        cdef uint64_t number = ~digest_begun(self.num_global)  # not that of a group, whose operations know their ranks
        if self.error is not None:
            return 0
        memset(&o, 0, sizeof(o))
        o.kind, o.datatype, o.count = self.call.kind, self.call.datatype, self.count
        for participant in self.participants:
            o.send, o.recv = participant.send, participant.recv
            number = digest(number, &o)
        if not known_apart(number):
            self._compare_memory(&o)
            if self.error is None:
                note_apart(number)
        return 0

    cdef int _compare_memory(self, Operation* o) except -1:
        cdef Participant participant
        cdef Extents extents = Extents()
        for index, participant in enumerate(self.participants):
            o.send, o.recv = participant.send, participant.recv
            if participant.global_rank < 0:  # else it was compared when it came
                try:
                    check_layout(o, self.num_global, index)
                except ValueError as error:
                    self.error = ValueError(self.say(f"rank {index}, device {participant.device}: {error}"))
                    return 0
            extents.add_operation(o, self.num_global, index)
        if extents.clash():
            self.error = ValueError(self.say(str(shared_memory_error(
                &extents.first, &extents.second, self._called(extents.second.place), self._called(extents.first.place)
            ))))
        return 0

    cdef str _called(self, size_t place):
        """Return what a participant's operation is called."""
        return f"{method_name(self.call.kind)} of device {(<Participant>self.participants[place]).device}"

    cdef int end(self, object error) except -1:
        """Fail every participant with the same error; `let_go` is to follow where code of users may run."""
        cdef Participant participant
        participants, self.participants = self.participants, []
        self.ended = participants if self.ended is None else self.ended + participants
        for participant in participants:
            participant.work.settle(error)
        return 0

    cdef int let_go(self) except -1:
        """Let go of what participants that have failed have brought."""
        cdef Participant participant
        if not self.ended:
            return 0
        ended, self.ended = self.ended, None
        for participant in ended:
            participant.work.tidy()
        return 0

    cdef object say(self, str what):
        """Return a text that begins with the key."""
        return message("key ", self.key.value, f": {what}")

    cdef str missing(self):
        """Say in words what it waits for, in a thread that may ask the key for its text."""
        return self._waits_for(True)

    cdef object overdue(self):
        """Return the error of a key whose participants have not come; it does not ask the key for its text."""
        what = self._waits_for(self.key.plain)
        return NcclTimeout(self.say(f"not all participants came within {self.timeout:g} s; it waits for {what}"))

    cdef str _waits_for(self, bint shows_key):
        cdef Participant participant
        if self.arrived >= self.num_local:
            if self.num_local < self.num_global and not self.signalled:
                return f"signal_multi_node_ready({show(self.key.value) if shows_key else '...'})"
            return "its communicator"
        here = sorted([participant.device for participant in self.participants])
        more = self.num_local - self.arrived
        return f"{more} more local participant{'' if more == 1 else 's'}; devices {here} have come"

    def as_dict(self):
        """Return what `Manager.pending` and a dump of the recorder tell of it."""
        cdef Participant participant
        return {
            "key": self.key.value,
            "operation": method_name(self.call.kind),
            "since": self.since,
            "arrived": sorted([participant.device for participant in self.participants]),
            "num_local": self.num_local,
            "missing": max(0, self.num_local - self.arrived),
            "waits_for": self.missing(),
        }


cdef Gathering new_gathering(Key key, Participant first, bint signalled):
    cdef Gathering gathering = Gathering.__new__(Gathering)
    gathering.key = key
    gathering.call = first.call
    gathering.num_local = first.num_local
    gathering.num_global = first.num_global
    gathering.communicator_key = first.communicator_key
    gathering.signalled = signalled
    gathering.participants = []
    gathering.since = now()
    gathering.timeout = FOREVER
    gathering.root = -1
    return gathering


cdef class Stalled:
    """The warning of keys that have been waiting for long."""

    def __init__(self, list gatherings not None):
        self.gatherings, self.moment = gatherings, now()

    def __call__(self):
        cdef Gathering gathering
        for gathering in self.gatherings:
            seconds = self.moment - gathering.since
            _log.warning(
                "key %s has been waiting for %.0f s, for %s", show(gathering.key.value), seconds, gathering.missing()
            )


def _says(Participant participant not None):
    return "does not" if participant.global_rank < 0 else f"is {participant.global_rank}"


def _short(bytes communicator_key):
    return communicator_key.hex()[:16] or "none"


def _op(int op):
    return _OPERATORS.get(op, op)


def _rank_and_device(Participant participant not None):
    return participant.global_rank, participant.device
