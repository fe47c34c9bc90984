from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from typing_extensions import disjoint_base

from ncclpy.coordinator.backends import DataPlane
from ncclpy.coordinator.data_plane import LaunchQueue
from ncclpy.coordinator.plan import Call, Pending, Ready, RememberedCalls
from ncclpy.coordinator.timeline import Timeline
from ncclpy.engine.work import Work
from ncclpy.process_group.group import ProcessGroup
from ncclpy.types import OpLike

_T = TypeVar("_T")

@disjoint_base
class OperationStats:
    @property
    def operations(self) -> dict[str, int]: ...
    def add(self, what: str, number: int = 1) -> int: ...
    def as_dict(self) -> dict[str, Any]: ...

@disjoint_base
class SubmitGate:
    shut: bool
    timeline: Timeline | None

@disjoint_base
class Submitter:
    def __init__(
        self,
        session: Any,
        member: ProcessSetWorker,
        gate: SubmitGate,
        control: Any,
        counts: OperationStats,
    ) -> None: ...
    @property
    def member(self) -> ProcessSetWorker: ...
    @property
    def device(self) -> int: ...
    def follow(self, group: ProcessGroup, number: int) -> None: ...
    def is_outdated(self) -> bool: ...
    def all_reduce(
        self,
        name: str,
        array: _T,
        op: OpLike,
        prescale: float | None = None,
        postscale: float | None = None,
    ) -> Work[_T]: ...
    def bring(self, call: Call) -> int: ...

@disjoint_base
class ProcessSetWorker:
    plane: DataPlane
    on_launch: Callable[[Sequence[Any], bool], object] | None
    closing: bool
    def __init__(
        self,
        pending: Pending,
        plane: DataPlane,
        fusion_bytes: int,
        staged: bool,
        counts: OperationStats,
        on_error: Callable[[BaseException], object],
        cache: int,
        host_plane: DataPlane | None = None,
        accepts_device_arrays: bool = True,
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
    def remembered(self) -> RememberedCalls: ...
    @property
    def host_plane(self) -> DataPlane | None: ...
    @property
    def launch_queue(self) -> LaunchQueue: ...
    def next_name(self, kind: str) -> str: ...
    def return_name(self, kind: str, name: str) -> None: ...
    def run(self, operations: list[Ready], then: Callable[[int], object]) -> None: ...
    def fail(self, error: BaseException) -> None: ...
    def close(self, timeout: float) -> None: ...
