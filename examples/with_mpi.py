"""One process a device, started by mpirun; mpi4py brings the unique id to all ranks.

mpirun -n 4 python examples/with_mpi.py
"""

import numpy as np
from mpi4py import MPI

import ncclpy

world = MPI.COMM_WORLD
node = world.Split_type(MPI.COMM_TYPE_SHARED)  # the ranks of this machine: their number here is the device
unique_id = world.bcast(bytes(ncclpy.get_unique_id()) if world.rank == 0 else None, root=0)
device = node.rank % ncclpy.device_count()

with ncclpy.Communicator.init(world.size, world.rank, unique_id, device=device, timeout=60) as comm:
    if ncclpy.library().engine == "cuda":
        import torch

        array = torch.full((4,), comm.rank + 1.0, device=f"cuda:{device}")
    else:
        array = np.full(4, comm.rank + 1.0)
    comm.all_reduce(array)
    assert float(array[0]) == comm.nranks * (comm.nranks + 1) / 2, array
    if comm.rank == 0:
        print(f"{comm.nranks} ranks, sum {float(array[0])}")
