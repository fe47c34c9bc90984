"""Streams with memory that produce and consume on a device, and gates that hold them up, on both engines."""

from __future__ import annotations

import numpy as np

import ncclpy
import testing
from ncclpy.core.runtime import device as device_module

RAW = testing.RawArrays()


def read(memory, stream):
    """Return the contents of memory in the order of a stream, without a wait for other work on the device."""
    values = np.empty(memory.count, memory.dtype)
    device_module.copy(values.ctypes.data, memory.pointer, values.nbytes, stream=stream)
    stream.synchronize(60)
    return values


class Side:
    """A stream of a device with memory of bytes, which is written and read on the stream."""

    def __init__(self, device, count=4096):
        self.device, self.count = device, count
        self.stream = ncclpy.Stream(device)
        self.memory = RAW.make(np.zeros(count, np.uint8), device)
        self.large = RAW.make(np.zeros(1 << 24, np.uint8), device)

    @property
    def buffer(self):
        return self.memory.buffer

    def fill(self, value, slowly=False):
        """Let the stream write a value; `slowly`: behind other long work."""
        if slowly:
            for _ in range(20 if ncclpy.library().engine == "host" else 1000):
                device_module.memset(self.large.pointer, 1, 1 << 24, stream=self.stream)
        device_module.memset(self.memory.pointer, value, self.count, stream=self.stream)

    def keep(self, memory, place):
        """Copy another memory in the order of this stream, for a later `read`."""
        device_module.copy(self.large.pointer + place * self.count, memory.pointer, self.count, stream=self.stream)

    def read(self, place):
        return RAW.read(self.large)[place * self.count : (place + 1) * self.count]

    def close(self):
        self.stream.synchronize()
        self.stream.close()


class Gate:
    """A gate stops a stream at a receive; opening the gate sends the message from another device."""

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
        """Destroy the communicators, which waits for their devices: nothing there may wait for the calling thread."""
        testing.close_all(self.pair)
