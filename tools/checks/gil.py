"""No driver call that can wait is made with the GIL held.

While memory is returned to a device, as NCCL's destroy and abort do, the driver admits no other call until all work on
the device has ended: recording, querying or making an event waits too. Some of that work may end only by an abort, and
the thread that aborts needs the GIL.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from .source import Problem, sources

#: Driver calls that read or set only thread-local or constant state.
AT_ONCE = re.compile(
    r"cuCtx(Get|Set)Current|cuCtxGetDevice|cuDevice(Get|Can|Total)\w*|cuDriverGetVersion|cuGetError\w+|"
    r"cuThreadExchangeStreamCaptureMode|cuStreamIsCapturing|cuPointerGetAttribute"
)
#: The comment above a call that holds the GIL on purpose, when the monitor's thread has ended.
AT_EXIT = "any thread may be here then, and nothing else guards"


def check(root: Path) -> Iterator[Problem]:
    """Yield each driver call outside of ``with nogil`` blocks and ``nogil`` functions."""
    for path in sources(root, "pyx"):
        lines = path.read_text().split("\n")
        for number, line in enumerate(lines):
            for name in re.findall(r"driver\.(cu\w+)\(", line):
                if not AT_ONCE.fullmatch(name) and AT_EXIT not in lines[number - 1] and not _is_free(lines, number):
                    yield Problem(path, number + 1, f"calls {name} with the GIL held, and may wait there")


def _is_free(lines: list[str], number: int) -> bool:
    """Return whether a line runs without the GIL, by the less indented lines above it."""
    indent = len(lines[number]) - len(lines[number].lstrip())
    for before in reversed(lines[:number]):
        outer = len(before) - len(before.lstrip())
        if not before.strip() or outer >= indent:
            continue
        indent = outer
        if re.match(r"\s*with nogil:", before):
            return True
        if re.match(r"\s*(cp?def|def|class)\b|\) ", before):
            return bool(re.search(r"\bnogil\s*:", before))
    return False
