"""The status service of a process group, and its rendezvous in the store."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar
from urllib.parse import quote

from ncclpy.bootstrap.prefix import PrefixStore
from ncclpy.bootstrap.rank_rendezvous import RankRendezvous, refuse
from ncclpy.bootstrap.store import Store, StoreError
from ncclpy.bootstrap.store_arguments import decode, ranks_of
from ncclpy.bootstrap.watch import Change
from ncclpy.core.lifecycle import get_unique_id
from ncclpy.engine.group_registry import note_group
from ncclpy.errors import NcclAborted, NcclError, NcclRemoteError, NcclTimeout, ranks, spans
from ncclpy.peers.inquiry import Answer
from ncclpy.peers.numbering import GroupStore, Numbering, leave
from ncclpy.peers.rank_state import OperationInfo, RankState
from ncclpy.peers.reports import operations_before_close
from ncclpy.peers.status import ENDED, End, StatusService, tell_end
from ncclpy.process_group.clocks import Clocks
from ncclpy.types import UniqueId

__all__ = [
    "GroupStatus",
]


_log = logging.getLogger("ncclpy.process_group")

#: Prefix of the keys for ranks with an ended lease; all ranks watch it.
_GONE_PREFIX = "told/gone/"

_T = TypeVar("_T")

#: The key of the number of ranks that have closed the group.
_CLOSED_COUNT_KEY = "closed"

#: The key of the `check` of the first rank that made the group.
_CHECK_KEY = "options/check"

#: Seconds to wait for a write to the store, which may be stuck; then the caller continues.
_WRITE_TIMEOUT = 1.0

#: How many ranks, the lowest ones, watch for ended leases and tell the others. If all ranks did, each would write the
#: news for all.
_WATCHING_RANKS = 2

#: By the state of a rank that can no longer take part: the words for it, and in how many checks in a row, a third
#: of a second apart, the rank must have that state. One check is not enough: a rank that is just making its group has
#: no lease for an instant. The checks are for the case that the ranks that watch the leases have ended too. If the
#: watching ranks are alive, they report the end of a lease to all ranks, and the group ends if something waits in it.
_LOST_STATES = {
    "closed": ("closed the group", 2),
    "ended": ("process ended", 5),
    "lost": ("cannot be reached any more", 5),
}


def _unchecked(brought: Any) -> object:
    return brought


def _check_of(packed: bytes) -> tuple[str, str]:
    """Return how a rank compares collectives, and the rank's words for that in an error."""
    check, words = json.loads(packed)
    if not isinstance(check, str) or not isinstance(words, str):
        raise TypeError("check and words must be strings")
    return check, words


def _place_of(name: str) -> str:
    return f"ncclpy/group/{quote(name, safe='')}"


