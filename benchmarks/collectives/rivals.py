"""The rivals of the comparison by size, each as one rank of its process: buffers, and a call for every collective.

A rival has a pair of buffers as large as the largest message. It sends ones. Each rival has ``call(collective, sent,
received, first)``, which returns a function without arguments that issues one operation on the parts of both buffers
that begin at element `first`; ``sync``, which waits for what was issued; and ``reset`` and ``ends``, to check the
first and last received elements. The collectives in ``in_place`` send from the receive buffer.
"""

from __future__ import annotations

import ctypes
import datetime
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.rivals import Missing
from benchmarks.work import setting
from benchmarks.work.setting import SUM

#: Elements that are checked at either end of what was received.
END = 256
#: Kinds of memory of ncclpy's rivals, as nccl-tests numbers them in ``-R``.
PLAIN, REGISTERED, WINDOW = 0, 1, 2
ROOT = 0

Call = Callable[[], object]


class Place:
    """A rank's number, the number of ranks, whether they are on GPUs, and the size of the buffers.

    Attributes
    ----------
    dtype : numpy.dtype
        float32 on GPUs, as nccl-tests; float64 on CPUs, as with MPI.
    ident : str
        How the ranks meet: a unique id in hexadecimal, or the path of a file.
    library : str
        The libnccl that a rival must drive.
    streams : bool
        Whether ncclpy's operations use a stream and device memory; if not, on CPUs, numpy arrays.
    as_nccl_tests : bool
        Whether ncclpy's communicators have nccl-tests' configuration.
    """

    def __init__(
        self, rank: int, nranks: int, gpu: bool, nbytes: int, ident: str, library: str, streams: bool,
        as_nccl_tests: bool = False,
    ):  # fmt: skip
        self.rank, self.nranks, self.gpu, self.ident, self.library = rank, nranks, gpu, ident, library
        self.dtype = np.dtype(np.float32 if gpu else np.float64)
        self.count = max(nbytes // self.dtype.itemsize, nranks)
        self.following, self.previous = (rank + 1) % nranks, (rank - 1) % nranks
        self.is_root = rank == ROOT
        self.streams, self.as_nccl_tests = streams, as_nccl_tests


class Ncclpy:
    """``ncclpy.Communicator`` on prepared buffers: numpy arrays on CPUs, device memory else."""

    in_place: tuple[str, ...] = ()

    def __init__(self, place: Place, memory: int = PLAIN):
        import ncclpy
        from ncclpy.core.runtime import device as devices

        self.nccl, self.devices, self.place, self.stream = ncclpy, devices, place, None
        library = ncclpy.library()
        self.driver = library.path if library.engine == "host" else "libcuda.so.1"
        self.meeting: Any = None
        self.device = devices.using(place.rank)
        self.device.__enter__()  # not restored: this process has one device
        self._connect()
        if not place.streams and memory == PLAIN:
            self.arrays = np.ones(place.count, place.dtype), np.zeros(place.count, place.dtype)
            self.in_place = ("broadcast",)  # as with MPI
            return
        self.stream = ncclpy.Stream(place.rank)
        self.kept: list[Any] = []
        self.pointers = [self._allocate(memory) for _ in range(2)]
        self._fill(self.pointers[0], place.count, 1.0)
        if memory == REGISTERED:
            self._check_registered()

    def _connect(self) -> None:
        place = self.place
        unique_id = self.nccl.UniqueId.from_bytes(bytes.fromhex(place.ident))
        told = place.as_nccl_tests and self.nccl.library().version >= (2, 28, 3)
        config = self.nccl.Config(nvlink_centric_sched=True) if told else None
        self.comm = self.nccl.Communicator.init(place.nranks, place.rank, unique_id, device=place.rank, config=config)

    def version(self) -> str:
        return ".".join(map(str, self.nccl.library().version))

    def _allocate(self, memory: int) -> int:
        """Return memory of NCCL's allocator, as nccl-tests has it; registered by the registry, or as a window."""
        nbytes = self.place.count * self.place.dtype.itemsize
        if memory == REGISTERED:
            from ncclpy.memory import alloc

            self.kept.append(alloc(nbytes, self.place.rank))
            return self.kept[-1].pointer
        if memory == PLAIN and not self.nccl.library().has("ncclMemAlloc"):
            return self.devices.allocate(nbytes, self.place.rank)
        pointer = self.nccl.bindings.mem_alloc(nbytes)
        if memory == WINDOW:
            self.kept.append(self.comm.window(self._buffer(pointer)))
            if not self.kept[-1].handle:
                raise Missing("NCCL supports no windows here")
        return pointer

    def _check_registered(self) -> None:
        """Make a first call, by which a communicator registers new segments, and check that it did; collective."""
        from ncclpy.memory import SegmentRegistry

        self.call("all_reduce", 1, 1)()
        self.sync()
        registry = SegmentRegistry.default()
        if len(registry.registered(self.comm)) != len(self.kept):
            raise Missing(f"NCCL registers none of it here: {registry.counters()['refused']}")

    def _buffer(self, pointer: int, count: int | None = None) -> Any:
        count = self.place.count if count is None else count
        return self.nccl.Buffer(pointer, count, self.place.dtype, device=self.place.rank)

    def _fill(self, pointer: int, count: int, value: float) -> None:
        part = np.full(min(count, 1 << 22), value, self.place.dtype)
        for start in range(0, count, len(part)):
            nbytes = min(len(part), count - start) * part.itemsize
            self.devices.copy(pointer + start * part.itemsize, part.ctypes.data, nbytes, self.stream)
            self.sync()

    def _pair(self, sent: int, received: int, first: int) -> tuple[Any, ...]:
        if self.stream is None:
            return tuple(
                self.nccl.Buffer.of(array[first : first + count])
                for array, count in zip(self.arrays, (sent, received), strict=True)
            )
        return tuple(
            self._buffer(pointer + first * self.place.dtype.itemsize, count)
            for pointer, count in zip(self.pointers, (sent, received), strict=True)
        )

    def call(self, collective: str, sent: int, received: int, first: int = 0) -> Call:
        comm, place = self.comm, self.place
        stream = None if self.stream is None else self.stream.handle
        send, recv = self._pair(sent, received, first)
        if collective == "sendrecv":
            return lambda: comm.sendrecv(send, place.following, recv, place.previous, stream=stream)
        function = getattr(comm, collective)
        if collective in self.in_place:
            return lambda: function(recv, stream=stream)
        if collective in ("reduce", "gather") and not place.is_root:
            return lambda: function(send, None, root=ROOT, stream=stream)
        if collective in ("broadcast", "scatter") and not place.is_root:
            return lambda: function(None, recv, root=ROOT, stream=stream)
        return lambda: function(send, recv, stream=stream)

    def sync(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()

    def meet(self) -> None:
        """Wait for all ranks, on a communicator that is not measured."""
        if self.meeting is None:
            self.meeting = self.comm.split(0), self._buffer(self.devices.allocate(8, self.place.rank), 1)
        comm, buffer = self.meeting
        comm.all_reduce(buffer, stream=self.stream.handle)
        self.sync()

    def reset(self, received: int, value: float) -> None:
        if self.stream is None:
            self.arrays[1][:received] = value
        else:
            self._fill(self.pointers[1], received, value)

    def ends(self, received: int) -> np.ndarray:
        if self.stream is None:
            return np.concatenate([self.arrays[1][:received][:END], self.arrays[1][:received][-END:]])
        count = min(END, received)
        values = np.zeros((2, count), self.place.dtype)
        for row, start in zip(values, (0, received - count), strict=True):
            source = self.pointers[1] + start * values.itemsize
            self.devices.copy(row.ctypes.data, source, row.nbytes, self.stream)
        self.sync()
        return values


class Group(Ncclpy):
    """``ncclpy.ProcessGroup``: a call, and the wait for it by the caller's stream; on CPUs by the caller."""

    def _connect(self) -> None:
        from ncclpy.bootstrap import FileStore

        place = self.place
        self.group = self.nccl.ProcessGroup(
            FileStore(place.ident), place.rank, place.nranks, device=place.rank, timeout=60
        )
        self.group.connect()

    def call(self, collective: str, sent: int, received: int, first: int = 0) -> Call:
        group, place = self.group, self.place
        producer = None if self.stream is None else self.stream.handle
        send, recv = self._pair(sent, received, first)
        if collective == "sendrecv":

            def exchange() -> Any:
                with group.coalescing() as work:
                    group.send(send, place.following, stream=producer)
                    group.recv(recv, place.previous, stream=producer)
                return work

            return self._awaited(exchange)
        function = getattr(group, collective)
        if collective in self.in_place:
            return self._awaited(lambda: function(recv, stream=producer))
        if collective in ("reduce", "gather") and not place.is_root:
            return self._awaited(lambda: function(send, None, root=ROOT, stream=producer))
        if collective in ("broadcast", "scatter") and not place.is_root:
            return self._awaited(lambda: function(None, recv, root=ROOT, stream=producer))
        return self._awaited(lambda: function(send, recv, stream=producer))

    def _awaited(self, begin: Callable[[], Any]) -> Call:
        stream = self.stream
        return (lambda: begin().wait()) if stream is None else lambda: begin().synchronize(stream)


class Torch:
    """torch.distributed, with its NCCL backend on GPUs and gloo on CPUs; three collectives are in place."""

    in_place = ("all_reduce", "reduce", "broadcast")

    def __init__(self, place: Place):
        if importlib.util.find_spec("torch") is None:
            raise Missing("torch is not installed")
        import torch
        from torch import distributed

        self.torch, self.distributed, self.place = torch, distributed, place
        more = {}
        device = "cpu"
        if place.gpu:
            if not torch.cuda.is_available():
                raise Missing("this torch has no CUDA")
            if not distributed.is_nccl_available():
                raise Missing("this torch has no NCCL backend")
            torch.cuda.set_device(place.rank)
            self.stream = torch.cuda.current_stream()
            device = f"cuda:{place.rank}"
            more["device_id"] = torch.device(device)
        elif not distributed.is_gloo_available():
            raise Missing("this torch has no gloo backend")
        distributed.init_process_group(
            "nccl" if place.gpu else "gloo",
            init_method=f"file://{place.ident}",
            rank=place.rank,
            world_size=place.nranks,
            timeout=datetime.timedelta(seconds=60),
            **more,
        )
        dtype = torch.float32 if place.gpu else torch.float64
        self.pair = [torch.ones(place.count, dtype=dtype, device=device) for _ in range(2)]

    def version(self) -> str:
        return ".".join(map(str, self.torch.cuda.nccl.version())) if self.place.gpu else ""

    def call(self, collective: str, sent: int, received: int, first: int = 0) -> Call:
        distributed, place = self.distributed, self.place
        send, recv = self.pair[0][first : first + sent], self.pair[1][first : first + received]
        if collective == "sendrecv":
            operations = [
                distributed.P2POp(distributed.isend, send, place.following),
                distributed.P2POp(distributed.irecv, recv, place.previous),
            ]

            def exchange() -> None:
                for work in distributed.batch_isend_irecv(operations):
                    work.wait()

            return exchange
        if collective == "gather":
            parts = list(recv.chunk(place.nranks)) if place.is_root else None
            return lambda: distributed.gather(send, parts, dst=ROOT)
        if collective == "scatter":
            parts = list(send.chunk(place.nranks)) if place.is_root else None
            return lambda: distributed.scatter(recv, parts, src=ROOT)
        return {
            "all_reduce": lambda: distributed.all_reduce(recv),
            "reduce": lambda: distributed.reduce(recv, dst=ROOT),
            "broadcast": lambda: distributed.broadcast(recv, src=ROOT),
            "all_gather": lambda: distributed.all_gather_into_tensor(recv, send),
            "reduce_scatter": lambda: distributed.reduce_scatter_tensor(recv, send),
            "all_to_all": lambda: distributed.all_to_all_single(recv, send),
        }[collective]

    def sync(self) -> None:
        if self.place.gpu:
            self.stream.synchronize()

    def reset(self, received: int, value: float) -> None:
        self.pair[1][:received].fill_(value)
        self.sync()

    def ends(self, received: int) -> np.ndarray:
        recv = self.pair[1][:received]
        return self.torch.cat([recv[:END], recv[-END:]]).cpu().numpy()


class Cupy:
    """``cupy.cuda.nccl``: ints only; what it lacks is made of sends and receives in a group, as its users do."""

    in_place = ()

    def __init__(self, place: Place):
        if not place.gpu:
            raise Missing("CuPy needs GPUs")
        if importlib.util.find_spec("cupy") is None:
            raise Missing("CuPy is not installed")
        # Before CuPy looks for one of its own: all rivals drive the same libnccl.
        self.loaded = ctypes.CDLL(place.library, mode=ctypes.RTLD_GLOBAL)
        try:
            import cupy
            from cupy.cuda import nccl
        except ImportError as error:
            raise Missing(f"this CuPy has no NCCL: {error}") from None
        self.cupy, self.nccl, self.place = cupy, nccl, place
        cupy.cuda.Device(place.rank).use()
        unique_id: Any = bytes.fromhex(place.ident)
        if int(cupy.__version__.partition(".")[0]) < 14:  # older releases take a tuple of signed chars
            unique_id = tuple(byte - 256 if byte > 127 else byte for byte in unique_id)
        self.comm = nccl.NcclCommunicator(place.nranks, unique_id, place.rank)
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.pair = [cupy.ones(place.count, "float32") for _ in range(2)]
        cupy.cuda.Device().synchronize()

    def version(self) -> str:
        code = self.nccl.get_version()
        return f"{code // 10000}.{code // 100 % 100}.{code % 100}"

    def call(self, collective: str, sent: int, received: int, first: int = 0) -> Call:
        comm, place, stream = self.comm, self.place, self.stream.ptr
        send, recv = (array.data.ptr + first * place.dtype.itemsize for array in self.pair)
        dtype, nranks = setting.FLOAT32, place.nranks
        if collective in ("sendrecv", "all_to_all", "gather", "scatter"):
            return self._exchange(collective, send, recv, sent, received)
        return {
            "all_reduce": lambda: comm.allReduce(send, recv, sent, dtype, SUM, stream),
            "reduce": lambda: comm.reduce(send, recv, sent, dtype, SUM, ROOT, stream),
            "broadcast": lambda: comm.broadcast(send, recv, sent, dtype, ROOT, stream),
            "all_gather": lambda: comm.allGather(send, recv, sent, dtype, stream),
            "reduce_scatter": lambda: comm.reduceScatter(send, recv, sent // nranks, dtype, SUM, stream),
        }[collective]

    def _exchange(self, collective: str, send: int, recv: int, sent: int, received: int) -> Call:
        comm, nccl, place, stream = self.comm, self.nccl, self.place, self.stream.ptr
        # (pointer, elements, peer) of every send and every receive of this rank.
        if collective == "sendrecv":
            sends, recvs = [(send, sent, place.following)], [(recv, received, place.previous)]
        else:
            part = min(sent, received) if collective != "all_to_all" else sent // place.nranks
            size, peers = part * place.dtype.itemsize, range(place.nranks)
            sends = [(send + peer * size, part, peer) for peer in peers]
            recvs = [(recv + peer * size, part, peer) for peer in peers]
            if collective == "gather":
                sends, recvs = [(send, part, ROOT)], recvs if place.is_root else []
            elif collective == "scatter":
                sends, recvs = sends if place.is_root else [], [(recv, part, ROOT)]

        def exchange() -> None:
            nccl.groupStart()
            for pointer, count, peer in sends:
                comm.send(pointer, count, setting.FLOAT32, peer, stream)
            for pointer, count, peer in recvs:
                comm.recv(pointer, count, setting.FLOAT32, peer, stream)
            nccl.groupEnd()

        return exchange

    def sync(self) -> None:
        self.stream.synchronize()

    def reset(self, received: int, value: float) -> None:
        self.pair[1][:received].fill(value)
        self.cupy.cuda.Device().synchronize()

    def ends(self, received: int) -> np.ndarray:
        recv = self.pair[1][:received]
        return np.concatenate([self.cupy.asnumpy(recv[:END]), self.cupy.asnumpy(recv[-END:])])


#: The rivals that are Python ranks, by the name in their rows.
OPEN: dict[str, Callable[[Place], Any]] = {
    "ncclpy": Ncclpy,
    "ncclpy, registered": lambda place: Ncclpy(place, REGISTERED),
    "ncclpy, windows": lambda place: Ncclpy(place, WINDOW),
    "ncclpy.ProcessGroup": Group,
    "torch.distributed": Torch,
    "cupy.cuda.nccl": Cupy,
}
