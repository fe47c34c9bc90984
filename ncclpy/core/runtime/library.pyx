"""The library in use: one dlopen, the tables of its functions, NCCL's environment, and exceptions for result codes.

`NCCL_COMM_BLOCKING` and `NCCL_COMM_SPLIT_SHARE_RESOURCES` override the configuration of a communicator. NCCL's
configuration file may set them as well: NCCL then puts them into the C environment when it first reads the file,
without an update of `os.environ`. So ncclpy reads the C environment, and reads it again after a guard was made. An
environment plugin of NCCL may set them without changing even the C environment. Then ncclpy notices
NCCL_COMM_BLOCKING=0 when a call that should block returns ncclInProgress. It cannot notice the other overrides by a
plugin: with NCCL_COMM_BLOCKING=1 the init call of a guard returns ncclSuccess instead of ncclInProgress, but without
the override it may return ncclSuccess too, if NCCL has completed it at once.

At the first use one library is opened, with ``RTLD_NOW | RTLD_LOCAL``, and every NCCL symbol is taken from that
library, so that no communicator is used through two. The driver's symbols are taken from the same library if it has
them (the host engine), else from ``libcuda.so.1``.
"""

import logging
import os
import threading
import warnings

from libc.stdlib cimport getenv, strtoll

from ncclpy.abi.locks cimport DEBUG_LOCKS, LOCK_LIBRARY, lock_released, lock_taken, lock_wanted, ncclpy_lock
from ncclpy.abi.nccl cimport NCCLPY_ABI_VERSION, NCCLPY_OLDEST_VERSION, ncclComm_t, ncclRemoteError, ncclTimeout

from ncclpy.core.runtime import search
from ncclpy.errors import LibraryNotFound, NcclError, NcclRemoteError, NcclTimeout, NcclUnsupported


cdef str missing_ranks(ncclComm_t comm):
    """Return "AllReduce: arrived: 0; missing: 1 (process 4711, last call AllReduce, 1 before this one, dead)", or "".

    The text is empty with NVIDIA's NCCL, and if the communicator waits for no rank. For a child that is still being
    made, pass its parent. The communicator's lock is not needed, since another thread may hold it in a stuck call; but
    `comm` must not be destroyed meanwhile.
    """
    cdef char text[4096]
    text[0] = 0
    if host_missing_ranks == NULL or comm == NULL:
        return ""
    with nogil:
        host_missing_ranks(comm, text, sizeof(text))
    return text.decode(errors="replace")


cdef str _BLOCKING = "NCCL_COMM_BLOCKING"
cdef str _SHARE = "NCCL_COMM_SPLIT_SHARE_RESOURCES"

cdef dict _EFFECTS = {
    (_BLOCKING, 1): (
        "init, split and all else that makes communicators now waits for missing ranks inside NCCL, where it cannot "
        "be ended: a deadline or Ctrl-C leaves the call behind. Operations on a communicator that exists can still be "
        "ended"
    ),
    (_BLOCKING, 0): (
        "a communicator's calls now go through a thread of NCCL's, which makes each slower by tens of microseconds, "
        "and cannot be captured into graphs. Deadlines still hold"
    ),
    (_SHARE, 0): (
        "an abort now does not reach what is stuck on the device or inside a call: a deadline can end neither, and "
        "leaves both behind"
    ),
}

cdef set _warned = set()  # names of which this process was warned


cdef int _warn_once(str name, int value, str how) except -1:
    if name in _warned:
        return 0
    _warned.add(name)
    warnings.warn(
        f"{name}={value} {how} and overrides what a deadline needs (timeout=, abortable=True): {_EFFECTS[name, value]}. "
        "Take it out of the environment and of NCCL's configuration file (NCCL_CONF_FILE, ~/.nccl.conf, "
        "/etc/nccl.conf)",
        RuntimeWarning,
        stacklevel=1,  # Cython functions have no frames: this is the caller's line
    )
    return 0


