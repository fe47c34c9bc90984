from collections.abc import Iterable

from typing_extensions import Self

from ncclpy.core.config import Config
from ncclpy.core.lifecycle import Lifecycle
from ncclpy.core.types import DeviceLike, UniqueId

def get_unique_id() -> UniqueId: ...

class Creation(Lifecycle):
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
