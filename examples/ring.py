"""Pass tokens around a ring: each rank sends to the next and receives from the previous, until every token is back.

The send and the receive of a rank are in one group: otherwise every rank would wait in its send. With GPUs and torch
the token is a tensor on each GPU; on the host engine (NCCLPY_LIBRARY=host) a numpy array.
"""

from typing import Any

import numpy as np

import ncclpy

on_gpus = ncclpy.library().engine == "cuda"
comms = ncclpy.Communicator.init_all(range(min(4, ncclpy.device_count())))
size = len(comms)


if on_gpus:
    import torch

    def token(rank: int) -> Any:
        return torch.full((4,), float(rank), device=f"cuda:{rank}")
else:

    def token(rank: int) -> Any:
        return np.full(4, float(rank))


mine = [token(rank) for rank in range(size)]
seen: list[list[int]] = [[] for _ in comms]
for _ in range(size):
    arriving = [token(rank) for rank in range(size)]  # buffers; the receives overwrite them
    with ncclpy.group():
        for comm, outgoing, incoming in zip(comms, mine, arriving, strict=True):
            comm.send(outgoing, peer=(comm.rank + 1) % size)
            comm.recv(incoming, peer=(comm.rank - 1) % size)
    mine = arriving
    for rank, each in enumerate(mine):
        seen[rank].append(int(each[0]))

for rank in range(size):
    assert seen[rank] == [(rank - step) % size for step in range(1, size + 1)], seen[rank]
print(f"{size} ranks; rank 0 saw the tokens of {seen[0]}")
for comm in comms:
    comm.close()
