"""Make many small all-reduces in one group, which NCCL launches as one kernel, and then repeat them with a plan.

On GPUs a group of 64 small all-reduces costs one launch instead of 64; `ncclpy perf all_reduce -m 64` measures
that on your machine. A plan repeats the group without recording it at each launch.
"""

from typing import Any

import numpy as np

import ncclpy

on_gpus = ncclpy.library().engine == "cuda"
comms = ncclpy.Communicator.init_all(range(min(2, ncclpy.device_count())))
size = len(comms)
LAYERS = 64


if on_gpus:
    import torch

    def layer(rank: int, number: int) -> Any:
        return torch.full((16,), float(rank + number), device=f"cuda:{rank}")
else:

    def layer(rank: int, number: int) -> Any:
        return np.full(16, float(rank + number))


layers = [[layer(rank, number) for number in range(LAYERS)] for rank in range(size)]


def reduce_all() -> None:
    for comm, mine in zip(comms, layers, strict=True):
        for array in mine:
            comm.all_reduce(array, op="max")


with ncclpy.group():
    reduce_all()
assert all(float(mine[number][0]) == size - 1 + number for mine in layers for number in range(LAYERS))

plan = ncclpy.Plan()
with plan.record():
    reduce_all()
for mine in layers:
    for array in mine:
        array *= 2
plan.launch()
assert all(float(mine[number][0]) == 2 * (size - 1 + number) for mine in layers for number in range(LAYERS))
print(f"{len(plan)} operations in one plan")
for comm in comms:
    comm.close()
