"""Devices, contexts and plain device memory.

While a stream is captured, CUDA refuses calls that it considers unsafe (to query an event, to allocate) and
invalidates the capture: in all threads in global mode, in the capturing thread in thread-local mode. The calls that
ncclpy makes for its own purposes do not touch the captured stream. So its threads are in relaxed mode for their whole
life, and a user's thread is in relaxed mode while it allocates or frees memory, queries the watchdog's events, or runs
a pre-call hook.

A device is an ordinal, as in CUDA. ncclpy only uses primary contexts, those of the CUDA runtime, torch and CuPy, and
leaves the calling thread's current device as it found it.
"""

import contextlib
from operator import index as _index

import uuid as _uuid

from libc.stdint cimport uintptr_t
from libc.stdlib cimport calloc

from ncclpy.abi.driver cimport (
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
    CU_STREAM_CAPTURE_MODE_RELAXED, CUdevice, CUdeviceptr, CUresult, CUstream, CUstreamCaptureMode, CUuuid,
)
from ncclpy.core.runtime.library cimport check_driver, driver, host_engine, require_driver


cdef CUstreamCaptureMode relax() noexcept nogil:
    """Switch this thread to relaxed capture mode, in which no call is refused; return the previous mode."""
    cdef CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED
    if driver.cuThreadExchangeStreamCaptureMode != NULL:
        driver.cuThreadExchangeStreamCaptureMode(&mode)
    return mode


cdef void restore(CUstreamCaptureMode mode) noexcept nogil:
    if driver.cuThreadExchangeStreamCaptureMode != NULL:
        driver.cuThreadExchangeStreamCaptureMode(&mode)


# Primary contexts are retained once and never released, as by the CUDA runtime: another library may still have streams
# in them.
cdef CUcontext* _contexts = NULL
cdef int _count = -1


cdef int _load() except -1:
    """Load the driver and ask it for the number of devices; the first answer is kept."""
    global _contexts, _count
    cdef int count = 0
    require_driver()
    check_driver(driver.cuDeviceGetCount(&count), b"cuDeviceGetCount")
    if _contexts == NULL:
        _contexts = <CUcontext*>calloc(count + 1, sizeof(CUcontext))
        if _contexts == NULL:
            raise MemoryError
        _count = count
    return 0


def device_count():
    """Return how many devices this process sees (`cuDeviceGetCount`)."""
    _load()
    return _count


cdef int known_devices() except -1:
    """Return the number of devices as `device_count` does, but ask the driver only once."""
    if _count < 0:
        _load()
    return _count


cdef int as_device(object device) except -2:
    """Return the ordinal that `device` stands for.

    `device` may be None (the current device), an int, an object with ``device_id`` (cuda.core) or ``index`` (torch),
    or an integer of numpy. Raise ValueError if there is no such device.
    """
    cdef object number
    if device is None:
        return current_device()
    if isinstance(device, int):
        number = device
    elif isinstance(getattr(device, "device_id", None), int):  # cuda.core.Device
        number = device.device_id
    elif isinstance(getattr(device, "index", None), int):  # torch.device
        number = device.index
    elif hasattr(type(device), "__index__"):  # numpy's integers
        number = _index(device)
    else:
        raise TypeError(
            "device: expected its number (0, 1, ...), a cuda.core.Device or a torch.device with an index, got "
            f"{device!r}"
        )
    if _count < 0 or driver.cuDeviceGetCount == NULL:
        _load()
    if number < 0 or number >= _count:
        _no_such(number)
    return number


cdef int _no_such(object ordinal) except -1:
    how = "CUDA_VISIBLE_DEVICES may hide some"
    if host_engine:
        how = "NCCLPY_HOST_DEVICES says how many the host engine shows"
    numbers = f" (0 to {_count - 1})" if _count > 0 else ""
    raise ValueError(f"device {ordinal} does not exist: this process sees {_count}{numbers}; {how}")


cdef int current_device() except -2:
    """Return the calling thread's current device; 0 if the thread has no context, as for the CUDA runtime."""
    cdef CUcontext context = NULL
    cdef CUdevice ordinal = 0
    require_driver()
    check_driver(driver.cuCtxGetCurrent(&context), b"cuCtxGetCurrent")
    if context != NULL:
        check_driver(driver.cuCtxGetDevice(&ordinal), b"cuCtxGetDevice")
    return ordinal


