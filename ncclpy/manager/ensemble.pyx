"""The gatherings of one set of devices: they wait for its communicators, and are launched on them."""

import _thread
import functools
import hashlib
import logging
import threading
import time
import weakref

from libc.string cimport memset

from ncclpy.abi.driver cimport CUstream
from ncclpy.core.runtime.device cimport relax
from ncclpy.core.communicator cimport Communicator
from ncclpy.core.arguments.validation cimport Lowered, lacks, lower
from ncclpy.core.arguments.operation cimport Operation
from ncclpy.core.runtime.stream cimport Stream
from ncclpy.core.runtime.wait cimport FOREVER, now
from ncclpy.engine.launcher cimport GONE, MADE, Launch
from ncclpy.engine.fence cimport stops
from ncclpy.engine.recorder cimport Ledger, began_of
from ncclpy.engine.native cimport load
from ncclpy.engine.protocols cimport Together
from ncclpy.engine.work cimport Work
from ncclpy.manager.gathering cimport Gathering, Participant

from ncclpy.errors import NcclAborted, NcclError, NcclRemoteError, NcclTimeout, same_class_as
from ncclpy.core.runtime.stream_readers import raise_in_readers
from ncclpy.engine import fence
from ncclpy.engine.work import add_answer
from ncclpy.engine.launcher import abort_aside
from ncclpy.engine.monitor import call_at
from ncclpy.engine.recorder import text_of

# Seconds in which who waits in a store tells who is absent, before the deadline's own error says less.
cdef double _TELLS = 2.0

# Seconds for the others to hear that communicators were closed; a store that is stuck holds up nobody for longer.
cdef double _LEAVES = 1.0

# How often a process that has stood still asks a store that does not answer.
cdef double _ASKS_AGAIN = 1.0

_log = logging.getLogger("ncclpy.manager")


