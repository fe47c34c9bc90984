"""Data types of numpy, DLPack and torch as NCCL's types, and buffers in the forms that other libraries read.

NCCL has twelve types. Bool is sent as uint8, and complex64 and complex128 as two reals each; every other type of a
fixed size is sent as bytes, which calls that only move data accept and reductions refuse. Types that are the same to
NCCL have different flavours, so that they are not mistaken for each other. The flavour of a type that is sent as bytes
is a digest of its name and size: no table has to assign flavours. Ranks compare the name, which is the same in all
processes.

Functions that read objects of one type natively (`read_by`) are set by modules of higher layers, since this module
knows no framework; they may be set after objects of the type were read.
"""

import hashlib

import numpy as np

cimport cython
cimport numpy as cnp
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int64_t
from libc.stdlib cimport free, malloc

from ncclpy.abi.dlpack cimport (
    DLPACK_FLAG_BITMASK_READ_ONLY, DLPACK_MAJOR_KNOWN, DLDataType, DLManagedTensor, DLManagedTensorVersioned,
    DLPackExchangeAPIHeader, DLTensor, kDLBfloat, kDLBool, kDLCPU, kDLCUDA, kDLComplex, kDLFloat, kDLFloat8_e4m3fn,
    kDLFloat8_e5m2, kDLInt, kDLUInt,
)
from ncclpy.abi.nccl cimport (
    ncclBfloat16, ncclFloat16, ncclFloat32, ncclFloat64, ncclFloat8e4m3, ncclFloat8e5m2, ncclInt32, ncclInt64,
    ncclInt8, ncclUint32, ncclUint64, ncclUint8,
)
from ncclpy.abi.tensor_reader cimport NCCLPY_TENSOR_READER_NAME

from ncclpy.types import DataType, as_datatype


ITEMSIZE = [1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1]

# The names of NCCL's own types.
cdef tuple _REALS = tuple([member.name.lower() for member in DataType])

# How many numpy types that are sent as bytes are remembered: a program may make new ones without end ("S1", "S2",
# ...).
cdef Py_ssize_t _MAX_REMEMBERED = 1024

# Names by flavour. `_names` has those of numpy types and forgets the oldest; `_known_names` has those of int16, uint16
# and DLPack's and torch's types, which are few.
cdef dict _names = {}
cdef dict _known_names = {}

# Types of numpy dtypes that have no number of their own (ml_dtypes, dates, structures), and of torch dtypes.
cdef dict _of_dtype = {}
cdef dict _of_torch = {}
cdef ElementType[64] _of_numpy

# Names for DLPack's type codes: a word, to which the number of bits is added, or a whole name.
cdef dict _DLPACK_WORDS = {
    kDLInt: "int", kDLUInt: "uint", kDLFloat: "float", kDLBfloat: "bfloat", kDLComplex: "complex",
}

cdef dict _DLPACK_NAMES = {
    7: "float8_e3m4", 8: "float8_e4m3", 9: "float8_e4m3b11fnuz", 10: "float8_e4m3fn", 11: "float8_e4m3fnuz",
    12: "float8_e5m2", 13: "float8_e5m2fnuz", 14: "float8_e8m0fnu", 15: "float6_e2m3fn", 16: "float6_e3m2fn",
    17: "float4_e2m1fn",
}

# DLPack types that NCCL lacks, by code, bits and lanes.
cdef dict _of_codes = {}

# Names of types that numpy does not know, with their sizes in bytes.
cdef dict _NAMED = {
    "complex32": 4, "float8_e3m4": 1, "float8_e4m3": 1, "float8_e4m3b11fnuz": 1, "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1, "float4_e2m1fn_x2": 1,
}


@cython.final
cdef class _Type:
    """Hold an `ElementType` as a Python object, for a dict."""

    cdef ElementType type


