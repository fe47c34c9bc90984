"""Run one process per device under mpirun: a program that uses mpi4py makes a communicator of the same ranks.

mpirun -n 4 python examples/with_mpi.py
"""

from typing import Any

import numpy as np
from mpi4py import MPI

import ncclpy

with ncclpy.Communicator.from_mpi(MPI.COMM_WORLD, timeout=60) as comm:
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
