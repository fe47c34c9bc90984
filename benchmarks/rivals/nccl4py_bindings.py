"""nccl.bindings of nccl4py: one Python function for each C function, ints only."""

from benchmarks.overhead.road import Road, binding_roads
from benchmarks.rivals import nccl4py
from benchmarks.work.setting import Setting

NAME = "nccl4py bindings"


def open(setting: Setting) -> list[Road]:
    """Load nccl4py's bindings on the setting's library."""
    nccl = nccl4py.bindings(setting)
    return binding_roads(setting, nccl, nccl.Comm(setting.comm))
