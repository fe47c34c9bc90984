"""What ranks tell each other through a store, and calls of a group that do not keep it."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

from ncclpy.bootstrap.arrivals import Arrivals, refuse
from ncclpy.bootstrap.asked import decode, ranks_of
from ncclpy.bootstrap.prefix import PrefixStore
from ncclpy.bootstrap.store import Store, StoreEnded, StoreError
from ncclpy.bootstrap.watch import Change, Watch
from ncclpy.core.lifecycle import get_unique_id
from ncclpy.engine.known import elsewhere, note_group
from ncclpy.errors import NcclError, NcclRemoteError, NcclTimeout, ranks, spans
from ncclpy.peers.confirmation import Confirmation
from ncclpy.peers.heartbeats import Heartbeats
from ncclpy.peers.numbering import GroupStore, Numbering, leave
from ncclpy.peers.processes import PeerProcesses
from ncclpy.peers.reports import ASKED, Reports, begun_until_closed, number_of
from ncclpy.peers.sentence import keep_stacks, sentence
from ncclpy.peers.standing import Began, RankState, as_data, from_data
from ncclpy.process_group.clocks import Clocks
from ncclpy.types import UniqueId

__all__ = [
    "Notices",
    "caller_of",
    "teller_of",
]


def caller_of(reference: weakref.ref[Any], method: str) -> Callable[..., None]:
    """Return what calls a method of a group, as long as there is one."""

    def call(*arguments: Any) -> None:
        group = reference()
        if group is not None:
            getattr(group, method)(*arguments)

    return call


def teller_of(reference: weakref.ref[Any]) -> Callable[[], dict[str, Any]]:
    """Return what tells what a group does, likewise."""

    def tell() -> dict[str, Any]:
        group = reference()
        return {} if group is None else group._standing()

    return tell


_log = logging.getLogger("ncclpy.process_group")

#: What all ranks watch.
_TOLD = "told/"
_ENDED = "told/ended"
_GONE = "told/gone/"

#: Set by the first rank in trouble, who asks for all; and what it has heard. At the group's end, or at a meeting.
_TROUBLE, _SAID = "trouble", "said"
_END = "end"

#: How many ranks have closed the group.
_CLOSED = "closed"

#: So many times a rank looks there for others, a second apart, besides when a communicator is made.
_LOOKS = 5

#: How the first rank compares collectives.
_CHECK = "options/check"

#: Seconds for that one to ask, and to tell.
_OTHERS_ASK = 2.5

#: Seconds for the store to be told what happens all the same should it be stuck.
_TELLS = 1.0

#: So many ranks, the first ones, look who is gone and tell the others: did all, each would hear of each.
_LOOKOUTS = 2

#: How long a wait in a store that cannot be watched goes on before it looks whether the group was closed, or asked.
_SLICE = 0.2

#: What is said of who cannot come any more, by its state; and how often in a row it has to be found so, a third of a
#: second apart. Who only just makes its group has no lease for an instant; and of a process that ends all hear by its
#: lease, which ends the group with what waits there. This is for those who hear nothing, as who looks out has ended.
_LEFT = {
    "closed": ("closed the group", 2),
    "ended": ("process ended", 5),
    "gone": ("cannot be reached any more", 5),
}


def _anything(brought: Any) -> object:
    return brought


def _check_of(packed: bytes) -> tuple[str, str]:
    """Return how a rank compares collectives, and the words in which it says so."""
    check, words = json.loads(packed)
    if not isinstance(check, str) or not isinstance(words, str):
        raise TypeError("these are no texts")
    return check, words


def _place_of(name: str) -> str:
    return f"ncclpy/group/{quote(name, safe='')}"


@dataclass(frozen=True)
class Told:
    """What a rank tells the others of a group's end.

    Attributes
    ----------
    text
        Why, and which rank says so.
    said, states
        What its ranks did then, in a sentence and as data.
    handles
        Those of the groups that go on together, if this is why.
    kind
        The name of the exception's class on the rank that tells it: all ranks raise the same.
    asked
        Whether only a rank takes it that asks, as it has stood still; the others hear of the end in another way.
    """

    text: str
    said: str | None = None
    states: tuple[RankState, ...] | None = None
    handles: Iterable[str] | None = None
    kind: str = ""
    asked: bool = False

    def packed(self) -> bytes:
        """Return it as it travels."""
        told = {
            "text": self.text,
            "said": self.said,
            "ranks": None if self.states is None else as_data(self.states),
            "handles": None if self.handles is None else list(self.handles),
            "kind": self.kind,
            "asked": self.asked,
        }
        return json.dumps(told).encode(errors="replace")


class Notices:
    """The part of a store that belongs to one group.

    Groups of one name are told apart by their number, see `Numbering`. So their keys never meet those of another
    group, in whatever order and by however many threads they are made.

    Parameters
    ----------
    store
        The store that all ranks have in common.
    name
        The group's name, the same on all ranks.
    rank, size, device
        Which of how many this is, and what it works with.
    look
        Returns this rank's standing, see `Reports`.
    place
        Where in the store, for one group; by default the place of all groups of this name.

    Attributes
    ----------
    before
        Asked with a rank that has not made this group: the state of its process, as far as that is known from what it
        was part of before, ``"ended"``, ``"gone"`` or ``"stopped"``; else "".
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
        self.before: Callable[[int], str] = _nothing_known
        self._parent: tuple[Notices, Sequence[int]] | None = None
        self._numbering: Numbering | None = None
        self.number = 1  # a rank that comes to a place again, after a failure, meets the others
        self.store: Store = GroupStore(f"{place}/1", store)
        if place is None:
            self._numbering = _numbering_of(store, name, rank, size)
            self.number = self._numbering.enter()
            self.store = self._numbering.part(self.number)
            self.before = self._before
        self.name, self.rank, self.size = name, rank, size
        self._meetings: list[tuple[str, float]] = []  # this rank is at, and since when
        self._joins: list[str] = []  # the communicators that this rank meets others to make
        self._begun = look
        self.known = note_group(name, self.number, rank, size, device, self._look)
        has_made = None if self._numbering is None else self._has_made
        self.arrivals = Arrivals(self.store, f"process group {name!r}", rank, size, has_made, is_lost=self._why_lost)
        self.reports = Reports(
            self.store, rank, size, self._look, self._is_gone, self._has_made, self._look_around,
            thread=threading.get_ident(),
        )  # fmt: skip
        self.clocks = Clocks(self.store, rank, self.known)
        self._confirmation = Confirmation(self.store, (rank,), size, self._condition_of)
        self._over = threading.Event()
        self._watches: list[Watch] = []
        self._processes = PeerProcesses(self.store, (rank,), lambda rank, why: self._gone(rank, why))
        self._gone: Callable[[int, str], object] = _nobody_told
        self._looks = _LOOKS
        self._heartbeats: Heartbeats | None = None
        if size > 1 and not self.arrivals.has_leases:
            self._heartbeats = Heartbeats(self.store, (rank,), size, self._processes)

    def unique_id(self, label: str, members: list[int], timeout: float, wanted: Callable[[], bool]) -> bytes:
        """Meet the other ranks of a communicator under the deadline, and return the id that the first of them makes.

        Parameters
        ----------
        label
            Which communicator, the same on all of its ranks.
        members
            Its ranks in the group, in the order of their ranks in the communicator.
        timeout
            Seconds; the error names who has not come.
        wanted
            Asked whether the communicator is still to be made.
        """
        what = f"to make communicator {label!r} of process group {self.name!r}"
        place = f"communicator/{label}"
        try:
            mine = bytes(get_unique_id()) if self.rank == members[0] else b""
        except BaseException as error:
            why = f"{type(error).__name__}: {error}"
            self.arrivals.give_up(place, f"rank {self.rank} of {self.size} failed {what}: {why}", True)
            raise

        def first(come: list[bytes]) -> bytes:
            return bytes(decode(UniqueId, come[0], self.store, f"{place}/here/{members[0]}", members[0]))

        self._joins.append(label)
        try:
            met = self.arrivals.meet(place, members, what, mine, first, timeout, wanted)
        finally:
            self._joins.remove(label)
        return bytes(decode(UniqueId, met, self.store, f"{place}/outcome", members[0]))

    def made(self, label: str, members: list[int]) -> None:
        """Clear away what a communicator was made by: it stands, so that all of its ranks have had that."""
        if self.rank == members[0]:
            self.arrivals.forget(f"communicator/{label}", members)
        self._watch_processes()

    def gather(
        self,
        name: str,
        value: object,
        timeout: float,
        wanted: Callable[[], bool],
        read: Callable[[Any], object] = _anything,
    ) -> list[Any]:
        """Return what all ranks of the group bring to a meeting, by rank; it may be anything that JSON knows.

        `read` is given what a rank has brought; it returns that, and raises if it is not what a rank brings.
        """
        everyone = list(range(self.size))
        what = f"to {name} of process group {self.name!r}"
        brought = json.dumps(value).encode()

        def read_one(packed: bytes) -> object:
            return read(json.loads(packed))

        meeting = _call_of(name), time.time()
        self._meetings.append(meeting)
        try:
            packed = self.arrivals.meet(
                name, everyone, what, brought, self.arrivals.combined(name, read_one), timeout, wanted
            )
        finally:
            self._meetings.remove(meeting)
        return self.arrivals.parts(name, packed, read_one)

    def compare(self, check: str) -> None:
        """Raise ValueError unless all ranks so far compare collectives alike: else they would wait for each other."""
        mine = f"rank {self.rank} of {self.size} has {check!r}"
        there = self.store.compare_set(_CHECK, None, json.dumps([check, mine]).encode())[1]
        theirs, who = decode(_check_of, there or b"[]", self.store, _CHECK)
        if theirs != check:
            raise ValueError(f"check: all ranks of process group {self.name!r} give the same; {mine}, {who}")

    @staticmethod
    def refuse(store: Store, place: str, meeting: str, why: str) -> None:
        """Tell those who meet at a place of a store, for one group, that this rank does not come."""
        with contextlib.suppress(StoreError, NcclTimeout):
            refuse(PrefixStore(f"{place}/1", store), meeting, why)

    def _look(self) -> dict[str, Any]:
        """Return this rank's standing in the group; also at which meeting it is, if it is in no operation."""
        told = self._begun()
        if told.get("current") is None:
            for what, since in self._meetings[:1]:
                told["meets"], told["since"] = what, since
        return told

    def _look_around(self) -> dict[str, Any]:
        """Return it for who asks: a rank that does nothing in this group may wait in another one."""
        told = self._look()
        if told.get("current") is None and "meets" not in told:
            told.update(elsewhere(self.known))
        return told

    def beat(self) -> None:
        """Put what this rank does into the store, unless that does so itself; compare the clocks, if that is due."""
        self.reports.publish()
        self.clocks.look()
        if self._looks > 0:
            self._watch_processes()

    def part_of(self, parent: Notices, members: Sequence[int]) -> None:
        """Know these ranks as those of a group that this one is part of; who has left that does not come here."""

        def before(rank: int) -> str:
            return parent.process_of(members[rank])

        self.before, self._parent = before, (parent, members)

    def process_of(self, rank: int) -> str:
        """Return what became of a rank's process, if something did: ended, gone or stopped; else ""."""
        if not self._has_made(rank):
            return self.before(rank)
        state = self.reports.process_of(rank)
        return state if state in ("ended", "gone", "stopped") else ""

    def _why_lost(self, rank: int) -> tuple[str, int] | None:
        """Return why a rank will not come to a meeting of this group, None if it may; see `Arrivals`."""
        if self._has_made(rank) or self._parent is None:
            return _LEFT[state] if (state := self.reports.end_of(rank)) else None
        parent, members = self._parent
        left = parent._why_lost(members[rank])
        return (f"closed process group {parent.name!r}", left[1]) if left == _LEFT["closed"] else left

    def collect(self, patience: float | None = None) -> tuple[RankState, ...]:
        """Ask all ranks; return what each does, by rank, see `Reports.collect`."""
        found = self.reports.collect(patience)
        return tuple(
            replace(each, state=self.before(each.rank) or each.state) if each.state == "absent" else each
            for each in found
        )

    def _has_made(self, rank: int) -> bool:
        """Return whether a rank has made this group."""
        if self._numbering is None:
            return self.arrivals.has_made(rank)
        return self._numbering.has_made(rank, self.number)

    def _before(self, rank: int) -> str:
        """Return what became of the process that made an earlier group as a rank, see `before`."""
        return "" if self._numbering is None else self._numbering.before(rank, self.number)

    def _watch_processes(self) -> None:
        """Watch over the processes on this machine of ranks that have told theirs, beside this one."""
        if self.size > 1 and not self._over.is_set():
            self._looks -= 1
            self._processes.look()

    def listen(
        self,
        ended: Callable[[Told], object],
        gone: Callable[[int, str], object],
        silent: Callable[[int, str], object],
        source: Any,
    ) -> None:
        """Call back, in a thread of its own, once a rank has told that the group has ended, or that a rank is gone.

        Or `silent`, once a rank of another machine beats no more while this one waits. Other ranks that ask what this
        one does are answered there too; `source` tells it where no Python runs.
        """

        def take(told: bytes | None) -> None:
            if told is not None and not self._over.is_set() and not (found := _read(told)).asked:
                ended(found)

        def look(change: Change) -> None:
            if self._over.is_set() or change.value is None:
                return
            if change.key == _ENDED:
                take(change.value)
            elif change.key == ASKED:
                with contextlib.suppress(StoreError, NcclTimeout):
                    self.reports.answer_all(number_of(change.value))
            elif change.key.startswith(_GONE):
                for rank in ranks_of([change.key]):
                    gone(rank, "its lease in the store has ended")

        self._gone = gone
        if self.size > 1:
            self.reports.begin(source)
            self._processes.tell()
        try:
            self._watches.append(self.store.watch(_TOLD, look))
        except StoreError:  # it cannot tell of changes
            self.reports.watched = False
            if self._heartbeats is not None:
                self._heartbeats.tell()
            threading.Thread(target=self._ask, args=(take, silent), name="ncclpy-group", daemon=True).start()
            return
        if self.size > 1:
            self._watches += self.clocks.listen()
        if self.store.check([_ENDED]):  # before the watch began
            take(self.store.get(_ENDED))
        if self.rank < _LOOKOUTS and self.size > 1:
            self._watches.append(self.store.watch(self.arrivals.alive(""), self._look_out))

    def _look_out(self, change: Change) -> None:
        """Tell the others of a rank whose lease has ended, unless it has closed the group."""
        if change.value is None and not self._over.is_set():
            with contextlib.suppress(StoreError, NcclTimeout):
                for rank in ranks_of([change.key]):
                    if not self.reports.has_closed(rank):
                        self.store.set(f"{_GONE}{rank}", b"")

    def _ask(self, take: Callable[[bytes | None], None], silent: Callable[[int, str], object]) -> None:
        while not self._over.is_set():
            self._hear_beats(silent)
            try:
                take(self.store.get(_ENDED, _SLICE))
                return
            except NcclTimeout:
                pass
            except StoreError as error:
                if not self._over.is_set() and not isinstance(error, StoreEnded):
                    _log.warning("rank %d hears no more whether its group has ended: %s", self.rank, error)
                return
            with contextlib.suppress(StoreError, NcclTimeout):
                self.reports.answer_all(number_of(self.store.compare_set(ASKED, None, None)[1]))

    def _hear_beats(self, silent: Callable[[int, str], object]) -> None:
        """Beat, and listen to ranks of other machines, see `Heartbeats.look`."""
        if self._heartbeats is not None:
            with contextlib.suppress(StoreError, NcclTimeout):  # the next question says that the store is gone
                for rank, why in self._heartbeats.look(self._waits_for):
                    silent(rank, why)

    def _waits_for(self) -> object:
        """Return the operation, the meeting or the communicator that this rank waits for, something false if none."""
        return self._begun().get("current") or self._meetings[:1] or self._joins[:1]

    def _is_gone(self, rank: int) -> bool:
        """Return whether a rank has made this group, and its lease or its heartbeats have ended."""
        if self._heartbeats is None:
            return self.arrivals.is_gone(rank)
        return self._heartbeats.is_silent(rank)

    def inquire(self, subject: Began | None, alone: bool) -> tuple[str | None, tuple[RankState, ...] | None]:
        """Return what all ranks do, in a sentence and as data; (None, None) if nobody could find out.

        Parameters
        ----------
        subject
            The operation that this rank is in.
        alone
            Whether this rank asks for itself; else the group ends, and one asks for all.
        """
        return self.inquire_at(None if alone else _END, subject, alone)

    def inquire_at(
        self, place: str | None, subject: Began | None, _: bool
    ) -> tuple[str | None, tuple[RankState, ...] | None]:
        """Do the same for what has come to nothing at a place, once for all, such as a meeting that ends no group."""
        try:
            if place is not None and not self.store.compare_set(f"{place}/{_TROUBLE}", None, b"")[0]:
                told = _read(self.store.get(f"{place}/{_SAID}", _OTHERS_ASK))
                return told.said, told.states
            found = keep_stacks(self.collect(), subject)
            said = sentence(self.name, found, self.size, subject)
            if place is not None:  # before anybody sees an error: its process may end with that
                self.store.set(f"{place}/{_SAID}", Told("", said, found).packed())
        except NcclError as error:  # the store is gone, or the one who asks
            return f"What the other ranks do is not known: {error}", None
        return said, found

    def inquire_about(
        self, label: str, members: list[int], subject: Began | None, _: bool
    ) -> tuple[str | None, tuple[RankState, ...] | None]:
        """Do the same for this rank alone, which waits no longer for a communicator; say who has not come for that."""
        said, states = self.inquire(subject, True)
        with contextlib.suppress(NcclError):
            there = self.arrivals.there(f"communicator/{label}")
            missing = [rank for rank in members if rank not in there and rank != self.rank]
            if missing and there and said is not None:  # without any they have met
                said = f"{ranks(spans(missing))} {'has' if len(missing) == 1 else 'have'} not come. {said}"
        return said, states

    def tell(
        self,
        text: str,
        said: str | None = None,
        states: tuple[RankState, ...] | None = None,
        handles: Iterable[str] | None = None,
        kind: str = "",
        asked: bool = False,
    ) -> None:
        """Tell all ranks that the group has ended, unless another one was faster; the store may be gone.

        Parameters
        ----------
        text
            Why, and which rank says so.
        said, states
            What each rank does, as far as this one knows: in a sentence, and as data.
        handles
            Those of the groups that go on together, if this is why.
        kind
            The name of the exception's class.
        asked
            Whether only ranks take it that ask.
        """
        _tell(self.store, self.rank, self.name, Told(text, said, states, handles, kind, asked))

    def told(self) -> Told | None:
        """Return what a rank has told of the group's end; None while nothing has ended it."""
        there = self.store.compare_set(_ENDED, None, None)[1]
        return None if there is None else _read(there)

    def confirm(self) -> None:
        """Tell that this rank has heard of the end, see `Confirmation`."""
        self._confirmation.confirm()

    def wait_until_confirmed(self, limit: float | None = None) -> bool:
        """Wait until the other ranks have, those that can; by default as long as that takes before an abort.

        Return whether communicators may be aborted then.
        """
        return self._confirmation.wait() if limit is None else self._confirmation.wait_shortly(limit)

    def _condition_of(self, rank: int) -> str:
        if not self._has_made(rank):
            return "absent"
        if self.arrivals.is_gone(rank):
            return "gone"
        state = self.reports.process_of(rank)
        return "silent" if state == "gone" else state  # by its heartbeats alone: it may live, and is waited for

    def goes_on(self, handle: str) -> bool:
        """Return whether the group has ended here because it goes on with others, of whom this rank is one."""
        with contextlib.suppress(StoreError, NcclTimeout):
            told = self.store.compare_set(_ENDED, None, None)[1]
            return told is not None and handle in (_read(told).handles or ())
        return False

    def tell_part(self, name: str, text: str) -> None:
        """Tell the ranks of a part of this group that it has ended, which this rank could not make; see `tell`."""
        store = PrefixStore(f"{_place_of(name)}/1", self.store)  # its name is made once
        _tell(store, self.rank, name, Told(text, kind=NcclRemoteError.__name__))

    @staticmethod
    def tell_unmade(store: Store, name: str, rank: int, size: int, error: BaseException) -> None:
        """Tell the other ranks, within a second, that this one cannot make a group, and why; the store may be gone."""

        def tell() -> None:
            text = f"rank {rank} of {size}, which could not make it: {type(error).__name__}: {error}"
            with contextlib.suppress(StoreError, NcclTimeout, ValueError):
                numbering = _numbering_of(store, name, rank, size)
                number = numbering.enter()
                _tell(numbering.part(number), rank, name, Told(text, kind=NcclRemoteError.__name__))
                numbering.leave(number, lambda rank: False)

        if size > 1:
            _within(_TELLS, tell)

    def leave(self, *, went_on: bool = False) -> None:
        """Have nothing more to do with the group: what all ranks have written goes with the last of them that lives.

        Where some `went_on` without others, that is kept for a rank whose lease alone has ended: it may come, and is
        to find that they did.
        """
        lost = ("ended",) if went_on else ("ended", "gone")

        def is_gone(rank: int) -> bool:
            return self._condition_of(rank) in lost

        def go() -> None:
            if self._numbering is not None:
                self._numbering.leave(self.number, is_gone)
            else:
                leave(self.store, self.rank, self.size, is_gone)

        _within(_TELLS, go)

    def closed_ranks(self) -> dict[int, dict[str, int]]:
        """Return how many operations each rank has begun that has closed the group, by communicator."""
        if self.store.compare_set(_CLOSED, None, None)[1] is None:
            return {}
        found = {rank: begun_until_closed(self.store, rank) for rank in range(self.size) if rank != self.rank}
        return {rank: begun for rank, begun in found.items() if begun is not None}

    def close(self, *, says_so: bool = False, begun: Mapping[str, int] | None = None) -> None:
        """Hear nothing any more; the others are told, if asked, that this rank has closed the group.

        `begun` is how many operations it has begun, by communicator.
        """
        self.known.closed()
        self._over.set()
        self._processes.close()
        if self._heartbeats is not None:
            self._heartbeats.close()
        watches, self._watches = self._watches, []
        for watch in watches:
            with contextlib.suppress(StoreError):
                watch.close()
        self.reports.end()
        if says_so and self.size > 1:
            with contextlib.suppress(StoreError, NcclTimeout):  # whose store is gone tells nobody
                self.reports.publish(closed=True, begun=begun)
                self.store.add(_CLOSED)