cdef int warn_of_overrides() except -1:
    cdef const char* text
    for name in (_BLOCKING, _SHARE):
        key = name.encode()
        text = getenv(key)
        if text == NULL or text[0] == 0:
            continue
        value = strtoll(text, NULL, 0)  # as in NCCL, a text that is no number counts as 0
        if (name, value) in _EFFECTS:
            _warn_once(name, value, "is set")
    return 0


cdef int warn_of_in_progress() except -1:
    return _warn_once(_BLOCKING, 0, "is in force (a call that should block has returned ncclInProgress)")


_log = logging.getLogger("ncclpy.core")

cdef extern from "dlfcn.h" nogil:
    void* dlopen(const char* path, int flags)
    void* dlsym(void* handle, const char* name)
    char* dlerror()
    int RTLD_NOW
    int RTLD_LOCAL

cdef extern from *:
    """
    #include <pthread.h>
    #include <string.h>
    #include "nccl_abi.h"
    #include "driver_abi.h"

    /* One row per function, made from the X-macros: its name, the offset of its pointer in the table, and the first
       NCCL version that has it. */
    typedef struct { const char* name; size_t offset; int version; } ncclpy_symbol;

    #define NCCLPY_ROW(version, ret, name, params) {#name, offsetof(ncclpy_nccl_table, name), version},
    static const ncclpy_symbol ncclpy_nccl_symbols[] = { NCCLPY_NCCL_FUNCTIONS(NCCLPY_ROW) {NULL, 0, 0} };
    #define NCCLPY_DRIVER_ROW(ret, name, params) {#name, offsetof(ncclpy_driver_table, name), 0},
    static const ncclpy_symbol ncclpy_driver_symbols[] = { NCCLPY_DRIVER_FUNCTIONS(NCCLPY_DRIVER_ROW) {NULL, 0, 0} };

    /* After fork() the child must not touch NCCL: the threads and sockets are the parent's. Emptying both tables costs
       the calls nothing, since each checks for NULL anyway. */
    static ncclpy_nccl_table* ncclpy_the_nccl;
    static ncclpy_driver_table* ncclpy_the_driver;
    static void* ncclpy_the_missing_ranks;
    static int ncclpy_loaded, ncclpy_forked;
    static void ncclpy_in_child(void) {
      if (!ncclpy_loaded) return;
      memset(ncclpy_the_nccl, 0, sizeof *ncclpy_the_nccl);
      memset(ncclpy_the_driver, 0, sizeof *ncclpy_the_driver);
      memset(ncclpy_the_missing_ranks, 0, sizeof(void*));
      ncclpy_forked = 1;
    }
    static void ncclpy_watch_fork(ncclpy_nccl_table* n, ncclpy_driver_table* d, void* extra) {
      ncclpy_the_nccl = n;
      ncclpy_the_driver = d;
      ncclpy_the_missing_ranks = extra;
      pthread_atfork(NULL, NULL, ncclpy_in_child);
    }
    """
    ctypedef struct ncclpy_symbol:
        const char* name
        size_t offset
        int version
    const ncclpy_symbol* ncclpy_nccl_symbols
    const ncclpy_symbol* ncclpy_driver_symbols
    int ncclpy_loaded
    int ncclpy_forked
    void ncclpy_watch_fork(ncclpy_nccl_table*, ncclpy_driver_table*, void*)

ncclpy_watch_fork(&nccl, &driver, &host_missing_ranks)

# The host engine is recognised by this symbol.
cdef const char* HOST_MARK = b"ncclpyHostEngine"

#: Whether this build ends the process when a lock is taken in a wrong order (`-Ddebug_locks=true`).
debug_locks = DEBUG_LOCKS


cdef class PythonLock:
    """A lock of `threading` with its place in the order of all locks; it releases the GIL while a thread waits."""

    cdef object lock
    cdef ncclpy_lock place

    def __cinit__(self, lock, ncclpy_lock place):
        self.lock, self.place = lock, place

    def __enter__(self):
        lock_wanted(self.place, <void*>self)
        self.lock.acquire()
        lock_taken(self.place, <void*>self)

    def __exit__(self, *error):
        lock_released(self.place, <void*>self)
        self.lock.release()


_lock = PythonLock(threading.RLock(), LOCK_LIBRARY)  # held while loading, which releases the GIL


