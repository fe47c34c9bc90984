from typing_extensions import disjoint_base

from ncclpy.core.types import BufferLike, DataType, DataTypeLike, DeviceLike

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
