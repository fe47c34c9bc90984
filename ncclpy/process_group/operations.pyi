from collections.abc import Sequence
from typing import TypeVar, overload

from typing_extensions import disjoint_base

from ncclpy.engine.work import Work
from ncclpy.types import BufferLike, OpLike, StreamLike

# The array that receives.
_T = TypeVar("_T")

@disjoint_base
class Operations:
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def device(self) -> int: ...
    @overload
    def all_reduce(
        self,
        send: _T,
        recv: None = None,
        op: OpLike = ...,
        *,
        stream: StreamLike = None,
        timeout: float | None = None,
    ) -> Work[_T]: ...
    @overload
    def all_reduce(
        self,
        send: BufferLike,
        recv: _T,
        op: OpLike = ...,
        *,
        stream: StreamLike = None,
        timeout: float | None = None,
    ) -> Work[_T]: ...
    @overload
    def broadcast(
        self,
        send: _T,
        recv: None = None,
        root: int = 0,
        *,
        stream: StreamLike = None,
        timeout: float | None = None,
    ) -> Work[_T]: ...
    @overload
    def broadcast(
        self,
        send: BufferLike | None,
        recv: _T,
        root: int = 0,
        *,
        stream: StreamLike = None,
        timeout: float | None = None,
    ) -> Work[_T]: ...
    @overload
    def reduce(
        self,
        send: _T,
        recv: None = None,
        op: OpLike = ...,
        root: int = 0,
        *,
        stream: StreamLike = None,
        timeout: float | None = None,
    ) -> Work[_T | None]: ...
    @overload
    def reduce(
        self,
        send: BufferLike,
        recv: _T,
        op: OpLike = ...,
        root: int = 0,
        *,
        stream: StreamLike = None,
        timeout: float | None = None,
    ) -> Work[_T | None]: ...
    def all_gather(
        self,
        send: BufferLike,
        recv: _T,
        counts: Sequence[int] | None = None,
        *,
        stream: StreamLike = None,
        timeout: float | None = None,
    ) -> Work[_T]: ...
    def reduce_scatter(
        self,
        send: BufferLike | list[BufferLike],
        recv: _T,
        op: OpLike = ...,
        counts: Sequence[int] | None = None,
        *,
        stream: StreamLike = None,
        timeout: float | None = None,
    ) -> Work[_T]: ...
    def all_to_all(
        self,
        send: BufferLike | list[BufferLike],
        recv: _T,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
        *,
        stream: StreamLike = None,
        timeout: float | None = None,
    ) -> Work[_T]: ...
    def gather(
        self,
        send: BufferLike,
        recv: _T | None = None,
        root: int = 0,
        *,
        stream: StreamLike = None,
        timeout: float | None = None,
    ) -> Work[_T | None]: ...
    def scatter(
        self,
        send: BufferLike | list[BufferLike] | None,
        recv: _T = ...,
        root: int = 0,
        *,
        stream: StreamLike = None,
        timeout: float | None = None,
    ) -> Work[_T]: ...
    def send(
        self,
        buf: BufferLike | None,
        peer: int | None,
        tag: int = 0,
        *,
        stream: StreamLike = None,
        timeout: float | None = None,
    ) -> Work[None]: ...
    def recv(
        self,
        buf: _T,
        peer: int | None,
        tag: int = 0,
        *,
        stream: StreamLike = None,
        timeout: float | None = None,
    ) -> Work[_T]: ...
    def sendrecv(
        self,
        send: BufferLike | None,
        dest: int | None,
        recv: _T,
        source: int | None,
        *,
        stream: StreamLike = None,
        timeout: float | None = None,
    ) -> Work[_T]: ...
    def barrier(self, *, stream: StreamLike = None, timeout: float | None = None) -> Work[None]: ...
