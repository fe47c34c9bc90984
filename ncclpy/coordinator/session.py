"""A session: a coordinator while its ranks stay the same, with control plane, reading thread and process sets."""

from __future__ import annotations

import contextlib
import logging
import struct
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from ncclpy.bootstrap.place import machine
from ncclpy.bootstrap.prefix import PrefixStore
from ncclpy.coordinator import connections, errors
from ncclpy.coordinator.backends import DataBackend
from ncclpy.coordinator.buffers import copies_to_device
from ncclpy.coordinator.control import SETS, AlreadyAsked, ranks_of_set
from ncclpy.coordinator.data_plane import run_in_callback_thread
from ncclpy.coordinator.keys import BEGINNING, LEAVING, SET_END, key_of, names_of, shown
from ncclpy.coordinator.member import OperationStats, ProcessSetWorker, SubmitGate, Submitter
from ncclpy.coordinator.plan import Pending, Ready
from ncclpy.coordinator.signature import as_error, unpack_all
from ncclpy.coordinator.timeline import Timeline
from ncclpy.engine.unread_failures import note_failures
from ncclpy.errors import NcclError, NcclTimeout, ranks, seconds, spans

__all__ = ["Options", "Session", "open_control"]

T = TypeVar("T")

_log = logging.getLogger("ncclpy.coordinator")

#: Prefix of the reason of a shutdown after which an operation may be launched on some ranks only, so never finishes.
_UNFINISHABLE = "\0"
#: Seconds that the reading thread waits at a time while no frame arrives.
_READ_SLICE = 3600.0
#: Seconds for all ranks to arrive at the beginning, unless a timeout is given.
_BEGIN_TIMEOUT = 300.0
#: Seconds that launched operations have to finish when the coordinator ends.
_DRAIN_TIMEOUT = 60.0
#: Most seconds to wait for the record that says why the control plane has ended, which normally arrives much sooner;
#: and, in `abandon`, for the release of everything, at most twice.
_REASON_TIMEOUT = 10.0
#: Seconds between checks, during a wait, whether the session has ended; and, in `explain`, whether it is ending.
_SLICE, _END_SLICE = 0.1, 0.01


def open_control(
    rank: int,
    size: int,
    store: Any,
    name: str,
    *,
    cache: int,
    timeout: float | None,
    stall_after: float,
    wanted: Callable[[], bool],
) -> Any:
    """Return this rank's end of the control plane, once all ranks have arrived and this one is connected."""
    return connections.open_control(
        PrefixStore(name, store), rank, size, name, cache=cache, timeout=timeout, stall_after=stall_after,
        patience=_BEGIN_TIMEOUT if timeout is None else timeout, wanted=wanted,
    )  # fmt: skip


_PACKED = struct.Struct("=qqd")


class Options(NamedTuple):
    """The options of a coordinator; see `Coordinator`. All but `stall_after` must be the same on all ranks."""

    engine: str
    fusion_bytes: int
    cache: int
    timeout: float | None
    stall_after: float

    def packed(self) -> bytes:
        """Return the options that the ranks compare at the beginning, as bytes."""
        timeout = -1.0 if self.timeout is None else self.timeout
        return _PACKED.pack(self.fusion_bytes, self.cache, timeout) + self.engine.encode()


class _Wait(Generic[T]):
    """A wait of one or more threads for a record of the control plane, and its result."""

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self.is_all = True  # for `leave`: whether all ranks have left their blocks
        self.asking, self.is_asked = threading.Lock(), False  # whether the control plane was asked for the record
        self._value: T | None = None
        self._error: BaseException | None = None

    def tell(self, value: T) -> None:
        self._value = value
        self.arrived.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self.arrived.set()

    def result(self) -> T:
        """Return the value that was told, or raise the error."""
        if self._error is not None:
            raise self._error
        assert self._value is not None
        return self._value