def _in_child():
    """Replace a lock that may be held by a thread which the child does not have."""
    global _lock
    _lock = PythonLock(threading.RLock(), LOCK_LIBRARY)


os.register_at_fork(after_in_child=_in_child)
_choice = None  # what use() asked for
_library = None  # the Library, once loaded
_driver_failures = []  # why no GPU can be used, from the last _has_gpu()
cdef int _version = 0


class Library:
    """Describe the loaded library; `ncclpy.library()` returns it.

    Attributes
    ----------
    engine : str
        ``"cuda"`` for NCCL on GPUs, ``"host"`` for the host engine.
    path : str
        The file that is loaded.
    found : str
        How it was found.
    version : tuple of int
        The version from `ncclGetVersion`, such as ``(2, 32, 3)``.
    """

    __slots__ = ("engine", "path", "found", "version")

    def __init__(self, engine, path, found, version):
        self.engine = engine
        self.path = path
        self.found = found
        self.version = version

    def has(self, symbol):
        """Return whether the loaded library has NCCL's C function `symbol`, such as ``"ncclCommGrow"``.

        Return False also for a function that ncclpy does not use, and in a process that was forked after loading.
        """
        name = symbol.encode()
        return any(row == name for row, _, present in _rows() if present)

    def missing(self):
        """Return ``{symbol: first NCCL version that has it}`` for the functions of NCCL that this library lacks."""
        return {row.decode(): decode_version(since) for row, since, present in _rows() if not present}

    def __repr__(self):
        return f"Library(engine={self.engine!r}, version={self.version}, path={self.path!r})"


def use(choice):
    """Choose the library to use; call this before the first use of NCCL.

    Parameters
    ----------
    choice : str or os.PathLike
        ``"cuda"`` (find NCCL), ``"host"`` (the host engine) or the path of a library with NCCL's ABI.

    Raises
    ------
    RuntimeError
        If another library is already loaded; choosing the same one again does nothing.
    TypeError
        If `choice` is neither a str nor a path.
    """
    global _choice
    if not isinstance(choice, (str, os.PathLike)):
        raise TypeError(f'use() takes "cuda", "host" or a path, not {type(choice).__name__}')
    choice = _as_choice(os.fsdecode(choice))
    with _lock:
        if _library is not None:
            if choice in (_library.engine, _choice) or _same_file(choice, _library.path):
                return
            raise RuntimeError(
                f"use({choice!r}): ncclpy already uses {_library.path} (engine {_library.engine!r}); "
                "call ncclpy.use() before the first use of NCCL"
            )
        _choice = choice


def _as_choice(text):
    """Return "cuda" or "host" for either word in upper or lower case, None for "", else `text` itself, a path."""
    return text.lower() if text.lower() in ("cuda", "host") else text or None


def _same_file(one, other):
    try:
        return os.path.samefile(one, other)
    except (OSError, ValueError):  # one of them is no file, or is gone
        return False


def library():
    """Return the `Library` in use; load it if it is not loaded yet."""
    _ensure_loaded()
    return _library


def loaded():
    """Return the `Library` in use, or None before the first use; load nothing."""
    return _library


cdef int raise_if_forked() except -1:
    # A fork empties the whole table: any entry shows this. `require_driver` then raises, or loads a driver that is not
    # loaded yet.
    if driver.cuEventRecord == NULL and _library is not None:
        require_driver()
    return 0


def decode_version(code):
    """Return ``(major, minor, patch)`` of an `NCCL_VERSION_CODE`; codes up to 2.8 have one digit less."""
    if code < 10000:
        return code // 1000, code // 100 % 10, code % 100
    return code // 10000, code // 100 % 100, code % 100


cdef int version_code() except -1:
    _ensure_loaded()
    return _version


