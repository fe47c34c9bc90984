"""Pools and attachments of the frameworks themselves, on GPUs."""

from __future__ import annotations

import gc
import re

import numpy as np
import pytest
from group_fixtures import launched

import ncclpy
import testing
from ncclpy import memory
from ncclpy.memory import registry as allocator

pytestmark = pytest.mark.gpu


@pytest.fixture
def torch():
    torch = pytest.importorskip("torch")
    if not hasattr(torch.cuda, "MemPool"):
        pytest.skip("needs torch.cuda.MemPool")
    return torch


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy")


@pytest.fixture
def cuda_core():
    return pytest.importorskip("cuda.core")


def lies_in(pointer, nbytes, segments):
    return any(base <= pointer and pointer + nbytes <= base + size for base, size, _ in segments)


def known(registry, comm, segments):
    """Return whether a communicator has registered the segments, or NCCL has refused some."""
    return set(segments) <= set(registry.registered(comm)) or bool(registry.counters()["refused"])


def emptied(registry, torch=None):
    gc.collect()
    if torch is not None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return registry.drain() and registry.segments() == []


def test_torchs_pool(torch, comm1, registry):
    pool = memory.pool("torch", comm1)
    assert isinstance(pool.resource, torch.cuda.MemPool)
    outside = torch.ones(1 << 20, device="cuda:0")
    with pool:
        tensor = torch.ones(1 << 20, device="cuda:0")
        odd = torch.ones(3, device="cuda:0", dtype=torch.bfloat16)
    after = torch.ones(1 << 20, device="cuda:0")
    for each, there in ((tensor, True), (odd, True), (outside, False), (after, False)):
        assert lies_in(each.data_ptr(), each.nbytes, pool.segments) is there
    comm1.all_reduce(tensor)
    torch.cuda.synchronize()
    assert tensor.sum().item() == 1 << 20 and known(registry, comm1, pool.segments)
    more = pool.empty((10, 10), "bfloat16")
    assert more.dtype == torch.bfloat16 and lies_in(more.data_ptr(), more.nbytes, pool.segments)
    pool.close()
    tensor.add_(1)  # the tensor outlives the pool
    assert tensor.sum().item() == 2 << 20
    del tensor, odd, more
    assert emptied(registry, torch)


def test_torchs_pool_may_be_entered_again_inside_it(torch, comm1, registry):
    """torch itself refuses that."""
    pool = memory.pool("torch", comm1)
    with pool:
        inner = pool.empty(1000)
        with pool:
            nested = torch.ones(1 << 20, device="cuda:0")
        after = torch.ones(1 << 20, device="cuda:0")
    outside = torch.ones(1 << 20, device="cuda:0")
    for each, there in ((inner, True), (nested, True), (after, True), (outside, False)):
        assert lies_in(each.data_ptr(), each.nbytes, pool.segments) is there
    pool.close()
    del inner, nested, after, outside, each
    assert emptied(registry, torch)


def test_torchs_pool_becomes_windows(torch, comm1, registry):
    testing.need_function("ncclCommWindowRegister")
    pool = memory.pool("torch", comm1, symmetric=True)
    with pool:
        tensor = torch.full((1 << 20,), 3.0, device="cuda:0")
    windows = pool.windows
    assert [window.buffer.nbytes for window in windows] == [nbytes for _, nbytes, _ in pool.segments]
    with pool:  # the segment has space
        other = torch.ones(16, device="cuda:0")
    assert pool.windows[: len(windows)] == windows and pool.commit() == []
    assert len(pool.windows) == len(pool.segments)
    comm1.all_reduce(tensor)
    torch.cuda.synchronize()
    assert tensor.sum().item() == 3 << 20
    pool.close()
    assert all(window.closed for window in windows)
    del tensor, other
    assert emptied(registry, torch)


def test_torchs_windows_of_two_ranks(torch, registry):
    testing.need_devices(2)
    testing.need_function("ncclCommWindowRegister")

    def body(rank):
        with torch.cuda.device(rank.device):
            comm = rank.init(timeout=60)
            pool = memory.pool("torch", comm, symmetric=True)
            with pool:
                tensor = torch.full((1 << 20,), rank.rank + 1.0, device=f"cuda:{rank.device}")
            assert pool.windows
            comm.all_reduce(tensor)
            torch.cuda.synchronize(rank.device)
            assert tensor.sum().item() == 3 << 20
            before = pool.windows
            odd = pool.empty((32 << 20) * (1 + rank.rank))
            with pytest.raises(ValueError, match=r"bytes on rank 0 and \d+ bytes on rank 1"):
                pool.commit(30)
            assert pool.windows == before and odd is not None
            comm.barrier()
            torch.cuda.synchronize(rank.device)
            pool.close()

    testing.run_threads(2, body, timeout=120)
    assert emptied(registry, torch)


