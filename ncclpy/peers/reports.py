"""The status of the ranks of a group: each puts it into the store, and sends it at once when a rank in trouble asks.

At most once a second, and only if its status has changed, a rank writes the status under a key of its own. The other
ranks read it there if the rank cannot answer any more. A store with native publications writes the status under that
key from a thread that needs no GIL, and at once when a rank asks, even while a call keeps the GIL. A rank in trouble
asks by incrementing a number that all ranks watch; each answers, from Python, under a key of that number. If a rank
does not answer at once, the asking rank checks whether its process lives, by its lease and, on the same machine, in
/proc.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from ncclpy.bootstrap.place import BOOT_ID
from ncclpy.bootstrap.store import Store, StoreEnded, StoreError
from ncclpy.engine.stack import python_stack
from ncclpy.errors import NcclTimeout
from ncclpy.peers.rank_state import RankState, pack, unpack

if TYPE_CHECKING:
    from ncclpy.bootstrap.store import StatusPublication

__all__ = [
    "ANSWERS",
    "ASKED",
    "MACHINE",
    "Reports",
    "has_begun_to_end",
    "has_closed",
    "log_silence",
    "operations_before_close",
    "process",
    "process_state",
]

_T = TypeVar("_T")
_log = logging.getLogger("ncclpy.peers")

#: The key of the number that a rank increments to ask.
ASKED = "told/asked"
#: The prefix of the keys of answers.
ANSWERS = "answer/"
#: Seconds for the others to answer; more in a store without watches, where they poll for questions.
PATIENCE = 0.3
PATIENCE_UNWATCHED = 1.2
#: Seconds of a slice of the wait for answers; between slices the asking rank checks which ranks cannot answer.
_SLICE = 0.05
#: If one operation of the store takes longer than `_SLOW_OPERATION` seconds, a thread deletes the answers. In any
#: store the wait for answers is longer by the time of `_SLOW_FACTOR` operations.
_SLOW_OPERATION, _SLOW_FACTOR = 0.02, 3
#: The most questions that are answered at a time; earlier ones get no answer.
_MAX_QUESTIONS = 64


class Reports:
    """The status that one rank tells, and its questions to the others.

    Parameters
    ----------
    store
        The part of a store that belongs to the group.
    rank, size
        This rank, and the number of ranks.
    look
        Returns this rank's status as a dict of JSON's types, with at least ``current``, ``finished`` and ``since``.
    is_gone
        Called with a rank; returns whether it has made the group, and its lease or its heartbeats have ended.
    has_made
        Called with a rank; returns whether it has made the group.
    answer
        Returns the status for an answer, which may be more detailed than the published one; `look` by default.
    thread
        The thread of which an answer contains the stack; the main thread by default.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        look: Callable[[], dict[str, Any]],
        is_gone: Callable[[int], bool],
        has_made: Callable[[int], bool],
        answer: Callable[[], dict[str, Any]] | None = None,
        thread: int | None = None,
    ) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.reports_changes = True  # the store reports changes, so a question reaches the others at once
        self._look, self._is_gone, self._has_made = look, is_gone, has_made
        self._look_for_answer = look if answer is None else answer
        self._thread = thread
        self._published: dict[str, Any] | None = None
        self._closed = False
        self._write_lock = threading.RLock()  # after the status "closed" this rank writes no status and no answer
        self._answered = 0
        self._publication: StatusPublication | None = None

    def begin(self, source: Any) -> None:
        """Have the store publish this rank's status by itself, from a native source of it, if it can."""
        rest = b"," + pack({"process": process()})[1:]  # the last fields of a status, and the closing brace
        with contextlib.suppress(StoreError):  # if the store has failed, the next write from Python raises the error
            self._publication = self.store._publish_status(self.key(self.rank), rest, ASKED, source)

    def end(self) -> None:
        """Have the store publish nothing by itself any more."""
        publication, self._publication = self._publication, None
        if publication is not None:
            publication.close()

    def publish(self, *, closed: bool = False, operation_counts: Mapping[str, int] | None = None) -> None:
        """Put this rank's status into the store, if it has changed and the store does not publish it.

        `operation_counts` is how many operations a rank that has `closed` has begun, by communicator.
        """
        if closed:
            self.end()
        elif self._publication is not None:
            return
        status = self._look()
        with self._write_lock:
            if closed:
                self._closed = status["closed"] = True
                status["begun"] = dict(operation_counts or {})
            elif self._closed:  # closed meanwhile: other ranks may have cleared this rank's keys away
                return
            since = status.pop("since", None)  # not compared: the clock's resolution shows in it
            if status != self._published:
                self.store.set(self.key(self.rank), self._packed({**status, "since": since}))
                self._published = status

    def while_open(self, call: Callable[[], _T]) -> _T:
        """Make a call that writes into the store, and return its result; raise `StoreError` once this rank has closed.

        The last rank that closes clears the store: nothing may be written after that.
        """
        with self._write_lock:
            if self._closed:
                raise StoreError(f"rank {self.rank} has closed")
            return call()

    def answer_all(self, number: int) -> None:
        """Answer all questions up to this number that were not answered.

        If the number is below the last one answered, only the question of this number is answered: something other
        than a rank has written one of the two numbers, and the next ranks that ask increment the lower number.
        """
        first = max(self._answered + 1, number - _MAX_QUESTIONS + 1) if number > self._answered else number
        for each in range(first, number + 1 if number != self._answered else number):
            self._answer_one(each)
        self._answered = number

    def _answer_one(self, number: int) -> None:
        status = {**self._look_for_answer(), "stack": python_stack(self._thread)}
        with self._write_lock:
            if not self._closed:
                self.store.set(self._answer_key(number, self.rank), self._packed(status))

    def collect(self, patience: float | None = None) -> list[RankState]:
        """Ask all ranks; return what each does, by rank.

        Parameters
        ----------
        patience
            Seconds for ranks with live processes to answer; by default `PATIENCE` or `PATIENCE_UNWATCHED`, and more if
            the store is slow.

        Raises
        ------
        StoreError
            If the store is gone, or this rank has closed the group.
        """
        begun = time.monotonic()
        number = self.while_open(lambda: self.store.add(ASKED))
        took = time.monotonic() - begun
        if patience is None:  # the others answer through the same store: if it is slow, they are not unresponsive
            patience = (PATIENCE if self.reports_changes else PATIENCE_UNWATCHED) + _SLOW_FACTOR * took
        deadline = begun + patience
        self._answer_one(number)
        states: dict[int, RankState] = {}
        missing = list(range(self.size))
        while missing:
            left = deadline - time.monotonic()
            arrived = self._wait([self._answer_key(number, rank) for rank in missing], max(0.0, min(_SLICE, left)))
            for key, packed in arrived.items():
                rank = int(key.rpartition("/")[2])
                states[rank] = unpack(rank, packed, "")
                if rank == self.rank:  # this rank's error has a traceback
                    states[rank] = replace(states[rank], stack=())
            missing = [rank for rank in missing if rank not in states]
            if missing and left <= 0:
                for rank in missing:
                    states[rank] = self._describe(rank, last=True)
                break
            for rank in missing:
                state = self._describe(rank, last=False)
                if state.state:
                    states[rank] = state
            missing = [rank for rank in missing if rank not in states]
        self._clear(number, took > _SLOW_OPERATION)
        return [states[rank] for rank in sorted(states)]

    def _clear(self, number: int, aside: bool) -> None:
        """Delete the answers to a question; in a thread with `aside`: a slow store would hold the caller up."""
        if aside:
            with contextlib.suppress(RuntimeError):  # no thread can be started
                threading.Thread(target=self._clear, args=(number, False), name="ncclpy-clear", daemon=True).start()
                return
        with contextlib.suppress(StoreError, NcclTimeout):
            for rank in range(self.size):
                self.store.delete(self._answer_key(number, rank))

    def has_closed(self, rank: int) -> bool:
        """Return whether a rank has closed the group."""
        return has_closed(self.store, rank)

    def is_lost(self, rank: int) -> bool:
        """Return whether a rank can no longer take part: it is ``"closed"``, ``"ended"`` or ``"lost"``."""
        return self.end_of(rank) != ""

    def end_of(self, rank: int) -> str:
        """Return the state of a rank that can no longer take part: closed, ended or lost; "" for other ranks."""
        state = self._describe(rank, last=False).state
        if state not in ("closed", "ended") and self._is_gone(rank):
            return "lost"
        return state if state in ("closed", "ended") else ""

    def process_of(self, rank: int) -> str:
        """Return the state of a rank without asking it.

        One of closed, not_joined, ended, stopped, lost, unresponsive and unknown, see `RankState.state`.
        """
        return self._describe(rank, last=True).state

    def stop_of(self, rank: int) -> int:
        """Return a number that differs for each stop of a rank's process on this machine; 0 if none is published."""
        peer_process = _status_in(self.store.compare_set(self.key(rank), None, None)[1]).get("process")
        return 0 if peer_process is None else voluntary_switches(peer_process["pid"])

    def _wait(self, keys: list[str], seconds: float) -> dict[str, bytes]:
        """Return the values of those keys that are there within so many seconds."""
        with contextlib.suppress(NcclTimeout):
            self.store.wait(keys, seconds)
        present = set(self.store.keys(keys[0].rpartition("/")[0] + "/"))
        arrived = [key for key in keys if key in present]
        return dict(zip(arrived, self.store.multi_get(arrived, 1.0), strict=True)) if arrived else {}

    def _describe(self, rank: int, *, last: bool) -> RankState:
        """Return why a rank does not answer; the state is ``""`` if it may still answer.

        With `last` the wait for its answer is over: the state is never ``""``.
        """
        packed = self.store.compare_set(self.key(rank), None, None)[1]
        status = _status_in(packed)
        if status.get("closed"):
            return unpack(rank, packed, "closed")
        if not self._has_made(rank):
            return RankState(rank, "not_joined" if last else "")
        peer_process = status.get("process")
        state = _state_here(peer_process)
        if state == "lives":
            return unpack(rank, packed, "unresponsive") if last else RankState(rank, "")
        if state is not None:
            return unpack(rank, packed, state)
        if self._is_gone(rank):
            return unpack(rank, packed, "lost")
        return unpack(rank, packed, "unresponsive" if peer_process else "unknown") if last else RankState(rank, "")

    @staticmethod
    def _packed(status: dict[str, Any]) -> bytes:
        return pack({**status, "at": time.time(), "process": process()})

    @staticmethod
    def key(rank: int) -> str:
        """Return the key of a rank's status."""
        return f"status/{rank}"

    @staticmethod
    def _answer_key(number: int, rank: int) -> str:
        return f"{ANSWERS}{number}/{rank}"


