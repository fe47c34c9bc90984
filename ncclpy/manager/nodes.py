"""The processes of one communicator key in their store.

They meet there before NCCL, which could not say who is absent, and are asked there what they do when one is in
trouble.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from ncclpy.bootstrap.arrivals import Arrivals
from ncclpy.bootstrap.prefix import PrefixStore
from ncclpy.bootstrap.store import Store
from ncclpy.engine.recorder import Ledger
from ncclpy.errors import NcclTimeout
from ncclpy.peers.circle import Circle

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
    owner, look, ledgers, ended
        See `Circle`.

    Attributes
    ----------
    circle
        The status service, None until all have met.
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
        owner: weakref.ref[Any],
        look: Callable[[Any, int], dict[str, Any]],
        ledgers: Mapping[int, Ledger],
        ended: Callable[[Any, str, str], object],
    ) -> None:
        self.name = hashlib.blake2b(key, digest_size=4).hexdigest()  # by which communicators and the recorder call it
        self._store = PrefixStore(f"ncclpy/manager/{key.hex()}", store)
        self._own, self._everyone = own, range(nranks)
        self._timeout, self._say, self._wanted = timeout, say, wanted
        self._owner, self._look, self._ledgers, self._ended = owner, look, ledgers, ended
        self._arrivals: Arrivals | None = None
        self.circle: Circle[Any] | None = None
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
        everyone = self._everyone
        circle = Circle(
            self._store, self.name, self._own, len(everyone), self._owner, self._look, self._ledgers, arrivals,
            self._ended, lambda: arrivals.clear(_PLACE, everyone),
        )  # fmt: skip
        circle.listen()
        self.circle = circle
        if self._left is not None:  # meanwhile
            circle.leave(*self._left)

    def forget(self) -> None:
        """Clear the meeting away: the communicators stand, so that all have come back from it."""
        if self._arrivals is not None and 0 in self._own:
            self._arrivals.forget(_PLACE, self._everyone)

    def leave(self, text: str = "", kind: str = "") -> threading.Thread | None:
        """Give up the communicators, of which a thread tells the others, see `Circle.leave`."""
        self._left = text, kind
        return None if self.circle is None else self.circle.leave(text, kind)
