"""What the ranks of a process group tell each other through a store: how they meet, and that the group has ended."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Callable
from urllib.parse import quote

from ncclpy.bootstrap.prefix import PrefixStore
from ncclpy.bootstrap.store import Store, StoreError
from ncclpy.bootstrap.watch import Change, Watch
from ncclpy.core.creation import get_unique_id
from ncclpy.core.errors import NcclTimeout
from ncclpy.engine.known import note_group
from ncclpy.process_group.arrivals import Arrivals

__all__ = ["Notices"]

_log = logging.getLogger("ncclpy.process_group")

_ENDED = "ended"
#: How long a wait in a store that cannot be watched goes on before it looks whether the group was closed.
_SLICE = 0.5


def _place_of(name: str) -> str:
    return f"ncclpy/group/{quote(name, safe='')}"


class Notices:
    """The part of a store that belongs to one group.

    Groups of one name are told apart by their number: each rank counts those that it has made, and the n-th of one
    rank meets the n-th of the others. So their keys never meet those of another group, in whatever order and by
    however many threads they are made.

    Parameters
    ----------
    store
        The store that all ranks have in common.
    name
        The group's name, the same on all ranks.
    rank, size
        Which of how many this is.
    """

    def __init__(self, store: Store, name: str, rank: int, size: int) -> None:
        self._outer, self._place = store, _place_of(name)
        self.number = store.add(f"{self._place}/made-by/{rank}")
        self.name, self.rank, self.size = name, rank, size
        self.known = note_group(name, self.number, rank, size)
        self.store = PrefixStore(f"{self._place}/{self.number}", store)
        self.arrivals = Arrivals(self.store, name, rank, size, self._has_made)
        self._over = threading.Event()
        self._watch: Watch | None = None

    def unique_id(self, label: str, members: list[int], timeout: float, wanted: Callable[[], bool]) -> bytes:
        """Meet the other ranks of a communicator under the deadline, and return the id that the first of them makes.

        Parameters
        ----------
        label
            Which communicator, the same on all of its ranks.
        members
            Its ranks in the group, in the order of their ranks in the communicator.
        timeout
            Seconds; the error names who has not come.
        wanted
            Asked whether the communicator is still to be made.
        """
        what = f"to make communicator {label!r} of process group {self.name!r}"
        mine = bytes(get_unique_id()) if self.rank == members[0] else b""
        return self.arrivals.meet(f"communicator/{label}", members, what, mine, lambda come: come[0], timeout, wanted)

    def made(self, label: str, members: list[int]) -> None:
        """Clear away what a communicator was made by: it stands, so that all of its ranks have had that."""
        if self.rank == members[0]:
            self.arrivals.forget(f"communicator/{label}", members)

    def gather(self, name: str, value: object, timeout: float, wanted: Callable[[], bool]) -> list[object]:
        """Return what all ranks of the group bring to a meeting, by rank; it may be anything that JSON knows."""
        everyone = list(range(self.size))
        what = f"to {name} of process group {self.name!r}"
        brought = json.dumps(value).encode()
        packed = self.arrivals.meet(
            name, everyone, what, brought, lambda come: b"[" + b",".join(come) + b"]", timeout, wanted
        )
        return list(json.loads(packed))

    def _has_made(self, rank: int) -> bool:
        """Return whether a rank has made this group: its count has come so far."""
        there = self._outer.compare_set(f"{self._place}/made-by/{rank}", None, None)[1]
        return there is not None and int(there) >= self.number

    def listen(self, ended: Callable[[str], object]) -> None:
        """Call back once a rank has told that the group has ended, in a thread of its own."""

        def take(text: bytes | None) -> None:
            if text is not None and not self._over.is_set():
                ended(text.decode(errors="replace"))

        def look(change: Change) -> None:
            take(change.value)

        try:
            self._watch = self.store.watch(_ENDED, look)
        except StoreError:  # it cannot tell of changes
            threading.Thread(target=self._ask, args=(take,), name="ncclpy-group", daemon=True).start()
            return
        if self.store.check([_ENDED]):  # before the watch began
            take(self.store.get(_ENDED))

    def _ask(self, take: Callable[[bytes | None], None]) -> None:
        while not self._over.is_set():
            try:
                take(self.store.get(_ENDED, _SLICE))
                return
            except NcclTimeout:
                continue
            except StoreError as error:
                if not self._over.is_set():
                    _log.warning("rank %d hears no more whether its group has ended: %s", self.rank, error)
                return

    def tell(self, text: str) -> None:
        """Tell all ranks that the group has ended, unless another one was faster; the store may be gone."""
        self._tell(self.store, self.name, text)

    def tell_part(self, name: str, text: str) -> None:
        """Tell the ranks of a part of this group that it has ended, which this rank could not make; see `tell`."""
        self._tell(PrefixStore(f"{_place_of(name)}/1", self.store), name, text)  # its name is made once

    def _tell(self, store: Store, name: str, text: str) -> None:
        try:
            store.compare_set(_ENDED, None, text.encode(errors="replace"))
        except (StoreError, NcclTimeout) as error:
            _log.warning("rank %d could not tell that group %r has ended (%s): %s", self.rank, name, text, error)

    def close(self) -> None:
        """Hear nothing any more."""
        self.known.closed()
        self._over.set()
        watch, self._watch = self._watch, None
        if watch is not None:
            with contextlib.suppress(StoreError):
                watch.close()
