from collections.abc import Iterable
from typing import SupportsIndex

from ncclpy.core.bindings.results import PendingHandle
from ncclpy.core.config import Config
from ncclpy.core.types import UniqueId

def comm_split(
    comm: SupportsIndex,
    color: SupportsIndex,
    key: SupportsIndex,
    config: Config | None = ...,
) -> PendingHandle: ...
def comm_shrink(
    comm: SupportsIndex,
    exclude: Iterable[int],
    config: Config | None = ...,
    flags: SupportsIndex = ...,
) -> PendingHandle: ...
def comm_get_unique_id(comm: SupportsIndex) -> UniqueId: ...
def comm_grow(
    comm: SupportsIndex,
    nranks: SupportsIndex,
    unique_id: UniqueId | bytes | None,
    rank: SupportsIndex,
    config: Config | None = ...,
) -> PendingHandle: ...
