"""Which ranks a communicator and a group consist of: pairs, groups made by a split, and changes of a group's ranks.

To continue with other ranks, a group first leaves its present state: its communicators are aborted, or closed if
nothing runs on them, and operations in flight end with an error. Then it enters another place of a store with its new
ranks, under another number. The new ranks have a rendezvous at that place: `reconfigure` before the group leaves its
present state, the other calls after that. What belongs to the old number and takes effect late (a thread in a call,
news of a rank, a work that fails) does not affect the group under the new one.

A pair is disconnected only when the program asks for it, on both ranks. The package could disconnect a pair that was
idle for long, after both ranks have agreed. But destroying a communicator frees device memory, which waits for
everything that runs on the device. A collective that runs there may wait for another rank, which in turn waits for
what this rank is about to send. Only the program knows when nothing is under way.

Dividing a communicator is a collective of that communicator, which NCCL needs at the same place among the calls of all
ranks. The division begins after a rendezvous in the store, when all ranks are in `ProcessGroup.split`. Each rank waits
until its earlier operations are done, and begins nothing new meanwhile. The call of NCCL has a deadline and ends with
an abort, like any call that makes a communicator.
"""

import contextlib
import functools
import secrets
import threading

from cpython.exc cimport PyErr_CheckSignals

from ncclpy.core.calls.group cimport open_group
from ncclpy.core.communicator cimport Communicator
from ncclpy.core.lifecycle cimport split_comm
from ncclpy.core.runtime.library cimport version_code
from ncclpy.core.runtime.wait cimport FOREVER, as_timeout, deadline_after, now, this_thread
from ncclpy.engine.launcher cimport GONE, MADE
from ncclpy.engine.work cimport yield_to_others
from ncclpy.process_group.connection cimport Connection
from ncclpy.process_group.lifecycle cimport next_number

from ncclpy.bootstrap.store import LeaseEnded, StoreDamaged, StoreError
from ncclpy.errors import NcclAborted, NcclError, NcclRemoteError, NcclTimeout, ranks, spans
from ncclpy.errors import seconds as as_text
from ncclpy.types import MAX_INT as _MAX_INT
from ncclpy.types import as_integer
from ncclpy.engine.launcher import abort_in_background
from ncclpy.engine.recorder import text_of
from ncclpy.engine.unread_failures import forget_failures
from ncclpy.process_group.group_status import GroupStatus
from ncclpy.process_group.recovery import PreviousMembership, decide, decide_to_move
from ncclpy.process_group.joining import Joiner, Admitter
from ncclpy.process_group.handles import claim, close_opened_store, names_of_members, ordered, place_of, store_of

#: Seconds after which a rank that waits in `reconfigure` tells the other ranks that it waits there.
_TELL_DELAY = 1.0
#: The name of the rendezvous of all ranks that a reconfigured group has.
_MEETING = "the reconfiguration"


