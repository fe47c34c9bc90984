"""NCCL's memory: allocation, registered buffers, windows."""

from libc.stdint cimport uintptr_t

from ncclpy.abi.nccl cimport ncclComm_t, ncclWindow_t
from ncclpy.core.bindings.results cimport PendingHandle, new_pending, state
from ncclpy.core.check cimport check
from ncclpy.core.library cimport nccl, require


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
