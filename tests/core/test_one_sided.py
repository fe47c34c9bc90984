"""Windows and one-sided calls through the bindings: on the host engine and, from NCCL 2.29 on, on GPUs."""

from __future__ import annotations

import numpy as np
import pytest

import ncclpy
import testing
from ncclpy import bindings
from ncclpy.core.runtime import device as device_module

FLOAT32 = ncclpy.DataType.FLOAT32


@pytest.fixture(autouse=True)
def one_sided():
    testing.need_function("ncclPutSignal")


class Memory:
    """Memory of ncclMemAlloc on a rank's device, registered as a symmetric window."""

    def __init__(self, comm, count):
        self.comm, self.nbytes = comm, 4 * count
        with device_module.using(comm.device):
            self.pointer = bindings.mem_alloc(max(self.nbytes, 4096))
            self.registered = comm.window((self.pointer, count, "float32"))
        self.window = self.registered.handle

    def write(self, values):
        values = np.ascontiguousarray(values, np.float32)
        testing.write(self.pointer, values, self.comm.device)

    def read(self, count):
        return testing.read(self.pointer, count, np.float32, self.comm.device)

    def close(self):
        self.registered.close()
        with device_module.using(self.comm.device):
            bindings.mem_free(self.pointer)


def put(memory, count, peer, offset, stream, source=0):
    bindings.put_signal(
        memory.pointer + 4 * source, count, FLOAT32, peer, memory.window, 4 * offset, 0, 0, 0,
        memory.comm.handle, stream.handle,
    )  # fmt: skip


def wait(comm, stream, *descriptors):
    bindings.wait_signal([(count, peer, 0, 0) for count, peer in descriptors], comm.handle, stream.handle)


@pytest.mark.parametrize("count", [1, 1000, 300_000])
def test_every_rank_puts_to_every_other(comms4, count):
    def rank(rank):
        comm, n = comms4[rank.rank], 4
        with device_module.using(comm.device), ncclpy.Stream(comm.device) as stream:
            memory = Memory(comm, count * (n + 1))
            assert bindings.win_get_user_ptr(comm.handle, memory.window) == memory.pointer
            for round_ in range(3):
                memory.write(np.full(count, 10 * round_ + rank.rank))
                comm.barrier(stream=stream)
                for peer in range(n):
                    if peer != rank.rank:
                        put(memory, count, peer, count * (1 + rank.rank), stream)
                wait(comm, stream, *[(1, peer) for peer in range(n) if peer != rank.rank])
                comm.barrier(stream=stream)
                stream.synchronize()
                got = memory.read(count * (n + 1)).reshape(n + 1, count)
                for peer in range(n):
                    if peer != rank.rank:
                        assert (got[1 + peer] == 10 * round_ + peer).all()
            memory.close()

    testing.run_threads(4, rank, comms=comms4)


def test_signals_alone_and_in_order(comms2):
    """A ping-pong of signals, and one wait for many of them."""

    def rank(rank):
        comm, peer = comms2[rank.rank], 1 - rank.rank
        with device_module.using(comm.device), ncclpy.Stream(comm.device) as stream:
            memory = Memory(comm, 16)
            for _ in range(50):
                if rank.rank == 0:
                    bindings.signal(peer, 0, 0, 0, comm.handle, stream.handle)
                    wait(comm, stream, (1, peer))
                else:
                    wait(comm, stream, (1, peer))
                    bindings.signal(peer, 0, 0, 0, comm.handle, stream.handle)
            if rank.rank == 0:
                for i in range(8):  # each put is followed by its signal
                    memory.write(np.full(1, float(i)))
                    put(memory, 1, peer, 8 + i, stream)
                    stream.synchronize()
            else:
                wait(comm, stream, (8, peer))
                stream.synchronize()
                assert memory.read(16)[8:].tolist() == list(range(8))
            comm.barrier(stream=stream)
            stream.synchronize()
            memory.close()

    testing.run_threads(2, rank, comms=comms2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"context": 1}, "ontext 1"),
        ({"index": 1}, "ignal index 1|sigIdx"),
        ({"flags": 1}, "lags 1"),
        ({"source": None}, "localbuff|srcBuff"),
    ],
)
def test_put_refuses(comm1, change, words):
    with device_module.using(0), ncclpy.Stream(0) as stream:
        memory = Memory(comm1, 1024)
        given = {"context": 0, "index": 0, "flags": 0, "source": memory.pointer} | change
        with pytest.raises(ncclpy.NcclError, match=words):
            bindings.put_signal(
                given["source"] or 0, 1, FLOAT32, 0, memory.window, 0, given["index"], given["context"],
                given["flags"], comm1.handle, stream.handle,
            )  # fmt: skip
        if not comm1.closed and comm1.async_error() is None:
            memory.close()
