"""Packages use only packages of lower layers, and modules only those that docs/design.md lists before them.

The layers are in layers.toml, the order of each package's modules in the tree that docs/design.md shows.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from .source import Problem, imports, python_sources

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest and mypy bring it

LAYERS = Path("tools/checks/layers.toml")
DESIGN = Path("docs/design.md")
#: The package's own __init__.py and what else lies beside the packages: the public names.
PUBLIC = "ncclpy"


def check(root: Path) -> Iterator[Problem]:
    """Yield each import of what is not below, and each package or module without a place."""
    known = tomllib.loads((root / LAYERS).read_text())
    layers = known["layers"]
    yield from _without_a_layer(root, layers)
    for path in python_sources(root):
        yield from _not_below(root, path, layers, known["public"]["users"])
    for package in known["modules"]["ordered"]:
        yield from _not_in_order(root, package)


def _without_a_layer(root: Path, layers: dict[str, int]) -> Iterator[Problem]:
    package = root / "ncclpy"
    found = {path.relative_to(package).parts[0] for path in python_sources(root) if path.parent != package}
    for name in sorted(found - layers.keys()):
        yield Problem(package / name, 1, f"has no layer: give it one in {LAYERS} and {DESIGN}")
    for name in sorted(layers):
        if not (package / name).is_dir() and not (package / f"{name}.py").exists():
            yield Problem(root / LAYERS, 1, f"names {name}, which is no part of ncclpy")


def _not_below(root: Path, path: Path, layers: dict[str, int], users: list[str]) -> Iterator[Problem]:
    inside = path.relative_to(root / "ncclpy").parts
    package = inside[0] if len(inside) > 1 else path.stem if path.stem in layers else PUBLIC
    if package == PUBLIC or package not in layers:
        return
    found = imports(root, path)
    for line, name in found:
        parts = name.split(".")
        if not parts[0]:
            yield Problem(path, line, f"cimports {name}: cimports are absolute")
        if parts[0] != "ncclpy":
            continue
        used = parts[1] if len(parts) > 1 and parts[1] in layers else PUBLIC
        if used == package or (used == PUBLIC and package in users):
            continue
        if parts == ["ncclpy"] and any(other.name.startswith("ncclpy.") for other in found):
            continue  # the parent of `from ncclpy import core`, not the public names
        if used == PUBLIC:
            yield Problem(path, line, f"{package} uses {name}, which is one of the public names")
        elif layers[used] >= layers[package]:
            yield Problem(
                path, line, f"{package} (layer {layers[package]}) uses {used} (layer {layers[used]}): {name}"
            )


def modules_in_order(root: Path, package: str) -> list[str]:
    """Return the modules of a package as docs/design.md lists them, each before those that are built on it."""
    tree = re.search(r"^```\nncclpy/\n(.*?)^```$", (root / DESIGN).read_text(), re.MULTILINE | re.DOTALL)
    lines = tree and re.search(rf"^  {package}/.*\n((?:^ {{10,}}.*\n)+)", tree[1], re.MULTILINE)
    if not lines:
        return []
    named = re.findall(r"^ {26}(\w+(?:, \w+)*,?)(?:\.h(?:pp)?)?(?=  |$)", lines[1], re.MULTILINE)
    return [name for names in named for name in re.split(", ?", names) if name]


def _not_in_order(root: Path, package: str) -> Iterator[Problem]:
    order = modules_in_order(root, package)
    folder = root / "ncclpy" / package
    paths = [path for path in python_sources(root) if path.parent == folder and path.stem != "__init__"]
    for path in paths:
        if path.stem not in order:
            yield Problem(path, 1, f"is not in the tree of {DESIGN}: name it there, before the modules built on it")
            continue
        for line, name in imports(root, path):
            parts = name.split(".")
            if parts[:2] != ["ncclpy", package] or parts[2:3] == []:
                continue
            if parts[2] in order and order.index(parts[2]) > order.index(path.stem):
                yield Problem(path, line, f"uses {name}, which {DESIGN} lists after {path.stem}")
    for name in sorted(set(order) - {path.stem for path in paths}):
        yield Problem(root / DESIGN, 1, f"lists {name} as a module of {package}, which has none of that name")
