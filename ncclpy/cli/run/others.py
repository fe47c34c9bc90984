"""The launchers of the other machines: which are alive, which are done, and which has failed first."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence

from ncclpy.bootstrap import Store, StoreError
from ncclpy.errors import NcclError

#: The exit code if a launcher is gone without a message.
_LOST_EXIT = 1


class OtherLaunchers:
    """Tell the launchers of the other machines about this one, and follow what they tell.

    In the store each launcher has a key ``here/NODE``, which is removed when its connection ends, and a key
    ``done/NODE`` once its processes have ended. The key ``failed`` has the first failure of all launchers.

    Parameters
    ----------
    store
        The launchers' part of the store.
    node
        The number of this launcher.
    hosts
        The names of all machines.
    """

    def __init__(self, store: Store, node: int, hosts: Sequence[str]) -> None:
        self._store = store
        self._node = node
        self._hosts = hosts
        self._changed = threading.Condition()
        self._here = set(range(len(hosts)))
        self._done: set[int] = set()
        self._failure: int | None = None
        self._on_failure: Callable[[int, str], object] | None = None

    @staticmethod
    def announce(store: Store, node: int) -> None:
        """Tell the others, before the rendezvous, that this launcher is alive."""
        if store.check([f"here/{node}"]):
            # Both launchers would have one key: the end of this one would count as the end of the other.
            raise StoreError(f"machine {node} is there already: --node-rank {node} was given to two launchers")
        store.set(f"here/{node}", b"", ephemeral=True)

    def watch(self, failed: Callable[[int, str], object]) -> None:
        """Have `failed` called, in a thread, at the first failure of all launchers, this one included."""
        self._on_failure = failed
        threading.Thread(target=self._listen, name="ncclpy run: others", daemon=True).start()

    def tell(self, code: int, text: str) -> None:
        """Tell the others of a failure of this launcher; the first failure of all launchers counts."""
        with contextlib.suppress(NcclError):  # the store is gone: the others have ended, or notice its loss themselves
            self._store.compare_set("failed", None, f"{code} {text}".encode())

    def end(self, code: int) -> int:
        """Wait until the processes of all launchers have ended, and return the exit code of all."""
        with contextlib.suppress(NcclError):
            self._store.set(f"done/{self._node}", b"")
        with self._changed:
            # Machine 0 serves the store, so its launcher ends last: it waits until the others have disconnected. The
            # wait is in slices, so that Ctrl-C ends it.
            while self._here - {0} if self._node == 0 else self._here - self._done:
                self._changed.wait(0.1)
        return code if self._failure is None else self._failure

    def _listen(self) -> None:
        try:
            with contextlib.suppress(NcclError):  # the store is gone, or this launcher has closed it
                self._follow()
        finally:
            # This launcher has closed the store, or the store is gone with machine 0: end() must wait for no launcher.
            with self._changed:
                server_was_running = 0 in self._here - self._done
                self._here.clear()
                self._changed.notify_all()
        if server_was_running and self._node != 0:
            self._failed(_LOST_EXIT, f"the launcher on {self._hosts[0]} (machine 0), which serves the store, is gone")

    def _follow(self) -> None:
        """Note the changes in the store until it is gone."""
        watch = self._store.watch("")
        # Note the changes that were made before the watch began.
        present = set(self._store.keys())
        for key in present & {"failed", *(f"done/{node}" for node in self._here)}:
            self._note(key, self._store.get(key))
        for node in list(self._here):
            if f"here/{node}" not in present:
                self._note(f"here/{node}", None)
        for change in watch:
            self._note(change.key, change.value)

    def _note(self, key: str, value: bytes | None) -> None:
        kind, _, number = key.partition("/")
        if kind == "failed" and value is not None:
            code, _, text = value.decode(errors="replace").partition(" ")
            self._failed(int(code), text)
        elif kind == "done":
            with self._changed:
                self._done.add(int(number))
                self._changed.notify_all()
        elif kind == "here" and value is None:
            node = int(number)
            with self._changed:
                lost = node in self._here - self._done
                self._here.discard(node)
                self._changed.notify_all()
            if lost:
                self._failed(_LOST_EXIT, f"the launcher on {self._hosts[node]} (machine {node}) is gone")

    def _failed(self, code: int, text: str) -> None:
        with self._changed:
            first = self._failure is None
            if first:
                self._failure = code
        if first and self._on_failure is not None:
            self._on_failure(code, text)