def test_torch_with_expandable_segments():
    """The default pool's segments grow in place; those of a pool over ncclpy's allocator do not."""
    pytest.importorskip("torch")
    testing.run_python(
        """
        import torch
        import ncclpy
        from ncclpy import memory
        with ncclpy.Communicator.init_all([0])[0] as comm:
            default = torch.ones(1 << 20, device="cuda:0")
            pool = memory.pool("torch", comm)
            with pool:
                tensor = torch.ones(1 << 20, device="cuda:0")
            assert any(base <= tensor.data_ptr() < base + size for base, size, _ in pool.segments)
            comm.all_reduce(tensor)
            comm.all_reduce(default)
            torch.cuda.synchronize()
            assert tensor.sum().item() == default.sum().item() == 1 << 20
        """,
        env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    )


def test_exit_with_a_pool_of_torch():
    """At exit, pools, tensors and communicators are freed in any order."""
    pytest.importorskip("torch")
    testing.run_python(
        """
        import torch
        import ncclpy
        from ncclpy import memory
        comm = ncclpy.Communicator.init_all([0])[0]
        pool = memory.pool("torch", comm)
        with pool:
            tensor = torch.ones(1 << 20, device="cuda:0")
        comm.all_reduce(tensor)
        torch.cuda.synchronize()
        comm.close()
        """
    )


def test_torch_attached(torch, comm1, registry):
    attached = memory.attach("torch")
    with pytest.raises(RuntimeError, match="torch is attached already"):
        memory.attach("torch")
    before = set(registry.segments())
    with attached.use():
        tensor = torch.ones(1 << 20, device="cuda:0")
    with torch.cuda.use_mem_pool(attached.resource):
        other = torch.ones(1 << 20, device="cuda:0")
    plain = torch.ones(1 << 20, device="cuda:0")
    made = set(registry.segments()) - before
    assert lies_in(tensor.data_ptr(), tensor.nbytes, made) and lies_in(other.data_ptr(), other.nbytes, made)
    assert not lies_in(plain.data_ptr(), plain.nbytes, made)
    comm1.all_reduce(tensor)
    torch.cuda.synchronize()
    assert known(registry, comm1, made)
    attached.close()
    with pytest.raises(ValueError, match="closed"), attached.use():
        pass
    tensor.add_(other)
    assert tensor.sum().item() == 2 << 20
    del tensor, other
    assert emptied(registry, torch)


def test_memory_is_freed_after_its_stream(torch, registry):
    """A caching allocator frees memory while a kernel still writes to it."""
    stream = torch.cuda.Stream()
    pointer = allocator.take(1 << 20, 0)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(2_000_000_000)
    allocator.give(pointer, 0, stream.cuda_stream)
    assert not registry.drain(0.1) and registry.counters()["leaving"] == 1
    stream.synchronize()
    assert registry.drain()


def test_torch_frees_while_its_stream_is_captured(torch, registry):
    """No event becomes part of a capture, and none invalidates it."""
    pointer = allocator.take(1 << 20, 0)
    tensor = torch.ones(8, device="cuda:0")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor.add_(1)
        allocator.give(pointer, 0, torch.cuda.current_stream().cuda_stream)
    graph.replay()
    torch.cuda.synchronize()
    assert tensor.tolist() == [2.0] * 8
    assert registry.drain()


def test_shortage_of_memory_is_an_error_of_torch(torch, comm1, registry):
    """NULL becomes torch's OutOfMemoryError, and the pool stays usable."""
    pool = memory.pool("torch", comm1)
    with pool:
        with pytest.raises(torch.cuda.OutOfMemoryError):
            torch.empty(1 << 45, dtype=torch.uint8, device="cuda:0")
        tensor = torch.ones(100, device="cuda:0")
    assert tensor.sum().item() == 100
    pool.close()
    del tensor
    assert emptied(registry, torch)


def test_cupys_pool(cupy, comm1, registry):
    pool = memory.pool("cupy", comm1)
    outside = cupy.ones(1 << 16, cupy.float32)
    with pool:
        array = cupy.ones(1 << 16, cupy.float32)
    third = pool.empty(100, "float64")
    segments = pool.segments
    for each, there in ((array, True), (third, True), (outside, False)):
        assert lies_in(each.data.ptr, each.nbytes, segments) is there
    comm1.all_reduce(array)
    cupy.cuda.Device(0).synchronize()
    assert float(array.sum()) == 1 << 16 and known(registry, comm1, segments)
    pool.close()
    array += 1
    assert float(array.sum()) == 2 << 16
    del array, third, each
    cupy.cuda.Device(0).synchronize()
    assert emptied(registry)


def test_cupys_pool_becomes_windows(cupy, comm1, registry):
    testing.need_function("ncclCommWindowRegister")
    with memory.pool("cupy", comm1, symmetric=True) as pool:
        array = cupy.ones(1 << 16, cupy.float32)
    assert len(pool.windows) == len(pool.segments) == 1
    comm1.all_reduce(array)
    cupy.cuda.Device(0).synchronize()
    assert float(array.sum()) == 1 << 16
    pool.close()
    del array
    assert emptied(registry)


