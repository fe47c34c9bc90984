from typing import SupportsIndex

from ncclpy.core.config import CollConfig
from ncclpy.core.types import Result

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