cdef int require_nccl_function(const char* name) except -1:
    """Load the library on first use; raise NcclUnsupported if it lacks the function.

    The error names the NCCL release to install or, on the host engine, the page that lists what the engine lacks.
    """
    cdef size_t i = 0
    _ensure_loaded()
    while ncclpy_nccl_symbols[i].name != NULL:
        if ncclpy_nccl_symbols[i].name == <bytes>name:
            if (<void**>((<char*>&nccl) + ncclpy_nccl_symbols[i].offset))[0] != NULL:
                return 0
            if host_engine:
                raise NcclUnsupported(
                    f"the host engine has no {name.decode()}; docs/host-engine.md lists what it leaves out",
                    function=name.decode(),
                    version=_library.version,
                )
            since = ".".join(map(str, decode_version(ncclpy_nccl_symbols[i].version)))
            raise NcclUnsupported(
                f"{name.decode()} needs NCCL {since} or newer; {_library.path} is "
                f"NCCL {'.'.join(map(str, _library.version))}",
                function=name.decode(),
                version=_library.version,
            )
        i += 1
    raise AssertionError(f"{name.decode()} is not in NCCLPY_NCCL_FUNCTIONS")


def _ensure_loaded():
    global _library
    if ncclpy_forked:
        raise NcclError(
            "this process was forked after ncclpy had loaded NCCL, which does not survive a fork; start workers with "
            'multiprocessing.get_context("spawn") or "forkserver", or use ncclpy only in the children'
        )
    if _library is None:
        made = False
        with _lock:
            if _library is None:
                _library = _load()
                made = True
        if made:  # outside the lock: a log handler may be user code
            _warn_of_faults()


def _warn_of_faults():
    """Warn if the host engine is loaded and NCCLPY_FAULTS is set: set by mistake, it would give wrong results."""
    plan = os.environ.get("NCCLPY_FAULTS", "")
    if host_engine and plan.replace(";", " ").strip():
        _log.warning(
            "NCCLPY_FAULTS=%r is set: the host engine of process %d fails, hangs, dies or corrupts results as this plan says. "
            "Unset the variable unless this is a test",
            plan, os.getpid(),
        )


def _load():
    choice = _choice or _as_choice(os.environ.get("NCCLPY_LIBRARY", ""))
    origin = "ncclpy.use()" if _choice else "NCCLPY_LIBRARY"
    if choice == "host":
        return _open([(search.host_engine_path(), "the host engine of this package")], origin)
    if choice is not None and choice != "cuda":
        wrong = (
            f'{origin} chose {choice!r}, which is neither "host" nor "cuda" nor the path of an NCCL library'
        )
        return _open([(choice, origin)], origin, wrong)
    places = search.candidates()
    if choice is None and not _has_gpu():
        raise LibraryNotFound(
            "no GPU can be used here: " + "; ".join(_driver_failures) + ".\nlibnccl would be taken from:\n"
            + "".join(f"  {path} ({why})\n" for path, why in places) + _HOW_TO_CHOOSE,
            detail="; ".join(_driver_failures),  # set in this case only: the command line then takes the host engine
        )
    return _open(places, origin if choice else "automatic")


_HOW_TO_CHOOSE = (
    'To run on CPU memory with the host engine: NCCLPY_LIBRARY=host, or ncclpy.use("host") before the first use.\n'
    "For NCCL on GPUs: pip install 'ncclpy[cu13]' (or [cu12]), or NCCLPY_LIBRARY=/path/to/libnccl.so.2."
)


