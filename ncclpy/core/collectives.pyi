from ncclpy.core.creation import Creation
from ncclpy.core.types import BufferLike, OpLike, StreamLike

class Collectives(Creation):
    def all_reduce(
        self,
        send: BufferLike,
        recv: BufferLike | None = ...,
        op: OpLike = ...,
        *,
        stream: StreamLike = ...,
        timeout: float | None = ...,
    ) -> None: ...
    def reduce(
        self,
        send: BufferLike,
        recv: BufferLike | None = ...,
        op: OpLike = ...,
        root: int = ...,
        *,
        stream: StreamLike = ...,
        timeout: float | None = ...,
    ) -> None: ...
    def broadcast(
        self,
        send: BufferLike | None,
        recv: BufferLike | None = ...,
        root: int = ...,
        *,
        stream: StreamLike = ...,
        timeout: float | None = ...,
    ) -> None: ...
    def all_gather(
        self,
        send: BufferLike,
        recv: BufferLike | list[BufferLike],
        *,
        stream: StreamLike = ...,
        timeout: float | None = ...,
    ) -> None: ...
    def reduce_scatter(
        self,
        send: BufferLike | list[BufferLike],
        recv: BufferLike,
        op: OpLike = ...,
        *,
        stream: StreamLike = ...,
        timeout: float | None = ...,
    ) -> None: ...
    def all_to_all(
        self,
        send: BufferLike | list[BufferLike],
        recv: BufferLike | list[BufferLike],
        *,
        stream: StreamLike = ...,
        timeout: float | None = ...,
    ) -> None: ...
    def gather(
        self,
        send: BufferLike,
        recv: BufferLike | list[BufferLike] | None = ...,
        root: int = ...,
        *,
        stream: StreamLike = ...,
        timeout: float | None = ...,
    ) -> None: ...
    def scatter(
        self,
        send: BufferLike | list[BufferLike] | None,
        recv: BufferLike | None = ...,
        root: int = ...,
        *,
        stream: StreamLike = ...,
        timeout: float | None = ...,
    ) -> None: ...
    def send(self, buf: BufferLike, peer: int, *, stream: StreamLike = ..., timeout: float | None = ...) -> None: ...
    def recv(self, buf: BufferLike, peer: int, *, stream: StreamLike = ..., timeout: float | None = ...) -> None: ...
