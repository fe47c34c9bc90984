"""How a new process and a running group find each other in a store.

A process that wants to join asks under a key; a store with leases deletes the key when the process ends. When the
group calls `admit`, its rank 0 invites the processes that ask. A process that answers at once is admitted, and is told
the handles of all ranks and the uuid of their rendezvous.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from ncclpy.bootstrap.rank_rendezvous import set_while_alive
from ncclpy.bootstrap.store import Store, StoreDamaged, StoreError
from ncclpy.bootstrap.store_arguments import decode
from ncclpy.errors import NcclError, NcclTimeout, seconds

__all__ = ["Admitter", "Joiner"]

#: Seconds after which a joining process asks once more, and seconds for invited processes to answer.
_SLICE = 0.5
_ANSWER_TIMEOUT = 1.0


class _JoinKeys:
    """The keys by which one group is joined.

    The joining process sets ``asks`` (its request) and ``answers`` (its answer to the invitation); rank 0 of the group
    sets ``invited`` and ``replies`` (the reply).
    """

    def __init__(self, store: Store, name: str) -> None:
        self.store = store
        self.prefix = f"ncclpy/joining/{quote(name, safe='')}"

    def key(self, what: str, number: str) -> str:
        return f"{self.prefix}/{what}/{number}"

    def forget(self, number: str) -> None:
        with contextlib.suppress(StoreError, NcclTimeout):
            for what in ("asks", "invited", "answers", "replies"):
                self.store.delete(self.key(what, number))


class Joiner(_JoinKeys):
    """A process that asks to join a group.

    Parameters
    ----------
    store
        The store that the group was made with.
    name
        The group's name.
    handle
        The handle of this process's own group, which has one rank.
    check
        How this process compares collectives; the same on all ranks.
    """

    def __init__(self, store: Store, name: str, handle: str, check: str = "off") -> None:
        super().__init__(store, name)
        self.name, self.handle, self.check = name, handle, check
        self.number = f"{store.add(f'{self.prefix}/number'):012d}"

    def wait(self, timeout: float) -> tuple[list[str], str]:
        """Wait until the group admits this process.

        Return the handles of all ranks, by rank, and the uuid of their rendezvous. Raises ValueError if the group has
        another `check`, NcclError if it has refused this process, NcclTimeout if it has not replied in time.
        """
        deadline = time.monotonic() + timeout
        try:
            self._await("invited", deadline, timeout)
            self._put("answers", b"")
            reply_packed = self._await("replies", deadline, timeout)
            reply = decode(_unpack_reply, reply_packed, self.store, self.key("replies", self.number), 0)
        finally:
            self.forget(self.number)
        if "other" in reply:
            raise ValueError(
                f"check: this process has passed {self.check!r}, the ranks of process group {self.name!r} have passed "
                f"{reply['other']!r}; all must pass the same value"
            )
        if "failed" in reply:
            raise NcclError(f"process group {self.name!r} has not admitted this process: {reply['failed']}")
        if self.handle not in reply["handles"]:
            raise NcclError(
                f"process group {self.name!r} has admitted others, and not this process, which it had invited"
            )
        return reply["handles"], reply["uuid"]

    def _put(self, what: str, value: bytes) -> None:
        set_while_alive(self.store, self.key(what, self.number), value)

    def _await(self, what: str, deadline: float, timeout: float) -> bytes:
        while True:
            left = deadline - time.monotonic()
            if what == "invited":  # in each round: rank 0 deletes the request of a process that has not answered
                self._put("asks", f"{self.handle} {self.check}".encode())
            try:
                return self.store.get(self.key(what, self.number), max(0.0, min(_SLICE, left)))
            except NcclTimeout:
                if left <= 0:
                    raise NcclTimeout(
                        f"process group {self.name!r} has not admitted this process within {seconds(timeout)}: its "
                        f"ranks have to call admit(); or there is none of that name in {self.store}"
                    ) from None


def _unpack_request(packed: bytes) -> tuple[str, str]:
    """Return the handle and the `check` of a process that asks to join."""
    handle, joiner_check = packed.decode().split(" ")
    if joiner_check not in ("off", "first", "always"):
        raise ValueError(f"{joiner_check!r} is not a value of check")
    return handle, joiner_check


def _unpack_reply(packed: bytes) -> dict[str, Any]:
    """Return the reply of rank 0 of the group to a process that asks to join."""
    reply = json.loads(packed)
    for word in ("other", "failed"):
        if word in reply:
            return {word: str(reply[word])}
    return {"handles": list(map(str, reply["handles"])), "uuid": str(reply["uuid"])}


class Admitter(_JoinKeys):
    """Rank 0 of a group, which admits the processes that ask."""

    def invite(self, timeout: float, wanted: Callable[[], bool], check: str = "off") -> dict[str, str]:
        """Invite the processes that ask; return the handles of those that answer, by number.

        They have a second to answer, and `timeout` seconds at most.

        A process with another `check` than these ranks is not admitted, and is told why: the process and the ranks
        would wait for each other.
        """
        request_keys = self.store.keys(self.key("asks", ""))
        numbers = [key.rpartition("/")[2] for key in request_keys]
        if not numbers:
            return {}
        self.store.multi_set([(self.key("invited", number), b"") for number in numbers])
        deadline = time.monotonic() + min(timeout, _ANSWER_TIMEOUT)
        answer_keys = [self.key("answers", number) for number in numbers]
        while wanted() and (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(NcclTimeout):
                self.store.wait(answer_keys, min(_SLICE, left))
                break
        joiners = {}
        for number in numbers:
            request = self.store.compare_set(self.key("asks", number), None, None)[1]
            if request is not None and self.store.check([self.key("answers", number)]):
                try:
                    handle, joiner_check = decode(_unpack_request, request, self.store, self.key("asks", number))
                except StoreDamaged as error:
                    self._tell({number: ""}, {"failed": str(error)})
                    continue
                if joiner_check == check:
                    joiners[number] = handle
                else:
                    self._tell({number: handle}, {"other": check})
            else:  # the process is gone, or has not answered and will ask again
                self.store.delete(self.key("invited", number))
                self.store.delete(self.key("asks", number))
        return joiners

    def welcome(self, joiners: dict[str, str], handles: list[str], uuid: str) -> None:
        """Tell the processes that are admitted the handles of all ranks, and the uuid of the rendezvous."""
        self._tell(joiners, {"handles": handles, "uuid": uuid})

    def refuse(self, joiners: dict[str, str], why: str) -> None:
        """Tell the processes that they are not admitted."""
        with contextlib.suppress(StoreError, NcclTimeout):
            self._tell(joiners, {"failed": why})

    def _tell(self, joiners: dict[str, str], what: object) -> None:
        for number in joiners:
            self.store.delete(self.key("asks", number))  # so no later admission invites this process
            self.store.set(self.key("replies", number), json.dumps(what).encode())
