"""From a Python object to pointer, count, data type and device.

How to read an object (its protocol) is decided once for its exact type and cached. No framework is imported: an object
of a framework exists only if the framework is imported already. The protocol is the fastest that the type's library
offers: numpy's C API, a native read function for the type (torch, if its extension is loaded), DLPack's C exchange API
(torch since 2.10), attributes (CuPy, older torch, cuda.core), then ``__cuda_array_interface__`` and ``__dlpack__``
(the latter for JAX).
"""

import math
import sys

from cpython.exc cimport PyErr_Clear, PyErr_Occurred
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid
from libc.stdint cimport int64_t, uintptr_t
cimport numpy as cnp

from ncclpy.abi.dlpack cimport (
    DLManagedTensor,
    DLManagedTensorVersioned,
    DLPACK_FLAG_BITMASK_READ_ONLY,
    DLPACK_MAJOR_KNOWN,
    DLTensor,
    kDLCPU,
    kDLCUDA,
    kDLCUDAHost,
    kDLCUDAManaged,
)
from ncclpy.abi.driver cimport (
    CU_MEMORYTYPE_DEVICE,
    CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
    CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
    CUDA_SUCCESS,
    CUdeviceptr,
)
from ncclpy.abi.nccl cimport ncclUint8
from ncclpy.abi.tensor_reader cimport NCCLPY_ON_CPU, ncclpy_read_tensor
from ncclpy.core.arguments.datatypes cimport (
    BYTES, COMPLEX, ITEMSIZE, ElementType, Reader, as_real, dlpack_capsule, exchange_api_of, name_of, numpy_view,
    of_anything, of_dlpack, of_dtype, of_numpy, of_torch, reader_of, times_overflows, typestr,
)
from ncclpy.core.runtime.device cimport as_device
from ncclpy.core.runtime.library cimport driver, host_engine, require_driver

import numpy as np

from ncclpy.errors import not_copied
from ncclpy.types import DataType

cdef extern from *:
    size_t MAX_BYTES "((size_t)PTRDIFF_MAX)"  # bytes of any one object

cnp.import_array()

# Protocols: how objects of a type are read.
cdef enum:
    BY_NUMPY
    BY_EXCHANGE_API
    BY_TORCH
    BY_CUPY
    BY_CUDA_CORE
    BY_JAX
    BY_INTERFACE
    BY_DLPACK
    BY_BUFFER
    BY_TUPLE

cdef class _Protocol:
    """How objects of one type are read."""

    cdef int kind
    cdef Reader reader  # its function, if set, is tried before `kind`
    cdef const DLPackExchangeAPI* api  # or NULL
    cdef object is_neg, is_conj  # torch's methods, or None
    cdef bint torch  # the type has torch's attributes


cdef dict _protocols = {}

# The type that was read last: programs mostly use one type of array.
cdef object _recent_type = None
cdef _Protocol _recent_protocol = None


cdef int read_view(object obj, View* view, str argument) except -1:
    """Fill `view` from any object that describes memory; `argument` names the object in errors."""
    cdef _Protocol protocol
    cdef int kind
    cdef ncclpy_read_tensor tensor
    view.framework = NO_FRAMEWORK
    view.readonly = False
    view.device = UNKNOWN_DEVICE
    if type(obj) is Buffer:
        view[0] = (<Buffer>obj).view
        return 0
    if cnp.PyArray_CheckExact(obj):
        return _read_numpy(<cnp.ndarray>obj, view, argument)
    if type(obj) is _recent_type:
        protocol = _recent_protocol
    else:
        protocol = _remember(obj, argument)
    if protocol.reader.read != NULL and protocol.reader.read(<void*>obj, &tensor) == 0:
        return _read_natively(&tensor, protocol, view, argument)
    kind = protocol.kind
    if kind == BY_EXCHANGE_API:
        return _read_exchange_api(obj, protocol, view, argument)
    if kind == BY_NUMPY:
        return _read_numpy(<cnp.ndarray>obj, view, argument)
    if kind == BY_TUPLE:
        return _read_tuple(obj, view, argument)
    if kind == BY_CUPY:
        return _read_cupy(obj, view, argument)
    if kind == BY_TORCH:
        return _read_torch(obj, view, argument)
    if kind == BY_CUDA_CORE:
        return _read_cuda_core(obj, view, argument)
    if kind == BY_JAX:
        return _read_jax(obj, view, argument)
    if kind == BY_INTERFACE:
        return _read_interface(obj.__cuda_array_interface__, view, argument)
    if kind == BY_BUFFER:
        view[0] = (<Buffer>obj).view
        if view.pointer == NULL and view.nbytes != 0:
            raise ValueError(f"{argument}: {obj!r} is closed")
        return 0
    return _read_dlpack(obj, view, argument)


