from collections.abc import Hashable
from types import TracebackType
from typing import Any

from typing_extensions import Self, disjoint_base

from ncclpy.core.arguments.config import Config
from ncclpy.manager.participants import Participants

@disjoint_base
class Manager(Participants):
    def __init__(
        self,
        *,
        timeout: float | None = None,
        warn_after: float | None = 60.0,
        fail_fast: bool = False,
        max_communicators: int | None = None,
        high_priority: bool = False,
        timing: bool = False,
        config: Config | None = None,
        store: Any = None,
    ) -> None: ...
    @classmethod
    def from_env(
        cls,
        *,
        timeout: float | None = None,
        warn_after: float | None = 60.0,
        fail_fast: bool = False,
        max_communicators: int | None = None,
        high_priority: bool = False,
        timing: bool = False,
        config: Config | None = None,
    ) -> Self: ...
    @staticmethod
    def default() -> Manager: ...
    @staticmethod
    def generate_communicator_key() -> bytes: ...
    def signal_multi_node_ready(self, key: Hashable) -> None: ...
    def pending(self) -> list[dict[str, Any]]: ...
    def stats(self) -> dict[str, int]: ...
    def abort(self, reason: object = None, *, timeout: float | None = None) -> None: ...
    def reset(self, timeout: float | None = None) -> None: ...
    def close(self, timeout: float | None = None) -> None: ...
    def __enter__(self) -> Manager: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...
