from types import TracebackType
from typing import Any

from typing_extensions import disjoint_base

from ncclpy.engine.work import Work

@disjoint_base
class Block:
    def __enter__(self) -> Work[list[Any]]: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

@disjoint_base
class Deadline:
    def __enter__(self) -> None: ...
    def __exit__(self, *exc_info: object) -> None: ...
