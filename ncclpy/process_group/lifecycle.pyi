from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal

from typing_extensions import Self, disjoint_base

from ncclpy.bootstrap import Store
from ncclpy.core.arguments.config import Config
from ncclpy.core.communicator import Communicator
from ncclpy.errors import NcclError
from ncclpy.process_group.operations import BlockOwner
from ncclpy.types import DeviceLike

@disjoint_base
class Lifecycle(BlockOwner):
    translate: Callable[[BaseException], BaseException] | None
    def __init__(
        self,
        store: Store | Any,
        rank: int,
        size: int,
        *,
        device: DeviceLike = None,
        name: str = "default",
        timeout: float | None = 600.0,
        config: Config | None = None,
        on_error: Literal["abort", "exit", "exit_now", "report"] = "abort",
        check: Literal["off", "first", "always"] = "off",
        check_nan: bool = False,
        high_priority: bool = False,
        timing: bool = False,
    ) -> None: ...
    def _come_from(self, before: Callable[[int], str]) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def store(self) -> Store: ...
    @property
    def timeout(self) -> float: ...
    @property
    def seq(self) -> int: ...
    @property
    def error(self) -> BaseException | None: ...
    @property
    def communicator(self) -> Communicator | None: ...
    def explain(self, error: NcclError) -> None: ...
    def ask_after_stop(self) -> None: ...
    def wait_for_pending_works(self, timeout: float | None = None) -> None: ...
    def abort(self, reason: object = "abort() was called") -> None: ...
    def close(self, timeout: float | None = None) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...
