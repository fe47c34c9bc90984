"""The child side of the Manager's benchmark: one process that has all devices, and what is measured in it.

Each measure returns a list of samples: ``(operation, rival, road, measure, unit, value)``.
"""

from __future__ import annotations

import ctypes
import gc
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.manager.bench import Bench, Sample
from benchmarks.manager.plans import PAUSE, Large, Plans
from benchmarks.work import compiler, worker

MANAGER = "ncclpy.Manager"
#: Collectives in a sample: of adds, of launches one by one, of rounds one by one and back to back.
ADDED = 64
LAUNCHED = 40
LATENCIES = 40
REPEATED = 200
CALLBACKS = 30
#: Participants added in a sample of threads, by all threads together.
BY_THREADS = 6400
THREADS = (1, 2, 4, 8, 16, 32, 64)
#: Keys added while the other keys are pending.
BESIDE_PENDING = 2000
IDLE_SECONDS = 1.0
#: Duration of an input's producer, for the latency of callbacks: the monitor polls less often with time.
PRODUCERS = {"1 ms": 1e-3, "20 ms": 20e-3}


class Side(Bench):
    """Answer requests; each method that a request can name starts with ``do_``."""

    def __init__(self):
        self.plans: Plans | None = None
        self.large: Large | None = None

    def do_open(self, library: str | None, devices: int | None, torch: bool) -> dict:
        """Choose the library (None: the one that ncclpy finds) and make a Manager with a buffer on each device."""
        return self.open(library, devices, torch)

    def do_pending(self, count: int) -> None:
        """Let so many keys wait for their second participant from now on."""
        send, recv = (buffers[0] for buffers in self.buffers[self.kind])
        self.waiting = [
            self.manager.all_reduce(("pending", key), send, recv, device=0, num_local=2) for key in range(count)
        ]
        gc.collect()

    def do_sample(self, measure: str) -> list[Sample]:
        """Take the samples of one measure."""
        return getattr(self, f"measure_{measure}")()

    # Measures.

    def measure_add(self) -> list[Sample]:
        """The cost of adding a participant that is not the last one of its key, and of the last one."""
        samples = []
        for kind in self.buffers:
            for_all, last = self._add(kind)
            road = f"all_reduce({kind})"
            samples += [
                ("add a participant", MANAGER, road, "not the last one", "us", for_all * 1e6),
                ("add a participant", MANAGER, road, "the last one", "us", last * 1e6),
            ]
        return samples

    def measure_recorder(self) -> list[Sample]:
        """The cost of an add with the recorder and without."""
        samples = []
        for road, capacity in (("recorder off", 0), ("recorder of 2,000", 2000)):
            self.nccl.recorder.resize(capacity)
            seconds = statistics.median(self._add(self.kind)[0] for _ in range(5))
            samples.append(("recorder", MANAGER, road, "add", "us", seconds * 1e6))
        return samples

    def _add(self, kind: str) -> tuple[float, float]:
        """Return the seconds of an add that is not the last one of its key, and of one that is."""
        send, recv = self.buffers[kind]
        first, n, add = list(zip(self.devices, send, recv, strict=True)), len(self.devices), self.manager.all_reduce
        last = first.pop()
        keys = [next(self.keys) for _ in range(ADDED)]
        with self.working(kind, len(keys)):
            begin = time.perf_counter()
            works = [add(key, s, r, device=d, num_local=n) for key in keys for d, s, r in first]
            middle = time.perf_counter()
            device, s, r = last
            works += [add(key, s, r, device=device, num_local=n) for key in keys]
            end = time.perf_counter()
            self.wait(works)
        return (middle - begin) / max(1, len(keys) * len(first)), (end - middle) / len(keys)

    def measure_launch(self) -> list[Sample]:
        """The time from before the last add until the operations of all devices are enqueued."""
        samples = []
        for road, pause, each in (
            ("the last add", 0.0, True),
            ("the last add, after a pause", PAUSE, True),
            ("the last add, right behind another", 0.0, False),
        ):
            begun, works = {}, []
            keys = [next(self.keys) for _ in range(LAUNCHED)]
            with self.working(self.kind, len(keys)):
                for key in keys:
                    some = self.collective(key, self.devices[:-1])
                    if pause:
                        time.sleep(pause)
                    begun[repr(key)] = time.monotonic()
                    some += self.collective(key, self.devices[-1:])
                    if each:
                        self.wait(some)
                    works += some
                self.wait(works)
            launched = dict.fromkeys(begun, 0.0)
            for entry in self.nccl.recorder.snapshot()["entries"]:
                if entry["key"] in begun:
                    launched[entry["key"]] = max(launched[entry["key"]], entry["launched"])
            seconds = statistics.median(launched[key] - begun[key] for key in begun)
            samples.append((self.launching, MANAGER, road, "until enqueued", "us", seconds * 1e6))
        return samples

    def measure_beside_pending(self) -> list[Sample]:
        """The cost of an add while other keys wait: two participants a key, of which the first is timed."""
        (send, _), (recv, _) = (buffers[:2] for buffers in self.buffers[self.kind])
        add = self.manager.all_reduce
        keys = [next(self.keys) for _ in range(BESIDE_PENDING)]
        stats = self.manager.stats()
        assert stats["gathering"] == len(self.waiting), stats
        with self.working(self.kind, len(keys), 2):
            begin = time.perf_counter()
            works = [add(key, send, recv, device=0, num_local=2) for key in keys]
            seconds = (time.perf_counter() - begin) / len(keys)
            works += self.collective_of(keys, 1, 2)
            self.wait(works)
        assert not any(work.is_completed() for work in self.waiting[:1000])
        return [("pending keys", MANAGER, f"{len(self.waiting):,} keys pending", "add", "us", seconds * 1e6)]

    def measure_rounds(self) -> list[Sample]:
        """Participants added from one thread and from a thread each, until all works are done."""
        samples = []
        for measure, each, count in (("latency", True, LATENCIES), ("repeated", False, REPEATED)):
            for road, places in (("one thread", [self.devices]), ("a thread each", [[d] for d in self.devices])):
                keys = [next(self.keys) for _ in range(count)]
                takers = [partial(self._take_part, keys, devices, each) for devices in places]
                with self.working(self.kind, count):
                    seconds = in_threads(takers)
                samples.append((self.operation, MANAGER, road, measure, "us", seconds / count * 1e6))
        return samples

    def _take_part(self, keys: list, devices: list[int], each: bool) -> None:
        """Add some devices to all keys; wait for each of them, or for all in the end."""
        works = []
        for key in keys:
            works += self.collective(key, devices)
            if each:
                self.wait(works)
                works.clear()
        self.wait(works)

    def measure_threads(self) -> list[Sample]:
        """Python threads that add the two participants of keys of their own."""
        n = min(2, len(self.devices))
        samples = []
        for threads in THREADS:
            share = BY_THREADS // threads // n
            keys = [[next(self.keys) for _ in range(share)] for _ in range(threads)]
            works: list[list] = [[] for _ in range(threads)]

            adders = [partial(self._add_all, *place, n) for place in zip(keys, works, strict=True)]
            with self.working(self.kind, threads * share, n):
                seconds = in_threads(adders)
                for some in works:
                    self.wait(some)
            value = threads * share * n / seconds / 1e3
            road = f"{threads} threads" if threads > 1 else "1 thread"
            samples.append(("threads", MANAGER, road, "adds", "1000/s", value))
        return samples

    def _add_all(self, keys: list, works: list, n: int) -> None:
        for key in keys:
            works += self.collective(key, self.devices[:n], n)

    def measure_callback(self) -> list[Sample]:
        """The time from the end of the input's producer to the callback, less the operation's time on the device."""
        if self.engine == "noop":
            return []
        samples = []
        for road, seconds in PRODUCERS.items():
            latencies = [self._callback(seconds * random.uniform(0.9, 1.1)) for _ in range(CALLBACKS)]
            value = statistics.median(latencies) * 1e6
            samples.append(("callback", MANAGER, f"input ready after {road}", "latency", "us", value))
        return samples

    def _callback(self, seconds: float) -> float:
        if not hasattr(self, "timing"):
            self._open_callbacks()
        from ncclpy.core.runtime import device as devices

        send, recv = (buffers[0] for buffers in self.buffers[self.kind])
        called = threading.Event()
        moments: list[float] = []

        def on_done(work: Any) -> None:
            moments.append(time.monotonic())
            called.set()

        self.held.seconds = seconds
        with devices.using(0):
            self.launch_host_function(ctypes.c_void_p(self.producer.handle), self.hold, ctypes.byref(self.held))
        with self.working(self.kind, 1, 1):
            work = self.timing.all_reduce(
                next(self.keys), send, recv, device=0, num_local=1, stream=self.producer, on_done=on_done
            )
            if not called.wait(60):
                raise RuntimeError("the callback was not called within a minute")
        work.wait()
        return moments[0] - self.held.stamp - work.duration

    def _open_callbacks(self) -> None:
        class Hold(ctypes.Structure):
            _fields_ = (("seconds", ctypes.c_double), ("stamp", ctypes.c_double))

        with tempfile.TemporaryDirectory() as folder:
            stamp = ctypes.CDLL(str(compiler.build(Path(__file__).with_name("stamp.c"), Path(folder))))
        driver = ctypes.CDLL("libcuda.so.1" if self.engine == "gpu" else self.nccl.library().path)
        self.launch_host_function = driver.cuLaunchHostFunc
        self.hold, self.held = stamp.hold_and_stamp, Hold()
        self.producer = self.nccl.Stream(0)
        self.timing = self.nccl.Manager(timing=True)
        self._callback(1e-4)

    def measure_idle(self) -> list[Sample]:
        """The share of a core that the whole process uses with nothing pending, after use."""
        time.sleep(0.05)
        begin, cpu = time.perf_counter(), time.process_time()
        time.sleep(IDLE_SECONDS)
        share = (time.process_time() - cpu) / (time.perf_counter() - begin)
        return [("idle", MANAGER, "nothing pending", "CPU", "% of a core", share * 100)]

    def measure_plans(self) -> list[Sample]:
        """The same collective without a Manager: plans, graphs, and a C loop."""
        if self.plans is None:
            self.plans = Plans(self)
        return list(self.plans.sample())

    def do_large(self, nbytes: int) -> list[Sample]:
        """Bus bandwidth of all-reduces of so many bytes."""
        if self.plans is None:
            self.plans = Plans(self)
        if self.large is None:
            self.large = Large(self, self.plans, nbytes)
        return list(self.large.sample())


def in_threads(functions: list[Callable[[], None]]) -> float:
    """Run each function in a thread of its own, all at once; return the seconds until all are done."""
    begun: list[float] = []
    ended: list[float] = []
    failures: list[BaseException] = []
    barrier = threading.Barrier(len(functions), action=lambda: begun.append(time.perf_counter()))

    def main(function: Callable[[], None]) -> None:
        barrier.wait()
        try:
            function()
        except BaseException as failure:  # raised below, in the thread that waits
            failures.append(failure)
        ended.append(time.perf_counter())

    threads = [threading.Thread(target=main, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return max(ended) - begun[0]


def main() -> None:
    """Serve requests until the parent closes the pipe."""
    worker.serve(Side())
