"""Memory that a `Buffer` stands for, as other packages read it: numpy's arrays, DLPack, the CUDA array interface."""

from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int64_t
from libc.stdlib cimport free, malloc
cimport numpy as cnp

from ncclpy.abi.dlpack cimport (
    DLDataType,
    DLManagedTensor,
    DLManagedTensorVersioned,
    DLPACK_FLAG_BITMASK_READ_ONLY,
    DLTensor,
    kDLBfloat,
    kDLBool,
    kDLComplex,
    kDLCPU,
    kDLCUDA,
    kDLFloat,
    kDLFloat8_e4m3fn,
    kDLFloat8_e5m2,
    kDLInt,
    kDLUInt,
)

import numpy as np

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
