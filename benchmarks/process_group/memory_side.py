"""The child side on GPUs: one process that is one rank of a training-like loop, with ncclpy or torch.distributed."""

from __future__ import annotations

import datetime
import gc
import time

from benchmarks.work import setting, worker

#: Gradients of a step, and elements of each: 8 buckets of 32 MiB.
BUCKETS, COUNT = 8, 8 << 20
STEPS = 20
MIB = 1 << 20


class Side:
    """Answer requests; each method that a request can name starts with ``do_``."""

    def do_train(self, rival: str, rank: int, nranks: int, store: str) -> dict[str, float]:
        """Run the loop; return the peaks of torch's allocator in MiB and the milliseconds of a step."""
        setting.share_library()
        import torch

        self._begin(torch, rank, nranks, store)
        begin = self._ours() if rival == "ncclpy.ProcessGroup" else self._torchs()
        parameters = [torch.zeros(COUNT, device="cuda") for _ in range(BUCKETS)]
        for _ in range(3):
            self._step(parameters, begin)
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        for parameter in parameters:
            parameter.zero_()
        started = time.perf_counter()
        for _ in range(STEPS):
            self._step(parameters, begin)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        wanted = STEPS * nranks * (nranks + 1) / 2
        wrong = [float(parameter[0]) for parameter in parameters if not (parameter == wanted).all()]
        if wrong:
            raise RuntimeError(f"the loop summed up to {wrong} instead of {wanted}")
        return {
            "allocated": torch.cuda.max_memory_allocated() / MIB,
            "reserved": torch.cuda.max_memory_reserved() / MIB,
            "step": seconds / STEPS * 1e3,
        }

    def do_pair(self, rank: int, nranks: int, store: str) -> dict[str, float]:
        """Make the pair of ranks 0 and 1; return its device memory, in MiB, and the milliseconds of making it."""
        setting.share_library()
        import torch

        self._begin(torch, rank, nranks, store)
        self._ours()
        tensor = torch.ones(2, device="cuda")
        self.group.all_reduce(tensor).wait(60)
        self.group.barrier().wait(60)
        if rank > 1:
            return {}
        before, started = torch.cuda.mem_get_info()[0], time.perf_counter()
        self.group.connect(peers=[1 - rank])
        return {
            "memory": (before - torch.cuda.mem_get_info()[0]) / MIB,
            "made": (time.perf_counter() - started) * 1e3,
        }

    def _begin(self, torch, rank: int, nranks: int, store: str) -> None:
        self.torch, self.rank, self.nranks, self.store = torch, rank, nranks, store
        self.device = rank % torch.cuda.device_count()  # NCCL raises if ranks may not share a device
        torch.cuda.set_device(self.device)

    def _ours(self):
        import ncclpy
        from ncclpy.bootstrap import FileStore

        store = FileStore(self.store)
        self.group = group = ncclpy.ProcessGroup(store, self.rank, self.nranks, device=self.device, timeout=60)
        group.connect()
        current = self.torch.cuda.current_stream()

        def begin(gradient):
            work = group.all_reduce(gradient)
            return lambda: work.synchronize(current)

        return begin

    def _torchs(self):
        from torch import distributed

        distributed.init_process_group(
            "nccl",
            init_method=f"file://{self.store}",
            rank=self.rank,
            world_size=self.nranks,
            timeout=datetime.timedelta(seconds=60),
            device_id=self.torch.device("cuda", self.device),
        )
        return lambda gradient: distributed.all_reduce(gradient, async_op=True).wait

    def _step(self, parameters: list, begin) -> None:
        """Produce gradients, reduce each as soon as it exists, and drop it when the stream waits for the reduction."""
        pending = []
        for parameter in reversed(parameters):
            gradient = self.torch.full_like(parameter, self.rank + 1.0)
            pending.append((parameter, gradient, begin(gradient)))
        while pending:
            parameter, gradient, wait = pending.pop(0)
            wait()
            parameter.add_(gradient)


def main() -> None:
    """Serve a `Side`."""
    worker.serve(Side())
