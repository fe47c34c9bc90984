from collections.abc import Iterable
from typing import SupportsIndex

from ncclpy.types import Result

def reduce(
    sendbuff: SupportsIndex,
    recvbuff: SupportsIndex,
    count: SupportsIndex,
    datatype: SupportsIndex,
    op: SupportsIndex,
    root: SupportsIndex,
    comm: SupportsIndex,
    stream: SupportsIndex,
) -> Result: ...
def bcast(
    buff: SupportsIndex,
    count: SupportsIndex,
    datatype: SupportsIndex,
    root: SupportsIndex,
    comm: SupportsIndex,
    stream: SupportsIndex,
) -> Result: ...
def broadcast(
    sendbuff: SupportsIndex,
    recvbuff: SupportsIndex,
    count: SupportsIndex,
    datatype: SupportsIndex,
    root: SupportsIndex,
    comm: SupportsIndex,
    stream: SupportsIndex,
) -> Result: ...
def all_reduce(
    sendbuff: SupportsIndex,
    recvbuff: SupportsIndex,
    count: SupportsIndex,
    datatype: SupportsIndex,
    op: SupportsIndex,
    comm: SupportsIndex,
    stream: SupportsIndex,
) -> Result: ...
def reduce_scatter(
    sendbuff: SupportsIndex,
    recvbuff: SupportsIndex,
    recvcount: SupportsIndex,
    datatype: SupportsIndex,
    op: SupportsIndex,
    comm: SupportsIndex,
    stream: SupportsIndex,
) -> Result: ...
def all_gather(
    sendbuff: SupportsIndex,
    recvbuff: SupportsIndex,
    sendcount: SupportsIndex,
    datatype: SupportsIndex,
    comm: SupportsIndex,
    stream: SupportsIndex,
) -> Result: ...
def all_to_all(
    sendbuff: SupportsIndex,
    recvbuff: SupportsIndex,
    count: SupportsIndex,
    datatype: SupportsIndex,
    comm: SupportsIndex,
    stream: SupportsIndex,
) -> Result: ...
def gather(
    sendbuff: SupportsIndex,
    recvbuff: SupportsIndex,
    count: SupportsIndex,
    datatype: SupportsIndex,
    root: SupportsIndex,
    comm: SupportsIndex,
    stream: SupportsIndex,
) -> Result: ...
def scatter(
    sendbuff: SupportsIndex,
    recvbuff: SupportsIndex,
    count: SupportsIndex,
    datatype: SupportsIndex,
    root: SupportsIndex,
    comm: SupportsIndex,
    stream: SupportsIndex,
) -> Result: ...
def send(
    sendbuff: SupportsIndex,
    count: SupportsIndex,
    datatype: SupportsIndex,
    peer: SupportsIndex,
    comm: SupportsIndex,
    stream: SupportsIndex,
) -> Result: ...
def recv(
    recvbuff: SupportsIndex,
    count: SupportsIndex,
    datatype: SupportsIndex,
    peer: SupportsIndex,
    comm: SupportsIndex,
    stream: SupportsIndex,
) -> Result: ...
def red_op_create_pre_mul_sum(
    scalar: SupportsIndex,
    datatype: SupportsIndex,
    residence: SupportsIndex,
    comm: SupportsIndex,
) -> int: ...
def red_op_destroy(op: SupportsIndex, comm: SupportsIndex) -> Result: ...
def group_start() -> Result: ...
def group_end() -> Result: ...
def group_simulate_end() -> float: ...
def put_signal(
    localbuff: SupportsIndex,
    count: SupportsIndex,
    datatype: SupportsIndex,
    peer: SupportsIndex,
    peer_win: SupportsIndex,
    peer_win_offset: SupportsIndex,
    sig_idx: SupportsIndex,
    ctx: SupportsIndex,
    flags: SupportsIndex,
    comm: SupportsIndex,
    stream: SupportsIndex,
) -> Result: ...
def signal(
    peer: SupportsIndex,
    sig_idx: SupportsIndex,
    ctx: SupportsIndex,
    flags: SupportsIndex,
    comm: SupportsIndex,
    stream: SupportsIndex,
) -> Result: ...
def wait_signal(
    descriptors: Iterable[tuple[int, int, int, int]],
    comm: SupportsIndex,
    stream: SupportsIndex,
) -> Result: ...
