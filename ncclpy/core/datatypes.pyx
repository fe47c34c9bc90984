"""Data types: how those of numpy, DLPack and torch travel as NCCL's, and how a number is written as one.

NCCL has twelve. Bool travels as uint8 and a complex number as two reals; whatever else has a fixed size travels as
bytes, which calls that only move data take and reductions refuse. Two types that look the same to NCCL have different
flavours, so that they are not mistaken for each other here.
"""

from libc.stdlib cimport realloc

from ncclpy.abi.dlpack cimport (
    kDLBfloat,
    kDLBool,
    kDLComplex,
    kDLFloat,
    kDLFloat8_e4m3fn,
    kDLFloat8_e5m2,
    kDLInt,
    kDLUInt,
)
from ncclpy.abi.nccl cimport (
    ncclBfloat16,
    ncclFloat8e4m3,
    ncclFloat8e5m2,
    ncclFloat16,
    ncclFloat32,
    ncclFloat64,
    ncclInt8,
    ncclInt32,
    ncclInt64,
    ncclUint8,
    ncclUint32,
    ncclUint64,
)

import numpy as np

from ncclpy.core.types import DataType, as_datatype

ITEMSIZE = [1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1]

# The types that travel as bytes: (name, size in bytes) to packed type, and the names by flavour.
cdef dict _bytes_of = {}
cdef list _names = ["", "bool", ""]

# Of dtypes of numpy that have no number of their own (ml_dtypes, dates, structures), and of torch.
cdef dict _of_dtype = {}
cdef dict _of_torch = {}

cdef int[64] _of_numpy

# DLPack's type codes that have a name of their own; the others are a word and a number of bits.
cdef dict _DLPACK_WORDS = {
    kDLInt: "int", kDLUInt: "uint", kDLFloat: "float", kDLBfloat: "bfloat", kDLComplex: "complex",
}
cdef dict _DLPACK_NAMES = {
    7: "float8_e3m4", 8: "float8_e4m3", 9: "float8_e4m3b11fnuz", 10: "float8_e4m3fn", 11: "float8_e4m3fnuz",
    12: "float8_e5m2", 13: "float8_e5m2fnuz", 14: "float8_e8m0fnu", 15: "float6_e2m3fn", 16: "float6_e3m2fn",
    17: "float4_e2m1fn",
}

# Names that numpy does not know, with their sizes.
cdef dict _NAMED = {
    "complex32": 4, "float8_e3m4": 1, "float8_e4m3": 1, "float8_e4m3b11fnuz": 1, "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1, "float4_e2m1fn_x2": 1,
}


cdef int _as_bytes(str name, size_t itemsize) except -1:
    """Return the packed type of one that travels as bytes; each has a flavour of its own."""
    global UNITS
    cdef size_t* grown
    found = _bytes_of.get((name, itemsize))
    if found is None:
        grown = <size_t*>realloc(UNITS, (len(_names) + 1) * sizeof(size_t))
        if grown == NULL:
            raise MemoryError
        UNITS = grown
        UNITS[len(_names)] = itemsize
        found = <int>ncclUint8 | len(_names) << 8
        _names.append(name)
        _bytes_of[name, itemsize] = found
    return found


cdef int _fill() except -1:
    global UNITS, OF_NUMPY
    cdef int i
    UNITS = <size_t*>realloc(NULL, 3 * sizeof(size_t))
    if UNITS == NULL:
        raise MemoryError
    UNITS[REAL] = UNITS[BOOLEAN] = 1
    UNITS[COMPLEX] = 2
    OF_NUMPY = _of_numpy
    for i in range(64):
        _of_numpy[i] = -1
    for name, value in (
        ("int8", <int>ncclInt8), ("uint8", <int>ncclUint8), ("int32", <int>ncclInt32), ("uint32", <int>ncclUint32),
        ("int64", <int>ncclInt64), ("uint64", <int>ncclUint64), ("float16", <int>ncclFloat16),
        ("float32", <int>ncclFloat32), ("float64", <int>ncclFloat64), ("bool", <int>ncclUint8 | BOOLEAN << 8),
        ("complex64", <int>ncclFloat32 | COMPLEX << 8), ("complex128", <int>ncclFloat64 | COMPLEX << 8),
        ("int16", _as_bytes("int16", 2)), ("uint16", _as_bytes("uint16", 2)),
    ):
        _of_numpy[np.dtype(name).num] = value
    # C's long and long long are both 64 bits wide and have a number each.
    for code in "lqLQ":
        _of_numpy[np.dtype(code).num] = <int>ncclInt64 if code in "lq" else <int>ncclUint64
    return 0


