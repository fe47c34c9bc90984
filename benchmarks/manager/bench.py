"""Base of the Manager's measures: a Manager with a buffer on each device, and checks that collectives were done."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.work import setting
from benchmarks.work.setting import COUNT

#: Operation, rival, road, measure, unit, value.
Sample = tuple[str, str, str, str, str, float]


class Bench:
    """A Manager over the devices of one library, and buffers of every kind."""

    def open(self, library: str | None, devices: int | None, torch: bool) -> dict:
        """Choose the library (None: the one that ncclpy finds), and make the Manager and the buffers."""
        if torch:
            setting.share_library()
        import ncclpy

        self.nccl = ncclpy
        self.engine = "noop"
        if library is not None:
            ncclpy.use(library)
        else:
            self.engine = "gpu" if ncclpy.library().engine == "cuda" else "host"
        self.devices = list(range(devices or ncclpy.device_count()))
        self.operation = f"all-reduce of {len(self.devices)} participants"
        self.launching = f"launch on {len(self.devices)} devices"
        self.manager = ncclpy.Manager()
        self.keys = iter(range(1 << 60))
        # The kind that most measures use: the simplest on each engine.
        self.kind = "prepared buffer" if self.engine == "gpu" else "numpy array"
        self.buffers = {"prepared buffer": tuple([self.buffer(d) for d in self.devices] for _ in range(2))}
        if self.engine != "gpu":
            self.buffers["numpy array"] = tuple([self._array() for _ in self.devices] for _ in range(2))
        missing = self._add_tensors() if torch else {}
        with self.working(self.kind, 1):
            self.wait(self.collective(next(self.keys), self.devices))
        version = ".".join(map(str, ncclpy.library().version))
        if torch:
            # Full garbage collections need not traverse the objects of other packages.
            gc.freeze()
        return {"engine": self.engine, "devices": len(self.devices), "nccl": version, "missing": missing}

    def collective(self, key: object, devices: list[int], num_local: int | None = None) -> list:
        """Add these devices as participants of a key; return their works."""
        send, recv = self.buffers[self.kind]
        n = num_local or len(self.devices)
        return [self.manager.all_reduce(key, send[d], recv[d], device=d, num_local=n) for d in devices]

    def collective_of(self, keys: list, device: int, num_local: int) -> list:
        """Add one device as a participant of many keys."""
        return [work for key in keys for work in self.collective(key, [device], num_local)]

    def wait(self, works: list) -> None:
        """Wait until all works are done; raise the first error."""
        for work in works:
            work.wait(60)

    def settle(self) -> None:
        """Wait for every stream of every device."""
        for device in self.devices:
            self.nccl.synchronize(device)

    @contextmanager
    def working(self, kind: str, collectives: int, devices: int | None = None) -> Iterator[None]:
        """Check that the block makes `collectives` all-reduces, on the first `devices` devices or, if None, on all."""
        n = len(self.devices) if devices is None else devices
        if self.engine == "noop":
            library = ctypes.CDLL(self.nccl.library().path)
            calls = ctypes.c_ulonglong.in_dll(library, "noopCalls")
            before = calls.value
            yield
            if calls.value - before != collectives * n:
                raise RuntimeError(f"{calls.value - before} operations arrived instead of {collectives * n}")
            return
        receivers = self.buffers[kind][1][:n]
        for device, buffer in enumerate(receivers):
            self.write(device, buffer, 0.0)
        yield
        for device, buffer in enumerate(receivers):
            self.check(device, buffer, n)

    def buffer(self, device: int, count: int = COUNT) -> Any:
        """Return a prepared buffer of ones; in a large one only the first elements are set."""
        from ncclpy.core.runtime import device as devices

        buffer = self.nccl.Buffer(devices.allocate(count * 4, device), count, "float32", device=device)
        self.write(device, buffer, 1.0)
        return buffer

    def write(self, device: int, buffer: Any, value: float) -> None:
        """Set the first elements."""
        self._copy(device, _pointer(buffer), (ctypes.c_float * COUNT)(*[value] * COUNT), False)

    def check(self, device: int, buffer: Any, n: int) -> None:
        """Raise unless the first elements are the sum of ones over n devices."""
        values = (ctypes.c_float * COUNT)()
        self._copy(device, _pointer(buffer), values, True)
        if list(values) != [float(n)] * COUNT:
            raise RuntimeError(f"the sum of ones over {n} devices came out as {list(values)} on device {device}")

    def _array(self) -> Any:
        import numpy

        return numpy.ones(COUNT, numpy.float32)

    def _add_tensors(self) -> dict[str, str]:
        """Add torch tensors as a kind of buffer; if that is impossible, return the reason."""
        if importlib.util.find_spec("torch") is None:
            return {"torch tensors": "torch is not installed"}
        import torch

        if self.engine == "gpu" and not torch.cuda.is_available():
            return {"torch tensors": "the installed torch is without CUDA"}
        places = [f"cuda:{device}" if self.engine == "gpu" else "cpu" for device in self.devices]
        self.buffers["torch tensor"] = tuple([torch.ones(COUNT, device=place) for place in places] for _ in range(2))
        return {}

    def _copy(self, device: int, pointer: int, values: ctypes.Array, back: bool) -> None:
        from ncclpy.core.runtime import device as devices

        if self.engine != "gpu":
            ends = (values, pointer) if back else (pointer, values)
            ctypes.memmove(*ends, ctypes.sizeof(values))
            return
        here = ctypes.addressof(values)
        ends = (here, pointer) if back else (pointer, here)
        with devices.using(device), self.nccl.Stream(device) as stream:
            devices.copy(*ends, ctypes.sizeof(values), stream)
            stream.synchronize()


def _pointer(buffer: Any) -> int:
    """Return the address of a buffer of any kind."""
    for name in ("pointer", "data_ptr"):
        if hasattr(buffer, name):
            found = getattr(buffer, name)
            return found() if callable(found) else found
    return buffer.ctypes.data
