"""A collective while its participants arrive, and the set of devices on which it is launched."""

import _thread
import functools
import hashlib
import logging
import threading
import time
import weakref

cimport cython
from libc.stdint cimport uint64_t
from libc.string cimport memset

from ncclpy.abi.driver cimport CUstream
from ncclpy.core.arguments.buffers cimport View
from ncclpy.core.arguments.operation cimport Operation, has_root
from ncclpy.core.arguments.validation cimport (
    COUNT, OPERATOR, TYPE, Extents, Lowered, check_layout, difference, digest, digest_begun, fill_fingerprint,
    known_apart, lacks, lower, note_apart, shared_memory_error, type_of,
)
from ncclpy.core.communicator cimport Communicator
from ncclpy.core.runtime.device cimport relax
from ncclpy.core.runtime.stream cimport Stream
from ncclpy.core.runtime.wait cimport FOREVER, now, this_thread
from ncclpy.engine.work cimport Work, stops
from ncclpy.engine.launcher cimport GONE, MADE, Launch
from ncclpy.engine.native cimport load
from ncclpy.engine.callbacks cimport Awaited, LaunchGroup, is_plain, message
from ncclpy.engine.recorder cimport OpLog, operation_info_of

from ncclpy.bootstrap.store import LeaseEnded
from ncclpy.core.runtime.stream_readers import raise_in_readers
from ncclpy.engine import work
from ncclpy.engine.launcher import abort_in_background
from ncclpy.engine.monitor import call_at
from ncclpy.engine.recorder import method_name, show, text_of
from ncclpy.engine.callbacks import add_answer
from ncclpy.errors import NcclAborted, NcclError, NcclRemoteError, NcclTimeout, deliver, peer_error_class
from ncclpy.types import ReduceOp


_log = logging.getLogger("ncclpy.manager")

# Kept here: looking up an enum's member runs Python.
cdef dict _OPERATORS = {int(op): op.name.lower() for op in ReduceOp}


@cython.freelist(64)
@cython.final
cdef class Key:
    """The key of a collective, for dicts that are used under a lock: methods of users' classes run outside all locks.

    The value is hashed once, outside all locks. Values of plain types are compared under the lock. Other values are
    compared in two steps. First the key of a look-up collects in `keys_to_compare` the keys that it meets, and counts
    them as different. If the look-up found nothing and there are such keys, `compare` compares them outside the lock,
    and the look-up is repeated, until it finds the key or has no keys to compare. So two threads that use equal keys
    at the same time find the same gathering.
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
        seeker, met = (self, other) if self.is_lookup else (other, self)
        if not seeker.is_lookup:  # both are in the dict
            return False
        if seeker.equal_key is met:
            return True
        if seeker.unequal_keys is not None:
            for one in seeker.unequal_keys:
                if one is met:
                    return False
        if seeker.keys_to_compare is None:
            seeker.keys_to_compare = []
        seeker.keys_to_compare.append(met)
        return False

    cdef int compare(self) except -1:
        """Compare with `keys_to_compare`, by methods of the users' classes; outside all locks."""
        cdef Key met
        keys, self.keys_to_compare = self.keys_to_compare, None
        if self.unequal_keys is None:
            self.unequal_keys = []
        for met in keys or ():
            if met.value == self.value:
                self.equal_key = met
                return 0
            self.unequal_keys.append(met)
        return 0

    cdef int end_lookup(self) except -1:
        """End a look-up: forget the results of comparisons; outside all locks."""
        self.is_lookup = False
        self.equal_key = None
        self.keys_to_compare = self.unequal_keys = None
        return 0


cdef Key new_key(object value):
    """Return the key of a value; raise TypeError if the value cannot be hashed."""
    cdef Key key = Key.__new__(Key)
    try:
        key.hashed = hash(value)
    except TypeError as error:
        raise TypeError(f"key: {error}; pass a str, an int or a tuple of such") from None
    key.value = value
    key.plain = is_plain(value)
    key.is_lookup = True
    return key


