from typing import final

from ncclpy.core.types import Result

SUCCESS: Result
IN_PROGRESS: Result

@final
class PendingHandle:
    result: Result
    @property
    def value(self) -> int: ...
    def __int__(self) -> int: ...
    def __index__(self) -> int: ...
    def __bool__(self) -> bool: ...
