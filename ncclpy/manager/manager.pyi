from collections.abc import Callable, Hashable
from types import TracebackType
from typing import Any

from ncclpy.core.config import Config
from ncclpy.core.types import ReduceOp
from ncclpy.engine.work import Work

class Manager:
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
    ) -> None: ...
    @staticmethod
    def default() -> Manager: ...
    @staticmethod
    def generate_communicator_key() -> bytes: ...
    def all_reduce(
        self,
        key: Hashable,
        send: object,
        recv: object = None,
        op: ReduceOp | str = ...,
        *,
        device: object = None,
        num_local: int,
        num_global: int | None = None,
        communicator_key: bytes | None = None,
        global_rank: int | None = None,
        producer: object = None,
        on_done: Callable[[Work], object] | None = None,
        timeout: float | None = None,
    ) -> Work: ...
    def all_gather(
        self,
        key: Hashable,
        send: object,
        recv: object,
        *,
        device: object = None,
        num_local: int,
        num_global: int | None = None,
        communicator_key: bytes | None = None,
        global_rank: int | None = None,
        producer: object = None,
        on_done: Callable[[Work], object] | None = None,
        timeout: float | None = None,
    ) -> Work: ...
    def reduce_scatter(
        self,
        key: Hashable,
        send: object,
        recv: object,
        op: ReduceOp | str = ...,
        *,
        device: object = None,
        num_local: int,
        num_global: int | None = None,
        communicator_key: bytes | None = None,
        global_rank: int | None = None,
        producer: object = None,
        on_done: Callable[[Work], object] | None = None,
        timeout: float | None = None,
    ) -> Work: ...
    def all_to_all(
        self,
        key: Hashable,
        send: object,
        recv: object,
        *,
        device: object = None,
        num_local: int,
        num_global: int | None = None,
        communicator_key: bytes | None = None,
        global_rank: int | None = None,
        producer: object = None,
        on_done: Callable[[Work], object] | None = None,
        timeout: float | None = None,
    ) -> Work: ...
    def broadcast_send(
        self,
        key: Hashable,
        send: object,
        recv: object = None,
        *,
        device: object = None,
        num_local: int,
        num_global: int | None = None,
        communicator_key: bytes | None = None,
        global_rank: int | None = None,
        root: int | None = None,
        producer: object = None,
        on_done: Callable[[Work], object] | None = None,
        timeout: float | None = None,
    ) -> Work: ...
    def broadcast_recv(
        self,
        key: Hashable,
        recv: object,
        *,
        device: object = None,
        num_local: int,
        num_global: int | None = None,
        communicator_key: bytes | None = None,
        global_rank: int | None = None,
        root: int | None = None,
        producer: object = None,
        on_done: Callable[[Work], object] | None = None,
        timeout: float | None = None,
    ) -> Work: ...
    def reduce_send(
        self,
        key: Hashable,
        send: object,
        op: ReduceOp | str = ...,
        *,
        device: object = None,
        num_local: int,
        num_global: int | None = None,
        communicator_key: bytes | None = None,
        global_rank: int | None = None,
        root: int | None = None,
        producer: object = None,
        on_done: Callable[[Work], object] | None = None,
        timeout: float | None = None,
    ) -> Work: ...
    def reduce_recv(
        self,
        key: Hashable,
        send: object,
        recv: object = None,
        op: ReduceOp | str = ...,
        *,
        device: object = None,
        num_local: int,
        num_global: int | None = None,
        communicator_key: bytes | None = None,
        global_rank: int | None = None,
        root: int | None = None,
        producer: object = None,
        on_done: Callable[[Work], object] | None = None,
        timeout: float | None = None,
    ) -> Work: ...
    def gather_send(
        self,
        key: Hashable,
        send: object,
        *,
        device: object = None,
        num_local: int,
        num_global: int | None = None,
        communicator_key: bytes | None = None,
        global_rank: int | None = None,
        root: int | None = None,
        producer: object = None,
        on_done: Callable[[Work], object] | None = None,
        timeout: float | None = None,
    ) -> Work: ...
    def gather_recv(
        self,
        key: Hashable,
        send: object,
        recv: object,
        *,
        device: object = None,
        num_local: int,
        num_global: int | None = None,
        communicator_key: bytes | None = None,
        global_rank: int | None = None,
        root: int | None = None,
        producer: object = None,
        on_done: Callable[[Work], object] | None = None,
        timeout: float | None = None,
    ) -> Work: ...
    def scatter_send(
        self,
        key: Hashable,
        send: object,
        recv: object,
        *,
        device: object = None,
        num_local: int,
        num_global: int | None = None,
        communicator_key: bytes | None = None,
        global_rank: int | None = None,
        root: int | None = None,
        producer: object = None,
        on_done: Callable[[Work], object] | None = None,
        timeout: float | None = None,
    ) -> Work: ...
    def scatter_recv(
        self,
        key: Hashable,
        recv: object,
        *,
        device: object = None,
        num_local: int,
        num_global: int | None = None,
        communicator_key: bytes | None = None,
        global_rank: int | None = None,
        root: int | None = None,
        producer: object = None,
        on_done: Callable[[Work], object] | None = None,
        timeout: float | None = None,
    ) -> Work: ...
    def signal_multi_node_ready(self, key: Hashable) -> None: ...
    def pending(self) -> list[dict[str, Any]]: ...
    def stats(self) -> dict[str, int]: ...
    def abort(self, reason: object = "abort() was called") -> None: ...
    def reset(self, timeout: float | None = None) -> None: ...
    def close(self, timeout: float | None = 60.0) -> None: ...
    def __enter__(self) -> Manager: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...
