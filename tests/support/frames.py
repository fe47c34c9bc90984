"""What programs of ranks do with the framework of a run: numpy on the host engine, torch or CuPy on GPUs."""

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
    """Return whose arrays the pools of this run make; skip the test if those are missing."""
    if ncclpy.library().engine == "host":
        return "numpy"
    need_torch("MemPool")
    return "torch"


def need_torch(name):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available() or not hasattr(torch.cuda, name):
        pytest.skip(f"needs a GPU and torch.cuda.{name}")


class Frame:
    """numpy's arrays, each of which is a segment."""

    torch = None

    def __init__(self, device):
        self.device = device

    def side(self):
        """Return a context whose work goes into another stream than that of before."""
        return contextlib.nullcontext()

    def fill(self, array, value):
        array.fill(value)

    def new(self, count):
        """Return an array of floats by the framework's own means, of the pool whose block this is in."""
        return memory.empty(count, device=self.device)

    def pointer(self, array):
        return array.__array_interface__["data"][0]

    def found(self, array):
        """Return the smallest and the largest element, once the current stream has come so far."""
        return float(array.min()), float(array.max())

    def await_(self, work):
        """Have the current stream wait for a work; where there is none, this thread does."""
        work.wait(LONG)

    def be_busy(self):
        """Keep the current stream busy for some 50 ms."""
        time.sleep(0.005)

    def give_back(self):
        """Have the framework give back what nobody has any more, whatever the device is at."""

    def trim(self):
        """Do that when nothing runs."""
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
    """CuPy's arrays, on streams that wait for the legacy default one: its pools name no stream when they free."""

    def __init__(self, device):
        super().__init__(device)
        import cupy

        self.cupy = cupy
        cupy.cuda.Device(device).use()
        self._side = cupy.cuda.Stream()  # one: its pools are by the streams' addresses
        self._spin = cupy.RawKernel(SPIN, "spin")
        self.pool = cupy.get_default_memory_pool()  # where arrays come from

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
    """Return the framework of this run, or that of a name, as this thread uses it on a device."""
    frames = {"numpy": Frame, "torch": TorchFrame, "cupy": CupyFrame}
    return frames[name or framework()](device)


def lies_in(pointer, segments):
    return any(base <= pointer < base + nbytes for base, nbytes, _ in segments)


def failure_of(kind, call, *arguments):
    """Return what the error of a call says, and after how many seconds it came."""
    began = time.monotonic()
    with pytest.raises(kind) as caught:
        call(*arguments)
    caught.value.with_traceback(None)  # a group keeps the error that has ended it, whose frames would keep the array
    return str(caught.value), time.monotonic() - began


def gone(frame, registry, *, but=()):
    """Return whether nothing is left: no segment, nothing on its way out, no registration, nothing lost.

    In time: what has failed keeps its arrays until a thread has found the device done with them.
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
