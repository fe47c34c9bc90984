"""NCCL's functions for the library itself: its version, errors, settings and memory."""

from libc.stdint cimport int16_t, int32_t, int64_t, int8_t, uint16_t, uint32_t, uint64_t, uint8_t, uintptr_t

from ncclpy.abi.nccl cimport (
    NCCL_API_MAGIC, ncclComm_t, ncclEncryptionConfig_t, ncclParamHandle_t, ncclResult_t, ncclWindow_t,
)
from ncclpy.core.bindings.results cimport PendingHandle, new_pending, state
from ncclpy.core.check cimport check
from ncclpy.core.config cimport struct_version
from ncclpy.core.library cimport nccl, require


# NCCL says nothing on how long it reads the key of ncclSetEncryption: what was set last is kept.
_psk = None


def get_version():
    """Return the version of the loaded NCCL as one number, 23203 for 2.32.3. C: ``ncclGetVersion``."""
    cdef int version = 0
    require(<void*>nccl.ncclGetVersion, b"ncclGetVersion")
    with nogil:
        check(nccl.ncclGetVersion(&version), b"ncclGetVersion", NULL)
    return version


def get_error_string(int result):
    """Return NCCL's text for a result code. C: ``ncclGetErrorString``."""
    cdef const char* text
    require(<void*>nccl.ncclGetErrorString, b"ncclGetErrorString")
    with nogil:
        text = nccl.ncclGetErrorString(<ncclResult_t>result)
    return text.decode(errors="replace") if text != NULL else ""


def get_last_error(uintptr_t comm=0):
    """Return NCCL's text on the last error in this process, empty if there is none. C: ``ncclGetLastError``."""
    cdef const char* text
    require(<void*>nccl.ncclGetLastError, b"ncclGetLastError")
    with nogil:
        text = nccl.ncclGetLastError(<ncclComm_t>comm)
    return text.decode(errors="replace") if text != NULL else ""


def set_encryption(int mode, psk=None):
    """Encrypt NCCL's TCP connections, before the first communicator is made.

    Parameters
    ----------
    mode : int
        0 (``NCCL_ENCRYPTION_MODE_NONE``) or 1 (``NCCL_ENCRYPTION_MODE_PSK``).
    psk : str or bytes, optional
        The key shared by all ranks, for mode 1: at least 32 bytes.

    Returns
    -------
    Result
        C: ``ncclSetEncryption`` (2.32.3).
    """
    global _psk
    cdef ncclEncryptionConfig_t config
    cdef int result
    require(<void*>nccl.ncclSetEncryption, b"ncclSetEncryption")
    if psk is not None and not isinstance(psk, (str, bytes)):
        raise TypeError(f"psk must be a str or bytes, not {type(psk).__name__}")
    cdef bytes key = psk.encode() if isinstance(psk, str) else psk
    if key is not None and b"\0" in key:
        raise ValueError("psk must not contain a NUL")
    config.size = sizeof(ncclEncryptionConfig_t)
    config.magic = NCCL_API_MAGIC
    config.version = struct_version()
    config.mode = mode
    config.psk = NULL
    if key is not None:
        config.psk = key
    with nogil:
        result = check(nccl.ncclSetEncryption(&config), b"ncclSetEncryption", NULL)
    _psk = key
    return state(result)


cdef bytes _key(object key):
    if not isinstance(key, str):
        raise TypeError(f"the key of a parameter is a str, not {type(key).__name__}")
    return key.encode()


def param_bind(key):
    """Return a handle of the parameter `key`, say ``"NCCL_DEBUG"``; it stays valid. C: ``ncclParamBind`` (2.30.4)."""
    cdef ncclParamHandle_t handle = NULL
    require(<void*>nccl.ncclParamBind, b"ncclParamBind")
    cdef bytes encoded = _key(key)
    cdef const char* name = encoded
    with nogil:
        check(nccl.ncclParamBind(&handle, name), b"ncclParamBind", NULL)
    return <uintptr_t>handle


def param_get_i8(uintptr_t handle):
    """Return a parameter that is an ``int8_t``. C: ``ncclParamGetI8`` (2.30.4)."""
    cdef int8_t value = 0
    require(<void*>nccl.ncclParamGetI8, b"ncclParamGetI8")
    with nogil:
        check(nccl.ncclParamGetI8(<ncclParamHandle_t>handle, &value), b"ncclParamGetI8", NULL)
    return value


def param_get_i16(uintptr_t handle):
    """Return a parameter that is an ``int16_t``. C: ``ncclParamGetI16`` (2.30.4)."""
    cdef int16_t value = 0
    require(<void*>nccl.ncclParamGetI16, b"ncclParamGetI16")
    with nogil:
        check(nccl.ncclParamGetI16(<ncclParamHandle_t>handle, &value), b"ncclParamGetI16", NULL)
    return value


