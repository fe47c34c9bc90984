"""CUDA graphs captured from a stream by driver calls, on both engines."""

from __future__ import annotations

import contextlib
import ctypes
import functools

from driver_calls import Driver

import ncclpy
from ncclpy.core.runtime import device as device_module

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2


@functools.cache
def driver():
    """Return the driver calls of the engine of the run."""
    loaded = ncclpy.library()
    made = Driver(loaded.path if loaded.engine == "host" else "libcuda.so.1")
    made.cuInit(0)
    return made


class Graph:
    """A graph captured from a stream: ``with graph.capture():`` around the calls, then `launch`."""

    def __init__(self, stream, mode=THREAD_LOCAL):
        self.stream, self.mode, self.captured, self.exec_ = stream, mode, None, None

    @contextlib.contextmanager
    def capture(self):
        """Capture the calls of the block; no graph is made if the block raises."""
        graph = ctypes.c_void_p()
        try:
            with device_module.using(self.stream.device):
                driver().cuStreamBeginCapture_v2(self.stream.handle, self.mode)
                try:
                    yield self
                except BaseException:
                    driver().library.cuStreamEndCapture(self.stream.handle, ctypes.byref(graph))
                    raise
                driver().cuStreamEndCapture(self.stream.handle, ctypes.byref(graph))
        finally:
            self.captured = graph.value

    def is_capturing(self):
        """Return whether the stream is being captured, and the capture is valid."""
        status = ctypes.c_int()
        driver().cuStreamIsCapturing(self.stream.handle, ctypes.byref(status))
        return status.value == 1

    def launch(self, wait=True):
        """Launch the graph on its stream, and wait for it."""
        with device_module.using(self.stream.device):
            if self.exec_ is None:
                self.exec_ = driver().get("cuGraphInstantiateWithFlags", ctypes.c_void_p, self.captured, 0)
            driver().cuGraphLaunch(self.exec_, self.stream.handle)
        if wait:
            self.stream.synchronize(60)

    def close(self):
        """Destroy the graph: NCCL waits for that when it destroys a communicator in the graph."""
        with device_module.using(self.stream.device):
            if self.exec_ is not None:
                driver().cuGraphExecDestroy(self.exec_)
            if self.captured:
                driver().cuGraphDestroy(self.captured)
        self.exec_ = self.captured = None

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()
