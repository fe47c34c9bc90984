"""The processes of one communicator key in their store.

They meet there before NCCL, which could not say who is absent, and are asked there what they do when one is in
trouble.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

from ncclpy.bootstrap.arrivals import Arrivals
from ncclpy.bootstrap.prefix import PrefixStore
from ncclpy.bootstrap.store import Store
from ncclpy.engine.recorder import Ledger
from ncclpy.errors import NcclTimeout
from ncclpy.peers.circle import Circle
from ncclpy.peers.inquiry import Said

__all__ = ["Nodes"]

#: The one meeting of a communicator key, which serves one set of communicators.
_PLACE = "communicator"


class Nodes:
    """All processes of a communicator key, as one of them sees them.

    Parameters
    ----------
    store
        The store that they have in common.
    key
        The communicator key.
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
    look
        Returns what one of the own ranks does, see `Reports`.
    ledgers
        Where what they have launched is noted, by rank.
    ended
        Called once another process has ended the communicators, see `Circle`.
    """

    def __init__(
        self,
        store: Store,
        key: bytes,
        own: Mapping[int, int],
        nranks: int,
        timeout: float,
        say: Callable[[str], object],
        wanted: Callable[[], bool],
        look: Callable[[int], dict[str, Any]],
        ledgers: Mapping[int, Ledger],
        ended: Callable[[str, str], object],
    ) -> None:
        self.name = hashlib.blake2b(key, digest_size=4).hexdigest()  # by which communicators and the recorder call it
        self._store = PrefixStore(f"ncclpy/manager/{key.hex()}", store)
        self._own, self._everyone = own, range(nranks)
        self._timeout, self._say, self._wanted, self._look = timeout, say, wanted, look
        self._ledgers, self._ended = ledgers, ended
        self._arrivals: Arrivals | None = None
        self._circle: Circle | None = None
        self._left: tuple[str, str] | None = None  # with what it tells then

    def meet(self) -> None:
        """Wait for all ranks; from then on they can be asked.

        Raises
        ------
        NcclTimeout
            On all processes, once the first of them has given up; it names the ranks that have not come.
        StoreError
            If the store is gone.
        """
        first, *more = self._own
        what = f"to make communicator {self.name!r}"
        arrivals = Arrivals(self._store, f"what waits for {self.name!r}", first, len(self._everyone), also=more)
        try:
            arrivals.meet(_PLACE, self._everyone, what, b"", lambda come: b"", self._timeout, self._wanted)
        except NcclTimeout as late:
            error = NcclTimeout(self._say(str(late)))  # type: ignore[arg-type]
            error.missing = late.missing
            raise error from None
        self._arrivals = arrivals
        circle = Circle(
            self._store, self.name, self._own, len(self._everyone), self._look, self._ledgers, arrivals, self._ended,
            lambda: arrivals.clear(_PLACE, self._everyone),
        )  # fmt: skip
        circle.listen()
        self._circle = circle
        if self._left is not None:  # meanwhile
            circle.leave(*self._left)

    def forget(self) -> None:
        """Clear the meeting away: the communicators stand, so that all have come back from it."""
        if self._arrivals is not None and 0 in self._own:
            self._arrivals.forget(_PLACE, self._everyone)

    def ask(self) -> Said:
        """Return what all ranks do, see `Circle.ask`; (None, None) if they have not met."""
        return (None, None) if self._circle is None else self._circle.ask()

    def is_ended(self) -> bool:
        """Return whether a process has ended the communicators."""
        return self._circle is not None and self._circle.told() is not None

    def end(self, text: str, kind: str) -> None:
        """Tell the other processes that the communicators end, and why."""
        if self._circle is not None:
            self._circle.end(text, kind)

    def wait_until_heard(self) -> bool:
        """Tell that this process has heard of the end, and wait until the others have; return whether it may abort."""
        if self._circle is None:
            return True
        self._circle.confirmation.confirm()
        return self._circle.confirmation.wait()

    def leave(self, text: str = "", kind: str = "") -> threading.Thread | None:
        """Give up the communicators, of which a thread tells the others, see `Circle.leave`."""
        self._left = text, kind
        return None if self._circle is None else self._circle.leave(text, kind)