cdef _Protocol _remember(object obj, str argument):
    """Return the protocol of the object's type, which is decided if the type is new, and note it as the last one."""
    global _recent_type, _recent_protocol
    protocol = _protocols.get(type(obj))
    if protocol is None:
        protocol = _protocol_of(obj, argument)
        _protocols[type(obj)] = protocol
    _recent_protocol = protocol
    _recent_type = type(obj)
    return protocol


cdef _Protocol _protocol_of(object obj, str argument):
    """Decide once how objects of this type are read."""
    cdef _Protocol protocol = _Protocol()
    kind = type(obj)
    protocol.api = exchange_api_of(kind)
    protocol.torch = hasattr(kind, "data_ptr")
    protocol.is_neg = _method(kind, "is_neg")
    protocol.is_conj = _method(kind, "is_conj")
    if isinstance(obj, np.ndarray):
        if isinstance(obj, np.ma.MaskedArray):
            raise TypeError(f"{argument}: a masked array; NCCL knows no masks: pass its data or array.filled(...)")
        protocol.kind = BY_NUMPY
    elif isinstance(obj, Buffer):
        protocol.kind = BY_BUFFER
    elif isinstance(obj, tuple):
        protocol.kind = BY_TUPLE
    elif protocol.api != NULL:
        protocol.kind = BY_EXCHANGE_API
    elif kind.__module__.partition(".")[0] == "torch" and hasattr(kind, "data_ptr"):
        protocol.kind = BY_TORCH
    elif kind.__module__.partition(".")[0] == "cupy" and hasattr(kind, "data"):
        protocol.kind = BY_CUPY
    elif kind.__module__.startswith("cuda.core") and hasattr(kind, "memory_resource"):
        protocol.kind = BY_CUDA_CORE
    elif kind.__module__.partition(".")[0] in ("jax", "jaxlib") and hasattr(kind, "block_until_ready"):
        protocol.kind = BY_JAX
    elif hasattr(kind, "__cuda_array_interface__") or "__cuda_array_interface__" in getattr(obj, "__dict__", ()):
        protocol.kind = BY_INTERFACE
    elif hasattr(kind, "__dlpack__"):
        protocol.kind = BY_DLPACK
    else:
        raise TypeError(
            f"{argument}: cannot take memory from {kind.__module__}.{kind.__qualname__}; pass a numpy, torch or CuPy "
            "array, an object with __cuda_array_interface__ or __dlpack__, a cuda.core Buffer, an ncclpy.Buffer, or "
            "(pointer, count, dtype)"
        )
    protocol.reader = reader_of(kind)  # the Reader is kept for good, so it is made only for types that can be read
    return protocol


cdef object _method(object kind, str name):
    method = getattr(kind, name, None)
    return method if callable(method) else None


cdef inline int _read_natively(
    const ncclpy_read_tensor* tensor, _Protocol protocol, View* view, str argument
) except -1:
    """Fill `view` from what the native function has read; it refuses lazy and non-contiguous tensors."""
    cdef ElementType found
    view.framework = EXCHANGE_API if protocol.api != NULL else TORCH
    view.api = protocol.api
    view.device = HOST_MEMORY if tensor.device == NCCLPY_ON_CPU else tensor.device
    view.pointer = tensor.data
    of_dlpack(tensor.code, tensor.bits, 1, &found, argument)
    return _set_type(view, &found, tensor.count, argument)


cdef int _read_numpy(cnp.ndarray array, View* view, str argument) except -1:
    cdef const ElementType* found = of_numpy(cnp.PyArray_TYPE(array))
    cdef ElementType rare
    if found == NULL:
        of_dtype(array.dtype, &rare, argument)
        found = &rare
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
    return _set_type(view, found, <size_t>cnp.PyArray_SIZE(array), argument)


