"""The child side: one rank of a group of torch.distributed."""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.work import worker

#: Seconds for everything that waits.
PATIENCE = 120
#: Turns in which the ways of a sample make their calls.
TURNS = 8
#: The transformer's words, width and heads; words of an example and examples of a rank's batch, by whether on GPUs.
#: With twelve layers these are 100 million parameters.
WORDS, WIDTH, HEADS = 20_000, 768, 12
LENGTH, EXAMPLES = {False: 16, True: 512}, {False: 1, True: 8}


class Side:
    """Answer requests; each method that a request can name starts with ``do_``."""

    def do_open(self, backends: list[str], rank: int, size: int, path: str, gpu: bool) -> None:
        """Make the world with the first backend, and a group of all ranks with each of the others."""
        os.environ["LOCAL_RANK"] = str(rank)
        if not gpu:
            os.environ["NCCLPY_LIBRARY"] = "host"
        import torch
        from torch import distributed

        if not gpu:
            torch.set_num_threads(1)
        self.torch, self.dist, self.gpu, self.rank = torch, distributed, gpu, rank
        self.device = torch.device("cuda", rank) if gpu else torch.device("cpu")
        if gpu:
            torch.cuda.set_device(rank)
        given: dict[str, Any] = {"device_id": self.device} if gpu else {}
        patience = datetime.timedelta(seconds=PATIENCE)
        distributed.init_process_group(
            backends[0], init_method=f"file://{path}", rank=rank, world_size=size, timeout=patience, **given
        )
        self.groups = {backends[0]: distributed.group.WORLD}
        for each in backends[1:]:
            self.groups[each] = distributed.new_group(backend=each, timeout=patience)

    def _sync(self) -> None:
        if self.gpu:
            self.torch.cuda.synchronize()

    def _call(self, backend: str, layer: str, tensor: Any) -> Callable[[], Any]:
        """Return a function that begins an all-reduce and returns its work."""
        group = self.groups[backend]
        if layer == "torch":
            return lambda: self.dist.all_reduce(tensor, group=group, async_op=True)
        from ncclpy.interop.torch import backend_of

        below = backend_of(group).group
        return lambda: below.all_reduce(tensor)

    def do_calls(self, nbytes: int, times: int, ways: list[tuple[str, str]]) -> list[tuple[float, float]]:
        """Return the median seconds of a call, and of a call that is waited for, for each way: a backend and a layer.

        The ways take turns, so that other load of the machine affects all of them.
        """
        tensor = self.torch.zeros(max(1, nbytes // 4), dtype=self.torch.float32, device=self.device)
        calls = [self._call(backend, layer, tensor) for backend, layer in ways]
        taken: list[tuple[list[float], list[float]]] = [([], []) for _ in ways]
        for turn in range(TURNS + 1):
            for call, kept in zip(calls, taken, strict=True):
                call().wait()
                self.dist.barrier()
                self._sync()
                some = self._some(call, times // TURNS)
                for found, more in zip(kept, some, strict=True):
                    found += more if turn else ()  # the first turn is for warming up
        return [(statistics.median(host), statistics.median(latency)) for host, latency in taken]

    def _some(self, call: Callable[[], Any], times: int) -> tuple[list[float], list[float]]:
        host, latency = [], []
        for _ in range(times):
            began = time.perf_counter()
            work = call()
            host.append(time.perf_counter() - began)
            work.wait()
            self._sync()
            latency.append(time.perf_counter() - began)
        return host, latency

    def _model(self, layers: int) -> Any:
        torch = self.torch
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True)
        encoder = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        parts = (torch.nn.Embedding(WORDS, WIDTH), encoder)
        return torch.nn.Sequential(*parts).to(self.device)

    def do_training(self, way: str, layers: int, steps: int, warm: int) -> tuple[dict[str, float], int, int]:
        """Return the seconds of a step by its kind of communication, the peak of memory, and how many parameters."""
        torch = self.torch
        gc.collect()  # left by an earlier training
        if self.gpu:
            torch.cuda.empty_cache()
        model = self._model(layers)
        words = torch.randint(WORDS, (EXAMPLES[self.gpu], LENGTH[self.gpu]), device=self.device)
        if way == "DDP":
            trained = torch.nn.parallel.DistributedDataParallel(model, device_ids=[self.rank] if self.gpu else None)
        else:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh(self.device.type, (self.dist.get_world_size(),))
            for each in model[1].layers:
                fully_shard(each, mesh=mesh)
            trained = fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(trained.parameters(), 1e-4)
        if self.gpu:
            torch.cuda.reset_peak_memory_stats()

        def timed(trained: Any, together: Callable[[], Any] = contextlib.nullcontext) -> float:
            taken = []
            for _ in range(warm + steps):
                self.dist.barrier()
                self._sync()
                began = time.perf_counter()
                with together():
                    optimizer.zero_grad()
                    trained(words).square().mean().backward()
                    optimizer.step()
                self._sync()
                taken.append(time.perf_counter() - began)
            return statistics.median(taken[warm:])

        taken = {"": timed(trained)}
        peak = torch.cuda.max_memory_allocated() if self.gpu else 0
        if way == "DDP":
            taken["without communication"] = timed(trained, trained.no_sync)
            silent = torch.nn.parallel.DistributedDataParallel(model, device_ids=[self.rank] if self.gpu else None)
            # Torch reads a hook's annotations, which are text here: a lambda has none.
            silent.register_comm_hook(None, lambda _, bucket: _sent(bucket.buffer()))
            taken["with buckets that are not sent"] = timed(silent)
        return taken, peak, sum(each.numel() for each in model.parameters())

    def do_close(self) -> None:
        """End it."""
        self.dist.destroy_process_group()


def _sent(buffer: Any) -> Any:
    """Return the function that a DDP hook runs for a bucket that it has reduced."""
    import torch

    done: torch.futures.Future[Any] = torch.futures.Future()
    done.set_result(buffer)
    return done


def main() -> None:
    """Serve a `Side`."""
    worker.serve(Side())
