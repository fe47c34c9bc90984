"""Packages use only packages of lower layers, also by imports from strings, and no modules import each other.

The layers are in layers.toml, in which a new package needs a line, but a new module does not. A folder of a package
may have a layer of its own ("core.calls"); all other modules have the package's layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from .source import LAYERS, Import, Problem, imports, python_sources, settings

#: The public names: the package's own __init__.py and the modules beside the packages.
PUBLIC = "ncclpy"
_BY_NAME = re.compile(r"""(?:import_module|__import__)\(f?["'](ncclpy\b[\w.]*)""")


def check(root: Path) -> Iterator[Problem]:
    """Yield each import from a layer that is not lower, and each package or module without a layer."""
    known = settings(root)
    layers = known["layers"]
    yield from _without_a_layer(root, layers)
    used = {path: [*imports(root, path), *_by_name(path)] for path in python_sources(root)}
    for path, found in used.items():
        yield from _not_below(root, path, found, layers, known["public"]["users"])
    yield from _circles(root, used)


def _without_a_layer(root: Path, layers: dict[str, int]) -> Iterator[Problem]:
    package = root / "ncclpy"
    found = {path.relative_to(package).parts[0] for path in python_sources(root) if path.parent != package}
    for name in sorted(found - layers.keys()):
        yield Problem(package / name, 1, f"has no layer: give it one in {LAYERS}")
    for name in sorted(layers):
        place = package.joinpath(*name.split("."))
        if not place.is_dir() and not place.with_suffix(".py").exists():
            yield Problem(root / LAYERS, 1, f"names {name}, which is no part of ncclpy")


def _not_below(
    root: Path, path: Path, found: list[Import], layers: dict[str, int], users: list[str]
) -> Iterator[Problem]:
    package = _part_of(_module_of(root, path), layers)
    if package == PUBLIC:
        return
    for line, name in found:
        parts = name.split(".")
        if not parts[0]:
            yield Problem(path, line, f"cimports {name}: cimports are absolute")
        if parts[0] != "ncclpy":
            continue
        used = _part_of(name, layers)
        if used == package or (used == PUBLIC and package in users):
            continue
        if parts == ["ncclpy"] and any(other.line == line and other.name.startswith("ncclpy.") for other in found):
            continue  # `ncclpy` of `from ncclpy import core`, not the public names
        if used == PUBLIC:
            yield Problem(path, line, f"{package} uses {name}, which is one of the public names")
        elif layers[used] >= layers[package]:
            yield Problem(
                path, line, f"{package} (layer {layers[package]}) uses {used} (layer {layers[used]}): {name}"
            )


def _by_name(path: Path) -> Iterator[Import]:
    """Yield the imports of a file from strings; of an f-string the part before its first field."""
    for line, text in enumerate(path.read_text().splitlines(), 1):
        yield from (Import(line, found[1].rstrip(".")) for found in _BY_NAME.finditer(text))


def _part_of(name: str, layers: dict[str, int]) -> str:
    """Return the part of the package that has a layer and contains a dotted name, or `PUBLIC`."""
    parts = name.split(".")[1:]
    prefixes = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next((prefix for prefix in prefixes if prefix in layers), PUBLIC)


def _circles(root: Path, imported: dict[Path, list[Import]]) -> Iterator[Problem]:
    """Yield each set of modules that import each other, directly or through others of the set."""
    paths = {path: _module_of(root, path) for path in imported}
    names = set(paths.values()) - {PUBLIC}  # the public names are from all packages, and testing uses them
    used: dict[str, set[str]] = {name: set() for name in (*names, PUBLIC)}
    for path, name in paths.items():
        found = [each for each in imported[path] if each.name in names]
        used[name] |= {
            each.name
            for each in found  # leaves out the package of `from package import module`
            if not any(other.line == each.line and other.name.startswith(f"{each.name}.") for other in found)
        } - {name}
    places = {name: path for path, name in paths.items()}
    for circle in _strongly_connected(used):
        yield Problem(places[circle[0]], 1, f"imports itself over others: {', '.join(circle)}")


def _module_of(root: Path, path: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _strongly_connected(used: dict[str, set[str]]) -> list[list[str]]:
    """Return the sets of more than one module that reach each other, each sorted."""

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        left = [start]
        while left:
            new = used[left.pop()] - found
            found |= new
            left.extend(new)
        return found

    over = {name: reached(name) for name in used}
    circles = {
        tuple(sorted(other for other in over[name] if name in over[other])) for name in over if name in over[name]
    }
    return sorted(list(circle) for circle in circles if len(circle) > 1)