cdef class Membership:
    """The ranks of a group as they change, see `ProcessGroup.reconfigure`, `recover`, `admit` and `join`."""

    cdef int reconfigure(self, handles, uuid, timeout) except -1:
        cdef Lifecycle group = self.group
        cdef double seconds = group.timeout if timeout is None else as_timeout(timeout)
        self._check_movable("reconfigure()")
        order = ordered(handles, group.handle)
        if type(uuid) is int:
            uuid = str(uuid)
        if type(uuid) is not str or not uuid:
            raise ValueError(f"uuid: expected a text that was never used before, got {uuid!r:.80}")
        with _Turn(self, "reconfigure()"):
            store = store_of(order[0], group.store, seconds)
            opened_store = None if store is group.store else store
            try:
                claim(store, uuid, order, group.handle, functools.partial(
                    GroupStatus.refuse, store, place_of(uuid), _MEETING, f"{self._title()} has called reconfigure() with other "
                    f"handles, or in another order, for uuid {uuid!r}, and does not take part",
                ))
                in_flight_error = NcclAborted(
                    f"process group {group.name!r} is being reconfigured: this operation was in flight"
                )
                group_status = group.new_group_status(store, order.index(group.handle), len(order), place_of(uuid))
                group_status.rendezvous.describe_ranks = names_of_members(order)
                try:
                    self._compare(group_status)
                    group_status.gather(
                        _MEETING, None, seconds,
                        functools.partial(self._waits_in_rendezvous, order, now() + min(_TELL_DELAY, seconds / 2)),
                    )
                except BaseException as error:
                    ended = isinstance(error, NcclAborted) and group.failure is not None
                    if _has_met(group_status):
                        opened_store, group.opened_store = group.opened_store, opened_store
                        failure = group.failure if ended else error
                        self._leave(in_flight_error, False, order)
                        self._end_between(failure, group_status, None, None)
                    else:
                        group_status.close()
                    if ended:
                        group.check_usable()  # raises what has ended it
                    raise
                group_status.rendezvous.describe_ranks = None
                opened_store, group.opened_store = group.opened_store, opened_store
                try:
                    self._leave(in_flight_error, False, order)
                    self._enter(group_status, None, None)
                    self._resume_group()
                except BaseException as failure:
                    self._end_between(failure, group_status, None, None)
                    raise
            finally:
                if opened_store is not None:
                    close_opened_store(opened_store)
        return 0

    def _waits_in_rendezvous(self, order, moment):
        """Return whether this rank still waits for the others; once `moment` has passed, tell them that it waits."""
        cdef Lifecycle group = self.group
        if group.failure is None and now() >= moment:
            self._tell_plan(order, "waits in reconfigure() to continue with other ranks")
        return self._is_wanted()

    def _is_wanted(self):
        """Return whether the reconfiguration is still wanted: neither abort() nor close() has ended it."""
        return self.group.reconfiguring and not self.group.closed

    cdef int _tell_plan(self, order, action) except -1:
        """End the group on its other ranks, with what this rank does as the reason.

        Ranks whose handles are in `order` take part in the reconfiguration: on them the end calls no hooks and does not
        end the process.
        """
        cdef Lifecycle group = self.group
        if group.size > 1:
            group.group_status.tell(f"rank {group.rank} of {group.size}: it {action}", None, None, order)
        return 0

    def _title(self):
        cdef Lifecycle group = self.group
        return f"rank {group.rank} of {group.size} of process group {group.name!r}"

    cdef int _compare(self, group_status) except -1:
        """Raise ValueError if another rank's `check` differs; the ranks at the rendezvous then raise NcclAborted."""
        try:
            group_status.compare(self.group.check)
        except ValueError as error:
            group_status.rendezvous.give_up(_MEETING, str(error))
            raise
        return 0

    cdef object recover(self, timeout, min_size):
        cdef Lifecycle group = self.group
        cdef double seconds = as_timeout(timeout)
        self._check_movable("recover()")
        min_ranks = as_integer(min_size, "min_size")
        if min_ranks < 1:
            raise ValueError(f"min_size: expected at least 1, got {min_ranks}")
        with _Turn(self, "recover()"):
            if group.failure is None:
                text = f"rank {group.rank} of {group.size} recovers it"
                group.fail(NcclAborted(f"process group {group.name!r} has ended: {text}"), text, group.number, may_exit=False)
            if self.previous is None:
                is_lost = self.is_lost or group.group_status.reports.is_lost
                self.previous = PreviousMembership(is_lost, list(range(group.size)), group.size, group.oplog.last_finished())
            while True:
                members, uuid = self._decide(min_ranks, seconds)
                previous = self.previous.among(members)
                in_flight_error = NcclAborted(
                    f"process group {group.name!r} is being recovered: this operation was in flight"
                )
                try:
                    contributions = self._move_to(
                        uuid, members.index(group.rank), len(members), in_flight_error, False, None,
                        {"finished": previous.finished}, seconds, previous, previous.is_lost,
                    )
                except NcclAborted as error:
                    if group.failure is not error or not self._is_wanted():  # another error has ended it
                        raise
                    continue  # one more rank has died: the remaining ones decide again
                return previous.recovery([each["finished"] for each in contributions])

    cdef tuple _decide(self, min_ranks, double seconds):
        """Return the ranks that continue and the uuid of their rendezvous, as the remaining ranks have decided.

        Raises NcclError if the store is gone, or if the ranks continue without this one; in the second case the error
        also becomes the group's.
        """
        cdef Lifecycle group = self.group
        group_status, previous = group.group_status, self.previous
        try:
            members, uuid = decide(
                group_status.store, group.name, group.rank, group.size, previous.is_lost, min_ranks, seconds,
                self._is_wanted,
            )
        except LeaseEnded as error:
            raise NcclError(
                f"rank {group.rank} of process group {group.name!r} cannot recover it: the other ranks take it for lost, as "
                f"{error}. It may join them as a new rank, over a new store (ProcessGroup.join)"
            ) from error
        except StoreDamaged:
            raise
        except StoreError as error:
            raise NcclError(
                f"rank {group.rank} of process group {group.name!r} cannot recover it: the store is gone in which the survivors "
                f"agree on the ranks that continue ({error}). Use a store that outlives each rank: that of the launcher "
                "(ncclpy run), or Redis"
            ) from error
        if group.rank not in members:
            error = NcclError(
                f"process group {group.name!r} continues without rank {group.rank}: {ranks(spans(members))} of {group.size} "
                "decided so, as this rank had not arrived in time. It may join them as a new rank (ProcessGroup.join)"
            )
            self._replace_failure(error)
            raise error
        return members, uuid

    cdef tuple admit(self, timeout):
        cdef Lifecycle group = self.group
        cdef double seconds = group.timeout if timeout is None else as_timeout(timeout)
        cdef double deadline = deadline_after(seconds)
        self._check_movable("admit()")
        group.check_usable()
        with _Turn(self, "admit()"):
            number = self.admissions  # failed ones count as well: other ranks may have taken part in them
            self.admissions += 1
            if not group.drain(deadline):
                raise NcclTimeout(
                    f"rank {group.rank} of process group {group.name!r}: {group.pending()} operations are not done {as_text(seconds)} "
                    "after admit(); nothing has changed"
                )
            wanted, store = group.wanted(), group.opened_store or group.store
            joiners, admitter = {}, Admitter(store, group.name)
            if group.rank == 0:
                joiners = admitter.invite(max(0.0, deadline - now()), wanted, group.check)
            own = {"handle": group.handle, "joiners": list(joiners.values()), "uuid": secrets.token_hex(8)}
            try:
                try:
                    met = group.meet(f"admit/{number}", own, max(0.0, deadline - now()), _read_admission)
                except NcclAborted:
                    if group.closed or not group.group_status.was_reconfigured_with(group.handle):
                        raise
                    # The rendezvous is complete, and a rank that has left it has ended the group before this rank read
                    # the outcome.
                    met = group.group_status.gather(
                        f"admit/{number}", own, max(0.1, deadline - now()), lambda: True, _read_admission
                    )
                if met[0]["joiners"]:
                    decide_to_move(group.group_status.store, group.name, group.rank)
            except BaseException as error:
                admitter.refuse(joiners, text_of(error))
                group.check_usable()
                raise
            if group.rank == 0 and number > 0:  # all ranks have left the previous admission
                group.group_status.rendezvous.forget(f"admit/{number - 1}", list(range(group.size)))
            handles = [each["handle"] for each in met] + met[0]["joiners"]
            if len(handles) == group.size:
                return ()
            before, begun = len(met), NcclAborted(
                f"process group {group.name!r} admits new ranks: this operation was begun meanwhile"
            )
            self._move_to(
                met[0]["uuid"], group.rank, len(handles), begun, True, handles, None, max(0.1, deadline - now()), None,
                functools.partial(_lost_of, group.group_status.reports, before),
                functools.partial(admitter.welcome, joiners, handles, met[0]["uuid"]),
            )
            return tuple(range(before, len(handles)))

    cdef int join(self, str name, double seconds) except -1:
        cdef Lifecycle group = self.group
        handles, uuid = Joiner(group.store, name, group.handle, group.check).wait(seconds)
        with _Turn(self, "join()"):
            group.name = name
            self._move_to(
                uuid, handles.index(group.handle), len(handles), NcclAborted(f"process group {name!r} is being joined"),
                True, None, None, seconds, None, None,
            )
        return 0

    cdef int _enter(self, group_status, previous, is_lost) except -1:
        """Have the group take the rank of this group status; `previous` is the membership before, for `recover`."""
        self.previous, self.is_lost, self.admissions = previous, is_lost, 0
        self.group.enter(group_status)
        return 0

    cdef int _check_movable(self, str what) except -1:
        cdef Lifecycle group = self.group
        group.check_initialised()
        if group.closed:
            raise ValueError(f"process group {group.name!r} is closed; make a new one")
        if self.submission.in_block():
            raise ValueError(f"{what} within coalescing(): leave the block first")
        return 0

    cdef int _leave(self, error, bint drained, handles) except -1:
        """End the group's present state; the group has an error until it resumes.

        The ranks of the old group are told ``handles``, see `_tell_plan`, unless the group had ended before.
        """
        cdef Lifecycle group = self.group
        if self._suspend() and handles is not None:
            self._tell_plan(handles, "continues with other ranks")
        self._confirm(drained)
        group.end_group_status(False)
        group.end_connections(error, drained)
        group.abort_thread = group.tell_thread = None
        return 0

    cdef int _confirm(self, bint drained) except -1:
        """Confirm the end of the present state now: next this rank stops listening, so it could not confirm later.

        Unless the group was `drained`, no operation that completes from here on counts as successful.
        """
        cdef Lifecycle group = self.group
        cdef Connection one
        if not drained:
            for one in list(group.connections.values()):
                one.fence()
        if group.size > 1:
            group.group_status.confirm()
        return 0

    cdef object _move_to(
        self, uuid, int rank, int size, error, bint drained, handles, brought, double seconds, previous, is_lost, announce=None
    ):
        """Leave the present state, and enter a rendezvous of other ranks; return what each of them has brought.

        ``error``, ``drained`` and ``handles`` are those of `_leave`, ``previous`` and ``is_lost`` those of `_enter`.
        ``announce`` is called just before the rendezvous. If it raises, the ranks at the rendezvous are told.
        """
        cdef Lifecycle group = self.group
        store = group.opened_store or group.store
        group_status = None
        try:
            self._leave(error, drained, handles)
            group_status = group.new_group_status(store, rank, size, place_of(uuid))
            self._enter(group_status, previous, is_lost)
            if announce is not None:
                announce()
            try:
                contributions = group_status.gather(
                    _MEETING, brought, seconds, functools.partial(self._is_moving, group_status.rendezvous, is_lost), _read_past
                )
            except NcclAborted:
                if group.closed or not _has_met(group_status):
                    raise
                # The rendezvous is complete, and a rank that has left it has ended the group since.
                contributions = group_status.gather(_MEETING, brought, seconds, lambda: True, _read_past)
            self._resume_group()
        except BaseException as failure:
            if group_status is None:  # to tell the other ranks, which wait at that rendezvous; and for recover()
                with contextlib.suppress(NcclError, ValueError):
                    group_status = group.new_group_status(store, rank, size, place_of(uuid))
            self._end_between(failure, group_status, previous, is_lost)
            raise
        return contributions

    cdef int _end_between(self, failure, group_status, previous, is_lost) except -1:
        """End the group, which is between two states; if another error has ended it already, raise that error."""
        cdef Lifecycle group = self.group
        error = failure if isinstance(failure, Exception) else NcclAborted(
            f"process group {group.name!r} was being reconfigured when {type(failure).__name__} was raised"
        )
        cdef bint is_cause = self._end_suspended(error)
        if group_status is not None:
            with contextlib.suppress(NcclError, ValueError):
                if group.group_status is not group_status:
                    self._confirm(False)
                    group.end_group_status(False)
                    group.end_connections(error, False)
                    self._enter(group_status, previous, is_lost)
                text = f"rank {group_status.rank} of {group_status.size}: {text_of(group.failure)}"
                if group_status.rendezvous.give_up(_MEETING, text):  # the other ranks have left the rendezvous
                    group_status.tell(text)
        if group.closed:
            group.end_group_status(False)
        if not is_cause and isinstance(failure, Exception):
            group.check_usable()
        return 0

    cdef int _resume_group(self) except -1:
        """Make the group usable again unless an error has ended it since the rendezvous; raise if it is closed."""
        cdef Lifecycle group = self.group
        ended = self._resume()
        if not group.closed:
            self.previous = self.is_lost = None
        if group.closed:
            group.check_usable()
            raise ValueError(f"process group {group.name!r} is closed; make a new one")
        if ended is not None:  # the ranks of the new group may not have been told yet
            group.group_status.tell(f"rank {group.rank} of {group.size}: {text_of(ended)}")
        group.leave_statuses(False)
        return 0

    # The steps between two states of the group.

    cdef bint _suspend(self) except -1:
        """Give the group an error until it resumes, and a new number; return whether the group had no error before."""
        cdef Lifecycle group = self.group
        cdef bint had_no_error
        error = NcclAborted(f"process group {group.name!r} is being reconfigured")  # not under the lock
        with group.lock:
            had_no_error = group.failure is None
            if had_no_error:
                group.failure = error
            group.suspension_error = group.failure
            group.number = next_number()
            group.informed = set()
        return had_no_error

    cdef object _resume(self):
        """Clear the group's error, unless the group is closed.

        An error that has ended the group since it was suspended stays, and is returned.
        """
        cdef Lifecycle group = self.group
        suspension_error = group.suspension_error
        with group.lock:
            ended = None if group.failure is group.suspension_error else group.failure
            if not group.closed:
                forget_failures(group.failures)
                group.failure, group.suspension_error, group.failures = ended, None, []
        del suspension_error  # not under the lock: this may free a user's exception
        return ended

    cdef bint _end_suspended(self, error) except -1:
        """End the group with an error instead of resuming it; return False if another error has ended it meanwhile."""
        cdef Lifecycle group = self.group
        cdef bint is_cause
        suspension_error = group.suspension_error
        with group.lock:
            is_cause = group.failure is group.suspension_error
            if is_cause:
                group.failure = error
            group.suspension_error = None
        del suspension_error  # not under the lock, see `_resume`
        return is_cause

    cdef int _replace_failure(self, error) except -1:
        """Replace the error that the group has ended with."""
        cdef Lifecycle group = self.group
        before = group.failure
        with group.lock:
            group.failure = error
        del before  # not under the lock, see `_resume`
        return 0

    def _is_moving(self, rendezvous, is_lost):
        """Return whether the rendezvous can still complete: the group has not ended, and no missing rank is lost."""
        cdef Lifecycle group = self.group
        if not self._is_wanted() or group.failure is not group.suspension_error:
            return False
        if is_lost is None:
            return True
        if group.rank > 0:  # rank 0 waits for all, the others for rank 0
            return rendezvous.has_arrived(_MEETING, 0) or not is_lost(0)
        arrived = rendezvous.arrived(_MEETING)
        return not any(is_lost(rank) for rank in range(1, group.size) if rank not in arrived)