class Session:
    """Run a coordinator while its ranks stay the same.

    Parameters
    ----------
    name
        The coordinator's name.
    control
        This rank's end of the control plane.
    backend
        The data backend of all ranks.
    options
        See `Options`.
    counts
        The counters to add to.
    timeline
        The timeline that records each operation, or None.
    """

    def __init__(
        self,
        name: str,
        control: Any,
        backend: DataBackend,
        options: Options,
        counts: OperationStats,
        timeline: Timeline | None,
    ) -> None:
        self.name, self.rank, self.size = name, control.rank, control.size
        self.backend, self.device = backend, backend.device
        self.error: NcclError | None = None
        self._control, self._options, self._counts = control, options, counts
        self._lock = threading.RLock()  # a signal handler may call a method while its thread holds the lock
        self._closing: tuple[int, str] | None = None
        # The waits in progress (`_joining`, `_defining`), and the waits with a result that no thread has taken yet
        # (`_joined`, `_defined`). If the waiting thread has stopped waiting, a later call takes the result.
        self._joining: _Wait[int] | None = None
        self._joined: _Wait[int] | None = None
        self._defining: dict[tuple[int, ...], _Wait[ProcessSetWorker]] = {}
        self._defined: dict[tuple[int, ...], _Wait[ProcessSetWorker]] = {}
        self._closing_sets: dict[int, _Wait[bool]] = {}  # waits for the ends of process sets, by the sets' numbers
        self._ended_sets: dict[int, ProcessSetWorker] = {}  # sets that have ended and are not released yet
        self._began: _Wait[tuple[bytes, ...]] = _Wait()
        self._leaving: _Wait[tuple[bytes, ...]] = _Wait()
        self._ending, self._over = threading.Event(), threading.Event()
        self._release_error: BaseException | None = None
        self._orderly = False  # whether a shutdown has ended the session: no rank was lost, no launch has failed
        self.unfinished: list[str] = []  # names of the operations that were pending when the session ended
        self.failures: list[BaseException] = []  # the error with which the unfinished operations have failed
        self._cause: BaseException | None = None  # what ended the data backend before the session had begun
        self._staged = copies_to_device()
        self._gate = SubmitGate()
        self._gate.timeline = timeline
        self._members = {0: self._member(0, tuple(range(self.size)), backend)}
        self._reader = threading.Thread(target=self._read, name="ncclpy-coordinator", daemon=True)
        self._reader.start()

    def _member(self, number: int, members: tuple[int, ...], backend: DataBackend) -> ProcessSetWorker:
        label = f"coordinator {self.name!r}" + (f", process set {number}" if number else "")
        pending = Pending(label, members.index(self.rank), members, number)
        pending.have = self._control.have
        made = ProcessSetWorker(
            pending, backend.plane(), self._options.fusion_bytes, self._staged and backend.accepts_device_arrays,
            self._counts, self.fail_all_ranks, self._options.cache, backend.host_plane(),
            backend.accepts_device_arrays, None if self._gate.timeline is None else self._gate.timeline.launched,
        )  # fmt: skip
        backend.on_abort(self.fail_all_ranks)
        return made

    @property
    def all_ranks(self) -> ProcessSetWorker:
        """This rank in the set of all ranks."""
        return self._members[0]

    def submitter(self, member: ProcessSetWorker) -> Submitter:
        """Return a submitter, by which operations are brought to a process set."""
        return Submitter(self, member, self._gate, self._control, self._counts)

    def set_timeline(self, timeline: Timeline | None) -> None:
        """Record what is brought from now on in another timeline, or in none."""
        with self._lock:  # `_group` adds members with the lock held
            self._gate.timeline = timeline
            for member in self._members.values():
                member.on_launch = None if timeline is None else timeline.launched

    @property
    def pending(self) -> int:
        """The number of operations that wait for other ranks."""
        return sum(len(member.pending) for member in list(self._members.values()))

    # Beginning.

    def begin(self) -> tuple[bytes, ...]:
        """Compare the options of all ranks; return the machine of each rank.

        Raises
        ------
        ValueError
            If the options differ; the same on all ranks.
        NcclTimeout
            If ranks do not arrive.
        NcclRemoteError, NcclTimeout or NcclAborted
            If another rank could not begin.
        """
        limit = self._options.timeout if self._options.timeout is not None else _BEGIN_TIMEOUT
        try:
            self._ask(self._control.bring, 0, BEGINNING, self._options.packed(), machine().encode(), False)
            is_there = self._wait(self._began, limit)
        except NcclError:
            if self._cause is not None:
                raise self._cause from None
            raise
        if not is_there:
            have = set(self._control.have(0, BEGINNING))
            missing = [rank for rank in range(self.size) if rank not in have]
            error = NcclTimeout(
                f"coordinator {self.name!r}: {ranks(spans(missing))} did not arrive within {seconds(limit)}, as far "
                f"as rank {self.rank} knows"
            )
            error.missing = missing
            raise error
        return self._began.result()

    def _wait(self, what: _Wait[Any], timeout: float | None) -> bool:
        """Wait for a record; return False if `timeout` passes first; raise if the session ends first."""
        end = None if timeout is None else time.monotonic() + timeout
        while not what.arrived.wait(_SLICE if end is None else min(_SLICE, max(0.0, end - time.monotonic()))):
            if self.error is not None and not what.arrived.is_set():
                raise errors.has_ended(self.name, self.error)
            if end is not None and time.monotonic() >= end:
                return False
        return True

    # Calls of the user's threads.

    def check(self) -> None:
        """Raise if no operation can be brought now."""
        if self.error is not None:
            raise errors.has_ended(self.name, self.error)
        if self._closing is not None:
            rank, reason = self._closing
            raise errors.has_ended(self.name, errors.ended(self.name, rank, (), reason))
        if self._joining is not None:
            raise ValueError(
                f"coordinator {self.name!r}: rank {self.rank} has joined; it brings nothing until all have"
            )
        if self._joined is not None:  # join() ended early, by a deadline or a signal, and all have joined since
            with self._lock:
                self._joined = None
                self._set_gate()

    def _set_gate(self) -> None:
        """Shut the gate if a call of `check` must precede bringing an operation, else open it. Needs the lock."""
        why_not = (self.error, self._closing, self._joining, self._joined)
        self._gate.shut = any(each is not None for each in why_not)

    def fail_late(self, member: ProcessSetWorker) -> None:
        """Fail the operations that were brought while the session ended, and which `_end` may not have seen."""
        if self.error is not None:
            for late in member.pending.take_all():
                late.fail(self.error)

    def explain(self, error: BaseException) -> None:
        """Raise the error that ends the session, if that end is why the control plane refused a call with `error`."""
        if not isinstance(error, NcclError) or error.__cause__ is not None:
            return
        end = time.monotonic() + _REASON_TIMEOUT
        while not self._ending.wait(_END_SLICE) and self._closing is None and time.monotonic() < end:
            pass
        if self.error is not None or self._closing is not None:
            self.check()

    def _ask(self, method: Callable[..., None], *arguments: Any) -> None:
        """Call the control plane; if it refuses because the session ends, raise the error that ends it."""
        try:
            method(*arguments)
        except NcclError as error:
            self.explain(error)
            raise

    def _ask_once(self, what: _Wait[Any], method: Callable[..., None], *arguments: Any) -> None:
        """Make the call whose result `what` waits for, unless another thread has made it."""
        with what.asking:
            if not what.is_asked and not what.arrived.is_set():
                with contextlib.suppress(AlreadyAsked):  # an earlier call was interrupted before the next line
                    self._ask(method, *arguments)
                what.is_asked = True

    def join(self, timeout: float | None) -> int:
        """Bring nothing more until all ranks have joined; return the rank that joined last."""
        with self._lock:
            joining = self._joined or self._joining  # of another thread, or of a call that has stopped waiting
            if joining is None:
                self.check()
                joining = self._joining = _Wait[int]()
                self._set_gate()
        self._ask_once(joining, self._control.join)
        if not self._wait(joining, timeout):
            raise NcclTimeout(
                f"coordinator {self.name!r}: not all ranks have joined within {seconds(timeout or 0.0)}; rank "
                f"{self.rank} has, and brings nothing until they have"
            )
        with self._lock:
            if self._joined is joining:
                self._joined = None
                self._set_gate()
        return joining.result()

    def define(self, members: tuple[int, ...], timeout: float | None) -> ProcessSetWorker:
        """Return this rank in a new process set, once all of its members have asked for it."""
        with self._lock:
            self.check()
            # An earlier call that ended early, or another thread, may have asked for this set already.
            waiting = self._defined.get(members) or self._defining.setdefault(members, _Wait[ProcessSetWorker]())
        self._ask_once(waiting, self._control.define, members)
        if not self._wait(waiting, timeout):
            raise NcclTimeout(
                f"coordinator {self.name!r}: not all of {ranks(spans(members))} have called process_set() with these "
                f"ranks within {seconds(timeout or 0.0)}"
            )
        with self._lock:
            if self._defined.get(members) is waiting:
                del self._defined[members]
        return waiting.result()

    def close_set(self, member: ProcessSetWorker, timeout: float | None) -> None:
        """End a process set, once all of its members have asked for its end and its operations are done."""
        number = member.number
        with self._lock:
            waiting = self._closing_sets.get(number)  # of another thread, or of a call that has stopped waiting
            if waiting is None:
                if member.closing:  # the set has ended
                    return
                self.check()
                member.closing = True  # before `pending` is read: another thread may be about to bring an operation
                if len(member.pending):
                    member.closing = False
                    waits = shown([name for key in member.pending.keys() for name in names_of(key)])
                    raise ValueError(f"{member.label}: operations of this rank wait for other ranks: {waits}")
                waiting = self._closing_sets[number] = _Wait()
        self._ask_once(waiting, self._control.bring, number, SET_END, b"", b"", False)
        if not self._wait(waiting, timeout):
            missing = [rank for rank in member.ranks if rank not in set(self._control.have(number, SET_END))]
            error = NcclTimeout(
                f"{member.label}: {ranks(spans(missing))} did not close it within {seconds(timeout or 0.0)}, as far "
                f"as rank {self.rank} knows"
            )
            error.missing = missing
            raise error
        waiting.result()
        with self._lock:
            self._closing_sets.pop(number, None)
            ended = self._ended_sets.pop(number, None)
        if ended is not None:
            ended.close(_DRAIN_TIMEOUT if timeout is None else timeout)

    def leave(self, timeout: float) -> bool:
        """Wait until all ranks leave their blocks; the other ranks' operations continue meanwhile.

        Return False if not all leave in time. Return True without this wait if the session is ending already, or if a
        join() of this rank is not complete. Raise if the session ends during the wait.
        """
        joining = self._joining
        if joining is not None:  # join() ended early; until all have joined nothing can be brought
            self._wait(joining, timeout)
        if self.error is None and self._closing is None and self._joining is None:
            try:
                self._ask_once(self._leaving, self._control.bring, 0, LEAVING, b"", b"", False)
            except ValueError:  # another thread has called join(), and that call reports the result
                return True
            return self._wait(self._leaving, timeout) and self._leaving.is_all
        return True

    def shut_down(self, drain: bool, reason: str) -> None:
        """Ask for the end of the session, on all ranks; do nothing if it has ended."""
        if self.error is None:
            self._control.shutdown(drain, reason)

    def abandon(self, reason: str) -> None:
        """End a session that could not begin, and wait until everything is released, even if no rank answers."""
        with contextlib.suppress(NcclError):  # the session is ending already
            self.shut_down(False, reason)
        if not self.wait_until_over(_REASON_TIMEOUT):
            self._control.close()
            self.wait_until_over(_REASON_TIMEOUT)

    def wait_until_over(self, timeout: float | None) -> bool:
        """Wait until the session has ended and everything is released; return False if `timeout` passes first."""
        if threading.current_thread() is self._reader:  # called by a finaliser: the reader would wait for itself
            return True
        return self._over.wait(None if timeout is None or timeout > threading.TIMEOUT_MAX else timeout)

    @property
    def release_error(self) -> BaseException | None:
        """The error that was raised when everything was released, or None."""
        return self._release_error

    def counters(self) -> dict[str, Any]:
        """Return the counters of the control plane."""
        counted = self._control.counters()
        return {
            "cache_hits": counted["hits"],
            "cache_evictions": counted["evicted"],
            "bytes_up": counted["bytes_up"],
            "bytes_down": counted["bytes_down"],
        }

    # Failures that the other ranks must know.

    def fail_all_ranks(self, error: BaseException) -> None:
        """End the session on all ranks with an error of this rank; launched operations may then never finish."""
        if self.error is None:
            with contextlib.suppress(NcclError):  # the session is ending already
                self._control.shutdown(False, f"{_UNFINISHABLE}{error}")

    # Frames of the control plane.

    def _read(self) -> None:
        try:
            while True:
                frame = self._control.next(_READ_SLICE)
                if frame is None:
                    break
                if frame:
                    self._execute(frame)
        except BaseException as error:  # a defect of this library; without this, threads would wait forever
            failure = NcclError(f"coordinator {self.name!r}: reading the control plane failed: {error!r}")
            failure.__cause__ = error
            self.fail_all_ranks(failure)
            self._end(failure)
        if self.error is None:
            self._end(errors.ended(self.name, -1, (), "its control plane is closed"))
        self._release()

    def _execute(self, frame: Sequence[tuple]) -> None:
        """Execute the records of one frame."""
        self._counts.add("frames")
        ready: dict[int, list[Ready]] = {}
        launch_nothing = set()  # sets with an operation for which this rank launches nothing: they count as launched
        for record in frame:
            if record[0] == "run":
                _, number, key, fixed, owns, absent = record
                if key in (BEGINNING, LEAVING):
                    (self._began if key == BEGINNING else self._leaving).tell(tuple(owns))
                    launch_nothing.add(number)
                    continue
                member = self._members.get(number)
                if key == SET_END:
                    self._run(ready)
                    launch_nothing.add(number)
                    self._set_ended(number)
                elif member is not None:
                    gone = tuple(rank for rank in absent if rank in member.ranks) if absent else ()
                    each = member.pending.ready(key, fixed, owns, gone)
                    if each.call is None and self.rank not in gone and self.error is None:
                        raise RuntimeError(f"{names_of(key)} is to run, and rank {self.rank} has not brought it")
                    ready.setdefault(number, []).append(each)
                else:
                    launch_nothing.add(number)
                continue
            self._run(ready)
            _HANDLERS[record[0]](self, *record[1:])
        self._run(ready)
        for number in launch_nothing:
            self._control.launched(number)

    def _run(self, ready: dict[int, list[Ready]]) -> None:
        for number, operations in ready.items():
            if (timeline := self._gate.timeline) is not None:  # read once: a user's thread may replace it
                timeline.negotiated([each.call for each in operations if each.call is not None])
            self._members[number].run(operations, self._control.launched)
        ready.clear()

    def _mismatch(self, number: int, key: bytes, brought: Sequence[tuple[bytes, Sequence[int]]]) -> None:
        if number == 0 and key == BEGINNING:
            self._began.fail(_different_options(self.name, brought))
            return
        self._counts.add("disagreements")
        member = self._members.get(number)
        if member is not None:
            self._fail(member, key, as_error(names_of(key), brought, member.label))

    def _fail(self, member: ProcessSetWorker, key: bytes, error: BaseException) -> None:
        if member.number == 0 and key == LEAVING:  # the thread in `leave` gets False and then closes the coordinator
            self._leaving.is_all = False
            self._leaving.tell(())
        if key == SET_END:
            with self._lock:
                waiting = self._closing_sets.pop(member.number, None)
                member.closing = False
            if waiting is not None:
                waiting.fail(error)
        call = member.pending.take(key)
        if call is not None:
            call.fail(error)

    def _set_ended(self, number: int) -> None:
        """Note the end of a process set, and wake the thread that waits for it, which then releases the set."""
        with self._lock:
            member, waiting = self._members.pop(number, None), self._closing_sets.get(number)
            if member is not None:
                self._ended_sets[number] = member
        if waiting is not None:
            waiting.tell(True)

    def _fail_set(self, key: bytes, error_of: Callable[[bytes], NcclError]) -> None:
        """Fail the wait for a process set, if this rank has asked for it; `error_of` gets a key that names the set."""
        asked = ranks_of_set(key, self.size)
        waiting = self._defining.pop(asked, None)
        if waiting is not None:
            waiting.fail(error_of(key_of([str(asked)])))

    def _after_join(self, number: int, key: bytes, fixed: bytes, absent: Sequence[int]) -> None:
        if number == SETS:
            self._fail_set(key, lambda name: errors.after_join("process_set", name, absent))
            return
        member = self._members.get(number)
        if member is not None:
            self._fail(member, key, errors.after_join(_kind_name(fixed), key, absent))

    def _overdue(self, number: int, key: bytes, fixed: bytes, have: Sequence[int], missing: Sequence[int]) -> None:
        self._counts.add("overdue")
        if number == SETS:
            self._fail_set(key, lambda name: errors.overdue("process_set", name, have, missing, self._options.timeout))
            return
        if number == 0 and key == BEGINNING:
            self._began.fail(errors.overdue(f"coordinator {self.name!r}", key, have, missing, self._options.timeout))
            return
        member = self._members.get(number)
        if member is not None:
            self._fail(member, key, errors.overdue(_kind_name(fixed), key, have, missing, self._options.timeout))

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
        self._counts.add("stalls")
        if number == 0 and key == LEAVING:  # a rank at the end of its block waits for ranks that still work
            return
        where = f"coordinator {self.name!r}"
        if number == SETS:
            what, key, near = "process_set", key_of([str(ranks_of_set(key, self.size))]), ()
        else:
            what = "operation" if key in _OWN_KEYS else _kind_name(fixed)
            where += f", process set {number}" if number else ""
        # In another thread: a logger's handlers are the user's code, and finding similar names takes time.
        run_in_callback_thread(partial(_warn, where, what, key, have, missing, waited, near))

    def _all_joined(self, last: int) -> None:
        with self._lock:
            joining, self._joining = self._joining, None
            self._joined = joining
            self._set_gate()
        if joining is not None:
            joining.tell(last)

    def _group(self, number: int, members: Sequence[int]) -> None:
        members = tuple(members)
        if self.rank not in members:
            self.backend.skip_part(members)
            return
        with self._lock:
            waiting = self._defining.pop(members)
            self._defined[members] = waiting
        try:
            part = self.backend.part(f"{self.backend.name}/set {number}", members)
            with self._lock:  # `set_timeline` reads the members
                made = self._members[number] = self._member(number, members, part)
        except BaseException as error:
            waiting.fail(error)
            self.fail_all_ranks(error)
        else:
            waiting.tell(made)

    def _look_for_cause(self) -> None:
        """If the session ends before it has begun, read from the store why another rank could not begin.

        A rank that has read the reason closes its connections. Without this look, another rank that has not read the
        reason yet would report a lost rank.
        """
        if self._cause is None and not self._began.arrived.is_set():
            with contextlib.suppress(NcclError):
                self._cause = self.backend.failure()

    def _closing_begun(self, rank: int, reason: str) -> None:
        self._look_for_cause()
        with self._lock:
            self._closing = rank, reason
            self._set_gate()

    def _ended(self, rank: int, lost: Sequence[int], reason: str) -> None:
        is_unfinishable = reason.startswith(_UNFINISHABLE)
        error = errors.ended(self.name, rank, lost, reason.removeprefix(_UNFINISHABLE))
        self._look_for_cause()
        self._end(error)
        self._orderly = not (lost or is_unfinishable or rank < 0)
        if not self._orderly:  # launched operations wait for ranks that do not launch them
            for member in list(self._members.values()):
                member.fail(error)

    # End.

    def _end(self, error: NcclError) -> None:
        """End the session with an error: fail all pending operations; all later ones are refused."""
        with self._lock:
            if self.error is not None:
                return
            self.error = error
            self._set_gate()
        self._ending.set()
        for member in list(self._members.values()):
            self.unfinished += [shown(names_of(key)) for key in member.pending.keys()]
            for call in member.pending.take_all():
                call.fail(error)
        if self.unfinished:
            self.failures.append(error)
            note_failures(f"rank {self.rank} of coordinator {self.name!r}", self.failures)

    def _release(self) -> None:
        limit = self._options.timeout if self._options.timeout is not None else _DRAIN_TIMEOUT
        with self._lock:  # a thread in `close_set` may have stopped waiting, and so not have released its set
            members, self._ended_sets = [*self._members.values(), *self._ended_sets.values()], {}
        for member in reversed(members):
            try:
                member.close(limit)
            except Exception as error:
                self._release_error = error
        self._control.close()
        try:
            self.backend.end(self._orderly)
        except Exception as error:
            self._release_error = error
        self._over.set()


