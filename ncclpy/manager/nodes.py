"""The processes of one communicator key in their store.

They meet there before NCCL, which could not say who is absent, and are asked there what they do when one is in
trouble.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from ncclpy.bootstrap.arrivals import Arrivals
from ncclpy.bootstrap.prefix import PrefixStore
from ncclpy.bootstrap.store import Store
from ncclpy.engine.recorder import Ledger
from ncclpy.errors import NcclTimeout
from ncclpy.peers.communicator_status import CommunicatorStatus

__all__ = ["forget", "meet"]

#: The one meeting of a communicator key, which serves one set of communicators.
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
    ledgers: Mapping[int, Ledger],
    ended: Callable[[Any, str, str], object],
) -> CommunicatorStatus[Any]:
    """Wait for all ranks of a communicator key; return their status service, by which they can be asked from then on.

    Parameters
    ----------
    store
        The store that their processes have in common.
    key
        The communicator key.
    name
        What the communicators are called.
    own
        The ranks of this process, with their devices.
    nranks
        How many ranks there are on all of them.
    timeout
        Seconds for all to come.
    say
        Returns a text about the collective that is waited for, with its key.
    wanted
        Asked every now and then whether the communicators are still to be made.
    owner, look, ledgers, ended
        See `CommunicatorStatus`.

    Raises
    ------
    NcclTimeout
        On all processes, once the first of them has given up; it names the ranks that have not come.
    StoreError
        If the store is gone.
    """
    part, everyone = PrefixStore(f"ncclpy/manager/{key.hex()}", store), range(nranks)
    first, *more = own
    arrivals = Arrivals(part, f"what waits for {name!r}", first, nranks, also=more)
    try:
        arrivals.meet(_PLACE, everyone, f"to make communicator {name!r}", b"", lambda come: b"", timeout, wanted)
    except NcclTimeout as late:
        error = NcclTimeout(say(str(late)))
        error.missing = late.missing
        raise error from None
    peer_status = CommunicatorStatus(
        part, name, own, nranks, owner, look, ledgers, arrivals, ended, lambda: arrivals.clear(_PLACE, everyone)
    )
    peer_status.listen()
    return peer_status


def forget(peer_status: CommunicatorStatus[Any]) -> None:
    """Clear the meeting away: the communicators stand, so that all have come back from it."""
    if 0 in peer_status.own:
        peer_status.arrivals.forget(_PLACE, range(peer_status.size))
