from collections.abc import Callable, Sequence
from typing import Any

from typing_extensions import disjoint_base

from ncclpy.coordinator.call import Memory
from ncclpy.coordinator.carriers import Plane
from ncclpy.coordinator.counts import Counts
from ncclpy.coordinator.pending import Pending
from ncclpy.coordinator.plan import Ready
from ncclpy.coordinator.turns import Turns

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
