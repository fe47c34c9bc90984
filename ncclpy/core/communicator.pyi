from collections.abc import Sequence

from ncclpy.core.lifecycle import Lifecycle
from ncclpy.core.window import CustomOp, Registration, Window
from ncclpy.types import BufferLike, DataTypeLike, OpLike, StreamLike

class Communicator(Lifecycle):
    @property
    def size(self) -> int: ...
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
        counts: Sequence[int] | None = ...,
        *,
        stream: StreamLike = ...,
        timeout: float | None = ...,
    ) -> None: ...
    def reduce_scatter(
        self,
        send: BufferLike | list[BufferLike],
        recv: BufferLike,
        op: OpLike = ...,
        counts: Sequence[int] | None = ...,
        *,
        stream: StreamLike = ...,
        timeout: float | None = ...,
    ) -> None: ...
    def all_to_all(
        self,
        send: BufferLike | list[BufferLike],
        recv: BufferLike | list[BufferLike],
        send_counts: Sequence[int] | None = ...,
        recv_counts: Sequence[int] | None = ...,
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
    def send(
        self, buf: BufferLike | None, peer: int | None, *, stream: StreamLike = ..., timeout: float | None = ...
    ) -> None: ...
    def recv(
        self, buf: BufferLike | None, peer: int | None, *, stream: StreamLike = ..., timeout: float | None = ...
    ) -> None: ...
    def sendrecv(
        self,
        send: BufferLike | None,
        dest: int | None,
        recv: BufferLike | None,
        source: int | None,
        *,
        stream: StreamLike = ...,
        timeout: float | None = ...,
    ) -> None: ...
    def barrier(self, *, stream: StreamLike = ..., timeout: float | None = ...) -> None: ...
    def put_signal(
        self,
        send: BufferLike,
        window: Window,
        peer: int,
        offset: int = ...,
        signal: int = ...,
        *,
        stream: StreamLike = ...,
        timeout: float | None = ...,
    ) -> None: ...
    def signal(
        self, peer: int, signal: int = ..., *, stream: StreamLike = ..., timeout: float | None = ...
    ) -> None: ...
    def wait_signal(
        self,
        peers: int | Sequence[int],
        signal: int = ...,
        count: int = ...,
        *,
        stream: StreamLike = ...,
        timeout: float | None = ...,
    ) -> None: ...
    def pre_mul_sum(self, scalar: float | BufferLike, dtype: DataTypeLike) -> CustomOp: ...
    def register(self, buf: BufferLike) -> Registration: ...
    def window(self, buf: BufferLike, *, symmetric: bool = ..., strict_ordering: bool = ...) -> Window: ...
