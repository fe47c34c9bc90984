"""Find the missing rank: one rank does not make the last call, and the dumps of all ranks name it.

A dump is written when the deadline passes, on SIGUSR2, and here also on SIGTERM, which torchrun sends to the other
ranks when one has failed. FOLDER is on a file system that all ranks share, and new for every run.

torchrun --nproc-per-node 4 examples/missing_ranks.py FOLDER [SECONDS]
ncclpy trace FOLDER
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

if "RANK" not in os.environ or len(sys.argv) < 2:
    sys.exit("usage: missing_ranks.py FOLDER [SECONDS], started by torchrun")
folder, seconds = Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 10.0
os.environ["NCCLPY_DUMP_DIR"] = str(folder)  # before ncclpy is imported
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

import numpy as np  # noqa: E402

import ncclpy  # noqa: E402


def dump_on_sigterm() -> None:
    """Write the dump in another thread: Python runs signal handlers in the main thread, which may be stuck."""
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    signal.set_wakeup_fd(writes)  # Python writes the number of each signal there at once
    signal.signal(signal.SIGTERM, lambda *_: None)

    def serve() -> None:
        while os.read(reads, 1)[0] != signal.SIGTERM:
            pass
        ncclpy.recorder.dump(folder / f"rank-{rank}.json", reason="SIGTERM")
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=serve, daemon=True).start()


def work(comm: ncclpy.Communicator) -> None:
    array: Any = np.ones(4)
    if ncclpy.library().engine == "cuda":
        import torch

        array = torch.ones(4, dtype=torch.float64, device=f"cuda:{comm.device}")
    for step in range(3):
        if step == 2 and rank == size - 1:
            time.sleep(3600)  # the missing rank: for example, its data loader is stuck
        comm.all_reduce(array, timeout=seconds)
        ncclpy.synchronize(comm.device)
    comm.barrier()  # on GPUs all_reduce only enqueues; if its deadline has passed, this call raises


folder.mkdir(parents=True, exist_ok=True)
dump_on_sigterm()
with ncclpy.Communicator.from_env(timeout=60) as comm:
    work(comm)
