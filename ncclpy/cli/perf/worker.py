"""One worker of a run: a thread, or a process, that drives some of the ranks through the whole sweep.

All workers run the same cases, sizes and iterations in step. They exchange what they must agree on over their
`Link`; the first worker reports.
"""

from __future__ import annotations

import gc
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import ncclpy
from ncclpy.cli.perf.arguments import Arguments, sweep
from ncclpy.cli.perf.collectives import Layout
from ncclpy.cli.perf.data import PERIOD, Data, make
from ncclpy.cli.perf.datatypes import TYPES, Type
from ncclpy.cli.perf.endpoint import Call, Endpoint
from ncclpy.cli.perf.report import Rank, Row, Side
from ncclpy.core.runtime import device

#: Seconds between two checks for asynchronous errors while a stream is not done.
_CHECK_INTERVAL = 1.0


class Link(Protocol):
    """The connection of one worker to the others and to the `RankRunner` that started them."""

    def exchange(self, value: Any) -> list[Any]:
        """Wait for all workers and return the value of each."""

    def report(self, what: str, value: Any) -> None:
        """Send something to the `RankRunner` to be shown."""


#: How the workers' times become one, by the number of ``--average``.
_COMBINE: tuple[Callable[[list[float]], float], ...] = (
    lambda times: times[0],
    lambda times: sum(times) / len(times),
    min,
    max,
)