class GroupStatus(StatusService):
    """The part of a store that belongs to one group, and its status service.

    Groups of one name are told apart by their number, see `Numbering`. So the keys of two groups are never the same,
    in whatever order and by however many threads they are made.

    Parameters
    ----------
    store
        The store that all ranks have in common.
    name
        The group's name, the same on all ranks.
    rank, size, device
        This rank, the number of ranks, and this rank's device.
    look
        Returns this rank's status, see `Reports`.
    place
        A prefix of keys in the store for this one group; by default, one that `Numbering` makes from the group's name
        and number.

    Attributes
    ----------
    earlier_process_state
        Called with a rank that has not made this group; returns the state of its process, as far as an earlier group,
        the parent group or the launcher's store knows it: ``"ended"``, ``"lost"``, ``"stopped"`` or (from the
        launcher's store) ``"not_joined"``; else "".
    """

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        size: int,
        device: int,
        look: Callable[[], dict[str, Any]],
        place: str | None = None,
    ) -> None:
        self.earlier_process_state: Callable[[int], str] = _nothing_known
        self._parent: tuple[GroupStatus, Sequence[int]] | None = None
        self._numbering: Numbering | None = None
        self.number = 1  # fixed at a `place`: a rank that makes the group there again after a failure finds the others
        part: Store = GroupStore(f"{place}/1", store)
        if place is None:
            self._numbering = _numbering_of(store, name, rank, size)
            self.number = self._numbering.enter()
            part = self._numbering.part(self.number)
            self.earlier_process_state = self._earlier_process_state
        self._meetings: list[tuple[str, float]] = []  # rendezvous of all ranks that this rank is at, and since when
        self._joins: list[str] = []  # labels of communicators that this rank is at the rendezvous of
        self._threads: list[int] = []  # threads that are at a rendezvous
        self._at_no_meeting = threading.Condition()  # guards these lists
        self._leaving = False
        self._status = look
        self._look_for_closed: Callable[[], object] | None = None
        self.dump_entry = note_group(name, self.number, rank, size, device, self._look)
        has_made = None if self._numbering is None else self._has_made
        rendezvous = RankRendezvous(part, f"process group {name!r}", rank, size, has_made, is_lost=self._why_lost)
        super().__init__(part, [self.dump_entry], size, rendezvous, threading.get_ident())
        self.clocks = Clocks(part, rank, self.dump_entry)

    def unique_id(self, label: str, members: list[int], timeout: float, wanted: Callable[[], bool]) -> bytes:
        """Run the rendezvous of a communicator's ranks, and return the unique id that the first of them makes.

        Parameters
        ----------
        label
            Which communicator, the same on all of its ranks.
        members
            Its ranks in the group, in the order of their ranks in the communicator.
        timeout
            Seconds to wait; the error names the missing ranks.
        wanted
            Called to ask whether the communicator is still wanted.
        """
        what = f"to make communicator {label!r} of process group {self.name!r}"
        place = f"communicator/{label}"

        def first(contributions: list[bytes]) -> bytes:
            return bytes(decode(UniqueId, contributions[0], self.store, f"{place}/here/{members[0]}", members[0]))

        with self._at_meeting(self._joins, label):
            try:
                brought = bytes(get_unique_id()) if self.rank == members[0] else b""
            except BaseException as error:
                why = f"{type(error).__name__}: {error}"
                self.rendezvous.give_up(place, f"rank {self.rank} of {self.size} failed {what}: {why}", True)
                raise
            met = self.rendezvous.meet(place, members, what, brought, first, timeout, wanted)
        return bytes(decode(UniqueId, met, self.store, f"{place}/outcome", members[0]))

    @contextlib.contextmanager
    def _at_meeting(self, meetings: list[_T], meeting: _T) -> Iterator[None]:
        """Note that this thread is at a rendezvous, and writes keys for it: `leave` waits for the thread.

        Raises `NcclAborted` once this rank leaves the group: another rank may have deleted the group's keys.
        """
        thread = threading.get_ident()
        with self._at_no_meeting:
            if self._leaving:
                raise NcclAborted(f"process group {self.name!r} was closed")
            meetings.append(meeting)
            self._threads.append(thread)
        try:
            yield
        finally:
            with self._at_no_meeting:
                meetings.remove(meeting)
                self._threads.remove(thread)
                self._at_no_meeting.notify_all()

    def delete_rendezvous(self, label: str, members: list[int]) -> None:
        """Have the first member delete the keys of a communicator's rendezvous, and look for processes.

        The communicator is made, so all of its ranks have read the keys.
        """
        if self.rank == members[0]:
            self.rendezvous.forget(f"communicator/{label}", members)
        self.look_for_processes()

    def rendezvous_of(
        self, label: str, members: list[int]
    ) -> tuple[Callable[[float, Callable[[], bool]], bytes], Callable[[], None]]:
        """Return the callables that run the rendezvous of a communicator's ranks, and that delete its keys."""
        return functools.partial(self.unique_id, label, members), functools.partial(
            self.delete_rendezvous, label, members
        )

    def gather(
        self,
        name: str,
        value: object,
        timeout: float,
        wanted: Callable[[], bool],
        read: Callable[[Any], object] = _unchecked,
    ) -> list[Any]:
        """Return by rank what all ranks of the group bring to a rendezvous. This rank brings `value`, of JSON's types.

        `read` is called with what a rank has brought; it returns the value, and raises if the value is malformed.
        """
        all_ranks = list(range(self.size))
        what = f"at {name} of process group {self.name!r}"
        brought = json.dumps(value).encode()

        def read_one(packed: bytes) -> object:
            return read(json.loads(packed))

        meeting = _call_of(name), time.time()
        with self._at_meeting(self._meetings, meeting):
            packed = self.rendezvous.meet(
                name, all_ranks, what, brought, self.rendezvous.combined(name, read_one), timeout, wanted
            )
        return self.rendezvous.parts(name, packed, read_one)

    def compare(self, check: str) -> None:
        """Raise ValueError if the rank that called this first has another `check`: the two ranks would both hang."""
        own_words = f"rank {self.rank} of {self.size} has {check!r}"
        first = self.store.compare_set(_CHECK_KEY, None, json.dumps([check, own_words]).encode())[1]
        first_check, first_words = decode(_check_of, first or b"[]", self.store, _CHECK_KEY)
        if first_check != check:
            raise ValueError(
                f"check: all ranks of process group {self.name!r} must give the same; {own_words}, {first_words}"
            )

    @staticmethod
    def refuse(store: Store, place: str, meeting: str, why: str) -> None:
        """Tell the ranks at a rendezvous of the group at `place` of the store that this rank does not take part."""
        with contextlib.suppress(StoreError, NcclTimeout):
            refuse(PrefixStore(f"{place}/1", store), meeting, why)

    def _look(self) -> dict[str, Any]:
        """Return this rank's status in the group, with its rendezvous if it is in no operation."""
        status = self._status()
        if status.get("current") is None:
            for what, since in self._meetings[:1]:
                status["in_rendezvous"], status["since"] = what, since
        return status

    def publish(self) -> None:
        """Publish as every service does; compare the clocks, if due, and check which ranks have closed the group."""
        super().publish()
        self.clocks.look()
        if self._look_for_closed is not None:
            self._look_for_closed()

    def part_of(self, parent: GroupStatus, members: Sequence[int]) -> None:
        """Note that this group consists of `members` of a parent; a rank that has left the parent cannot take part."""

        def state_in_parent(rank: int) -> str:
            return parent.process_of(members[rank])

        self.earlier_process_state, self._parent = state_in_parent, (parent, members)

    def process_of(self, rank: int) -> str:
        """Return the state of a rank's process if it is ended, lost or stopped; else "".

        For a rank that has not made this group, that is what `earlier_process_state` returns.
        """
        if not self.rendezvous.has_joined(rank):
            return self.earlier_process_state(rank)
        state = self.reports.process_of(rank)
        return state if state in ("ended", "lost", "stopped") else ""

    def _why_lost(self, rank: int) -> tuple[str, int] | None:
        """Return why a rank will not arrive at a rendezvous of this group, None if it may; see `RankRendezvous`."""
        if self.rendezvous.has_joined(rank) or self._parent is None:
            return _LOST_STATES[state] if (state := self.reports.end_of(rank)) else None
        parent, members = self._parent
        left = parent._why_lost(members[rank])
        return (f"closed process group {parent.name!r}", left[1]) if left == _LOST_STATES["closed"] else left

    def collect(self, patience: float | None = None) -> tuple[RankState, ...]:
        """Collect as every service does; `earlier_process_state` replaces "not_joined" if it returns a state."""
        return tuple(
            each
            if each.state != "not_joined"
            else replace(each, state=self.earlier_process_state(each.rank) or each.state)
            for each in super().collect(patience)
        )

    def _has_made(self, rank: int) -> bool:
        """Return whether a rank has made the group of this number."""
        return self._numbering is not None and self._numbering.has_made(rank, self.number)

    def _earlier_process_state(self, rank: int) -> str:
        """Return the state of the process that made an earlier group as a rank; see `earlier_process_state`."""
        return "" if self._numbering is None else self._numbering.earlier_process_state(rank, self.number)

    def listen(
        self,
        on_end: Callable[[End], object],
        on_gone: Callable[[int, str], object],
        on_silent: Callable[[int, str], object],
        is_wanted: Callable[[], object],
        look_for_closed: Callable[[], object],
        source: Any,
    ) -> None:
        """Publish, answer and call back from now on, see `StatusService.start`.

        `on_gone` is also called with a rank when its lease has ended. `look_for_closed` is called after each
        publication. `source` is this rank's operation log.
        """
        self._look_for_closed = look_for_closed
        self.start({self.rank: source}, on_end, on_gone, on_silent, is_wanted)
        if self.is_watched and self.size > 1:
            for watch in self.clocks.listen():
                self.keep(watch)
            if self.rank < _WATCHING_RANKS:
                self.watch(self.rendezvous.alive_key(""), self._report_ended_lease)

    def hear(self, change: Change) -> None:
        """Handle a change as every service does, and also the end of a lease."""
        super().hear(change)
        if not self.is_over and change.value is not None and change.key.startswith(_GONE_PREFIX):
            for rank in ranks_of([change.key]):
                self.on_gone(rank, "its lease in the store has ended")

    def _report_ended_lease(self, change: Change) -> None:
        """Tell the others of a rank with an ended lease, unless the rank has closed the group."""
        if change.value is None and not self.is_over:
            with contextlib.suppress(StoreError, NcclTimeout):
                for rank in ranks_of([change.key]):
                    if not self.reports.has_closed(rank):
                        self.store.set(f"{_GONE_PREFIX}{rank}", b"")

    def waits_for(self) -> object:
        """Return what this rank waits for, as every service does; it may also wait for a communicator."""
        return super().waits_for() or self._joins[:1]

    def inquire_about(self, label: str, members: list[int], subject: OperationInfo | None, _: bool) -> Answer:
        """Inquire for this rank alone, after its wait for a communicator has failed; name the missing ranks."""
        summary, states = self.inquire(subject, True)
        with contextlib.suppress(NcclError):
            present = self.rendezvous.arrived(f"communicator/{label}")
            missing = [rank for rank in members if rank not in present and rank != self.rank]
            if missing and present and summary is not None:  # with none present, the rendezvous is over and deleted
                summary = f"{ranks(spans(missing))} {'has' if len(missing) == 1 else 'have'} not arrived. {summary}"
        return summary, states

    def tell(
        self,
        text: str,
        summary: str | None = None,
        states: tuple[RankState, ...] | None = None,
        handles: Iterable[str] | None = None,
        kind: str = "",
        only_if_asked: bool = False,
    ) -> None:
        """Tell all ranks that the group has ended, unless another rank was faster; the store may be gone.

        Parameters
        ----------
        text
            Why, and which rank says so.
        summary, states
            What each rank does, as far as this one knows: in a sentence, and as data.
        handles
            The handles of the groups that are reconfigured together, if this is why.
        kind
            The name of the exception's class.
        only_if_asked
            See `End.only_if_asked`.
        """
        _tell(self.store, self.name, End(text, self.rank, summary, states, handles, kind, only_if_asked))

    def was_reconfigured_with(self, handle: str) -> bool:
        """Return whether the group has ended because it was reconfigured, with this handle among the handles."""
        with contextlib.suppress(StoreError, NcclTimeout):
            end = self.announced_end()
            return end is not None and handle in (end.handles or ())
        return False

    def tell_part(self, name: str, error: BaseException) -> None:
        """Tell the ranks of a part of this group, within a second, that this rank could not make the part, and why."""
        text = f"rank {self.rank} of process group {self.name!r} did not make it: {error}"
        kind = NcclAborted if isinstance(error, NcclAborted) else NcclRemoteError  # aborted: this group has ended
        store = PrefixStore(f"{_place_of(name)}/1", self.store)  # number 1: a part's name is used once
        _within(_WRITE_TIMEOUT, lambda: _tell(store, name, End(text, self.rank, kind=kind.__name__)))

    @staticmethod
    def tell_unmade(store: Store, name: str, rank: int, size: int, error: BaseException) -> None:
        """Tell the other ranks, within a second, that this one cannot make a group, and why; the store may be gone."""

        def tell() -> None:
            text = f"rank {rank} of {size}, which could not make it: {type(error).__name__}: {error}"
            with contextlib.suppress(StoreError, NcclTimeout, ValueError):
                numbering = _numbering_of(store, name, rank, size)
                number = numbering.enter()
                _tell(numbering.part(number), name, End(text, rank, kind=NcclRemoteError.__name__))
                numbering.leave(number, lambda rank: False)

        if size > 1:
            _within(_WRITE_TIMEOUT, tell)

    def leave(self, *, continued: bool = False) -> None:
        """Leave the group; the last live rank that leaves deletes what all ranks have written.

        With `continued`, ranks have continued without others: then the keys stay while there is a rank of which only
        the lease has ended. It may run again, and has to find the survivors' decision.
        """
        lost = ("ended",) if continued else ("ended", "lost")

        def is_gone(rank: int) -> bool:
            return self.condition_of(rank) in lost

        def leave_part() -> None:
            if self._numbering is not None:
                self._numbering.leave(self.number, is_gone)
            else:
                leave(self.store, self.rank, self.size, is_gone)

        with self._at_no_meeting:
            self._leaving = True
            # This thread is not waited for: it may be in a signal handler that has interrupted its own rendezvous.
            own = threading.get_ident()
            self._at_no_meeting.wait_for(lambda: all(each == own for each in self._threads), _WRITE_TIMEOUT)
        _within(_WRITE_TIMEOUT, leave_part)

    def closed_ranks(self) -> dict[int, dict[str, int]]:
        """Return, for each rank that has closed the group, how many operations it has begun, by communicator."""
        if self.store.compare_set(_CLOSED_COUNT_KEY, None, None)[1] is None:
            return {}
        found = {rank: operations_before_close(self.store, rank) for rank in range(self.size) if rank != self.rank}
        return {rank: begun for rank, begun in found.items() if begun is not None}

    def close(self, *, announce: bool = False, operation_counts: Mapping[str, int] | None = None) -> None:
        """Stop listening; with `announce`, tell the others that this rank has closed the group.

        `operation_counts` is how many operations this rank has begun, by communicator.
        """
        self.dump_entry.closed()
        super().close()
        if announce and self.size > 1:
            with contextlib.suppress(StoreError, NcclTimeout):  # if the store is gone, nothing can be told
                self.say_closed(operation_counts)
                self.store.add(_CLOSED_COUNT_KEY)


