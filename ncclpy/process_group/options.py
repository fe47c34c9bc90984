"""What a group may be asked to do, what hooks are told of an operation, and how a process ends with its group."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ncclpy.core.arguments.config import Config
from ncclpy.engine import recorder
from ncclpy.engine.recorder import text_of
from ncclpy.errors import NcclAborted, NcclError, same_class_as

__all__ = [
    "Completion",
    "check_name",
    "check_options",
    "end_process",
    "has_ended",
    "was_ended_by",
]


_CHECK = ("off", "first", "always")
_ON_ERROR = ("abort", "exit", "exit_now", "report")


def check_name(name: object) -> None:
    """Raise ValueError for what cannot be a group's name."""
    if type(name) is not str or not name:
        raise ValueError(f"name: expected a text of at least one character, got {name!r:.80}")


def check_options(config: object, on_error: object, check: object) -> None:
    """Raise TypeError or ValueError for what a group cannot be made with."""
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
    """Tell of an operation of a process group that has come to its end.

    Attributes
    ----------
    rank
        The rank in the group.
    group
        The group's name.
    operation
        Its name, such as ``"all_reduce"``; of a coalesced group that of its first.
    seq
        Its number among the group's collectives or, if it is point to point, among those of its communicator.
    count, nbytes
        Elements, as NCCL counts them, and bytes of the buffer that says its size; of a coalesced group their sum.
    created, launched, completed
        When, in seconds of the clock of `time.monotonic`; None for what did not happen.
    duration
        Seconds on the device, None unless the group was made with ``timing=True``.
    error
        What has become of it; None if it has succeeded.
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


#: With which a process ends whose group has failed, if it asked for that.
_EXIT_CODE = 70


def has_ended(name: str, failure: BaseException, kind: type[NcclError] = NcclAborted) -> NcclError:
    """Return the error of who uses a group that has ended, with what its ranks did then.

    Parameters
    ----------
    name
        The group's.
    failure
        What has ended it; its text may begin with the group as well, which is named once.
    kind
        The class.
    """
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


def was_ended_by(name: str, text: str, said: str | None, kind: str) -> NcclError:
    """Return the error of a group that another rank has ended, which says so and why; and what all did then.

    It is of the class that the other rank has raised, `kind`, if that says what has happened.
    """
    group = f"process group {name!r}"
    text = text.replace(f": {group}: ", ": ", 1).replace(f" of {group}", "", 1)
    return same_class_as(kind)(f"{group} was ended by {text}{'. ' + said if said else ''}")


def end_process(rank: int, name: str, on_error: str, error: BaseException) -> None:
    """End this process, as `on_error` asks for."""
    try:
        # Not sys.stderr: torch's hook for exceptions puts another one there while it shows one.
        with open(2, "w", errors="backslashreplace", closefd=False) as stderr:
            stderr.write(
                f"ncclpy: rank {rank} of process group {name!r} ends its process with status {_EXIT_CODE}, as "
                f"on_error={on_error!r} says: {text_of(error)}\n"
            )
            if on_error == "exit":
                stderr.write(recorder.dump(reason=text_of(error)))
    finally:  # stderr may be closed, or full
        os._exit(_EXIT_CODE)