cdef inline int _set_type(View* view, const ElementType* type, size_t count, str argument) except -1:
    """Set data type, flavour, count and size from a type and a count of array elements; `view.pointer` must be set."""
    view.datatype, view.flavour, view.unit = type.datatype, type.flavour, type.unit
    if (
        times_overflows(count, view.unit, &view.count)
        or times_overflows(view.count, ITEMSIZE[view.datatype], &view.nbytes)
        or view.nbytes > MAX_BYTES
    ):
        raise _too_large(argument, count)
    if view.pointer == NULL and count:
        raise ValueError(
            f"{argument}: a NULL pointer with {count} elements; there is no memory behind it (a fake tensor has none)"
        )
    return 0


cdef object _too_large(str argument, object count):
    return ValueError(f"{argument}: {count} elements are more than memory can hold; their size does not fit 63 bits")


cdef object _not_contiguous(str argument, object shape, object strides):
    return ValueError(
        f"{argument}: the array is not contiguous (shape {tuple(shape)}, strides {tuple(strides)}); NCCL reads memory "
        "from the first element on. Pass a C-contiguous array or copy it first"
    )


cdef inline int _read_exchange_api(object obj, _Protocol protocol, View* view, str argument) except -1:
    cdef DLTensor tensor
    if protocol.api.dltensor_from_py_object_no_sync(<void*>obj, &tensor) != 0:
        if not protocol.torch:
            return _reraise(argument)
        PyErr_Clear()  # `_read_torch` reads the tensor, or raises a better error
        return _read_torch(obj, view, argument)
    view.framework = EXCHANGE_API
    view.api = protocol.api
    _read_dltensor(&tensor, view, argument)
    # DLPack does not show that a tensor is a lazy view, for which the memory holds other values than the tensor.
    if protocol.is_neg is not None and protocol.is_neg(obj) is not False:
        raise _lazy(argument, "negative", "neg")
    if view.flavour == COMPLEX and protocol.is_conj is not None and protocol.is_conj(obj) is not False:
        raise _lazy(argument, "conjugate", "conj")
    return 0


cdef object _lazy(str argument, str what, str which):
    return ValueError(
        f"{argument}: the tensor is a lazy {what}, its memory holds other values; pass tensor.resolve_{which}()"
    )


cdef int _refuse_lazy(object tensor, str argument) except -1:
    """Raise if a tensor is one of torch's lazy views. Only the slower protocols, BY_TORCH and BY_DLPACK, call this."""
    for what, which in (("conjugate", "conj"), ("negative", "neg")):
        is_lazy = _method(type(tensor), f"is_{which}")
        if is_lazy is not None and is_lazy(tensor):
            raise _lazy(argument, what, which)
    return 0


cdef object _first_line(error):
    return (str(error).splitlines() or [type(error).__name__])[0]


cdef int _reraise(str argument) except -1:
    """Raise the exception that another library's C function has set, or a BufferError if it has set none."""
    if PyErr_Occurred() != NULL:
        return -1
    raise BufferError(f"{argument}: the tensor cannot be read through DLPack")


cdef inline int _read_dltensor(const DLTensor* tensor, View* view, str argument) except -1:
    cdef size_t count = 1
    cdef int64_t expected = 1
    cdef bint overflows = False
    cdef int i
    cdef ElementType found
    of_dlpack(tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes, &found, argument)
    for i in range(tensor.ndim):
        if tensor.shape[i] == 0:
            count = 0
            overflows = False
            break
        overflows |= times_overflows(count, <size_t>tensor.shape[i], &count)
    if overflows:
        raise _too_large(argument, " x ".join([str(tensor.shape[i]) for i in range(tensor.ndim)]))
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
    view.pointer = NULL if tensor.data == NULL else <char*>tensor.data + tensor.byte_offset
    return _set_type(view, &found, count, argument)


cdef int _read_tuple(object triple, View* view, str argument) except -1:
    if len(triple) != 3:
        raise TypeError(f"{argument}: a tuple stands for (pointer, count, dtype), got {len(triple)} items")
    pointer, count, dtype = triple
    return _set_explicit(view, pointer, count, dtype, argument)


