"""From a Python object to pointer, count, data type and device.

Objects are told apart by their exact type, once; the answer is cached. No framework is imported: an object of a
framework can only come from one that is already there. The road of each kind is the cheapest that its owner offers:
numpy's C API, DLPack's C exchange API (torch since 2.10), attributes (CuPy, older torch, cuda.core), then the
``__cuda_array_interface__`` and ``__dlpack__`` protocols.
"""

import sys

from cpython.exc cimport PyErr_Occurred
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid
from libc.stdint cimport int64_t, uintptr_t
cimport numpy as cnp

from ncclpy.abi.dlpack cimport (
    DLManagedTensor,
    DLManagedTensorVersioned,
    DLPACK_FLAG_BITMASK_READ_ONLY,
    DLPACK_MAJOR_KNOWN,
    DLPackExchangeAPIHeader,
    DLTensor,
    kDLBfloat,
    kDLBool,
    kDLComplex,
    kDLCPU,
    kDLCUDA,
    kDLCUDAHost,
    kDLCUDAManaged,
    kDLFloat,
    kDLFloat8_e4m3fn,
    kDLFloat8_e5m2,
    kDLInt,
    kDLUInt,
)
from ncclpy.abi.driver cimport (
    CU_MEMORYTYPE_DEVICE,
    CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
    CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
    CUDA_SUCCESS,
    CUdeviceptr,
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
from ncclpy.core.device cimport as_device
from ncclpy.core.library cimport driver, require_driver

import numpy as np

from ncclpy.core.types import DataType, as_datatype

cnp.import_array()

# Roads, by kind of object.
cdef enum:
    BY_NUMPY
    BY_EXCHANGE_API
    BY_TORCH
    BY_CUPY
    BY_CUDA_CORE
    BY_INTERFACE
    BY_DLPACK
    BY_BUFFER
    BY_TUPLE

ITEMSIZE = [1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1]

# numpy's own type numbers to (data type | flavour << 8); -1 has no NCCL type. Others (ml_dtypes) go by their name.
cdef int[64] _of_numpy
cdef dict _of_numpy_name = {}


cdef int _fill_numpy_table() except -1:
    cdef int i
    for i in range(64):
        _of_numpy[i] = -1
    for name, value in (
        ("int8", <int>ncclInt8), ("uint8", <int>ncclUint8), ("int32", <int>ncclInt32), ("uint32", <int>ncclUint32),
        ("int64", <int>ncclInt64), ("uint64", <int>ncclUint64), ("float16", <int>ncclFloat16),
        ("float32", <int>ncclFloat32), ("float64", <int>ncclFloat64), ("bool", <int>ncclUint8 | BOOLEAN << 8),
        ("complex64", <int>ncclFloat32 | COMPLEX << 8), ("complex128", <int>ncclFloat64 | COMPLEX << 8),
    ):
        _of_numpy[np.dtype(name).num] = value
    # C's long and long long are both 64 bits wide and have a number each.
    for code in "lqLQ":
        _of_numpy[np.dtype(code).num] = <int>ncclInt64 if code in "lq" else <int>ncclUint64
    return 0


_fill_numpy_table()


cdef class _Road:
    """How objects of one type are read."""

    cdef int kind
    cdef const DLPackExchangeAPI* api


cdef dict _roads = {}

# The last type that was seen: programs use one kind of array over and over.
cdef object _recent_type = None
cdef _Road _recent_road = None


cdef int read_view(object obj, View* view, str argument) except -1:
    """Fill `view` from any object that stands for memory; `argument` names it in errors."""
    cdef _Road road
    cdef int kind
    view.framework = NO_FRAMEWORK
    view.readonly = False
    view.device = UNKNOWN_DEVICE
    if type(obj) is Buffer:
        view[0] = (<Buffer>obj).view
        return 0
    if cnp.PyArray_CheckExact(obj):
        return _read_numpy(<cnp.ndarray>obj, view, argument)
    if type(obj) is _recent_type:
        road = _recent_road
    else:
        road = _remember(obj, argument)
    kind = road.kind
    if kind == BY_EXCHANGE_API:
        return _read_exchange_api(obj, road.api, view, argument)
    if kind == BY_NUMPY:
        return _read_numpy(<cnp.ndarray>obj, view, argument)
    if kind == BY_TUPLE:
        return _read_tuple(obj, view, argument)
    if kind == BY_CUPY:
        return _read_cupy(obj, view, argument)
    if kind == BY_TORCH:
        return _read_torch(obj, view, argument)
    if kind == BY_CUDA_CORE:
        return _read_cuda_core(obj, view)
    if kind == BY_INTERFACE:
        return _read_interface(obj.__cuda_array_interface__, view, argument)
    if kind == BY_BUFFER:
        view[0] = (<Buffer>obj).view
        return 0
    return _read_dlpack(obj, view, argument)


cdef _Road _remember(object obj, str argument):
    """Look the type up, decide on it if it is new, and note it as the last one seen."""
    global _recent_type, _recent_road
    road = _roads.get(type(obj))
    if road is None:
        road = _road_of(obj, argument)
        _roads[type(obj)] = road
    _recent_road = road
    _recent_type = type(obj)
    return road


cdef _Road _road_of(object obj, str argument):
    """Decide once how objects of this type are read."""
    cdef _Road road = _Road()
    kind = type(obj)
    if isinstance(obj, np.ndarray):
        if isinstance(obj, np.ma.MaskedArray):
            raise TypeError(f"{argument}: a masked array; NCCL knows no masks: pass its data or array.filled(...)")
        road.kind = BY_NUMPY
    elif isinstance(obj, Buffer):
        road.kind = BY_BUFFER
    elif isinstance(obj, tuple):
        road.kind = BY_TUPLE
    elif _take_exchange_api(kind, road):
        road.kind = BY_EXCHANGE_API
    elif kind.__module__.partition(".")[0] == "torch" and hasattr(kind, "data_ptr"):
        road.kind = BY_TORCH
    elif kind.__module__.partition(".")[0] == "cupy" and hasattr(kind, "data"):
        road.kind = BY_CUPY
    elif kind.__module__.startswith("cuda.core") and hasattr(kind, "memory_resource"):
        road.kind = BY_CUDA_CORE
    elif hasattr(kind, "__cuda_array_interface__") or "__cuda_array_interface__" in getattr(obj, "__dict__", ()):
        road.kind = BY_INTERFACE
    elif hasattr(kind, "__dlpack__"):
        road.kind = BY_DLPACK
    else:
        raise TypeError(
            f"{argument}: cannot take memory from {kind.__module__}.{kind.__qualname__}; pass a numpy, torch or CuPy "
            "array, an object with __cuda_array_interface__ or __dlpack__, a cuda.core Buffer, an ncclpy.Buffer, or "
            "(pointer, count, dtype)"
        )
    return road


cdef bint _take_exchange_api(object kind, _Road road) except -1:
    """Find a version of the type's exchange API whose layout is known and that gives a DLTensor without copying."""
    cdef const DLPackExchangeAPIHeader* header
    capsule = getattr(kind, "__dlpack_c_exchange_api__", None)
    if capsule is None or not PyCapsule_IsValid(capsule, b"dlpack_exchange_api"):
        return False
    header = <const DLPackExchangeAPIHeader*>PyCapsule_GetPointer(capsule, b"dlpack_exchange_api")
    while header != NULL and header.version.major > DLPACK_MAJOR_KNOWN:
        header = header.prev_api
    if header == NULL or (<const DLPackExchangeAPI*>header).dltensor_from_py_object_no_sync == NULL:
        return False
    road.api = <const DLPackExchangeAPI*>header
    return True


cdef int _read_numpy(cnp.ndarray array, View* view, str argument) except -1:
    cdef int number = cnp.PyArray_TYPE(array)
    cdef int found = _of_numpy[number] if 0 <= number < 64 else -1
    if found < 0:
        found = _numpy_by_name(array.dtype, argument)
    if not cnp.PyArray_IS_C_CONTIGUOUS(array):
        raise _not_contiguous(argument, (<object>array).shape, (<object>array).strides)
    if not cnp.PyArray_ISNOTSWAPPED(array):
        raise TypeError(
            f"{argument}: the array's byte order is not this machine's ({array.dtype!r}); pass "
            "array.astype(array.dtype.newbyteorder('='))"
        )
    view.pointer = cnp.PyArray_DATA(array)
    view.readonly = not cnp.PyArray_ISWRITEABLE(array)
    view.device = HOST_MEMORY
    return _set_type(view, found, <size_t>cnp.PyArray_SIZE(array))


cdef inline int _set_type(View* view, int found, size_t count) except -1:
    """Set data type, flavour, count and size from a packed type and a count of array elements."""
    view.datatype = found & 0xFF
    view.flavour = found >> 8
    view.count = count * 2 if view.flavour == COMPLEX else count
    view.nbytes = view.count * ITEMSIZE[view.datatype]
    return 0


cdef int _numpy_by_name(object dtype, str argument) except -1:
    """Return the packed type of a numpy dtype that is not numpy's own, bfloat16 of ml_dtypes say."""
    found = _of_numpy_name.get(dtype)
    if found is None:
        try:
            found = <int>as_datatype(dtype)
        except TypeError as error:
            raise TypeError(f"{argument}: {error}") from None
        _of_numpy_name[dtype] = found
    return found


cdef object _not_contiguous(str argument, object shape, object strides):
    return ValueError(
        f"{argument}: the array is not contiguous (shape {tuple(shape)}, strides {tuple(strides)}); NCCL reads memory "
        "from the first element on. Pass a C-contiguous array or copy it first"
    )


cdef inline int _read_exchange_api(object obj, const DLPackExchangeAPI* api, View* view, str argument) except -1:
    cdef DLTensor tensor
    if api.dltensor_from_py_object_no_sync(<void*>obj, &tensor) != 0:
        _reraise(argument)
    view.framework = EXCHANGE_API
    view.api = api
    _read_dltensor(&tensor, view, argument)
    if view.flavour == COMPLEX:
        _refuse_lazy_conjugate(obj, argument)
    return 0


cdef int _refuse_lazy_conjugate(object tensor, str argument) except -1:
    """Refuse torch's conjugate views: their memory holds what they are the conjugate of, and no type says so."""
    if hasattr(tensor, "is_conj") and tensor.is_conj():
        raise ValueError(f"{argument}: the tensor is a lazy conjugate; pass tensor.resolve_conj()")
    return 0


cdef int _reraise(str argument) except -1:
    """Raise what another library's C function has set as the current exception, or say that it set none."""
    if PyErr_Occurred() != NULL:
        return -1
    raise BufferError(f"{argument}: the tensor cannot be read through DLPack")


cdef inline int _read_dltensor(const DLTensor* tensor, View* view, str argument) except -1:
    cdef size_t count = 1
    cdef int64_t expected = 1
    cdef int i
    cdef int found = _of_dltype(tensor.dtype.code, tensor.dtype.bits)
    if found < 0 or tensor.dtype.lanes != 1:
        raise TypeError(f"{argument}: NCCL has no data type for {_dltype_name(tensor.dtype.code, tensor.dtype.bits)}")
    for i in range(tensor.ndim):
        count *= <size_t>tensor.shape[i]
    if tensor.strides != NULL and count > 1:
        for i in range(tensor.ndim - 1, -1, -1):
            if tensor.shape[i] != 1 and tensor.strides[i] != expected:
                raise _not_contiguous(
                    argument,
                    [tensor.shape[i] for i in range(tensor.ndim)],
                    [tensor.strides[i] for i in range(tensor.ndim)],
                )
            expected *= tensor.shape[i]
    if tensor.device.device_type == kDLCPU:
        view.device = HOST_MEMORY
    elif tensor.device.device_type == kDLCUDA or tensor.device.device_type == kDLCUDAManaged:
        view.device = tensor.device.device_id
    elif tensor.device.device_type == kDLCUDAHost:
        view.device = UNKNOWN_DEVICE
    else:
        raise ValueError(f"{argument}: memory of DLPack device type {tensor.device.device_type} is not for NCCL")
    view.pointer = <char*>tensor.data + tensor.byte_offset
    return _set_type(view, found, count)


cdef object _dltype_name(int code, int bits):
    words = {kDLInt: "int", kDLUInt: "uint", kDLFloat: "float", kDLBfloat: "bfloat", kDLComplex: "complex"}
    return f"{words[code]}{bits}" if code in words else f"DLPack's type code {code} with {bits} bits"


cdef inline int _of_dltype(int code, int bits) noexcept:
    """Return the packed type of a DLPack type, -1 if NCCL has none."""
    if code == kDLFloat:
        return <int>ncclFloat32 if bits == 32 else <int>ncclFloat64 if bits == 64 else <int>ncclFloat16 if bits == 16 else -1
    if code == kDLBfloat:
        return <int>ncclBfloat16 if bits == 16 else -1
    if code == kDLInt:
        return <int>ncclInt64 if bits == 64 else <int>ncclInt32 if bits == 32 else <int>ncclInt8 if bits == 8 else -1
    if code == kDLUInt:
        return <int>ncclUint64 if bits == 64 else <int>ncclUint32 if bits == 32 else <int>ncclUint8 if bits == 8 else -1
    if code == kDLBool:
        return <int>ncclUint8 | BOOLEAN << 8 if bits == 8 else -1
    if code == kDLComplex:
        return (<int>ncclFloat32 | COMPLEX << 8) if bits == 64 else (<int>ncclFloat64 | COMPLEX << 8) if bits == 128 else -1
    if code == kDLFloat8_e4m3fn:
        return <int>ncclFloat8e4m3
    if code == kDLFloat8_e5m2:
        return <int>ncclFloat8e5m2
    return -1


cdef int _read_tuple(object triple, View* view, str argument) except -1:
    if len(triple) != 3:
        raise TypeError(f"{argument}: a tuple stands for (pointer, count, dtype), got {len(triple)} items")
    pointer, count, dtype = triple
    return _set_explicit(view, pointer, count, dtype, argument)


cdef int _set_explicit(View* view, object pointer, object count, object dtype, str argument) except -1:
    """Fill a view from what the caller says; nothing can be checked but the types and signs."""
    if not isinstance(pointer, int) or not isinstance(count, int):
        raise TypeError(f"{argument}: pointer and count are ints, got {type(pointer).__name__}, {type(count).__name__}")
    if pointer < 0 or count < 0:
        raise ValueError(f"{argument}: pointer {pointer:#x} and count {count} must not be negative")
    if pointer == 0 and count > 0:
        raise ValueError(f"{argument}: a NULL pointer with {count} elements")
    view.pointer = <void*><uintptr_t>pointer
    if type(dtype) is DataType:
        return _set_type(view, <int>dtype, count)
    return _set_type(view, _explicit_type(dtype, argument), count)


cdef int _explicit_type(object dtype, str argument) except -1:
    if isinstance(dtype, np.dtype) or (isinstance(dtype, type) and issubclass(dtype, (np.generic, bool, complex))):
        dtype = np.dtype(dtype)
        if dtype.num < 64 and _of_numpy[dtype.num] >= 0:
            return _of_numpy[dtype.num]
    try:
        return <int>as_datatype(dtype)
    except TypeError as error:
        raise TypeError(f"{argument}: {error}") from None


cdef int _read_cupy(object array, View* view, str argument) except -1:
    memory = array.data
    view.pointer = <void*><uintptr_t>memory.ptr
    view.device = memory.device_id
    view.framework = CUPY
    # The flag itself costs a tenth of the flags object that shows it; it has been there since CuPy 8.
    contiguous = getattr(array, "_c_contiguous", None)
    if not (array.flags.c_contiguous if contiguous is None else contiguous):
        raise _not_contiguous(argument, array.shape, array.strides)
    dtype = array.dtype
    cdef int number = dtype.num
    cdef int found = _of_numpy[number] if 0 <= number < 64 else -1
    if found < 0:
        found = _numpy_by_name(dtype, argument)
    return _set_type(view, found, array.size)


# torch's dtypes to packed types; filled at first sight, since torch is not imported here.
cdef dict _of_torch = {}


cdef int _read_torch(object tensor, View* view, str argument) except -1:
    """Read a tensor of a torch older than 2.10 through its attributes."""
    if not tensor.is_contiguous():
        raise _not_contiguous(argument, tensor.shape, tensor.stride())
    dtype = tensor.dtype
    found = _of_torch.get(dtype)
    if found is None:
        name = str(dtype).removeprefix("torch.")
        if name in ("bool", "complex64", "complex128"):
            found = _of_numpy[np.dtype(name).num]
        else:
            found = _explicit_type(name, argument)
        _of_torch[dtype] = found
    device = tensor.device
    if device.type == "cuda":
        view.device = device.index
    elif device.type == "cpu":
        view.device = HOST_MEMORY
    else:
        raise ValueError(f"{argument}: a tensor on {device} is not for NCCL")
    view.framework = TORCH
    view.pointer = <void*><uintptr_t>tensor.data_ptr()
    _set_type(view, <int>found, tensor.numel())
    if view.flavour == COMPLEX:
        _refuse_lazy_conjugate(tensor, argument)
    return 0


cdef int _read_cuda_core(object buffer, View* view) except -1:
    """Read a cuda.core Buffer: bytes without a type, so uint8."""
    view.pointer = <void*><uintptr_t>int(buffer.handle)
    view.device = buffer.device_id if buffer.device_id >= 0 else UNKNOWN_DEVICE
    return _set_type(view, <int>ncclUint8, buffer.size)


cdef int _read_interface(dict interface, View* view, str argument) except -1:
    """Read ``__cuda_array_interface__``, version 2 or 3."""
    if interface.get("mask") is not None:
        raise ValueError(f"{argument}: the array has a mask, which NCCL cannot honour")
    shape = interface["shape"]
    pointer, readonly = interface["data"]
    dtype = np.dtype(interface["typestr"])
    strides = interface.get("strides")
    cdef size_t count = 1
    for extent in shape:
        count *= <size_t>extent
    if strides is not None and count > 1:
        expected = dtype.itemsize
        for extent, stride in zip(reversed(shape), reversed(strides)):
            if extent != 1 and stride != expected:
                raise _not_contiguous(argument, shape, strides)
            expected *= extent
    if not dtype.isnative:
        raise TypeError(
            f"{argument}: the array's byte order is not this machine's ({dtype!r}); pass "
            "array.astype(array.dtype.newbyteorder('='))"
        )
    view.pointer = <void*><uintptr_t>pointer
    view.readonly = bool(readonly)
    view.device = _device_of_pointer(view.pointer) if count else UNKNOWN_DEVICE
    stream = interface.get("stream")
    if stream is not None:
        view.framework = INTERFACE
        view.stream = <CUstream><uintptr_t>stream
    return _set_type(view, _explicit_type(dtype, argument), count)


cdef int _device_of_pointer(void* pointer) except -3:
    """Ask the driver on which device memory lies; page-locked and unknown memory has none."""
    cdef int kind = 0, ordinal = UNKNOWN_DEVICE
    require_driver()
    if driver.cuPointerGetAttribute(&kind, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, <CUdeviceptr>pointer) != CUDA_SUCCESS:
        return UNKNOWN_DEVICE
    if kind != CU_MEMORYTYPE_DEVICE:
        return UNKNOWN_DEVICE
    driver.cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, <CUdeviceptr>pointer)
    return ordinal


