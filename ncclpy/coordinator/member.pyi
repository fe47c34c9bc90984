from collections.abc import Callable, Sequence
from typing import Any

from typing_extensions import disjoint_base

from ncclpy.coordinator.carriers import Plane
from ncclpy.coordinator.plan import Call, Memory, Pending, Ready
from ncclpy.coordinator.plane import Turns
from ncclpy.coordinator.timeline import Timeline
from ncclpy.engine.work import Work
from ncclpy.process_group.group import ProcessGroup
from ncclpy.types import BufferLike, OpLike

@disjoint_base
class Counts:
    @property
    def operations(self) -> dict[str, int]: ...
    def add(self, what: str, number: int = 1) -> int: ...
    def as_dict(self) -> dict[str, Any]: ...

@disjoint_base
class Gate:
    shut: bool

@disjoint_base
class Entrance:
    def __init__(
        self,
        session: Any,
        member: Member,
        gate: Gate,
        control: Any,
        counts: Counts,
        timeline: Timeline | None = None,
    ) -> None: ...
    @property
    def member(self) -> Member: ...
    @property
    def device(self) -> int: ...
    def follow(self, group: ProcessGroup, number: int) -> None: ...
    def is_outdated(self) -> bool: ...
    def all_reduce(
        self,
        name: str,
        array: BufferLike,
        op: OpLike,
        prescale: float | None = None,
        postscale: float | None = None,
    ) -> Work: ...
    def bring(self, call: Call) -> int: ...

@disjoint_base
class Member:
    plane: Plane
    def __init__(
        self,
        pending: Pending,
        plane: Plane,
        fusion_bytes: int,
        staged: bool,
        counts: Counts,
        trouble: Callable[[BaseException], object],
        cache: int,
        host_plane: Plane | None = None,
        for_devices: bool = True,
        on_launch: Callable[[Sequence[Any], bool], object] | None = None,
    ) -> None: ...
    @property
    def number(self) -> int: ...
    @property
    def ranks(self) -> tuple[int, ...]: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def label(self) -> str: ...
    @property
    def pending(self) -> Pending: ...
    @property
    def memory(self) -> Memory: ...
    @property
    def host_plane(self) -> Plane | None: ...
    @property
    def turns(self) -> Turns: ...
    def run(self, operations: list[Ready], then: Callable[[int], object]) -> None: ...
    def fail(self, error: BaseException) -> None: ...
    def close(self, timeout: float) -> None: ...
