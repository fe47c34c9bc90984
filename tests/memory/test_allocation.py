"""memory.alloc and memory.empty: what keeps the memory, how others read it, and when it is freed."""

from __future__ import annotations

import gc
import pickle

import numpy as np
import pytest
from leak_check import is_allocated

import ncclpy
import testing
from ncclpy import memory


def test_memory_is_freed_with_its_last_array(registry, host_engine):
    made = memory.alloc(10_000, device=1)
    pointer = made.pointer
    assert (made.nbytes, made.device, made.count) == (10_000, 1, 10_000)
    assert registry.segments(1) == [(pointer, 10_000, 1)] and registry.segments(0) == []
    array = np.asarray(made)
    part = np.asarray(made.buffer("int32", count=5, offset=8))
    array[:] = 1
    assert part.tolist() == [0x01010101] * 5 and part.__array_interface__["data"][0] == pointer + 8
    made.close()
    made.close()
    assert made.closed
    del array
    assert registry.segments(1) and is_allocated(pointer)
    part[:] = 2  # all of it is still there
    del part
    assert registry.drain() and registry.segments(1) == []
    assert not is_allocated(pointer)


def test_cuda_array_interface_keeps_the_memory(registry):
    """CuPy and numba read the address and keep the object."""
    made = memory.alloc(64)
    if ncclpy.library().engine == "host":
        with pytest.raises(AttributeError, match="CPU memory"):
            _ = made.__cuda_array_interface__
        made.close()
        assert registry.drain() and registry.segments() == []
    else:
        address, _ = made.__cuda_array_interface__["data"]
        made.close()
        assert registry.segments() == [(address, 64, made.device)]


def test_closed_allocation_gives_nothing(comm1):
    with memory.alloc(64) as made:
        assert f"at {made.pointer:#x}" in repr(made)
    for use in (lambda: made.pointer, made.buffer, made.__dlpack__, lambda: np.asarray(made)):
        with pytest.raises(ValueError, match="closed"):
            use()
    with pytest.raises(ValueError, match=r"send: .*is closed"):
        comm1.all_reduce(made)
    assert "closed" in repr(made)


def test_collectives_take_allocations_as_they_are(comms2, arrays):
    sent = [memory.alloc(4000, comm.device) for comm in comms2]
    got = [memory.alloc(8000, comm.device) for comm in comms2]
    for rank, each in enumerate(sent):
        testing.write(each.pointer, np.full(4000, rank + 7, np.uint8), each.device)
    with ncclpy.group():
        for comm, send, recv in zip(comms2, sent, got, strict=True):
            comm.all_gather(send, recv)
    for comm, each in zip(comms2, got, strict=True):
        ncclpy.synchronize(comm.device)
        seen = testing.read(each.pointer, 8000, np.uint8, each.device)
        assert (seen == np.repeat([7, 8], 4000).astype(np.uint8)).all()


@pytest.mark.parametrize("dtype", ["float32", "int8", "float64"])
@pytest.mark.parametrize("shape", [(), 7, (2, 3), (0, 4), (1, 1, 5)])
def test_empty_has_its_shape_and_type(host_engine, registry, shape, dtype):
    before = registry.counters()["segments"]
    array = memory.empty(shape, dtype, device=0)
    wanted = np.empty(shape, dtype)
    assert (array.shape, array.dtype) == (wanted.shape, wanted.dtype)
    array[...] = 3
    assert (array == 3).all()
    assert array.size == 0 or registry.counters()["segments"] == before + 1


def test_empty_makes_tensors_of_torch(host_engine):
    torch = pytest.importorskip("torch")
    tensor = memory.empty((2, 3), "bfloat16", framework="torch")
    assert tensor.shape == (2, 3) and tensor.dtype == torch.bfloat16
    part = tensor[1]
    del tensor
    gc.collect()
    part.fill_(2)
    assert part.sum().item() == 6


def test_dlpack_keeps_the_memory(host_engine, registry):
    made = memory.alloc(256)
    array = np.from_dlpack(made)
    pointer = made.pointer
    del made
    assert array.nbytes == 256 and is_allocated(pointer) and len(registry.segments()) == 1
    array[:] = 1
    del array
    assert registry.drain() and not is_allocated(pointer)


@pytest.mark.parametrize("nbytes", [0, -1, 1 << 62])
def test_invalid_sizes_are_refused(nbytes):
    with pytest.raises(ValueError, match="nbytes"):
        memory.alloc(nbytes)


def test_allocation_of_too_much_memory_raises(host_engine, registry):
    before = registry.counters()
    with pytest.raises(ncclpy.NcclError, match="ncclMemAlloc"):
        memory.alloc(1 << 50)
    assert registry.counters() == before


def test_bad_arguments_lose_nothing(registry):
    made = memory.alloc(100)
    before = registry.counters()
    for call, words in (
        (lambda: made.buffer("float32", count=26), "26 elements of 4 bytes at offset 0 do not fit"),
        (lambda: made.buffer("float32", offset=101), "offset: 101"),
        (lambda: made.buffer("float32", offset=-1), "offset: -1"),
        (lambda: made.buffer("float32", count=-1), "count: -1"),
        (lambda: made.buffer("nonsense"), "nonsense"),
        (lambda: memory.alloc(1, device=10_000), "10000"),
        (lambda: memory.empty(-1), "negative"),
        (lambda: memory.empty(1, framework="nonsense"), "'nonsense' is none of"),
        (lambda: memory.empty((1, 2), "nonsense"), "nonsense"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            call()
    assert made.buffer("float32", offset=100).count == 0
    assert registry.counters() == before
    for refused in (memory.Allocation, memory.SegmentRegistry):
        with pytest.raises(TypeError, match="use"):
            refused()
    for there in (made, registry):
        with pytest.raises(TypeError):
            pickle.dumps(there)


def test_child_of_a_fork_is_not_held_up(host_engine):
    """Another thread may have been inside the registry at the fork."""
    testing.run_python(
        """
        import os, signal, threading
        import ncclpy
        from ncclpy import memory
        registry = memory.SegmentRegistry.default()
        kept = memory.alloc(64, 0)
        enough = False
        def churn():
            while not enough:
                memory.alloc(64, 0)
        threads = [threading.Thread(target=churn) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(40):
            child = os.fork()
            if child == 0:
                signal.alarm(5)
                assert registry.counters()["segments"] == 0 and registry.drain(0)
                kept = None
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        enough = True
        for thread in threads:
            thread.join()
        """,
        warm=True,
    )


def test_child_of_a_fork_frees_nothing(host_engine):
    """The child has its parent's arrays, but their memory is not its own."""
    testing.run_python(
        """
        import os
        import numpy as np, ncclpy
        from ncclpy import memory
        registry = memory.SegmentRegistry.default()
        array = memory.empty(1000)
        array[:] = 5
        child = os.fork()
        if child == 0:
            del array
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        array[:] = 6
        assert registry.counters()["segments"] == 1
        """,
        warm=True,
    )
