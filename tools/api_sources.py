"""Read classes, functions and docstrings from .py, .pyx and .pyi files, without importing or building anything."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

Function = ast.FunctionDef | ast.AsyncFunctionDef
Node = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.AnnAssign

# Reading Cython.

_LONG = r"""\"{3}(?:\\.|[^\\])*?\"{3}|'{3}(?:\\.|[^\\])*?'{3}"""
_STRING = rf"""[rRbBuU]{{0,2}}(?:{_LONG}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')"""
_PIECE = re.compile(
    rf"""{_STRING} | \#[^\n]*
    | ^(?P<indent>[ ]*)(?:
        (?P<decorator>@(?:property|classmethod|staticmethod|(?:dataclasses\.)?dataclass\b[^\n]*))$
        | (?:cdef[ ]+)?(?P<kind>class|(?:async[ ]+)?def)[ ]+(?P<name>\w+)
        | cpdef[ ][\w., \[\]*]*?\b(?P<both>\w+)(?=\())
    | ^(?:cdef[ ]+[\w.]+[ ]+)?(?P<constant>_?[A-Z]\w*[ ]=[ ][-\w.]+)$""",
    re.VERBOSE | re.MULTILINE | re.DOTALL,
)
_TOKEN = re.compile(rf"{_STRING}|\#[^\n]*|[][(){{}},:]", re.DOTALL)


def skeleton(text: str) -> str:
    """Return a Cython source as Python: its classes and functions with docstrings, its simple constants, no code."""
    lines = [found[0]] if (found := re.match(_STRING, text, re.DOTALL)) else []
    decorators: list[str] = []
    position, owner = 0, -1  # the indentation of the class around
    while found := _PIECE.search(text, position):
        position, indent, name = found.end(), found["indent"] or "", found["name"] or found["both"]
        if found["constant"]:
            lines.append(found["constant"])
        elif found["decorator"]:
            decorators.append(indent + found["decorator"])
        if not name:
            continue
        kind = found["kind"] or "def"
        arguments, position = _header(text, position)
        owner = owner if len(indent) > owner else -1
        if len(indent) == (0 if owner < 0 else owner + 4):  # not a function of a function
            if kind == "class":
                owner = len(indent)
            else:
                arguments = [_without_type(each) for each in arguments]
            lines += [*decorators, f"{indent}{kind} {name}({', '.join(arguments)}):"]
            if docstring := re.compile(rf"[^\n]*\n\s*({_STRING})", re.DOTALL).match(text, position):
                lines.append(f"{indent}    {docstring[1]}")
                position = docstring.end()
            lines.append(f"{indent}    pass")
        decorators = []
    return "\n".join(lines) + "\n"


def _header(text: str, start: int) -> tuple[list[str], int]:
    """Return the parameters or bases that follow a name, and the position after the colon that ends the header."""
    parts: list[str] = []
    depth, begin = 0, start + 1
    for token in _TOKEN.finditer(text, start):
        depth += (token[0] in "([{") - (token[0] in ")]}")
        if token[0] == ":" and depth == 0:
            return [each for part in parts if (each := re.sub(r"#[^\n]*", "", part).strip())], token.end()
        if (token[0] == "," and depth == 1) or (token[0] == ")" and depth == 0):
            parts.append(text[begin : token.start()])
            begin = token.end()
    raise SyntaxError(f"no colon ends the header that begins with {text[start - 20 : start + 20]!r}")


def _without_type(parameter: str) -> str:
    declared, equals, default = parameter.partition("=")
    if re.match(r"[*/]|\w+\s*:", declared):
        return parameter
    return re.sub(r"\s+(?:or|not) None\s*$", "", declared).split()[-1] + equals + default


# Finding names.


class Thing(NamedTuple):
    """A class, function or attribute: its module, its nodes in the source and in the stub, its overloads."""

    module: str
    source: Node | None
    stub: Node | None
    overloads: tuple[Node, ...] = ()

    @property
    def node(self) -> Node:
        """Return the node that has the types."""
        node = self.stub or self.source
        assert node is not None
        return node

    def has(self, *decorators: str) -> bool:
        """Return whether it has one of these decorators."""
        marks = [] if isinstance(self.node, ast.AnnAssign) else self.node.decorator_list
        return any(ast.unparse(each).partition("(")[0].rpartition(".")[2] in decorators for each in marks)

    @property
    def is_attribute(self) -> bool:
        """Return whether it is a field or a property."""
        return isinstance(self.node, ast.AnnAssign) or self.has("property", "cached_property")

    @property
    def type(self) -> str:
        """Return the type of an attribute."""
        assert not isinstance(self.node, ast.ClassDef)
        return annotation(self.node.annotation if isinstance(self.node, ast.AnnAssign) else self.node.returns)


