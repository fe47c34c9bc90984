"""Memory that NCCL knows: allocations with an owner, the registry of segments that communicators register, pools.

See docs/memory.md.
"""

from ncclpy.memory.attachment import Attachment, attach
from ncclpy.memory.pool import Pool, pool
from ncclpy.memory.registry import Allocation, SegmentRegistry, alloc, empty

__all__ = ["Allocation", "Attachment", "Pool", "SegmentRegistry", "alloc", "attach", "empty", "pool"]
