"""How threads hear that an operation has failed for which only a stream of theirs waits.

Such a thread is in no wait of ncclpy's: it reads a result by its framework's calls, which return once the
communicator is aborted, with whatever is there. So before the abort the error is set in the thread as an asynchronous
exception. CPython raises it when the call returns, before its value is stored or passed on.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable

__all__ = ["raise_in_readers"]

_set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc
_set_exception.argtypes = (ctypes.c_ulong, ctypes.py_object)
_set_exception.restype = ctypes.c_int


def raise_in_readers(readers: Iterable[int], maker: int, error: BaseException) -> None:
    """Have an error raised in threads, by their idents.

    Python does not know some threads, such as torch's for backward passes: in their place the thread that has made
    the group is told, or the main thread if that one has ended or is not known (0).
    """
    # Dummies are threads that Python has only seen: they may come back from it at any moment.
    known = {thread.ident for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}
    main = threading.main_thread().ident
    stand_in = maker if maker in known else main
    for ident in {reader if reader in known else stand_in for reader in readers}:
        if ident is not None:
            _set_exception(ident, _raised_as(error))


def _raised_as(error: BaseException) -> type[BaseException]:
    """Return a class that is this error when it is raised: an asynchronous exception is given by its class."""
    kind = type(error)
    return type(kind.__name__, (kind,), {"__new__": lambda cls: error, "__module__": kind.__module__})
