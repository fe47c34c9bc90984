"""A CUDA graph of calls that are captured one after the other, as nccl-tests' ``-G`` makes it: one node per call.

A `Plan` is captured as one group, of which NCCL makes as few kernels as it can, so it would not be the same graph.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable

#: `CU_STREAM_CAPTURE_MODE_THREAD_LOCAL`, nccl-tests' too.
THREAD_LOCAL = 1


class Replay:
    """Calls that a thread has captured from a stream, ready to be launched there; the stream's device must be current.

    Parameters
    ----------
    driver : str
        Path or name of the library with the driver's functions; with the host engine, the engine itself.
    stream : int
        The stream's handle.
    calls : iterable of callable
        The calls to capture, each of which issues an operation on the stream.
    """

    def __init__(self, driver: str, stream: int, calls: Iterable[Callable[[], object]]):
        self._library, self._stream = ctypes.CDLL(driver), ctypes.c_void_p(stream)
        self._graph, self._exec = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuStreamBeginCapture_v2", self._stream, THREAD_LOCAL)
        try:
            for call in calls:
                call()
        finally:
            self._call("cuStreamEndCapture", self._stream, ctypes.byref(self._graph))
        self._call("cuGraphInstantiateWithFlags", ctypes.byref(self._exec), self._graph, ctypes.c_ulonglong(0))

    def launch(self) -> None:
        """Issue all calls again."""
        self._call("cuGraphLaunch", self._exec, self._stream)

    def close(self) -> None:
        """Destroy the graph; its launches must be over."""
        self._call("cuGraphExecDestroy", self._exec)
        self._call("cuGraphDestroy", self._graph)

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            raise RuntimeError(f"{name} returned {code}")
