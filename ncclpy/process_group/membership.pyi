from collections.abc import Iterable
from typing import Any, Literal

from typing_extensions import Self

from ncclpy.bootstrap import Store
from ncclpy.core.arguments.config import Config
from ncclpy.peers.standing import RankState
from ncclpy.process_group.decision import Recovery
from ncclpy.process_group.lifecycle import Lifecycle
from ncclpy.types import DeviceLike

class Membership(Lifecycle):
    def connect(self, peers: Iterable[int] | None = None, timeout: float | None = None) -> None: ...
    def state(self, timeout: float | None = 1.0) -> tuple[RankState, ...]: ...
    def reconfigure_handle(self) -> str: ...
    def reconfigure(self, handles: Iterable[str], *, uuid: str | int, timeout: float | None = None) -> None: ...
    def recover(self, timeout: float | None, min_size: int = 1) -> Recovery: ...
    def admit(self, timeout: float | None = None) -> tuple[int, ...]: ...
    @classmethod
    def join(
        cls,
        store: Store | Any,
        name: str = "default",
        *,
        timeout: float | None = 600.0,
        device: DeviceLike = None,
        config: Config | None = None,
        on_error: Literal["abort", "exit", "exit_now", "report"] = "abort",
        check: Literal["off", "first", "always"] = "off",
        check_nan: bool = False,
        high_priority: bool = False,
        timing: bool = False,
    ) -> Self: ...
