"""Gradients of torch models over a coordinator: equal to one process with all data, for any order of the ranks."""

from __future__ import annotations

import random
import threading
import time

import pytest
from coordinator_ranks import run_coordinators

import ncclpy
import testing

torch = pytest.importorskip("torch", reason="needs torch")

from ncclpy.interop.torch import average_gradients, broadcast_parameters  # noqa: E402

DEADLINE = 30
STEPS, BATCH = 5, 8


SEEDING = threading.Lock()  # torch's generator is shared by all threads


def made(seed):
    """Return a model that depends on the seed only."""
    with SEEDING:
        torch.manual_seed(seed)
        return Model()


def device_of(rank):
    return torch.device("cuda", testing.device_of(rank)) if ncclpy.library().engine == "cuda" else torch.device("cpu")


class Model(torch.nn.Module):
    """Branches called in any order, one layer used only sometimes, and a parameter without a gradient."""

    def __init__(self):
        super().__init__()
        self.branches = torch.nn.ModuleList(torch.nn.Linear(5, 3) for _ in range(4))
        self.sometimes = torch.nn.Linear(5, 3)
        self.frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, inputs, order, uses):
        made = sum(self.branches[branch](inputs) for branch in order) * self.frozen
        return made + self.sometimes(inputs) if uses else made


def batch(step, rank):
    made = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(BATCH, 5, generator=made)


def uses(step, rank):
    return (step + rank) % 2 == 0


def loss_of(model, step, rank, order, device):
    return model(batch(step, rank).to(device), order, uses(step, rank)).square().mean()


def parameters_of(model):
    return torch.cat([parameter.detach().cpu().flatten() for parameter in model.parameters()])


def alone(size, optimizer_of, passes=1):
    """Return the parameters after the same steps in one process."""
    model = made(0)
    optimizer = optimizer_of(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(passes):
            for rank in range(size):
                (loss_of(model, step * passes + part, rank, range(4), "cpu") / size).backward()
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.grad is None:  # unused parameters count as zeros
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    return parameters_of(model)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train(coordinator, *, passes=1, optimizer_of=sgd, **options):
    device = device_of(coordinator.rank)
    model = made(coordinator.rank).to(device)
    broadcast_parameters(model, coordinator)
    optimizer = optimizer_of(model.parameters())
    rng, order = random.Random(coordinator.rank), list(range(4))
    with average_gradients(model, coordinator, optimizer=optimizer, backward_passes=passes, **options):
        for step in range(STEPS):
            optimizer.zero_grad()
            for part in range(passes):
                rng.shuffle(order)
                loss_of(model, step * passes + part, coordinator.rank, order, device).backward()
            optimizer.step()
    return parameters_of(model)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("passes", [1, 3])
def test_result_equals_single_process(size, passes):
    wanted = alone(size, sgd, passes)
    for found in run_coordinators(size, lambda coordinator: train(coordinator, passes=passes)):
        assert torch.allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize(("compression", "tolerance"), [("fp16", 5e-3), ("bf16", 4e-2)])
def test_gradients_may_be_compressed(compression, tolerance):
    wanted = alone(2, sgd)
    first, second = run_coordinators(2, lambda coordinator: train(coordinator, compression=compression))
    assert torch.equal(first, second)
    assert torch.allclose(first, wanted, atol=tolerance) and not torch.equal(first, wanted)


# torch 2.11 warns about any sparse tensor made without an explicit choice about its checks.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
def test_sparse_gradients():
    def body(coordinator):
        device = device_of(coordinator.rank)
        table = torch.nn.Embedding(10, 2, sparse=True).to(device)
        with average_gradients(table, coordinator) as average:
            table(torch.tensor([coordinator.rank, 5], device=device)).sum().backward()
            average.synchronize()
            first = table.weight.grad.to_dense().cpu()
            table.weight.grad = None
            if coordinator.rank == 0:  # rank 1 has no gradient
                table(torch.tensor([7], device=device)).sum().backward()
            average.synchronize()
        return first, table.weight.grad.to_dense().cpu()

    for first, second in run_coordinators(2, body):
        wanted = torch.zeros(10, 2)
        wanted[0] = wanted[1] = 0.5
        wanted[5] = 1
        assert torch.equal(first, wanted)
        wanted.zero_()
        wanted[7] = 0.5
        assert torch.equal(second, wanted)


def test_optimiser_state_is_broadcast_from_root():
    def body(coordinator):
        model = torch.nn.Linear(3, 2).to(device_of(coordinator.rank))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (coordinator.rank + 1), amsgrad=True)
        if coordinator.rank == 1:
            for _ in range(3):
                model(torch.ones(1, 3, device=device_of(1))).sum().backward()
                optimizer.step()
        broadcast_parameters(model, coordinator, root=1)
        broadcast_parameters(optimizer, coordinator, root=1)
        optimizer.zero_grad()
        model(torch.full((1, 3), 2.0, device=device_of(coordinator.rank))).sum().backward()
        optimizer.step()
        steps = [int(state["step"]) for state in optimizer.state.values()]
        return parameters_of(model), steps, optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]

    first, second = run_coordinators(2, body)
    assert torch.equal(first[0], second[0]) and first[1:] == second[1:] == ([4, 4], 0.2, (0.9, 0.999))


