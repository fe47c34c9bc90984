"""The Python stack of a thread as short text: for ranks that ask, for dumps, and for the message of an error.

Files are named and not read, so that a file system that hangs blocks nothing; local variables are not read.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from typing import Any

from ncclpy.core.runtime import wait

__all__ = ["as_stack", "in_short", "python_stack"]

#: The most bytes that a stack has as JSON, and the most frames: the innermost ones.
_BYTES, _FRAMES = 2048, 32
#: The most characters of a file's name, of which the end is kept, and of a function's.
_FILE, _FUNCTION = 200, 100
#: The most frames that `in_short` names for a sentence; and what the paths of libraries contain, and no others.
_SENTENCE_FRAMES = 3
_LIBRARY = re.compile(r"/lib/python\d|-packages/|^<frozen ")


def python_stack(thread: int | None = None) -> list[str]:
    """Return the frames of a thread, ``"train.py:41 in load"``, the innermost first and the outer ones cut.

    Parameters
    ----------
    thread
        Its identifier; by default, and where that thread has ended, the main thread.
    """
    main = threading.main_thread().ident or 0
    frame = wait.frame_of_thread(thread or main) or wait.frame_of_thread(main)
    if frame is not None and frame.f_code is python_stack.__code__:
        frame = frame.f_back
    found: list[str] = []
    while frame is not None:
        code = frame.f_code
        found.append(f"{code.co_filename[-_FILE:]}:{frame.f_lineno} in {code.co_name[:_FUNCTION]}")
        frame = frame.f_back if len(found) < _FRAMES else None
    return list(as_stack(found))


def as_stack(received: Any) -> tuple[str, ...]:
    """Return a stack that another process has sent, cut to the same bounds; empty if it is not a stack."""
    if not isinstance(received, (list, tuple)):
        return ()
    found, space = [], _BYTES
    for each in received[:_FRAMES]:
        if not isinstance(each, str):
            return ()
        line = "".join(character if character.isprintable() else "?" for character in each[: _FILE + _FUNCTION + 20])
        space -= len(json.dumps(line)) + 2
        if space < 0:
            break
        found.append(line)
    return tuple(found)


def in_short(stack: Sequence[str]) -> str:
    """Return the innermost frames for a sentence, with the last parts of their files' paths.

    The innermost frame is always named. Of the other frames those of libraries are left out, unless the program has
    none.
    """
    program = [each for each in stack[1:] if not _LIBRARY.search(each)]
    short = []
    for each in [*stack[:1], *(program or stack[1:])][:_SENTENCE_FRAMES]:
        path, colon, rest = each.rpartition(":")
        short.append("/".join(path.split("/")[-2:]) + colon + rest)
    return ", called by ".join(short)
