"""Run one process per device, under any launcher, which provides rank, size and the address for the rendezvous.

ncclpy run -n 4 examples/from_env.py
torchrun --nproc-per-node 4 examples/from_env.py
mpirun -n 4 python examples/from_env.py
srun -n 4 --gpus-per-task 1 python examples/from_env.py
"""

from typing import Any

import numpy as np

import ncclpy

with ncclpy.Communicator.from_env(timeout=60) as comm:
    array: Any
    if ncclpy.library().engine == "cuda":
        import torch

        array = torch.full((4,), comm.rank + 1.0, device=f"cuda:{comm.device}")
    else:
        array = np.full(4, comm.rank + 1.0)
    comm.all_reduce(array)
    assert float(array[0]) == comm.nranks * (comm.nranks + 1) / 2, array
    if comm.rank == 0:
        print(f"{comm.nranks} ranks, sum {float(array[0])}")
