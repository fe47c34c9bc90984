"""One rank's communicator, stream and two buffers on its device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from ncclpy import Buffer, Communicator, ReduceOp, Stream
from ncclpy.cli.perf.check import POISON, count_touched, count_wrong
from ncclpy.cli.perf.collectives import Collective, Layout, Segment
from ncclpy.cli.perf.data import Block, Data, scalar
from ncclpy.cli.perf.datatypes import Type
from ncclpy.core.runtime import device

# Bytes behind each buffer. Those behind an output are checked: they must stay unchanged.
GUARD = 256

Call = Callable[[], object]


class Endpoint:
    """What one rank needs for the whole sweep.

    Parameters
    ----------
    communicator
        The rank's communicator; the caller closes it.
    nbytes
        The size of the send buffer and of the receive buffer.
    """

    def __init__(self, communicator: Communicator, nbytes: int) -> None:
        self.communicator = communicator
        self.rank: int = communicator.rank
        self.nranks: int = communicator.nranks
        self.device: int = communicator.device
        self.nbytes = nbytes
        self.send = self.recv = 0
        self.stream = Stream(self.device)
        self._operators: dict[Type, object] = {}
        try:
            self.send = device.allocate(nbytes + GUARD, self.device)
            self.recv = device.allocate(nbytes + GUARD, self.device)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Free memory and stream; the communicator stays."""
        with device.using(self.device):
            for pointer in (self.send, self.recv):
                if pointer:
                    device.free(pointer)
        self.send = self.recv = 0
        self.stream.close()

    # Data

    def spread(self, block: Block) -> None:
        """Fill both buffers with `block`, so that no iteration works on bits that are unusually slow to add."""
        with device.using(self.device):
            self._tile(self.send, self.nbytes, block)
            self._tile(self.recv, self.nbytes, block)
            self.stream.synchronize()

    def prepare(
        self, collective: Collective, layout: Layout, kind: Type, root: int, in_place: bool, data: Data
    ) -> None:
        """Write poison to the receive buffer, then the data that this rank sends, if it sends any."""
        itemsize = kind.itemsize
        with device.using(self.device):
            device.memset(self.recv, POISON, max(layout.send, layout.recv) * itemsize + GUARD, self.stream)
            if self.rank == root or collective.name not in ("broadcast", "scatter"):
                offset = self.rank * layout.send_offset * itemsize
                pointer = self.recv + offset if in_place else self.send
                self._tile(pointer, layout.send * itemsize, data.inputs[self.rank])
            self.stream.synchronize()

    def _tile(self, pointer: int, nbytes: int, block: Block) -> None:
        """Repeat `block` over `nbytes` by doubling: one copy from the host, the others on the device."""
        done = min(nbytes, block.bits.nbytes)
        if done:
            device.copy(pointer, block.bits.ctypes.data, done, self.stream)
        while done < nbytes:
            size = min(done, nbytes - done)
            device.copy(pointer + done, pointer, size, self.stream)
            done += size

    def read(self, pointer: int, target: np.ndarray) -> None:
        """Copy device memory from `pointer` on into `target`, an array of bytes on the host."""
        with device.using(self.device):
            device.copy(target.ctypes.data, pointer, target.nbytes, self.stream)
            self.stream.synchronize()

    def wrong(self, collective: Collective, layout: Layout, kind: Type, root: int, in_place: bool, data: Data) -> int:
        """Return how many elements of this rank's output are wrong."""
        base = self.recv
        if in_place:
            base += self.rank * layout.recv_offset * kind.itemsize

        def read(offset: int, target: np.ndarray) -> None:
            self.read(base + offset, target)

        end = max(layout.send, layout.recv) - self.rank * layout.recv_offset if in_place else layout.recv
        segments = collective.expected(layout, self.rank, self.nranks, root)
        wrong = 0
        if segments is None and in_place:
            segments = [Segment(self.rank * layout.send_offset, layout.send, self.rank, 0)]
        elif segments is None:
            wrong += count_touched(kind, read, 0, layout.recv)
            segments = []
        for segment in segments:
            block = data.block(segment.source)
            wrong += count_wrong(kind, read, segment.start, segment.length, block, segment.phase)
        return wrong + count_touched(kind, read, end, GUARD // kind.itemsize)

    # Calls

    def operator(self, op: str | None, kind: Type) -> object:
        """Return the collective's argument for `op`; mulsum is made once for each type, with this rank's factor."""
        if op != "mulsum":
            return ReduceOp[(op or "sum").upper()]
        if kind not in self._operators:
            factor = scalar(self.rank)
            if kind.native is None:
                # numpy has no such type: the number's bits go to the device, behind the send buffer.
                place = self.send + -(-self.nbytes // 16) * 16 + 16 * len(self._operators)
                bits = kind.encode(np.array([float(factor)]))
                with device.using(self.device):
                    device.copy(place, bits.ctypes.data, kind.itemsize, self.stream)
                    self.stream.synchronize()
                number = Buffer(place, 1, kind.datatype, device=self.device)
                self._operators[kind] = self.communicator.pre_mul_sum(number, kind.datatype)
            else:
                self._operators[kind] = self.communicator.pre_mul_sum(factor, kind.datatype)
        return self._operators[kind]

    def calls(
        self,
        collective: Collective,
        layout: Layout,
        kind: Type,
        op: str | None,
        root: int,
        in_place: bool,
        shift: int = 0,
    ) -> list[Call]:
        """Return the calls of one iteration, ready to be made, with both buffers shifted by `shift` bytes."""
        comm, itemsize = self.communicator, kind.itemsize
        if collective.name == "barrier":
            return [comm.barrier]
        source, target = (self.recv if in_place else self.send) + shift, self.recv + shift
        if in_place:
            source += self.rank * layout.send_offset * itemsize
            target += self.rank * layout.recv_offset * itemsize
        send = Buffer(source, layout.send, kind.datatype, device=self.device)
        recv = Buffer(target, layout.recv, kind.datatype, device=self.device)
        if collective.name == "sendrecv":
            return [
                partial(comm.send, send, (self.rank + 1) % self.nranks, stream=self.stream),
                partial(comm.recv, recv, (self.rank - 1) % self.nranks, stream=self.stream),
            ]
        options: dict[str, object] = {"stream": self.stream}
        if collective.reduces:
            options["op"] = self.operator(op, kind)
        if collective.rooted:
            options["root"] = root
        return [partial(getattr(comm, collective.name), send, recv, **options)]
