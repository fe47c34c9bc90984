"""A torch program with one failing rank; run as `torch_failures.py CASE FOLDER`, with torchrun's variables.

A case is ``what-where-behind``: what the failing rank does (kill, raise, absent, stop), where (loop: in a training
loop; log: in one that reads its loss; last: before the last collective), and what the others do afterwards (nothing,
barrier, sync, destroy). Each other rank prints "RESULT" and a number if it gets that far, and "ENDED" after destroy.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sys

import torch
import torch.distributed as dist
from failure_matrix import fail, failing
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ncclpy.interop.torch import recover

AT, STEPS = 3, 8
#: Seconds in which a group connects, which processes that share a GPU take long for.
CONNECT = 60


def set_timeout(seconds):
    dist.distributed_c10d._get_default_group().set_timeout(datetime.timedelta(seconds=seconds))


def run(case, folder):
    what, where, behind = case.split("-")
    rank = int(os.environ["RANK"])
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    option = os.environ.get("ON_ERROR")
    dist.init_process_group(
        "ncclpy",
        timeout=datetime.timedelta(seconds=CONNECT),
        device_id=device if on_gpu else None,
        pg_options={"on_error": option} if option else None,
    )
    dist.barrier()  # connects, within the timeout of the group
    set_timeout(float(os.environ["LIMIT"]))
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).to(device)
    model = DistributedDataParallel(module, device_ids=[device] if on_gpu else None)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    batch = torch.randn(16, 64, device=device)
    for step in range(STEPS):
        if rank == failing(dist.get_world_size()) and where != "last" and step == AT:
            fail(what, folder)
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if where == "log":
            loss.item()
    if rank == failing(dist.get_world_size()) and where == "last":
        if on_gpu:
            torch.cuda.synchronize()
        fail(what, folder)
    tensor = torch.full((1,), rank + 1.0, device=device)
    dist.all_reduce(tensor)
    if behind == "barrier":
        dist.barrier()
    if behind == "sync" and on_gpu:
        torch.cuda.synchronize()
    print("RESULT", tensor.item(), flush=True)
    if behind == "destroy":
        dist.destroy_process_group()
        print("ENDED", flush=True)


def run_and_recover(case, folder):
    """Run the case in a program that continues with the survivors, and sums anew."""
    try:
        run(case, folder)
    except RuntimeError as error:
        if "boom" in str(error):
            raise
        print("TOLD", str(error).replace("\n", " "), file=sys.stderr, flush=True)
        set_timeout(CONNECT)  # of the group to be made
        found = recover(timeout=15 if torch.cuda.is_available() else 5)
        tensor = torch.full((1,), dist.get_rank() + 1.0, device="cuda" if torch.cuda.is_available() else "cpu")
        dist.all_reduce(tensor)
        print("RECOVERED", tensor.item(), found.lost, flush=True)
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


if __name__ == "__main__":
    (run_and_recover if os.environ.get("ON_ERROR") == "abort" else run)(*sys.argv[1:])