cdef int _as_bytes(ElementType* out, str name, size_t itemsize, dict names) except -1:
    """Fill in a type that is sent as bytes."""
    digest = hashlib.blake2b(f"{itemsize} {name}".encode(), digest_size=8).digest()
    out.flavour = <unsigned long long>int.from_bytes(digest, "little") | 1ULL << 63
    out.datatype, out.unit = <int>ncclUint8, itemsize
    names[out.flavour] = name
    return 0


cdef int _forget(dict remembered) except -1:
    """Drop the oldest entries until there is space for one more."""
    while len(remembered) >= _MAX_REMEMBERED:
        for oldest in remembered:
            break
        remembered.pop(oldest, None)
    return 0


cdef int _fill() except -1:
    global OF_NUMPY
    cdef int i
    OF_NUMPY = _of_numpy
    for i in range(64):
        _of_numpy[i].datatype = -1
    for name, value, flavour in (
        ("int8", <int>ncclInt8, REAL), ("uint8", <int>ncclUint8, REAL), ("int32", <int>ncclInt32, REAL),
        ("uint32", <int>ncclUint32, REAL), ("int64", <int>ncclInt64, REAL), ("uint64", <int>ncclUint64, REAL),
        ("float16", <int>ncclFloat16, REAL), ("float32", <int>ncclFloat32, REAL), ("float64", <int>ncclFloat64, REAL),
        ("bool", <int>ncclUint8, BOOLEAN), ("complex64", <int>ncclFloat32, COMPLEX),
        ("complex128", <int>ncclFloat64, COMPLEX),
    ):
        i = np.dtype(name).num
        as_real(&_of_numpy[i], value, flavour)
    for name in ("int16", "uint16"):
        i = np.dtype(name).num
        _as_bytes(&_of_numpy[i], name, 2, _known_names)
    # C's long and long long are both 64 bits wide, but numpy has a number for each.
    for code in "lqLQ":
        i = np.dtype(code).num
        as_real(&_of_numpy[i], <int>ncclInt64 if code in "lq" else <int>ncclUint64)
    return 0


_fill()


cdef int of_dtype(object dtype, ElementType* out, str argument) except -1:
    """Fill in the type of a numpy dtype."""
    cdef const ElementType* known = of_numpy(dtype.num)
    cdef _Type found
    if known != NULL:
        out[0] = known[0]
        return 0
    found = _of_dtype.get(dtype)
    if found is None:
        found = _Type.__new__(_Type)
        try:
            as_real(&found.type, <int>as_datatype(dtype))  # for example bfloat16 of ml_dtypes
        except TypeError:
            if dtype.hasobject or dtype.itemsize == 0:
                raise TypeError(
                    f"{argument}: NCCL has no data type for {dtype!r}, and its elements hold no data of a fixed size "
                    "that could be sent"
                ) from None
            _forget(_names)
            _as_bytes(&found.type, _name_of_dtype(dtype), dtype.itemsize, _names)
        _forget(_of_dtype)
        _of_dtype[dtype] = found
    out[0] = found.type
    return 0


cdef str _name_of_dtype(object dtype):
    """Return a name, of `MAX_NAME` characters at most, the same in all processes for dtypes that numpy finds equal.

    numpy's own text would also show how a structure was made, such as with ``align=True`` or as a numpy.record:
    equal dtypes may have different texts.
    """
    if dtype.names is None and dtype.subdtype is None:
        text = dtype.name
    else:
        text = _layout(dtype)
    packed = text.encode("ascii", "backslashreplace")
    if len(packed) > MAX_NAME:
        digest = hashlib.blake2b(packed, digest_size=8).hexdigest()
        end = f"... ({len(dtype.names or ())} fields, {dtype.itemsize} bytes, #{digest})"
        packed = packed[: MAX_NAME - len(end)] + end.encode()
    return packed.decode()


