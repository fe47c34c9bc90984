"""Groups that begin in one call and end in another, as in CuPy and vLLM, over those of ncclpy."""

from __future__ import annotations

import threading

from ncclpy.core.calls.group import Group

__all__ = ["end", "start"]


class _Open(threading.local):
    """The groups that this thread has begun, the innermost last."""

    def __init__(self) -> None:
        self.groups: list[Group] = []


_open = _Open()


def start() -> None:
    """Begin a group of this thread; groups nest."""
    group = Group()
    group.__enter__()
    _open.groups.append(group)


def end(ending: str) -> None:
    """End the group that this thread has begun last; the end of the outermost one launches the calls of all.

    Parameters
    ----------
    ending
        The name of the call, for an error.

    Raises
    ------
    RuntimeError
        If this thread has no open group.
    """
    if not _open.groups:
        raise RuntimeError(f"{ending}: no group is open in this thread; begin and end a group in the same one")
    _open.groups.pop().__exit__(None, None, None)