def log_silence(title: str, error: Exception) -> None:
    """Log that ranks no longer publish what they do, as a warning unless their store was closed or has ended.

    Parameters
    ----------
    title
        What names the ranks in the log: `StatusService.own_title`.
    error
        What their store has raised.
    """
    expected = type(error) is StoreError or isinstance(error, StoreEnded)
    _log.log(logging.DEBUG if expected else logging.WARNING, "%s no longer publishes what it does: %s", title, error)


def has_closed(store: Store, rank: int) -> bool:
    """Return whether a rank has closed the group that a part of a store belongs to."""
    return bool(_status_in(store.compare_set(Reports.key(rank), None, None)[1]).get("closed"))


def has_ended(store: Store, rank: int) -> bool:
    """Return whether a rank's process was on this machine and has ended."""
    status = _status_in(store.compare_set(Reports.key(rank), None, None)[1])
    return _state_here(status.get("process")) == "ended"


def operations_before_close(store: Store, rank: int) -> dict[str, int] | None:
    """Return how many operations a rank had begun when it closed the group, see `publish`; None before the close."""
    status = _status_in(store.compare_set(Reports.key(rank), None, None)[1])
    begun = status.get("begun")
    return (begun if isinstance(begun, dict) else {}) if status.get("closed") else None


def _state_here(process: dict[str, Any] | None) -> str | None:
    """Return "lives", "stopped" or "ended" for the process in a status; None if it is not on this machine."""
    if process is None or process["machine"] != MACHINE:
        return None
    return process_state(process["pid"], process["start"])