cdef Membership new_membership(Lifecycle group, Submission submission):
    cdef Membership membership = Membership.__new__(Membership)
    membership.group, membership.submission, membership.turn = group, submission, threading.Lock()
    return membership


cdef class _Turn:
    """The turn of a thread to reconfigure a group, one thread at a time, as a context.

    An exception that a signal handler raises can never leave the turn half taken.
    """

    cdef Membership membership
    cdef object what

    def __init__(self, Membership membership not None, what):
        self.membership, self.what = membership, what

    def __enter__(self):
        cdef Lifecycle group = self.membership.group
        if not self.membership.turn.acquire(False):
            raise RuntimeError(f"{self.what}: another thread reconfigures process group {group.name!r} already")
        group.note_ender()
        group.reconfiguring = True

    def __exit__(self, *_):
        cdef Lifecycle group = self.membership.group
        group.reconfiguring = False
        group.enders.discard(this_thread())
        self.membership.turn.release()


def _has_met(group_status):
    """Return whether the rendezvous is complete; False if the store cannot be read."""
    with contextlib.suppress(NcclError, ValueError):
        return group_status.rendezvous.has_met(_MEETING)
    return False


def _lost_of(reports, size, rank):
    """Return whether a rank of the previous group, of `size` ranks, can no longer take part; False for new ranks."""
    return rank < size and reports.is_lost(rank)


