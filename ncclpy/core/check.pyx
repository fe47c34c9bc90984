"""From a result code to an exception. Entered only on failure."""

from ncclpy.abi.nccl cimport ncclRemoteError, ncclTimeout
from ncclpy.core.library cimport driver, nccl

from ncclpy.core import library
from ncclpy.core.errors import NcclError, NcclRemoteError, NcclTimeout

cdef extern from "string.h" nogil:
    char* strdup(const char*)


cdef int raise_nccl(ncclResult_t result, const char* function, ncclComm_t comm) except -1 with gil:
    """Raise what `result` stands for, with NCCL's own last words on it."""
    cdef const char* text = NULL
    if nccl.ncclGetLastError != NULL:
        text = nccl.ncclGetLastError(comm)
    raise nccl_error(result, function, text)


cdef char* keep_words(ncclResult_t result) noexcept nogil:
    if <int>result <= 0 or result == ncclInProgress or nccl.ncclGetLastError == NULL:
        return NULL
    return strdup(nccl.ncclGetLastError(NULL))


cdef object nccl_error(ncclResult_t result, const char* function, const char* last_words, object during=None):
    """Return the exception for a result code.

    `last_words` are what ncclGetLastError said when it was returned. `during` says what failed, where `function` has
    only brought the news.
    """
    cdef const char* text
    cdef int code = <int>result
    reason = f"result {code}"
    detail = ""
    version = None
    if nccl.ncclGetErrorString != NULL:
        text = nccl.ncclGetErrorString(result)
        # A code from a newer NCCL has a text that says nothing ("unknown result code"); its number says more.
        reason = f"{text.decode(errors='replace')} (result {code})" if text != NULL else reason
        detail = last_words.decode(errors="replace").strip() if last_words != NULL else ""
        version = library.library().version
    kind = NcclError
    if result == ncclRemoteError:
        kind = NcclRemoteError
    elif result == ncclTimeout:
        kind = NcclTimeout
    name = function.decode()
    message = f"{name if during is None else during}: {reason}"
    if detail:
        message += f"; last error: {detail}"
    if version is not None:
        message += f" [NCCL {'.'.join(map(str, version))}]"
    return kind(message, result=code, function=name, detail=detail, version=version)


cdef int raise_driver(CUresult result, const char* function) except -1 with gil:
    """Raise for a failed call of the CUDA driver."""
    raise driver_error(result, function)


cdef object driver_error(CUresult result, const char* function):
    """Return the exception for a failed call of the CUDA driver."""
    cdef const char* name = NULL
    cdef const char* text = NULL
    if driver.cuGetErrorName != NULL:
        driver.cuGetErrorName(result, &name)
        driver.cuGetErrorString(result, &text)
    words = f"{name.decode()}: {text.decode()}" if name != NULL and text != NULL else "unknown error"
    return NcclError(f"{function.decode()}: {words} (CUresult {<int>result})", function=function.decode())
