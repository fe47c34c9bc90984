"""Memory that NCCL can use directly: allocations with an owner, the registry of segments, and pools.

See docs/memory.md.
"""

from ncclpy.memory.attachment import Attachment, attach
from ncclpy.memory.pool import Pool, pool
from ncclpy.memory.registry import Allocation, SegmentRegistry, alloc, empty

__all__ = ["Allocation", "Attachment", "Pool", "SegmentRegistry", "alloc", "attach", "empty", "pool"]
