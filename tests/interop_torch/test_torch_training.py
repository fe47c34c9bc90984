"""Short trainings by torch's ways to train on several ranks: losses fall, and equal those over gloo.

They run on torch's default device: test_torch_gpu.py runs them on GPUs, compared with nccl.
"""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_ranks import DEADLINE

import ncclpy.interop.torch  # noqa: F401 - in each rank, too

STEPS = 5


class Model(nn.Module):
    """Two layers, an embedding, and a layer that only some ranks use."""

    def __init__(self, sparse=False):
        super().__init__()
        self.words = nn.Embedding(20, 8, sparse=sparse)
        self.first, self.second, self.sometimes = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, words, uses):
        hidden = torch.relu(self.first(self.words(words)))
        return self.second(hidden) + (self.sometimes(hidden) if uses else 0)


def seeded(number):
    return torch.Generator(torch.get_default_device()).manual_seed(number)


def batch(rank, step, count=6):
    made = seeded(100 * step + rank)
    return torch.randint(0, 20, (count,), generator=made), torch.randn(count, 4, generator=made)


def losses_of(model, optimizer, rank, uses, steps=STEPS):
    found = []
    for step in range(steps):
        words, wanted = batch(rank, 0)
        optimizer.zero_grad()
        loss = (model(words, uses(step)) - wanted).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def ddp(rank, size, options, sparse, hook):
    # Several buckets; one for the hook with collectives in callbacks, which ranks would call in different orders.
    model = DistributedDataParallel(Model(sparse), bucket_cap_mb=25 if hook == "powerSGD" else 0.001, **options)
    if hook == "powerSGD":
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)  # its callbacks wait for collectives
    elif hook == "fp16":
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    some = bool(options.get("find_unused_parameters"))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return losses_of(model, optimizer, rank, lambda step: not some or (rank + step) % 2 == 0)


def as_over_gloo(ranks, program, *arguments, falls=True, deadline=DEADLINE):
    ours, theirs = (ranks.run(program, *arguments, backend=each, deadline=deadline) for each in ("ncclpy", "gloo"))
    assert ours == [pytest.approx(each, rel=1e-4) for each in theirs]
    if falls:
        assert all(found[-1] < found[0] for found in ours)


@pytest.mark.parametrize(
    ("options", "sparse"),
    [
        ({}, False),
        ({"find_unused_parameters": True}, False),
        ({"static_graph": True, "gradient_as_bucket_view": True}, False),
        ({}, True),
    ],
    ids=["plain", "unused", "static", "sparse"],
)
def test_ddp(ranks2, options, sparse):
    as_over_gloo(ranks2, ddp, options, sparse, None)


@pytest.mark.parametrize("hook", ["powerSGD", "fp16"])
def test_ddp_with_hooks(ranks2, hook):
    """Not compared with gloo: a gloo process group ends its process if a callback was the last to use it."""
    if hook == "powerSGD" and torch.cuda.is_available():
        pytest.skip("with a GPU in the machine, torch's hook synchronises the CPU tensor's device as a GPU")
    plain, hooked = ranks2.run(ddp, {}, False, None), ranks2.run(ddp, {}, False, hook)
    for found, near in zip(hooked, plain, strict=True):
        assert found == pytest.approx(near, rel=0.05) and found[-1] < found[0]


def uneven(rank, size, divide):
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with model.join(divide_by_initial_world_size=divide):
        return losses_of(model, optimizer, rank, lambda step: True, STEPS + rank)


@pytest.mark.parametrize("divide", [True, False])
def test_ddp_joined_by_ranks_with_fewer_batches(ranks2, divide):
    as_over_gloo(ranks2, uneven, divide)


def zero(rank, size):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(Model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.05)
    found = losses_of(model, optimizer, rank, lambda step: True)
    optimizer.consolidate_state_dict(to=0)
    return found


def test_zero(ranks2):
    as_over_gloo(ranks2, zero)


def fsdp(rank, size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(torch.get_default_device().type, (size,))
    model = Model()
    for layer in (model.first, model.second):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return losses_of(model, torch.optim.SGD(model.parameters(), 0.1), rank, lambda step: True)


def test_fsdp2(ranks2):
    as_over_gloo(ranks2, fsdp)


def tensor_parallel(rank, size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh(torch.get_default_device().type, (2, size // 2), mesh_dim_names=("data", "tensor"))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    inputs = torch.randn(6, 8, generator=seeded(1))
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (model(inputs) - 1).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    spread = distribute_tensor(torch.arange(24.0).reshape(4, 6), mesh, [Shard(0), Shard(1)])
    turned = spread.redistribute(mesh, [Shard(1), Replicate()])
    assert isinstance(turned, DTensor)
    return [*found, turned.full_tensor().sum().item() - 277]


def test_tensors_and_layers_over_a_mesh(ranks4):
    as_over_gloo(ranks4, tensor_parallel)


def pipeline(rank, size):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.manual_seed(rank)
    stage_module = nn.Linear(8, 8)
    stage = PipelineStage(stage_module, rank, size, torch.get_default_device())
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda made, wanted: (made - wanted).square().mean())
    optimizer = torch.optim.SGD(stage_module.parameters(), 0.05)
    inputs = torch.randn(8, 8, generator=seeded(1))
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses = []
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=torch.ones(8, 8), losses=losses)
        optimizer.step()
        if losses:
            found.append(torch.stack(losses).mean().item())
    return found or [1.0, 0.0]


def test_pipelining(ranks2):
    as_over_gloo(ranks2, pipeline)


def functional(rank, size, compiled):
    import torch.distributed._functional_collectives as collectives

    def step(tensor):
        summed = collectives.all_reduce(tensor * 2, "sum", dist.group.WORLD)
        gathered = collectives.all_gather_tensor(summed + rank, 0, dist.group.WORLD)
        part = collectives.reduce_scatter_tensor(gathered, "sum", 0, dist.group.WORLD)
        turned = collectives.all_to_all_single(gathered, None, None, dist.group.WORLD)
        sent = collectives.broadcast(turned, 0, dist.group.WORLD)
        return part.sum() + turned.sum() * 3 + sent.sum() * 7

    if compiled:
        step = torch.compile(step, backend=compiled, fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [step(torch.arange(4.0) + rank).item()]


@pytest.mark.timeout(8 * DEADLINE)
@pytest.mark.parametrize("compiled", [None, "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_functional_collectives_also_compiled(ranks2, compiled):
    """Inductor waits for the C++ compiler in each rank: for 99 s on two busy cores, without a cache."""
    as_over_gloo(ranks2, functional, compiled, falls=False, deadline=3 * DEADLINE)


def with_gradients(rank, size):
    import torch.distributed.nn.functional as functional

    tensor = (torch.arange(4.0) + rank + 1).requires_grad_()
    world = {"group": dist.group.WORLD}  # their default is the world at the time of their import
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        made = functional.all_reduce(tensor, **world).square().sum()
        made = made + torch.stack(functional.all_gather(tensor, **world)).prod(0).sum()
        made = made + functional.broadcast(tensor, 0, **world).sum() * (rank + 1)
        made = made + functional.reduce_scatter(torch.zeros(2), list(tensor.chunk(size)), **world).square().sum()
        made.backward()
    return [*tensor.grad.tolist(), made.item()]


def test_collectives_with_gradients(ranks2):
    as_over_gloo(ranks2, with_gradients, falls=False)
