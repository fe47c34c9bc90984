"""The child side of the comparison by size: one process that is one rank of one rival."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.collectives.graphs import Replay
from benchmarks.collectives.mpi_side import plan, warm_ups
from benchmarks.collectives.rivals import OPEN, Place
from benchmarks.rivals import Missing
from benchmarks.work import setting, worker


class Side:
    """Answer requests; each method that a request can name starts with ``do_``."""

    def do_library(self, gpu: bool, nranks: int) -> dict:
        """Choose the library; return its description, a unique id in hexadecimal, and the factors of bus bandwidth."""
        if gpu:
            setting.share_library()
        else:
            os.environ["NCCLPY_HOST_DEVICES"] = str(max(nranks, 8))
        import ncclpy

        if not gpu:
            ncclpy.use("host")
        from ncclpy.cli.perf.collectives import COLLECTIVES

        library = ncclpy.library()
        return {
            "path": library.path,
            "cuda": library.engine == "cuda",
            "version": ".".join(map(str, library.version)),
            "id": bytes(ncclpy.get_unique_id()).hex(),
            "factors": {name: collective.factor(nranks) for name, collective in COLLECTIVES.items()},
        }

    def do_open(self, rival: str, **place: Any) -> dict:
        """Open a rival as a rank; collective. Return its version, or why it is missing."""
        self.place = Place(**place)
        try:
            self.rival = OPEN[rival](self.place)
        except Missing as missing:
            return {"missing": str(missing)}
        return {"missing": "", "version": self.rival.version()}

    def do_check(self, collective: str, nbytes: int) -> None:
        """Run a collective once and raise if the result is wrong; collective."""
        place, rival = self.place, self.rival
        sent, received = plan(collective, nbytes, place.nranks, place.dtype.itemsize)
        sends = collective in rival.in_place and (collective != "broadcast" or place.is_root)
        rival.reset(received, 1.0 if sends else 0.0)
        rival.call(collective, sent, received)()
        rival.sync()
        self._look(collective, received)
        # In place a repeated sum grows, unless it is of zeros.
        rival.reset(received, 0.0)

    def do_sample(self, collective: str, nbytes: int, n: int, waiting: bool, moving: bool) -> float:
        """Return the seconds of one of `n` operations; collective.

        They are issued in a row, or each is waited for before the next if `waiting`.
        """
        calls, sync = self._calls(collective, nbytes, n, moving), self.rival.sync
        # After these calls all ranks have arrived.
        before = max(2, n // 5) if self.place.gpu else warm_ups(n)
        for call in itertools.islice(itertools.cycle(calls), before):
            call()
        sync()
        begin = time.perf_counter()
        if waiting:
            for call in calls:
                call()
                sync()
        else:
            for call in calls:
                call()
            sync()
        return (time.perf_counter() - begin) / n

    def do_samples(self, operations: list[dict]) -> list[float]:
        """Return the seconds of one operation of each sample, taken in a row; collective."""
        return [self.do_sample(**operation) for operation in operations]

    def do_replay(self, collective: str, nbytes: int, n: int, launches: int) -> float:
        """Return the seconds of one of `n` operations in a graph that is launched `launches` times; collective.

        As nccl-tests does: the calls go through the buffers, and the first launch counts.
        """
        place, rival = self.place, self.rival
        _, received = plan(collective, nbytes, place.nranks, place.dtype.itemsize)
        calls = self._calls(collective, nbytes, n, moving=True)
        rival.reset(received, 0.0)
        calls[0]()
        rival.sync()
        rival.reset(received, 0.0)
        replay = Replay(rival.driver, rival.stream.handle, calls)
        try:
            rival.meet()
            begin = time.perf_counter()
            for _ in range(launches):
                replay.launch()
            rival.sync()
            seconds = time.perf_counter() - begin
        finally:
            replay.close()
        self._look(collective, received)
        return seconds / (n * launches)

    def _calls(self, collective: str, nbytes: int, n: int, moving: bool) -> list[Callable[[], object]]:
        """Return `n` operations; if `moving`, each on the part of the buffers after the last one's, as in nccl-tests.

        Then no call finds the previous call's data in the caches, as long as the buffers are larger than the caches.
        """
        place = self.place
        sent, received = plan(collective, nbytes, place.nranks, place.dtype.itemsize)
        step = max(sent, received)
        places = max(1, place.count // step) if moving else 1
        different = [self.rival.call(collective, sent, received, k * step) for k in range(min(n, places))]
        return list(itertools.islice(itertools.cycle(different), n))

    def _look(self, collective: str, received: int) -> None:
        """Raise if the result is wrong."""
        place = self.place
        if collective not in ("reduce", "gather") or place.is_root:
            wanted = place.nranks if collective in ("all_reduce", "reduce", "reduce_scatter") else 1
            ends = self.rival.ends(received)
            if not (ends == wanted).all():
                raise RuntimeError(f"rank {place.rank} received {np.unique(ends)} instead of {wanted}")


def main() -> None:
    """Serve a `Side`."""
    worker.serve(Side())