cdef int _read_dlpack(object obj, View* view, str argument) except -1:
    """Read any ``__dlpack__`` object. Its stream is not waited for: NCCL is enqueued on a stream itself."""
    cdef DLManagedTensorVersioned* versioned
    device_type = int(obj.__dlpack_device__()[0])
    # -1 asks a CUDA producer not to synchronise; a CPU producer takes only None.
    stream = -1 if device_type in (kDLCUDA, kDLCUDAManaged) else None
    if _takes_max_version(obj):
        capsule = obj.__dlpack__(stream=stream, max_version=(1, 0))
    else:
        capsule = obj.__dlpack__(stream=stream)
    # The capsule stays unused: its own destructor releases it, while `obj` goes on owning the memory.
    if PyCapsule_IsValid(capsule, b"dltensor_versioned"):
        versioned = <DLManagedTensorVersioned*>PyCapsule_GetPointer(capsule, b"dltensor_versioned")
        if versioned.version.major > DLPACK_MAJOR_KNOWN:
            raise BufferError(f"{argument}: DLPack {versioned.version.major} is newer than what ncclpy reads")
        view.readonly = (versioned.flags & DLPACK_FLAG_BITMASK_READ_ONLY) != 0
        return _read_dltensor(&versioned.dl_tensor, view, argument)
    return _read_dltensor(
        &(<DLManagedTensor*>PyCapsule_GetPointer(capsule, b"dltensor")).dl_tensor, view, argument
    )


