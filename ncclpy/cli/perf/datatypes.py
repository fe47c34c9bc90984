"""The data types of the sweep: nccl-tests' names for them, and how their values become bits.

numpy has no bfloat16 and no fp8. A table (fp8) or a shift (bfloat16) turns values into bits, so no other package is
needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ncclpy.types import DataType


@dataclass(frozen=True)
class Type:
    """One data type.

    Attributes
    ----------
    name
        nccl-tests' name, the "type" column.
    datatype
        The `DataType` for NCCL.
    bits
        The unsigned numpy dtype of the same size.
    native
        The numpy dtype, or ``None`` where numpy has none.
    digits
        Binary digits of a float's significand, the leading one included; 0 for integers. Integers up to ``2**digits``
        are exact.
    since
        The first NCCL version that has it, of those that ncclpy supports (2.16 and newer).
    """

    name: str
    datatype: DataType
    bits: np.dtype
    native: np.dtype | None
    digits: int = 0
    since: tuple[int, int, int] = (2, 16, 0)

    @property
    def itemsize(self) -> int:
        """Return the size of one element in bytes."""
        return self.bits.itemsize

    def encode(self, values: np.ndarray) -> np.ndarray:
        """Return the bits of `values`, float64 or integers; inexact values are rounded."""
        if self.native is not None:
            return values.astype(self.native, copy=False).view(self.bits)
        single = values.astype(np.float32)
        if self.datatype is DataType.BFLOAT16:
            raw = single.view(np.uint32)
            return ((raw + 0x7FFF + (raw >> 16 & 1)) >> 16).astype(np.uint16)
        codes, finite = _fp8_codes(self.datatype)
        middle = (finite[1:] + finite[:-1]) / 2
        return codes[np.searchsorted(middle, single)]

    def decode(self, bits: np.ndarray) -> np.ndarray:
        """Return the values of `bits`, floats as float64."""
        narrow: np.ndarray
        if self.native is not None:
            narrow = bits.view(self.native)
        elif self.itemsize == 1:
            narrow = np.take(_fp8_values(self.datatype), bits)
        else:
            narrow = (bits.astype(np.uint32) << 16).view(np.float32)
        with np.errstate(invalid="ignore"):  # converting a signalling NaN is fine
            return narrow.astype(np.float64) if self.digits else narrow


@lru_cache(maxsize=2)
def _fp8_values(datatype: DataType) -> np.ndarray:
    """Return the value of each of the 256 codes, by the definition of E4M3 and E5M2."""
    mantissa_bits = 3 if datatype is DataType.FLOAT8E4M3 else 2
    bias = 7 if datatype is DataType.FLOAT8E4M3 else 15
    code = np.arange(256)
    sign = np.where(code & 0x80, -1.0, 1.0)
    exponent = (code & 0x7F) >> mantissa_bits
    fraction = (code & (1 << mantissa_bits) - 1) / (1 << mantissa_bits)
    values = sign * np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))
    if datatype is DataType.FLOAT8E4M3:
        values[code & 0x7F == 0x7F] = np.nan  # E4M3 has no infinity, and one NaN of each sign
    else:
        values[code & 0x7F == 0x7C] = sign[code & 0x7F == 0x7C] * np.inf
        values[code & 0x7F > 0x7C] = np.nan
    return values


@lru_cache(maxsize=2)
def _fp8_codes(datatype: DataType) -> tuple[np.ndarray, np.ndarray]:
    """Return the codes of all finite values in rising order, and these values."""
    values = _fp8_values(datatype)
    codes = np.flatnonzero(np.isfinite(values))
    codes = codes[codes != 0x80]  # one zero is enough
    codes = codes[np.argsort(values[codes])]
    return codes.astype(np.uint8), values[codes]


def _native(name: str, datatype: DataType, dtype: str, digits: int = 0) -> Type:
    native = np.dtype(dtype)
    return Type(name, datatype, np.dtype(f"u{native.itemsize}"), native, digits)


TYPES = {
    kind.name: kind
    for kind in (
        _native("int8", DataType.INT8, "i1"),
        _native("uint8", DataType.UINT8, "u1"),
        _native("int32", DataType.INT32, "i4"),
        _native("uint32", DataType.UINT32, "u4"),
        _native("int64", DataType.INT64, "i8"),
        _native("uint64", DataType.UINT64, "u8"),
        _native("half", DataType.FLOAT16, "f2", 11),
        _native("float", DataType.FLOAT32, "f4", 24),
        _native("double", DataType.FLOAT64, "f8", 53),
        Type("bfloat16", DataType.BFLOAT16, np.dtype("u2"), None, 8),
        Type("f8e4m3", DataType.FLOAT8E4M3, np.dtype("u1"), None, 4, (2, 24, 3)),
        Type("f8e5m2", DataType.FLOAT8E5M2, np.dtype("u1"), None, 3, (2, 24, 3)),
    )
}

# Other names of the types.
ALIASES = {
    "char": "int8",
    "int": "int32",
    "float16": "half",
    "float32": "float",
    "float64": "double",
    "bf16": "bfloat16",
    "fp8_e4m3": "f8e4m3",
    "fp8_e5m2": "f8e5m2",
    "float8_e4m3fn": "f8e4m3",
    "float8_e5m2": "f8e5m2",
}
