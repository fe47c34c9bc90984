"""A coordinator between two changes of its ranks: the control plane, who reads it, and the sets that run it."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from ncclpy.bootstrap.prefix import PrefixStore
from ncclpy.coordinator import connections, ends
from ncclpy.coordinator.brought import is_as_on_gpus
from ncclpy.coordinator.calls import Call
from ncclpy.coordinator.control import SETS, ranks_of_set
from ncclpy.coordinator.counts import Counts
from ncclpy.coordinator.member import Member, Ready
from ncclpy.coordinator.names import BEGINNING, LEAVING, key_of, names_of
from ncclpy.coordinator.plane import Plane, aside, part_of
from ncclpy.coordinator.signature import as_error, unpack_all
from ncclpy.coordinator.timeline import Timeline
from ncclpy.core.errors import NcclError, NcclTimeout, ranks, seconds, spans
from ncclpy.peers.reports import BOOT_ID

__all__ = ["Options", "Session", "open_control"]

T = TypeVar("T")

_log = logging.getLogger("ncclpy.coordinator")

#: How a reason begins if not all ranks may have launched what all have brought.
_TORN = "\0"
#: Seconds that the thread that reads sleeps at a time, while nothing comes.
_LONG = 3600.0
#: Seconds for all ranks to come to the beginning, unless a timeout is given.
_BEGINS = 300.0
#: Seconds for what is launched to end, when the coordinator does.
_DRAINS = 60.0
#: Seconds for the record to be read that says why the control plane has ended: it is there by then.
_TOLD = 10.0
#: How long a wait goes on before it looks whether the session has ended.
_SLICE = 0.1


def open_control(
    rank: int, size: int, store: Any, name: str, *, cache: int, timeout: float | None, stall_after: float
) -> Any:
    """Return this rank's end of the control plane, once all ranks have come and are connected."""
    return connections.open_control(
        PrefixStore(name, store), rank, size, name, cache=cache, timeout=timeout, stall_after=stall_after,
        patience=_BEGINS if timeout is None else timeout,
    )  # fmt: skip


_PACKED = struct.Struct("=qqd")


class Options(NamedTuple):
    """How a coordinator works; the same on all ranks."""

    engine: str
    fusion_bytes: int
    cache: int
    timeout: float | None
    stall_after: float

    def packed(self) -> bytes:
        """Return what has to be the same, for the beginning."""
        timeout = -1.0 if self.timeout is None else self.timeout
        return _PACKED.pack(self.fusion_bytes, self.cache, timeout) + self.engine.encode()


class _Wait(Generic[T]):
    """What a thread waits for that a record tells."""

    def __init__(self) -> None:
        self.there = threading.Event()
        self.is_all = True  # what it says came from all ranks
        self._value: T | None = None
        self._error: BaseException | None = None

    def tell(self, value: T) -> None:
        self._value = value
        self.there.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self.there.set()

    def result(self) -> T:
        """Return what was told, or raise."""
        if self._error is not None:
            raise self._error
        assert self._value is not None
        return self._value


