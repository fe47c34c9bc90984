"""MPI, imported at its first use; the data types that MPI reduces, and conversions of the others to such types."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ncclpy.types import DataType, ReduceOp

__all__ = ["MPI", "narrowed", "operator_of", "plain", "type_of", "widened"]


class _LazyMpi:
    """The names of mpi4py.MPI: the first use of a name imports the module, which initialises MPI."""

    def __getattr__(self, name: str) -> Any:
        from mpi4py import MPI

        value = getattr(MPI, name)
        setattr(self, name, value)
        return value


MPI: Any = _LazyMpi()

#: The types of numpy and of MPI for data types that MPI itself reduces.
_PLAIN: dict[int, tuple[Any, str]] = {
    DataType.INT8: (np.int8, "INT8_T"),
    DataType.UINT8: (np.uint8, "UINT8_T"),
    DataType.INT32: (np.int32, "INT32_T"),
    DataType.UINT32: (np.uint32, "UINT32_T"),
    DataType.INT64: (np.int64, "INT64_T"),
    DataType.UINT64: (np.uint64, "UINT64_T"),
    DataType.FLOAT32: (np.float32, "FLOAT"),
    DataType.FLOAT64: (np.float64, "DOUBLE"),
}
#: MPI has no average: it makes a sum, which `_average` in `plane` divides afterwards.
_OPERATORS = {
    ReduceOp.SUM: "SUM", ReduceOp.AVG: "SUM", ReduceOp.PROD: "PROD", ReduceOp.MIN: "MIN", ReduceOp.MAX: "MAX",
}  # fmt: skip


def plain(datatype: int) -> Any:
    """Return numpy's type for a data type that MPI itself reduces, None for others."""
    found = _PLAIN.get(datatype)
    return None if found is None else np.dtype(found[0])


def type_of(datatype: int) -> Any:
    """Return MPI's type for a reduction: for short floats that of float32."""
    return getattr(MPI, _PLAIN.get(datatype, _PLAIN[DataType.FLOAT32])[1])


def operator_of(op: int) -> Any:
    """Return MPI's operator."""
    return getattr(MPI, _OPERATORS[ReduceOp(op)])


# Floats shorter than float32 are reduced as float32: not every implementation of MPI has types for them, and this way
# the sum over several ranks is rounded once.


def widened(data: memoryview, datatype: int) -> np.ndarray:
    """Return short floats as float32."""
    if datatype == DataType.FLOAT16:
        return np.frombuffer(data, np.float16).astype(np.float32)
    if datatype == DataType.BFLOAT16:
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return _values(datatype)[np.frombuffer(data, np.uint8)]


def narrowed(values: np.ndarray, datatype: int) -> np.ndarray:
    """Return float32 as short floats, rounded to nearest, ties to even; 8-bit results have no infinity."""
    if datatype == DataType.FLOAT16:
        with np.errstate(over="ignore"):
            return values.astype(np.float16)
    if datatype == DataType.BFLOAT16:
        bits = values.view(np.uint32)
        rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
        return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
    finite = _values(datatype)[: 0x7F if datatype == DataType.FLOAT8E4M3 else 0x7C].astype(np.float64)
    size = np.abs(values).astype(np.float64)
    halfway = (finite[1:] + finite[:-1]) / 2
    code = np.searchsorted(halfway, size)  # the index of the lower neighbour if `size` is halfway
    between = np.isin(size, halfway) & (code % 2 == 1)
    code = (code + between).astype(np.uint8) | np.signbit(values).astype(np.uint8) << 7
    return np.where(np.isnan(values), np.uint8(0x7F), code)


@functools.cache
def _values(datatype: int) -> np.ndarray:
    """Return the value of each code of an 8-bit float."""
    codes = np.arange(256, dtype=np.uint16)
    if datatype == DataType.FLOAT8E5M2:  # the upper half of a float16
        return (codes << 8).view(np.float16).astype(np.float32)
    exponent, fraction = codes >> 3 & 15, (codes & 7).astype(np.float64)
    values = np.where(exponent > 0, np.ldexp(1 + fraction / 8, exponent.astype(int) - 7), np.ldexp(fraction / 8, -6))
    values[codes & 0x7F == 0x7F] = np.nan
    return np.where(codes & 0x80, -values, values).astype(np.float32)
