"""Ranks as threads of this process: one function, called for each rank at the same time, with a deadline for all."""

from __future__ import annotations

import functools
import sys
import threading
import time
import traceback

from ncclpy.errors import note

#: Seconds for the other ranks to end once one has failed.
GRACE = 10.0


def run_ranks(nranks: int, fn, timeout: float, abort=lambda reason: None) -> list:
    """Call ``fn(rank)`` for each rank in its own thread, and return the results in rank order.

    The threads of `ncclpy.testing.run_ranks` are not used: they abort one communicator of each rank, in the caller's
    thread, and tests must also end when that abort, which they test, hangs.

    Parameters
    ----------
    nranks, fn
        The number of ranks, and the function of each.
    timeout
        Seconds until all ranks must be done.
    abort
        Called as ``abort(reason)`` to free the other ranks, repeatedly, as a rank may make something to abort later.

    Raises
    ------
    BaseException
        The error that was raised first; the tracebacks of the other ranks' errors are its notes.
    AssertionError
        If ranks are not done in time, or do not end after another rank's failure, with the stacks of these ranks.
    """
    results: list = [None] * nranks
    errors: list[tuple[int, BaseException]] = []

    def body(rank):
        try:
            results[rank] = fn(rank)
        except BaseException as error:
            errors.append((rank, error))

    threads = start([functools.partial(body, rank) for rank in range(nranks)], "rank ")
    end = time.monotonic() + timeout
    while (left := _alive(threads)) and not errors and time.monotonic() < end:
        left[0].join(0.02)
    if not errors and left:
        where = _stacks(left)
        abort(f"not done after {timeout} s")
        raise AssertionError(f"{len(left)} of {nranks} ranks not done after {timeout} s:\n{where}")
    if not errors:
        return results
    rank, first = errors[0]
    end = time.monotonic() + GRACE
    while (left := _alive(threads)) and time.monotonic() < end:
        abort(f"rank {rank} failed: {first}")
        join(left, time.monotonic() + 0.1)
    if len(errors) > 1:
        note(first, f"raised by rank {rank}, before the errors of other ranks:")
    for other, error in errors[1:]:
        note(first, f"rank {other}:\n{''.join(traceback.format_exception(type(error), error, error.__traceback__))}")
    if left:
        names = ", ".join(thread.name for thread in left)
        raise AssertionError(f"rank {rank} failed, and {names} did not end in {GRACE} s:\n{_stacks(left)}") from first
    raise first


def start(functions, name: str = "thread ") -> list[threading.Thread]:
    """Start a daemon thread for each function; `name` and its number are the thread's name."""
    threads = [
        threading.Thread(target=function, name=f"{name}{number}", daemon=True)
        for number, function in enumerate(functions)
    ]
    for thread in threads:
        thread.start()
    return threads


def join(threads, end: float) -> None:
    """Wait for threads until the time `end`."""
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


def _alive(threads) -> list[threading.Thread]:
    return [thread for thread in threads if thread.is_alive()]


def _stacks(threads) -> str:
    frames = sys._current_frames()
    return "\n".join(
        f"{thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
        for thread in threads
        if thread.ident in frames
    )
