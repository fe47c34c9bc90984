from collections.abc import Sequence
from typing import Any

from typing_extensions import disjoint_base

from ncclpy.coordinator.brought import Brought
from ncclpy.coordinator.carriers import Plane
from ncclpy.coordinator.signature import Signature
from ncclpy.coordinator.slots import Carried
from ncclpy.core.types import OpLike
from ncclpy.engine.work import Work

@disjoint_base
class Call:
    names: tuple[str, ...]
    key: bytes
    parts: list[Brought]
    fixed: bytes
    own: bytes
    signatures: tuple[Signature, ...]
    joinable: bool
    @property
    def work(self) -> Work: ...
    def begin(self, part: Brought, signature: Signature) -> None: ...
    def fail(self, error: BaseException) -> None: ...
    def withdraw(self, error: BaseException) -> None: ...
    def launch(self, plane: Plane, owns: Sequence[bytes], absent: int) -> Carried | list[Carried] | None: ...

@disjoint_base
class Memory:
    def __init__(self, most: int) -> None: ...

class AllReduce(Call):
    def __init__(
        self,
        names: str | tuple[str, ...],
        arrays: Any,
        op: OpLike,
        device: int,
        size: int,
        memory: Memory,
        prescale: float | None = None,
        postscale: float | None = None,
    ) -> None: ...