def _read_admission(brought):
    """Return what a rank brings to an admission: its handle, the handles that it admits, and the rendezvous' uuid."""
    return {"handle": str(brought["handle"]), "joiners": list(map(str, brought["joiners"])), "uuid": str(brought["uuid"])}


def _read_past(brought):
    """Return what a rank brings to the rendezvous: None or, in a recovery, its last finished collective."""
    if brought is None:
        return None
    return {"finished": None if brought["finished"] is None else int(brought["finished"])}


# Communicators of two ranks, and the division of the communicator of all.

# Seconds that the end of a group may take to fail its connections.
cdef double _FAIL_TIMEOUT = 5.0


cdef int connect_peers(Lifecycle group, list peers, double seconds) except -1:
    """Wait until the communicators with all ranks and with some peers are made."""
    cdef Connection one
    cdef double deadline = deadline_after(seconds)
    connections = [group.connection_with(-1)]
    connections += [group.connection_with(peer) for peer in peers if peer != group.rank]
    for one in connections:
        while not one.settled.wait(max(0.0, min(0.1, deadline - now()))):
            if now() >= deadline and not one.settled.is_set():
                late = NcclTimeout(
                    f"rank {group.rank} of process group {group.name!r}: communicator {one.label!r} of {one.nranks} "
                    f"ranks is not made after {seconds:.3g} s"
                )
                group.explain_by(late, functools.partial(group.group_status.inquire_about, one.label, one.members))
                if group.is_ended():  # the thread that ended the group knows what the ranks do, and fails `one` next
                    one.settled.wait(_FAIL_TIMEOUT)
                if not one.settled.is_set():
                    raise late
                break
        if one.failure is not None:
            raise one.failure.with_traceback(None)
    return 0