def test_tied_weights():
    def body(coordinator):
        device = device_of(coordinator.rank)
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)).to(device)
        model[1].weight = model[0].weight
        with torch.no_grad():
            model[0].weight.fill_(1.0 + coordinator.rank)
        if coordinator.rank == 0:
            time.sleep(0.05)  # the other rank has brought everything
        broadcast_parameters(model, coordinator, root=0)
        return model[1].weight is model[0].weight, float(model[1].weight.detach().sum())

    assert run_coordinators(2, body) == [(True, 9.0)] * 2


def test_step_after_failed_or_skipped_step():
    """Such a step uses averages like every other."""

    def body(coordinator):
        rank, device = coordinator.rank, device_of(coordinator.rank)
        weight = torch.nn.Parameter(torch.zeros(1, device=device))
        model = torch.nn.ParameterList([weight])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        average = average_gradients(model, coordinator, optimizer=optimizer)
        coordinator.barrier("both").wait(DEADLINE)
        (weight * (1.0 + rank)).sum().backward()
        average.synchronize()  # and the step is left out
        optimizer.zero_grad()
        (weight * (1.0 + rank)).sum().backward()
        optimizer.step()
        assert float(weight.detach()) == -1.5

        model.append(torch.nn.Parameter(torch.zeros(1 + rank, device=device)))  # a mismatch between the ranks
        wrong = average_gradients(model, coordinator, optimizer=optimizer, name="wrong")
        average.close()
        for _ in range(2):
            optimizer.zero_grad()
            (weight * (1.0 + rank)).sum().backward()
            with pytest.raises(ncclpy.NcclError, match="wrong/1"):
                optimizer.step()
        assert float(weight.detach()) == -1.5
        wrong.close()
        return True

    assert run_coordinators(2, body) == [True, True]


def test_different_models_are_an_error_on_all_ranks():
    def body(coordinator):
        model = torch.nn.Linear(3, 2 + coordinator.rank).to(device_of(coordinator.rank))
        with pytest.raises(ncclpy.NcclError) as differs:
            broadcast_parameters(model, coordinator)
        average = average_gradients(model, coordinator)
        model(torch.ones(1, 3, device=device_of(coordinator.rank))).sum().backward()
        with pytest.raises(ncclpy.NcclError) as late:
            average.synchronize()
        average.close()
        return str(differs.value), str(late.value)

    first, second = run_coordinators(2, body)
    assert first == second and "weight" in first[0] + first[1]


def test_wrong_number_of_backward_passes_is_an_error():
    def body(coordinator):
        model = torch.nn.Linear(3, 2).to(device_of(coordinator.rank))
        inputs = torch.ones(1, 3, device=device_of(coordinator.rank))
        with average_gradients(model, coordinator) as average:
            model(inputs).sum().backward()
            with pytest.raises(RuntimeError, match="accumulated 2 times before synchronize"):
                model(inputs).sum().backward()
        with average_gradients(model, coordinator, backward_passes=2, name="two") as average:
            model(inputs).sum().backward()
            with pytest.raises(RuntimeError, match="after 1 of 2 backward passes"):
                average.synchronize()
            model(inputs).sum().backward()
            average.synchronize()
        return True

    assert run_coordinators(2, body) == [True, True]


def test_arguments():
    def body(coordinator):
        model = torch.nn.Linear(3, 2)
        for wrong, options in (("compression", {"compression": "int4"}), ("backward_passes", {"backward_passes": 0})):
            with pytest.raises(ValueError, match=wrong):
                average_gradients(model, coordinator, **options)
        with pytest.raises(ValueError, match="no parameter"):
            average_gradients(torch.nn.ReLU(), coordinator)
        with pytest.raises(TypeError, match="expected a torch module"):
            broadcast_parameters(3, coordinator)
        return True

    assert run_coordinators(1, body) == [True]