class Worker:
    """Drive the ranks ``index * ranks`` and following, each on the device with its number.

    Parameters
    ----------
    arguments
        The arguments of the run.
    index
        The number of this worker.
    ranks
        How many ranks each worker drives.
    link
        The connection to the others.
    """

    def __init__(self, arguments: Arguments, index: int, ranks: int, link: Link) -> None:
        self.arguments = arguments
        self.index = index
        self.ranks = range(index * ranks, (index + 1) * ranks)
        self.link = link
        self.communicators: list[ncclpy.Communicator] = []
        self.endpoints: list[Endpoint] = []
        self.aborted = False
        self._runs = 0
        self._pool = ThreadPoolExecutor(max(1, min(ranks, os.cpu_count() or 1)))

    def run(self) -> None:
        """Connect, run the sweep, close."""
        try:
            with device.using(self.ranks[0]):
                self._connect()
                for name, op, root in self.arguments.cases():
                    self._sweep(TYPES[name], op, root)
                self.link.exchange(None)  # no worker closes while others still work
        except BaseException:
            self.abort()
            raise
        finally:
            self._pool.shutdown()
            for endpoint in self.endpoints:
                endpoint.release()
        for communicator in self.communicators:
            communicator.close()

    def abort(self) -> None:
        """End what the ranks are doing; may be called in another thread."""
        self.aborted = True
        with ncclpy.group():
            for communicator in self.communicators:
                communicator.abort()

    def _connect(self) -> None:
        given = self.arguments
        unique = self.link.exchange(bytes(ncclpy.get_unique_id()) if self.index == 0 else None)[0]
        config = self._config()
        # With `abortable` an abort, by -T or Ctrl-C, ends a rank that is stuck inside NCCL. An NCCL without
        # ncclCommSplit would need nonblocking communicators for this, which slow every call; there such a rank stays
        # stuck.
        abortable = ncclpy.library().has("ncclCommSplit")
        uid = ncclpy.UniqueId.from_bytes(unique)
        with ncclpy.group():
            for rank in self.ranks:
                self.communicators.append(
                    ncclpy.Communicator.init(given.nranks, rank, uid, device=rank, config=config, abortable=abortable)
                )
        nbytes = 0 if given.collective == "barrier" else given.buffer_bytes
        for communicator in self.communicators:
            self.endpoints.append(Endpoint(communicator, nbytes))
        ranks = self.link.exchange([_describe(endpoint) for endpoint in self.endpoints])
        if self.index == 0:
            self.link.report("head", [rank for some in ranks for rank in some])

    def _config(self) -> ncclpy.Config:
        """Return the configuration that nccl-tests uses, as far as the loaded NCCL supports it."""
        version = ncclpy.library().version
        options: dict[str, Any] = {}
        if version >= (2, 28, 3):
            options["nvlink_centric_sched"] = True
        if version >= (2, 30, 3) and self.arguments.collective == "sendrecv":
            options["max_p2p_peers"] = 2
        return ncclpy.Config(**options)

    def _sweep(self, kind: Type, op: str | None, root: int) -> None:
        given, collective = self.arguments, self.arguments.kind
        if collective.name == "barrier":
            self._row(0, kind, op, root)
            return
        data = make(kind.name, op, given.nranks, PERIOD, (given.maxbytes,))
        self._each(lambda endpoint: endpoint.spread(data.inputs[endpoint.rank]))
        for size in sweep(given.minbytes, given.maxbytes, 0, 2):
            if size == 0:
                break
            layout = collective.layout(size // kind.itemsize, kind.itemsize, given.nranks)
            launches = self._launches(layout, kind, op, root, False, given.warmup_iters)
            for iteration in range(given.warmup_iters):
                self._launch(launches[iteration % len(launches)])
            self._complete()
        for size in sweep(given.minbytes, given.maxbytes, given.stepbytes, given.stepfactor):
            self._row(size, kind, op, root)

    def _row(self, size: int, kind: Type, op: str | None, root: int) -> None:
        given = self.arguments
        layout = given.kind.layout(size // kind.itemsize, kind.itemsize, given.nranks)
        out_of_place = self._measure(layout, kind, op, root, False)
        in_place = self._measure(layout, kind, op, root, True) if given.kind.in_place else None
        if self.index == 0:
            row = Row(
                size=max(layout.send, layout.recv) * kind.itemsize,
                count=layout.count,
                type=kind.name,
                redop=op or "none",
                root=root,
                out_of_place=out_of_place,
                in_place=in_place,
                actual_iterations=given.iters,
            )
            self.link.report("row", row)

    def _measure(self, layout: Layout, kind: Type, op: str | None, root: int, in_place: bool) -> Side:
        """Time the iterations and then check the result in a run of its own."""
        given, collective = self.arguments, self.arguments.kind
        self._runs += 1
        launches = self._launches(layout, kind, op, root, in_place, given.iters * given.agg_iters)
        self._launch(launches[0])
        self._complete()
        seconds = self._time(launches)
        seconds = _COMBINE[given.average](self.link.exchange(seconds))
        wrong = None
        for attempt in range(given.check if collective.name != "barrier" else 0):
            seed = (self._runs, attempt)
            wrong = sum(self.link.exchange(self._check(layout, kind, op, root, in_place, launches[0], seed)))
            if wrong:
                break
        algorithm, bus = collective.bandwidth(layout, kind.itemsize, seconds, given.nranks)
        if self.index == 0:
            self.link.report("step", None)
        return Side(seconds * 1e6, algorithm, bus, wrong)

    def _time(self, launches: list[list[Call]]) -> float:
        """Return the average seconds of one operation over all iterations, which are launched back to back.

        With ``--blocking`` each iteration is waited for; 3 leaves the barrier after it out of the time.
        """
        given = self.arguments
        self._meet()
        collecting = gc.isenabled()
        gc.disable()
        try:
            counted = 0.0
            start = time.perf_counter()
            for iteration in range(given.iters):
                begin = time.perf_counter()
                if given.agg_iters > 1:
                    with ncclpy.group():
                        for turn in range(given.agg_iters):
                            self._launch(launches[(iteration * given.agg_iters + turn) % len(launches)])
                else:
                    self._launch(launches[iteration % len(launches)])
                if given.blocking:
                    self._complete()
                    counted += time.perf_counter() - begin
                    if given.blocking != 2:
                        self.link.exchange(None)
            self._complete()
            elapsed = time.perf_counter() - start
        finally:
            if collecting:
                gc.enable()
        return (counted if given.blocking == 3 else elapsed) / (given.iters * given.agg_iters)

    def _check(
        self,
        layout: Layout,
        kind: Type,
        op: str | None,
        root: int,
        in_place: bool,
        calls: list[Call],
        seed: tuple[int, ...],
    ) -> int:
        given = self.arguments
        elements = max(layout.send, layout.recv)
        data: Data = make(kind.name, op, given.nranks, elements, (elements, *seed))
        task = (given.kind, layout, kind, root, in_place, data)
        self._each(lambda endpoint: endpoint.prepare(*task))
        self.link.exchange(None)  # all ranks have written their data before the first rank reads them
        self._launch(calls)
        self._complete()
        return sum(self._each(lambda endpoint: endpoint.wrong(*task)))

    def _launches(
        self, layout: Layout, kind: Type, op: str | None, root: int, in_place: bool, wanted: int
    ) -> list[list[Call]]:
        """Return the calls of successive iterations, each at a later place in the buffers.

        The places differ so that caches do not help, and so that operations of one group use different memory. There
        are at most `wanted` iterations, and fewer if the buffers have fewer places: the caller repeats them.
        """
        nbytes = max(layout.send, layout.recv) * kind.itemsize
        places = min(self.arguments.buffer_bytes // nbytes, wanted) if nbytes else 1
        return [
            [
                call
                for endpoint in self.endpoints
                for call in endpoint.calls(self.arguments.kind, layout, kind, op, root, in_place, place * nbytes)
            ]
            for place in range(max(1, places))
        ]

    def _launch(self, calls: list[Call]) -> None:
        if len(calls) == 1:
            calls[0]()
            return
        with ncclpy.group():
            for call in calls:
                call()

    def _complete(self) -> None:
        """Wait for all streams; raise on an abort or an asynchronous error, after which a stream may never be done."""
        for endpoint in self.endpoints:
            while True:
                try:
                    endpoint.stream.synchronize(_CHECK_INTERVAL)
                    break
                except ncclpy.NcclTimeout:
                    self._raise_background_errors()
        self._raise_background_errors()

    def _raise_background_errors(self) -> None:
        if self.aborted:
            raise ncclpy.NcclAborted("the run was aborted")
        for communicator in self.communicators:
            state = communicator.async_error()
            if state != ncclpy.Result.SUCCESS:
                detail = ncclpy.bindings.get_last_error(communicator.handle)
                raise ncclpy.NcclError(
                    f"rank {communicator.rank} failed in the background: {state!r}; last error: {detail}",
                    result=int(state),
                    detail=detail,
                )

    def _meet(self) -> None:
        """Synchronise all ranks: roughly over the link, closely by an NCCL barrier."""
        self.link.exchange(None)
        self._launch([communicator.barrier for communicator in self.communicators])
        self._complete()

    def _each(self, task: Callable[[Endpoint], Any]) -> list[Any]:
        """Run a task for every endpoint, several at a time."""
        return list(self._pool.map(task, self.endpoints))


def _describe(endpoint: Endpoint) -> Rank:
    return Rank(
        rank=endpoint.rank,
        pid=os.getpid(),
        hostname=socket.gethostname(),
        device=endpoint.device,
        pci_bus_id=device.pci_bus_id(endpoint.device),
        name=device.name(endpoint.device),
    )
