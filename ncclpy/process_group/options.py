"""Options of a group, what hooks are told of an operation, and how a process ends with its group."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ncclpy.core.arguments.config import Config
from ncclpy.engine import recorder
from ncclpy.engine.launcher import abort_in_background
from ncclpy.engine.recorder import text_of
from ncclpy.engine.unread_failures import EXIT_CODE
from ncclpy.errors import NcclAborted, NcclError, peer_error_class
from ncclpy.peers.confirmation import EXIT_PATIENCE, TELL_TIMEOUT

if TYPE_CHECKING:
    from ncclpy.process_group.group_status import GroupStatus

__all__ = [
    "Completion",
    "abort_when_confirmed",
    "agree_on_exit",
    "check_name",
    "check_options",
    "end_process",
    "has_ended",
    "was_ended_by",
]


_log = logging.getLogger("ncclpy.process_group")

_CHECK = ("off", "first", "always")
_ON_ERROR = ("abort", "exit", "exit_now", "report")


def check_name(name: object) -> None:
    """Raise ValueError for a name that a group cannot have."""
    if type(name) is not str or not name:
        raise ValueError(f"name: expected a text of at least one character, got {name!r:.80}")


def check_options(config: object, on_error: object, check: object) -> None:
    """Raise TypeError or ValueError for options that a group cannot be made with."""
    if config is not None and not isinstance(config, Config):
        raise TypeError(f"config: expected an ncclpy.Config, got {type(config).__name__}")
    if config is not None and config.blocking is not None and not config.blocking:
        raise ValueError("config: a process group does not block anyway; leave blocking unset")
    if on_error not in _ON_ERROR:
        raise ValueError(f"on_error: expected one of {', '.join(map(repr, _ON_ERROR))}, got {on_error!r}")
    if check not in _CHECK:
        raise ValueError(f"check: expected one of {', '.join(map(repr, _CHECK))}, got {check!r}")


@dataclass(frozen=True)
class Completion:
    """Describe an operation of a process group that has ended.

    Attributes
    ----------
    rank
        The rank in the group.
    group
        The group's name.
    operation
        Its name, such as ``"all_reduce"``; for a coalesced group, the name of its first operation.
    seq
        Its number among the group's collectives; for sends and receives, among those of its communicator.
    count, nbytes
        Elements, as NCCL counts them, and bytes of the buffer that determines its size; summed for a coalesced group.
    created, launched, completed
        Times, in seconds of the clock of `time.monotonic`; None for steps that did not happen.
    duration
        Seconds on the device, None unless the group was made with ``timing=True``.
    error
        Its error; None if it has succeeded.
    """

    rank: int
    group: str
    operation: str
    seq: int
    count: int
    nbytes: int
    created: float
    launched: float | None
    completed: float | None
    duration: float | None
    error: BaseException | None


def has_ended(name: str, failure: BaseException, kind: type[NcclError] = NcclAborted) -> NcclError:
    """Return the error for calls on a group that has ended, with what its ranks did then.

    Parameters
    ----------
    name
        The group's name.
    failure
        The error that has ended it. If its text begins with the group's name, the result still names the group once.
        If its `_owner_error` is set, the group belongs to another object, and that error is returned: users do not
        know the group.
    kind
        The class of the error.
    """
    owner_error: NcclError | None = getattr(failure, "_owner_error", None)
    if owner_error is not None:
        return owner_error
    group, text = f"process group {name!r}", text_of(failure)
    if not text.startswith(f"{group} has ended: "):
        if text.startswith(f"{group}: "):
            text = text[len(group) + 2 :]
        elif text.startswith((f"{group} was ", f"{group} is ")):
            text = f"it{text[len(group) :]}"
        text = f"{group} has ended: {text}"
    error = kind(text)
    error.ranks = getattr(failure, "ranks", None)
    error.__cause__ = failure
    return error


def was_ended_by(name: str, text: str, summary: str | None, kind: str) -> NcclError:
    """Return the error of a group that another rank has ended, with the reason and what all ranks did then.

    `kind` is the name of the class that the other rank has raised. The error has the class that `peer_error_class`
    returns for it.
    """
    group = f"process group {name!r}"
    text = text.replace(f": {group}: ", ": ", 1).replace(f" of {group}", "", 1)
    return peer_error_class(kind)(f"{group} was ended by {text}{'. ' + summary if summary else ''}")


def abort_when_confirmed(
    group_status: GroupStatus,
    telling: threading.Thread | None,
    comms: list[Any],
    reason: str,
    tell_readers: Callable[[], object] | None,
) -> None:
    """Abort a group's communicators once all ranks are told of the end and have confirmed it, or cannot confirm it.

    Before that, `tell_readers` raises the error in the threads that wait for the group by a stream.
    """
    if telling is not None:
        telling.join(TELL_TIMEOUT)
    if tell_readers is not None:
        tell_readers()  # the error may end the program
    group_status.confirm()
    if group_status.wait_until_confirmed(None if comms else 0.0) and comms:
        abort_in_background(comms, reason).join()


def agree_on_exit(
    group_status: GroupStatus,
    telling: threading.Thread | None,
    tell_timeout: float,
    handle: str,
    rank: int,
    outcome: list[bool],
) -> None:
    """Confirm the end of a group before this process ends; add True to `outcome` if the group continues instead.

    The group of this handle continues if it has ended only to be reconfigured. `telling` is the thread that tells the
    others of the end.
    """
    try:
        if telling is not None:
            telling.join(tell_timeout)
            if group_status.was_reconfigured_with(handle):
                outcome.append(True)
                return
        group_status.confirm()
        group_status.wait_until_confirmed(EXIT_PATIENCE)  # this process may serve the store, where the others read why
    except Exception:  # the process ends in any case
        _log.debug("rank %d could not wait until the other ranks knew of the end", rank, exc_info=True)


def end_process(rank: int, name: str, on_error: str, error: BaseException) -> None:
    """End this process, as `on_error` asks for."""
    try:
        # Not sys.stderr: torch's exception hook replaces it while it shows an exception.
        with open(2, "w", errors="backslashreplace", closefd=False) as stderr:
            stderr.write(
                f"ncclpy: rank {rank} of process group {name!r} ends its process with status {EXIT_CODE}, as "
                f"on_error={on_error!r} says: {text_of(error)}\n"
            )
            if on_error == "exit":
                stderr.write(recorder.dump(reason=text_of(error)))
    finally:  # stderr may be closed, or full
        os._exit(EXIT_CODE)
