"""The rendezvous, in a store, of the processes that share a communicator key.

It comes before NCCL, which could not name missing ranks. Later a process with a failed operation asks there what the
other processes do.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from ncclpy.bootstrap.prefix import PrefixStore
from ncclpy.bootstrap.rank_rendezvous import RankRendezvous
from ncclpy.bootstrap.store import Store
from ncclpy.engine.recorder import OpLog
from ncclpy.errors import NcclTimeout
from ncclpy.peers.communicator_status import CommunicatorStatus

__all__ = ["forget", "meet"]

#: The name of a communicator key's only rendezvous: a key serves one set of communicators.
_PLACE = "communicator"


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
    StoreError
        If the store is lost.
    """
    part, everyone = PrefixStore(f"ncclpy/manager/{key.hex()}", store), range(nranks)
    first, *more = own
    rendezvous = RankRendezvous(part, f"what waits for {name!r}", first, nranks, also=more)
    try:
        rendezvous.meet(_PLACE, everyone, f"to make communicator {name!r}", b"", lambda come: b"", timeout, wanted)
    except NcclTimeout as late:
        error = NcclTimeout(say(str(late)))
        error.missing = late.missing
        raise error from None
    peer_status = CommunicatorStatus(
        part, name, own, nranks, owner, look, oplogs, rendezvous, ended, lambda: rendezvous.clear(_PLACE, everyone)
    )
    peer_status.listen()
    return peer_status


def forget(peer_status: CommunicatorStatus[Any]) -> None:
    """Remove the rendezvous from the store: the communicators are made, so all ranks have returned from it."""
    if 0 in peer_status.own:
        peer_status.rendezvous.forget(_PLACE, range(peer_status.size))
