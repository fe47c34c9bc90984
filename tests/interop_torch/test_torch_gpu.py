"""The torch backend on GPUs, a process for each, compared with torch's nccl: collectives, trainings, graphs, ends."""

from __future__ import annotations

import datetime
import time

import pytest
import test_torch_collectives as collectives
import test_torch_direct as direct
import test_torch_training as training
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_ranks import error_of

import ncclpy.interop.torch

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def two_gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")


def on_gpu(rank, size, program, *arguments):
    """Run a program for CPUs with this rank's GPU as torch's default device, and move its results to the CPU."""
    torch.cuda.set_device(rank)
    torch.set_default_device(torch.device("cuda", rank))
    try:
        found = program(rank, size, *arguments)
        torch.cuda.synchronize()
        return on_cpu(found)
    finally:
        torch.set_default_device(None)


def on_cpu(found):
    if isinstance(found, torch.Tensor):
        return found.cpu()
    if isinstance(found, dict):
        return {name: on_cpu(each) for name, each in found.items()}
    return [on_cpu(each) for each in found] if isinstance(found, (list, tuple)) else found


def as_over_nccl(ranks, program, *arguments, falls=True, rel=1e-4):
    ours = ranks.run(on_gpu, program, *arguments)
    theirs = ranks.run(on_gpu, program, *arguments, backend="nccl")
    assert ours == [pytest.approx(each, rel=rel) for each in theirs]
    if falls:
        assert all(found[-1] < found[0] for found in ours)


def test_plain_tensors_go_to_the_group_directly(ranks2):
    assert [passed for passed, _ in ranks2.run(on_gpu, direct.plain)] == [[], []]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("program", [collectives.reductions, collectives.moves, collectives.exchanges])
def test_collectives_are_nccls(ranks2, program, dtype):
    ours, theirs = (ranks2.run(on_gpu, program, dtype, backend=backend) for backend in ("ncclpy", "nccl"))
    collectives.same(ours, theirs)


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_ddp(ranks2, options):
    as_over_nccl(ranks2, training.ddp, options, False, None)


def test_ddp_with_sparse_gradients(ranks2):
    """On the CPU over gloo the same model starts elsewhere: torch draws other numbers there."""
    assert all(found[-1] < found[0] for found in ranks2.run(on_gpu, training.ddp, {}, True, None))


@pytest.mark.parametrize("hook", ["powerSGD", "fp16"])
def test_ddp_with_hooks(ranks2, hook):
    as_over_nccl(ranks2, training.ddp, {}, False, hook, rel=1e-2)


@pytest.mark.parametrize("divide", [True, False])
def test_ddp_joined_by_ranks_with_fewer_batches(ranks2, divide):
    as_over_nccl(ranks2, training.uneven, divide)


@pytest.mark.parametrize("program", [training.zero, training.fsdp, training.pipeline])
def test_training(ranks2, program):
    as_over_nccl(ranks2, program)


def test_tensors_and_layers_over_a_mesh(ranks2):
    as_over_nccl(ranks2, training.tensor_parallel)


@pytest.mark.parametrize("compiled", [None, "aot_eager", "inductor"])
def test_functional_collectives_also_compiled(ranks2, compiled):
    as_over_nccl(ranks2, training.functional, compiled, falls=False)


def test_collectives_with_gradients(ranks2):
    as_over_nccl(ranks2, training.with_gradients, falls=False)


def batch_norm(rank, size):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
    model = DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(model))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    inputs, found = torch.randn(5 + rank, 3, 8, 8, generator=training.seeded(rank)), []
    for _ in range(training.STEPS):
        optimizer.zero_grad()
        loss = (model(inputs) - 1).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_batch_norm_over_ranks_with_different_batches(ranks2):
    as_over_nccl(ranks2, batch_norm)


def made_with_device_id(rank, size, backend, path):
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        backend, store=dist.FileStore(path, size), rank=rank, world_size=size, device_id=device,
        timeout=datetime.timedelta(seconds=30),
    )  # fmt: skip
    found = []
    tensor = torch.full((4,), rank + 1.0, device=device)
    dist.all_reduce(tensor)
    found.append(tensor.tolist())
    for ranks in ([[0, 1]], [[0], [1]]):
        child = dist.split_group(split_ranks=ranks, timeout=datetime.timedelta(seconds=20))
        tensor = torch.full((4,), rank + 1.0, device=device)
        dist.all_reduce(tensor, group=child)
        found.append((tensor.tolist(), dist.get_world_size(child), dist.get_rank(child)))
    child = dist.new_group([1, 0])
    dist.broadcast(tensor, src=1, group=child)
    found.append(tensor.tolist())
    dist.barrier(device_ids=[rank])
    return [*found, summed_over_nccl(rank, size)]


def summed_over_nccl(rank, size):
    """Return a sum over a group of nccl in a world of this backend; torch would have nccl split it from that world."""
    tensor = torch.full((4,), rank + 1.0, device=torch.device("cuda", rank))
    theirs = dist.new_group(backend="nccl")
    dist.all_reduce(tensor, group=theirs)
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    dist.destroy_process_group(theirs)
    return tensor.tolist()


def test_group_of_nccl_in_this_world(ranks2):
    assert ranks2.run(on_gpu, summed_over_nccl) == [[6.0] * 4] * 2


