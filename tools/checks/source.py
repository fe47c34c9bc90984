"""Shared by all checks: a finding, and the files of the package and their imports."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # a dependency of pytest and mypy

#: The layers, and the limits on modules.
LAYERS = Path("tools/checks/layers.toml")


class Problem(NamedTuple):
    """One finding."""

    path: Path
    line: int
    message: str


class Import(NamedTuple):
    """A dotted name that a file imports or cimports."""

    line: int
    name: str


def settings(root: Path) -> dict[str, Any]:
    """Return the content of layers.toml."""
    return tomllib.loads((root / LAYERS).read_text())


def sources(root: Path, *suffixes: str) -> list[Path]:
    """Return the package's files with these suffixes; raise if there are none, as nothing would be checked."""
    found = sorted(path for suffix in suffixes for path in (root / "ncclpy").rglob(f"*.{suffix}"))
    if not found:
        raise FileNotFoundError(f"no files {', '.join(suffixes)} below {root / 'ncclpy'}")
    return found


def python_sources(root: Path) -> list[Path]:
    """Return all Python and Cython files."""
    return sources(root, "py", "pyx", "pxd", "pyi")


def imports(root: Path, path: Path) -> list[Import]:
    """Return the imports and cimports of a .py, .pyx, .pxd or .pyi file; of ``from a import b`` both a and a.b."""
    text = path.read_text()
    if path.suffix in (".py", ".pyi"):
        return sorted(set(_python_imports(ast.parse(text), path.relative_to(root).parts)))
    return sorted(set(_cython_imports(text)))


def _python_imports(tree: ast.AST, parts: tuple[str, ...]) -> Iterator[Import]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*parts[: -node.level], *filter(None, [base])])
            yield Import(node.lineno, base)
            yield from (Import(node.lineno, f"{base}.{alias.name}") for alias in node.names)


def _cython_imports(text: str) -> Iterator[Import]:
    text = re.sub(r"#.*", "", text)
    for found in re.finditer(r"^[ \t]*from\s+([\w.]+)\s+c?import\s+(?:\(([^)]*)\)|([^\n]*))", text, re.MULTILINE):
        line, base = 1 + text.count("\n", 0, found.start()), found[1]
        yield Import(line, base)
        yield from (
            Import(line, f"{base}.{name.split()[0]}") for name in (found[2] or found[3]).split(",") if name.split()
        )
    for found in re.finditer(r"^[ \t]*c?import\s+([^\n]+)", text, re.MULTILINE):
        line = 1 + text.count("\n", 0, found.start())
        yield from (Import(line, name.split()[0]) for name in found[1].split(",") if name.split())
