"""The rendezvous, in a store, of the processes that share a communicator key.

It precedes the call of NCCL, which could not name missing ranks. Later a process with a failed operation asks the
other processes, through the same part of the store, what they do.
"""

from __future__ import annotations

import contextlib
import json
import platform
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from ncclpy.bootstrap.prefix import PrefixStore
from ncclpy.bootstrap.rank_rendezvous import RankRendezvous, refuse
from ncclpy.bootstrap.store import Store, StoreError
from ncclpy.engine.recorder import OpLog
from ncclpy.errors import NcclTimeout
from ncclpy.peers.communicator_status import CommunicatorStatus
from ncclpy.peers.reports import MACHINE, process, process_state

__all__ = ["forget", "meet"]

#: The prefix of the keys of a communicator key's only rendezvous: a communicator key serves one set of communicators.
_PREFIX = "communicator"
#: The key that the first process sets: the number of ranks that it knows of, one of its ranks, and the process.
_FIRST_KEY = "first"
#: How many checks in a row, 0.3 s apart, have to find that the process of a missing rank has ended before the wait for
#: it ends: a process that replaces it may be about to arrive.
_CHECKS_UNTIL_LOST = 3


def meet(
    store: Store,
    key: bytes,
    name: str,
    own: Mapping[int, int],
    nranks: int,
    timeout: float,
    say: Callable[[str], str],
    wanted: Callable[[], bool],
    owner: weakref.ref[Any],
    look: Callable[[Any, int], dict[str, Any]],
    oplogs: Mapping[int, OpLog],
    end_owner: Callable[[Any, str, str], object],
) -> CommunicatorStatus[Any]:
    """Wait for all ranks of a communicator key; return their status service, by which they can be asked afterwards.

    Parameters
    ----------
    store
        The store that their processes share.
    key
        The communicator key.
    name
        The name of the communicators.
    own
        The ranks of this process, with their devices.
    nranks
        The number of ranks on all processes.
    timeout
        Seconds for all to arrive.
    say
        Called with a text about the waiting collective; returns the text with the collective's key before it.
    wanted
        Called at intervals; returns whether the communicators are still to be made.
    owner, look, oplogs, end_owner
        See `CommunicatorStatus`.

    Raises
    ------
    NcclTimeout
        On all processes, once the first of them has given up; it names the missing ranks.
    ValueError
        If another live process has added one of these ranks, or has named another number of ranks.
    NcclRemoteError
        On the other processes, if this one raises that ValueError before all ranks have met; on all processes, if one
        of them has ended.
    NcclAborted
        If the communicators are no longer wanted, in this process or in another one that has arrived.
    StoreError
        If the store is lost.
    """
    part, everyone = PrefixStore(f"ncclpy/manager/{key.hex()}", store), range(nranks)
    first, *more = own
    if (why := _conflict(part, name, own, nranks)) is not None:
        refuse(part, _PREFIX, why, failed=True)
        raise ValueError(say(why))
    rendezvous = RankRendezvous(
        part, f"what waits for {name!r}", first, nranks, lambda rank: part.check([RankRendezvous.joined_key(rank)]),
        more, lambda rank: ("its process has ended", _CHECKS_UNTIL_LOST) if rendezvous.is_gone(rank) else None,
    )  # fmt: skip
    try:
        rendezvous.meet(_PREFIX, everyone, f"to make communicator {name!r}", b"", lambda values: b"", timeout, wanted)
    except NcclTimeout as late:
        error = NcclTimeout(say(str(late)))
        error.missing = late.missing
        raise error from None

    def clear() -> None:
        rendezvous.clear(_PREFIX, everyone)
        with contextlib.suppress(StoreError, NcclTimeout):
            part.delete(_FIRST_KEY)

    peer_status = CommunicatorStatus(part, name, own, nranks, owner, look, oplogs, rendezvous, end_owner, clear)
    peer_status.listen()
    return peer_status


def _conflict(part: Store, name: str, own: Mapping[int, int], nranks: int) -> str | None:
    """Record the ranks of this process; return how they contradict recorded ranks, or None.

    A rank that was recorded by a process of this machine which has ended is replaced. The Managers of one process are
    not distinguished.
    """
    own_process = process() | {"host": platform.node()}
    for key, rank in [(_FIRST_KEY, next(iter(own))), *((RankRendezvous.joined_key(rank), rank) for rank in own)]:
        brought = json.dumps([nranks, rank, own_process]).encode()
        recorded = part.compare_set(key, None, brought)[1]
        size, first, recorded_process = _read(recorded) or (nranks, rank, own_process)
        if all(recorded_process.get(each) == own_process[each] for each in ("machine", "pid", "start")):
            continue
        if recorded_process.get("machine") == MACHINE:
            pid, start = int(recorded_process["pid"]), str(recorded_process["start"])
            if process_state(pid, start) == "ended":
                part.compare_set(key, recorded, brought)
                continue
        recorded_text, own_text = (
            f"process {each.get('pid')} on {each.get('host')}" for each in (recorded_process, own_process)
        )
        if key != _FIRST_KEY:
            return (
                f"global_rank: rank {rank} of communicator {name!r} was added twice, by {recorded_text} and by "
                f"{own_text}. Give each participant a rank of its own"
            )
        if size != nranks:
            return (
                f"num_global: communicator {name!r} is made with different sizes: by rank {first} of {size}, "
                f"{recorded_text}, and by rank {rank} of {nranks}, {own_text}. Give all participants one num_global"
            )
    return None


def _read(packed: bytes | None) -> tuple[int, int, dict[str, Any]] | None:
    """Return what `_conflict` has recorded; None if nothing was, or if another version of ncclpy has recorded it."""
    with contextlib.suppress(ValueError, TypeError):
        size, rank, of = json.loads(packed or b"null")
        if isinstance(of, dict):
            return int(size), int(rank), of
    return None


def forget(peer_status: CommunicatorStatus[Any]) -> None:
    """Remove the rendezvous from the store, if this process has rank 0.

    The communicators are made, so all ranks have returned from the rendezvous.
    """
    if 0 in peer_status.own:
        peer_status.rendezvous.forget(_PREFIX, range(peer_status.size))