cdef int disconnect(Lifecycle group, list peers, double deadline) except -1:
    """Disconnect pairs one after the other, in the same order on all ranks, so that no two ranks wait for each other."""
    for pair in sorted((min(group.rank, peer), max(group.rank, peer), peer) for peer in peers):
        _disconnect(group, pair[2], pair[:2], deadline)
    return 0


cdef int _disconnect(Lifecycle group, int peer, pair, double deadline) except -1:
    cdef Connection one
    label = group.label_of(peer)
    one = group.connections.get(label)
    if one is None:
        return 0
    wait_until_idle(group, one, deadline)
    place = f"disconnect/{label}/{one.attempts}"  # each attempt has a place and an outcome, which both ranks share
    one.attempts += 1
    what = f"to disconnect pair {label!r} of process group {group.name!r}"
    group_status = group.group_status
    try:
        group_status.rendezvous.meet(place, pair, what, b"", _nothing, max(0.0, deadline - now()), group.wanted())
    except NcclAborted:
        group.check_usable()  # raises what has ended it
        raise
    except (NcclTimeout, NcclRemoteError) as error:
        group.explain_by(error, functools.partial(group_status.inquire_at, place))
        raise
    if group.rank == pair[1]:  # the pair's first rank has written the outcome; this one is the last that reads it
        group.group_status.rendezvous.forget(place, pair)
    with group.lock:
        if group.connections.get(label) is not one:
            return 0  # the group has ended
        del group.connections[label]
        group.generations[peer] = group.generations.get(peer, 0) + 1
    if not one.pending() and one.is_well():
        one.close()
    elif one.alive:  # it has failed, or another thread has begun something on it meanwhile
        abort_in_background(one.abort(NcclAborted(f"pair {label!r} of process group {group.name!r} was disconnected")), "")
    return 0


