"""This rank as a member of one process set: what it has brought there, and the launches of that."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from ncclpy.coordinator.brought import Brought
from ncclpy.coordinator.calls import Call
from ncclpy.coordinator.counts import Counts
from ncclpy.coordinator.plan import Step, plan, reduction
from ncclpy.coordinator.plane import Plane
from ncclpy.coordinator.signature import Kind, Signature
from ncclpy.coordinator.slots import Carried
from ncclpy.coordinator.turns import Turn, Turns
from ncclpy.core.errors import NcclError
from ncclpy.core.types import Result

__all__ = ["Member", "Ready", "Watcher"]

#: Arrays from this size on are launched by themselves: to copy them takes longer than a launch, as measured.
_LARGE_ON_HOST = 64 << 10
_LARGE_ON_DEVICES = 4 << 20
#: Seconds for one look whether a communicator stands.
_SLICE = 0.1


class Ready(NamedTuple):
    """An operation that all ranks have brought.

    Attributes
    ----------
    call
        What this rank has brought; None if it has joined.
    signatures
        What all have brought alike.
    owns
        What each rank's own is, in the order of the set.
    absent
        The ranks of the set that have joined.
    """

    call: Call | None
    signatures: tuple[Signature, ...]
    owns: tuple[bytes, ...]
    absent: tuple[int, ...]


class Watcher(Protocol):
    """Who is told of launches."""

    def launched(self, parts: Sequence[Any], fused: bool) -> None:
        """Note that arrays were launched together."""

    def trouble(self, error: BaseException) -> None:
        """Take an error of a launch, for which the other ranks would wait for ever."""


class Member:
    """This rank in one process set.

    Parameters
    ----------
    number
        The set's; 0 is that of all ranks.
    ranks
        Its members among all ranks, in the order of the set.
    rank
        This one in the set.
    plane
        Its data.
    label
        What it is called.
    fusion_bytes
        See `Coordinator`.
    watcher
        Who is told of launches.
    staged
        Whether arrays of CPU memory are copied to the device.
    counts
        What is added to.
    """

    def __init__(
        self,
        number: int,
        ranks: tuple[int, ...],
        rank: int,
        plane: Plane,
        label: str,
        fusion_bytes: int,
        staged: bool,
        counts: Counts,
        watcher: Watcher,
    ) -> None:
        self.number, self.ranks, self.rank, self.size = number, ranks, rank, len(ranks)
        self.plane, self.label = plane, label
        self._fusion_bytes, self._staged = fusion_bytes, staged
        self._large = min(fusion_bytes // 4, _LARGE_ON_DEVICES if staged else _LARGE_ON_HOST)
        self._counts, self._watcher = counts, watcher
        self._lock = threading.Lock()
        self._pending: dict[bytes, Call] = {}
        self._names: set[str] = set()
        self._turns = Turns(f"ncclpy-coordinator-{number}")
        self.have: Callable[[int, bytes], Sequence[int]] = lambda number, key: ()

    # What is brought.

    def note(self, call: Call) -> None:
        """Know what this rank is about to bring.

        Raises
        ------
        ValueError
            If one of its names is in flight.
        """
        names = set(call.names)
        if len(names) < len(call.names):
            twice = next(name for name in call.names if call.names.count(name) > 1)
            raise ValueError(f"names: {twice!r} comes twice. Nothing of this call was sent")
        with self._lock:
            taken = names & self._names
            if not taken:
                self._names |= names
                self._pending[call.key] = call
        if taken:
            raise ValueError(
                f"name: {min(taken)!r} is in flight on this rank already: a name can be brought again once its "
                "operation was launched, which waiting for its work tells. Nothing of this call was sent"
            )
        for part in call.parts:
            part.wait_for(self.label, self.rank, self.ranks, partial(self.have, self.number, call.key))

    def take(self, key: bytes) -> Call | None:
        """Return what this rank has brought, which is in flight no more; None if that is nothing."""
        with self._lock:
            call = self._pending.pop(key, None)
            if call is not None:
                self._names -= set(call.names)
        return call

    def take_all(self) -> list[Call]:
        """Return all that it has brought."""
        with self._lock:
            calls = list(self._pending.values())
            self._pending.clear()
            self._names.clear()
        return calls

    @property
    def pending(self) -> int:
        """How many operations wait for other ranks."""
        return len(self._pending)

    # Launches.

    def run(self, operations: Sequence[Ready], then: Callable[[int], None]) -> None:
        """Launch what all ranks have brought, those of one frame; here as far as nothing has to wait.

        Then ``then(number)`` is called, with the set's.
        """
        operations = [each for each in operations if self._has_meaning(each)]
        steps = plan(
            [(each.signatures, len(each.absent)) for each in operations], self._fusion_bytes, self._large, self._staged
        )
        self._turns.add([*(_Launch(self, step, operations) for step in steps), _Told(then, self.number)])

    def _has_meaning(self, ready: Ready) -> bool:
        """Return whether NCCL can do all of an operation; else, on all ranks alike, none of it is begun."""
        try:
            for signature in ready.signatures:
                if signature.kind is Kind.ALL_REDUCE:
                    reduction(signature, self.size, len(ready.absent))
        except ValueError as error:
            if ready.call is not None:
                ready.call.fail(_Meaningless(str(error), result=Result.INVALID_USAGE))
            return False
        return True

    def launch(self, step: Step, operations: Sequence[Ready]) -> None:
        """Launch one step of a plan."""
        first = step.parts[0]
        ready = operations[first.operation]
        calls = [operations[part.operation].call for part in step.parts]
        brought = [
            None if call is None else call.parts[part.place] for call, part in zip(calls, step.parts, strict=True)
        ]
        self._tell(step, [part for part in brought if part is not None])
        try:
            carried = self._begin(step, ready, brought)
        except BaseException as error:
            failure = error if isinstance(error, NcclError) else _not_launched(error)
            for call, part in zip(calls, brought, strict=True):
                if part is not None:
                    part.fail(failure)
                if call is not None and len(step.parts) == 1 and not step.fused:
                    call.fail(failure)
            if not isinstance(error, _Meaningless):
                self._watcher.trouble(failure)
            return
        if carried is not None:
            self._turns.put_first(_CopyOut(self, carried))

    def _tell(self, step: Step, brought: Sequence[Brought]) -> None:
        fused = len(step.parts) > 1
        if brought:  # else this rank has joined
            name = step.parts[0].signature.kind.name.lower()
            self._counts.launched(name, len(brought), sum(part.nbytes for part in brought))
        self._counts.add(launches=1, fused=len(step.parts) * fused, fused_launches=int(fused))
        self._watcher.launched(brought, fused)

    def _begin(self, step: Step, ready: Ready, brought: Sequence[Any]) -> Carried | None:
        signature = step.parts[0].signature
        if signature.op < 0 or (ready.call is not None and not ready.call.joinable):
            return None if ready.call is None else ready.call.launch(self.plane, ready.owns, step.absent)
        try:
            op, factor = reduction(signature, self.size, step.absent)
        except ValueError as error:
            raise _Meaningless(str(error), result=Result.INVALID_USAGE) from None
        if not step.fused and brought[0] is not None:
            self.plane.all_reduce(brought[0], op, factor)
            return None
        members = [(part, each.signature.elements) for part, each in zip(brought, step.parts, strict=True)]
        return self.plane.fuse(members, signature.datatype, op, factor)

    def copied_out(self, carried: Carried) -> None:
        """Leave what was launched through a slot to the monitor."""
        try:
            carried.copy_out()
        except BaseException as error:
            failure = error if isinstance(error, NcclError) else _not_launched(error)
            carried.end(failure)
            self._watcher.trouble(failure)

    def stands(self) -> bool:
        """Return whether its communicator is there, or will never be."""
        return self.plane.stands()

    def await_communicator(self) -> None:
        """Wait until it is."""
        while not self.plane.wait(_SLICE):
            pass

    # The end.

    def fail(self, error: BaseException) -> None:
        """End what runs there with an error."""
        self.plane.fail(error)

    def close(self, timeout: float) -> None:
        """Let what was launched end, and give everything back."""
        self._turns.end(timeout)
        self.plane.close(timeout)


class _Meaningless(NcclError):
    """An operation that no rank can launch, as all of them know alike."""


def _not_launched(error: BaseException) -> NcclError:
    what = f"{type(error).__name__}: {error}"
    made = NcclError(f"an operation that all ranks have brought could not be launched: {what}")
    made.__cause__ = error
    return made


class _Launch(Turn):
    """A step of a plan."""

    def __init__(self, member: Member, step: Step, operations: Sequence[Ready]) -> None:
        self._member, self._step, self._operations = member, step, operations

    def is_ready(self) -> bool:
        return self._member.stands()

    def take(self) -> None:
        self._member.await_communicator()
        self._member.launch(self._step, self._operations)


class _Told(Turn):
    """What is said when all of a frame was launched."""

    def __init__(self, then: Callable[[int], None], number: int) -> None:
        self._then, self._number = then, number

    def is_ready(self) -> bool:
        return True

    def take(self) -> None:
        self._then(self._number)


class _CopyOut(Turn):
    """What is copied out behind a launch, once that was made."""

    def __init__(self, member: Member, carried: Carried) -> None:
        self._member, self._carried = member, carried

    def is_ready(self) -> bool:
        return self._carried.is_launched()

    def take(self) -> None:
        self._member.copied_out(self._carried)
