"""Shared by all rivals of one process: the library, the communicator's rank and device, buffers and a stream."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import importlib.util
import os
import time
from collections.abc import Callable
from typing import Any

#: The message: 8 bytes, two float32.
COUNT = 2
#: How many operations a group holds in the rows that measure groups.
GROUP = 64
#: `ncclFloat32` and `ncclSum`.
FLOAT32 = 7
SUM = 0
CU_STREAM_NON_BLOCKING = 1


@dataclasses.dataclass
class Setting:
    """The library, buffers and communicator that all rivals use.

    Attributes
    ----------
    gpu : bool
        Whether buffers are GPU memory; on the no-op library and on the host engine they are CPU memory.
    library : str
        Path of the library that every rival has to drive.
    rank, nranks, device : int
        This process's rank, the number of ranks, and its device.
    comm, stream, send, recv : int
        A communicator's handle, a stream's handle and pointers to `COUNT` float32, for the rivals that take ints. At
        `recv` there is space for `GROUP` times as many.
    sync : callable or None
        Waits for the stream; None on the no-op library, where nothing runs.
    communicator : ncclpy.Communicator or None
        The owner of `comm`; None on the no-op library.
    ids : list of bytes
        Unused unique ids, equal on all ranks, for the rivals that need a communicator of their own.
    store : str
        Path of a file that does not exist yet, for the rivals that gather through one.
    keep : list
        Objects that must live as long as the setting.
    clock : callable
        The clock of the roads: the thread's CPU time on the no-op library, where nothing waits, so that other work on
        the machine does not count; else wall time.
    notes : list of str
        Notes for the reader of the figures; rivals add to them.
    """

    gpu: bool
    library: str
    rank: int = 0
    nranks: int = 1
    device: int = 0
    comm: int = 0
    stream: int = 0
    send: int = 0
    recv: int = 0
    sync: Callable[[], object] | None = None
    communicator: Any = None
    ids: list[bytes] = dataclasses.field(default_factory=list)
    store: str = ""
    keep: list[object] = dataclasses.field(default_factory=list)
    clock: Callable[[], float] = time.perf_counter
    notes: list[str] = dataclasses.field(default_factory=list)

    def counter(self, name: str) -> int:
        """Return how many calls have arrived at the no-op library: ``"noopCalls"`` or ``"noopGroups"``."""
        return ctypes.c_ulonglong.in_dll(ctypes.CDLL(self.library), name).value


def on_noop(library: str) -> Setting:
    """Return the setting on the no-op library: one rank, buffers in CPU memory."""
    noop = ctypes.CDLL(library)
    comm, stream, device = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int(0)
    noop.ncclCommInitAll(ctypes.byref(comm), 1, ctypes.byref(device))
    noop.cuStreamCreateWithPriority(ctypes.byref(stream), CU_STREAM_NON_BLOCKING, 0)
    send, recv = (ctypes.c_float * COUNT)(1.0, 1.0), (ctypes.c_float * (GROUP * COUNT))()
    return Setting(
        gpu=False,
        library=library,
        comm=comm.value,
        stream=stream.value,
        send=ctypes.addressof(send),
        recv=ctypes.addressof(recv),
        keep=[noop, send, recv],
        clock=time.thread_time,
    )


def share_library() -> None:
    """Import torch before ncclpy loads NCCL: ncclpy joins the NCCL that torch brings, so that all drive the same."""
    if "NCCLPY_LIBRARY" not in os.environ and importlib.util.find_spec("torch") is not None:
        importlib.import_module("torch")


def on_nccl(rank: int, nranks: int, ids: list[bytes], store: str) -> Setting:
    """Return the setting of device `rank` on the library that ncclpy finds; collective, uses the first of `ids`."""
    import numpy

    share_library()
    import ncclpy
    from ncclpy.core.runtime import device as devices

    # Current from now on, as in a program with one device: calls that name no device use this one.
    current = devices.using(rank)
    current.__enter__()
    communicator = ncclpy.Communicator.init(nranks, rank, ncclpy.UniqueId.from_bytes(ids[0]), device=rank)
    stream = ncclpy.Stream(rank)
    ones = numpy.ones(COUNT, numpy.float32)
    send, recv = (devices.allocate(times * ones.nbytes, rank) for times in (1, GROUP))
    devices.copy(send, ones.ctypes.data, ones.nbytes, stream)
    stream.synchronize()
    return Setting(
        gpu=ncclpy.library().engine == "cuda",
        library=ncclpy.library().path,
        rank=rank,
        nranks=nranks,
        device=rank,
        comm=communicator.handle,
        stream=stream.handle,
        send=send,
        recv=recv,
        sync=stream.synchronize,
        communicator=communicator,
        ids=ids[1:],
        store=store,
        keep=[current, stream],
    )