cdef str _layout(object dtype):
    """Return the fields of a structure in order, each with its offset unless it directly follows the previous one."""
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return f"({_layout(base)}, {shape})"
    if dtype.names is None:
        # numpy's own types have numbers from 0 to 255: their code is used, since it shows the byte order. Other types
        # have only a name.
        return repr(dtype.str if 0 <= dtype.num < 256 else dtype.name)
    parts, end = [], 0
    for name in dtype.names:
        inner, offset = dtype.fields[name][:2]
        parts.append(f"({name!r}, {_layout(inner)})" + (f" at {offset}" if offset != end else ""))
        end = offset + inner.itemsize
    return f"[{', '.join(parts)}]" + (f" of {dtype.itemsize} bytes" if dtype.itemsize != end else "")


cdef int of_dlpack(int code, int bits, int lanes, ElementType* out, str argument) except -1:
    """Fill in the type for a DLPack type."""
    if lanes == 1:
        if code == kDLFloat:
            if bits == 32:
                return as_real(out, <int>ncclFloat32)
            if bits == 16:
                return as_real(out, <int>ncclFloat16)
            if bits == 64:
                return as_real(out, <int>ncclFloat64)
        elif code == kDLBfloat and bits == 16:
            return as_real(out, <int>ncclBfloat16)
        elif code == kDLInt:
            if bits == 32:
                return as_real(out, <int>ncclInt32)
            if bits == 64:
                return as_real(out, <int>ncclInt64)
            if bits == 8:
                return as_real(out, <int>ncclInt8)
        elif code == kDLUInt:
            if bits == 8:
                return as_real(out, <int>ncclUint8)
            if bits == 32:
                return as_real(out, <int>ncclUint32)
            if bits == 64:
                return as_real(out, <int>ncclUint64)
        elif code == kDLBool and bits == 8:
            return as_real(out, <int>ncclUint8, BOOLEAN)
        elif code == kDLComplex:
            if bits == 64:
                return as_real(out, <int>ncclFloat32, COMPLEX)
            if bits == 128:
                return as_real(out, <int>ncclFloat64, COMPLEX)
        elif code == kDLFloat8_e4m3fn:
            return as_real(out, <int>ncclFloat8e4m3)
        elif code == kDLFloat8_e5m2:
            return as_real(out, <int>ncclFloat8e5m2)
    return _of_rare(code, bits, lanes, out, argument)


