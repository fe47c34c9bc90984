"""One process a device, started by torchrun; torch's store brings the unique id to all ranks.

torchrun --nproc-per-node 4 examples/with_torchrun.py
"""

import os
import sys

import torch
import torch.distributed as dist

import ncclpy

if "RANK" not in os.environ:
    sys.exit("RANK is not set; start this with torchrun")
rank, size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
# torchrun tells every process where its store is. The process group of torch is not needed for that.
store, _, _ = next(dist.rendezvous("env://"))
if rank == 0:
    store.set("ncclpy/world", bytes(ncclpy.get_unique_id()))
unique_id = store.get("ncclpy/world")  # waits until it is there

with ncclpy.Communicator.init(size, rank, unique_id, device=local, timeout=60) as comm:
    on_gpus = ncclpy.library().engine == "cuda"
    tensor = torch.full((4,), rank + 1.0, device=f"cuda:{local}" if on_gpus else "cpu")
    comm.all_reduce(tensor)
    assert tensor[0].item() == size * (size + 1) / 2, tensor
    if rank == 0:
        print(f"{size} ranks, sum {tensor[0].item()}")
