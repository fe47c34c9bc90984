"""The child side: one rank of a coordinator."""

from __future__ import annotations

import datetime
import json
import os
import random
import time
from typing import Any

import numpy as np

from benchmarks.coordinator.models import MODELS
from benchmarks.work import setting, worker

#: Seconds for everything that waits.
PATIENCE = 60


class Side:
    """Answer requests; each method that a request can name starts with ``do_``."""

    store = None

    def do_begin(self, gpu: bool, size: int) -> None:
        """Choose the engine: GPUs, or the host engine."""
        self.torch, self.size = None, size
        if gpu:
            setting.share_library()
            import torch

            self.torch = torch
            return
        os.environ["NCCLPY_HOST_DEVICES"] = str(max(8, size))
        import ncclpy

        ncclpy.use("host")

    def do_serve(self) -> int:
        """Serve a store for all ranks; return its port."""
        from ncclpy.bootstrap import TCPStore

        self.store = TCPStore("127.0.0.1", 0, serve=True)
        return self.store.port

    def do_open(self, rank: int, port: int, over: str, engine: str = "auto") -> None:
        """Make a coordinator over a store, a process group or MPI."""
        import ncclpy
        from ncclpy.bootstrap import TCPStore

        size = self.size
        if over == "mpi":
            from mpi4py import MPI

            self.group = None
            self.coordinator = ncclpy.Coordinator(MPI.COMM_WORLD, engine=engine, device=rank)
            self.rank, self.arrays = rank, {}
            return
        if self.torch is not None:
            self.torch.cuda.set_device(rank)
        store = self.store or TCPStore("127.0.0.1", port)
        self.group, self.met = None, store
        if over == "group":
            self.group = ncclpy.ProcessGroup(store, rank, size, device=rank, timeout=PATIENCE)
            self.coordinator = ncclpy.Coordinator(self.group)
        else:
            self.coordinator = ncclpy.Coordinator((store, rank, size), device=rank)
        self.rank, self.arrays = rank, {}

    def _ones(self, count: int) -> Any:
        """Return an array of float32: of numpy on the host engine, of torch on GPUs."""
        if self.torch is None:
            return np.ones(count, np.float32)
        return self.torch.ones(count, device=f"cuda:{self.rank}")

    def do_latency(self, times: int, last: int) -> list[list[float]]:
        """Bring one small array `times` times; the rank `last` brings it after all others.

        Return the times of each bring, launch and end of the wait, by the machine's monotonic clock.
        """
        from ncclpy import recorder

        coordinator, array = self.coordinator, self._ones(2)
        waited = []
        for _ in range(times):
            if self.rank == last:
                time.sleep(0.001)  # all others have brought theirs
            coordinator.all_reduce("latency", array, "max").wait(PATIENCE)
            waited.append(time.monotonic())
        entries = [each for each in json.loads(recorder.dump())["entries"] if "latency" in str(each["key"])][-times:]
        return [[each["created"], each["launched"], end] for each, end in zip(entries, waited, strict=True)]

    def do_prepare(self, model: str) -> None:
        """Make the gradients of a model."""
        self.arrays = {f"{model}/{i}": self._ones(count) for i, count in enumerate(MODELS[model]())}

    def do_step(self, times: int, grouped: bool) -> list[float]:
        """Reduce all gradients, brought in an order of this rank's own or grouped; return the seconds of each step."""
        coordinator, rng = self.coordinator, random.Random(self.rank)
        taken = []
        for turn in range(times):
            names = list(self.arrays)
            if not grouped:
                rng.shuffle(names)
            coordinator.barrier(f"turn {turn}").wait(PATIENCE)
            began = time.perf_counter()
            if grouped:
                works = coordinator.grouped_all_reduce(names, [self.arrays[name] for name in names], "max")
            else:
                works = [coordinator.all_reduce(name, self.arrays[name], "max") for name in names]
            for work in works:
                work.wait(PATIENCE)
            taken.append(time.perf_counter() - began)
        return taken

    def do_flat(self, times: int) -> list[float]:
        """Reduce as many bytes in one call, by a process group; return the seconds of each call."""
        if not hasattr(self, "other"):
            import ncclpy

            self.other = ncclpy.ProcessGroup(
                self.met, self.rank, self.size, device=self.rank, name="flat", timeout=PATIENCE
            )
        flat, taken = self._ones(sum(len(array) for array in self.arrays.values())), []
        for _ in range(times):
            self.other.barrier().wait(PATIENCE)
            began = time.perf_counter()
            self.other.all_reduce(flat, op="max").wait(PATIENCE)
            taken.append(time.perf_counter() - began)
        return taken

    def do_rival(self, times: int, path: str) -> list[float]:
        """Reduce the same arrays one by one with torch.distributed; return the seconds of each step."""
        from torch import distributed

        torch = self.torch
        if not distributed.is_initialized():
            distributed.init_process_group(
                "nccl", init_method=f"file://{path}", rank=self.rank, world_size=self.size,
                timeout=datetime.timedelta(seconds=PATIENCE), device_id=torch.device("cuda", self.rank),
            )  # fmt: skip
        taken, arrays = [], list(self.arrays.values())
        for _ in range(times):
            distributed.barrier()
            torch.cuda.synchronize()
            began = time.perf_counter()
            for array in arrays:
                distributed.all_reduce(array, distributed.ReduceOp.MAX)
            torch.cuda.synchronize()
            taken.append(time.perf_counter() - began)
        return taken

    def do_close(self) -> None:
        """End it."""
        if self.torch is not None and self.torch.distributed.is_initialized():
            self.torch.distributed.destroy_process_group()
        self.coordinator.close(PATIENCE)
        if hasattr(self, "other"):
            self.other.close()
        if self.group is not None:
            self.group.close()


def main() -> None:
    """Serve a `Side`."""
    worker.serve(Side())
