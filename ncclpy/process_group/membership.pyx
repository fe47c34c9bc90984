"""Who belongs to a process group: what a rank hears of the others, and how it goes on with fewer, with more, or with others.

To go on a group leaves what it is: its communicators are aborted, or closed where nothing runs there, and what is in flight
ends with an error. Then it enters another place of a store with the ranks that it goes on with, under another number: so
nothing that still comes of the old one (a thread in a call, news of a rank, a work that fails late) meets the new one.
"""

import contextlib
import functools
import logging
import secrets
import weakref

from cpython.pythread cimport PyThread_get_thread_ident

from ncclpy.core.runtime.library cimport check_process
from ncclpy.core.start cimport root_rank
from ncclpy.core.runtime.wait cimport as_timeout, deadline_after, now
from ncclpy.engine.callbacks cimport errands, users
from ncclpy.process_group.check.agreement cimport Agreement
from ncclpy.process_group.connection cimport Connection
from ncclpy.process_group.lifecycle cimport next_number
from ncclpy.process_group.pairs cimport stand

from ncclpy.bootstrap.store import LeaseEnded, StoreDamaged, StoreError
from ncclpy.errors import NcclAborted, NcclError, NcclRemoteError, NcclTimeout, ranks, spans
from ncclpy.errors import seconds as as_text
from ncclpy.types import as_integer
from ncclpy.engine.monitor import call_at
from ncclpy.engine.recorder import text_of
from ncclpy.process_group.notices import Notices, caller_of
from ncclpy.process_group.decision import Past, decide, decide_to_move
from ncclpy.process_group.guests import Guest, Host
from ncclpy.process_group.handles import called_of, claim, give_back, ordered, place_of, store_of

_log = logging.getLogger("ncclpy.process_group")

#: Seconds after which the others hear that a rank waits for them to go on.
_PATIENCE = 1.0
#: Where those meet who go on.
_MEETING = "the reconfiguration"
#: What a rank that is gone has taken part in may yet be seen to be done for so long.
_GRACE = 0.5