#: The keys of the session's own operations.
_OWN_KEYS = (BEGINNING, LEAVING, SET_END)

_HANDLERS: dict[str, Callable[..., None]] = {
    "mismatch": Session._mismatch,
    "after_join": Session._after_join,
    "overdue": Session._overdue,
    "stalled": Session._stalled,
    "all_joined": Session._all_joined,
    "group": Session._group,
    "closing": Session._closing_begun,
    "ended": Session._ended,
}


def _warn(where: str, *stalled: Any) -> None:
    _log.warning("%s: %s", where, errors.stall(*stalled))


def _kind_name(fixed: bytes) -> str:
    signatures = unpack_all(fixed)
    return signatures[0].kind.name.lower() if signatures else "operation"


def _different_options(name: str, brought: Sequence[tuple[bytes, Sequence[int]]]) -> ValueError:
    differences = []
    for option, value_of in (
        ("fusion_bytes", lambda packed: str(_PACKED.unpack_from(packed)[0])),
        ("cache", lambda packed: str(_PACKED.unpack_from(packed)[1])),
        ("timeout", lambda packed: seconds(t) if (t := _PACKED.unpack_from(packed)[2]) >= 0 else "none"),
        ("engine", lambda packed: packed[_PACKED.size :].decode()),
    ):
        values: dict[str, list[int]] = {}
        for packed, owners in brought:
            values.setdefault(value_of(packed), []).extend(owners)
        if len(values) > 1:
            each = ", ".join(f"{value} on {ranks(spans(owners))}" for value, owners in values.items())
            differences.append(f"{option} {each}")
    return ValueError(f"coordinator {name!r}: the ranks were made with different options: {'; '.join(differences)}")