cdef class Ensemble(Clique):
    """Communicators for gatherings."""

    def __cinit__(self, *args):
        self.waiting = []

    cdef int meet_in(self, object store, dict gatherings, Gathering gathering) except -1:
        """Have the processes of these communicators meet in a store, if there is one, before they are made."""
        if store is None or len(self.devices) == self.nranks:
            return 0
        from ncclpy.manager.nodes import meet  # most Managers need no store

        self.gathered, self.meeting, self.making = gatherings, True, True
        self.ledgers = {rank: Ledger() for rank in self.ranks}
        self.name = hashlib.blake2b(gathering.communicator_key, digest_size=4).hexdigest()
        self.meets = functools.partial(
            meet, store, gathering.communicator_key, self.name, dict(zip(self.ranks, self.devices)), self.nranks,
            gathering.timeout, _sayer_of(gathering), _asker_of(self), weakref.ref(self), Ensemble.standing, self.ledgers,
            Ensemble.ended,
        )
        self.aborts = True
        fence.listen(self)
        return 0

    def _make(self, unique_id, config):
        circle = None
        if self.meets is not None:
            relax()
            try:
                self.circle = circle = self.meets()
            except BaseException as error:  # told to all who wait for it
                self.owner.clique_made(self, [], error)
                return
            finally:
                self.meeting, self.meets = False, None
            if self.left is not None:  # meanwhile
                circle.leave(*self.left)
        Clique._make(self, unique_id, config)
        if circle is not None:
            from ncclpy.manager.nodes import forget

            if self.state == MADE:
                forget(circle)
            else:
                circle.leave()

    def standing(self, int rank):
        """Return what one of the local ranks does, as JSON knows it; also if it waits for others of this process."""
        cdef Gathering gathering
        cdef Participant one
        told = self.ledgers[rank].standing()
        if told["current"] is None:
            for gathering in self.waiting + list(self.gathered.values()):
                if gathering.communicator_key == self.key:
                    for one in gathering.participants:
                        if one.global_rank == rank:
                            # No launch of it has given it a number yet.
                            told["current"] = began_of(one.work.entry) | {"seq": self.sequence}
                            told["since"] = time.time() - (now() - one.work.entry.created)
                            return told
        return told

    cdef int inquire(self, object error) except -1:
        """Have an error say what the ranks do, where they have a store; nothing is lost to what goes wrong here."""
        circle = self.circle
        if circle is None or self.state != MADE:
            return 0
        try:
            said, states = circle.ask()
            if said is not None:
                add_answer(error, said, states)
        except KeyboardInterrupt:  # it finds nothing half done later
            _thread.interrupt_main()
        except BaseException:
            _log.warning("communicator %s could not ask what its ranks do", self.name, exc_info=True)
        return 0

    cdef int launch_failed(self, Together launch, object error) except -1:
        """Ask what the ranks do first: the end of this one's operation would be the end of theirs.

        It may be done before they have answered: then nothing has failed but the clock.
        """
        self.inquire(error)
        if (<Launch>launch).unsettled == 0:
            return 1
        if self.aborts:
            self.fence()
        readers = set()
        self.note_readers(readers)
        self.owner.clique_lost(self)
        if self.aborts:  # before its works fail: a close() that waits for these joins the thread that this starts
            # The error's text may name a key, which only its readers have shown.
            kind = type(error).__name__
            self._end(list(self.comms), f"its operation failed with {kind}", error, readers)
        Clique.launch_failed(self, launch, error)
        if not self.aborts:
            self.tell_readers(readers, error)
            self._leave()
        return 0

    def ended(self, text, kind):
        """Take the news that another process has ended the communicators: what runs on them fails here as well."""
        if self.state == GONE:
            return
        error = same_class_as(kind)(f"communicator {self.name!r} was ended{text}")
        self.inquire(error)
        if self.state == GONE:  # meanwhile
            return
        if self.making:  # nothing has run that an abort could end with wrong data
            self.owner.clique_lost(self)
            abort_aside(Clique.abort(self, error), text_of(error))
            return
        self.fence()
        readers = set()
        self.note_readers(readers)
        self.owner.clique_lost(self)
        self._end(list(self.comms), text.lstrip(": "), error, readers)  # before its works fail, as above
        Clique.abort(self, error)

    def ask_after_stop(self):
        """Find out whether the communicators were ended while this process stood still; believe them again if not."""
        cdef int seen = load(&stops)
        circle = self.circle
        if circle is None or self.state != MADE:
            return
        ended = False
        try:
            ended = circle.told() is not None
        except NcclTimeout:
            call_at(now() + _ASKS_AGAIN, _again(weakref.ref(self)))
            return
        except (NcclError, ValueError):  # there is nothing to ask any more: the program is to go on
            _log.warning(
                "the ranks of communicator %s have stood still, and cannot ask whether it was ended meanwhile: they take "
                "what they see for success", self.name, exc_info=True,
            )
        if not ended:
            self.believe(seen)

    def _end(self, comms, text, error, readers):
        """Abort communicators once all processes have heard that they end, in a thread of its own.

        The threads that read by a stream raise the error before.
        """
        circle, self.circle = self.circle, None
        readers.discard(threading.get_ident())
        thread = threading.Thread(
            target=_abort_when_heard, args=(circle, comms, text, error, readers), name="ncclpy-manager-abort", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # there is none to be had; an abort would need one, too
            _log.warning("the communicators of %s could not be aborted", self.name, exc_info=True)
            self.circle = circle
            self.tell_readers(readers, error)
            self._leave()
            return
        self.ending = thread

    def _leave(self, failure=None):
        """Have a thread tell the other processes that these ranks have no communicators any more; return it, or None.

        `failure` is why they could not be made: then they have them on no process.
        """
        told = ()
        if failure is not None:
            kind = type(failure) if isinstance(failure, (NcclTimeout, NcclAborted)) else NcclRemoteError
            told = f"it failed to make them: {type(failure).__name__}: {failure}", kind.__name__
        self.left = told  # before this looks whether they have met
        circle, self.circle = self.circle, None
        if circle is None:
            return None
        try:
            return circle.leave(*told)
        except Exception:  # what it is called for is to go on in any case
            _log.warning("the ranks of communicator %s could not be told to leave", self.name, exc_info=True)
            return None

    def abort(self, error):
        """Do as every clique, and tell the other processes, which hear of it before anything is aborted.

        Where there are some, this does that itself, in the thread ``ending``, and returns nothing to be aborted.
        """
        readers = set()
        self.note_readers(readers)
        if not self.aborts or self.state != MADE or self.circle is None:
            self.tell_readers(readers, error)
            if not self.making:  # else `fail` does, and tells why
                self._leave()
            return Clique.abort(self, error)
        self.fence()
        self._end(list(self.comms), text_of(error), error, readers)
        Clique.abort(self, error)
        return []

    def close(self):
        """Tell the other processes, and do as every clique."""
        leaving = self._leave()
        Clique.close(self)
        if leaving is not None:
            leaving.join(_LEAVES)

    cdef list ready(self, list comms, list streams):
        """Take the communicators over and launch what has waited for them; return that, to be let go of."""
        Clique.ready(self, comms, streams)
        self.making = False
        if self.aborts:
            self.believe(load(&stops))  # all have met just now
        waiting, self.waiting = self.waiting, []
        for gathering in waiting:
            self.launch(gathering, False)
        return waiting

    cdef int fail(self, object error) except -1:
        """Fail what waits for communicators that cannot be made; outside the Manager's lock."""
        cdef Gathering gathering
        self.state = GONE
        if self.making:  # the other processes may be within NCCL, and wait for these ranks
            self.making = False
            self._leave(error)
        waiting, self.waiting = self.waiting, []
        for gathering in waiting:
            gathering.end(error)
            gathering.let_go()
        return 0

    cdef int wait(self, Gathering gathering) except -1:
        """Launch a collective as soon as the communicators are there, which they are not yet."""
        gathering.since = now()
        self.waiting.append(gathering)
        return 0

    def overdue(self):
        """Return the gatherings whose timeout has passed while the communicators were being made."""
        cdef Gathering gathering
        cdef double moment = now()
        if self.meeting:
            moment -= _TELLS
        return [gathering for gathering in self.waiting if moment - gathering.since >= gathering.timeout]

    def patience(self):
        """Return the shortest timeout of what waits for the communicators."""
        cdef Gathering gathering
        return min([gathering.timeout for gathering in self.waiting], default=FOREVER)

    cdef Launch launch(self, Gathering gathering, bint here):
        """Put a collective on the devices; what goes wrong is its participants', not the caller's.

        Return the launch if `here` allows it to be made by the caller, see `Launch.start`.
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
            if self.ledgers is not None:
                participant.work.entry.note((<Ledger>self.ledgers[comm.rank]).ledger)
            _describe(&operation, gathering, participant, (<Stream>self.streams[i]).raw)
            _add(launch, comm, &operation, participant.work)
        self.sequence += 1
        return 0


def _abort_when_heard(circle, comms, text, error, readers):
    if circle is not None:
        circle.end(text, type(error).__name__)
    raise_in_readers(readers, 0, error)
    if circle is not None:
        circle.confirm()
        if not circle.wait_until_confirmed():
            return
    if comms:
        abort_aside(comms, text).join()
    if circle is not None:
        circle.leave()


def _again(reference):
    """Return what asks once more, without keeping the communicators."""

    def ask():
        ensemble = reference()
        if ensemble is not None:
            ensemble.ask_after_stop()

    return ask


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