cdef object _open(places, origin, failed="no NCCL library could be loaded"):
    """Open the first place that is an NCCL library, fill NCCL's table and return its `Library`.

    The driver's table is filled too if the library has the driver's functions. If no place is an NCCL library, raise
    LibraryNotFound with a message that begins with `failed`.
    """
    global _version, host_engine, abort_preempts, stream_wait, event_help, event_tell, event_await
    global host_missing_ranks, host_hold_window, host_release_window
    cdef void* handle
    cdef int code = 0
    cdef const char* error
    cdef const char* name
    cdef int (*get_version)(int*) noexcept nogil
    cdef int (*preempts)() noexcept nogil
    searched = []
    for path, why in places:
        encoded = os.fsencode(path)
        name = <const char*>encoded
        with nogil:
            handle = dlopen(name, RTLD_NOW | RTLD_LOCAL)
        if handle == NULL:
            error = dlerror()
            reason = error.decode(errors="replace").removeprefix(f"{path}: ") if error != NULL else "not opened"
            searched.append(f"  {path} ({why}): {reason}")
            continue
        get_version = <int (*)(int*) noexcept nogil>dlsym(handle, b"ncclGetVersion")
        if get_version == NULL or get_version(&code) != 0:
            searched.append(f"  {path} ({why}): no NCCL, it has no working ncclGetVersion")
            continue
        if code < NCCLPY_OLDEST_VERSION:
            searched.append(f"  {path} ({why}): NCCL {code} is older than the oldest supported, 2.16")
            continue
        _version = code
        host_engine = dlsym(handle, HOST_MARK) != NULL
        preempts = <int (*)() noexcept nogil>dlsym(handle, b"ncclpyHostAbortPreempts")
        abort_preempts = preempts != NULL and preempts() != 0
        stream_wait = <StreamWait>dlsym(handle, b"ncclpyHostStreamWait")
        event_help = <EventQuery>dlsym(handle, b"ncclpyHostEventHelp")
        event_tell = <EventTell>dlsym(handle, b"ncclpyHostEventTell")
        event_await = <EventQuery>dlsym(handle, b"ncclpyHostEventAwait")
        host_missing_ranks = <size_t (*)(ncclComm_t, char*, size_t) noexcept nogil>dlsym(
            handle, b"ncclpyHostStragglers"
        )
        host_hold_window = <void* (*)(ncclWindow_t, int) noexcept nogil>dlsym(handle, b"ncclpyHostHoldWindow")
        host_release_window = <void (*)(void*) noexcept nogil>dlsym(handle, b"ncclpyHostReleaseWindow")
        engine = "host" if host_engine else "cuda"
        loaded = _loaded_path(path)
        # From here on a forked child is refused.
        _mark_loaded()
        if dlsym(handle, b"cuInit") != NULL:
            _fill_driver(handle)
        # NCCL's table is filled last: another thread calls a function as soon as it finds its entry.
        _fill(handle, ncclpy_nccl_symbols, <char*>&nccl)
        return Library(engine, loaded, f"{why}; chosen by {origin}", decode_version(code))
    raise LibraryNotFound(f"{failed}. Searched:\n" + "\n".join(searched) + "\n" + _HOW_TO_CHOOSE)


cdef int _mark_loaded() except -1:
    global ncclpy_loaded
    ncclpy_loaded = 1
    return 0


cdef int _fill(void* handle, const ncclpy_symbol* symbols, char* table) except -1:
    cdef size_t i = 0
    while symbols[i].name != NULL:
        (<void**>(table + symbols[i].offset))[0] = dlsym(handle, symbols[i].name)
        i += 1
    return 0


cdef int _fill_driver(void* handle) except -1:
    """Initialise the driver and fill its table.

    Raise LibraryNotFound if the library lacks a function of the table, or if cuInit fails.
    """
    cdef size_t i = 0
    cdef int result
    cdef const char* words = NULL
    cdef int (*start)(unsigned int) noexcept nogil
    cdef int (*describe)(int, const char**) noexcept nogil
    lacking = []
    while ncclpy_driver_symbols[i].name != NULL:
        if dlsym(handle, ncclpy_driver_symbols[i].name) == NULL:
            lacking.append(ncclpy_driver_symbols[i].name.decode())
        i += 1
    if lacking:
        raise LibraryNotFound(f"the CUDA driver is too old: libcuda.so.1 lacks {', '.join(lacking)}")
    start = <int (*)(unsigned int) noexcept nogil>dlsym(handle, b"cuInit")
    with nogil:  # it can take a second
        result = start(0)
    if result != 0:
        describe = <int (*)(int, const char**) noexcept nogil>dlsym(handle, b"cuGetErrorString")
        describe(result, &words)
        driver_name = "the host engine" if host_engine else "the CUDA driver"
        raise LibraryNotFound(
            f"{driver_name} refuses to start: cuInit returned {result}"
            + (f", {words.decode(errors='replace')}" if words != NULL else "")
        )
    _fill(handle, ncclpy_driver_symbols, <char*>&driver)
    return 0


