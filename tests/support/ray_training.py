"""A training of Ray Train over a backend of torch.distributed, in which a worker may be killed.

ray_training.py BACKEND FOLDER STEP: in the first attempt the last worker kills itself before step `STEP` (-1: never),
and Ray starts new workers, which continue from the last checkpoint. Prints "TRAINED RESUMED LOSSES": the step from
which the last attempt has continued, and the sums of all ranks' losses as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch

STEPS = 8


def train(config: dict[str, Any]) -> None:
    """Run in each worker; imports stay inside, as Ray sends this function to processes without this module."""
    import torch
    import torch.distributed as dist
    from torch import nn

    assert dist.get_backend() == config["backend"]
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)))
    device = next(model.parameters()).device
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    begun, losses = 0, []
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt", map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begun, losses = state["step"], state["losses"]
    for step in range(begun, config["steps"]):
        if step == config["killed_in"] and rank == last and not checkpoint:
            os.kill(os.getpid(), signal.SIGKILL)
        generator = torch.Generator().manual_seed(100 * step + rank)
        inputs, targets = torch.randn(8, 16, generator=generator), torch.randint(0, 4, (8,), generator=generator)
        loss = nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item())
        with tempfile.TemporaryDirectory() as folder:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "step": step + 1, "losses": losses}, Path(folder) / "state.pt")
            kept = ray.train.Checkpoint.from_directory(folder) if rank == 0 else None
            ray.train.report({"resumed": begun, "losses": losses}, checkpoint=kept)


def main(backend: str, folder: str, killed_in: str) -> None:
    import torch

    on_gpus = torch.cuda.is_available() and os.environ.get("NCCLPY_LIBRARY") != "host"
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100 * 1024**2, log_to_driver=False)
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"backend": backend, "steps": STEPS, "killed_in": int(killed_in)},
        torch_config=ray.train.torch.TorchConfig(backend=backend),
        scaling_config=ray.train.ScalingConfig(num_workers=2, use_gpu=on_gpus),
        run_config=ray.train.RunConfig(storage_path=folder, failure_config=ray.train.FailureConfig(max_failures=1)),
    )
    metrics = trainer.fit().metrics
    print("TRAINED", metrics["resumed"], json.dumps(metrics["losses"]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