def _numbering_of(store: Store, name: str, rank: int, size: int) -> Numbering:
    place = _place_of(name)

    def tell(number: int, text: str) -> None:
        text = f"rank {rank} of {size}: {text}"
        _tell(PrefixStore(f"{place}/{number}", store), name, End(text, rank, kind=NcclRemoteError.__name__))

    def has_ended(number: int) -> bool:
        return store.check([f"{place}/{number}/{ENDED}"])

    return Numbering(store, f"process group {name!r}", place, rank, size, tell, has_ended)


def _tell(store: Store, name: str, end: End) -> None:
    try:
        tell_end(store, end)
    except (StoreError, NcclTimeout) as error:
        _log.warning("rank %s could not tell that group %r has ended (%s): %s", end.rank, name, end.text, error)


def _within(seconds: float, act: Callable[[], object]) -> None:
    """Call `act` in a thread of its own, and wait at most so many seconds for it: the store may be stuck."""
    thread = threading.Thread(target=act, name="ncclpy-group-store", daemon=True)
    with contextlib.suppress(RuntimeError):  # no thread can be started
        thread.start()
        thread.join(seconds)


def _nothing_known(rank: int) -> str:
    return ""


def _call_of(meeting: str) -> str:
    """Return what statuses call a rendezvous: "split()" for "split/3", a call of `split`; other names as they are."""
    call, numbered, _ = meeting.partition("/")
    return f"{call}()" if numbered else call
