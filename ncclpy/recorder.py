"""The flight recorder: the last operations of this process, always on, for when something is stuck."""

from ncclpy.engine.recorder import dump, record_all, resize, snapshot

__all__ = ["dump", "record_all", "resize", "snapshot"]
