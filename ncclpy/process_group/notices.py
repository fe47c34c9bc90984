"""What the ranks of a process group tell each other through a store: how they meet, and that the group has ended."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from urllib.parse import quote

from ncclpy.bootstrap.prefix import PrefixStore
from ncclpy.bootstrap.store import Store, StoreError
from ncclpy.bootstrap.watch import Change, Watch
from ncclpy.core.creation import get_unique_id
from ncclpy.core.errors import NcclTimeout, ranks, seconds, spans

__all__ = ["Notices"]

_log = logging.getLogger("ncclpy.process_group")

_ENDED = "ended"
#: How long a wait in a store that cannot be watched goes on before it looks whether the group was closed.
_SLICE = 0.5


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
        place = f"ncclpy/group/{quote(name, safe='')}"
        self.number = store.add(f"{place}/made-by/{rank}")
        self.name, self.rank, self.size = name, rank, size
        self.store = PrefixStore(f"{place}/{self.number}", store)
        self._over = threading.Event()
        self._watch: Watch | None = None

    def unique_id(self, label: str, members: list[int], timeout: float) -> bytes:
        """Meet the other ranks of a communicator under the deadline, and return the id that the first of them makes.

        Parameters
        ----------
        label
            Which communicator, the same on all of its ranks.
        members
            Its ranks in the group, in the order of their ranks in the communicator.
        timeout
            Seconds; the error names who has not come.
        """
        rank = members.index(self.rank)
        mine = bytes(get_unique_id()) if rank == 0 else b""
        try:
            return self.store.gather(f"communicator/{label}", rank, len(members), mine, timeout)[0]
        except NcclTimeout as error:
            missing = [members[int(each)] for each in error.missing or ()]
            told = NcclTimeout(
                f"{ranks(spans(missing))} of {self.size} did not come to make communicator {label!r} of process group "
                f"{self.name!r} within {seconds(timeout)}"
            )
            told.missing = missing
            raise told from error

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
        try:
            self.store.compare_set(_ENDED, None, text.encode(errors="replace"))
        except (StoreError, NcclTimeout) as error:
            _log.warning("rank %d could not tell the others that the group has ended (%s): %s", self.rank, text, error)

    def close(self) -> None:
        """Hear nothing any more."""
        self._over.set()
        watch, self._watch = self._watch, None
        if watch is not None:
            with contextlib.suppress(StoreError):
                watch.close()
