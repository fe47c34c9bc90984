"""Train a torch model: on each rank gradients become ready in another order, and the coordinator agrees on one order.

The ranks are threads of this process: four, or with GPUs one for each GPU. Each rank's model calls its branches in
another order, and so does its backward pass. The result is that of one process with all the data.
"""

import random
import threading
from collections.abc import Sequence

import torch

import ncclpy
from ncclpy.bootstrap import LocalStore
from ncclpy.interop.torch import average_gradients, broadcast_parameters

CUDA = torch.cuda.is_available()
if not CUDA:
    ncclpy.use("host")
RANKS = torch.cuda.device_count() if CUDA else 4
STEPS, BATCH, BRANCHES = 20, 16, 8


class Branches(torch.nn.Module):
    """Layers that do not depend on each other, called in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 1) for _ in range(BRANCHES))

    def forward(self, inputs: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
        return torch.stack([self.layers[branch](inputs) for branch in order]).sum(0)


def data(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the data of a rank in a step."""
    made = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(BATCH, 6, generator=made)
    return inputs, inputs.sum(1, keepdim=True)


def made(seed: int) -> Branches:
    torch.manual_seed(seed)
    return Branches()


def train(rank: int, model: Branches, store: LocalStore, results: dict[int, torch.Tensor]) -> None:
    device = torch.device("cuda", rank) if CUDA else torch.device("cpu")
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    order = list(range(BRANCHES))
    with ncclpy.Coordinator((store, rank, RANKS), device=rank) as coordinator:
        broadcast_parameters(model, coordinator)
        average_gradients(model, coordinator, optimizer=optimizer)
        for step in range(STEPS):
            random.shuffle(order)
            inputs, wanted = (each.to(device) for each in data(step, rank))
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs, order), wanted).backward()
            optimizer.step()  # waits for the averages
    results[rank] = torch.cat([parameter.detach().cpu().flatten() for parameter in model.parameters()])


def alone() -> torch.Tensor:
    """Train on all ranks' data in one process."""
    model = made(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for step in range(STEPS):
        inputs, wanted = (torch.cat(each) for each in zip(*(data(step, rank) for rank in range(RANKS)), strict=True))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs, range(BRANCHES)), wanted).backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def main() -> None:
    store = LocalStore()
    results: dict[int, torch.Tensor] = {}
    models = [made(rank) for rank in range(RANKS)]  # they differ until rank 0's parameters are broadcast
    threads = [threading.Thread(target=train, args=(rank, models[rank], store, results)) for rank in range(RANKS)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    apart = max(float((results[rank] - alone()).abs().max()) for rank in range(RANKS))
    print(f"{RANKS} ranks, {STEPS} steps; farthest from one process with all data: {apart:.1e}; alike: {apart < 1e-5}")


if __name__ == "__main__":
    main()
