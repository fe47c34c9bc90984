"""The ranks of one communicator, which can be asked through a store what they do.

Each process watches for the question and answers for its ranks; a rank in trouble asks for all, once: what it hears it
puts into the store, where the others find it when they are in trouble as well. By then it has ended what it was in, so
that they would hear something else.
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from ncclpy.bootstrap.arrivals import Arrivals
from ncclpy.bootstrap.asked import decode
from ncclpy.bootstrap.store import LeaseEnded, Store, StoreDamaged, StoreError
from ncclpy.bootstrap.watch import Change, Watch
from ncclpy.engine.known import Known, elsewhere, note_communicator
from ncclpy.engine.monitor import call_at
from ncclpy.engine.recorder import Ledger
from ncclpy.errors import NcclError, NcclRemoteError, NcclTimeout, seconds
from ncclpy.peers.confirmation import Confirmation
from ncclpy.peers.heartbeats import Heartbeats
from ncclpy.peers.inquiry import Inquiries, Said
from ncclpy.peers.processes import PeerProcesses
from ncclpy.peers.reports import ASKED, Reports, log_silence, number_of
from ncclpy.peers.sentence import keep_stacks, sentence
from ncclpy.peers.standing import Began, as_data, from_data

__all__ = ["ENDED", "Circle"]

#: Set by the first in trouble, who asks for all; and what it has heard.
_TROUBLE, _SAID = "trouble", "said"
#: Seconds for that one to ask.
_OTHERS_ASK = 2.5
#: Seconds after which what was heard is said to be old.
_LONG_AGO = 3.0
#: Set by the first rank that ends the communicator, with why; what it and the question are below, which all watch.
ENDED = "told/ended"
_TOLD = "told/"
#: How often a rank's standing goes into the store, if it has changed; and how often a store that cannot be watched is
#: looked into, whether somebody asks.
_BEAT, _LOOK = 1.0, 0.2
#: So many times in a row that goes along with a look which processes of this machine have the other ranks; and how
#: many seconds after the end of one the communicator ends, if an operation waits then: it may yet be done.
_LOOKS, _GRACE = 5, 0.7


class _Ears:
    """What hears of the other ranks: it is kept by a timer, which ends it once the circle is dropped."""

    def __init__(self, processes: PeerProcesses, heartbeats: Heartbeats | None) -> None:
        self.watch: Watch | None = None
        self.processes, self.heartbeats = processes, heartbeats

    def close(self) -> None:
        self.processes.close()
        if self.heartbeats is not None:
            self.heartbeats.close()
        watch, self.watch = self.watch, None
        if watch is not None:
            with contextlib.suppress(StoreError):
                watch.close()


class Circle:
    """All ranks of one communicator, as a process sees them that has some of them.

    Parameters
    ----------
    store
        The part of a store that belongs to the communicator.
    name
        The communicator's, the same in all processes.
    own
        The ranks of this process, with their devices.
    size
        How many ranks there are.
    look
        Returns the standing of one of them, see `Reports`.
    ledgers
        Where what they have launched is noted, by rank, if it is: so much is told also while a call keeps the GIL.
    arrivals
        By which they have met.
    ended
        Called, in a thread that is not to be held up, once another process has ended the communicator, or has ended
        itself while an operation waits: with why and with the name of the exception's class.
    forget
        Called by the last process that lives, when it leaves, before all that this has written is cleared away.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        own: Mapping[int, int],
        size: int,
        look: Callable[[int], dict[str, Any]],
        ledgers: Mapping[int, Ledger],
        arrivals: Arrivals,
        ended: Callable[[str, str], object],
        forget: Callable[[], object] = lambda: None,
    ) -> None:
        self._store, self._name, self._size = store, name, size
        self._own, self._look_at = list(own), look
        self._look = functools.partial(look, self._own[0])
        self._ledgers = ledgers
        mine = weakref.ref(self)
        processes = PeerProcesses(store, self._own, lambda rank, why: _call(mine, Circle._gone, rank, why))
        heartbeats = None if arrivals.has_leases else Heartbeats(store, self._own, size, processes)
        self._ears = _Ears(processes, heartbeats)
        is_gone = arrivals.is_gone if heartbeats is None else heartbeats.is_silent
        self._reports = [
            _reports(
                store, size, note_communicator(name, rank, device, functools.partial(look, rank)), arrivals, is_gone
            )
            for rank, device in own.items()
        ]
        self._inquiries = Inquiries(self._inquire, False, f"rank {self._own[0]} of communicator {name!r}")
        self._arrivals, self._ended, self._forget = arrivals, ended, forget
        self.confirmation = Confirmation(store, self._own, size, self._condition_of)
        self._looks = _LOOKS
        self._published = 0.0
        self._over = False
        self._leaving: threading.Thread | None = None

    def listen(self) -> None:
        """Tell what these ranks do from now on, now and then and whenever somebody asks."""
        mine = weakref.ref(self)

        def hear(change: Change) -> None:
            circle = mine()
            if circle is None or change.value is None:
                return
            if change.key == ASKED:
                circle._answer(number_of(change.value))
            elif change.key == ENDED:
                circle._hear_of_end(change.value)

        try:
            self._ears.watch = self._store.watch(_TOLD, hear)
        except (StoreError, NcclTimeout):  # it cannot tell of changes
            for each in self._reports:
                each.watched = False
        for each in self._reports:
            if each.rank in self._ledgers:
                each.begin(self._ledgers[each.rank])
        self._ears.processes.tell()
        if self._ears.heartbeats is not None and self._ears.watch is None:
            self._ears.heartbeats.tell()
        self._beat()
        if self._over:  # meanwhile
            self._hear_no_more()

    def _answer(self, number: int) -> None:
        if not self._over:
            with contextlib.suppress(StoreError, NcclTimeout):
                for each in self._reports:
                    each.answer_all(number)

    def _beat(self) -> None:
        """Put what these ranks do into the store, if that has changed; look who asks, where nothing tells of it."""
        if self._over:
            return
        watched = self._ears.watch is not None
        first = not self._published
        try:
            moment = time.monotonic()
            if moment - self._published >= _BEAT or first:
                self._published = moment
                for each in self._reports:
                    each.publish()
                if self._looks > 0:
                    self._looks -= 1
                    self._ears.processes.look()
            if not watched:
                self._hear_beats()
            if first or not watched:  # before the watch began
                self._answer(number_of(self._store.compare_set(ASKED, None, None)[1]))
                self._hear_of_end(self.told())
        except NcclTimeout:  # the store may be well again
            pass
        except (NcclError, ValueError) as error:  # it is gone, or closed: nobody hears any more
            if not self._over:
                log_silence(f"rank {self._own[0]} of communicator {self._name!r}", error)
            return
        call_at(time.monotonic() + (_BEAT if watched else _LOOK), _beater_of(weakref.ref(self), self._ears))

    def _hear_beats(self) -> None:
        """Beat, and end the communicator without a rank of another machine that beats no more while this one waits."""
        if self._ears.heartbeats is None:
            return
        for rank, why in self._ears.heartbeats.look(self._waits_for):
            if not self._over and not self.look_for_end():
                self._ended(f": rank {rank} of {self._size} is gone: {why}", NcclRemoteError.__name__)

    def _waits_for(self) -> list[object]:
        """Return in which operations its ranks wait, nothing if none does."""
        waits = [self._awaited(each) for each in self._own]
        return waits if any(waits) else []

    def ask(self) -> Said:
        """Return what all ranks do, in a sentence and as data, or None for either; within some seconds in any case."""
        return self._inquiries.ask(self._look)

    def _inquire(self, subject: Began | None, alone: bool) -> Said:
        try:
            if not self._store.compare_set(_TROUBLE, None, b"%d" % self._reports[0].rank)[0]:
                return decode(_heard, self._store.get(_SAID, _OTHERS_ASK), self._store, _SAID)
            found = keep_stacks(self._reports[0].collect(), subject)
            said = sentence(self._name, found, self._size, subject, "communicator")
            told = {"said": said, "ranks": as_data(found), "rank": self._reports[0].rank, "at": time.time()}
            self._store.set(_SAID, json.dumps(told).encode(errors="replace"))
        except NcclError as error:  # the store is gone, or the one who asks
            return f"What the other ranks do is not known: {error}", None
        return said, found

    def end(self, text: str, kind: str) -> None:
        """Tell the other processes that the communicator ends, and why, unless another one was faster."""
        with contextlib.suppress(StoreError, NcclTimeout):
            told = {"text": text, "kind": kind, "rank": self._reports[0].rank}
            self._store.compare_set(ENDED, None, json.dumps(told).encode(errors="replace"))

    def told(self) -> bytes | None:
        """Return what a process has told of the communicator's end, None while none has ended it."""
        return self._store.compare_set(ENDED, None, None)[1]

    def look_for_end(self) -> bool:
        """Look whether another process has ended the communicator; if so, take it as heard of, and return True."""
        try:
            told = self.told()
        except LeaseEnded as error:  # this process was stopped, and the others go on without it
            if self._over:
                return False
            self._ended(f": the other ranks take this process for lost: {error}", NcclRemoteError.__name__)
            return True
        return self._hear_of_end(told)

    def _hear_of_end(self, told: bytes | None) -> bool:
        if told is None or self._over:
            return False
        try:
            rank, text, kind = decode(_end_of, told, self._store, ENDED)
        except StoreDamaged as error:  # it has ended all the same
            self._ended(f": {error}", StoreDamaged.__name__)
            return True
        if rank != self._reports[0].rank:
            self._ended(f" by rank {rank} of {self._size}: {text}", kind)
            return True
        return False

    def _gone(self, rank: int, why: str, waiting: object = None) -> None:
        mine = weakref.ref(self)
        call_at(time.monotonic() + _GRACE, lambda: _call(mine, Circle._end_without, rank, why, waiting))

    def _end_without(self, rank: int, why: str, waiting: object) -> None:
        """End the communicator without a rank whose process has ended, once one operation waits from look to look."""
        if self._over:
            return
        with contextlib.suppress(NcclError, ValueError):  # the store may be gone with that process
            if self._reports[0].has_closed(rank) or self.look_for_end():
                return
        waits = self._waits_for()
        if waits and waits == waiting:
            self._ended(f": rank {rank} of {self._size} is gone: {why}", NcclRemoteError.__name__)
        else:
            self._gone(rank, why, waits)

    def _awaited(self, rank: int) -> object:
        standing = self._look_at(rank)
        return None if standing.get("launched") else standing["current"]

    def _condition_of(self, rank: int) -> str:
        if not self._arrivals.has_made(rank):
            return "absent"
        if self._arrivals.is_gone(rank):
            return "gone"
        state = self._reports[0].process_of(rank)
        return "silent" if state == "gone" else state  # by its heartbeats alone: it may live, and is waited for

    def leave(self, text: str = "", kind: str = "") -> threading.Thread | None:
        """Hear nothing any more; a thread that is returned tells the others that these ranks have left.

        With a text it tells first that the communicator ends, see `end`. Nobody has to wait for it: should the store
        be stuck, so is it. None: there is no thread to be had, or another thread is about to leave.
        """
        if not self._over:
            self._over = True
            thread = threading.Thread(target=self._leave, args=(text, kind), name="ncclpy-leave", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the others hear of the end of their communicators, or of this process
                self._hear_no_more()
                return None
            self._leaving = thread
        return self._leaving

    def _hear_no_more(self) -> None:
        self._ears.close()
        for each in self._reports:
            each.end()

    def _leave(self, text: str, kind: str) -> None:
        self._ears.close()
        if text:
            self.end(text, kind)
        with contextlib.suppress(StoreError, NcclTimeout):  # whose store is gone tells nobody
            for each in self._reports:
                each.publish(closed=True)
            if all(self._reports[0].end_of(rank) for rank in range(self._size) if rank not in self._own):
                self._forget()
                standings = [Reports.key(rank) for rank in range(self._size)]
                heard = [Confirmation.key(rank) for rank in range(self._size)]
                self._ears.processes.forget()
                for key in (*standings, *heard, ASKED, ENDED, _TROUBLE, _SAID):
                    self._store.delete(key)


def _reports(store: Store, size: int, known: Known, arrivals: Arrivals, is_gone: Callable[[int], bool]) -> Reports:
    """Return what a rank tells of itself; its answers say also what keeps it in another communicator or group."""

    def answer() -> dict[str, Any]:
        told = known.look()
        if told.get("current") is None and not told.get("closed"):
            told.update(elsewhere(known))
        return told

    return Reports(store, known.rank, size, known.look, is_gone, arrivals.has_made, answer)


def _heard(packed: bytes) -> Said:
    """Return what another rank has heard of all."""
    told = json.loads(packed)
    age = time.time() - told["at"]
    before = f" (so rank {told['rank']} heard it {seconds(age)} ago)" if age > _LONG_AGO else ""
    return str(told["said"]) + before, from_data(told["ranks"])


def _end_of(packed: bytes) -> tuple[int, str, str]:
    """Return which rank has ended the communicator, why, and the name of the exception's class."""
    told = json.loads(packed)
    return int(told["rank"]), str(told["text"]), str(told["kind"])


def _call(circle: weakref.ref[Circle], method: Callable[..., object], *arguments: object) -> None:
    """Call a method of a circle, unless it was dropped."""
    found = circle()
    if found is not None:
        method(found, *arguments)


def _beater_of(circle: weakref.ref[Circle], ears: _Ears) -> Callable[[], None]:
    """Return what the monitor calls every now and then for a circle, without keeping it."""

    def beat() -> None:
        found = circle()
        if found is None:  # dropped, not left
            ears.close()
        else:
            found._beat()

    return beat
