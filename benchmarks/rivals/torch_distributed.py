"""torch.distributed with its NCCL backend."""

import datetime

from benchmarks.overhead.road import Road, python_road
from benchmarks.rivals import Missing, arrays
from benchmarks.work.setting import Setting

NAME = "torch.distributed"


def open(setting: Setting) -> list[Road]:
    """Make the default process group through a file."""
    if not setting.gpu:
        raise Missing("its NCCL backend needs GPUs")
    pair = arrays.torch_pair(setting)
    if pair is None:
        raise Missing("torch with CUDA is not installed")
    import torch
    from torch import distributed

    if not distributed.is_nccl_available():
        raise Missing("this torch has no NCCL backend")
    distributed.init_process_group(
        "nccl",
        init_method=f"file://{setting.store}",
        rank=setting.rank,
        world_size=setting.nranks,
        timeout=datetime.timedelta(seconds=60),
        device_id=torch.device("cuda", setting.device),
    )
    _, tensor = pair
    names = {"all_reduce": distributed.all_reduce, "tensor": tensor}
    calls = {
        "": "all_reduce(tensor)",
        ", async_op": "all_reduce(tensor, async_op=True)",
        ", async_op, and the stream waits": "all_reduce(tensor, async_op=True).wait()",
    }
    return [
        python_road(setting, f"all_reduce(torch tensor), in place{how}", call, **names) for how, call in calls.items()
    ]