class Sources:
    """The modules below a folder; each is read when it is first needed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._trees: dict[str, list[ast.Module]] = {}

    def trees(self, module: str) -> list[ast.Module]:
        """Return the trees of a module's source and stub; a missing file has an empty tree, a missing module none."""
        if module not in self._trees:
            path = self.root.joinpath(*module.split("."))
            path = path / "__init__" if path.is_dir() else path
            files = [path.with_name(f"{path.name}.{ending}") for ending in ("py", "pyx", "pyi")]
            plain, cython, stub = (file.read_text() if file.exists() else "" for file in files)
            exists = any(file.exists() for file in files)
            self._trees[module] = [ast.parse(plain or skeleton(cython)), ast.parse(stub)] if exists else []
        return self._trees[module]

    def find(self, name: str) -> Thing | None:
        """Return what a dotted name such as ncclpy.Communicator.init stands for; None if there is no such name."""
        parts = name.split(".")
        for length in range(len(parts) - 1, 0, -1):
            if self.trees(module := ".".join(parts[:length])):
                found = self._of_module(module, parts[length])
                for part in parts[length + 1 :]:
                    found = self.members(found, inherited=True).get(part) if found else None
                return found
        return None

    def module_docstring(self, module: str) -> str:
        """Return the docstring of a module."""
        return ast.get_docstring(self.trees(module)[0]) or ""

    def _of_module(self, module: str, name: str) -> Thing | None:
        found: tuple[list[Node], list[Node]] = ([], [])
        for index, tree in enumerate(self.trees(module)):
            for node in _statements(tree):
                if isinstance(node, ast.ClassDef | Function) and node.name == name:
                    found[index].append(node)
                elif isinstance(node, ast.ImportFrom):
                    names = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
                    if names.get(name, f"{module}.{name}") != f"{module}.{name}":  # else it is a module
                        return self.find(names[name])
                elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
                    return self.find(f"{module}.{ast.unparse(node.value)}")
        return _thing(module, *found) if any(found) else None

    def constant(self, module: str, name: str) -> str | None:
        """Return the value of a module's constant as source; None for one that is not plain."""
        for node in _statements(self.trees(module)[0]):
            if isinstance(node, ast.ImportFrom) and name in [alias.asname or alias.name for alias in node.names]:
                return self.constant(node.module, name) if node.module and self.trees(node.module) else None
            if isinstance(node, ast.Assign):
                targets, values = [node.targets[0]], [node.value]
                if isinstance(targets[0], ast.Tuple) and isinstance(values[0], ast.Tuple):
                    targets, values = targets[0].elts, values[0].elts
                for target, value in zip(targets, values, strict=True):
                    if ast.unparse(target) == name and isinstance(value, ast.Constant | ast.Attribute | ast.BinOp):
                        return text_of(value)
        return None

    def bases(self, thing: Thing) -> list[Thing]:
        """Return the base classes of a class, without those of other packages."""
        names = map(ast.unparse, thing.node.bases) if isinstance(thing.node, ast.ClassDef) else ()
        return [base for name in names if (base := self.find(f"{thing.module}.{name}")) and base != thing]

    def members(self, thing: Thing, *, inherited: bool) -> dict[str, Thing]:
        """Return the methods and attributes of a class in the order of the source, then those of its bases."""
        found: dict[str, tuple[list[Node], list[Node]]] = {}
        for index, side in enumerate((thing.source, thing.stub)):
            for node in side.body if isinstance(side, ast.ClassDef) else ():
                if isinstance(node, Function | ast.AnnAssign):
                    name = ast.unparse(node.target) if isinstance(node, ast.AnnAssign) else node.name
                    name = "__new__" if name == "__cinit__" else name
                    found.setdefault(name, ([], []))[index].append(node)
        members = {name: _thing(thing.module, *nodes) for name, nodes in found.items()}
        for base in self.bases(thing) if inherited else ():
            for name, each in self.members(base, inherited=True).items():
                members.setdefault(name, each)
        return members

    def docstring(self, thing: Thing, owner: Thing | None, name: str) -> str:
        """Return a docstring without the signature before Cython's; a method without one has that of its base."""
        for node in (thing.source, thing.stub):
            if node and not isinstance(node, ast.AnnAssign) and (text := ast.get_docstring(node, clean=False)):
                return inspect.cleandoc(re.sub(r"\A\s*\w+\([^\n]*\n--\n\n", "", text).rstrip())
        for base in self.bases(owner) if owner else ():
            if inherited := self.members(base, inherited=False).get(name):
                return self.docstring(inherited, base, name)
        return ""


def _thing(module: str, source: list[Node], stub: list[Node]) -> Thing:
    """Return what nodes of one name are: overloads with or without a function, or a property before its setter."""
    overloads = tuple(each for each in stub or source if Thing(module, each, None).has("overload"))
    plain = [each for each in source if each not in overloads]
    return Thing(module, plain[0] if plain else None, stub[0] if stub else None, overloads)


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements of a module, also those below an if or a try."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If | ast.Try):
            yield from _statements(node)
        elif isinstance(node, ast.stmt):
            yield node


def text_of(node: ast.expr) -> str:
    """Return an expression as source, with double quotes."""
    text = ast.unparse(node)
    return text if '"' in text else text.replace("'", '"')


def annotation(node: ast.expr | None) -> str:
    """Return a type as source; one that is written as a string stands without its quotes."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return text_of(node) if node else ""
