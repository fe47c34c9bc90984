"""Native code includes neither Python nor CUDA, and the host engine has no cycle of includes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from .source import Problem, sources

#: Folders of C++ that are built and tested without Python.
NATIVE = ("host", "bootstrap/native")
#: A stream's tasks, the threads that run them and the graphs that record them are one unit in three files.
ONE_UNIT = {"worker_pool": "stream", "graph": "stream"}


def check(root: Path) -> Iterator[Problem]:
    """Yield each include of Python's or CUDA's headers, and each cycle of includes."""
    files = sources(root, "cpp", "hpp", "c", "h")
    for folder in NATIVE:
        inside = [path for path in files if path.is_relative_to(root / "ncclpy" / folder)]
        if not inside:
            raise FileNotFoundError(f"no C++ in ncclpy/{folder}")
        for path in inside:
            for line, header in _includes(path):
                if header in ("Python.h", "nccl.h") or header.startswith("cuda"):
                    yield Problem(path, line, f"includes {header}")
    yield from _circles_of_files(root / "ncclpy" / "host", files)


def _includes(path: Path) -> Iterator[tuple[int, str]]:
    for line, text in enumerate(path.read_text().splitlines(), 1):
        if found := re.match(r'\s*#\s*include\s*[<"]([^>"]+)', text):
            yield line, found[1]


def _circles_of_files(folder: Path, files: list[Path]) -> Iterator[Problem]:
    uses: dict[Path, dict[Path, tuple[Path, int]]] = {}  # unit -> units it includes -> the line of the include
    for path in files:
        if path.suffix not in (".cpp", ".hpp") or not path.is_relative_to(folder):
            continue
        for line, header in _includes(path):
            beside, below = (Path(os.path.normpath(place / header)) for place in (path.parent, folder))
            used = beside if beside in files else below
            if used.suffix == ".hpp" and used in files and _unit(used) != _unit(path):
                uses.setdefault(_unit(path), {}).setdefault(_unit(used), (path, line))
    for circle in circles({unit: set(used) for unit, used in uses.items()}):
        path, line = uses[circle[0]][circle[1]]
        names = " -> ".join(str(unit.relative_to(folder)) for unit in circle)
        yield Problem(path, line, f"includes in a circle: {names}")


def _unit(path: Path) -> Path:
    return path.with_name(ONE_UNIT.get(path.stem, path.stem))


def circles(uses: dict[Path, set[Path]]) -> list[list[Path]]:
    """Return the shortest cycle through each unit that has one."""
    found = []
    for start in uses:
        came_from = dict.fromkeys(uses[start], start)
        following = list(came_from)
        while following and start not in came_from:
            unit = following.pop(0)
            for used in uses.get(unit, ()):
                if used not in came_from:
                    came_from[used] = unit
                    following.append(used)
        if start in came_from:
            way = [start, came_from[start]]
            while way[-1] != start:
                way.append(came_from[way[-1]])
            found.append(way[::-1])
    return found
