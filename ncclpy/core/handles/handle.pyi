from typing_extensions import disjoint_base

@disjoint_base
class Handle:
    @property
    def rank(self) -> int: ...
    @property
    def nranks(self) -> int: ...
    @property
    def device(self) -> int: ...
