"""The flight recorder: the last operations of this process, always recorded, to diagnose hangs."""

from ncclpy.engine.recorder import dump, record_all, resize, snapshot

__all__ = ["dump", "record_all", "resize", "snapshot"]
