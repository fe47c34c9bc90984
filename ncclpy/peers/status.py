"""The status of the ranks of a process group or of a communicator, told and asked through a store.

Each process publishes the status of its ranks and answers questions. A rank in trouble asks all others and leaves
their answers in the store for ranks that are in trouble later: by then a rank may have ended the operation that it
was in, and would answer something else. The rank that ends the group writes the `End` under a key that keeps the
first end (see `tell_end`). Every rank confirms that it knows of the end before one of them aborts a communicator.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ncclpy.bootstrap.rank_rendezvous import RankRendezvous
from ncclpy.bootstrap.store import Store, StoreDamaged, StoreError
from ncclpy.bootstrap.store_arguments import decode
from ncclpy.bootstrap.watch import Change, Watch
from ncclpy.engine.group_registry import GroupInfo, elsewhere
from ncclpy.engine.monitor import call_at
from ncclpy.errors import NcclError, NcclTimeout, seconds
from ncclpy.peers.confirmation import Confirmation
from ncclpy.peers.heartbeats import Heartbeats
from ncclpy.peers.inquiry import Answer
from ncclpy.peers.processes import PeerProcesses
from ncclpy.peers.rank_state import OperationInfo, RankState, as_data, from_data
from ncclpy.peers.reports import ANSWERS, ASKED, Reports, log_silence, number_of
from ncclpy.peers.status_text import keep_stacks, sentence

__all__ = ["ENDED", "End", "StatusService", "end_of", "read_end", "tell_end"]

_log = logging.getLogger("ncclpy.peers")

#: All ranks watch the keys with this prefix: the key of the end and the key of questions.
_WATCHED_PREFIX = "told/"
ENDED = "told/ended"
#: Prefix of the keys of the question that is asked before a group ends. Behind it: the key by which the first rank in
#: trouble claims the question, and the key of the answer that it gets.
_END_PREFIX = "end"
_TROUBLE_KEY, _ANSWER_KEY = "trouble", "said"
#: Seconds that other ranks wait for the first rank's answer.
_ANSWER_TIMEOUT = 2.5
#: Seconds after which the answer is said to be old.
_OLD_ANSWER = 3.0
#: Seconds between two publications of a status that has changed; and between two reads of a store that cannot be
#: watched.
_PUBLISH_INTERVAL, _POLL_INTERVAL = 1.0, 0.2
#: How many of the first publications also search for processes of other ranks on this machine.
_PROCESS_SEARCHES = 5


@dataclass(frozen=True)
class End:
    """What a rank tells the others of the end of a group or communicator.

    Attributes
    ----------
    text
        Why it ends.
    rank
        The rank that tells it; None if the value in the store is damaged.
    summary, states
        What all ranks did when the end was told, in a sentence and as data.
    handles
        The handles of the groups that are reconfigured together, if the group ends because of that.
    kind
        The name of the exception's class; `peer_error_class` returns the class that the other ranks raise for it.
    only_if_asked
        Whether ranks ignore this end when it is announced, since they normally learn of it in another way. They read
        it only when they ask on their own, such as after their process was stopped.
    """

    text: str
    rank: int | None = None
    summary: str | None = None
    states: tuple[RankState, ...] | None = None
    handles: Iterable[str] | None = None
    kind: str = ""
    only_if_asked: bool = False

    def packed(self) -> bytes:
        """Return the end as it is written into the store."""
        fields = {
            "text": self.text,
            "rank": self.rank,
            "said": self.summary,
            "states": None if self.states is None else as_data(self.states),
            "handles": None if self.handles is None else list(self.handles),
            "kind": self.kind,
            "asked": self.only_if_asked,
        }
        return json.dumps(fields).encode(errors="replace")


def tell_end(store: Store, end: End) -> None:
    """Tell the ranks of a part of a store that their group has ended, unless another rank was faster.

    An end that ranks ignore (`End.only_if_asked`) is replaced by one that they do not ignore.
    """
    first, present = store.compare_set(ENDED, None, end.packed())
    if not first and present is not None and not end.only_if_asked and read_end(present, store).only_if_asked:
        store.set(ENDED, end.packed())  # all ranks have to be told `end`; they ignore the end that was there


def end_of(store: Store) -> End | None:
    """Return the end in a part of a store, None while there is none."""
    present = store.compare_set(ENDED, None, None)[1]
    return None if present is None else read_end(present, store)


def read_end(packed: bytes, store: Store) -> End:
    """Return the end that a value describes; a damaged value is an end too, whose text says that it is damaged."""
    try:
        return decode(_unpacked, packed, store, ENDED)
    except StoreDamaged as error:
        return End(str(error), kind=StoreDamaged.__name__)


def _unpacked(packed: bytes) -> End:
    fields = json.loads(packed)
    rank, summary, states, handles = (fields[name] for name in ("rank", "said", "states", "handles"))
    return End(
        str(fields["text"]), None if rank is None else int(rank), None if summary is None else str(summary),
        None if states is None else from_data(states), None if handles is None else list(map(str, handles)),
        str(fields["kind"]), bool(fields["asked"]),
    )  # fmt: skip


class StatusService:
    """The status of all ranks of a process group or communicator, in a process that has some of them.

    Parameters
    ----------
    store
        The part of a store that belongs to the group or communicator.
    own_infos
        The ranks of this process; the first of them asks and tells for all.
    size
        How many ranks there are.
    rendezvous
        The rendezvous of the ranks.
    thread
        The thread of which an answer contains the stack; the main thread by default.

    Attributes
    ----------
    own
        The ranks of this process, and ``rank`` the first of them.
    reports
        The `Reports` of ``rank``.
    is_watched
        Whether the store reports changes; otherwise the service reads the store a few times a second.
    is_over
        Whether this process has left: it neither listens nor tells.
    on_gone
        Called with a rank when its process has ended, see `start`.
    own_title
        Names the first of these ranks, with the group or communicator, in error texts and logs.
    """

    def __init__(
        self,
        store: Store,
        own_infos: Sequence[GroupInfo],
        size: int,
        rendezvous: RankRendezvous,
        thread: int | None = None,
    ) -> None:
        self.store, self.size, self.rendezvous = store, size, rendezvous
        self.name, self._kind = own_infos[0].name, own_infos[0].kind
        self.own = [each.rank for each in own_infos]
        self.rank = self.own[0]
        self.is_watched = self.is_over = False
        self._statuses = [each.look for each in own_infos]  # kept: the entry of a failed group loses its `look`
        self.own_title = f"rank {self.rank} of {self._kind} {self.name!r}"
        self._processes = PeerProcesses(store, self.own, lambda rank, why: self.on_gone(rank, why))
        self._heartbeats: Heartbeats | None = None
        if size > len(own_infos) and not rendezvous.has_leases:
            self._heartbeats = Heartbeats(store, self.own, size, self._processes)
        self._reports = [
            Reports(
                store, each.rank, size, each.look, self._is_gone, rendezvous.has_joined,
                functools.partial(_status_for_answer, each, each.look), thread,
            )
            for each in own_infos
        ]  # fmt: skip
        self.reports = self._reports[0]
        self._confirmation = Confirmation(store, self.own, size, self.condition_of, self.reports.stop_of)
        self._watches: list[Watch] = []
        self._has_polled = self._has_ended = False
        self._searches_left, self._next_publication = _PROCESS_SEARCHES, 0.0
        self._on_end: Callable[[End], object] = _nothing
        self.on_gone: Callable[[int, str], object] = _nothing
        self._on_silent: Callable[[int, str], object] = _nothing
        self._is_wanted: Callable[[], object] = _nothing

    # What these ranks do.

    def start(
        self,
        sources: Mapping[int, Any],
        on_end: Callable[[End], object],
        on_gone: Callable[[int, str], object],
        on_silent: Callable[[int, str], object],
        is_wanted: Callable[[], object],
    ) -> None:
        """Publish and answer from now on, and call back with what the other ranks tell.

        The callbacks run in threads that must not be held up.

        Parameters
        ----------
        sources
            By rank, the operation log by which the store publishes the status without Python, if it can.
        on_end
            Called with the end, once another rank has told it.
        on_gone
            Called with a rank when its process has ended, and with a text that says how that is known.
        on_silent
            Called with a rank of another machine when its heartbeats have stopped while this process waits, and with a
            text that says so.
        is_wanted
            Called about once a second; returns whether there is a status to publish.
        """
        self._on_end, self.on_gone, self._on_silent, self._is_wanted = on_end, on_gone, on_silent, is_wanted
        if self.size > len(self.own):
            for each in self._reports:
                if each.rank in sources:
                    each.begin(sources[each.rank])
            self._processes.tell()
        try:
            self.watch(_WATCHED_PREFIX, self.hear)
            self.is_watched = True
        except (StoreError, NcclTimeout):  # the store reports no changes
            for each in self._reports:
                each.reports_changes = False
            if self._heartbeats is not None:
                self._heartbeats.tell()
        self._beat()

    def watch(self, prefix: str, callback: Callable[[Change], object]) -> None:
        """Watch keys of the store until `close`; a store that cannot do that raises `StoreError`."""
        self.keep(self.store.watch(prefix, callback))

    def keep(self, watch: Watch) -> None:
        """Have `close` end a watch."""
        self._watches.append(watch)
        if self.is_over:  # closed meanwhile
            self._end_watches()

    def hear(self, change: Change) -> None:
        """Process an end or a question that another rank has written."""
        if self.is_over or change.value is None:
            return
        if change.key == ENDED:
            self._hear_end(change.value)
        elif change.key == ASKED:
            self._answer(change.value)

    def _beat(self) -> None:
        """Publish, if that is due; read questions, the end and heartbeats, if the store cannot be watched."""
        if self.is_over:
            return
        try:
            moment = time.monotonic()
            if moment >= self._next_publication and self.size > len(self.own):
                self._next_publication = moment + _PUBLISH_INTERVAL
                if self._is_wanted():
                    self.publish()
            if not self.is_watched:
                self._hear_heartbeats()
            # With a watch this is done once, for what was written before the watch began.
            if not self._has_polled or not self.is_watched:
                self._answer(self.store.compare_set(ASKED, None, None)[1])
                self._hear_end(self.store.compare_set(ENDED, None, None)[1])
                self._has_polled = True
        except NcclTimeout:  # the store may be well again
            pass
        except (NcclError, ValueError) as error:  # the store is gone, or closed
            if not self.is_over and self._is_wanted():
                log_silence(self.own_title, error)
            return
        if self.size > len(self.own) or not self.is_watched:
            call_at(time.monotonic() + (_PUBLISH_INTERVAL if self.is_watched else _POLL_INTERVAL), self._beat)

    def publish(self) -> None:
        """Put what these ranks do into the store, if that has changed and the store does not publish it itself."""
        for each in self._reports:
            each.publish()
        if self._searches_left > 0:
            self.look_for_processes()

    def look_for_processes(self) -> None:
        """Watch those processes of other ranks, published in the store, that run on this machine."""
        if self.size > len(self.own) and not self.is_over:
            self._searches_left -= 1
            self._processes.look()

    def stopped_here(self) -> str:
        """Return which processes of this machine are stopped, as the end of a sentence, without the store."""
        stopped = self._processes.stopped()
        return "".join(f"; rank {rank}'s process, {pid}, is stopped" for rank, pid in stopped.items())

    def _answer(self, asked: bytes | None) -> None:
        with contextlib.suppress(StoreError, NcclTimeout):
            for each in self._reports:
                each.answer_all(number_of(asked))

    def waits_for(self) -> object:
        """Return the operations or rendezvous that these ranks wait for, something false if there are none."""
        waits = [_awaited(look()) for look in self._statuses]
        return waits if any(waits) else None

    def _hear_heartbeats(self) -> None:
        if self._heartbeats is not None:
            for rank, why in self._heartbeats.look(self.waits_for):
                if not self.is_over:
                    self._on_silent(rank, why)

    # What all ranks do.

    def collect(self, patience: float | None = None) -> tuple[RankState, ...]:
        """Ask all ranks; return what each does, by rank, see `Reports.collect`."""
        return tuple(self.reports.collect(patience))

    def inquire(self, subject: OperationInfo | None, fails_alone: bool) -> Answer:
        """Return what all ranks do, in a sentence and as data; if that is not known, a sentence that says why.

        Parameters
        ----------
        subject
            The operation that this rank is in.
        fails_alone
            Whether this rank asks for itself; else the group ends, and one rank asks for all.
        """
        return self.inquire_at(None if fails_alone else _END_PREFIX, subject, fails_alone)

    def inquire_at(self, failure_prefix: str | None, subject: OperationInfo | None, _: bool) -> Answer:
        """Answer as `inquire` does; one rank asks for all ranks whose failure has the same prefix.

        `failure_prefix` is a prefix of keys, one for each failure that ranks have in common, such as the failure of a
        rendezvous. If it is None this rank asks for itself. The last parameter is not used: `Inquiries` passes it.
        """
        try:
            trouble, key = f"{failure_prefix}/{_TROUBLE_KEY}", f"{failure_prefix}/{_ANSWER_KEY}"
            claim = functools.partial(self.store.compare_set, trouble, None, b"")
            if failure_prefix is not None and not self.reports.while_open(claim)[0]:
                return decode(_unpacked_answer, self.store.get(key, _ANSWER_TIMEOUT), self.store, key)
            found = keep_stacks(self.collect(), subject)
            summary = sentence(self.name, found, self.size, subject, self._kind)
            if failure_prefix is not None:  # before the program sees its error and, perhaps, ends the process
                answer = {"said": summary, "ranks": as_data(found), "rank": self.rank, "at": time.time()}
                packed = json.dumps(answer).encode(errors="replace")
                self.reports.while_open(lambda: self.store.set(key, packed))
        except NcclError as error:  # the store or the rank that asks is gone, or this rank has closed
            return f"What the other ranks do is not known: {error}", None
        return summary, found

    def _is_gone(self, rank: int) -> bool:
        """Return whether a rank has made the group, and its lease or its heartbeats have ended."""
        return self.rendezvous.is_gone(rank) if self._heartbeats is None else self._heartbeats.is_silent(rank)

    # The end.

    def announced_end(self) -> End | None:
        """Return the end that a rank has written into the store; None while there is none."""
        return end_of(self.store)

    def _hear_end(self, packed: bytes | None) -> None:
        if packed is None or self._has_ended or self.is_over:
            return
        end = read_end(packed, self.store)
        if not end.only_if_asked:
            self._has_ended = True
            self._on_end(end)

    def begin_end(self) -> None:
        """Note that the end is about to be told, see `Confirmation.begin`."""
        self._confirmation.begin()

    def confirm(self) -> None:
        """Tell that these ranks know of the end, see `Confirmation`."""
        self._confirmation.confirm()

    def wait_until_confirmed(self, limit: float | None = None) -> bool:
        """Wait until the other ranks have confirmed, if they can; by default as long as is needed before an abort.

        Return whether communicators may be aborted then; with a `limit`, whether the store could be asked.
        """
        return self._confirmation.wait() if limit is None else self._confirmation.wait_shortly(limit)

    def condition_of(self, rank: int) -> str:
        """Return what is known of the process of a rank that has not confirmed, in the words of `RankState.state`."""
        if not self.rendezvous.has_joined(rank):
            return "not_joined"
        if self.rendezvous.is_gone(rank):
            return "lost"
        state = self.reports.process_of(rank)
        return "unresponsive" if state == "lost" else state  # only its heartbeats have stopped: it may still confirm

    # Leaving.

    def close(self) -> None:
        """Stop listening and telling."""
        self.is_over = True
        self._processes.close()
        if self._heartbeats is not None:
            self._heartbeats.close()
        self._end_watches()
        for each in self._reports:
            each.end()

    def _end_watches(self) -> None:
        watches, self._watches = self._watches, []
        for watch in watches:
            with contextlib.suppress(StoreError):
                watch.close()

    def say_closed(self, operation_counts: Mapping[str, int] | None = None) -> None:
        """Publish that these ranks have left.

        `operation_counts` is how many operations they have begun, by communicator.
        """
        for each in self._reports:
            each.publish(closed=True, operation_counts=operation_counts)

    def forget(self) -> None:
        """Clear away all that the ranks have written through this service: all have left."""
        self._processes.forget()
        of_ranks = [key(rank) for key in (Reports.key, Confirmation.key) for rank in range(self.size)]
        # These answers were written after the asking rank had deleted the answers to its question.
        late = self.store.keys(ANSWERS) if number_of(self.store.compare_set(ASKED, None, None)[1]) else []
        for key in (*of_ranks, *late, ASKED, ENDED, f"{_END_PREFIX}/{_TROUBLE_KEY}", f"{_END_PREFIX}/{_ANSWER_KEY}"):
            self.store.delete(key)


def _status_for_answer(known: GroupInfo, look: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the status of a rank for a question: a rank that does nothing here may wait in another group."""
    status = look()
    if status.get("current") is None and "in_rendezvous" not in status and not status.get("closed"):
        status.update(elsewhere(known))
    return status


def _awaited(status: dict[str, Any]) -> object:
    """Return what a rank waits for, by its status; None if it does not wait."""
    if status.get("launched"):  # it may be done
        return None
    return status.get("current") or ((status["in_rendezvous"], status["since"]) if "in_rendezvous" in status else None)


def _unpacked_answer(packed: bytes) -> Answer:
    """Return the answer that another rank got, with its age if it is old."""
    answer = json.loads(packed)
    age = time.time() - answer["at"]
    note = f" (rank {answer['rank']} learned this {seconds(age)} ago)" if age > _OLD_ANSWER else ""
    return str(answer["said"]) + note, from_data(answer["ranks"])


def _nothing(*_: object) -> None:
    """Do nothing."""
