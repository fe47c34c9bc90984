"""Many small all-reduces, once one by one and once in a group, where NCCL launches them together.

It counts rather than measures: on GPUs a group of 64 small all-reduces costs one kernel launch instead of 64, which
`ncclpy perf all_reduce -m 64` measures on your machine. A plan then repeats the group without recording it again.
"""

import numpy as np

import ncclpy

on_gpus = ncclpy.library().engine == "cuda"
if on_gpus:
    import torch

comms = ncclpy.Communicator.init_all(range(min(2, ncclpy.device_count())))
size = len(comms)
LAYERS = 64


def layer(rank, number):
    value = float(rank + number)
    if on_gpus:
        return torch.full((16,), value, device=f"cuda:{rank}")
    return np.full(16, value)


layers = [[layer(rank, number) for number in range(LAYERS)] for rank in range(size)]


def reduce_all():
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
