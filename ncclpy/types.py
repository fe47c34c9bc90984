"""NCCL's enums and the unique id, with conversions; and `Need`, a typed reference to a higher layer's function.

A data type or an operator may be given as an enum member, its number or its name; a data type also as a dtype.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable
from typing import Any, ClassVar, Generic, ParamSpec, TypeAlias, TypeVar

import numpy as np

__all__ = ["AVG", "MAX", "MIN", "PROD", "SUM", "DataType", "ReduceOp", "Result", "UniqueId"]

# The types of arguments, for type checkers. They are Any because the objects belong to frameworks that ncclpy does not
# import; the docstring of `Communicator` says in words what is accepted.
BufferLike: TypeAlias = Any
StreamLike: TypeAlias = Any
DeviceLike: TypeAlias = Any
DataTypeLike: TypeAlias = Any
OpLike: TypeAlias = Any

_Parameters = ParamSpec("_Parameters")
_Returned = TypeVar("_Returned")


class Need(Generic[_Parameters, _Returned]):
    """Call a function of a higher layer by a name.

    A module may import only lower layers. If it needs a function of a higher layer, it declares a `Need` with a name
    and a type, and calls the `Need`. A table in ``ncclpy/__init__.py``, which may import every layer, has the function
    for each name.
    """

    #: Finds a function by the name of the need, and imports its module at the first call; set by `ncclpy/__init__.py`.
    find: ClassVar[Callable[[str], Callable[..., Any]]]

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Returned:
        found: _Returned = Need.find(self.name)(*args, **kwargs)
        return found


class Result(enum.IntEnum):
    """Name the codes of `ncclResult_t`; a code that a newer NCCL adds stays a plain int."""

    SUCCESS = 0
    UNHANDLED_CUDA_ERROR = 1
    SYSTEM_ERROR = 2
    INTERNAL_ERROR = 3
    INVALID_ARGUMENT = 4
    INVALID_USAGE = 5
    REMOTE_ERROR = 6
    IN_PROGRESS = 7
    TIMEOUT = 8


class DataType(enum.IntEnum):
    """Name the values of `ncclDataType_t`."""

    INT8 = 0
    UINT8 = 1
    INT32 = 2
    UINT32 = 3
    INT64 = 4
    UINT64 = 5
    FLOAT16 = 6
    FLOAT32 = 7
    FLOAT64 = 8
    BFLOAT16 = 9
    FLOAT8E4M3 = 10
    FLOAT8E5M2 = 11

    @property
    def itemsize(self) -> int:
        """Return the size of one element in bytes."""
        return _ITEMSIZE[self]


class ReduceOp(enum.IntEnum):
    """Name the built-in values of `ncclRedOp_t`."""

    SUM = 0
    PROD = 1
    MAX = 2
    MIN = 3
    AVG = 4


SUM = ReduceOp.SUM
PROD = ReduceOp.PROD
MAX = ReduceOp.MAX
MIN = ReduceOp.MIN
AVG = ReduceOp.AVG

_ITEMSIZE = (1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1)

# Every name of a type: NCCL's, numpy's, and those of ml_dtypes and torch.
_DTYPE_NAMES = {member.name.lower(): member for member in DataType} | {
    "float8_e4m3fn": DataType.FLOAT8E4M3,
    "float8_e5m2": DataType.FLOAT8E5M2,
    "char": DataType.INT8,
    "int": DataType.INT32,
    "half": DataType.FLOAT16,
    "float": DataType.FLOAT32,
    "double": DataType.FLOAT64,
}
_OP_NAMES = {member.name.lower(): member for member in ReduceOp} | {"average": ReduceOp.AVG}


def as_datatype(value) -> DataType:
    """Return the `DataType` that `value` stands for: a member, its number, a name, or a dtype of numpy or torch.

    Raises
    ------
    TypeError
        If NCCL has no such type.
    """
    if isinstance(value, DataType):
        return value
    if value is None:  # numpy would return float64
        raise TypeError("None is not a data type")
    if isinstance(value, str):
        name = value.lower().removeprefix("torch.")
    elif isinstance(value, int):
        try:
            return DataType(value)
        except ValueError:
            raise TypeError(f"{value} is not an ncclDataType_t; valid values are 0 to {len(DataType) - 1}") from None
    else:
        try:
            name = np.dtype(value).name
        except TypeError:
            name = str(value).removeprefix("torch.")  # torch.float32, for example
    found = _DTYPE_NAMES.get(name)
    if found is None:
        raise TypeError(f"NCCL has no data type {value!r}; it has {', '.join(m.name.lower() for m in DataType)}")
    return found


def as_op(value) -> int:
    """Return the `ncclRedOp_t` number of a member, a name, or a number; refuse a `CustomOp`, which `op_code` reads."""
    if isinstance(value, (int, np.integer)):
        return as_integer(value, "op", 0, MAX_INT)
    if isinstance(value, str):
        found = _OP_NAMES.get(value.lower())
        if found is not None:
            return found
    raise TypeError(
        f"op: {value!r} is not a reduction operator; use sum, prod, max, min, avg or comm.pre_mul_sum(...)"
    )


# The ranges of C's int, and of pointers and handles.
MIN_INT, MAX_INT = -(2**31), 2**31 - 1
MAX_ADDRESS = 2**64 - 1


def as_integer(value, argument: str, lowest: int = MIN_INT, highest: int = MAX_INT) -> int:
    """Return an int within bounds, also for a numpy integer; strings and floats are refused.

    Raises
    ------
    TypeError
        If `value` is no integer; `argument` is its name in the message.
    ValueError
        If `value` lies outside `lowest` to `highest`.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{argument}: expected an int, got {value!r}") from None
    if not lowest <= number <= highest:
        raise ValueError(f"{argument}: expected an int from {lowest} to {highest}, got {number}")
    return number


class UniqueId:
    """Hold an `ncclUniqueId`: 128 opaque bytes by which the ranks of a new communicator find each other.

    One rank makes it with `ncclpy.get_unique_id()` and sends ``bytes(uid)`` to the others by any means.
    """

    SIZE = 128
    __slots__ = ("_data",)

    def __init__(self, data: bytes) -> None:
        try:
            data = bytes(memoryview(data))  # bytes(128) would be 128 zeros
        except TypeError:
            raise TypeError(f"a unique id is made of {self.SIZE} bytes, not of {type(data).__name__}") from None
        if len(data) != self.SIZE:
            raise ValueError(f"a unique id has {self.SIZE} bytes, not {len(data)}")
        self._data = data

    @classmethod
    def from_bytes(cls, data: bytes) -> UniqueId:
        """Return the id that another rank sent as bytes."""
        return cls(data)

    def __bytes__(self) -> bytes:
        return self._data

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UniqueId) and self._data == other._data

    def __hash__(self) -> int:
        return hash(self._data)

    def __repr__(self) -> str:
        return f"UniqueId({self._data[:8].hex()}…)"

    def __reduce__(self):
        return UniqueId, (self._data,)


def as_unique_id(value) -> UniqueId:
    """Return `value` if it is a `UniqueId`, else the `UniqueId` of its 128 bytes."""
    if isinstance(value, UniqueId):
        return value
    if isinstance(value, (bytes, bytearray, memoryview)):
        return UniqueId(bytes(value))
    raise TypeError(f"unique_id: a unique id is an ncclpy.UniqueId or its 128 bytes, not {type(value).__name__}")
