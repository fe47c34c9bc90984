from collections.abc import Callable, Iterable
from typing import Any

from ncclpy.core.types import BufferLike, OpLike, StreamLike
from ncclpy.engine.work import Work
from ncclpy.process_group.block import Block, Deadline
from ncclpy.process_group.completion import Completion
from ncclpy.process_group.lifecycle import Lifecycle

class ProcessGroup(Lifecycle):
    def barrier(self, *, producer: StreamLike = None, timeout: float | None = None) -> Work: ...
    def coalescing(self, timeout: float | None = None) -> Block: ...
    def all_reduce_coalesced(
        self,
        arrays: Iterable[BufferLike],
        op: OpLike = ...,
        *,
        producer: StreamLike = None,
        timeout: float | None = None,
    ) -> Work: ...
    def all_gather_coalesced(
        self,
        sends: Iterable[BufferLike],
        recvs: Iterable[BufferLike],
        *,
        producer: StreamLike = None,
        timeout: float | None = None,
    ) -> Work: ...
    def reduce_scatter_coalesced(
        self,
        sends: Iterable[BufferLike],
        recvs: Iterable[BufferLike],
        op: OpLike = ...,
        *,
        producer: StreamLike = None,
        timeout: float | None = None,
    ) -> Work: ...
    def all_reduce_sparse(
        self, indices: Any, values: Any, *, producer: StreamLike = None, timeout: float | None = None
    ) -> Work: ...
    def deadline(self, seconds: float) -> Deadline: ...
    def disconnect(self, peers: Iterable[int] | None = None, timeout: float | None = None) -> None: ...
    def on_completion(self, hook: Callable[[Completion], object]) -> None: ...
    def on_abort(self, hook: Callable[[BaseException], object]) -> None: ...
    def health_check(self, timeout: float | None = None) -> None: ...
    def new_group(self, ranks: Iterable[int]) -> ProcessGroup | None: ...
    def split(self, color: int | None, key: int = 0) -> ProcessGroup | None: ...
