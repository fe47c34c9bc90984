"""nccl.core.Communicator of nccl4py."""

import types

from benchmarks.overhead.road import Road, python_group, python_road, timed
from benchmarks.rivals import arrays, nccl4py
from benchmarks.work.setting import SUM, Setting

NAME = "nccl4py Communicator"
CALL = "allreduce(send, recv, op, stream=stream)"


def open(setting: Setting) -> list[Road]:
    """Wrap the setting's communicator.

    Without a driver nccl4py cannot ask for the communicator's device, through cuda.core; it is set by hand then.
    """
    nccl4py.bindings(setting)
    from nccl import core

    communicator = core.Communicator(setting.comm)
    if setting.gpu:
        from cuda.core import Device

        Device(setting.device).set_current()
    else:
        communicator._device = types.SimpleNamespace(device_id=None)
        setting.notes.append(
            f"{NAME}: without a driver cuda.core cannot name the communicator's device; it is set by hand to what a "
            "CPU tensor names, None. All else of the call is as it is."
        )
    setting.keep.append(communicator)
    found = []
    kinds = {"torch tensor": arrays.torch_pair(setting), "cupy array": arrays.cupy_pair(setting)}
    for kind, pair in kinds.items():
        if pair is None:
            continue
        send, recv = pair
        names = {"allreduce": communicator.allreduce, "op": SUM, "send": send, "recv": recv, "stream": setting.stream}
        pointer = recv.data_ptr() if kind == "torch tensor" else recv.data.ptr
        found.append(python_road(setting, f"allreduce({kind})", CALL, result=pointer, **names))
        found.append(python_group(setting, f"allreduce({kind}) in group()", CALL, group=core.group, **names))
    empty = timed(setting, "with group(): pass", group=core.group)
    found.append(Road("with group(): pass", "empty group", empty, reduces=0, groups=1))
    return found