cdef int load_driver() except -1:
    """Load the driver on first use: libcuda, unless the NCCL library has the driver's functions (the host engine)."""
    cdef void* handle
    cdef const char* error
    _ensure_loaded()
    with _lock:
        if driver.cuInit != NULL:
            return 0
        with nogil:
            handle = dlopen(b"libcuda.so.1", RTLD_NOW | RTLD_LOCAL)
        if handle == NULL:
            error = dlerror()
            raise LibraryNotFound(
                f"the CUDA driver cannot be loaded: {error.decode(errors='replace')}. NCCL on GPUs needs NVIDIA's "
                "driver on the machine (in a container: --gpus all).\n" + _HOW_TO_CHOOSE
            )
        _fill_driver(handle)
    return 0


def _has_gpu():
    """Return whether libcuda.so.1 opens and shows a device; if not, `_driver_failures` tells why."""
    cdef void* handle
    cdef int count = 0
    cdef bint works
    cdef const char* error
    cdef int (*start)(unsigned int) noexcept nogil
    cdef int (*get_count)(int*) noexcept nogil
    with nogil:
        handle = dlopen(b"libcuda.so.1", RTLD_NOW | RTLD_LOCAL)
    del _driver_failures[:]
    if handle == NULL:
        error = dlerror()
        _driver_failures.append(error.decode(errors="replace") if error != NULL else "libcuda.so.1 was not opened")
        return False
    start = <int (*)(unsigned int) noexcept nogil>dlsym(handle, b"cuInit")
    get_count = <int (*)(int*) noexcept nogil>dlsym(handle, b"cuDeviceGetCount")
    with nogil:  # it can take a second
        works = start != NULL and get_count != NULL and start(0) == 0 and get_count(&count) == 0 and count > 0
    if not works:
        _driver_failures.append("libcuda.so.1 opens but shows no device")
        return False
    return True


cdef object _loaded_path(path):
    """Return the file that a soname was loaded from; return a path, or a soname without a known file, unchanged."""
    if os.sep in path:
        return path
    for mapped in search.mapped_nccl():
        return mapped
    return path


def _rows():
    """Return ``(symbol, first version, whether it is there)`` for every row of the NCCL table."""
    cdef size_t i = 0
    rows = []
    while ncclpy_nccl_symbols[i].name != NULL:
        rows.append((
            <bytes>ncclpy_nccl_symbols[i].name,
            ncclpy_nccl_symbols[i].version,
            (<void**>((<char*>&nccl) + ncclpy_nccl_symbols[i].offset))[0] != NULL,
        ))
        i += 1
    return rows


def abi_version():
    """Return the NCCL release with the ABI that ncclpy implements, ``(2, 32, 3)``."""
    return decode_version(NCCLPY_ABI_VERSION)


cdef extern from "string.h" nogil:
    char* strdup(const char*)


cdef int raise_nccl(ncclResult_t result, const char* function, ncclComm_t comm) except -1 with gil:
    """Raise the exception for `result`, with NCCL's last error message."""
    cdef const char* text = NULL
    if nccl.ncclGetLastError != NULL:
        text = nccl.ncclGetLastError(comm)
    raise nccl_error(result, function, text)


cdef char* copy_last_error(ncclResult_t result) noexcept nogil:
    if <int>result <= 0 or result == ncclInProgress or nccl.ncclGetLastError == NULL:
        return NULL
    return strdup(nccl.ncclGetLastError(NULL))


cdef object nccl_error(ncclResult_t result, const char* function, const char* last_error, object during=None):
    """Return the exception for a result code.

    `last_error`: the text of ncclGetLastError when the code was returned. `during`: what failed, if `function` has
    only reported the failure of something else.
    """
    cdef const char* text
    cdef int code = <int>result
    reason = f"result {code}"
    detail = ""
    version = None
    if nccl.ncclGetErrorString != NULL:
        text = nccl.ncclGetErrorString(result)
        # For a code of a newer NCCL the text is only "unknown result code", so the number is added.
        reason = f"{text.decode(errors='replace')} (result {code})" if text != NULL else reason
        detail = last_error.decode(errors="replace").strip() if last_error != NULL else ""
        version = library().version
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
