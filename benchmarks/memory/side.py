"""The child side of the cost of registered memory: one rank, with its communicators and all kinds of memory."""

from __future__ import annotations

import ctypes
import dataclasses
import statistics
import time
import timeit
from collections.abc import Callable
from typing import Any

from benchmarks.overhead.road import binding_roads, python_road
from benchmarks.rivals.ncclpy_communicator import OUT_OF_PLACE
from benchmarks.work import setting, worker

#: Bytes of a segment, torch's smaller kind, and of the data of a communicator's next call. The call uses other memory,
#: so NCCL's work at the first use of a segment is not included.
SEGMENT = 2 << 20
#: Seconds for everything that waits.
PATIENCE = 60
#: Elements of arrays taken from a pool: blocks of all kinds that torch has.
FROM_POOL = (2, 1 << 10, 1 << 18, 1 << 20)


class Side(worker.Worker):
    """Answer requests; each method that a request can name starts with ``do_``."""

    def do_split(self, communicators: int) -> None:
        """Make so many communicators on the device; collective."""
        first = self.setting.communicator
        self.comms = [first, *(first.split(0) for _ in range(communicators - 1))]

    def do_roads(self, registered: bool) -> list[dict]:
        """Open the roads of an all-reduce of 8 bytes; with `registered` also on registered memory and in windows.

        Without `registered` this process has no registry. Collective. Return each road's description as `do_open`
        does, and the rival.
        """
        import ncclpy

        where = self.setting
        pairs = {"plain memory" if registered else "plain memory, no registry": (where.send, where.recv)}
        if registered:
            from ncclpy.memory import SegmentRegistry, alloc

            kept = [alloc(SEGMENT, where.device) for _ in range(2)]
            pairs["memory.alloc"] = tuple(one.pointer for one in kept)
            pairs["windows"] = tuple(ncclpy.bindings.mem_alloc(SEGMENT) for _ in range(2))
            for pointer in pairs["windows"]:
                kept.append(where.communicator.window(ncclpy.Buffer(pointer, SEGMENT, "uint8", device=where.device)))
            where.keep.append(kept)
        found = []
        for kind, (send, recv) in pairs.items():
            self._copy(send, (ctypes.c_float * setting.COUNT)(*[1.0] * setting.COUNT))
            place = dataclasses.replace(where, send=send, recv=recv)
            names = dict(zip(("send", "recv"), _buffers(place), strict=True))
            names |= {"all_reduce": where.communicator.all_reduce, "stream": where.stream}
            found += [
                ("ncclpy.Communicator", kind, python_road(place, kind, OUT_OF_PLACE, result=recv, **names)),
                ("ncclpy.bindings", kind, binding_roads(place, ncclpy.bindings, where.comm)[0]),
            ]
        for rival, kind, road in found:
            self.roads[f"{rival} {kind}"] = road
            wrong = self.do_check(f"{rival} {kind}")
            if wrong:
                raise RuntimeError(f"{rival}, {kind}: {wrong}")
        if registered and len(SegmentRegistry.default().registered(where.communicator)) != 2:
            raise RuntimeError(f"NCCL registers no memory here: {SegmentRegistry.default().counters()}")
        return [{"key": f"{rival} {kind}", "rival": rival, "road": kind} for rival, kind, _ in found]

    def do_events(self, kind: str, times: int) -> dict[str, dict[str, float]]:
        """Add and remove segments, by ncclpy's calls and by NCCL's alone in turns; collective.

        Returns
        -------
        dict
            By ``"ours"`` and ``"theirs"``, medians in microseconds: of adding a segment, of the next call of each
            communicator, of both together, and of removing the segment. The wait for the call in between is left out:
            it is a wait for the other rank.
        """
        from ncclpy.memory import SegmentRegistry

        registry = SegmentRegistry.default()
        ways = dict(zip(("ours", "theirs"), getattr(self, f"_{kind}")(registry), strict=True))
        taken: dict[str, list[tuple[float, ...]]] = {way: [] for way in ways}
        for way in ways:
            self._event(*ways[way])
        before = registry.counters()["registered"]
        for _ in range(times):
            for way, (add, remove) in ways.items():
                taken[way].append(self._event(add, remove))
        registered = registry.counters()["registered"] - before
        if registered != times * len(self.comms):
            raise RuntimeError(f"{times} segments were registered {registered} times: {registry.counters()}")
        return {
            way: {
                what: statistics.median(values) * 1e6
                for what, values in zip(
                    ("comes", "next call", "comes, with that call", "goes"), zip(*each, strict=True), strict=True
                )
            }
            for way, each in taken.items()
        }

    def _event(self, add: Callable[[], Any], remove: Callable[[list], None]) -> tuple[float, ...]:
        clock, where = time.perf_counter, self.setting
        calls = [comm.all_reduce for comm in self.comms]
        (send, recv), stream = _buffers(where), where.stream
        begin = clock()
        held = [add()]
        added = clock()
        for call in calls:
            call(send, recv, stream=stream)
        called = clock()
        where.sync()
        removing = clock()
        remove(held)
        end = clock()
        return added - begin, called - added, called - begin, end - removing

    def _allocated(self, registry) -> tuple:
        """Return functions that add and remove memory of NCCL's allocator: ncclpy's, and NCCL's own calls."""
        from ncclpy import bindings
        from ncclpy.memory import alloc

        device, register, deregister = self.setting.device, *self._registration()

        def remove(held: list) -> None:
            held.clear()
            if not registry.drain(PATIENCE):
                raise RuntimeError("a segment is still in use")

        def add_bare() -> tuple:
            pointer = bindings.mem_alloc(SEGMENT)
            return pointer, register(pointer)

        def remove_bare(held: list) -> None:
            pointer, handles = held[0]
            deregister(handles)
            bindings.mem_free(pointer)

        return (lambda: alloc(SEGMENT, device), remove), (add_bare, remove_bare)

    def _others(self, registry) -> tuple:
        """Return such functions for memory that another library has allocated."""
        from ncclpy import bindings

        device, register, deregister = self.setting.device, *self._registration()
        pointer = bindings.mem_alloc(SEGMENT)
        self.setting.keep.append(pointer)
        return (
            (lambda: registry.add(pointer, SEGMENT, device), lambda held: registry.remove(pointer, timeout=PATIENCE)),
            (lambda: register(pointer), lambda held: deregister(held[0])),
        )

    def _registration(self) -> tuple[Callable[[int], list], Callable[[list], None]]:
        """Return functions that register a segment with all communicators by NCCL's own calls, and that undo it."""
        from ncclpy import bindings

        comms = [comm.handle for comm in self.comms]

        def deregister(handles: list) -> None:
            for comm, handle in zip(comms, handles, strict=True):
                bindings.comm_deregister(comm, handle)

        return lambda pointer: [bindings.comm_register(comm, pointer, SEGMENT) for comm in comms], deregister

    def do_pool(self, framework: str, times: int) -> dict[str, float]:
        """Take arrays from a pool that has allocated as many before; return how often that reached ncclpy, and times.

        Whether it did is seen in the pool's segments and in the registry, after each array was made and freed. The
        times are microseconds for an array, in the pool and without it.
        """
        from ncclpy.memory import SegmentRegistry, pool

        registry, kept = SegmentRegistry.default(), pool(framework, self.comms[0])
        device = self.setting.device

        def state() -> tuple:
            counters = registry.counters()
            return kept.segments, counters["segments"], counters["leaving"], counters["not_freed"]

        # Each enters the pool by itself: torch does not allow entering a pool that is entered.
        warm = [kept.empty(count) for count in FROM_POOL]
        del warm
        reached, before = 0, state()
        for number in range(times):
            array = kept.empty(FROM_POOL[number % len(FROM_POOL)])
            reached, before = reached + (state() != before), state()
            del array
            reached, before = reached + (state() != before), state()
        with kept:
            ours = timeit.timeit(_maker(framework, kept, device), number=times)
        plain = timeit.timeit(_maker(framework, None, device), number=times)
        kept.close()
        return {"reached": float(reached), "ours": ours / times * 1e6, "plain": plain / times * 1e6}


def _buffers(where: setting.Setting) -> list:
    import ncclpy

    return [ncclpy.Buffer(at, setting.COUNT, "float32", device=where.device) for at in (where.send, where.recv)]


def _maker(framework: str, pool: Any, device: int) -> Callable[[], object]:
    """Return a function that makes an array in the framework's own way, in a pool if one is given."""
    if framework == "torch":
        import torch

        return lambda: torch.empty(FROM_POOL[0], device=f"cuda:{device}")
    if pool is not None:
        return lambda: pool.empty(FROM_POOL[0])
    import numpy as np

    return lambda: np.empty(FROM_POOL[0], np.float32)


def main() -> None:
    """Serve a `Side`."""
    worker.serve(Side())
