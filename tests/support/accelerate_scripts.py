"""Run one of Accelerate's own test scripts over a backend of torch.distributed.

torchrun --nproc-per-node N accelerate_scripts.py NAME BACKEND: `NAME` is a module of `accelerate.test_utils.scripts`.
On the CPU the group is made first, and Accelerate uses it.
"""

from __future__ import annotations

import importlib
import os
import sys

import torch
import torch.distributed as dist
from accelerate import PartialState


def main(name: str, backend: str) -> None:
    if backend == "ncclpy":
        import ncclpy.interop.torch  # noqa: F401
    if not torch.cuda.is_available():
        os.environ["ACCELERATE_USE_CPU"] = "true"
        dist.init_process_group(backend)
        state = PartialState(cpu=True)
    else:
        state = PartialState(backend=backend)
    assert dist.get_backend() == backend and state.num_processes == dist.get_world_size() > 1
    script = importlib.import_module(f"accelerate.test_utils.scripts.{name}")
    script.main()
    if dist.is_initialized():  # some of the scripts have destroyed it
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