cdef CUcontext context_of(int ordinal) except NULL:
    """Return the primary context of a device, retained on first use."""
    cdef CUresult result
    if _count < 0 or driver.cuDevicePrimaryCtxRetain == NULL:
        _load()
    if ordinal < 0 or ordinal >= _count:
        _no_such(ordinal)
    if _contexts[ordinal] == NULL:
        with nogil:
            result = driver.cuDevicePrimaryCtxRetain(&_contexts[ordinal], ordinal)
        check_driver(result, b"cuDevicePrimaryCtxRetain")
    return _contexts[ordinal]


cdef CUcontext enter_device(int ordinal) except? NULL:
    """Make a device current and return the previous context, for `leave_device`; it may be NULL."""
    cdef CUcontext context = context_of(ordinal)
    cdef CUcontext saved = NULL
    check_driver(driver.cuCtxGetCurrent(&saved), b"cuCtxGetCurrent")
    if saved != context:
        check_driver(driver.cuCtxSetCurrent(context), b"cuCtxSetCurrent")
    return saved


cdef int leave_device(CUcontext saved) except -1:
    """Make the context from `enter_device` current again; mostly it is current already."""
    cdef CUcontext current = NULL
    check_driver(driver.cuCtxGetCurrent(&current), b"cuCtxGetCurrent")
    if current != saved:
        check_driver(driver.cuCtxSetCurrent(saved), b"cuCtxSetCurrent")
    return 0


cdef bint lend_device(int ordinal) noexcept nogil:
    """Make a device current in a thread that has none; return True if `take_device_back` must undo it.

    In a thread without a current device NCCL would make the first device current after every call, which creates a
    context of some 500 MiB on that device.
    """
    cdef CUcontext current = NULL
    if driver.cuCtxGetCurrent == NULL or driver.cuCtxGetCurrent(&current) != 0 or current != NULL:
        return False
    if ordinal < 0 or ordinal >= _count or _contexts[ordinal] == NULL:
        return False
    return driver.cuCtxSetCurrent(_contexts[ordinal]) == 0


cdef void take_device_back() noexcept nogil:
    """Leave the thread without a device."""
    driver.cuCtxSetCurrent(NULL)


cdef bint switch_device(int ordinal, CUcontext* saved) noexcept nogil:
    """Make a device current, without the GIL; return whether it is. `saved` receives the context for `switch_back`."""
    saved[0] = NULL
    if driver.cuCtxGetCurrent == NULL or driver.cuCtxGetCurrent(saved) != 0 or ordinal < 0 or ordinal >= _count:
        return False
    # If two threads do this at once, the context is retained twice, which does not matter: it is never released.
    if _contexts[ordinal] == NULL and driver.cuDevicePrimaryCtxRetain(&_contexts[ordinal], ordinal) != 0:
        return False
    return saved[0] == _contexts[ordinal] or driver.cuCtxSetCurrent(_contexts[ordinal]) == 0


cdef void switch_back(CUcontext saved) noexcept nogil:
    driver.cuCtxSetCurrent(saved)


def current():
    """Return the ordinal of the calling thread's current device."""
    return current_device()


@contextlib.contextmanager
def using(device):
    """Make `device` current inside a ``with`` block and restore the previous one after it.

    Parameters
    ----------
    device : int
        The ordinal.
    """
    cdef uintptr_t saved = <uintptr_t>enter_device(as_device(device))
    try:
        yield
    finally:
        leave_device(<CUcontext>saved)


def name(device=None):
    """Return the name of a device (`cuDeviceGetName`)."""
    cdef char[256] text
    cdef int ordinal = as_device(device)
    check_driver(driver.cuDeviceGetName(text, sizeof(text), ordinal), b"cuDeviceGetName")
    return (<bytes><char*>text).decode()


def uuid(device=None):
    """Return the `uuid.UUID` of a device; two ordinals of one GPU have the same one (`cuDeviceGetUuid`)."""
    cdef CUuuid value
    cdef int ordinal = as_device(device)
    check_driver(driver.cuDeviceGetUuid(&value, ordinal), b"cuDeviceGetUuid")
    return _uuid.UUID(bytes=value.bytes[:16])


def pci_bus_id(device=None):
    """Return the PCI bus id of a device, ``"0000:1b:00.0"`` (`cuDeviceGetPCIBusId`)."""
    cdef char[64] text
    cdef int ordinal = as_device(device)
    check_driver(driver.cuDeviceGetPCIBusId(text, sizeof(text), ordinal), b"cuDeviceGetPCIBusId")
    return (<bytes><char*>text).decode()


