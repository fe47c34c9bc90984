"""How a thread that waits for an operation only by a stream is told that the operation has failed.

Such a thread is in no wait of ncclpy: it reads a result with calls of its framework, which return after an abort of
the communicator, with invalid data. So before the abort the error is set in the thread as an asynchronous exception.
CPython raises it when the call returns, before its value is stored or passed on.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterable, Iterator

__all__ = ["note_delivery", "raise_at_end", "raise_in_readers"]

_set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc
_set_exception.argtypes = (ctypes.c_ulong, ctypes.py_object)
_set_exception.restype = ctypes.c_int
_clear_exception = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p)(
    ("PyThreadState_SetAsyncExc", ctypes.pythonapi)
)

#: By the ident of a thread: the errors that are set in it and not raised yet. With each error are kept the thread
#: itself, as Python reuses idents, and the threads that have been told of the same failure. CPython holds only one
#: exception for a thread, which stands for all of these errors, see `_raised_as`. Under the lock.
_pending: dict[int, list[tuple[threading.Thread, set[int], BaseException]]] = {}

#: The errors for threads that are in a block of `raise_at_end`, by their idents; under the lock.
_collected: dict[int, list[BaseException]] = {}
_lock = threading.RLock()  # re-entrant: a signal handler may close a communicator while its thread holds the lock


@contextlib.contextmanager
def raise_at_end() -> Iterator[None]:
    """Defer errors of `raise_in_readers` in this thread to the end of a block, so that they interrupt no step of it.

    An exception that the block itself raises becomes the context of the error; after a KeyboardInterrupt or SystemExit
    the error is dropped.
    """
    ident = threading.get_ident()
    if ident in _collected:  # a block within another: the outer one raises
        yield
        return
    errors = _collected[ident] = []
    must_raise = True
    try:
        yield
    except BaseException as error:
        must_raise = isinstance(error, Exception)
        raise
    finally:
        with _lock:
            del _collected[ident]
        if errors and must_raise:
            raise _together(errors)


def raise_in_readers(readers: Iterable[int], maker: int, error: BaseException, informed: set[int]) -> None:
    """Have an error raised in threads, given by their idents.

    Python has not started some threads, such as torch's threads for backward passes: in their place the error is
    raised in `maker`, the thread that has made the group, or in the main thread if `maker` has ended or is not known
    (0).

    Parameters
    ----------
    informed
        The threads that have been told of this failure: it is not raised in them. The threads in which it is raised
        are added.
    """
    # A dummy stands for a thread that Python has not started: it may leave Python at any moment.
    known = {each.ident: each for each in threading.enumerate() if not isinstance(each, threading._DummyThread)}
    main = threading.main_thread().ident
    substitute = maker if maker in known else main
    for ident in {reader if reader in known else substitute for reader in readers if reader not in informed}:
        if ident is None:
            continue
        with _lock:
            if ident in informed:
                continue
            informed.add(ident)
            if ident in _collected:
                _collected[ident].append(error)
            else:
                earlier = [each for each in _pending.get(ident, ()) if each[0] is known[ident]]
                _set(ident, [*earlier, (known[ident], informed, error)])


def note_delivery(informed: set[int]) -> None:
    """Note that a call raises an error in the calling thread, which is not told of the same failure again.

    Parameters
    ----------
    informed
        The threads that have been told of the failure, as for `raise_in_readers`.
    """
    ident = threading.get_ident()
    with _lock:
        informed.add(ident)
        pending = _pending.get(ident, [])
        left = [each for each in pending if each[1] is not informed]
        if len(left) < len(pending):
            _set(ident, left)


def _set(ident: int, pending: list[tuple[threading.Thread, set[int], BaseException]]) -> None:
    """Have a thread raise these errors, and none of those that were set before; under the lock."""
    if pending:
        _pending[ident] = pending
        _set_exception(ident, _raised_as([error for _, _, error in pending], ident))
    else:
        _pending.pop(ident, None)
        _clear_exception(ident, None)


def _raised_as(errors: list[BaseException], ident: int) -> type[BaseException]:
    """Return a class that yields the errors when CPython calls it: an asynchronous exception is set as a class."""
    kind = type(errors[-1])
    made: list[BaseException] = []

    def raised(cls: type[BaseException], *_: object) -> BaseException:
        # Python up to 3.11 may call this once more, with the error as an argument, which is not of this class.
        if not made:
            with _lock:
                _pending.pop(ident, None)
            made.append(_together(errors))  # outside the lock: making a text may run the __repr__ of a program's key
        return made[0]

    return type(kind.__name__, (kind,), {"__new__": raised, "__module__": kind.__module__})


def _together(errors: list[BaseException]) -> BaseException:
    """Return one error for the failures of several groups or communicators: the last one, with all texts."""
    last = errors[-1]
    if len(errors) == 1:
        return last
    error = type(last)("; and ".join(str(each) for each in [last, *errors[:-1]]))
    error.__dict__.update(last.__dict__)
    error.__cause__ = last
    return error