_fill()


cdef int of_dtype(object dtype, str argument) except -1:
    """Return the packed type of a numpy dtype."""
    cdef int number = dtype.num
    cdef int packed = of_numpy(number)
    if packed >= 0:
        return packed
    found = _of_dtype.get(dtype)
    if found is None:
        try:
            found = <int>as_datatype(dtype)  # bfloat16 of ml_dtypes, say
        except TypeError:
            if dtype.hasobject or dtype.itemsize == 0:
                raise TypeError(
                    f"{argument}: NCCL has no data type for {dtype!r}, and its elements hold no data of a fixed size "
                    "that could be sent"
                ) from None
            found = _as_bytes(str(dtype) if dtype.fields else dtype.name, dtype.itemsize)
        _of_dtype[dtype] = found
    return found


cdef int of_dlpack(int code, int bits, int lanes, str argument) except -1:
    """Return the packed type of a DLPack type."""
    if lanes == 1:
        if code == kDLFloat:
            if bits == 32:
                return <int>ncclFloat32
            if bits == 16:
                return <int>ncclFloat16
            if bits == 64:
                return <int>ncclFloat64
        elif code == kDLBfloat and bits == 16:
            return <int>ncclBfloat16
        elif code == kDLInt:
            if bits == 32:
                return <int>ncclInt32
            if bits == 64:
                return <int>ncclInt64
            if bits == 8:
                return <int>ncclInt8
        elif code == kDLUInt:
            if bits == 8:
                return <int>ncclUint8
            if bits == 32:
                return <int>ncclUint32
            if bits == 64:
                return <int>ncclUint64
        elif code == kDLBool and bits == 8:
            return <int>ncclUint8 | BOOLEAN << 8
        elif code == kDLComplex:
            if bits == 64:
                return <int>ncclFloat32 | COMPLEX << 8
            if bits == 128:
                return <int>ncclFloat64 | COMPLEX << 8
        elif code == kDLFloat8_e4m3fn:
            return <int>ncclFloat8e4m3
        elif code == kDLFloat8_e5m2:
            return <int>ncclFloat8e5m2
    name = _DLPACK_NAMES.get(code)
    if name is None and code in _DLPACK_WORDS:
        name = f"{_DLPACK_WORDS[code]}{bits}"
    if name is not None and lanes != 1:
        name = f"{name}_x{lanes}"  # as torch has it
    if name is None or bits * lanes == 0 or bits * lanes % 8:
        raise TypeError(
            f"{argument}: NCCL has no data type for DLPack's type code {code} of {bits} bits, {lanes} an element"
        )
    return _as_bytes(name, bits * lanes // 8)


cdef int of_torch(object dtype, size_t itemsize, str argument) except -1:
    """Return the packed type of a torch.dtype, whose objects are told apart by name: torch is not imported here."""
    found = _of_torch.get(dtype)
    if found is None:
        name = str(dtype).removeprefix("torch.")
        found = _of_name(name)
        if found is None:
            found = _as_bytes(name, itemsize)
        _of_torch[dtype] = found
    return found


cdef object _of_name(str name):
    """Return the packed type of a name that NCCL, numpy or DLPack has for it, or None."""
    try:
        return <int>as_datatype(name)
    except TypeError:
        pass
    if name in _NAMED:
        return _as_bytes(name, _NAMED[name])
    try:
        dtype = np.dtype(name)
    except TypeError:
        return None
    # Only full names: "i" and "f4" are numpy's own shorthand, which NCCL's names do not follow.
    return of_dtype(dtype, "dtype") if dtype.name == name and not dtype.hasobject and dtype.itemsize else None


cdef int of_anything(object dtype, str argument) except -1:
    """Return the packed type of what a caller says: a member, its number, a name, a dtype of numpy or torch."""
    if isinstance(dtype, np.dtype) or (isinstance(dtype, type) and issubclass(dtype, (np.generic, bool, complex))):
        dtype = np.dtype(dtype)
        if not dtype.isnative:
            raise TypeError(f"{argument}: the byte order of {dtype!r} is not this machine's")
        return of_dtype(dtype, argument)
    try:
        return <int>as_datatype(dtype)
    except TypeError as error:
        found = None
        if isinstance(dtype, str):
            found = _of_name(dtype.lower().removeprefix("torch."))
        elif type(dtype).__module__ == "torch":
            found = of_torch(dtype, dtype.itemsize, argument)
        if found is None:
            raise TypeError(f"{argument}: {error}") from None
        return found


cdef str name_of(int datatype, int flavour):
    """Name a data type as its owner does."""
    if flavour == REAL:
        return DataType(datatype).name.lower()
    if flavour == COMPLEX:
        return "complex64" if datatype == <int>ncclFloat32 else "complex128"
    return _names[flavour]


# Bits of the exponent and of the fraction, by data type.
cdef dict _FLOATS = {
    <int>ncclFloat16: (5, 10), <int>ncclFloat32: (8, 23), <int>ncclFloat64: (11, 52), <int>ncclBfloat16: (8, 7),
    <int>ncclFloat8e4m3: (4, 3), <int>ncclFloat8e5m2: (5, 2),
}


cdef bytes encoded(object value, object datatype, str argument):
    """Return a number as one element of `datatype`, floats rounded to nearest, ties to even."""
    cdef int nbytes = ITEMSIZE[<int>datatype]
    if datatype in _FLOATS:
        return _float_bits(value, *_FLOATS[datatype], <int>datatype == <int>ncclFloat8e4m3).to_bytes(nbytes, "little")
    signed = datatype in (DataType.INT8, DataType.INT32, DataType.INT64)
    try:
        number = int(value)
        if number != value:
            raise ValueError
        return number.to_bytes(nbytes, "little", signed=signed)
    except (ValueError, OverflowError):  # a fraction, infinity, or too large
        raise ValueError(f"{argument}: {value!r} is no {datatype.name.lower()}") from None


def _float_bits(value, exponent_bits, fraction_bits, finite):
    """Return the bits of a float; a `finite` format has no infinity, and NaN in its place."""
    bias = (1 << exponent_bits - 1) - 1
    sign = 1 << exponent_bits + fraction_bits
    infinity = (1 << exponent_bits) - 1 << fraction_bits
    nan = sign - 1 if finite else infinity | 1 << fraction_bits - 1
    if value != value:
        return nan
    negative = sign if value < 0 or (value == 0 and str(value).startswith("-")) else 0
    try:
        top, bottom = abs(value).as_integer_ratio()  # exact: a detour over another format would round twice
    except OverflowError:
        return negative | (nan if finite else infinity)
    # The exponent e with 2**e <= top / bottom < 2**(e + 1), but none below that of the subnormal numbers.
    e = top.bit_length() - bottom.bit_length()
    if (top << max(0, -e)) < (bottom << max(0, e)):
        e -= 1
    e = max(e, 1 - bias)
    shift = fraction_bits - e
    bottom <<= max(0, -shift)
    fraction, rest = divmod(top << max(0, shift), bottom)
    if 2 * rest > bottom or (2 * rest == bottom and fraction & 1):
        fraction += 1
    # A normal number's leading 1 counts the exponent up, and so does a fraction that was rounded up to the next one.
    bits = (e - (1 - bias) << fraction_bits) + fraction if top else 0
    return negative | (min(bits, nan) if finite else min(bits, infinity))
