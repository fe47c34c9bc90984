"""What this process's groups are: for dumps, and for those who ask where a rank is that is in none of its operations.

For the latter its communicators too, as far as they can be asked what they do.

A dump has its operations from the recorder. A rank that has begun none is in it all the same by this, and so is one
whose group has ended before it could begin any.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any

from ncclpy.core.handles.handle import failure_listener
from ncclpy.engine.recorder import add_group_teller, text_of

__all__ = ["Known", "KnownGroup", "elsewhere", "note_communicator", "note_group"]

#: So many groups are kept in mind after they have failed.
_FAILED = 50

# They go with their groups, also with those that were never whole.
_there: weakref.WeakValueDictionary[int, Known] = weakref.WeakValueDictionary()
_failed: deque[KnownGroup] = deque(maxlen=_FAILED)


class Known:
    """What a rank of this process may be in an operation of: a communicator, or a group.

    Parameters
    ----------
    name
        Its name.
    rank
        Which rank of it this is.
    device
        Whose that is.
    look
        Returns what the rank does in it, as it is told to the others.
    """

    kind = "communicator"

    def __init__(self, name: str, rank: int, device: int, look: Callable[[], dict[str, Any]]) -> None:
        self.name, self.rank, self.device, self.look = name, rank, device, look


class KnownGroup(Known):
    """One group of this process, as dumps tell of it.

    Parameters
    ----------
    name
        The group's.
    number
        Which group of this name it is, for each rank counted from 1.
    rank, size
        Which of how many this is.
    device
        Whose it is.
    look
        Returns what the rank does, as it is told to the others.
    """

    kind = "process group"

    def __init__(
        self, name: str, number: int, rank: int, size: int, device: int, look: Callable[[], dict[str, Any]]
    ) -> None:
        super().__init__(name, rank, device, look)
        self.number, self.size = number, size
        self.made = monotonic()
        self.ended: float | None = None
        self._error: tuple[str, object] | None = None
        #: How far the clock of rank 0 is ahead of this process's, if it is another one, and was asked.
        self.clock: dict[str, Any] | None = None

    def failed(self, error: BaseException) -> None:
        """Note what has ended the group, once; in any thread that holds no lock, and nothing waits here."""
        if self.ended is not None:
            return
        self.ended = monotonic()
        self._error = _words_of(error)
        _failed.append(self)
        self._go()
        listener = failure_listener()
        if listener is not None:
            listener.failed(error, wait=False, ended=True)

    def troubled(self, error: BaseException) -> None:
        """Tell that an operation has failed, and that the group goes on; nothing waits here."""
        listener = failure_listener()
        if listener is not None:
            listener.failed(error, wait=False)

    def wait(self) -> None:
        """Let the dump be written, as the process is about to end; this takes two seconds at most."""
        listener = failure_listener()
        if listener is not None:
            listener.finish()

    def closed(self) -> None:
        """Forget a group that was closed; one that has failed is told of all the same."""
        self._go()

    def _go(self) -> None:
        _there.pop(id(self), None)
        self.look = dict  # what is told of it longer keeps nothing of it

    def as_dict(self) -> dict[str, Any]:
        """Return it as a dump has it: JSON's types only."""
        error = self._error
        return {
            "name": self.name,
            "number": self.number,
            "rank": self.rank,
            "size": self.size,
            "made": self.made,
            "ended": self.ended,
            "clock": self.clock,
            "error": None if error is None else f"{error[0]}: {text_of(error[1])}",
        }


def _words_of(error: BaseException) -> tuple[str, object]:
    """Return what an error is and says, without what hangs on it: frames, and arrays of the user."""
    return type(error).__name__, error.args[0] if error.args else ""


def note_group(
    name: str, number: int, rank: int, size: int, device: int, look: Callable[[], dict[str, Any]]
) -> KnownGroup:
    """Have a group known from now on."""
    made = KnownGroup(name, number, rank, size, device, look)
    _there[id(made)] = made
    listener = failure_listener()
    if listener is not None:
        listener.named(size, rank)
    return made


def note_communicator(name: str, rank: int, device: int, look: Callable[[], dict[str, Any]]) -> Known:
    """Have a rank of a communicator known as long as what is returned lives."""
    made = Known(name, rank, device, look)
    _there[id(made)] = made
    return made


def groups() -> list[dict[str, Any]]:
    """Return the groups that are there, and those that have failed, in the order in which they were made."""
    return [each.as_dict() for each in sorted(_known(), key=lambda each: each.made)]


def elsewhere(here: Known) -> dict[str, Any]:
    """Return what a rank does that is in nothing of a group or communicator: what keeps it longest in another, or {}.

    Where several of its ranks are in this process, each is known by its device. What was launched and may be done
    keeps no rank.
    """
    others = [each for each in _there_now() if each is not here]
    shared = any(each.name == here.name and each.rank != here.rank for each in others)
    found = []
    for each in others:
        if not shared or each.device == here.device:
            told = each.look()
            if told.get("current") is not None and not told.get("launched"):
                kept = {"elsewhere": each.name, "kind": each.kind}
                found.append({**kept, "current": told["current"], "since": told["since"]})
            elif "meets" in told:
                found.append({"meets": f"{told['meets']} of {each.kind} {each.name!r}", "since": told["since"]})
    return min(found, key=lambda one: float(one["since"]), default={})


def _there_now() -> list[Known]:
    there = [reference() for reference in _there.valuerefs()]  # in one step, whoever makes groups meanwhile
    return [each for each in there if each is not None]


def _known() -> list[KnownGroup]:
    return [*list(_failed), *(each for each in _there_now() if isinstance(each, KnownGroup))]


def _forked() -> None:
    """In the child no group of the parent's works."""
    _there.clear()
    _failed.clear()


add_group_teller(groups, _failed.clear)
os.register_at_fork(after_in_child=_forked)