def test_cupy_attached(cupy, comm1, registry):
    before = cupy.cuda.get_allocator()
    with memory.attach("cupy") as attached:
        with pytest.raises(RuntimeError, match="cupy is attached already"):
            memory.attach("cupy")
        array = cupy.ones(1 << 16, cupy.float32)
        assert lies_in(array.data.ptr, array.nbytes, registry.segments())
        with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
            cupy.empty(1 << 45, cupy.uint8)
        resource = attached.resource
    assert cupy.cuda.get_allocator() == before
    plain = cupy.ones(1 << 16, cupy.float32)
    assert not lies_in(plain.data.ptr, plain.nbytes, registry.segments())
    comm1.all_reduce(array)
    cupy.cuda.Device(0).synchronize()
    assert float(array.sum()) == 1 << 16
    del array
    resource.free_all_blocks()
    del resource
    assert emptied(registry)


def test_cuda_cores_resource(cuda_core, comm1, registry):
    device = cuda_core.Device(0)
    device.set_current()
    stream = device.create_stream()
    attached = memory.attach("cuda.core")
    assert isinstance(attached.resource, cuda_core.MemoryResource)
    with pytest.raises(ncclpy.NcclUnsupported, match="no current allocator"), attached.use():
        pass
    buffer = attached.resource.allocate(4096, stream=stream)
    pointer = int(buffer.handle)
    assert registry.segments() == [(pointer, 4096, 0)] and buffer.size == 4096
    assert buffer.is_device_accessible and not buffer.is_host_accessible and buffer.device_id == 0
    testing.write(pointer, np.full(1024, 5, np.float32))
    comm1.all_reduce((pointer, 1024, "float32"), stream=stream)
    stream.sync()
    assert (testing.read(pointer, 1024, np.float32) == 5).all() and known(registry, comm1, registry.segments())
    attached.close()
    assert attached.resource is None
    buffer.close(stream)
    stream.sync()
    assert emptied(registry)


def test_memory_resource_of_cuda_core_is_registered(cuda_core, comm1, registry):
    device = cuda_core.Device(0)
    device.set_current()
    stream = device.create_stream()
    theirs = device.memory_resource
    with memory.attach(theirs) as attached:
        buffer = attached.resource.allocate(1 << 21, stream=stream)
    pointer = int(buffer.handle)
    assert registry.segments() == [(pointer, 1 << 21, 0)]
    stream.sync()
    testing.write(pointer, np.full(1024, 5, np.float32))
    comm1.all_reduce((pointer, 1024, "float32"), stream=stream)
    buffer.close(stream)
    assert registry.segments() == []
    stream.sync()
    assert emptied(registry)


def test_rmm_attached(comm1, registry):
    rmm = pytest.importorskip("rmm")
    before = rmm.mr.get_current_device_resource()
    with memory.attach("rmm") as attached:
        assert rmm.mr.get_current_device_resource() is attached.resource
        buffer = rmm.DeviceBuffer(size=4096)
        assert (buffer.ptr, 4096, 0) in registry.segments()
        comm1.all_reduce((buffer.ptr, 1024, "float32"))
        ncclpy.synchronize(0)
    assert type(rmm.mr.get_current_device_resource()) is type(before)
    del buffer
    assert emptied(registry)


#: What NCCL logs for a call with registered memory: for a segment, with each peer; for a window.
USED = {"plain": "IPC re(use|gister) buffer|NVLS reuse|Symmetric]", "segments": "IPC re(use|gister) buffer|NVLS reuse",
        "windows": r"AllReduce \[Symmetric]"}  # fmt: skip
LOOP = """
    import sys, torch
    from ncclpy import memory
    comm = ncclpy.Communicator.from_env(timeout=60)
    torch.cuda.set_device(comm.device)
    kind, pool = {kind!r}, None
    if kind == "plain":
        send, recv = (torch.ones(1 << 24, device="cuda") for _ in range(2))
    else:
        pool = memory.pool("torch", comm, symmetric=kind == "windows")
        with pool:
            send, recv = (torch.ones(1 << 24, device="cuda") for _ in range(2))
    torch.cuda.synchronize()
    for _ in range(5):
        comm.all_reduce(send, recv, stream=torch.cuda.current_stream())
    torch.cuda.synchronize()
    assert (recv == 2).all()
    if pool is not None:
        pool.close()
    comm.close()
    """


@pytest.mark.parametrize("kind", USED)
def test_nccl_uses_registered_memory(torch, kind, tmp_path, monkeypatch):
    """NCCL logs for each of five calls that it uses registered memory; for calls with other memory it logs nothing."""
    testing.need_processes(2)
    for name, value in {"": "INFO", "_SUBSYS": "REG,TUNING", "_FILE": str(tmp_path / "said.%p")}.items():
        monkeypatch.setenv("NCCL_DEBUG" + name, value)
    code, said = launched(tmp_path, 2, LOOP.format(kind=kind))
    assert code == 0, said
    told = "".join(path.read_text() for path in tmp_path.glob("said.*"))  # NCCL logs kernels on rank 0 only
    assert len(re.findall(r"AllReduce.*Bytes ->", told)) >= 5, "NCCL has said nothing of its calls"
    lines = [line for line in told.splitlines() if re.search(USED[kind], line)]
    assert len(lines) >= 5 if kind != "plain" else not lines, told[-3000:]
