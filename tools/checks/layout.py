"""Folders and modules have readable sizes: not too many modules, not too many in a folder, few tiny ones.

`__init__` and `__main__`, which Python names, are not counted. The limits are in layers.toml. If the tree exceeds an
aim, the limit is today's number, which may fall but not rise.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from .source import LAYERS, Problem, settings, sources


def check(root: Path) -> Iterator[Problem]:
    """Yield each number that exceeds its limit in layers.toml."""
    limits = settings(root)["limits"]
    package = root / "ncclpy"
    extensions = sources(root, "pyx")
    yield from _compared(root, "extension modules", len(extensions), limits["extension_modules"])
    lines: dict[Path, int] = {}
    for path in sources(root, "py", "pyx", "pxd"):
        if path.stem not in ("__init__", "__main__"):
            lines[path.with_suffix("")] = lines.get(path.with_suffix(""), 0) + path.read_text().count("\n")
    tiny = sorted(str(path.relative_to(package)) for path, count in lines.items() if count < limits["tiny"])
    yield from _compared(
        root, f"modules of less than {limits['tiny']} lines ({', '.join(tiny)})", len(tiny), limits["tiny_modules"]
    )
    for folder in sorted({path.parent for path in lines}):
        name = str(folder.relative_to(package))
        count = sum(path.parent == folder for path in lines)
        if name in limits.get("folders", {}):
            yield from _compared(root, f"modules in {name}", count, limits["folders"][name])
        elif count > limits["folder"]:
            yield Problem(folder, 1, f"has {count} modules, more than {limits['folder']}")


def _compared(root: Path, what: str, count: int, limit: int) -> Iterator[Problem]:
    if count > limit:
        yield Problem(root / LAYERS, 1, f"there are {count} {what}, {limit} may be")
    elif count < limit:
        yield Problem(root / LAYERS, 1, f"there are only {count} {what}: lower the limit, which is {limit}")
