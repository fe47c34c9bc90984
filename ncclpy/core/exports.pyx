"""Objects of other libraries as buffers, and buffers as other libraries read them.

The latter come from above, since nothing here knows of frameworks, and may come when objects of the type were read already.
"""

import numpy as np

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
from ncclpy.abi.tensor_reader cimport NCCLPY_TENSOR_READER_NAME


cdef dict _readers = {}


cdef class Reader:
    """The place of the function that was built for a type; who reads objects of the type keeps it."""


cdef Reader reader_of(object kind):
    reader = _readers.get(kind)
    if reader is None:
        reader = _readers[kind] = Reader()
    return reader


def read_by(kinds, capsule):
    """Have objects of some types read by a C function first, and as before if it does not know what they are.

    Parameters
    ----------
    kinds : iterable of type
        Types are compared for identity: what is derived from them is read as before.
    capsule : capsule or None
        Holds an ``ncclpy_tensor_reader`` (abi/tensor_reader.h), which stays for good. None takes away what there is.
    """
    cdef ncclpy_tensor_reader read = NULL
    if capsule is not None:
        read = <ncclpy_tensor_reader>PyCapsule_GetPointer(capsule, NCCLPY_TENSOR_READER_NAME)
    for kind in kinds:
        reader_of(kind).read = read


cdef const DLPackExchangeAPI* exchange_api_of(object kind) except? NULL:
    """Return a version of the type's exchange API whose layout is known and that gives a DLTensor without copying."""
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

# What both kinds of managed tensor of ours have in common: the tensor, and its one dimension.
cdef struct Plain:
    DLManagedTensor managed
    int64_t shape
    int64_t stride

cdef struct Versioned:
    DLManagedTensorVersioned managed
    int64_t shape
    int64_t stride

# NCCL's names of types that numpy has from ml_dtypes alone, and DLPack's codes of them.
cdef dict _ML_DTYPES = {"bfloat16": "bfloat16", "float8e4m3": "float8_e4m3fn", "float8e5m2": "float8_e5m2"}
cdef dict _CODES = {"bfloat16": kDLBfloat, "float8e4m3": kDLFloat8_e4m3fn, "float8e5m2": kDLFloat8_e5m2}
cdef dict _KINDS = {"b": kDLBool, "i": kDLInt, "u": kDLUInt, "f": kDLFloat, "c": kDLComplex}


cdef object _dtype(str name):
    """Return numpy's type of a name, or None if it has none."""
    try:
        return np.dtype(_ML_DTYPES.get(name, name))
    except TypeError:
        return None


cdef object numpy_view(void* pointer, size_t nbytes, str name, bint readonly, object owner):
    """Return an array over CPU memory that keeps `owner` alive."""
    cdef cnp.npy_intp extent = nbytes
    cdef cnp.ndarray array
    dtype = _dtype(name)
    if dtype is None:
        raise TypeError(f"numpy has no data type {name}; `import ml_dtypes` may bring it")
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
    """Return a capsule of DLPack, of version 1.0 or of before, that keeps `owner` alive until it is released."""
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
        _fill(&whole.managed.dl_tensor, pointer, device, dtype, &whole.shape, &whole.stride)
        Py_INCREF(owner)
        return PyCapsule_New(whole, b"dltensor_versioned", _drop_versioned)
    plain = <Plain*>malloc(sizeof(Plain))
    if plain == NULL:
        raise MemoryError()
    plain.managed.manager_ctx, plain.managed.deleter = <void*>owner, _release_plain
    plain.shape, plain.stride = count, 1
    _fill(&plain.managed.dl_tensor, pointer, device, dtype, &plain.shape, &plain.stride)
    Py_INCREF(owner)
    return PyCapsule_New(plain, b"dltensor", _drop_plain)


cdef void _fill(DLTensor* tensor, void* pointer, int device, DLDataType dtype, int64_t* shape, int64_t* stride):
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
    """Release what nobody has taken: who takes a tensor renames its capsule."""
    if PyCapsule_IsValid(capsule, b"dltensor_versioned"):
        _release_versioned(<DLManagedTensorVersioned*>PyCapsule_GetPointer(capsule, b"dltensor_versioned"))


cdef void _drop_plain(object capsule) noexcept:
    if PyCapsule_IsValid(capsule, b"dltensor"):
        _release_plain(<DLManagedTensor*>PyCapsule_GetPointer(capsule, b"dltensor"))
