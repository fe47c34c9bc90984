"""Groups and communicators of this process: for dumps, and for ranks that ask where a missing rank is.

Dumps list process groups only. `elsewhere`, from which a rank's status is made, also searches communicators that are
registered by `note_communicator`.

The operations in a dump are from the recorder. The list of groups shows in addition the ranks that have begun no
operation, and the groups that ended before their first operation.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any

from ncclpy.core.handles.handle import failure_listener
from ncclpy.engine.recorder import add_group_source, text_of

__all__ = ["GroupInfo", "KnownGroup", "elsewhere", "note_communicator", "note_group"]

#: How many failed groups are kept.
_MAX_FAILED = 50

# Weak: an entry is freed with its group, even if the group's ranks have never met and it was not closed.
_entries: weakref.WeakValueDictionary[int, GroupInfo] = weakref.WeakValueDictionary()
_failed: deque[KnownGroup] = deque(maxlen=_MAX_FAILED)


class GroupInfo:
    """One rank of this process in a communicator or process group.

    Parameters
    ----------
    name
        The name of the communicator or group.
    rank
        The rank in the communicator or group.
    device
        The device of that rank.
    look
        Returns the rank's status in the communicator or group, as published to the other ranks.
    """

    kind = "communicator"

    def __init__(self, name: str, rank: int, device: int, look: Callable[[], dict[str, Any]]) -> None:
        self.name, self.rank, self.device, self.look = name, rank, device, look


class KnownGroup(GroupInfo):
    """One group of this process, as dumps show it.

    Parameters
    ----------
    name
        The group's name.
    number
        Which group of this name it is; each rank counts from 1.
    rank, size
        The rank in the group and the number of ranks.
    device
        The device of that rank.
    look
        Returns the rank's status in the group, as published to the other ranks.
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
        #: By how much rank 0's clock is ahead of this process's, see `process_group.clocks`; None in rank 0's process,
        #: and if that was not measured.
        self.clock: dict[str, Any] | None = None

    def failed(self, error: BaseException) -> None:
        """Note what has ended the group, once; in any thread that holds no lock. It does not wait."""
        if self.ended is not None:
            return
        self.ended = monotonic()
        self._error = _words_of(error)
        _failed.append(self)
        self._remove()
        listener = failure_listener()
        if listener is not None:
            listener.failed(error, wait=False, ended=True)

    def troubled(self, error: BaseException) -> None:
        """Have a dump written, since an operation has failed while the group continues. It does not wait."""
        listener = failure_listener()
        if listener is not None:
            listener.failed(error, wait=False)

    def wait(self) -> None:
        """Wait until the dump is written, as the process is about to end; for two seconds at most."""
        listener = failure_listener()
        if listener is not None:
            listener.finish()

    def closed(self) -> None:
        """Forget a closed group, but keep one that has failed in the dumps."""
        self._remove()

    def _remove(self) -> None:
        _entries.pop(id(self), None)
        self.look = dict  # an entry that stays for dumps must not keep the group alive

    def as_dict(self) -> dict[str, Any]:
        """Return the entry as a dump has it: JSON's types only."""
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
    """Return an error's class name and text, without its traceback, which refers to the user's arrays."""
    return type(error).__name__, error.args[0] if error.args else ""


def note_group(
    name: str, number: int, rank: int, size: int, device: int, look: Callable[[], dict[str, Any]]
) -> KnownGroup:
    """Register a group."""
    made = KnownGroup(name, number, rank, size, device, look)
    _entries[id(made)] = made
    listener = failure_listener()
    if listener is not None:
        listener.note_rank(size, rank)
    return made


def note_communicator(name: str, rank: int, device: int, look: Callable[[], dict[str, Any]]) -> GroupInfo:
    """Register a rank of a communicator for as long as the returned object lives."""
    made = GroupInfo(name, rank, device, look)
    _entries[id(made)] = made
    return made


def groups() -> list[dict[str, Any]]:
    """Return the groups that exist, and those that have failed, in the order in which they were made."""
    return [each.as_dict() for each in sorted(_known(), key=lambda each: each.made)]


def elsewhere(here: GroupInfo) -> dict[str, Any]:
    """Return what has occupied this rank for the longest time in another group or communicator; {} if nothing has.

    The rank is in no operation of `here`. If this process has several ranks of `here`, each is looked for only in the
    groups and communicators on its own device. An operation that was launched and may be done does not occupy a rank.
    """
    others = [each for each in _live_entries() if each is not here]
    shared = any(each.name == here.name and each.rank != here.rank for each in others)
    found = []
    for each in others:
        if not shared or each.device == here.device:
            status = each.look()
            if status.get("current") is not None and not status.get("launched"):
                kept = {"in_other_group": each.name, "kind": each.kind}
                found.append({**kept, "current": status["current"], "since": status["since"]})
            elif "in_rendezvous" in status:
                where = f"{status['in_rendezvous']} of {each.kind} {each.name!r}"
                found.append({"in_rendezvous": where, "since": status["since"]})
    return min(found, key=lambda one: float(one["since"]), default={})


def _live_entries() -> list[GroupInfo]:
    entries = [reference() for reference in _entries.valuerefs()]  # in one step: another thread may add a group
    return [each for each in entries if each is not None]


def _known() -> list[KnownGroup]:
    return [*list(_failed), *(each for each in _live_entries() if isinstance(each, KnownGroup))]


def _forked() -> None:
    """Forget the parent's groups in a forked child: none of them works there."""
    _entries.clear()
    _failed.clear()


add_group_source(groups, _failed.clear)
os.register_at_fork(after_in_child=_forked)
