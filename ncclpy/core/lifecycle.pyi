from collections.abc import Iterable
from types import TracebackType
from typing import Any, NoReturn

from typing_extensions import Self

from ncclpy.core.arguments.config import Config
from ncclpy.core.handles.handle import Handle
from ncclpy.types import DeviceLike, Result, UniqueId

def get_unique_id() -> UniqueId: ...
def device_of(place: Any) -> int: ...

class Lifecycle(Handle):
    # Users make one with `init` and the other class methods.
    def __init__(self, *args: NoReturn, **kwargs: NoReturn) -> None: ...
    @classmethod
    def init(
        cls,
        nranks: int,
        rank: int,
        unique_id: UniqueId | bytes,
        *,
        device: DeviceLike = ...,
        config: Config | None = ...,
        timeout: float | None = ...,
        abortable: bool | None = ...,
    ) -> Self: ...
    @classmethod
    def from_env(
        cls,
        *,
        device: DeviceLike = ...,
        config: Config | None = ...,
        timeout: float | None = ...,
        abortable: bool | None = ...,
    ) -> Self: ...
    @classmethod
    def from_mpi(
        cls,
        comm: Any,
        device: int | None = ...,
        *,
        config: Config | None = ...,
        timeout: float | None = ...,
        abortable: bool | None = ...,
    ) -> Self: ...
    @classmethod
    def init_all(
        cls,
        devices: Iterable[int] | None = ...,
        *,
        config: Config | None = ...,
        timeout: float | None = ...,
        abortable: bool | None = ...,
    ) -> list[Self]: ...
    @classmethod
    def from_handle(cls, pointer: int) -> Self: ...
    def split(
        self,
        color: int | None,
        key: int = ...,
        *,
        config: Config | None = ...,
        timeout: float | None = ...,
        abortable: bool | None = ...,
    ) -> Self | None: ...
    def shrink(
        self,
        exclude: Iterable[int],
        *,
        abort: bool = ...,
        config: Config | None = ...,
        timeout: float | None = ...,
        abortable: bool | None = ...,
    ) -> Self: ...
    def grow(
        self,
        nranks: int,
        unique_id: UniqueId | bytes | None = ...,
        *,
        config: Config | None = ...,
        timeout: float | None = ...,
        abortable: bool | None = ...,
    ) -> Self: ...
    @classmethod
    def join(
        cls,
        nranks: int,
        rank: int,
        unique_id: UniqueId | bytes,
        *,
        device: DeviceLike = ...,
        config: Config | None = ...,
        timeout: float | None = ...,
        abortable: bool | None = ...,
    ) -> Self: ...
    def grow_id(self) -> UniqueId: ...
    def async_error(self) -> Result | int: ...
    def is_ready(self) -> bool: ...
    def wait_ready(self, timeout: float | None = ...) -> Self: ...
    async def ready(self, timeout: float | None = ...) -> Self: ...
    def finalize(self) -> None: ...
    def revoke(self) -> None: ...
    def suspend(self) -> None: ...
    def resume(self) -> None: ...
    def memory_stats(self) -> dict[str, int]: ...
    def abort(self, reason: object = ..., *, timeout: float | None = ...) -> None: ...
    def close(self, timeout: float | None = ...) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...
    @property
    def handle(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    @property
    def timeout(self) -> float | None: ...
