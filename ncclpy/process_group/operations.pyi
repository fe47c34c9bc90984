from collections.abc import Sequence
from types import TracebackType

from typing_extensions import disjoint_base

from ncclpy.engine.work import Work
from ncclpy.types import BufferLike, OpLike, StreamLike

@disjoint_base
class Operations:
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def device(self) -> int: ...
    def all_reduce(
        self,
        send: BufferLike,
        recv: BufferLike | None = None,
        op: OpLike = ...,
        *,
        stream: StreamLike = None,
        timeout: float | None = None,
    ) -> Work: ...
    def broadcast(
        self,
        send: BufferLike | None,
        recv: BufferLike | None = None,
        root: int = 0,
        *,
        stream: StreamLike = None,
        timeout: float | None = None,
    ) -> Work: ...
    def reduce(
        self,
        send: BufferLike,
        recv: BufferLike | None = None,
        op: OpLike = ...,
        root: int = 0,
        *,
        stream: StreamLike = None,
        timeout: float | None = None,
    ) -> Work: ...
    def all_gather(
        self,
        send: BufferLike,
        recv: BufferLike | list[BufferLike],
        counts: Sequence[int] | None = None,
        *,
        stream: StreamLike = None,
        timeout: float | None = None,
    ) -> Work: ...
    def reduce_scatter(
        self,
        send: BufferLike | list[BufferLike],
        recv: BufferLike,
        op: OpLike = ...,
        counts: Sequence[int] | None = None,
        *,
        stream: StreamLike = None,
        timeout: float | None = None,
    ) -> Work: ...
    def all_to_all(
        self,
        send: BufferLike | list[BufferLike],
        recv: BufferLike | list[BufferLike],
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
        *,
        stream: StreamLike = None,
        timeout: float | None = None,
    ) -> Work: ...
    def gather(
        self,
        send: BufferLike,
        recv: BufferLike | list[BufferLike] | None = None,
        root: int = 0,
        *,
        stream: StreamLike = None,
        timeout: float | None = None,
    ) -> Work: ...
    def scatter(
        self,
        send: BufferLike | list[BufferLike] | None,
        recv: BufferLike | None = None,
        root: int = 0,
        *,
        stream: StreamLike = None,
        timeout: float | None = None,
    ) -> Work: ...
    def send(
        self,
        buf: BufferLike,
        peer: int | None,
        tag: int = 0,
        *,
        stream: StreamLike = None,
        timeout: float | None = None,
    ) -> Work: ...
    def recv(
        self,
        buf: BufferLike,
        peer: int | None,
        tag: int = 0,
        *,
        stream: StreamLike = None,
        timeout: float | None = None,
    ) -> Work: ...
    def sendrecv(
        self,
        send: BufferLike,
        dest: int | None,
        recv: BufferLike,
        source: int | None,
        *,
        stream: StreamLike = None,
        timeout: float | None = None,
    ) -> Work: ...
    def barrier(self, *, stream: StreamLike = None, timeout: float | None = None) -> Work: ...

@disjoint_base
class Block:
    def __enter__(self) -> Work: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

@disjoint_base
class Deadline:
    def __enter__(self) -> None: ...
    def __exit__(self, *exc_info: object) -> None: ...