def _status_in(packed: bytes | None) -> dict[str, Any]:
    """Return a rank's status, {} for a value that is no status."""
    try:
        status = json.loads(packed or b"{}")
        process = status.get("process")
        if process is not None:
            status["process"] = {
                "machine": process["machine"], "pid": int(process["pid"]), "start": str(process["start"]),
            }  # fmt: skip
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}
    return dict(status)


def number_of(asked: bytes | None) -> int:
    """Return how many questions there have been, by the value of `ASKED`; 0 for a value that is not such a count."""
    return int(asked) if asked is not None and asked.isdigit() and len(asked) < 20 else 0


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def _namespace() -> str:
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return ""


#: The flag PF_EXITING of a process that has begun to end: the system releases its locks and connections from then on.
_EXITING = 0x4
#: This boot of the machine and the pid namespace (container) of this process. Among processes with an equal value a
#: pid means the same process.
MACHINE = f"{BOOT_ID} {_namespace()}"


def _stat(pid: int) -> tuple[str, str, int]:
    """Return the state of a process, when it was started, and its flags; ("", "", 0) if there is none."""
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()  # behind its name, which may hold anything
    return (fields[0], fields[19], int(fields[6])) if len(fields) > 19 else ("", "", 0)


def process() -> dict[str, Any]:
    """Return the data by which other processes know this one."""
    pid = os.getpid()
    return {"machine": MACHINE, "pid": pid, "start": _stat(pid)[1]}


def has_begun_to_end(pid: int, start: str) -> bool:
    """Return whether a process of this machine has begun to end, or has ended."""
    _, since, flags = _stat(pid)
    return since != start or bool(flags & _EXITING)


def voluntary_switches(pid: int) -> int:
    """Return the number of voluntary context switches of a process's main thread, 0 if there is no such process.

    A stop adds one. If the number is the same at two moments at which the process is stopped, the process has not run
    between them.
    """
    head, _, tail = _read(f"/proc/{pid}/status").partition("\nvoluntary_ctxt_switches:")
    return int(tail.split()[0]) if head and tail else 0


def process_state(pid: int, start: str) -> str:
    """Return "lives", "stopped" or "ended" for a process of this machine, by its pid and start time."""
    state, since, _ = _stat(pid)
    if since != start or state in ("Z", "X", ""):
        return "ended"
    return "stopped" if state in ("T", "t") else "lives"
