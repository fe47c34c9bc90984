from typing import Any

from numpy.typing import NDArray
from typing_extensions import disjoint_base

from ncclpy.types import BufferLike, DataType, DataTypeLike, DeviceLike

@disjoint_base
class Buffer:
    def __init__(
        self,
        pointer: int,
        count: int,
        dtype: DataTypeLike,
        *,
        device: DeviceLike = ...,
        owner: object = ...,
    ) -> None: ...
    @staticmethod
    def of(array: BufferLike) -> Buffer: ...
    @property
    def pointer(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def dtype(self) -> DataType: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def device(self) -> int | None: ...
    @property
    def owner(self) -> object: ...
    def __array__(self, dtype: Any = ..., copy: bool | None = ...) -> NDArray[Any]: ...
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...
    def __dlpack__(
        self,
        *,
        stream: int | None = ...,
        max_version: tuple[int, int] | None = ...,
        dl_device: tuple[int, int] | None = ...,
        copy: bool | None = ...,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