cdef int _set_explicit(View* view, object pointer, object count, object dtype, str argument) except -1:
    """Fill a view from a caller's pointer, count and data type; only types and ranges are checked, not the memory."""
    if not isinstance(pointer, int) or not isinstance(count, int):
        raise TypeError(
            f"{argument}: pointer and count are ints, got {type(pointer).__name__}, {type(count).__name__}"
        )
    cdef size_t elements
    cdef ElementType found
    view.pointer = _address(pointer, argument)
    try:
        elements = count
    except OverflowError:
        if count < 0:
            raise ValueError(f"{argument}: count {count} must not be negative") from None
        raise _too_large(argument, count) from None
    if type(dtype) is DataType:
        as_real(&found, <int>dtype)
    else:
        of_anything(dtype, &found, argument)
    return _set_type(view, &found, elements, argument)


cdef void* _address(object pointer, str argument) except? NULL:
    try:
        return <void*><uintptr_t>pointer
    except OverflowError:
        raise ValueError(f"{argument}: pointer {pointer:#x} lies outside the range of addresses") from None


cdef int _read_cupy(object array, View* view, str argument) except -1:
    cdef ElementType found
    memory = array.data
    view.pointer = <void*><uintptr_t>memory.ptr
    view.device = memory.device_id
    view.framework = CUPY
    # Reading the flag itself costs a tenth of making the flags object; CuPy has it since version 8.
    contiguous = getattr(array, "_c_contiguous", None)
    if not (array.flags.c_contiguous if contiguous is None else contiguous):
        raise _not_contiguous(argument, array.shape, array.strides)
    of_dtype(array.dtype, &found, argument)
    return _set_type(view, &found, array.size, argument)


cdef int _read_torch(object tensor, View* view, str argument) except -1:
    """Read a tensor through its attributes: with a torch older than 2.10, or if its C function refuses the tensor."""
    cdef ElementType found
    device = tensor.device
    if device.type == "cuda":
        view.device = device.index
    elif device.type == "cpu":
        view.device = HOST_MEMORY
    else:
        raise ValueError(f"{argument}: a tensor on {device} is not for NCCL")
    if getattr(tensor, "is_quantized", False):
        raise TypeError(f"{argument}: a quantized tensor, whose scale NCCL does not know; pass tensor.int_repr()")
    layout = str(getattr(tensor, "layout", "torch.strided"))
    if layout != "torch.strided" or getattr(tensor, "is_nested", False):
        kind = "nested" if getattr(tensor, "is_nested", False) else layout.removeprefix("torch.")
        raise TypeError(f"{argument}: a {kind} tensor is not one block of memory; pass its parts, or a dense copy")
    _refuse_lazy(tensor, argument)
    if not tensor.is_contiguous():
        raise _not_contiguous(argument, tensor.shape, tensor.stride())
    try:
        view.pointer = _address(tensor.data_ptr(), argument)
    except RuntimeError as error:  # a wrapper, such as those of torch.func
        raise TypeError(f"{argument}: the tensor has no memory of its own: {_first_line(error)}") from None
    view.framework = TORCH
    of_torch(tensor.dtype, tensor.element_size(), &found, argument)
    return _set_type(view, &found, tensor.numel(), argument)


cdef int _read_cuda_core(object buffer, View* view, str argument) except -1:
    """Read a cuda.core Buffer: bytes without a type, so uint8."""
    cdef ElementType found
    as_real(&found, <int>ncclUint8)
    view.pointer = <void*><uintptr_t>int(buffer.handle)
    view.device = buffer.device_id if buffer.device_id >= 0 else UNKNOWN_DEVICE
    return _set_type(view, &found, buffer.size, argument)


