"""The flight recorder: the last operations of this process, to diagnose hangs.

Operations that return a `Work` are recorded unless `resize(0)` was called, calls of plain communicators only after
`record_all`.
"""

from ncclpy.engine.recorder import dump, record_all, resize, snapshot

__all__ = ["dump", "record_all", "resize", "snapshot"]