def _nothing(contributions):
    return b""


cdef int wait_until_idle(Lifecycle group, Connection one, double deadline) except -1:
    cdef Py_ssize_t n = one.pending()
    while n:
        group.check_usable()
        if now() >= deadline:
            raise NcclTimeout(
                f"rank {group.rank} of process group {group.name!r}: {n} operations on communicator {one.label!r} are not "
                "done; nothing was changed"
            )
        yield_to_others()
        n = one.pending()
    return 0


# The number of ranks with wrong colors that an error names.
cdef int _MAX_WRONG = 8


cdef bint can_divide(Lifecycle group) except -1:
    """Return whether this rank's communicator is made, or is being made, and NCCL can divide it."""
    cdef Connection main = group.connections.get("all")
    if main is None or main.state == GONE or version_code() < 21801 or open_group() != NULL:
        return False
    return main.state != MADE or main.is_well()


cdef object gather_split_arguments(Lifecycle group, object number, list own):
    """Return what all ranks bring to the rendezvous of this number: a color, a key, and what `can_divide` says."""
    try:
        return group.meet(f"split/{number}", own, group.timeout, _part_of)
    except NcclAborted:
        group.check_usable()  # raises what has ended it
        raise


cdef object wrong_colors(Lifecycle group, object values):
    """Return the text of the error if ranks have brought invalid colors, else None."""
    wrong = [
        f"{color} on rank {rank}" for rank, (color, _, _) in enumerate(values)
        if color is not None and not 0 <= color <= _MAX_INT
    ]
    if not wrong:
        return None
    more = f" and on {len(wrong) - _MAX_WRONG} more ranks" if len(wrong) > _MAX_WRONG else ""
    return (
        f"split() of process group {group.name!r}: color: expected an int from 0 to {_MAX_INT}, or None to join no group, "
        f"got {', '.join(wrong[:_MAX_WRONG])}{more}; no rank has made one"
    )


