"""The rendezvous, in a store, of the processes that share a communicator key.

It comes before NCCL, which could not name missing ranks. Later a process with a failed operation asks there what the
other processes do.
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

#: The name of a communicator key's only rendezvous: a key serves one set of communicators.
_PLACE = "communicator"
#: Set by the first process that comes: the number of ranks that it knows of, one of its ranks, and the process.
_FIRST = "first"
#: How many times in a row, 0.3 s apart, the process of a missing rank is found ended before the wait for it ends: a
#: process that replaces it may be about to arrive.
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
    ended: Callable[[Any, str, str], object],
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
        Returns a text about the waiting collective, with its key.
    wanted
        Called at intervals; returns whether the communicators are still to be made.
    owner, look, oplogs, ended
        See `CommunicatorStatus`.

    Raises
    ------
    NcclTimeout
        On all processes, once the first of them has given up; it names the missing ranks.
    ValueError
        If another live process has added one of these ranks, or a rank with another number of ranks.
    NcclRemoteError
        On the other processes in that case, unless all ranks have met already; on all processes, if one has ended.
    StoreError
        If the store is lost.
    """
    part, everyone = PrefixStore(f"ncclpy/manager/{key.hex()}", store), range(nranks)
    first, *more = own
    if (why := _conflict(part, name, own, nranks)) is not None:
        refuse(part, _PLACE, why, failed=True)
        raise ValueError(say(why))
    rendezvous = RankRendezvous(
        part, f"what waits for {name!r}", first, nranks, lambda rank: part.check([RankRendezvous.been(rank)]), more,
        lambda rank: ("its process has ended", _CHECKS_UNTIL_LOST) if rendezvous.is_gone(rank) else None,
    )  # fmt: skip
    try:
        rendezvous.meet(_PLACE, everyone, f"to make communicator {name!r}", b"", lambda come: b"", timeout, wanted)
    except NcclTimeout as late:
        error = NcclTimeout(say(str(late)))
        error.missing = late.missing
        raise error from None

    def clear() -> None:
        rendezvous.clear(_PLACE, everyone)
        with contextlib.suppress(StoreError, NcclTimeout):
            part.delete(_FIRST)

    peer_status = CommunicatorStatus(part, name, own, nranks, owner, look, oplogs, rendezvous, ended, clear)
    peer_status.listen()
    return peer_status


def _conflict(part: Store, name: str, own: Mapping[int, int], nranks: int) -> str | None:
    """Record the ranks of this process; return what contradicts those of others, None if nothing does.

    Processes of this machine that have ended contradict nothing, nor do Managers of this process, which are not told
    apart.
    """
    mine = process() | {"host": platform.node()}
    for key, rank in [(_FIRST, next(iter(own))), *((RankRendezvous.been(rank), rank) for rank in own)]:
        brought = json.dumps([nranks, rank, mine]).encode()
        there = part.compare_set(key, None, brought)[1]
        size, first, theirs = _read(there) or (nranks, rank, mine)
        if all(theirs.get(each) == mine[each] for each in ("machine", "pid", "start")):
            continue
        if theirs.get("machine") == MACHINE and process_state(int(theirs["pid"]), str(theirs["start"])) == "ended":
            part.compare_set(key, there, brought)
            continue
        who, this = (f"process {each.get('pid')} on {each.get('host')}" for each in (theirs, mine))
        if key != _FIRST:
            return (
                f"global_rank: rank {rank} of communicator {name!r} was added twice, by {who} and by {this}. Give "
                "each participant a rank of its own"
            )
        if size != nranks:
            return (
                f"num_global: communicator {name!r} is made with different sizes: by rank {first} of {size}, {who}, "
                f"and by rank {rank} of {nranks}, {this}. Give all participants one num_global"
            )
    return None


def _read(packed: bytes | None) -> tuple[int, int, dict[str, Any]] | None:
    """Return what `_conflict` has recorded; None if there is nothing, or another version has written it."""
    with contextlib.suppress(ValueError, TypeError):
        size, rank, of = json.loads(packed or b"null")
        if isinstance(of, dict):
            return int(size), int(rank), of
    return None


def forget(peer_status: CommunicatorStatus[Any]) -> None:
    """Remove the rendezvous from the store: the communicators are made, so all ranks have returned from it."""
    if 0 in peer_status.own:
        peer_status.rendezvous.forget(_PLACE, range(peer_status.size))
