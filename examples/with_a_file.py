"""One process a device, started by anything that numbers its processes; a file brings the unique id to all ranks.

Slurm numbers them in SLURM_PROCID, SLURM_NTASKS and SLURM_LOCALID; others in RANK, WORLD_SIZE and LOCAL_RANK. The file
is on a file system that all of them see, and its name is new for every run.

srun --ntasks 4 --gpus-per-task 1 python examples/with_a_file.py /shared/unique-id-$SLURM_JOB_ID
"""

import os
import sys
import time
from pathlib import Path

import numpy as np

import ncclpy


def number(slurm, other):
    if slurm not in os.environ and other not in os.environ:
        sys.exit(f"neither {slurm} nor {other} is set; start this with srun, or set {other} by hand")
    return int(os.environ[slurm if slurm in os.environ else other])


def exchange(path, rank, timeout=60):
    """Return the unique id that rank 0 has written into the file."""
    if rank == 0:
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_bytes(bytes(ncclpy.get_unique_id()))
        unfinished.rename(path)  # appears with all of its bytes, or not at all
    deadline = time.monotonic() + timeout
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank 0 has not written {path} within {timeout} s")
        time.sleep(0.01)
    return path.read_bytes()


if len(sys.argv) != 2:
    sys.exit("usage: with_a_file.py FILE, the name of a file that does not exist yet")
rank, size = number("SLURM_PROCID", "RANK"), number("SLURM_NTASKS", "WORLD_SIZE")
# With --gpus-per-task 1 a process sees a single GPU, number 0.
device = number("SLURM_LOCALID", "LOCAL_RANK") % ncclpy.device_count()
path = Path(sys.argv[1])
with ncclpy.Communicator.init(size, rank, exchange(path, rank), device=device, timeout=60) as comm:
    if ncclpy.library().engine == "cuda":
        import torch

        array = torch.full((4,), rank + 1.0, device=f"cuda:{device}")
    else:
        array = np.full(4, rank + 1.0)
    comm.all_reduce(array)
    assert float(array[0]) == size * (size + 1) / 2, array
    if rank == 0:
        path.unlink()  # everybody has read it: the communicator stands
        print(f"{size} ranks, sum {float(array[0])}")