cdef int _read_interface(dict interface, View* view, str argument) except -1:
    """Read ``__cuda_array_interface__``, version 2 or 3."""
    cdef ElementType found
    if interface.get("mask") is not None:
        raise ValueError(f"{argument}: the array has a mask, which NCCL cannot honour")
    shape = interface["shape"]
    pointer, readonly = interface["data"]
    dtype = np.dtype(interface["typestr"])
    strides = interface.get("strides")
    count = math.prod(shape)
    if not 0 <= count <= MAX_BYTES:
        raise _too_large(argument, count) if count > 0 else ValueError(f"{argument}: a negative shape, {shape}")
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
    view.pointer = _address(pointer or 0, argument)  # an empty array may have none
    view.readonly = bool(readonly)
    view.device = _device_of_pointer(view.pointer) if count else UNKNOWN_DEVICE
    stream = interface.get("stream")
    if stream is not None:
        view.framework = INTERFACE
        view.stream = <CUstream><uintptr_t>stream
    of_dtype(dtype, &found, argument)
    return _set_type(view, &found, count, argument)


cdef int _read_jax(object obj, View* view, str argument) except -1:
    """Wait until a JAX array is computed and read it: JAX has no current stream on which NCCL could wait for it.

    ``__dlpack__`` is used because JAX's ``__cuda_array_interface__`` has neither bfloat16 nor CPU memory. No stream is
    passed: JAX takes any number for a stream, even -1.
    """
    obj.block_until_ready()
    capsule = obj.__dlpack__()
    _read_dltensor(
        &(<DLManagedTensor*>PyCapsule_GetPointer(capsule, b"dltensor")).dl_tensor, view, argument
    )
    view.readonly = True  # JAX's arrays never change
    return 0


cdef int _device_of_pointer(void* pointer) except -3:
    """Ask the driver on which device memory lies; return UNKNOWN_DEVICE for page-locked and unknown memory."""
    cdef int kind = 0, ordinal = UNKNOWN_DEVICE
    require_driver()
    if driver.cuPointerGetAttribute(&kind, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, <CUdeviceptr>pointer) != CUDA_SUCCESS:
        return UNKNOWN_DEVICE
    if kind != CU_MEMORYTYPE_DEVICE:
        return UNKNOWN_DEVICE
    driver.cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, <CUdeviceptr>pointer)
    return ordinal


cdef int _read_dlpack(object obj, View* view, str argument) except -1:
    """Read any ``__dlpack__`` object, without waiting for its stream: NCCL's work is enqueued on a stream as well."""
    cdef DLManagedTensorVersioned* versioned
    _refuse_lazy(obj, argument)
    device_type = int(obj.__dlpack_device__()[0])
    # -1 asks a CUDA producer not to synchronise; a CPU producer takes only None.
    stream = -1 if device_type in (kDLCUDA, kDLCUDAManaged) else None
    if _takes_max_version(obj):
        capsule = obj.__dlpack__(stream=stream, max_version=(1, 0))
    else:
        capsule = obj.__dlpack__(stream=stream)
    # The capsule is not consumed: its own destructor releases it, and `obj` continues to own the memory.
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
    """Return whether the ``__dlpack__`` of a type takes DLPack 1.0's arguments; found out once for each type."""
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
    """Store the stream for ``stream=None``, see the declaration."""
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


cdef int _device_of_view(const View* view) except -3:
    """Return the device on which a view's memory lies, or `HOST_MEMORY`.

    On the host engine all memory counts as `HOST_MEMORY`. With NCCL an empty view does too, and so does memory on a
    device that neither the view nor the driver knows.
    """
    if view.device == HOST_MEMORY or view.count == 0:
        return HOST_MEMORY
    require_driver()
    if host_engine:
        return HOST_MEMORY
    device = view.device if view.device >= 0 else _device_of_pointer(view.pointer)
    return device if device >= 0 else HOST_MEMORY


