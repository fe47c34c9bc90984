"""Files that dumps are written to by themselves: their names, and how they appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import re
import socket

from ncclpy.engine.recorder import dump

__all__ = ["check_signs", "fill_in", "write"]

_SIGNS = "%r (rank), %p (process id), %h (host name) and %% (a percent sign)"


def check_signs(variable: str, pattern: str) -> None:
    """Raise ValueError if a pattern has a sign that stands for nothing."""
    for found in re.findall("%(.?)", pattern, re.DOTALL):
        if found not in ("r", "p", "h", "%"):
            raise ValueError(f"{variable}={pattern!r}: {'%' + found!r} stands for nothing; there are {_SIGNS}")


def fill_in(pattern: str, rank: str) -> str:
    """Return the path that a pattern stands for in this process."""
    values = {"r": rank, "p": str(os.getpid()), "h": socket.gethostname(), "%": "%"}
    return re.sub("%(.)", lambda found: values[found[1]], pattern)


def write(path: str, reason: str) -> None:
    """Write a dump, whole or not at all; its folder is made if it is not there.

    Raises
    ------
    OSError
        If it cannot be written; nothing is left of it then.
    """
    unfinished = f"{path}.{os.getpid()}.unfinished"
    os.makedirs(os.path.dirname(path), exist_ok=True)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unfinished)  # of a process that had this number
        made = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)  # follows no link
        with open(made, "w", encoding="utf-8") as file:
            file.write(dump(reason=reason))
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise
