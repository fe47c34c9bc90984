from typing import Any

from typing_extensions import disjoint_base

from ncclpy.coordinator.call import Call
from ncclpy.coordinator.counts import Counts
from ncclpy.coordinator.member import Member
from ncclpy.coordinator.timeline import Timeline
from ncclpy.core.types import BufferLike, OpLike
from ncclpy.engine.work import Work
from ncclpy.process_group.group import ProcessGroup

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
