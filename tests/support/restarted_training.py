"""A training with checkpoints of which torchrun starts the ranks again after one of them was killed.

torchrun --nproc-per-node 2 --max-restarts 1 restarted_training.py BACKEND FOLDER STEP: in the first attempt rank 1 is
killed in the middle of a step, unless it is negative. Rank 0 prints the attempt, the step at which it began, and the
loss of the last step.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 8


def main(backend: str, folder: str, killed_in: str) -> None:
    if backend == "ncclpy":
        import ncclpy.interop.torch  # noqa: F401
    attempt, path = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), Path(folder) / "checkpoint.pt"
    dist.init_process_group(backend)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    first = 0
    if path.exists():
        saved = torch.load(path)
        first = saved["step"] + 1
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    for step in range(first, STEPS):
        data = torch.full((2, 4), float(step + dist.get_rank()))
        loss = model(data).square().mean()
        if (attempt, step, dist.get_rank()) == (0, int(killed_in), 1):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss.backward()  # in the first attempt rank 0 waits here for rank 1
        optimizer.step()
        if dist.get_rank() == 0:
            state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)
    if dist.get_rank() == 0:
        print("TRAINED", attempt, first, repr(loss.item()), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
