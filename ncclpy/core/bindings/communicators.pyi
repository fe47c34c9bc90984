from collections.abc import Iterable
from typing import NoReturn, SupportsIndex, final

from ncclpy.core.arguments.config import CollConfig, Config
from ncclpy.types import Result, UniqueId

@final
class PendingHandle:
    # Users cannot make one.
    def __init__(self, *args: NoReturn, **kwargs: NoReturn) -> None: ...
    @property
    def result(self) -> Result: ...
    @property
    def value(self) -> int: ...
    def __int__(self) -> int: ...
    def __index__(self) -> int: ...
    def __bool__(self) -> bool: ...

def get_unique_id() -> UniqueId: ...
def comm_init_rank(nranks: SupportsIndex, unique_id: UniqueId | bytes, rank: SupportsIndex) -> int: ...
def comm_init_rank_config(
    nranks: SupportsIndex,
    unique_id: UniqueId | bytes,
    rank: SupportsIndex,
    config: Config | None = ...,
) -> int: ...
def comm_init_rank_scalable(
    nranks: SupportsIndex,
    rank: SupportsIndex,
    unique_ids: Iterable[UniqueId | bytes],
    config: Config | None = ...,
) -> int: ...
def comm_init_all(devices: int | Iterable[int]) -> list[int]: ...
def comm_finalize(comm: SupportsIndex) -> Result: ...
def comm_destroy(comm: SupportsIndex) -> Result: ...
def comm_abort(comm: SupportsIndex) -> Result: ...
def comm_revoke(comm: SupportsIndex, flags: SupportsIndex = ...) -> Result: ...
def comm_suspend(comm: SupportsIndex, flags: SupportsIndex) -> Result: ...
def comm_resume(comm: SupportsIndex) -> Result: ...
def comm_get_async_error(comm: SupportsIndex) -> Result | int: ...
def comm_count(comm: SupportsIndex) -> int: ...
def comm_cu_device(comm: SupportsIndex) -> int: ...
def comm_user_rank(comm: SupportsIndex) -> int: ...
def comm_mem_stats(comm: SupportsIndex, stat: SupportsIndex) -> int: ...
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
def all_reduce_config(
    sendbuff: SupportsIndex,
    recvbuff: SupportsIndex,
    count: SupportsIndex,
    datatype: SupportsIndex,
    op: SupportsIndex,
    comm: SupportsIndex,
    stream: SupportsIndex,
    config: CollConfig | None,
) -> Result: ...
def broadcast_config(
    sendbuff: SupportsIndex,
    recvbuff: SupportsIndex,
    count: SupportsIndex,
    datatype: SupportsIndex,
    root: SupportsIndex,
    comm: SupportsIndex,
    stream: SupportsIndex,
    config: CollConfig | None,
) -> Result: ...
def reduce_config(
    sendbuff: SupportsIndex,
    recvbuff: SupportsIndex,
    count: SupportsIndex,
    datatype: SupportsIndex,
    op: SupportsIndex,
    root: SupportsIndex,
    comm: SupportsIndex,
    stream: SupportsIndex,
    config: CollConfig | None,
) -> Result: ...
def all_gather_config(
    sendbuff: SupportsIndex,
    recvbuff: SupportsIndex,
    sendcount: SupportsIndex,
    datatype: SupportsIndex,
    comm: SupportsIndex,
    stream: SupportsIndex,
    config: CollConfig | None,
) -> Result: ...
def reduce_scatter_config(
    sendbuff: SupportsIndex,
    recvbuff: SupportsIndex,
    recvcount: SupportsIndex,
    datatype: SupportsIndex,
    op: SupportsIndex,
    comm: SupportsIndex,
    stream: SupportsIndex,
    config: CollConfig | None,
) -> Result: ...
def all_to_all_config(
    sendbuff: SupportsIndex,
    recvbuff: SupportsIndex,
    count: SupportsIndex,
    datatype: SupportsIndex,
    comm: SupportsIndex,
    stream: SupportsIndex,
    config: CollConfig | None,
) -> Result: ...
def gather_config(
    sendbuff: SupportsIndex,
    recvbuff: SupportsIndex,
    count: SupportsIndex,
    datatype: SupportsIndex,
    root: SupportsIndex,
    comm: SupportsIndex,
    stream: SupportsIndex,
    config: CollConfig | None,
) -> Result: ...
def scatter_config(
    sendbuff: SupportsIndex,
    recvbuff: SupportsIndex,
    count: SupportsIndex,
    datatype: SupportsIndex,
    root: SupportsIndex,
    comm: SupportsIndex,
    stream: SupportsIndex,
    config: CollConfig | None,
) -> Result: ...