cdef int _of_rare(int code, int bits, int lanes, ElementType* out, str argument) except -1:
    """Fill in the type for a DLPack type that NCCL lacks, and remember it."""
    cdef _Type found = _of_codes.get((code, bits, lanes))
    if found is None:
        name = _DLPACK_NAMES.get(code)
        if name is None and code in _DLPACK_WORDS:
            name = f"{_DLPACK_WORDS[code]}{bits}"
        if name is not None and lanes != 1:
            name = f"{name}_x{lanes}"  # as in torch
        if name is None or bits * lanes == 0 or bits * lanes % 8:
            raise TypeError(
                f"{argument}: NCCL has no data type for DLPack's type code {code} of {bits} bits with {lanes} lanes"
            )
        found = _Type.__new__(_Type)
        _as_bytes(&found.type, name, bits * lanes // 8, _known_names)
        _of_codes[code, bits, lanes] = found
    out[0] = found.type
    return 0


cdef int of_torch(object dtype, size_t itemsize, ElementType* out, str argument) except -1:
    """Fill in the type for a torch.dtype, found by its name: torch is not imported here."""
    cdef _Type found = _of_torch.get(dtype)
    if found is None:
        found = _Type.__new__(_Type)
        name = str(dtype).removeprefix("torch.")
        if not _of_name(name, &found.type):
            _as_bytes(&found.type, name, itemsize, _known_names)
        _of_torch[dtype] = found
    out[0] = found.type
    return 0


cdef bint _of_name(str name, ElementType* out) except -1:
    """Fill in the type with a name from NCCL, numpy or DLPack; return whether one of them has the name."""
    try:
        as_real(out, <int>as_datatype(name))
        return True
    except TypeError:
        pass
    if name in _NAMED:
        _as_bytes(out, name, _NAMED[name], _known_names)
        return True
    try:
        dtype = np.dtype(name)
    except TypeError:
        return False
    # Only full names: "i" and "f4" are numpy's own shorthand, which NCCL's names do not follow.
    if dtype.name != name or dtype.hasobject or not dtype.itemsize:
        return False
    of_dtype(dtype, out, "dtype")
    return True


cdef int of_anything(object dtype, ElementType* out, str argument) except -1:
    """Fill in the type that a caller passes, see the declaration."""
    if isinstance(dtype, np.dtype) or (isinstance(dtype, type) and issubclass(dtype, (np.generic, bool, complex))):
        dtype = np.dtype(dtype)
        if not dtype.isnative:
            raise TypeError(f"{argument}: the byte order of {dtype!r} is not this machine's")
        return of_dtype(dtype, out, argument)
    try:
        return as_real(out, <int>as_datatype(dtype))
    except TypeError as error:
        if isinstance(dtype, str):
            if _of_name(dtype.lower().removeprefix("torch."), out):
                return 0
        elif type(dtype).__module__ == "torch":
            return of_torch(dtype, dtype.itemsize, out, argument)
        raise TypeError(f"{argument}: {error}") from None


cdef str name_of(int datatype, unsigned long long flavour):
    """Return NCCL's name of a data type, or the name in the array's library if NCCL lacks the type.

    `_names` forgets the oldest types that are sent as bytes: for such a type return a text with its flavour.
    """
    if flavour == REAL:
        return _REALS[datatype]
    if flavour == COMPLEX:
        return "complex64" if datatype == <int>ncclFloat32 else "complex128"
    if flavour == BOOLEAN:
        return "bool"
    name = _names.get(flavour)
    if name is None:
        name = _known_names.get(flavour)
    return f"a type that was forgotten, #{flavour:x}" if name is None else name


# Number of bits of the exponent and of the fraction, by data type.
cdef dict _FLOATS = {
    <int>ncclFloat16: (5, 10), <int>ncclFloat32: (8, 23), <int>ncclFloat64: (11, 52), <int>ncclBfloat16: (8, 7),
    <int>ncclFloat8e4m3: (4, 3), <int>ncclFloat8e5m2: (5, 2),
}


cdef bytes encoded(object value, object datatype, str argument):
    """Return the bytes of a number as one element of `datatype`.

    For a float type round to nearest, ties to even. For an integer type raise ValueError if the type cannot represent
    the number.
    """
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
        raise ValueError(f"{argument}: {value!r} cannot be represented as {datatype.name.lower()}") from None


def _float_bits(value, exponent_bits, fraction_bits, finite):
    """Return the bits of a float; a `finite` format has no infinity and uses NaN instead."""
    bias = (1 << exponent_bits - 1) - 1
    sign = 1 << exponent_bits + fraction_bits
    infinity = (1 << exponent_bits) - 1 << fraction_bits
    nan = sign - 1 if finite else infinity | 1 << fraction_bits - 1
    if value != value:
        return nan
    negative = sign if value < 0 or (value == 0 and str(value).startswith("-")) else 0
    try:
        top, bottom = abs(value).as_integer_ratio()  # exact: a conversion by way of another format would round twice
    except OverflowError:
        return negative | (nan if finite else infinity)
    # The exponent e with 2**e <= top / bottom < 2**(e + 1), but not below that of the subnormal numbers.
    e = top.bit_length() - bottom.bit_length()
    if (top << max(0, -e)) < (bottom << max(0, e)):
        e -= 1
    e = max(e, 1 - bias)
    shift = fraction_bits - e
    bottom <<= max(0, -shift)
    fraction, rest = divmod(top << max(0, shift), bottom)
    if 2 * rest > bottom or (2 * rest == bottom and fraction & 1):
        fraction += 1
    # The addition may carry into the exponent: `fraction` has the leading 1 of a normal number, which adds 1 to the
    # exponent, and rounding up to the next power of two adds 1 more.
    bits = (e - (1 - bias) << fraction_bits) + fraction if top else 0
    return negative | (min(bits, nan) if finite else min(bits, infinity))


cdef dict _readers = {}


cdef class Reader:
    """Hold the native read function of a type, or NULL; `reader_of` makes one Reader for each type."""


cdef Reader reader_of(object kind):
    reader = _readers.get(kind)
    if reader is None:
        reader = _readers[kind] = Reader()
    return reader


def read_by(kinds, capsule):
    """Have objects of some types read by a C function first, and in the usual way if the function does not know them.

    Parameters
    ----------
    kinds : iterable of type
        Types are compared for identity: objects of derived types are read in the usual way.
    capsule : capsule or None
        Holds an ``ncclpy_tensor_reader`` (abi/tensor_reader.h), which must never be freed. None removes the function.
    """
    cdef ncclpy_tensor_reader read = NULL
    if capsule is not None:
        read = <ncclpy_tensor_reader>PyCapsule_GetPointer(capsule, NCCLPY_TENSOR_READER_NAME)
    for kind in kinds:
        reader_of(kind).read = read


cdef const DLPackExchangeAPI* exchange_api_of(object kind) except? NULL:
    """Return the newest version of a type's exchange API with a known layout; NULL if there is none.

    Return NULL also if that version lacks the function that fills in a DLTensor without a copy.
    """
    cdef const DLPackExchangeAPIHeader* header
    capsule = getattr(kind, "__dlpack_c_exchange_api__", None)
    if capsule is None or not PyCapsule_IsValid(capsule, b"dlpack_exchange_api"):
        return NULL
    header = <const DLPackExchangeAPIHeader*>PyCapsule_GetPointer(capsule, b"dlpack_exchange_api")
    while header != NULL and header.version.major > DLPACK_MAJOR_KNOWN:
        header = header.prev_api
    if header == NULL or (<const DLPackExchangeAPI*>header).dltensor_from_py_object_no_sync == NULL:
        return NULL
    return <const DLPackExchangeAPI*>header


cnp.import_array()

# Managed tensors of DLPack before 1.0 (`Plain`) and of 1.0, each followed by the shape and stride that it points to.
cdef struct Plain:
    DLManagedTensor managed
    int64_t shape
    int64_t stride

cdef struct Versioned:
    DLManagedTensorVersioned managed
    int64_t shape
    int64_t stride

# Types that numpy has only from ml_dtypes, by NCCL's names: their names in ml_dtypes, and their DLPack codes.
cdef dict _ML_DTYPES = {"bfloat16": "bfloat16", "float8e4m3": "float8_e4m3fn", "float8e5m2": "float8_e5m2"}
cdef dict _CODES = {"bfloat16": kDLBfloat, "float8e4m3": kDLFloat8_e4m3fn, "float8e5m2": kDLFloat8_e5m2}
# DLPack's type codes, by numpy's kinds.
cdef dict _KINDS = {"b": kDLBool, "i": kDLInt, "u": kDLUInt, "f": kDLFloat, "c": kDLComplex}


cdef object _dtype(str name):
    """Return the numpy dtype with a name, or None."""
    try:
        return np.dtype(_ML_DTYPES.get(name, name))
    except TypeError:
        return None


cdef object numpy_view(void* pointer, size_t nbytes, str name, bint readonly, object owner):
    """Return an array over CPU memory that keeps `owner` alive; for no bytes an empty array without a reference."""
    cdef cnp.npy_intp extent = nbytes
    cdef cnp.ndarray array
    dtype = _dtype(name)
    if dtype is None:
        raise TypeError(f"numpy has no data type {name}; `import ml_dtypes` may add it")
    if nbytes == 0:
        return np.empty(0, dtype)
    array = cnp.PyArray_SimpleNewFromData(1, &extent, cnp.NPY_UINT8, pointer)
    if readonly:
        array.flags.writeable = False
    cnp.set_array_base(array, owner)
    return array.view(dtype)


cdef str typestr(str name):
    """Return the name of a data type in the CUDA array interface."""
    dtype = _dtype(name)
    if dtype is None or name in _ML_DTYPES:
        raise TypeError(f"the CUDA array interface has no data type {name}: pass the buffer to from_dlpack")
    return dtype.str


cdef object dlpack_capsule(
    void* pointer, size_t count, str name, int device, bint readonly, bint versioned, object owner
):
    """Return a DLPack capsule, of version 1.0 if `versioned`, else older; it keeps `owner` alive until released."""
    cdef Plain* plain
    cdef Versioned* whole
    cdef DLDataType dtype
    cdef int itemsize
    if readonly and not versioned:
        raise BufferError("read-only memory needs DLPack 1.0: pass max_version=(1, 0)")
    if name in _CODES:
        dtype.code, itemsize = _CODES[name], 2 if name == "bfloat16" else 1
    else:
        known = _dtype(name)
        if known is None or known.kind not in _KINDS:
            raise BufferError(f"DLPack has no data type {name}")
        dtype.code, itemsize = _KINDS[known.kind], known.itemsize
    dtype.bits, dtype.lanes = 8 * itemsize, 1
    if versioned:
        whole = <Versioned*>malloc(sizeof(Versioned))
        if whole == NULL:
            raise MemoryError()
        whole.managed.version.major, whole.managed.version.minor = 1, 0
        whole.managed.flags = DLPACK_FLAG_BITMASK_READ_ONLY if readonly else 0
        whole.managed.manager_ctx, whole.managed.deleter = <void*>owner, _release_versioned
        whole.shape, whole.stride = count, 1
        _fill_tensor(&whole.managed.dl_tensor, pointer, device, dtype, &whole.shape, &whole.stride)
        Py_INCREF(owner)
        return PyCapsule_New(whole, b"dltensor_versioned", _drop_versioned)
    plain = <Plain*>malloc(sizeof(Plain))
    if plain == NULL:
        raise MemoryError()
    plain.managed.manager_ctx, plain.managed.deleter = <void*>owner, _release_plain
    plain.shape, plain.stride = count, 1
    _fill_tensor(&plain.managed.dl_tensor, pointer, device, dtype, &plain.shape, &plain.stride)
    Py_INCREF(owner)
    return PyCapsule_New(plain, b"dltensor", _drop_plain)


cdef void _fill_tensor(DLTensor* tensor, void* pointer, int device, DLDataType dtype, int64_t* shape, int64_t* stride):
    tensor.data = pointer
    tensor.device.device_type = kDLCPU if device < 0 else kDLCUDA
    tensor.device.device_id = 0 if device < 0 else device
    tensor.ndim = 1
    tensor.dtype = dtype
    tensor.shape, tensor.strides = shape, stride
    tensor.byte_offset = 0


cdef void _release_versioned(DLManagedTensorVersioned* tensor) noexcept with gil:
    Py_DECREF(<object>tensor.manager_ctx)
    free(tensor)


cdef void _release_plain(DLManagedTensor* tensor) noexcept with gil:
    Py_DECREF(<object>tensor.manager_ctx)
    free(tensor)


cdef void _drop_versioned(object capsule) noexcept:
    """Release a tensor that no consumer has taken: a consumer renames the capsule."""
    if PyCapsule_IsValid(capsule, b"dltensor_versioned"):
        _release_versioned(<DLManagedTensorVersioned*>PyCapsule_GetPointer(capsule, b"dltensor_versioned"))


cdef void _drop_plain(object capsule) noexcept:
    if PyCapsule_IsValid(capsule, b"dltensor"):
        _release_plain(<DLManagedTensor*>PyCapsule_GetPointer(capsule, b"dltensor"))
