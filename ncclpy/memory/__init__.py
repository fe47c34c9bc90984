"""Memory that NCCL knows: allocations with an owner, and the registry of segments that communicators register.

See docs/memory.md.
"""

from ncclpy.memory.allocation import Allocation, alloc, empty
from ncclpy.memory.registry import SegmentRegistry

__all__ = ["Allocation", "SegmentRegistry", "alloc", "empty"]