cdef tuple divide(Lifecycle group, long long number, object color, object values, double deadline):
    """Return the ranks with this rank's color, and their communicator; None for it if not all ranks `can_divide`."""
    ordered_ranks = sorted((key, rank) for rank, (c, key, _) in enumerate(values) if c == color)
    members = [rank for _, rank in ordered_ranks]
    if not all(is_able for _, _, is_able in values):
        return members, None
    color_index, key = None, 0
    if color is not None:  # NCCL takes colors from 0 on
        color_index, key = sorted({c for c, *_ in values if c is not None}).index(color), members.index(group.rank)
    group.dividing = number + 1
    try:
        comm = _divide(group, color_index, key, deadline)
        group.divided = number + 1
    finally:
        group.dividing = 0
    return members, comm


cdef object _divide(Lifecycle group, object color, object key, double deadline):
    """Divide the communicator and return this rank's part, None without a color."""
    cdef Connection main = group.connections.get("all")
    cdef Communicator comm, part = Communicator.__new__(Communicator)
    cdef bint has_part
    try:
        while main is not None and not main.settled.is_set() and now() < deadline:
            main.settled.wait(0.1)
            PyErr_CheckSignals()
        group.check_usable()
        if main is None or main.state != MADE:
            if main is not None and main.failure is not None:
                raise main.failure.with_traceback(None)
            raise NcclTimeout(
                f"process group {group.name!r}: its communicator was not made in time to be divided"
            )
        comm = main.comms[0]
        wait_until_idle(group, main, deadline)
        group.check_usable()
        left = None if deadline == FOREVER else max(0.001, deadline - now())
        main.making = part  # for an abort
        group.check_usable()  # an abort before the previous line has not seen `part`
        has_part = split_comm(part, comm, color, key, None, left, True)
        main.making = None
        group.check_usable()
    except BaseException as error:  # the other ranks may wait in their call of NCCL
        made = main is not None and main.making is part
        if main is not None:
            main.making = None
        if made and not part.closed:
            abort_in_background([part], "its group has ended")
        if group.is_ended() and isinstance(error, Exception):
            group.check_usable()
        failure = error if isinstance(error, Exception) else NcclAborted(
            f"process group {group.name!r} was not divided: {type(error).__name__} in the last call"
        )
        if main is not None:
            group.division_failed(main, failure)
        raise
    comm.children.discard(part)  # `part` belongs to the new group: a close of `comm` does not close it
    return part if has_part else None


def _part_of(brought):
    """Return the color and the key that a rank has brought, and whether NCCL can divide its communicator."""
    color, key, is_able = brought
    return (None if color is None else int(color)), int(key), bool(is_able)