class Session:
    """One life of a coordinator.

    Parameters
    ----------
    name
        The coordinator's.
    control
        This rank's end of the control plane.
    group
        The coordinator's own process group, of all ranks.
    options
        See `Options`.
    counts
        What is added to.
    timeline
        Who is told of each operation, or None.
    """

    def __init__(
        self, name: str, control: Any, group: Any, options: Options, counts: Counts, timeline: Timeline | None
    ) -> None:
        self.name, self.rank, self.size = name, control.rank, control.size
        self.group, self.device = group, group.device
        self.error: NcclError | None = None
        self._control, self._options, self._counts, self._timeline = control, options, counts, timeline
        self._lock = threading.Lock()
        self._closing: tuple[int, str] | None = None
        self._joining: _Wait[int] | None = None
        self._defining: dict[tuple[int, ...], _Wait[Member]] = {}
        self._began: _Wait[tuple[bytes, ...]] = _Wait()
        self._all_leave: _Wait[tuple[bytes, ...]] = _Wait()
        self._ending, self._over = threading.Event(), threading.Event()
        self._left: BaseException | None = None
        self._staged = is_as_on_gpus()
        self._members = {0: self._member(0, tuple(range(self.size)), group)}
        self._reader = threading.Thread(target=self._read, name="ncclpy-coordinator", daemon=True)
        self._reader.start()

    def _member(self, number: int, members: tuple[int, ...], group: Any) -> Member:
        label = f"coordinator {self.name!r}" + (f", process set {number}" if number else "")
        made = Member(
            number, members, members.index(self.rank), Plane(group), label, self._options.fusion_bytes, self._staged,
            self._counts, self,
        )  # fmt: skip
        made.have = self._control.have
        group.on_abort(self.trouble)
        return made

    @property
    def everyone(self) -> Member:
        """This rank in the set of all ranks."""
        return self._members[0]

    @property
    def pending(self) -> int:
        """How many operations wait for other ranks."""
        return sum(member.pending for member in list(self._members.values()))

    # The beginning.

    def begin(self) -> tuple[bytes, ...]:
        """Compare with the others what they were made with; return which machine each rank is on.

        Raises
        ------
        ValueError
            If it differs; the same on all ranks.
        NcclTimeout
            If some do not come.
        """
        machine = (BOOT_ID or socket.gethostname()).encode()
        self._ask(self._control.bring, 0, BEGINNING, self._options.packed(), machine, False)
        limit = self._options.timeout if self._options.timeout is not None else _BEGINS
        if not self._wait(self._began, limit):
            have = set(self._control.have(0, BEGINNING))
            missing = [rank for rank in range(self.size) if rank not in have]
            error = NcclTimeout(
                f"coordinator {self.name!r}: {ranks(spans(missing))} did not come within {seconds(limit)}, as far as "
                f"rank {self.rank} knows"
            )
            error.missing = missing
            raise error
        return self._began.result()

    def _wait(self, what: _Wait[Any], timeout: float | None) -> bool:
        """Wait for a record; raise if the session ends first."""
        end = None if timeout is None else time.monotonic() + timeout
        while not what.there.wait(_SLICE if end is None else min(_SLICE, max(0.0, end - time.monotonic()))):
            if self.error is not None and not what.there.is_set():
                raise ends.has_ended(self.name, self.error)
            if end is not None and time.monotonic() >= end:
                return False
        return True

    # What threads of the user's ask for.

    def check(self) -> None:
        """Raise if nothing can be brought any more."""
        if self.error is not None:
            raise ends.has_ended(self.name, self.error)
        if self._closing is not None:
            rank, reason = self._closing
            raise ends.has_ended(self.name, ends.ended(self.name, rank, (), reason))
        if self._joining is not None:
            raise ValueError(
                f"coordinator {self.name!r}: rank {self.rank} has joined; it brings nothing until all have"
            )

    def bring(self, member: Member, call: Call) -> None:
        """Bring an operation; it is withdrawn if that raises."""
        sent: list[bool] = []
        try:
            self.check()
            member.note(call)
            if self._timeline is not None:
                self._timeline.watch(call.parts)
            try:
                self._control.bring(member.number, call.key, call.fixed, call.own, call.joinable, sent)
            except BaseException:
                if not sent:
                    member.take(call.key)
                raise
        except BaseException as error:
            if sent:  # of a handler of signals: the others have it, so it goes on, and keeps its arrays
                raise
            call.withdraw(error)
            self._explain(error)
            raise
        self._counts.add(brought=len(call.parts))
        if self.error is not None:  # it ended meanwhile, and may not have known of this
            for late in member.take_all():
                late.fail(self.error)

    def _explain(self, error: BaseException) -> None:
        """Raise what has ended the session, if the control plane has refused something for that."""
        if isinstance(error, NcclError) and error.__cause__ is None and self._ending.wait(_TOLD):
            assert self.error is not None
            raise ends.has_ended(self.name, self.error)

    def _ask(self, method: Callable[..., None], *arguments: Any) -> None:
        """Ask the control plane for something; raise what has ended it."""
        try:
            method(*arguments)
        except NcclError as error:
            self._explain(error)
            raise

    def join(self, timeout: float | None) -> int:
        """Bring nothing more until all ranks have joined; return the last one."""
        with self._lock:
            joining = self._joining
            asks = joining is None
            if joining is None:
                self.check()
                joining = self._joining = _Wait[int]()
        if asks:  # else it was left, by its deadline or a handler of signals, and is waited for again
            self._ask(self._control.join)
        if not self._wait(joining, timeout):
            raise NcclTimeout(
                f"coordinator {self.name!r}: not all ranks have joined within {seconds(timeout or 0.0)}; rank "
                f"{self.rank} has, and brings nothing until they have"
            )
        return joining.result()

    def define(self, members: tuple[int, ...], timeout: float | None) -> Member:
        """Return this rank in a new process set, once all of its members have asked for it."""
        with self._lock:
            self.check()
            found = self._defining.get(members)
            waiting = found or self._defining.setdefault(members, _Wait[Member]())
        if found is None:  # else a wait for it was left, or another thread's goes on: it is the same set
            self._ask(self._control.define, members)
        if not self._wait(waiting, timeout):
            raise NcclTimeout(
                f"coordinator {self.name!r}: not all of {ranks(spans(members))} have called process_set() with these "
                f"ranks within {seconds(timeout or 0.0)}"
            )
        return waiting.result()

    def leave(self, timeout: float) -> bool:
        """Wait until all ranks do so, or it has ended: what others still do among themselves goes on.

        Return whether that is so in time.
        """
        joining = self._joining
        if joining is not None:  # its own wait for that was left; until then nothing can be brought
            self._wait(joining, timeout)
        if self.error is None and self._closing is None and self._joining is None:
            self._ask(self._control.bring, 0, LEAVING, b"", b"", False)
            return self._wait(self._all_leave, timeout) and self._all_leave.is_all
        return True

    def shut_down(self, drain: bool, reason: str) -> None:
        """Ask for the end, on all ranks."""
        if self.error is None:
            self._control.shutdown(drain, reason)

    def wait_until_over(self, timeout: float | None) -> bool:
        """Wait until it has ended and all was given back; return whether that is so in time."""
        return self._over.wait(timeout)

    @property
    def left(self) -> BaseException | None:
        """What has gone wrong when everything was given back."""
        return self._left

    def counters(self) -> dict[str, Any]:
        """Return what the control plane counts."""
        counted = self._control.counters()
        return {
            "cache_hits": counted["hits"],
            "cache_evictions": counted["evicted"],
            "bytes_up": counted["bytes_up"],
            "bytes_down": counted["bytes_down"],
        }

    # What the others hear of launches.

    def launched(self, parts: Sequence[Any], fused: bool) -> None:
        """Note that arrays were launched together."""
        if self._timeline is not None:
            self._timeline.launched(parts, fused)

    def trouble(self, error: BaseException) -> None:
        """End the session on all ranks, as a launch of this rank's has failed, or what runs has."""
        if self.error is None:
            with contextlib.suppress(NcclError):  # it ends already
                self._control.shutdown(False, f"{_TORN}{error}")

    # What the control plane says.

    def _read(self) -> None:
        try:
            while True:
                frame = self._control.next(_LONG)
                if frame is None:
                    break
                if frame:
                    self._follow(frame)
        except BaseException as error:  # a defect of ours; nobody waits for ever all the same
            failure = NcclError(f"coordinator {self.name!r}: reading the control plane failed: {error!r}")
            failure.__cause__ = error
            self.trouble(failure)
            self._end(failure)
        if self.error is None:
            self._end(ends.ended(self.name, -1, (), "its control plane is closed"))
        self._give_back()

    def _follow(self, frame: Sequence[tuple]) -> None:
        """Do what one frame says."""
        self._counts.add(frames=1)
        ready: dict[int, list[Ready]] = {}
        elsewhere = set()  # sets that launch, of which this rank's part is done
        for record in frame:
            if record[0] == "run":
                _, number, key, fixed, owns, absent = record
                if number == 0 and key in _OURS:
                    (self._began if key == BEGINNING else self._all_leave).tell(tuple(owns))
                    elsewhere.add(number)
                    continue
                member = self._members.get(number)
                if member is not None:
                    gone = tuple(rank for rank in absent if rank in member.ranks)
                    call = member.take(key)
                    if call is None and self.rank not in gone and self.error is None:
                        raise RuntimeError(f"{names_of(key)} is to run, and rank {self.rank} has not brought it")
                    ready.setdefault(number, []).append(Ready(call, unpack_all(fixed), tuple(owns), gone))
                else:
                    elsewhere.add(number)
                continue
            self._run(ready)
            _FOLLOW[record[0]](self, *record[1:])
        self._run(ready)
        for number in elsewhere:
            self._control.launched(number)

    def _run(self, ready: dict[int, list[Ready]]) -> None:
        for number, operations in ready.items():
            if self._timeline is not None:
                self._timeline.negotiated([each.call for each in operations if each.call is not None])
            self._members[number].run(operations, self._control.launched)
        ready.clear()

    def _mismatch(self, number: int, key: bytes, brought: Sequence[tuple[bytes, Sequence[int]]]) -> None:
        if number == 0 and key == BEGINNING:
            self._began.fail(_different_options(self.name, brought))
            return
        self._counts.add(disagreements=1)
        member = self._members.get(number)
        if member is not None:
            self._fail(member, key, as_error(names_of(key), brought, member.label))

    def _fail(self, member: Member, key: bytes, error: BaseException) -> None:
        if member.number == 0 and key == LEAVING:  # who waits for that goes on to the end itself
            self._all_leave.is_all = False
            self._all_leave.tell(())
        call = member.take(key)
        if call is not None:
            call.fail(error)

    def _after_join(self, number: int, key: bytes, fixed: bytes, absent: Sequence[int]) -> None:
        member = self._members.get(number)
        if member is not None:
            self._fail(member, key, ends.after_join(_what(fixed), key, absent))

    def _overdue(self, number: int, key: bytes, fixed: bytes, have: Sequence[int], missing: Sequence[int]) -> None:
        self._counts.add(overdue=1)
        if number == SETS:
            asked = ranks_of_set(key, self.size)
            waiting = self._defining.pop(asked, None)
            if waiting is not None:
                waiting.fail(ends.overdue("process_set", key_of([str(asked)]), have, missing, self._options.timeout))
            return
        if number == 0 and key == BEGINNING:
            self._began.fail(ends.overdue("", key, have, missing, self._options.timeout))
            return
        member = self._members.get(number)
        if member is not None:
            self._fail(member, key, ends.overdue(_what(fixed), key, have, missing, self._options.timeout))

    def _stalled(
        self,
        number: int,
        key: bytes,
        fixed: bytes,
        have: Sequence[int],
        missing: Sequence[int],
        waited: float,
        near: Any,
    ) -> None:
        self._counts.add(stalls=1)
        if number == 0 and key == LEAVING:  # who is at its end waits for others at work
            return
        where = f"coordinator {self.name!r}"
        if number == SETS:
            what, key, near = "process_set", key_of([str(ranks_of_set(key, self.size))]), ()
        else:
            what = "operation" if number == 0 and key in _OURS else _what(fixed)
            where += f", process set {number}" if number else ""
        # Aside, since a logger's handlers are the user's, and to look for names that are alike takes its time.
        aside(partial(_warn, where, what, key, have, missing, waited, near))

    def _all_joined(self, last: int) -> None:
        joining, self._joining = self._joining, None
        if joining is not None:
            joining.tell(last)

    def _group(self, number: int, members: Sequence[int]) -> None:
        members = tuple(members)
        if self.rank not in members:
            return
        mine = self._defining.pop(members) if members in self._defining else _Wait[Member]()
        try:
            group = part_of(self.group, f"{self.group.name}/set {number}", list(members))
            made = self._members[number] = self._member(number, members, group)
        except BaseException as error:
            mine.fail(error)
            self.trouble(error)
        else:
            mine.tell(made)

    def _closes(self, rank: int, reason: str) -> None:
        self._closing = rank, reason

    def _ended(self, rank: int, lost: Sequence[int], reason: str) -> None:
        torn = reason.startswith(_TORN)
        error = ends.ended(self.name, rank, lost, reason.removeprefix(_TORN))
        self._end(error)
        if lost or torn or rank < 0:  # what runs waits for what will not come
            for member in list(self._members.values()):
                member.fail(error)

    # The end.

    def _end(self, error: NcclError) -> None:
        """Fail what is pending, and all that comes."""
        with self._lock:
            if self.error is not None:
                return
            self.error = error
        self._ending.set()
        for member in list(self._members.values()):
            for call in member.take_all():
                call.fail(error)

    def _give_back(self) -> None:
        limit = self._options.timeout if self._options.timeout is not None else _DRAINS
        for member in reversed(list(self._members.values())):
            try:
                member.close(limit)
            except Exception as error:
                self._left = error
        self._control.close()
        self._over.set()