def param_get_i32(uintptr_t handle):
    """Return a parameter that is an ``int32_t``. C: ``ncclParamGetI32`` (2.30.4)."""
    cdef int32_t value = 0
    require(<void*>nccl.ncclParamGetI32, b"ncclParamGetI32")
    with nogil:
        check(nccl.ncclParamGetI32(<ncclParamHandle_t>handle, &value), b"ncclParamGetI32", NULL)
    return value


def param_get_i64(uintptr_t handle):
    """Return a parameter that is an ``int64_t``. C: ``ncclParamGetI64`` (2.30.4)."""
    cdef int64_t value = 0
    require(<void*>nccl.ncclParamGetI64, b"ncclParamGetI64")
    with nogil:
        check(nccl.ncclParamGetI64(<ncclParamHandle_t>handle, &value), b"ncclParamGetI64", NULL)
    return value


def param_get_u8(uintptr_t handle):
    """Return a parameter that is a ``uint8_t``. C: ``ncclParamGetU8`` (2.30.4)."""
    cdef uint8_t value = 0
    require(<void*>nccl.ncclParamGetU8, b"ncclParamGetU8")
    with nogil:
        check(nccl.ncclParamGetU8(<ncclParamHandle_t>handle, &value), b"ncclParamGetU8", NULL)
    return value


def param_get_u16(uintptr_t handle):
    """Return a parameter that is a ``uint16_t``. C: ``ncclParamGetU16`` (2.30.4)."""
    cdef uint16_t value = 0
    require(<void*>nccl.ncclParamGetU16, b"ncclParamGetU16")
    with nogil:
        check(nccl.ncclParamGetU16(<ncclParamHandle_t>handle, &value), b"ncclParamGetU16", NULL)
    return value


def param_get_u32(uintptr_t handle):
    """Return a parameter that is a ``uint32_t``. C: ``ncclParamGetU32`` (2.30.4)."""
    cdef uint32_t value = 0
    require(<void*>nccl.ncclParamGetU32, b"ncclParamGetU32")
    with nogil:
        check(nccl.ncclParamGetU32(<ncclParamHandle_t>handle, &value), b"ncclParamGetU32", NULL)
    return value


def param_get_u64(uintptr_t handle):
    """Return a parameter that is a ``uint64_t``. C: ``ncclParamGetU64`` (2.30.4)."""
    cdef uint64_t value = 0
    require(<void*>nccl.ncclParamGetU64, b"ncclParamGetU64")
    with nogil:
        check(nccl.ncclParamGetU64(<ncclParamHandle_t>handle, &value), b"ncclParamGetU64", NULL)
    return value


def param_get_str(uintptr_t handle):
    """Return a parameter that is a text. C: ``ncclParamGetStr`` (2.30.4)."""
    cdef const char* value = NULL
    require(<void*>nccl.ncclParamGetStr, b"ncclParamGetStr")
    with nogil:
        check(nccl.ncclParamGetStr(<ncclParamHandle_t>handle, &value), b"ncclParamGetStr", NULL)
    # NCCL's text lives until the next such call on this thread; it is copied here.
    return value.decode(errors="replace") if value != NULL else ""


def param_get(uintptr_t handle, int max_len=256):
    """Return at most `max_len` bytes of a parameter as they lie in memory. C: ``ncclParamGet`` (2.30.4).

    Returns
    -------
    bytes
    """
    cdef int length = 0
    require(<void*>nccl.ncclParamGet, b"ncclParamGet")
    if max_len < 0:
        raise ValueError(f"max_len must not be negative: {max_len}")
    room = bytearray(max_len)
    cdef char* out = room
    with nogil:
        check(nccl.ncclParamGet(<ncclParamHandle_t>handle, out, max_len, &length), b"ncclParamGet", NULL)
    return bytes(room[:length])


def param_get_parameter(key):
    """Return the value of the parameter `key` as text. C: ``ncclParamGetParameter`` (2.30.4)."""
    cdef const char* value = NULL
    cdef int length = 0
    require(<void*>nccl.ncclParamGetParameter, b"ncclParamGetParameter")
    cdef bytes encoded = _key(key)
    cdef const char* name = encoded
    with nogil:
        check(nccl.ncclParamGetParameter(name, &value, &length), b"ncclParamGetParameter", NULL)
    return value[:length].decode(errors="replace") if value != NULL else ""


def param_get_all_parameter_keys():
    """Return the keys of every documented parameter; of all with ``NCCL_PARAM_DUMP_ALL=true``.

    C: ``ncclParamGetAllParameterKeys`` (2.30.4).

    Returns
    -------
    list of str
    """
    cdef const char** table = NULL
    cdef int count = 0
    cdef int i
    require(<void*>nccl.ncclParamGetAllParameterKeys, b"ncclParamGetAllParameterKeys")
    with nogil:
        check(nccl.ncclParamGetAllParameterKeys(&table, &count), b"ncclParamGetAllParameterKeys", NULL)
    return [table[i].decode() for i in range(count)]


