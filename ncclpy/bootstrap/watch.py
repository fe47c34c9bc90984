"""Watches of a store's keys: changes are taken one by one, or passed to a callback in a thread."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ncclpy.bootstrap.store_arguments import as_seconds
from ncclpy.errors import NcclTimeout
from ncclpy.errors import seconds as as_text

__all__ = ["Change", "Queue", "Watch"]

log = logging.getLogger("ncclpy")

#: Seconds of one slice of a wait: in the main thread, where Python runs signal handlers after each slice, and in other
#: threads, which run no handlers, and which close() wakes.
SLICE, LONG_SLICE = 0.1, 10.0


class Change(NamedTuple):
    """Describe a change of a key: its new value, or None if it was deleted."""

    key: str
    value: bytes | None


class Watch:
    """Report each change of the keys that begin with a prefix, in order.

    Made by `Store.watch`. Changes are taken with `next`, or by iterating, which ends when the watch or its store is
    closed. If `Store.watch` was given a callback, a thread takes the changes; an error that ends this thread is in
    `error`.
    """

    prefix: str
    error: BaseException | None = None

    def next(self, timeout: float | None = None) -> Change | None:
        """Return the next change; None once the watch or its store is closed.

        Parameters
        ----------
        timeout
            Seconds after which this raises `NcclTimeout`; None waits without limit.

        Raises
        ------
        StoreLost
            If the store's server is gone.
        """
        deadline = time.monotonic() + as_seconds(timeout, math.inf)
        length = SLICE if threading.current_thread() is threading.main_thread() else LONG_SLICE
        while True:
            found = self._next(min(deadline, time.monotonic() + length))
            if found is not None:
                return found or None
            if time.monotonic() >= deadline:
                raise NcclTimeout(f"no key that begins with {self.prefix!r} changed within {as_text(timeout or 0)}")

    def __iter__(self) -> Iterator[Change]:
        while (change := self.next()) is not None:
            yield change

    def close(self) -> None:
        """End the watch: `next` returns None, and the callback is not called any more.

        A watch without a callback also ends when it is no longer referenced.
        """
        raise NotImplementedError

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _next(self, deadline: float) -> Change | tuple[()] | None:
        """Return a change; () once closed; None if there is none by the deadline (on `time.monotonic`)."""
        raise NotImplementedError

    def _call_back(self, callback: Callable[[Change], object]) -> None:
        """Start the thread that takes the changes and calls `callback` with each."""
        threading.Thread(target=self._loop, args=(callback,), name="ncclpy-watch", daemon=True).start()

    def _loop(self, callback: Callable[[Change], object]) -> None:
        try:
            for change in self:
                try:
                    callback(change)
                except SystemExit:  # ends the thread silently, as in any thread
                    return
                except Exception:
                    log.exception("the callback of a watch of %r failed at %r", self.prefix, change.key)
        except Exception as error:  # raised by the store: it was lost, for example
            self.error = error
            log.warning("a watch of %r has ended: %s", self.prefix, error)
        finally:
            self.close()  # no thread takes changes any more


class Queue(Watch):
    """A watch of a store in this process; the store puts the changes in.

    A signal handler or finaliser that changes the store may interrupt a thread inside one of these methods. So they
    take no lock but the store's RLock, in `close`.
    """

    def __init__(self, prefix: str, ended: Callable[[Queue], object]) -> None:
        self.prefix = prefix
        self._ended = ended
        self._changes: queue.SimpleQueue[Change | None] = queue.SimpleQueue()
        self._closed = False

    def put(self, change: Change) -> None:
        self._changes.put(change)

    def end(self) -> None:
        self._closed = True
        self._changes.put(None)

    def close(self) -> None:
        self._ended(self)
        self.end()

    def __del__(self) -> None:
        self.close()

    def _next(self, deadline: float) -> Change | tuple[()] | None:
        if self._closed:
            return ()
        try:
            change = self._changes.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return None
        if self._closed or change is None:
            self._changes.put(None)  # for other threads that wait
            return ()
        return change