cdef dict _versioned_types = {}


cdef bint _takes_max_version(object obj) except -1:
    """Find out once for a type whether its ``__dlpack__`` knows DLPack 1.0's arguments."""
    known = _versioned_types.get(type(obj))
    if known is None:
        try:
            obj.__dlpack__(max_version=(1, 0))
            known = True
        except TypeError:
            known = False
        _versioned_types[type(obj)] = known
    return known


cdef int current_stream(const View* view, int device, CUstream* out) except -1:
    """Store the stream that stands for ``stream=None``: the framework's current one, else the legacy default."""
    cdef void* handle = NULL
    out[0] = NULL
    if view.framework == EXCHANGE_API:
        if view.api.current_work_stream(kDLCUDA, device, &handle) != 0:
            _reraise("stream")
        out[0] = <CUstream>handle
    elif view.framework == TORCH:
        out[0] = <CUstream><uintptr_t>sys.modules["torch"]._C._cuda_getCurrentRawStream(device)
    elif view.framework == CUPY:
        out[0] = <CUstream><uintptr_t>sys.modules["cupy"].cuda.get_current_stream(device).ptr
    elif view.framework == INTERFACE:
        out[0] = view.stream
    return 0


cdef class Buffer:
    """Hold memory that is already known: pointer, count and data type, checked once and free to pass ever after.

    Parameters
    ----------
    pointer : int
        The address of the first element.
    count : int
        The number of elements of `dtype`.
    dtype : DataType, str or numpy.dtype
        The data type; a complex or bool numpy dtype is carried as for arrays.
    device : int, optional
        The device on which the memory lies; unknown, and so not checked, by default.
    owner : object, optional
        What keeps the memory alive; the buffer holds a reference to it.
    """

    def __init__(self, pointer, count, dtype, *, device=None, owner=None):
        self.view.readonly = False
        self.view.framework = NO_FRAMEWORK
        _set_explicit(&self.view, pointer, count, dtype, "Buffer")
        self.view.device = UNKNOWN_DEVICE if device is None else as_device(device)
        self.owner = owner

    @staticmethod
    def of(array):
        """Return the prepared buffer of an array, which the buffer keeps alive.

        Parameters
        ----------
        array : object
            Anything that a collective takes.
        """
        cdef Buffer buffer = Buffer.__new__(Buffer)
        read_view(array, &buffer.view, "array")
        buffer.owner = array
        return buffer

    @property
    def pointer(self):
        """The address of the first element."""
        return <uintptr_t>self.view.pointer

    @property
    def count(self):
        """The number of elements of `dtype`; a complex array counts double."""
        return self.view.count

    @property
    def dtype(self):
        """The `DataType` that NCCL sees."""
        return DataType(self.view.datatype)

    @property
    def nbytes(self):
        """The size in bytes."""
        return self.view.nbytes

    @property
    def device(self):
        """The device's ordinal, or None for CPU memory and memory of which nothing is known."""
        return self.view.device if self.view.device >= 0 else None

    def __repr__(self):
        return (
            f"Buffer({<uintptr_t>self.view.pointer:#x}, {self.view.count}, {self.dtype.name.lower()!r}, "
            f"device={self.device})"
        )