def param_dump_all():
    """Print every parameter to the process's standard output. C: ``ncclParamDumpAll`` (2.30.4)."""
    require(<void*>nccl.ncclParamDumpAll, b"ncclParamDumpAll")
    with nogil:
        nccl.ncclParamDumpAll()


def mem_alloc(size_t size):
    """Return the address of at least `size` bytes on the current device, allocated so that NCCL can register them.

    C: ``ncclMemAlloc`` (2.19).

    Returns
    -------
    int
    """
    cdef void* pointer = NULL
    require(<void*>nccl.ncclMemAlloc, b"ncclMemAlloc")
    with nogil:
        check(nccl.ncclMemAlloc(&pointer, size), b"ncclMemAlloc", NULL)
    return <uintptr_t>pointer


def mem_free(uintptr_t pointer):
    """Free what `mem_alloc` returned. C: ``ncclMemFree`` (2.19)."""
    cdef int result
    require(<void*>nccl.ncclMemFree, b"ncclMemFree")
    with nogil:
        result = check(nccl.ncclMemFree(<void*>pointer), b"ncclMemFree", NULL)
    return state(result)


def comm_register(uintptr_t comm, uintptr_t buff, size_t size):
    """Register `size` bytes at `buff` with the communicator, so that collectives may use them without a copy.

    C: ``ncclCommRegister`` (2.19).

    Returns
    -------
    int
        A handle for `comm_deregister`; 0 where NCCL has no use for the registration.
    """
    cdef void* handle = NULL
    require(<void*>nccl.ncclCommRegister, b"ncclCommRegister")
    with nogil:
        check(
            nccl.ncclCommRegister(<ncclComm_t>comm, <void*>buff, size, &handle),
            b"ncclCommRegister", <ncclComm_t>comm,
        )
    return <uintptr_t>handle


def comm_deregister(uintptr_t comm, uintptr_t handle):
    """Take back a registration, before the memory is freed. C: ``ncclCommDeregister`` (2.19)."""
    cdef int result
    require(<void*>nccl.ncclCommDeregister, b"ncclCommDeregister")
    with nogil:
        result = check(
            nccl.ncclCommDeregister(<ncclComm_t>comm, <void*>handle), b"ncclCommDeregister", <ncclComm_t>comm
        )
    return state(result)


def comm_window_register(uintptr_t comm, uintptr_t buff, size_t size, int flags=0):
    """Open a window on `size` bytes at `buff`, with every rank of the communicator.

    Parameters
    ----------
    comm : int
        The communicator; every rank calls, with the same size.
    buff : int
        Memory of `mem_alloc`, aligned to 4096 bytes.
    size : int
        Bytes.
    flags : int
        ``NCCL_WIN_*``: 1 symmetric for collectives, 2 strict ordering, 4 GIN only, 8 counted CFT.

    Returns
    -------
    PendingHandle
        The window, written when the outermost group ends; 0 where windows are not supported.
        C: ``ncclCommWindowRegister`` (2.27).
    """
    cdef int result
    require(<void*>nccl.ncclCommWindowRegister, b"ncclCommWindowRegister")
    cdef PendingHandle window = new_pending(written_once=True)
    cdef ncclWindow_t* cell = <ncclWindow_t*>window.cell
    with nogil:
        result = check(
            nccl.ncclCommWindowRegister(<ncclComm_t>comm, <void*>buff, size, cell, flags),
            b"ncclCommWindowRegister", <ncclComm_t>comm,
        )
    window.result = state(result)
    return window


def comm_window_deregister(uintptr_t comm, uintptr_t window):
    """Close a window, with every rank of the communicator. C: ``ncclCommWindowDeregister`` (2.27)."""
    cdef int result
    require(<void*>nccl.ncclCommWindowDeregister, b"ncclCommWindowDeregister")
    with nogil:
        result = check(
            nccl.ncclCommWindowDeregister(<ncclComm_t>comm, <ncclWindow_t>window),
            b"ncclCommWindowDeregister", <ncclComm_t>comm,
        )
    return state(result)


def win_get_user_ptr(uintptr_t comm, uintptr_t window):
    """Return the address that the window was opened on. C: ``ncclWinGetUserPtr`` (2.29)."""
    cdef void* pointer = NULL
    require(<void*>nccl.ncclWinGetUserPtr, b"ncclWinGetUserPtr")
    with nogil:
        check(
            nccl.ncclWinGetUserPtr(<ncclComm_t>comm, <ncclWindow_t>window, &pointer),
            b"ncclWinGetUserPtr", <ncclComm_t>comm,
        )
    return <uintptr_t>pointer
