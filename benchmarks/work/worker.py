"""The child side: one process that holds rivals open and times their roads on request.

It reads one JSON request per line and answers with one JSON line. Answers have a file descriptor of their own, so that
output of libraries cannot disturb them.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import traceback

from benchmarks.overhead.road import GROUP, Road
from benchmarks.rivals import Missing, load
from benchmarks.work import machine, setting


class Worker:
    """Answer requests; each method that a request can name starts with ``do_``."""

    def __init__(self):
        self.setting: setting.Setting | None = None
        self.roads: dict[str, Road] = {}

    def do_versions(self) -> dict:
        """Return the versions of the packages that this process can import."""
        return machine.versions()

    def do_ids(self, count: int) -> list[str]:
        """Return `count` fresh unique ids in hexadecimal."""
        setting.share_library()
        import ncclpy

        return [bytes(ncclpy.get_unique_id()).hex() for _ in range(count)]

    def do_noop(self, library: str) -> None:
        """Work on the no-op library."""
        self.setting = setting.on_noop(library)

    def do_nccl(self, rank: int, nranks: int, ids: list[str], store: str) -> dict:
        """Work as `rank` of `nranks` on the library that ncclpy finds; collective."""
        self.setting = setting.on_nccl(rank, nranks, [bytes.fromhex(unique_id) for unique_id in ids], store)
        import ncclpy

        return {"engine": ncclpy.library().engine, "nccl": ".".join(map(str, ncclpy.library().version))}

    def do_libraries(self) -> int:
        """Return how many libnccl are mapped into this process: with more than one, rivals drive different ones."""
        from ncclpy.core.runtime import search

        return len(search.mapped_nccl())

    def do_open(self, rival: str) -> dict:
        """Open a rival; return its roads by key, or why it is missing."""
        module = load(rival)
        try:
            roads = module.open(self.setting)
        except Missing as missing:
            return {"rival": module.NAME, "missing": str(missing), "roads": [], "notes": []}
        described = []
        for index, road in enumerate(roads):
            key = f"{rival}.{index}"
            self.roads[key] = road
            described.append(
                {"key": key, "road": road.name, "operation": road.operation, "latency": road.latency is not None}
            )
        notes, self.setting.notes = self.setting.notes, []
        return {"rival": module.NAME, "missing": None, "roads": described, "notes": notes}

    def do_check(self, key: str) -> str | None:
        """Run a road twice or more and check its result; return what is wrong, or None."""
        road = self.roads[key]
        # After this, everything is done that only the first call does.
        road.host(2 * GROUP)
        return self._check_noop(road) if self.setting.sync is None else self._check_sum(road)

    def do_sample(self, key: str, measure: str, n: int) -> float:
        """Return the seconds of one of `n` operations."""
        seconds = getattr(self.roads[key], measure)(n) / n
        if self.setting.sync is not None and measure == "host":
            self._settle()
        return seconds

    def _copy(self, to, source) -> None:
        """Copy one message between a device pointer and an array of this process."""
        size = ctypes.sizeof(ctypes.c_float) * setting.COUNT
        if not self.setting.gpu:
            ctypes.memmove(to, source, size)
            return
        from ncclpy.core.runtime import device as devices

        places = (place if isinstance(place, int) else ctypes.addressof(place) for place in (to, source))
        devices.copy(*places, size, self.setting.stream)
        self._settle()

    def _settle(self) -> None:
        """Wait for every stream of the device: a road may have used another stream than the setting's."""
        import ncclpy

        ncclpy.synchronize(self.setting.device)

    def _check_noop(self, road: Road) -> str | None:
        counters = ("noopCalls", "noopGroups")
        before = [self.setting.counter(name) for name in counters]
        road.host(2 * GROUP)
        arrived = [self.setting.counter(name) - start for name, start in zip(counters, before, strict=True)]
        expected = [2 * GROUP * road.reduces, 2 * GROUP * road.groups]
        if arrived != expected:
            return (
                f"{2 * GROUP} operations made {arrived[0]} all-reduces and {arrived[1]} groups "
                f"instead of {expected[0]:g} and {expected[1]:g}"
            )
        return None

    def _check_sum(self, road: Road) -> str | None:
        self._settle()
        if road.result == 0:
            return None
        values = (ctypes.c_float * setting.COUNT)()
        self._copy(road.result, values)
        road.host(GROUP)
        self._settle()
        self._copy(values, road.result)
        if list(values) != [float(self.setting.nranks)] * setting.COUNT:
            return f"the sum of ones over {self.setting.nranks} ranks came out as {list(values)}"
        return None


def main() -> None:
    """Serve a `Worker`."""
    serve(Worker())


def serve(worker: object) -> None:
    """Answer requests with the methods of `worker` until the parent closes the pipe."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"value": getattr(worker, f"do_{request.pop('do')}")(**request)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    # Communicators are not destroyed: that is collective, and how a rival does it is not measured.
    os._exit(0)
