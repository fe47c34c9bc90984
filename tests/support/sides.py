"""Streams with memory of their own that produce and consume on a device, and what holds one up, on both engines."""

from __future__ import annotations

import numpy as np

import ncclpy
import testing
from ncclpy.core.runtime import device as device_module

RAW = testing.RawArrays()


def read(memory, stream):
    """Return what a stream finds in memory, without a wait for anything else on the device."""
    values = np.empty(memory.count, memory.dtype)
    device_module.copy(values.ctypes.data, memory.pointer, values.nbytes, stream=stream)
    stream.synchronize(60)
    return values


class Side:
    """A stream of a device with memory of bytes, written and read on it without the CPU."""

    def __init__(self, device, count=4096):
        self.device, self.count = device, count
        self.stream = ncclpy.Stream(device)
        self.memory = RAW.make(np.zeros(count, np.uint8), device)
        self.large = RAW.make(np.zeros(1 << 24, np.uint8), device)

    @property
    def buffer(self):
        return self.memory.buffer

    def fill(self, value, slowly=False):
        """Let the stream write a value; slowly: behind other work that takes its time."""
        if slowly:
            for _ in range(20 if ncclpy.library().engine == "host" else 1000):
                device_module.memset(self.large.pointer, 1, 1 << 24, stream=self.stream)
        device_module.memset(self.memory.pointer, value, self.count, stream=self.stream)

    def keep(self, memory, place):
        """Copy what is in another memory when this stream reads it; what was read is looked at later."""
        device_module.copy(self.large.pointer + place * self.count, memory.pointer, self.count, stream=self.stream)

    def read(self, place):
        return RAW.read(self.large)[place * self.count : (place + 1) * self.count]

    def close(self):
        self.stream.synchronize()
        self.stream.close()


class Gate:
    """A stream stops at a message that another device sends when the gate is opened."""

    def __init__(self, device):
        self.other = 1 if device == 0 else 0
        self.pair = ncclpy.Communicator.init_all([device, self.other])
        testing.connect(self.pair)
        self.box = RAW.make(np.zeros(1, np.float32), device)
        self.message = RAW.make(np.zeros(1, np.float32), self.other)

    def shut(self, stream):
        self.stream = stream
        self.pair[0].recv(self.box.buffer, 1, stream=stream)

    def open(self):
        with ncclpy.Stream(self.other) as stream:
            self.pair[1].send(self.message.buffer, 0, stream=stream)
            stream.synchronize()
        self.stream.synchronize()

    def close(self):
        """To destroy communicators waits for their devices: nothing may run there that waits for who calls this."""
        testing.close_all(self.pair)
