"""The framework of a run for programs of ranks: numpy on the host engine, torch or CuPy on GPUs."""

from __future__ import annotations

import contextlib
import gc
import time

import pytest
from group_ranks import DEADLINE

import ncclpy
from ncclpy import memory

LONG = DEADLINE / 2  # seconds that only a hang takes
SOME = 100_000_000  # cycles of a GPU: 50 ms
SPIN = """
extern "C" __global__ void spin(long long cycles) {
  long long began = clock64();
  while (clock64() - began < cycles) {}
}
"""


def framework() -> str:
    """Return the framework of this run's pools; skip the test if it is missing."""
    if ncclpy.library().engine == "host":
        return "numpy"
    need_torch("MemPool")
    return "torch"


def need_torch(name):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available() or not hasattr(torch.cuda, name):
        pytest.skip(f"needs a GPU and torch.cuda.{name}")


class Frame:
    """numpy arrays, each of which is a segment."""

    torch = None

    def __init__(self, device):
        self.device = device

    def side(self):
        """Return a context in which work goes into another stream than before."""
        return contextlib.nullcontext()

    def fill(self, array, value):
        array.fill(value)

    def new(self, count):
        """Return an array of floats, allocated by the framework from the pool of the enclosing block."""
        return memory.empty(count, device=self.device)

    def pointer(self, array):
        return array.__array_interface__["data"][0]

    def found(self, array):
        """Return the smallest and the largest element, after the work of the current stream."""
        return float(array.min()), float(array.max())

    def await_(self, work):
        """Have the current stream wait for a work; without streams this thread waits."""
        work.wait(LONG)

    def be_busy(self):
        """Keep the current stream busy for some 50 ms."""
        time.sleep(0.005)

    def give_back(self):
        """Have the framework give unused memory back, also while the device is busy."""

    def trim(self):
        """Have the framework give unused memory back when nothing runs."""
        gc.collect()
        self.give_back()


class TorchFrame(Frame):
    def __init__(self, device):
        super().__init__(device)
        import torch

        self.torch = torch
        torch.cuda.set_device(device)

    def side(self):
        return self.torch.cuda.stream(self.torch.cuda.Stream(self.device))

    def fill(self, array, value):
        array.fill_(value)

    def new(self, count):
        return self.torch.empty(count, device=f"cuda:{self.device}")

    def pointer(self, array):
        return array.data_ptr()

    def await_(self, work):
        work.synchronize(self.torch.cuda.current_stream(self.device))

    def be_busy(self):
        self.torch.cuda._sleep(SOME)

    def give_back(self):
        self.torch.cuda.empty_cache()

    def trim(self):
        gc.collect()
        self.torch.cuda.synchronize(self.device)
        self.give_back()


class CupyFrame(Frame):
    """CuPy arrays on streams that wait for the legacy default stream: CuPy's pools free without naming a stream."""

    def __init__(self, device):
        super().__init__(device)
        import cupy

        self.cupy = cupy
        cupy.cuda.Device(device).use()
        self._side = cupy.cuda.Stream()  # a single one: CuPy's pools are keyed by the addresses of streams
        self._spin = cupy.RawKernel(SPIN, "spin")
        self.pool = cupy.get_default_memory_pool()  # the pool of new arrays

    def side(self):
        return self._side

    def new(self, count):
        return self.cupy.empty(count, self.cupy.float32)

    def pointer(self, array):
        return array.data.ptr

    def await_(self, work):
        work.synchronize(self.cupy.cuda.get_current_stream())

    def be_busy(self):
        self._spin((1,), (1,), (self.cupy.int64(SOME),))

    def give_back(self):
        self.pool.free_all_blocks()

    def trim(self):
        gc.collect()
        self.cupy.cuda.Device(self.device).synchronize()
        self.give_back()


def frame_of(device, name=None):
    """Return the framework of this run, or the named one, for this thread on a device."""
    frames = {"numpy": Frame, "torch": TorchFrame, "cupy": CupyFrame}
    return frames[name or framework()](device)


def lies_in(pointer, segments):
    return any(base <= pointer < base + nbytes for base, nbytes, _ in segments)


def failure_of(kind, call, *arguments):
    """Return the error text of a call, and the seconds that the call took."""
    began = time.monotonic()
    with pytest.raises(kind) as caught:
        call(*arguments)
    caught.value.with_traceback(None)  # a group keeps its error, and the frames would keep the array
    return str(caught.value), time.monotonic() - began


def gone(frame, registry, *, but=()):
    """Return True if nothing is left: no segment, leaving or not, no registration, no memory that was not freed.

    Waits up to a limit: a failed operation keeps its arrays until a thread finds that the device is done with them.
    """
    end = time.monotonic() + LONG / 2
    while True:
        frame.trim()
        drained, counters = registry.drain(1.0), registry.counters()
        names = {"segments", "bytes", "leaving", "registrations", "not_freed"}.difference(but)
        if drained and not any(counters[name] for name in names):
            return True
        if time.monotonic() > end:
            return drained, counters
        time.sleep(0.01)