@cython.freelist(64)
cdef class Participant:
    """What one device brings to a collective."""

    cdef int bring(self, const Operation* operation, const View* view) except -1:
        """Take over the buffers and the parameters of a checked operation."""
        fill_fingerprint(&self.call, operation, view)
        self.call.root = -1  # the root's rank may not be known yet
        self.send, self.recv = operation.send, operation.recv
        self.count = operation.count
        return 0


cdef class Gathering(Awaited):
    """The participants of one key. All must agree with the first one; the first disagreement is kept as the error."""

    cdef int check(self, Participant participant) except -1:
        """Compare a participant with the earlier ones; the first difference becomes the error."""
        cdef Participant other
        if self.error is not None:
            return 0
        what = None
        if participant.communicator_key != self.communicator_key:
            keys = _short_key(self.communicator_key), _short_key(participant.communicator_key)
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
        elif participant.num_local != self.num_local:  # before num_global, which is num_local by default
            what = self._differ(
                "number of local participants (num_local)", self.num_local, participant.num_local, participant
            )
        elif participant.num_global != self.num_global:
            what = self._differ(
                "number of participants (num_global)", self.num_global, participant.num_global, participant
            )
        elif self.arrived >= self.num_local:
            what = f"one participant too many, on device {participant.device}: {self.num_local} have arrived already"
        elif self.arrived:
            what = self._check_data(participant)
        if what is None:
            for other in self.participants:
                if other.device == participant.device:
                    what = (
                        f"two participants on device {participant.device}; each has a device of its own, and a key is "
                        "free again when its participants have arrived"
                    )
                elif participant.global_rank >= 0 and other.global_rank == participant.global_rank:
                    what = (
                        f"two participants of global rank {participant.global_rank}, on devices {other.device} and "
                        f"{participant.device}"
                    )
                elif (other.global_rank < 0) != (participant.global_rank < 0):
                    what = (
                        f"some participants say their global rank and some do not: device {other.device} "
                        f"{_rank_text(other)}, device {participant.device} {_rank_text(participant)}"
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
        cdef int kind_of_difference = difference(&self.call, &participant.call)
        if kind_of_difference == TYPE:
            return self._differ("data type", type_of(&self.call), type_of(&participant.call), participant)
        if kind_of_difference == COUNT:
            return self._differ("element count", self.call.count, participant.call.count, participant)
        if kind_of_difference == OPERATOR:
            operators = _operator_name(self.call.op), _operator_name(participant.call.op)
            return self._differ("reduction operator", operators[0], operators[1], participant)
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
        before = f"device {other.device} arrived first with {first}" if other is not None else f"it began with {first}"
        return f"the participants do not agree on the {what}: {before}, device {participant.device} passes {second}"

    cdef int join(self, Participant participant) except -1:
        """Count a participant in, even one that does not agree: all participants fail once all have arrived."""
        if not self.participants:
            self.call, self.count = participant.call, participant.count
        self.participants.append(participant)
        self.arrived += 1
        return 0

    cdef bint is_ready(self) noexcept:
        """Return whether all local participants have arrived and, with several nodes, the signal too (or an error)."""
        return self.arrived >= self.num_local and (
            self.signalled or self.num_local == self.num_global or self.error is not None
        )

    cdef int settle_roots(self) except -1:
        """Sort the participants by rank and find the root; set an error if none is named, or two different ones."""
        cdef Participant participant
        cdef int rank
        if len(self.participants) > 1:
            self.participants.sort(key=_rank_and_device)
        if not has_root(self.call.kind) or self.error is not None:
            return 0
        root = None
        for index, participant in enumerate(self.participants):
            rank = participant.global_rank if participant.global_rank >= 0 else index
            if participant.is_root:
                if participant.root >= 0 and participant.root != rank:
                    self.error = ValueError(self.say(
                        f"the participant on device {participant.device} is the root and has rank {rank}, but says "
                        f"that the root is {participant.root}"
                    ))
                    return 0
                root = (rank, participant.device)
        for participant in self.participants:
            if participant.root >= 0:
                if root is not None and root[0] != participant.root:
                    self.error = ValueError(self.say(
                        f"two roots: device {root[1]} is one, of rank {root[0]}, and device {participant.device} "
                        f"says that it is rank {participant.root}"
                    ))
                    return 0
                if root is None and self.num_local == self.num_global:
                    self.error = ValueError(self.say(
                        f"device {participant.device} says that the root is rank {participant.root}, which has not "
                        "arrived as the root"
                    ))
                    return 0
                root = (participant.root, participant.device)
        if root is None:
            more = "" if self.num_local == self.num_global else "; if it is on another node, root= must say its rank"
            self.error = ValueError(self.say(f"no root among the participants{more}"))
            return 0
        self.root = root[0]
        return 0

    cdef int settle_memory(self) except -1:
        """Compare the participants' memory, now that their ranks are known: one launch runs all of them at once."""
        cdef Participant participant
        cdef Operation o
        # Inverted, to differ from the digest of a group's calls: a noted gathering has passed `check_layout` as well.
        cdef uint64_t number = ~digest_begun(self.num_global)
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
            if participant.global_rank < 0:  # else the layout was checked on arrival
                try:
                    check_layout(o, self.num_global, index)
                except ValueError as error:
                    self.error = ValueError(self.say(f"rank {index}, device {participant.device}: {error}"))
                    return 0
            extents.add_operation(o, self.num_global, index)
        if extents.clash():
            self.error = ValueError(self.say(str(shared_memory_error(
                &extents.first, &extents.second, self._operation_name(extents.second.place),
                self._operation_name(extents.first.place),
            ))))
        return 0

    cdef str _operation_name(self, size_t place):
        """Return the name of a participant's operation, with its device."""
        return f"{method_name(self.call.kind)} of device {(<Participant>self.participants[place]).device}"

    cdef int end(self, object error) except -1:
        """Fail every participant with the same error; `let_go` must follow where users' code may run."""
        cdef Participant participant
        participants, self.participants = self.participants, []
        self.failed_participants = (self.failed_participants or []) + participants
        for participant in participants:
            participant.work.settle(error)
        return 0

    cdef int let_go(self) except -1:
        """Release the buffers and other references of participants that `end` has failed."""
        cdef Participant participant
        if not self.failed_participants:
            return 0
        failed_participants, self.failed_participants = self.failed_participants, None
        for participant in failed_participants:
            participant.work.tidy()
        return 0

    cdef object say(self, str what):
        """Return a text that begins with the key."""
        return message("key ", self.key.value, f": {what}")

    cdef str missing(self):
        """Return in words what it waits for; called in a thread that may call the key's ``__repr__``."""
        return self._waits_for(True)

    cdef object overdue(self):
        """Return the error of a key with missing participants; it runs no ``__repr__`` of a user's key."""
        what = self._waits_for(self.key.plain)
        return NcclTimeout(self.say(f"not all participants arrived within {self.timeout:g} s; it waits for {what}"))

    cdef str _waits_for(self, bint shows_key):
        cdef Participant participant
        if self.arrived >= self.num_local:
            if self.num_local < self.num_global and not self.signalled:
                return f"signal_multi_node_ready({show(self.key.value) if shows_key else '...'})"
            return "its communicator"
        here = sorted([participant.device for participant in self.participants])
        more = self.num_local - self.arrived
        return f"{more} more local participant{'' if more == 1 else 's'}; devices {here} have arrived"

    def as_dict(self):
        """Return the entry for `Manager.pending` and for dumps of the recorder."""
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
    """The warning about keys that have been waiting for long."""

    def __init__(self, list gatherings not None):
        self.gatherings, self.moment = gatherings, now()

    def __call__(self):
        cdef Gathering gathering
        for gathering in self.gatherings:
            seconds = self.moment - gathering.since
            _log.warning(
                "key %s has been waiting for %.0f s, for %s", show(gathering.key.value), seconds, gathering.missing()
            )


def _rank_text(Participant participant not None):
    return "does not" if participant.global_rank < 0 else f"is {participant.global_rank}"


def _short_key(bytes communicator_key):
    return communicator_key.hex()[:16] or "none"


def _operator_name(int op):
    return _OPERATORS.get(op, op)


def _rank_and_device(Participant participant not None):
    return participant.global_rank, participant.device


# By how many seconds the timeout of gatherings is longer while their processes are in the rendezvous: the error of the
# rendezvous, which names the missing ranks, should be raised first.
cdef double _RENDEZVOUS_GRACE = 2.0

# The most seconds that close(), or a thread after its abort, waits until the other processes are told that these ranks
# have left: the store may be stuck.
cdef double _LEAVE_TIMEOUT = 1.0

# Seconds after which a process that was stopped asks again a store that did not answer.
cdef double _RETRY_INTERVAL = 1.0


cdef class DeviceSet(CommunicatorSet):
    """The communicators of one set of devices, which launch gatherings."""

    def __cinit__(self, *args):
        self.waiting, self.informed = [], set()

    cdef int prepare_rendezvous(self, object store, dict gatherings, Gathering gathering) except -1:
        """Prepare the rendezvous before the making of the communicators, if a store and other processes exist."""
        if store is None or len(self.devices) == self.nranks:
            return 0
        from ncclpy.manager.process_rendezvous import meet  # most Managers need no store

        self.manager_gatherings, self.in_rendezvous, self.making = gatherings, True, True
        self.oplogs = {rank: OpLog() for rank in self.ranks}
        self.name = hashlib.blake2b(gathering.communicator_key, digest_size=4).hexdigest()
        self.run_rendezvous = functools.partial(
            meet, store, gathering.communicator_key, self.name, dict(zip(self.ranks, self.devices)), self.nranks,
            gathering.timeout, _text_function_of(gathering), _wanted_function_of(self), weakref.ref(self),
            DeviceSet.status, self.oplogs, DeviceSet.ended,
        )
        self.self_aborting = True
        work.listen(self)
        return 0

    def _make(self, unique_id, config):
        peer_status = None
        if self.run_rendezvous is not None:
            relax()
            try:
                self.peer_status = peer_status = self.run_rendezvous()
            except BaseException as error:  # set_made() passes it to all that wait
                self.owner.set_made(self, [], error)
                return
            finally:
                self.in_rendezvous, self.run_rendezvous = False, None
            if self.leave_message is not None:  # left during the rendezvous
                peer_status.leave(*self.leave_message)
        CommunicatorSet._make(self, unique_id, config)
        if peer_status is not None:
            from ncclpy.manager.process_rendezvous import forget

            if self.state == MADE:
                forget(peer_status)
            else:
                peer_status.leave()

    def status(self, int rank):
        """Return what a local rank does, with JSON's types; its current operation may still be gathering."""
        cdef Gathering gathering
        cdef Participant one
        status = self.oplogs[rank].status()
        if status["current"] is None:
            for gathering in self.waiting + list(self.manager_gatherings.values()):
                if gathering.communicator_key == self.key:
                    for one in gathering.participants:
                        if one.global_rank == rank:
                            # It has no sequence number before its launch.
                            status["current"] = operation_info_of(one.work.entry) | {"seq": self.sequence}
                            status["since"] = time.time() - (now() - one.work.entry.created)
                            return status
        return status

    cdef int inquire(self, object error) except -1:
        """Add to an error what the ranks do, if they have a store; a failure here does not replace the error."""
        peer_status = self.peer_status
        if peer_status is None or self.state != MADE:
            return 0
        try:
            summary, states = peer_status.ask()
            if summary is not None:
                add_answer(error, summary, states)
        except KeyboardInterrupt:  # repeated later, where it interrupts nothing
            _thread.interrupt_main()
        except BaseException:
            _log.warning("communicator %s could not ask what its ranks do", self.name, exc_info=True)
        return 0

    cdef int launch_failed(self, LaunchGroup launch, object error) except -1:
        """Ask what the ranks do, then end the communicators: an abort here ends the other ranks' operations too.

        Return True, with nothing failed, if the launch is done before the ranks have answered, or another end of these
        communicators has begun, which fails it.
        """
        self.note_failure(error)
        self.inquire(error)
        if (<Launch>launch).unsettled == 0 or self.end_begun:
            return 1
        readers = set()
        self._fence_and_note(readers)
        self.failures.append(error)
        self.owner.set_lost(self)
        if self.self_aborting:  # before the works fail: close() waits for them, then joins the thread started here
            # Not the error's text: it may name a key, which only its readers may show.
            kind = type(error).__name__
            self._end(list(self.comms), f"its operation failed with {kind}", error, readers)
        CommunicatorSet.launch_failed(self, launch, error)
        if not self.self_aborting:
            self.tell_readers(readers, error)
            self._leave()
        return 0

    cdef int note_failure(self, object error) except -1:
        """Let the error share the set of informed threads, so that each thread gets one error of these communicators.

        An error that other communicators have noted keeps their `informed`.
        """
        if getattr(error, "_informed", None) is None:
            error._informed = self.informed
        return 0

    cdef int _fence_and_note(self, set readers) except -1:
        """Fence the communicators, then note the threads that read by a stream, to raise the error in them.

        A thread that leaves a wait, or begins to read by a stream, after its state was noted finds the fence. There is
        no fence if other processes have ranks and no store can tell them of the end; an abort warns of these ranks.
        """
        if self.self_aborting or len(self.devices) == self.nranks:
            self.fence()
        return self.note_readers(readers)

    def ended(self, text, kind):
        """Fail what runs on these communicators, since another process has ended them."""
        if self.state == GONE:
            return
        error = peer_error_class(kind)(f"communicator {self.name!r} was ended{text}")
        self.note_failure(error)
        self.inquire(error)
        if self.state == GONE or self.end_begun:  # they have ended meanwhile
            return
        if self.making:  # no operation has run that an abort could end with wrong data
            self.owner.set_lost(self)
            self.end_thread = abort_in_background(CommunicatorSet.abort(self, error), text_of(error))
            return
        self.fence()
        readers = set()
        self.note_readers(readers)
        if self.launches:
            self.failures.append(error)
        self.end_error = error
        self.owner.set_lost(self)
        if self._end(list(self.comms), text.lstrip(": "), error, readers):  # before works fail, see `launch_failed`
            CommunicatorSet.abort(self, error)

    def ask_after_stop(self):
        """Find out whether the communicators were ended while this process was stopped; if not, call `believe`.

        If the store does not answer in time, ask again later; if it can answer no more, warn and call `believe`.
        """
        cdef int seen = load(&stops)
        peer_status = self.peer_status
        if peer_status is None or self.state != MADE:
            return
        ended = False
        try:
            ended = peer_status.announced_end() is not None
        except NcclTimeout:
            call_at(now() + _RETRY_INTERVAL, _retry_of(weakref.ref(self)))
            return
        except LeaseEnded as failure:  # the others have continued without this process
            self.ended(f": the other processes take this one for lost: {failure}", NcclRemoteError.__name__)
            return
        except (NcclError, ValueError):  # the store cannot answer any more, but the program can continue
            _log.warning(
                "the ranks of communicator %s were stopped, and cannot ask whether it was ended meanwhile: they take "
                "completed operations for successful", self.name, exc_info=True,
            )
        if not ended:
            self.believe(seen)

    def _end(self, comms, text, error, readers):
        """Abort communicators in a thread of its own, once all processes have been told that they end.

        The error is raised before the abort in threads that read by a stream. Return whether this is the first end. A
        later end, of another launch or by another process, does nothing, nor does any end after a close: it would find
        `peer_status` taken, and abort before the other processes have been told.
        """
        if self.end_begun:
            return False
        self.end_begun = True
        peer_status, self.peer_status = self.peer_status, None
        readers.discard(this_thread())
        if readers:
            deliver(error)
        if peer_status is not None:
            peer_status.begin_end()
        thread = threading.Thread(
            target=_abort_when_confirmed, args=(peer_status, comms, text, error, readers), name="ncclpy-manager-abort", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # no thread is available; an abort would need one too
            _log.warning("the communicators of %s could not be aborted", self.name, exc_info=True)
            self.peer_status = peer_status
            self.tell_readers(readers, error)
            self._leave()
            return True
        self.end_thread = thread
        return True

    def _leave(self, failure=None):
        """Have a thread tell the other processes that these ranks have left; return the thread, or None.

        `failure` is the error by which the communicators could not be made, so that no process has them; else None.
        """
        message = ()
        if failure is not None:
            kind = type(failure) if isinstance(failure, (NcclTimeout, NcclAborted)) else NcclRemoteError
            message = f"it failed to make them: {type(failure).__name__}: {failure}", kind.__name__
        self.leave_message = message  # before `peer_status` is read: the rendezvous may end now
        peer_status, self.peer_status = self.peer_status, None
        if peer_status is None:
            return None
        try:
            return peer_status.leave(*message)
        except Exception:  # the caller must continue in any case
            _log.warning("the other processes of communicator %s could not be told of a leave", self.name, exc_info=True)
            return None

    def abort(self, error):
        """Abort as every `CommunicatorSet`, but tell the other processes before anything is aborted.

        If the processes have met in a store and the communicators are made, `end_thread` aborts them, and the returned
        list is empty. Else return the communicators, which the caller has to abort.
        """
        readers = set()
        self._fence_and_note(readers)
        self.note_failure(error)
        if not self.self_aborting or self.state != MADE or self.peer_status is None:
            self.tell_readers(readers, error)
            if not self.making:  # else `fail` leaves, and tells the others why
                self._leave()
            return CommunicatorSet.abort(self, error)
        self._end(list(self.comms), text_of(error), error, readers)
        CommunicatorSet.abort(self, error)
        return []

    def close(self):
        """Tell the other processes, and close as every `CommunicatorSet`."""
        self.end_begun = True  # an end that another process announces meanwhile aborts nothing
        leaving = self._leave()
        CommunicatorSet.close(self)
        if leaving is not None:
            leaving.join(_LEAVE_TIMEOUT)

    cdef list ready(self, list comms, list streams):
        """Take the communicators over and launch the gatherings that waited; return these, for `let_go`."""
        CommunicatorSet.ready(self, comms, streams)
        self.making = False
        if self.self_aborting:
            self.believe(load(&stops))  # all processes have just met
        waiting, self.waiting = self.waiting, []
        for gathering in waiting:
            self.launch(gathering, False)
        return waiting

    cdef int fail(self, object error) except -1:
        """Fail the gatherings that wait for communicators which cannot be made; outside the Manager's lock."""
        cdef Gathering gathering
        self.state = GONE
        if self.making:  # the other processes may wait inside NCCL for the ranks of this process
            self.making = False
            self.end_thread = self._leave(error)
        waiting, self.waiting = self.waiting, []
        for gathering in waiting:
            gathering.end(error)
            gathering.let_go()
        return 0

    cdef int wait(self, Gathering gathering) except -1:
        """Have a collective wait for the communicators, which are still being made."""
        gathering.since = now()
        self.waiting.append(gathering)
        return 0

    def overdue(self):
        """Return the gatherings that have waited for the communicators for longer than their timeout."""
        cdef Gathering gathering
        cdef double moment = now()
        if self.in_rendezvous:
            moment -= _RENDEZVOUS_GRACE
        return [gathering for gathering in self.waiting if moment - gathering.since >= gathering.timeout]

    def patience(self):
        """Return the shortest timeout of the gatherings that wait for the communicators."""
        cdef Gathering gathering
        return min([gathering.timeout for gathering in self.waiting], default=FOREVER)

    cdef Launch launch(self, Gathering gathering, bint here):
        """Launch a collective; an error fails its participants and is not raised.

        Return the launch if `here` allows it and the caller must make the calls, see `Launch.start`.
        """
        cdef Launch launch = self.begin()
        cdef Operation operation
        try:
            self._fill(launch, gathering)
            _describe(&operation, gathering, gathering.participants[0], NULL)
            return self.start(launch, &operation, here)
        except BaseException as error:
            self.forget(launch)
            gathering.end(error)
        return None

    cdef int _fill(self, Launch launch, Gathering gathering) except -1:
        """Add the operations of the participants, which are sorted by rank, to a launch."""
        cdef Participant participant
        cdef Communicator comm
        cdef Operation operation
        cdef size_t i
        cdef double moment = now()
        for i, participant in enumerate(gathering.participants):
            comm = self.comms[i]
            participant.work.limit = FOREVER if gathering.timeout == FOREVER else moment + gathering.timeout
            participant.work.awaits = None
            participant.work.entry.communicator = self.name
            participant.work.entry.sequence = self.sequence
            participant.work.entry.rank = comm.rank
            participant.work.entry.root = gathering.root
            participant.work.entry.nranks = comm.nranks
            if self.oplogs is not None:
                participant.work.entry.note((<OpLog>self.oplogs[comm.rank]).oplog)
            _describe(&operation, gathering, participant, (<Stream>self.streams[i]).raw)
            _add(launch, comm, &operation, participant.work)
        self.sequence += 1
        return 0


# Tell the other processes of an end, raise its error in `readers`, and abort once the others have confirmed the end or
# cannot do that any more. If Python ends before that, nothing is aborted.
def _abort_when_confirmed(peer_status, comms, text, error, readers):
    if peer_status is not None:
        peer_status.end(text, type(error).__name__)
    raise_in_readers(readers, 0, error, error._informed)
    if peer_status is not None:
        peer_status.confirm()
        if not peer_status.wait_until_confirmed():
            return
    if comms:
        abort_in_background(comms, text).join()
    if peer_status is not None:
        leaving = peer_status.leave()
        if leaving is not None:
            leaving.join(_LEAVE_TIMEOUT)


def _retry_of(reference):
    """Return a function that calls `ask_after_stop` again, without keeping the communicators alive."""

    def ask():
        device_set = reference()
        if device_set is not None:
            device_set.ask_after_stop()

    return ask


def _text_function_of(Gathering gathering not None):
    """Return a function that returns a text about a collective, with the collective's key before it."""
    return lambda what: gathering.say(what)


def _wanted_function_of(DeviceSet device_set not None):
    """Return a function that tells whether the communicators are still to be made."""
    return lambda: device_set.state != GONE


cdef tuple ranks_of(Gathering gathering):
    """Return the ranks of the participants, in the order of these."""
    cdef Participant one
    if gathering.communicator_key:
        return tuple([(<Participant>one).global_rank for one in gathering.participants])
    return tuple(range(len(gathering.participants)))


cdef int check_members(DeviceSet device_set, Gathering gathering, tuple devices) except -1:
    """Raise if a communicator key is used with other devices or ranks than when its communicators were made."""
    ranks = ranks_of(gathering)
    if devices != device_set.devices or ranks != device_set.ranks or gathering.num_global != device_set.nranks:
        raise ValueError(gathering.say(
            f"its communicator key stands for ranks {list(device_set.ranks)} of {device_set.nranks} on devices "
            f"{list(device_set.devices)}, not for ranks {list(ranks)} of {gathering.num_global} on devices "
            f"{list(devices)}; other members need a key of their own"
        ))
    return 0


cdef int _describe(Operation* o, Gathering gathering, Participant participant, CUstream stream) except -1:
    memset(o, 0, sizeof(Operation))
    o.kind = gathering.call.kind
    o.datatype = gathering.call.datatype
    o.op = max(0, gathering.call.op)
    o.root = gathering.root
    o.send = participant.send
    o.recv = participant.recv
    o.count = gathering.count
    o.stream = stream
    return 0


cdef int _add(Launch launch, Communicator comm, const Operation* operation, Work work) except -1:
    """Add an operation to a launch; if the loaded NCCL lacks it, the operations that replace it."""
    cdef Lowered lowered
    cdef size_t i
    if not lacks(operation.kind):
        return launch.add(work, comm, operation, work.ready)
    lowered = lower(operation, comm.rank, comm.nranks, None, None)
    for i in range(lowered.count - 1):
        launch.add_before(comm, &lowered.operations[i], NULL if i else work.ready)
    launch.add(work, comm, &lowered.operations[lowered.count - 1], work.ready if lowered.count == 1 else NULL)
    return 0
