"""What is compiled for tests of several files, or of several processes of pytest: once in a run."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path


def built_once(factory, name: str, build: Callable[[Path], object]) -> Path:
    """Return a folder that ``build(folder)`` has filled, by whichever process of this run came first.

    `factory` is the fixture ``tmp_path_factory``.
    """
    base = factory.getbasetemp()
    if base.name.startswith("popen-gw"):  # one of several processes that run tests, whose folders lie side by side
        base = base.parent
    folder = base / name
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            build(folder)
            (folder / "done").touch()
    return folder
