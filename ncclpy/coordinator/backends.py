"""Data backends: what moves the data of a coordinator's ranks, such as a process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ncclpy.coordinator import data_plane as _group_plane

if TYPE_CHECKING:
    from ncclpy.coordinator.buffers import FusedLaunch, TensorEntry
    from ncclpy.process_group.group import ProcessGroup

__all__ = ["DataBackend", "DataPlane", "GroupBackend", "SplitBackend"]


class DataPlane(Protocol):
    """The data plane of one rank in a process set; one thread at a time launches.

    A method that launches returns the `FusedLaunch` on which `copy_out` must be called next, or None if there is
    nothing to copy out.
    """

    def is_settled(self) -> bool:
        """Return whether the plane's communicator is made, or will never be made."""

    def all_reduce(self, brought: TensorEntry, op: int, factor: float | None) -> None:
        """Launch an all-reduce in place; `factor`, unless None, multiplies the input first."""

    def fuse(
        self,
        members: list[tuple[TensorEntry | None, int]],
        datatype: int,
        op: int,
        factor: float | None,
        on_device: bool,
    ) -> FusedLaunch | None:
        """Launch one all-reduce of several arrays.

        `members` has each array and its number of elements of `datatype`. None in place of an array is the operator's
        identity, which a rank that has joined contributes. `on_device` is whether the arrays are in device memory.
        """

    def barrier(self, brought: TensorEntry) -> None:
        """Launch a barrier."""

    def broadcast(self, brought: TensorEntry, root: int) -> FusedLaunch | None:
        """Launch a broadcast in place."""

    def gather(self, brought: TensorEntry, counts: Sequence[int], result: Any) -> FusedLaunch | None:
        """Launch a gather into a new array; `counts` has the number of elements of each rank's part."""

    def scatter(
        self, brought: TensorEntry, op: int, factor: float | None, counts: Sequence[int], result: Any
    ) -> FusedLaunch | None:
        """Launch a reduce-scatter; `counts` has the number of elements of each rank's part."""

    def exchange(
        self, brought: TensorEntry, send_counts: Sequence[int], recv_counts: Sequence[int], even: bool, result: Any
    ) -> FusedLaunch | None:
        """Launch an all-to-all; the counts are the numbers of elements sent to and received from each rank."""

    def is_free(self) -> bool:
        """Wait a moment at most; return whether the next copy-in of CPU memory would then wait for no other rank."""

    def abandon(self, error: BaseException) -> None:
        """Fail a launch that could not be made; arrays that are being copied for it are held until the copies end."""

    def cause_of(self, error: BaseException) -> BaseException:
        """Return the error that has ended this data plane, if it has caused `error`; else `error`."""

    def fail(self, error: BaseException) -> None:
        """End this data plane's operations with an error."""

    def close(self, timeout: float | None) -> None:
        """Wait for what was launched, and release everything."""


class DataBackend(Protocol):
    """Move the data of some ranks."""

    @property
    def name(self) -> str:
        """Return the backend's name."""

    @property
    def device(self) -> int:
        """Return the device of this rank."""

    @property
    def accepts_device_arrays(self) -> bool:
        """Return whether the backend accepts arrays in device memory."""

    def plane(self) -> DataPlane:
        """Return this rank's data plane: for arrays in device memory and, without a `host_plane`, for all arrays."""

    def host_plane(self) -> DataPlane | None:
        """Return this rank's data plane for arrays in CPU memory; None if `plane` carries these arrays too."""

    def on_abort(self, callback: Callable[[BaseException], object]) -> None:
        """Call `callback` with the error when an operation of this backend fails."""

    def failure(self) -> BaseException | None:
        """Return the error that has ended this backend, or None; it may so far be only in the store, which is read."""

    def part(self, name: str, members: Sequence[int]) -> DataBackend:
        """Return a backend of some of these ranks, this one included; all other ranks call `skip_part`."""

    def skip_part(self, members: Sequence[int]) -> None:
        """Take part in making a backend without this rank.

        For each part every rank calls `part` or `skip_part`, and all ranks make these calls in the same order.
        """

    def end(self, orderly: bool) -> None:
        """Release what is left, once all planes and the control plane are closed.

        `orderly` is whether all ranks have ended the coordinator by a shutdown.
        """


class GroupBackend:
    """Use a process group, which belongs to the coordinator alone, as a `DataBackend`.

    Parameters
    ----------
    group
        The group.
    on_end
        Called by `end` with the argument `orderly`.
    """

    accepts_device_arrays = True

    def __init__(self, group: ProcessGroup, on_end: Callable[[bool], None] = lambda orderly: None) -> None:
        self._group, self._on_end = group, on_end
        self.name, self.device = group.name, group.device

    def plane(self) -> DataPlane:
        return _group_plane.DataPlane(self._group)

    def host_plane(self) -> DataPlane | None:
        return None

    def on_abort(self, callback: Callable[[BaseException], object]) -> None:
        self._group.on_abort(callback)

    def failure(self) -> BaseException | None:
        return _group_plane.error_of(self._group)

    def part(self, name: str, members: Sequence[int]) -> GroupBackend:
        return GroupBackend(_group_plane.part_of(self._group, name, list(members)))

    def skip_part(self, members: Sequence[int]) -> None:
        pass

    def end(self, orderly: bool) -> None:
        self._on_end(orderly)


class SplitBackend:
    """Combine a backend for arrays in device memory and one for arrays in CPU memory.

    Parameters
    ----------
    devices, host
        The two backends, of the same ranks.
    """

    accepts_device_arrays = True

    def __init__(self, devices: DataBackend, host: DataBackend) -> None:
        self._devices, self._host = devices, host
        self.name, self.device = devices.name, devices.device

    def plane(self) -> DataPlane:
        return self._devices.plane()

    def host_plane(self) -> DataPlane | None:
        return self._host.plane()

    def on_abort(self, callback: Callable[[BaseException], object]) -> None:
        self._devices.on_abort(callback)
        self._host.on_abort(callback)

    def failure(self) -> BaseException | None:
        return self._devices.failure() or self._host.failure()

    def part(self, name: str, members: Sequence[int]) -> SplitBackend:
        return SplitBackend(self._devices.part(name, members), self._host.part(name, members))

    def skip_part(self, members: Sequence[int]) -> None:
        self._devices.skip_part(members)
        self._host.skip_part(members)

    def end(self, orderly: bool) -> None:
        self._devices.end(orderly)
        self._host.end(orderly)
