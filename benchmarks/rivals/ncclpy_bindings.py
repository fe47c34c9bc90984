"""ncclpy.bindings: one Python function for each C function, ints only."""

from benchmarks.overhead.road import Road, binding_roads
from benchmarks.rivals import Missing
from benchmarks.work.setting import Setting

NAME = "ncclpy.bindings"


def open(setting: Setting) -> list[Road]:
    """Load ncclpy's bindings on the setting's library."""
    import ncclpy

    if setting.communicator is None:
        ncclpy.use(setting.library)
    try:
        from ncclpy import bindings
    except ImportError:
        raise Missing("this ncclpy has no bindings") from None
    return binding_roads(setting, bindings, setting.comm)