cdef class Buffer:
    """Buffer(pointer, count, dtype, *, device=None, owner=None)
--

Hold the pointer, count and data type of memory, so that a call which gets the buffer need not read an array.

    Other libraries read it without a copy: ``torch.from_dlpack(buffer)``, ``cupy.from_dlpack(buffer)``, and, if it is
    CPU memory, ``numpy.asarray(buffer)``.

    Parameters
    ----------
    pointer : int
        The address of the first element.
    count : int
        The number of elements of `dtype`.
    dtype : DataType, int, str, numpy.dtype or torch.dtype
        The data type; a type that NCCL lacks, such as bool or complex64, is carried as for arrays.
    device : int, optional
        The device on which the memory lies; by default unknown, and so not checked.
    owner : object, optional
        An object that keeps the memory alive; the buffer holds a reference to it.
    """

    def __init__(self, pointer, count, dtype, *, device=None, owner=None):
        self.view.readonly = False
        self.view.framework = NO_FRAMEWORK
        _set_explicit(&self.view, pointer, count, dtype, "Buffer")
        self.keep_name()
        self.view.device = UNKNOWN_DEVICE if device is None else as_device(device)
        self.owner = owner

    @staticmethod
    def of(array):
        """Return a buffer over the memory of an array; the buffer keeps the array alive.

        Parameters
        ----------
        array : object
            Anything that a collective takes.
        """
        cdef Buffer buffer = Buffer.__new__(Buffer)
        read_view(array, &buffer.view, "array")
        buffer.keep_name()
        buffer.owner = array
        return buffer

    cdef int keep_name(self) except -1:
        """Keep the name of a type that is sent as bytes, since the table of names may forget it."""
        self.type_name = name_of(self.view.datatype, self.view.flavour) if self.view.flavour >= BYTES else None
        return 0

    cdef str name(self):
        """Return the name of the data type."""
        return name_of(self.view.datatype, self.view.flavour) if self.type_name is None else self.type_name

    @property
    def pointer(self):
        """The address of the first element."""
        return <uintptr_t>self.view.pointer

    @property
    def count(self):
        """The number of elements of `Buffer.dtype`: 2 for each complex element, `itemsize` for one sent as bytes."""
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
        """The device's ordinal, or None for CPU memory and memory on an unknown device."""
        return self.view.device if self.view.device >= 0 else None

    def __array__(self, dtype=None, copy=None):
        """Return CPU memory as a numpy array of one dimension; raise TypeError for memory of a GPU."""
        device = _device_of_view(&self.view)
        if device != HOST_MEMORY:
            raise TypeError(
                f"{self!r} is memory of a GPU, which numpy cannot read: make a tensor with torch.from_dlpack(buffer) "
                "or an array with cupy.from_dlpack(buffer), and copy that to the CPU"
            )
        array = numpy_view(self.view.pointer, self.view.nbytes, self.name(), self.view.readonly, self)
        if dtype is not None and np.dtype(dtype) != array.dtype:
            if copy is False:
                raise ValueError(f"{self!r} as {np.dtype(dtype)} needs a copy")
            return array.astype(dtype)
        return array.copy() if copy else array

    @property
    def __cuda_array_interface__(self):
        """The description of GPU memory for CuPy, numba and others; CPU memory has none."""
        if _device_of_view(&self.view) == HOST_MEMORY:
            raise AttributeError(f"{self!r} is CPU memory, which has no __cuda_array_interface__")
        return {
            "shape": (self.view.count // self.view.unit,),
            "typestr": typestr(self.name()),
            "data": (<uintptr_t>self.view.pointer, bool(self.view.readonly)),
            "strides": None,
            "version": 3,
        }

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        """Return a DLPack capsule. Nothing is enqueued for `stream`: the caller orders its accesses to the memory."""
        if copy:
            raise BufferError(f"{self!r} is passed on as it is: copy what from_dlpack returns")
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(f"{self!r} is passed on where it lies, {self.__dlpack_device__()}, not {dl_device}")
        return dlpack_capsule(
            self.view.pointer, self.view.count // self.view.unit, self.name(), _device_of_view(&self.view),
            self.view.readonly, max_version is not None and max_version[0] >= 1, self,
        )

    def __dlpack_device__(self):
        """Return DLPack's type and number of the device: ``(1, 0)`` for CPU memory, ``(2, 3)`` for memory of GPU 3."""
        cdef int device = _device_of_view(&self.view)
        if device == HOST_MEMORY:
            return kDLCPU, 0
        return kDLCUDA, device

    def __reduce__(self):
        raise not_copied(self, "pass the array, and make the buffer of it where it is used")

    def __repr__(self):
        return (
            f"Buffer({<uintptr_t>self.view.pointer:#x}, {self.view.count}, {self.dtype.name.lower()!r}, "
            f"device={self.device})"
        )
