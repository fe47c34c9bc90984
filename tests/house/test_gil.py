"""No call of the driver that can wait is made with the GIL held.

Who gives memory back to a device, as a destroy and an abort of NCCL do, holds the driver up until all of it has ended,
and with it whoever records, asks or makes an event. What runs there may end by an abort alone, for which a thread has
to get the GIL.
"""

from __future__ import annotations

import re

import pytest
from paths import ROOT

#: They read or set what is the thread's or constant.
AT_ONCE = re.compile(
    r"cuCtx(Get|Set)Current|cuCtxGetDevice|cuDevice(Get|Can|Total)\w*|cuDriverGetVersion|cuGetError\w+|"
    r"cuThreadExchangeStreamCaptureMode|cuStreamIsCapturing|cuPointerGetAttribute"
)
#: Where any thread may be, once the monitor's has ended, and the GIL is all that guards.
AT_EXIT = "any thread may be here then, and nothing else guards"
SOURCES = sorted((ROOT / "ncclpy").rglob("*.pyx"))


def calls_with_the_gil(text):
    """Return the numbers of lines that call the driver outside of ``with nogil`` blocks and ``nogil`` functions."""
    lines, found = text.split("\n"), []
    for number, line in enumerate(lines):
        for name in re.findall(r"driver\.(cu\w+)\(", line):
            if AT_ONCE.fullmatch(name) or AT_EXIT in lines[number - 1]:
                continue
            indent, free = len(line) - len(line.lstrip()), False
            for before in reversed(lines[:number]):
                if not before.strip() or len(before) - len(before.lstrip()) >= indent:
                    continue
                indent = len(before) - len(before.lstrip())
                if re.match(r"\s*with nogil:", before):
                    free = True
                if re.match(r"\s*(cp?def|def|class)\b|\) ", before):
                    free = free or bool(re.search(r"\bnogil\s*:", before))
                    break
            if not free:
                found.append(number + 1)
    return found


def test_what_is_found():
    text = "def f():\n    {}driver.cuEventQuery(e)\n"
    assert calls_with_the_gil(text.format("")) == [2]
    assert calls_with_the_gil(text.format("with nogil:\n        ")) == []
    assert calls_with_the_gil(text.format("").replace("f()", "f() nogil")) == []
    assert calls_with_the_gil("cdef int f(\n    int a,\n) noexcept nogil:\n    driver.cuEventQuery(e)\n") == []
    assert calls_with_the_gil(text.format("with nogil:\n        g()\n    ")) == [4]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_driver_is_called_without_the_gil(path):
    found = calls_with_the_gil(path.read_text())
    assert not found, f"{path.relative_to(ROOT)}: lines {found} call the driver with the GIL held, and may wait there"