#: What is no operation of the user's.
_OURS = (BEGINNING, LEAVING)

_FOLLOW: dict[str, Callable[..., None]] = {
    "mismatch": Session._mismatch,
    "after_join": Session._after_join,
    "overdue": Session._overdue,
    "stalled": Session._stalled,
    "all_joined": Session._all_joined,
    "group": Session._group,
    "closing": Session._closes,
    "ended": Session._ended,
}


def _warn(where: str, *stalled: Any) -> None:
    _log.warning("%s: %s", where, ends.stall(*stalled))


def _what(fixed: bytes) -> str:
    signatures = unpack_all(fixed)
    return signatures[0].kind.name.lower() if signatures else "operation"


def _different_options(name: str, brought: Sequence[tuple[bytes, Sequence[int]]]) -> ValueError:
    said = []
    for thing, of in (
        ("fusion_bytes", lambda packed: str(_PACKED.unpack_from(packed)[0])),
        ("cache", lambda packed: str(_PACKED.unpack_from(packed)[1])),
        ("timeout", lambda packed: seconds(t) if (t := _PACKED.unpack_from(packed)[2]) >= 0 else "none"),
        ("engine", lambda packed: packed[_PACKED.size :].decode()),
    ):
        values: dict[str, list[int]] = {}
        for packed, who in brought:
            values.setdefault(of(packed), []).extend(who)
        if len(values) > 1:
            each = ", ".join(f"{value} on {ranks(spans(who))}" for value, who in values.items())
            said.append(f"{thing} {each}")
    return ValueError(f"coordinator {name!r}: the ranks were made with different options: {'; '.join(said)}")