cdef class Membership(Lifecycle):
    """The group as one of several ranks; `ProcessGroup` is the class to use."""

    # What ranks do.

    def state(self, timeout=1.0):
        """Return what each rank does: what it last began and finished, and whether its process is there.

        Parameters
        ----------
        timeout : float, optional
            Seconds for the ranks to answer. Of one that does not, the result has what it told last: once a second a rank
            puts what it does into the store, if that has changed.

        Returns
        -------
        tuple of RankState
            By rank.

        Raises
        ------
        StoreError
            If the store is gone.
        """
        check_process()
        if self.connections is None:
            raise RuntimeError("this ProcessGroup was not initialised")
        return self.notices.collect(as_timeout(timeout))

    def _standing(self):
        """Return what this rank does, as JSON knows it."""
        return {} if self.ledger is None else self.ledger.standing()  # another group is asked while this one is made

    def _look_for_closed(self, number):
        """End the group if an operation waits for a rank that has closed it and has not begun that operation."""
        cdef Connection one
        for rank, theirs in (self.notices.closed_ranks() if self.pending() else {}).items():
            mine = self._begun()
            for one in list(self.connections.values()):
                if one.pending() and rank in one.members and mine.get(one.label, 0) > theirs.get(one.label, 0):
                    if rank not in self.leavers:
                        self.leavers = self.leavers | {rank}
                        self._gone(number, rank, "it has closed the group")
                    break

    def _gone(self, number, rank, why):
        """Take the news that a rank is gone, and why: what still waits in a while waits for it."""
        call_at(now() + _GRACE, functools.partial(caller_of(weakref.ref(self), "_without"), number, rank, why))

    def _silent(self, number, rank, why):
        """Take the news that a rank was not heard of for long while something waited."""
        errands.give(functools.partial(self._without, number, rank, why, False))

    def _without(self, number, rank, why, again=True):
        if number != self.number or self.is_ended():
            return
        if self._waits():
            self._end_without(number, rank, why)
        elif again:
            self._gone(number, rank, why)

    cdef bint _waits(self) except -1:
        cdef Agreement agreement = self.agreement
        return self.pending() or self.meetings or (agreement is not None and agreement.turn.locked())

    def _end_without(self, number, rank, why):
        """End the group, or log that it goes on, as a rank that something waits for is gone."""
        told = None
        with contextlib.suppress(NcclError, ValueError):  # it may be gone since the group has ended: then that is why
            told = self.notices.told()
        if told is not None:
            self._ended(number, told)
            return
        text = f"rank {rank} of process group {self.name!r} is gone: {why}"
        if self.on_error != "report":
            self._fail(NcclRemoteError(text), text, number, asks=True)
            return
        users.give(functools.partial(_log.error, "rank %d goes on, as on_error='report' says, after: %s", self.rank, text))

    def connect(self, peers=None, timeout=None):
        """Make the communicator now, and wait until it stands.

        Parameters
        ----------
        peers : iterable of int, optional
            Ranks to be connected with for sends and receives as well.
        timeout : float, optional
            Seconds to wait; the group's by default. The making itself goes on, within the group's.

        Raises
        ------
        NcclTimeout
            If it does not stand in time; it names who has not come, and says what all ranks do.
        NcclRemoteError
            If a rank will not come any more: it has closed the group, or its process has ended.
        """
        cdef double seconds = self.timeout if timeout is None else as_timeout(timeout)
        self.check_usable()
        stand(self, [root_rank(self.size, peer, "peers") for peer in peers or ()], seconds)

    # Going on.

    def reconfigure_handle(self):
        """Return the text by which this group takes part in `reconfigure`; it stays the same."""
        check_process()
        if self.connections is None:
            raise RuntimeError("this ProcessGroup was not initialised")
        return self.handle

    def reconfigure(self, handles, *, uuid, timeout=None):
        """Go on with other ranks: fewer, more, others, or in another order; all of them call it alike.

        Once all have come, what is in flight ends with `NcclAborted`; arrays are held until nobody can touch them. Then the
        group is what it was when it was made, with another rank and size, and without an error if it had one: its hooks, its
        stream and its options stay, its communicators are made anew when they are first used, and `seq` counts from 0. No
        thread begins anything on it meanwhile.

        Ranks of this group that have not come within a second hear of it, and what they wait for ends as well, so that they
        can come. Those that are not among the handles hear that their group has ended.

        Parameters
        ----------
        handles : list or set of str
            The `reconfigure_handle` of each group that goes on, the same for all of them. A list gives the ranks by
            position. Those of a set are in the order of the ranks that the groups were made with.
        uuid : str or int
            The name of this one time, the same for all, which was never used before.
        timeout : float, optional
            Seconds for all of them to come; the group's by default.

        Raises
        ------
        TypeError, ValueError
            If a handle is none, comes twice or is missing, the uuid was used, or others have another `check`; then nothing has
            changed.
        NcclAborted
            If another rank has called it with other handles, or in another order, and does not come.
        NcclTimeout
            If ranks have not come in time; it names them. It may be tried again, with another uuid.

        Notes
        -----
        The ranks meet in the store that the group of the first handle was made with.
        """
        cdef double seconds = self.timeout if timeout is None else as_timeout(timeout)
        self._check_movable("reconfigure()")
        order = ordered(handles, self.handle)
        if type(uuid) is int:
            uuid = str(uuid)
        if type(uuid) is not str or not uuid:
            raise ValueError(f"uuid: expected a text that was never used before, got {uuid!r:.80}")
        with _Turn(self, "reconfigure()"):
            store = store_of(order[0], self.store, seconds)
            borrowed = None if store is self.store else store
            try:
                claim(store, uuid, order, self.handle, functools.partial(
                    Notices.refuse, store, place_of(uuid), _MEETING, f"{self._known_as()} has called reconfigure() with other "
                    f"handles, or in another order, for uuid {uuid!r}, and does not come",
                ))
                flying = NcclAborted(f"process group {self.name!r} is being reconfigured: this was in flight then")
                notices = self._notices(store, order.index(self.handle), len(order), place_of(uuid))
                notices.arrivals.called = called_of(order)
                try:
                    self._compare(notices)
                    notices.gather(
                        _MEETING, None, seconds, functools.partial(self._comes, order, now() + min(_PATIENCE, seconds / 2))
                    )
                except BaseException as error:
                    ended = isinstance(error, NcclAborted) and self.failure is not None
                    if _has_met(notices):
                        borrowed, self.borrowed = self.borrowed, borrowed
                        failure = self.failure if ended else error
                        self._leave(flying, False, order)
                        self._torn(failure, notices, None, None)
                    else:
                        notices.close()
                    if ended:
                        self.check_usable()  # says what has ended it
                    raise
                notices.arrivals.called = None
                borrowed, self.borrowed = self.borrowed, borrowed
                try:
                    self._leave(flying, False, order)
                    self._enter(notices)
                    self._go_on()
                except BaseException as failure:
                    self._torn(failure, notices, None, None)
                    raise
            finally:
                if borrowed is not None:
                    give_back(borrowed)

    def _comes(self, order, moment):
        """Return whether this rank still waits for the others, which hear after a while that it does."""
        if self.failure is None and now() >= moment:
            self._tell_plan(order, "waits in reconfigure() to go on as other ranks")
        return self.moves and not self.closed

    cdef int _tell_plan(self, order, does) except -1:
        """Tell the ranks of this group what this one does: it goes on, or ends for those without a handle among these."""
        if self.size > 1:
            self.notices.tell(f"rank {self.rank} of {self.size}: it {does}", None, None, order)
        return 0

    def _known_as(self):
        return f"rank {self.rank} of {self.size} of process group {self.name!r}"

    def _compare(self, notices):
        """Raise ValueError, also on those who meet there, if this rank compares collectives in another way than they do."""
        try:
            notices.compare(self.check)
        except ValueError as error:
            notices.arrivals.give_up(_MEETING, str(error))
            raise

    def recover(self, timeout, min_size=1):
        """Go on without the ranks that are gone; all that are left call it, whatever has become of the group.

        The survivors agree in the store who they are. Ranks whose processes have ended, as far as the store or this machine
        knows, are not waited for; who has not come after `timeout` seconds for another reason, as it is stopped or busy, is
        taken for lost, and gets an `NcclError` when it comes. There is one decision, so that never two parts of a group go
        on. Then the group works again as after `reconfigure`, with the survivors in the order of their ranks.

        Parameters
        ----------
        timeout : float
            Seconds for the others to come, and as long again to meet anew.
        min_size : int, optional
            With fewer survivors nobody goes on.

        Returns
        -------
        Recovery
            Who is left, and what was the last collective that all of them had finished.

        Raises
        ------
        NcclError
            If fewer are left than asked for, if the others have gone on without this rank, or if the store is gone, in
            which they would have to agree.
        NcclTimeout
            If somebody has come and is not there any more, and it is not known to have ended; `recover` may be called again.
        """
        cdef double seconds = as_timeout(timeout)
        self._check_movable("recover()")
        least = as_integer(min_size, "min_size")
        if least < 1:
            raise ValueError(f"min_size: expected at least 1, got {least}")
        with _Turn(self, "recover()"):
            if self.failure is None:
                text = f"rank {self.rank} of {self.size} recovers it"
                self._fail(NcclAborted(f"process group {self.name!r} has ended: {text}"), text, self.number, exits=False)
            if self.past is None:
                is_lost = self.is_lost or self.notices.reports.is_lost
                self.past = Past(is_lost, list(range(self.size)), self.size, self.ledger.last_finished())
            while True:
                members, uuid = self._decide(least, seconds)
                past = self.past.among(members)
                flying = NcclAborted(f"process group {self.name!r} is being recovered: this was in flight then")
                try:
                    come = self._stand(
                        uuid, members.index(self.rank), len(members), flying, False, None, {"finished": past.finished}, seconds,
                        past, past.is_lost,
                    )
                except NcclAborted as error:
                    if self.failure is not error or not self.moves or self.closed:  # somebody has ended it
                        raise
                    continue  # one more has died; those who are left decide again
                return past.recovery([each["finished"] for each in come])

    def _decide(self, least, seconds):
        """Return who goes on, and where, as all that are left have decided."""
        notices, past = self.notices, self.past
        try:
            members, uuid = decide(
                notices.store, self.name, self.rank, self.size, past.is_lost, least, seconds,
                lambda: self.moves and not self.closed,
            )
        except LeaseEnded as error:
            raise NcclError(
                f"rank {self.rank} of process group {self.name!r} cannot recover it: the other ranks take it for lost, as "
                f"{error}. It may join them as a new rank, by a new store (ProcessGroup.join)"
            ) from error
        except StoreDamaged:
            raise
        except StoreError as error:
            raise NcclError(
                f"rank {self.rank} of process group {self.name!r} cannot recover it: the store is gone, in which the survivors "
                f"would agree who they are ({error}). Have the store outlive each rank: in the launcher (ncclpy run), or Redis"
            ) from error
        if self.rank not in members:
            error = NcclError(
                f"process group {self.name!r} goes on without rank {self.rank}: {ranks(spans(members))} of {self.size} did, as "
                "this one had not come in time. It may join them as a new one (ProcessGroup.join)"
            )
            before = self.failure
            with self.lock:
                self.failure = error
            del before  # not under the lock: a user's exception may hang on it
            raise error
        return members, uuid

    def admit(self, timeout=None):
        """Let those join who wait for it in `join`; all ranks call it, at one place among their operations.

        It waits until what was begun is done and all ranks have come. If nobody asks, that is all. Else the group is
        reconfigured: the new ranks come behind those that are there, which keep theirs. No other thread begins anything
        meanwhile.

        Parameters
        ----------
        timeout : float, optional
            Seconds for all of it; the group's by default.

        Returns
        -------
        tuple of int
            The new ranks.

        Raises
        ------
        NcclTimeout
            If something is not done, or somebody has not come in time; it names them. A process that dies while it joins
            ends the group: `recover` then.
        """
        cdef double seconds = self.timeout if timeout is None else as_timeout(timeout)
        cdef double deadline = deadline_after(seconds)
        self._check_movable("admit()")
        self.check_usable()
        with _Turn(self, "admit()"):
            number = self.admissions  # those that come to nothing count as well: the other ranks may have come
            self.admissions += 1
            if not self._drain(deadline):
                raise NcclTimeout(
                    f"rank {self.rank} of process group {self.name!r}: {self.pending()} operations are not done {as_text(seconds)} "
                    "after admit(); nothing has changed"
                )
            wanted, store = self._wanted(), self.borrowed or self.store
            guests, host = {}, Host(store, self.name)
            if self.rank == 0:
                guests = host.invite(max(0.0, deadline - now()), wanted, self.check)
            mine = {"handle": self.handle, "guests": list(guests.values()), "uuid": secrets.token_hex(8)}
            try:
                try:
                    met = self._meet(f"admit/{number}", mine, max(0.0, deadline - now()), _admission)
                except NcclAborted:
                    if self.closed or not self.notices.goes_on(self.handle):
                        raise
                    # All have met, and one that has gone on has ended it before this rank had looked.
                    met = self.notices.gather(
                        f"admit/{number}", mine, max(0.1, deadline - now()), lambda: True, _admission
                    )
                if met[0]["guests"]:
                    decide_to_move(self.notices.store, self.name, self.rank)
            except BaseException as error:
                host.refuse(guests, text_of(error))
                self.check_usable()
                raise
            if self.rank == 0 and number > 0:  # all have come back from the last one
                self.notices.arrivals.forget(f"admit/{number - 1}", list(range(self.size)))
            handles = [each["handle"] for each in met] + met[0]["guests"]
            if len(handles) == self.size:
                return ()
            before, begun = len(met), NcclAborted(f"process group {self.name!r} admits others: this was begun then")
            self._stand(
                met[0]["uuid"], self.rank, len(handles), begun, True, handles, None, max(0.1, deadline - now()), None,
                functools.partial(_lost_of, self.notices.reports, before),
                functools.partial(host.welcome, guests, handles, met[0]["uuid"]),
            )
            return tuple(range(before, len(handles)))

    @classmethod
    def join(
        cls,
        store,
        name="default",
        *,
        timeout=600.0,
        device=None,
        config=None,
        on_error="abort",
        check="off",
        check_nan=False,
        high_priority=False,
        timing=False,
    ):
        """Join a running group as a new rank: wait until its ranks call `admit`, and return the group.

        Parameters
        ----------
        store : ncclpy.bootstrap.Store
            The one that the group was made with.
        name : str, optional
            The group's.
        timeout : float, optional
            Seconds to be admitted in, and the group's.
        device : int, optional
            As for `ProcessGroup`.
        config, on_error, check, check_nan, high_priority, timing
            As for `ProcessGroup`, and as the other ranks have given them.

        Raises
        ------
        ValueError
            If the other ranks were given another `check`.
        NcclTimeout
            If nobody has admitted this process in time.
        """
        cdef Membership group
        seconds = as_timeout(timeout)
        if type(name) is not str or not name:
            raise ValueError(f"name: expected a text of at least one character, got {name!r:.80}")
        group = cls(
            store, 0, 1, device=device, name=f"{name}/joining", timeout=timeout, config=config, on_error=on_error,
            check=check, check_nan=check_nan, high_priority=high_priority, timing=timing,
        )
        try:
            handles, uuid = Guest(group.store, name, group.handle, group.check).wait(seconds)
            with _Turn(group, "join()"):
                group.name = name
                group._stand(
                    uuid, handles.index(group.handle), len(handles), NcclAborted(f"process group {name!r} is being joined"),
                    True, None, None, seconds, None, None,
                )
        except BaseException:
            group.close()
            raise
        return group

    cdef int _check_movable(self, str what) except -1:
        check_process()
        if self.connections is None:
            raise RuntimeError("this ProcessGroup was not initialised")
        if self.closed:
            raise ValueError(f"process group {self.name!r} is closed; make a new one")
        if PyThread_get_thread_ident() in self.blocks:
            raise ValueError(f"{what} within coalescing(): leave the block first")
        return 0

    cdef int _leave(self, error, bint drained, handles) except -1:
        """End what the group is; until it goes on it has an error.

        ``handles`` are told to the ranks of the old group, unless it had ended anyway.
        """
        moving = NcclAborted(f"process group {self.name!r} is being reconfigured")  # not under the lock
        with self.lock:
            tells = self.failure is None and handles is not None
            if self.failure is None:
                self.failure = moving
            self.between = self.failure
            self.number = next_number()
        if tells:
            self._tell_plan(handles, "goes on as other ranks")
        self._confirm(drained)
        self.end_notices(False)
        self.end_connections(error, drained)
        self.abort_thread = self.tell_thread = None
        return 0

    cdef int _confirm(self, bint drained) except -1:
        """Tell those who end what the group is that this rank knows: it hears nothing of that any more."""
        cdef Connection one
        if not drained:
            for one in list(self.connections.values()):
                one.fence()
        if self.size > 1:
            self.notices.confirm()
        return 0

    cdef object _stand(
        self, uuid, int rank, int size, error, bint drained, handles, brought, double seconds, past, is_lost, tells=None
    ):
        """Leave, and be one of other ranks, once all of them have come; return what each has brought.

        ``error``, ``drained`` and ``handles`` are those of `_leave`, ``past`` and ``is_lost`` those of `_enter`; ``tells`` is
        called when this rank has come: should that be torn, the others hear of it.
        """
        store = self.borrowed or self.store
        notices = None
        try:
            self._leave(error, drained, handles)
            notices = self._notices(store, rank, size, place_of(uuid))
            self._enter(notices, past, is_lost)
            if tells is not None:
                tells()
            try:
                come = notices.gather(
                    _MEETING, brought, seconds, functools.partial(self._is_moving, notices.arrivals, is_lost), _past_of
                )
            except NcclAborted:
                if self.closed or not _has_met(notices):
                    raise
                come = notices.gather(_MEETING, brought, seconds, lambda: True, _past_of)  # one has gone on, and ended it
            self._go_on()
        except BaseException as failure:
            if notices is None:  # the others are there, and so is what recover() finds
                with contextlib.suppress(NcclError, ValueError):
                    notices = self._notices(store, rank, size, place_of(uuid))
            self._torn(failure, notices, past, is_lost)
            raise
        return come

    cdef int _torn(self, failure, notices, past, is_lost) except -1:
        """End it, as it is not what it was any more, and not what it would be either; raise what else has ended it."""
        error = failure if isinstance(failure, Exception) else NcclAborted(
            f"process group {self.name!r} was being reconfigured, which {type(failure).__name__} has ended"
        )
        between = self.between
        with self.lock:
            ours = self.failure is self.between
            if ours:
                self.failure = error
            self.between = None
        del between  # not under the lock: a user's exception may hang on it
        if notices is not None:
            with contextlib.suppress(NcclError, ValueError):
                if self.notices is not notices:
                    self._confirm(False)
                    self.end_notices(False)
                    self.end_connections(error, False)
                    self._enter(notices, past, is_lost)
                text = f"rank {notices.rank} of {notices.size}: {text_of(self.failure)}"
                if notices.arrivals.give_up(_MEETING, text):  # the others have gone on
                    notices.tell(text)
        if self.closed:
            self.end_notices(False)
        if not ours and isinstance(failure, Exception):
            self.check_usable()
        return 0

    cdef int _go_on(self) except -1:
        """Be usable again, unless it is closed; what has ended it since all have met stays, as if it came right behind."""
        before = self.between, self.past, self.is_lost
        with self.lock:
            ended = None if self.failure is self.between else self.failure
            if not self.closed:
                self.failure, self.between, self.past, self.is_lost = ended, None, None, None
        del before  # as in _torn
        if self.closed:
            self.check_usable()
            raise ValueError(f"process group {self.name!r} is closed; make a new one")
        if ended is not None:  # the others may not have heard here
            self.notices.tell(f"rank {self.rank} of {self.size}: {text_of(ended)}")
        self.leave_places(False)
        return 0

    def _is_moving(self, arrivals, is_lost):
        """Return whether the ranks that go on still meet: nobody has ended that, and none that is missing has died."""
        if not self.moves or self.closed or self.failure is not self.between:
            return False
        if is_lost is None:
            return True
        if self.rank > 0:  # the first one waits for all, the others for that one
            return arrivals.has_come(_MEETING, 0) or not is_lost(0)
        there = arrivals.there(_MEETING)
        return not any(is_lost(rank) for rank in range(1, self.size) if rank not in there)


