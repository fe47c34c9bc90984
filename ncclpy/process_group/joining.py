"""How a new process and a running group find each other in a store.

Who wants to join asks, under a key that ends with its process where the store can do that. The group's first rank
invites those who ask when the group admits somebody; who answers at once is in, and is told with whom it meets, and
where.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from ncclpy.bootstrap.arrivals import set_while_alive
from ncclpy.bootstrap.asked import decode
from ncclpy.bootstrap.store import Store, StoreDamaged, StoreError
from ncclpy.errors import NcclError, NcclTimeout, seconds

__all__ = ["Admitter", "Joiner"]

#: How long a wait goes on before who wants to join asks once more, and the seconds for those invited to answer.
_SLICE = 0.5
_ANSWERS = 1.0


class _JoinKeys:
    """The keys by which one group is joined."""

    def __init__(self, store: Store, name: str) -> None:
        self.store = store
        self.place = f"ncclpy/joining/{quote(name, safe='')}"

    def key(self, what: str, number: str) -> str:
        return f"{self.place}/{what}/{number}"

    def forget(self, number: str) -> None:
        with contextlib.suppress(StoreError, NcclTimeout):
            for what in ("asks", "invited", "comes", "goes"):
                self.store.delete(self.key(what, number))


class Joiner(_JoinKeys):
    """A rank that asks to join a group.

    Parameters
    ----------
    store
        The store that the group was made with.
    name
        The group's.
    handle
        Of the group of one that this one has.
    check
        How it compares collectives, which all ranks do alike.
    """

    def __init__(self, store: Store, name: str, handle: str, check: str = "off") -> None:
        super().__init__(store, name)
        self.name, self.handle, self.check = name, handle, check
        self.number = f"{store.add(f'{self.place}/number'):012d}"

    def wait(self, timeout: float) -> tuple[list[str], str]:
        """Return the handles of all, by rank, and the name under which they meet, once the group admits this one."""
        deadline = time.monotonic() + timeout
        try:
            self._await("invited", deadline, timeout)
            self._put("comes", b"")
            goes = self._await("goes", deadline, timeout)
            told = decode(_told, goes, self.store, self.key("goes", self.number), 0)
        finally:
            self.forget(self.number)
        if "other" in told:
            raise ValueError(
                f"check: this process came to join process group {self.name!r} with {self.check!r}, its ranks have "
                f"{told['other']!r}; all give the same"
            )
        if "failed" in told:
            raise NcclError(f"process group {self.name!r} has not admitted this process: {told['failed']}")
        if self.handle not in told["handles"]:
            raise NcclError(
                f"process group {self.name!r} has admitted others, and not this process, which it had invited"
            )
        return told["handles"], told["uuid"]

    def _put(self, what: str, value: bytes) -> None:
        set_while_alive(self.store, self.key(what, self.number), value)

    def _await(self, what: str, deadline: float, timeout: float) -> bytes:
        while True:
            left = deadline - time.monotonic()
            if what == "invited":  # again and again: who has not answered once is forgotten
                self._put("asks", f"{self.handle} {self.check}".encode())
            try:
                return self.store.get(self.key(what, self.number), max(0.0, min(_SLICE, left)))
            except NcclTimeout:
                if left <= 0:
                    raise NcclTimeout(
                        f"process group {self.name!r} has not admitted this process within {seconds(timeout)}: its "
                        f"ranks have to call admit(); or there is none of that name in {self.store}"
                    ) from None


def _asked(packed: bytes) -> tuple[str, str]:
    """Return the handle of who wants to join, and how it compares collectives."""
    handle, theirs = packed.decode().split(" ")
    if theirs not in ("off", "first", "always"):
        raise ValueError(f"{theirs!r} is no way to compare collectives")
    return handle, theirs


def _told(packed: bytes) -> dict[str, Any]:
    """Return what the group's first rank tells who wants to join."""
    told = json.loads(packed)
    for word in ("other", "failed"):
        if word in told:
            return {word: str(told[word])}
    return {"handles": list(map(str, told["handles"])), "uuid": str(told["uuid"])}


class Admitter(_JoinKeys):
    """The first rank of a group, as it admits those who ask."""

    def invite(self, timeout: float, wanted: Callable[[], bool], check: str = "off") -> dict[str, str]:
        """Return the handles of those who ask and answer, by their numbers; it waits a second for them at most.

        Who compares collectives in another way than these ranks, which is `check`, is told so and is not let in: they
        would wait for each other.
        """
        asks = self.store.keys(self.key("asks", ""))
        numbers = [key.rpartition("/")[2] for key in asks]
        if not numbers:
            return {}
        self.store.multi_set([(self.key("invited", number), b"") for number in numbers])
        deadline = time.monotonic() + min(timeout, _ANSWERS)
        comes = [self.key("comes", number) for number in numbers]
        while wanted() and (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(NcclTimeout):
                self.store.wait(comes, min(_SLICE, left))
                break
        joiners = {}
        for number in numbers:
            asked = self.store.compare_set(self.key("asks", number), None, None)[1]
            if asked is not None and self.store.check([self.key("comes", number)]):
                try:
                    handle, theirs = decode(_asked, asked, self.store, self.key("asks", number))
                except StoreDamaged as error:
                    self._tell({number: ""}, {"failed": str(error)})
                    continue
                if theirs == check:
                    joiners[number] = handle
                else:
                    self._tell({number: handle}, {"other": check})
            else:  # it is gone, or asks again
                self.store.delete(self.key("invited", number))
                self.store.delete(self.key("asks", number))
        return joiners

    def welcome(self, joiners: dict[str, str], handles: list[str], uuid: str) -> None:
        """Tell those who are admitted with whom they meet, and where."""
        self._tell(joiners, {"handles": handles, "uuid": uuid})

    def refuse(self, joiners: dict[str, str], why: str) -> None:
        """Tell them that nothing comes of it."""
        with contextlib.suppress(StoreError, NcclTimeout):
            self._tell(joiners, {"failed": why})

    def _tell(self, joiners: dict[str, str], what: object) -> None:
        for number in joiners:
            self.store.delete(self.key("asks", number))  # nobody else invites it
            self.store.set(self.key("goes", number), json.dumps(what).encode())
