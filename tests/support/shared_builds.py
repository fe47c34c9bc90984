"""Builds shared by tests of several files or processes of pytest, made once per run."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path


def built_once(factory, name: str, build: Callable[[Path], object]) -> Path:
    """Return a folder that ``build(folder)`` has filled, called in the first process of this run to need it.

    `factory` is the fixture ``tmp_path_factory``.
    """
    base = factory.getbasetemp()
    if base.name.startswith("popen-gw"):  # a worker of pytest-xdist: the workers' folders share a parent
        base = base.parent
    folder = base / name
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            build(folder)
            (folder / "done").touch()
    return folder
