from typing import Any

from typing_extensions import disjoint_base

@disjoint_base
class Counts:
    @property
    def operations(self) -> dict[str, int]: ...
    def add(self, what: str, number: int = 1) -> int: ...
    def as_dict(self) -> dict[str, Any]: ...
