"""What a process group tells of its operations, for those who ask for it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Completion"]


@dataclass(frozen=True)
class Completion:
    """Tell of an operation of a process group that has come to its end.

    Attributes
    ----------
    rank
        The rank in the group.
    group
        The group's name.
    operation
        Its name, such as ``"all_reduce"``; of a coalesced group that of its first.
    seq
        Its number among the group's collectives or, if it is point to point, among those of its communicator.
    count, nbytes
        Elements, as NCCL counts them, and bytes of the buffer that says its size; of a coalesced group their sum.
    created, launched, completed
        When, in seconds of the clock of `time.monotonic`; None for what did not happen.
    duration
        Seconds on the device, None unless the group was made with ``timing=True``.
    error
        What has become of it; None if it has succeeded.
    """

    rank: int
    group: str
    operation: str
    seq: int
    count: int
    nbytes: int
    created: float
    launched: float | None
    completed: float | None
    duration: float | None
    error: BaseException | None