def _numbering_of(store: Store, name: str, rank: int, size: int) -> Numbering:
    place = _place_of(name)

    def tell(number: int, text: str) -> None:
        text = f"rank {rank} of {size}: {text}"
        _tell(PrefixStore(f"{place}/{number}", store), rank, name, Told(text, kind=NcclRemoteError.__name__))

    def has_ended(number: int) -> bool:
        return store.check([f"{place}/{number}/{_ENDED}"])

    return Numbering(store, f"process group {name!r}", place, rank, size, tell, has_ended)


def _tell(store: Store, rank: int, name: str, told: Told) -> None:
    try:
        first, there = store.compare_set(_ENDED, None, told.packed())
        if not first and there is not None and not told.asked and _read(there).asked:
            store.set(_ENDED, told.packed())  # of what all are to hear
    except (StoreError, NcclTimeout) as error:
        _log.warning("rank %d could not tell that group %r has ended (%s): %s", rank, name, told.text, error)


def _within(seconds: float, act: Callable[[], object]) -> None:
    """Do something in a thread of its own, and wait so long for it: the store may be stuck."""
    thread = threading.Thread(target=act, name="ncclpy-group-store", daemon=True)
    with contextlib.suppress(RuntimeError):  # there is none to be had
        thread.start()
        thread.join(seconds)


def _nobody_told(rank: int, why: str) -> None:
    pass


def _nothing_known(rank: int) -> str:
    return ""


def _call_of(meeting: str) -> str:
    """Return what people call a meeting: "split/3" is one of the calls of `split`."""
    call, numbered, _ = meeting.partition("/")
    return f"{call}()" if numbered else call


def _read(told: bytes) -> Told:
    try:
        found = json.loads(told)
        states = None if found["ranks"] is None else from_data(found["ranks"])
        said, handles = found["said"], found["handles"]
        return Told(
            str(found["text"]), None if said is None else str(said), states,
            None if handles is None else list(map(str, handles)), str(found.get("kind", "")), bool(found.get("asked")),
        )  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # of another version, or damaged
        return Told(told.decode(errors="replace"))
