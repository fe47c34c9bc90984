from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Literal, TypeVar

from typing_extensions import Self, disjoint_base

from ncclpy.bootstrap import Store
from ncclpy.core.arguments.config import Config
from ncclpy.core.communicator import Communicator
from ncclpy.engine.work import Work
from ncclpy.errors import NcclError
from ncclpy.peers.rank_state import RankState
from ncclpy.process_group.blocks import Block, Deadline
from ncclpy.process_group.operations import Operations
from ncclpy.process_group.options import Completion
from ncclpy.process_group.recovery import Recovery
from ncclpy.types import BufferLike, DeviceLike, OpLike, StreamLike

# The arrays that receive.
_T = TypeVar("_T")
_Indices = TypeVar("_Indices")
_Values = TypeVar("_Values")

@disjoint_base
class ProcessGroup(Operations):
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
    def abort(self, reason: object = None, *, timeout: float | None = None) -> None: ...
    def close(self, timeout: float | None = None) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...
    def all_reduce_coalesced(
        self,
        arrays: Iterable[_T],
        op: OpLike = ...,
        *,
        stream: StreamLike = None,
        timeout: float | None = None,
    ) -> Work[list[_T]]: ...
    def all_gather_coalesced(
        self,
        sends: Iterable[BufferLike],
        recvs: Iterable[_T],
        *,
        stream: StreamLike = None,
        timeout: float | None = None,
    ) -> Work[list[_T]]: ...
    def reduce_scatter_coalesced(
        self,
        sends: Iterable[BufferLike],
        recvs: Iterable[_T],
        op: OpLike = ...,
        *,
        stream: StreamLike = None,
        timeout: float | None = None,
    ) -> Work[list[_T]]: ...
    def coalescing(self, timeout: float | None = None) -> Block: ...
    def all_reduce_sparse(
        self,
        indices: _Indices,
        values: _Values,
        *,
        shape: Sequence[int] | None = None,
        stream: StreamLike = None,
        timeout: float | None = None,
    ) -> Work[tuple[_Indices, _Values]]: ...
    def deadline(self, seconds: float) -> Deadline: ...
    def disconnect(self, peers: Iterable[int] | None = None, timeout: float | None = None) -> None: ...
    def on_completion(self, hook: Callable[[Completion], object]) -> None: ...
    def on_abort(self, hook: Callable[[BaseException], object]) -> None: ...
    def health_check(self, timeout: float | None = None) -> None: ...
    def new_group(self, ranks: Iterable[int]) -> ProcessGroup | None: ...
    def split(self, color: int | None, key: int = 0) -> ProcessGroup | None: ...
    def connect(self, peers: Iterable[int] | None = None, timeout: float | None = None) -> None: ...
    def state(self, timeout: float | None = 1.0) -> tuple[RankState, ...]: ...
    def reconfigure_handle(self) -> str: ...
    def reconfigure(self, handles: Iterable[str], *, uuid: str | int, timeout: float | None = None) -> None: ...
    def recover(self, timeout: float | None, min_size: int = 1) -> Recovery: ...
    def admit(self, timeout: float | None = None) -> tuple[int, ...]: ...
    @classmethod
    def from_env(
        cls,
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
    ) -> Self: ...
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
    def bring_to_commit(self, value: object, seconds: float) -> list[list[int]]: ...
