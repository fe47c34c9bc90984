from collections.abc import Iterable
from typing import SupportsIndex

from ncclpy.core.types import Result

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
