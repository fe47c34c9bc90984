"""How a thread that waits for an operation only by a stream is told that the operation has failed.

Such a thread is in no wait of ncclpy: it reads a result with calls of its framework, which return after an abort of
the communicator, with invalid data. So before the abort the error is set in the thread as an asynchronous exception.
CPython raises it when the call returns, before its value is stored or passed on.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator

from ncclpy.core.runtime import wait

__all__ = ["note_delivery", "raise_at_end", "raise_in_readers"]

#: The errors that are set in a thread and not raised yet, by the thread's number (`wait.this_thread`; an ident may be
#: given to a later thread, which has read nothing). Each error has the set of threads that have been told of the same
#: failure. CPython holds only one exception for a thread: it stands for all of these errors, see `_raised_as`. Guarded
#: by `_lock`.
_pending: dict[int, list[tuple[set[int], BaseException]]] = {}

#: The errors for threads that are in a block of `raise_at_end`, by the threads' numbers. A thread adds its own list
#: without a lock; lists are extended and removed under `_lock`.
_collected: dict[int, list[BaseException]] = {}
_lock = threading.RLock()  # re-entrant: a signal handler may close a communicator while its thread holds the lock


@contextlib.contextmanager
def raise_at_end() -> Iterator[None]:
    """Defer errors of `raise_in_readers` in this thread to the end of a block, so that they interrupt no step of it.

    An exception that the block itself raises becomes the context of the error; after an exception that is no
    `Exception`, such as KeyboardInterrupt, the errors are dropped. In a nested block the end of the outermost block
    counts.
    """
    thread = wait.number_of_this_thread()
    if thread in _collected:  # a block within another
        yield
        return
    errors = _collected[thread] = []
    must_raise = True
    try:
        yield
    except BaseException as error:
        must_raise = isinstance(error, Exception)
        raise
    finally:
        with _lock:
            del _collected[thread]
        if errors and must_raise:
            raise _together(errors)


def raise_in_readers(readers: Iterable[int], maker: int, error: BaseException, informed: set[int]) -> None:
    """Have an error raised in threads, given by their numbers.

    A thread may have ended, or may not have been started by Python, such as torch's threads for backward passes. In
    place of such a thread the error is raised in `maker`, the thread that has made the group, or in the main thread if
    `maker` has ended or is not known (0). For a thread that ends during this call the main thread is the substitute.

    Parameters
    ----------
    informed
        The threads that have been told of this failure: it is not raised in them. The threads in which it is raised
        are added.
    """
    # A `_DummyThread` stands for a thread that Python has not started, which may leave Python at any moment.
    started = [each.ident for each in threading.enumerate() if not isinstance(each, threading._DummyThread)]
    known = {wait.number_of_thread(ident) for ident in started if ident is not None}  # None: a thread that starts now
    main = wait.number_of_thread(threading.main_thread().ident or 0)
    substitute = maker if maker in known else main
    with _lock:
        for ended in _pending.keys() - known:
            del _pending[ended]
    for thread in {reader if reader in known else substitute for reader in readers if reader not in informed}:
        if not _tell(thread, error, informed):  # the thread has ended meanwhile
            _tell(main, error, informed)


def _tell(thread: int, error: BaseException, informed: set[int]) -> bool:
    """Have a thread raise an error unless it has been told of the failure; return False if the thread has ended."""
    with _lock:
        if thread in informed:
            return True
        if thread in _collected:
            _collected[thread].append(error)
        elif not _set(thread, [*_pending.get(thread, ()), (informed, error)]):
            return False
        informed.add(thread)
        return True


def note_delivery(informed: set[int]) -> None:
    """Note that a call of ncclpy raises an error in this thread, which is then not told of the same failure again.

    Parameters
    ----------
    informed
        The threads that have been told of the failure, as for `raise_in_readers`.
    """
    thread = wait.number_of_this_thread()
    with _lock:
        informed.add(thread)
        pending = _pending.get(thread, [])
        left = [each for each in pending if each[0] is not informed]
        if len(left) < len(pending):
            _set(thread, left)


def _set(thread: int, pending: list[tuple[set[int], BaseException]]) -> bool:
    """Have a thread raise these errors, and none of those that were set before; return False if the thread has ended.

    The caller holds the lock.
    """
    _pending.pop(thread, None)
    if not pending:
        return wait.set_exception(thread, None)
    _pending[thread] = pending  # before the exception is set: raising it removes them
    if wait.set_exception(thread, _raised_as([error for _, error in pending], thread)):
        return True
    del _pending[thread]
    return False


def _raised_as(errors: list[BaseException], thread: int) -> type[BaseException]:
    """Return a class that yields the errors when CPython calls it: an asynchronous exception is set as a class."""
    kind = type(errors[-1])
    made: list[BaseException] = []

    def raised(cls: type[BaseException], *_: object) -> BaseException:
        # Python up to 3.11 may call this a second time with the error as an argument: it is no instance of this class.
        if not made:
            with _lock:
                _pending.pop(thread, None)
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
