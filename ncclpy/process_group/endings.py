"""What is said of the end of a process group, and how a process ends that asked for that."""

from __future__ import annotations

import os

from ncclpy.core.errors import NcclAborted, NcclError, same_class_as
from ncclpy.engine import recorder
from ncclpy.engine.recorder import text_of

__all__ = ["end_process", "has_ended", "was_ended_by"]

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
