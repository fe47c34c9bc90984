from typing_extensions import disjoint_base

from ncclpy.core.stream import Stream

@disjoint_base
class StreamPool:
    high_priority: bool
    def __init__(self, high_priority: bool = False) -> None: ...
    def of(self, device: int, index: int = 0) -> Stream: ...
    def close(self) -> None: ...
