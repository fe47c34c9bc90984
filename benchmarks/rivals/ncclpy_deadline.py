"""ncclpy.Communicator with timeout=: a watchdog, and its marks around every operation."""

from benchmarks.overhead.road import Road
from benchmarks.rivals.ncclpy_nonblocking import CALL, roads
from benchmarks.work.setting import Setting

NAME = "ncclpy.Communicator, timeout=60"

__all__ = ["CALL", "NAME", "open"]


def open(setting: Setting) -> list[Road]:
    """Make a communicator with a deadline."""
    return roads(setting, timeout=60)