cdef class _Turn:
    """The turn of a thread to reconfigure a group, one at a time, as a context; what a signal handler raises finds it taken or not, never between."""

    cdef Membership group
    cdef object what

    def __init__(self, Membership group not None, what):
        self.group, self.what = group, what

    def __enter__(self):
        if not self.group.turn.acquire(False):
            raise RuntimeError(f"{self.what}: another thread reconfigures process group {self.group.name!r} already")
        self.group.enders.add(PyThread_get_thread_ident())
        self.group.moves = True

    def __exit__(self, *_):
        self.group.moves = False
        self.group.enders.discard(PyThread_get_thread_ident())
        self.group.turn.release()


def _has_met(notices):
    """Return whether all have met who go on, as far as the store can say."""
    with contextlib.suppress(NcclError, ValueError):
        return notices.arrivals.has_met(_MEETING)
    return False


def _lost_of(reports, size, rank):
    """Return whether a rank cannot come any more, as far as what the group was before knows it."""
    return rank < size and reports.is_lost(rank)


def _admission(brought):
    """Return what a rank has brought to an admission: its handle, those of whom it lets in, and where they meet."""
    return {"handle": str(brought["handle"]), "guests": list(map(str, brought["guests"])), "uuid": str(brought["uuid"])}


def _past_of(brought):
    """Return what a rank of a group that goes on tells of the past: its last collective, if it was in the group before."""
    if brought is None:
        return None
    return {"finished": None if brought["finished"] is None else int(brought["finished"])}
