"""nccl.bindings of nccl4py: one Python function a C function, ints only."""

from benchmarks.rivals import nccl4py
from benchmarks.road import GROUP, Road, python_road, timed
from benchmarks.setting import COUNT, FLOAT32, SUM, Setting

NAME = "nccl4py bindings"
CALL = "all_reduce(send, recv, count, dtype, op, comm, stream)"


def open(setting: Setting) -> list[Road]:
    """Load nccl4py's bindings on the setting's library."""
    nccl = nccl4py.bindings(setting)
    names = {
        "all_reduce": nccl.all_reduce,
        "group_start": nccl.group_start,
        "group_end": nccl.group_end,
        "send": setting.send,
        "recv": setting.recv,
        "count": COUNT,
        "dtype": FLOAT32,
        "op": SUM,
        "comm": nccl.Comm(setting.comm),
        "stream": setting.stream,
    }
    group = f"group_start()\nfor _ in range({GROUP}):\n    {CALL}\ngroup_end()"
    return [
        python_road(setting, "all_reduce(ints)", CALL, result=setting.recv, **names),
        Road(
            f"{GROUP} x all_reduce(ints) in a group",
            f"group of {GROUP}",
            timed(setting, group, per=GROUP, **names),
            result=setting.recv,
            groups=1 / GROUP,
        ),
        Road(
            "group_start, group_end",
            "empty group",
            timed(setting, "group_start(); group_end()", **names),
            reduces=0,
            groups=1,
        ),
    ]
