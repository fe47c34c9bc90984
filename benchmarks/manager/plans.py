"""Plans and graphs of one all-reduce per device, and a C loop that drives all devices from one thread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.manager.bench import Bench, Sample
from benchmarks.rivals import c_loop

#: Launches in a row, of which a sample is the mean, and launches that are each waited for.
REPEATED = 200
LATENCIES = 40
#: Seconds between launches, after which all threads are asleep.
PAUSE = 1e-3
#: Launches of large messages in a row.
LARGE = 20


class Plans:
    """Communicators of all devices, outside the Manager, with streams of their own."""

    def __init__(self, side: Bench):
        self.side = side
        self.comms = side.nccl.Communicator.init_all(side.devices)
        self.streams = [side.nccl.Stream(device) for device in side.devices]
        send, recv = side.buffers["prepared buffer"]
        self.plan = self._record(self.comms, send, recv)
        # A communicator of its own: after a capture its other calls are slower.
        self.captured = side.nccl.Communicator.init_all(side.devices)
        self.graph = self._record(self.captured, send, recv).capture()
        self.loop = c_loop.devices(
            side.nccl.library().path,
            side.engine == "gpu",
            [comm.handle for comm in self.comms],
            [stream.handle for stream in self.streams],
            *([buffer.pointer for buffer in buffers] for buffers in (send, recv)),
        )

    def _record(self, comms: list, send: list, recv: list) -> Any:
        plan = self.side.nccl.Plan()
        with plan.record():
            for place in zip(comms, send, recv, self.streams, strict=True):
                place[0].all_reduce(*place[1:3], stream=place[3])
        return plan

    def sample(self) -> Iterator[Sample]:
        """Time each of them back to back, with a wait for each launch, and until a launch is enqueued."""
        operation = self.side.operation
        for rival, road, launch, arrives in (
            ("C loop", "a group from one thread", lambda: self.loop(1), True),
            ("ncclpy.Plan", "Plan.launch", self.plan.launch, True),
            # On the no-op library a graph is empty: only the call path to the driver is timed.
            ("ncclpy.Plan", "Graph.launch", self.graph.launch, self.side.engine != "noop"),
        ):
            for measure, count, each in (("latency", LATENCIES, True), ("repeated", REPEATED, False)):
                with self.side.working("prepared buffer", count if arrives else 0):
                    seconds = self._time(launch, count, each) / count
                yield operation, rival, road, measure, "us", seconds * 1e6
            with self.side.working("prepared buffer", LATENCIES if arrives else 0):
                seconds = statistics.median(self._enqueue(launch) for _ in range(LATENCIES))
                self.settle()
            yield self.side.launching, rival, road, "until enqueued", "us", seconds * 1e6

    def _enqueue(self, launch: Callable[[], object]) -> float:
        """Return the seconds of a launch after a pause, without a wait for the launch before it."""
        time.sleep(PAUSE)
        begin = time.perf_counter()
        launch()
        return time.perf_counter() - begin

    def _time(self, launch: Callable[[], object], count: int, each: bool) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            launch()
            if each:
                self.settle()
        self.settle()
        return time.perf_counter() - begin

    def settle(self) -> None:
        """Wait for the streams."""
        for stream in self.streams:
            stream.synchronize()


class Large:
    """Bus bandwidth of large all-reduces, by the Manager and by a plan."""

    def __init__(self, side: Bench, plans: Plans, nbytes: int):
        self.side, self.nbytes = side, nbytes
        self.send, self.recv = ([side.buffer(device, nbytes // 4) for device in side.devices] for _ in range(2))
        self.plan = side.nccl.Plan()
        with self.plan.record():
            for comm, send, recv, stream in zip(plans.comms, self.send, self.recv, plans.streams, strict=True):
                comm.all_reduce(send, recv, stream=stream)
        self.plans = plans

    def sample(self) -> Iterator[Sample]:
        """Time some launches in a row, after one that warms up."""
        n = len(self.side.devices)
        for rival, reduce, settle in (
            ("ncclpy.Manager", self._add, self._wait),
            ("ncclpy.Plan", self.plan.launch, self.plans.settle),
        ):
            self.works: list = []
            for device, buffer in enumerate(self.recv):
                self.side.write(device, buffer, 0.0)
            reduce()
            settle()
            begin = time.perf_counter()
            for _ in range(LARGE):
                reduce()
            settle()
            seconds = (time.perf_counter() - begin) / LARGE
            for device, buffer in enumerate(self.recv):
                self.side.check(device, buffer, n)
            bandwidth = 2 * (n - 1) / n * self.nbytes / seconds / 1e9
            yield "large all-reduce", rival, f"{self.nbytes >> 20} MiB", "bus bandwidth", "GB/s", bandwidth

    def _add(self) -> None:
        side, key, n = self.side, next(self.side.keys), len(self.side.devices)
        self.works += [
            side.manager.all_reduce(key, self.send[d], self.recv[d], device=d, num_local=n) for d in side.devices
        ]

    def _wait(self) -> None:
        self.side.wait(self.works)
        self.works.clear()