@pytest.mark.parametrize("backend", ["ncclpy", "cpu:ncclpy,cuda:ncclpy"])
def test_eager_making_and_splitting(ranks2, tmp_path, backend):
    """Not compared with nccl: a world of nccl ends its process here."""
    for rank, found in enumerate(ranks2.run(made_with_device_id, backend, str(tmp_path / "store"), backend=None)):
        summed, together, alone, sent, beside = found
        assert beside == [6.0] * 4
        assert summed == [3.0] * 4
        assert together == ([3.0] * 4, 2, rank) and alone == ([rank + 1.0] * 4, 1, 0)
        assert sent == [2.0] * 4


def on_streams(rank, size):
    """Run collectives beside computation on a stream of their own; free tensors at once after use."""
    side, total = torch.cuda.Stream(), torch.zeros(1 << 20)
    for step in range(30):
        with torch.cuda.stream(side):
            tensor = torch.full((1 << 20,), float(rank + step))
            work = dist.all_reduce(tensor, async_op=True)
            work.wait()
            tensor *= 2
        torch.cuda.current_stream().wait_stream(side)
        total += tensor
        tensor.record_stream(torch.cuda.current_stream())
        del tensor
        torch.empty(1 << 20).fill_(-1.0)  # may take memory that was freed
    works, tensors = [], [torch.full((3, 5), float(rank + i)) for i in range(8)]
    for tensor in tensors:
        works.append(dist.all_reduce(tensor, async_op=True))
    for work in works:
        work.get_future().wait()
    return [total.unique().tolist(), [tensor.unique().tolist() for tensor in tensors]]


def test_streams(ranks2):
    ours, theirs = ranks2.run(on_gpu, on_streams), ranks2.run(on_gpu, on_streams, backend="nccl")
    assert ours == theirs
    assert ours[0][0] == [sum(2 * (2.0 * step + 1) for step in range(30))]


def strided(rank, size):
    tensors = [torch.full((3, 5), float(rank + i))[:, ::2] for i in range(8)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()
    return [tensor.unique().tolist() for tensor in tensors]


def test_tensors_that_are_not_contiguous(ranks2):
    """nccl refuses them."""
    assert ranks2.run(on_gpu, strided) == [[[2.0 * i + 1] for i in range(8)]] * 2


def captured(rank, size):
    tensor, gathered = torch.zeros(1000), torch.zeros(1000 * size)
    dist.all_reduce(tensor)  # communicators are made before a capture
    dist.all_gather_into_tensor(gathered, tensor)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor += 1
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        dist.all_gather_into_tensor(gathered, tensor)
        gathered *= 2
    tensor.fill_(rank)
    found = []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        found.append((tensor.unique().tolist(), gathered.unique().tolist()))
    graph.reset()
    return found


def test_graph_is_replayed(ranks2):
    ours, theirs = ranks2.run(on_gpu, captured), ranks2.run(on_gpu, captured, backend="nccl")
    assert ours == theirs
    assert [each[0] for each in ours[0]] == [[3.0], [8.0], [18.0]]


def cpu_and_gpu(rank, size):
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    there, here = torch.full((3,), rank + 1.0, device=device), torch.full((3,), rank + 2.0)
    works = [dist.all_reduce(there, async_op=True), dist.all_reduce(here, async_op=True)]
    for work in works:
        work.wait()
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    dist.barrier()
    return there.tolist(), here.tolist(), objects


def test_tensors_of_cpus_and_gpus(ranks2):
    found = ranks2.run(cpu_and_gpu)
    assert found == [([3.0] * 3, [5.0] * 3, [{"rank": 0}, {"rank": 1}])] * 2


def wait_in_vain(rank):
    """Let rank 0 wait 2 s for an all-reduce that rank 1 does not call in time; return the error."""
    torch.cuda.set_device(rank)
    tensor = torch.zeros(10, device="cuda")
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    if rank == 1:
        time.sleep(4)
        return ""
    try:
        dist.all_reduce(tensor, async_op=True).wait(timeout=datetime.timedelta(seconds=2))
        torch.cuda.synchronize()
    except dist.DistBackendError as error:
        return str(error)


def left_alone(rank, size):
    began = time.monotonic()
    found = wait_in_vain(rank), time.monotonic() - began
    if rank == 0:  # the operation is still in flight
        assert "rank 1" in error_of(dist.destroy_process_group)
    return found


def test_missing_rank_is_named(ranks2):
    (said, took), _ = ranks2.run(left_alone)
    assert "rank 1" in said and took < 10, (said, took)


def recovered(rank, size):
    """Recover on both ranks after rank 0's collective has timed out."""
    said = wait_in_vain(rank)
    ncclpy.interop.torch.recover(20)
    tensor = torch.full((10,), rank + 1.0, device="cuda")
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    return said, tensor.unique().tolist()


def test_recovery(ranks2):
    (said, summed), (nothing, also) = ranks2.run(recovered)
    assert "rank 1" in said and not nothing
    assert summed == also == [3.0]


def pooled(rank, size):
    """Return sums of tensors of a pool over NCCL's memory, made by torch's own functions."""
    torch.cuda.set_device(rank)
    backend = dist.group.WORLD._get_backend(torch.device("cuda"))
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        tensor = torch.full((1 << 20,), rank + 1.0, device="cuda")
    backend.register_mem_pool(pool)
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    found = tensor.unique().tolist()
    backend.deregister_mem_pool(pool)
    return found


def test_pools_of_torch(ranks2):
    assert ranks2.run(pooled) == [[3.0]] * 2
