"""How threads hear that an operation has failed for which only a stream of theirs waits.

Such a thread is in no wait of ncclpy's: it reads a result by its framework's calls, which return once the
communicator is aborted, with whatever is there. So before the abort the error is set in the thread as an asynchronous
exception. CPython raises it when the call returns, before its value is stored or passed on.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Hashable, Iterable, Iterator

__all__ = ["raise_at_end", "raise_in_readers", "withdraw"]

_set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc
_set_exception.argtypes = (ctypes.c_ulong, ctypes.py_object)
_set_exception.restype = ctypes.c_int
_clear_exception = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p)(
    ("PyThreadState_SetAsyncExc", ctypes.pythonapi)
)

#: What was set in a thread and was not raised yet: of what, by the thread's ident. Changed in one step under the GIL.
_pending: dict[int, Hashable] = {}

#: The errors for threads that are in a block of `raise_at_end`, by their idents; under the lock.
_collected: dict[int, list[BaseException]] = {}
_lock = threading.RLock()  # a signal handler may close something while its thread has it


@contextlib.contextmanager
def raise_at_end() -> Iterator[None]:
    """Raise at the end of a block what `raise_in_readers` would raise within it, and so leave its steps undone.

    An exception of the block's own is its context then; a KeyboardInterrupt or SystemExit is raised alone.
    """
    ident = threading.get_ident()
    if ident in _collected:  # a block within another: the outer one raises
        yield
        return
    errors = _collected[ident] = []
    raises = True
    try:
        yield
    except BaseException as error:
        raises = isinstance(error, Exception)
        raise
    finally:
        with _lock:
            del _collected[ident]
        if errors and raises:
            raise errors[0]


def raise_in_readers(readers: Iterable[int], maker: int, error: BaseException, subject: Hashable = None) -> None:
    """Have an error raised in threads, by their idents.

    Python does not know some threads, such as torch's for backward passes: in their place the thread that has made
    the group is told, or the main thread if that one has ended or is not known (0).

    Parameters
    ----------
    subject
        The name of what has failed, for `withdraw`.
    """
    # Dummies are threads that Python has only seen: they may come back from it at any moment.
    known = {thread.ident for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}
    main = threading.main_thread().ident
    stand_in = maker if maker in known else main
    for ident in {reader if reader in known else stand_in for reader in readers}:
        if ident is None:
            continue
        with _lock:
            if ident in _collected:
                _collected[ident].append(error)
            else:
                _pending[ident] = subject
                _set_exception(ident, _raised_as(error, ident))


def withdraw(subject: Hashable) -> None:
    """Take back what was set in the calling thread for a subject, unless it was raised: the caller raises it."""
    ident = threading.get_ident()
    if subject is not None and _pending.get(ident) == subject:
        del _pending[ident]
        _clear_exception(ident, None)


def _raised_as(error: BaseException, ident: int) -> type[BaseException]:
    """Return a class that is this error when it is raised: an asynchronous exception is given by its class."""
    kind = type(error)

    def raised(cls: type[BaseException], *_: object) -> BaseException:
        # Up to Python 3.11 it may be called again, with the error: that is not of this class.
        _pending.pop(ident, None)
        return error

    return type(kind.__name__, (kind,), {"__new__": raised, "__module__": kind.__module__})
