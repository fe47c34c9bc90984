"""Who carries the data of a coordinator's ranks: a process group, or something else that does as much."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ncclpy.coordinator import plane as _of_groups

if TYPE_CHECKING:
    from ncclpy.coordinator.buffers import Brought, Carried
    from ncclpy.process_group.group import ProcessGroup

__all__ = ["Both", "Carrier", "OfGroup", "Plane"]


class Plane(Protocol):
    """One rank's part in what carries the data of a process set; one thread at a time launches.

    A launch returns what is to be copied out behind it, or None if nothing is.
    """

    def stands(self) -> bool:
        """Return whether its communicator is there, or will never be."""

    def all_reduce(self, brought: Brought, op: int, factor: float | None) -> None:
        """Launch an all-reduce in place, of what is multiplied by a factor first if there is one."""

    def fuse(
        self, members: list[tuple[Brought | None, int]], datatype: int, op: int, factor: float | None, on_device: bool
    ) -> Carried | None:
        """Launch one all-reduce of several arrays; None is what changes nothing, of a rank that has joined.

        `on_device` is whether they are in device memory.
        """

    def barrier(self, brought: Brought) -> None:
        """Launch what is done when all have launched it."""

    def broadcast(self, brought: Brought, root: int) -> Carried | None:
        """Launch a broadcast in place."""

    def gather(self, brought: Brought, counts: Sequence[int], result: Any) -> Carried | None:
        """Launch a gather of parts of so many elements, by rank, into a new array."""

    def scatter(
        self, brought: Brought, op: int, factor: float | None, counts: Sequence[int], result: Any
    ) -> Carried | None:
        """Launch a reduction of which each rank gets the part of so many elements."""

    def exchange(
        self, brought: Brought, send_counts: Sequence[int], recv_counts: Sequence[int], even: bool, result: Any
    ) -> Carried | None:
        """Launch an exchange of parts of so many elements."""

    def is_free(self) -> bool:
        """Return whether CPU memory that is copied in next waits for no other rank; it may wait a moment for that."""

    def abandon(self, error: BaseException) -> None:
        """Fail a launch that could not be made; what is being copied for it is held until that is over."""

    def cause_of(self, error: BaseException) -> BaseException:
        """Return what has ended this, if an error is of that; else the error."""

    def fail(self, error: BaseException) -> None:
        """End what runs there with an error."""

    def close(self, timeout: float | None) -> None:
        """Let what was launched end, and give everything back."""


class Carrier(Protocol):
    """What carries the data of some ranks."""

    @property
    def name(self) -> str:
        """Return what it is called."""

    @property
    def device(self) -> int:
        """Return the device of this rank."""

    @property
    def for_devices(self) -> bool:
        """Return whether it takes arrays in device memory."""

    def plane(self) -> Plane:
        """Return this rank's part, for arrays in device memory and, if there is no other, for all."""

    def host_plane(self) -> Plane | None:
        """Return its part for arrays in CPU memory, where that is another one."""

    def on_abort(self, callback: Callable[[BaseException], object]) -> None:
        """Have a failure of what runs there be told."""

    def failure(self) -> BaseException | None:
        """Return what has ended it, also where only the store has it so far; None if nothing has."""

    def part(self, name: str, members: Sequence[int]) -> Carrier:
        """Return what carries the data of some of these ranks, of which this is one; all ranks are told of it."""

    def pass_by(self, members: Sequence[int]) -> None:
        """Know that some others make a part now."""

    def end(self, orderly: bool) -> None:
        """Give back what is left, once all planes are closed and the control plane is.

        `orderly` is whether all ranks have ended it, as they were asked to.
        """


class OfGroup:
    """A process group of the coordinator's own as a `Carrier`.

    Parameters
    ----------
    group
        The group.
    behind
        Called at the end, with whether that is orderly.
    """

    for_devices = True

    def __init__(self, group: ProcessGroup, behind: Callable[[bool], None] = lambda orderly: None) -> None:
        self._group, self._behind = group, behind
        self.name, self.device = group.name, group.device

    def plane(self) -> Plane:
        return _of_groups.Plane(self._group)

    def host_plane(self) -> Plane | None:
        return None

    def on_abort(self, callback: Callable[[BaseException], object]) -> None:
        self._group.on_abort(callback)

    def failure(self) -> BaseException | None:
        return _of_groups.error_of(self._group)

    def part(self, name: str, members: Sequence[int]) -> OfGroup:
        return OfGroup(_of_groups.part_of(self._group, name, list(members)))

    def pass_by(self, members: Sequence[int]) -> None:
        pass

    def end(self, orderly: bool) -> None:
        self._behind(orderly)


class Both:
    """One carrier for arrays in device memory, another one for those in CPU memory.

    Parameters
    ----------
    devices, host
        The two, of the same ranks.
    """

    for_devices = True

    def __init__(self, devices: Carrier, host: Carrier) -> None:
        self._devices, self._host = devices, host
        self.name, self.device = devices.name, devices.device

    def plane(self) -> Plane:
        return self._devices.plane()

    def host_plane(self) -> Plane | None:
        return self._host.plane()

    def on_abort(self, callback: Callable[[BaseException], object]) -> None:
        self._devices.on_abort(callback)
        self._host.on_abort(callback)

    def failure(self) -> BaseException | None:
        return self._devices.failure() or self._host.failure()

    def part(self, name: str, members: Sequence[int]) -> Both:
        return Both(self._devices.part(name, members), self._host.part(name, members))

    def pass_by(self, members: Sequence[int]) -> None:
        self._devices.pass_by(members)
        self._host.pass_by(members)

    def end(self, orderly: bool) -> None:
        self._devices.end(orderly)
        self._host.end(orderly)