def total_memory(device=None):
    """Return the memory of a device in bytes (`cuDeviceTotalMem`)."""
    cdef size_t nbytes = 0
    cdef int ordinal = as_device(device)
    check_driver(driver.cuDeviceTotalMem_v2(&nbytes, ordinal), b"cuDeviceTotalMem_v2")
    return nbytes


def compute_capability(device=None):
    """Return ``(major, minor)`` of a device; the host engine's devices have (0, 0) (`cuDeviceGetAttribute`)."""
    cdef int major = 0, minor = 0
    cdef int ordinal = as_device(device)
    check_driver(
        driver.cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, ordinal),
        b"cuDeviceGetAttribute",
    )
    check_driver(
        driver.cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, ordinal),
        b"cuDeviceGetAttribute",
    )
    return major, minor


def can_access_peer(device, peer):
    """Return whether `device` can read the memory of `peer` directly (`cuDeviceCanAccessPeer`)."""
    cdef int can = 0
    cdef int a = as_device(device), b = as_device(peer)
    check_driver(driver.cuDeviceCanAccessPeer(&can, a, b), b"cuDeviceCanAccessPeer")
    return bool(can)


def driver_version():
    """Return the CUDA version that the driver supports, ``(13, 0)`` (`cuDriverGetVersion`)."""
    cdef int code = 0
    require_driver()
    check_driver(driver.cuDriverGetVersion(&code), b"cuDriverGetVersion")
    return code // 1000, code % 1000 // 10


def allocate(size_t nbytes, device=None):
    """Allocate device memory and return its address (`cuMemAlloc`); release it with `free`.

    Parameters
    ----------
    nbytes : int
        Size in bytes; 0 is rounded up to 1.
    device : int, optional
        The ordinal; the current device by default.
    """
    cdef CUdeviceptr pointer = 0
    cdef CUresult result
    cdef CUstreamCaptureMode mode
    cdef CUcontext saved = enter_device(as_device(device))
    if nbytes == 0:
        nbytes = 1  # the driver refuses 0, but an empty buffer needs an address
    with nogil:
        mode = relax()
        result = driver.cuMemAlloc_v2(&pointer, nbytes)
        restore(mode)
    leave_device(saved)
    check_driver(result, b"cuMemAlloc_v2")
    return pointer


def free(uintptr_t pointer):
    """Free memory that `allocate` returned (`cuMemFree`); waits for work that uses it.

    With ``NCCLPY_HOST_CHECKS=1`` the host engine refuses memory that a communicator has registered or still uses.
    """
    cdef CUresult result
    cdef CUstreamCaptureMode mode
    require_driver()
    with nogil:
        mode = relax()
        result = driver.cuMemFree_v2(pointer)
        restore(mode)
    check_driver(result, b"cuMemFree_v2")


def copy(uintptr_t dst, uintptr_t src, size_t nbytes, stream=None):
    """Copy memory in stream order, in any direction (`cuMemcpyAsync`).

    Parameters
    ----------
    dst, src : int
        Addresses of device or host memory.
    nbytes : int
        Size in bytes.
    stream : optional
        A handle as an int, or an object with ``__cuda_stream__``; the legacy default stream of the current device by
        default. Host memory that is not page-locked may make the call wait.
    """
    cdef CUstream handle = _stream_handle(stream)
    cdef CUresult result
    require_driver()
    with nogil:
        result = driver.cuMemcpyAsync(dst, src, nbytes, handle)
    check_driver(result, b"cuMemcpyAsync")


def memset(uintptr_t pointer, unsigned char value, size_t nbytes, stream=None):
    """Fill memory with one byte value in stream order (`cuMemsetD8Async`)."""
    cdef CUstream handle = _stream_handle(stream)
    cdef CUresult result
    require_driver()
    with nogil:
        result = driver.cuMemsetD8Async(pointer, value, nbytes, handle)
    check_driver(result, b"cuMemsetD8Async")


cdef CUstream _stream_handle(object stream) except? NULL:
    # The full conversion is in `stream`, which imports this module; here handles and __cuda_stream__ objects suffice.
    if stream is None:
        return NULL
    number = stream if isinstance(stream, int) else int(stream.__cuda_stream__()[1])
    try:
        return <CUstream><uintptr_t>number
    except OverflowError:
        raise ValueError(f"stream: {number} is not a stream handle: it lies outside the range of addresses") from None
