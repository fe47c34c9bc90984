"""Write docs/reference, the API reference as Markdown: python -m tools.reference [--check].

Each page of docs/api becomes a page of docs/reference with the same name and prose; each autodoc directive becomes a
signature with types and the docstring. Types come from the stub, or from the source where there is no stub; docstrings
and default values come from the source. Nothing is imported, so that the package need not be built.

With --check nothing is written: each page that differs is named, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from docs.nccl_pages import link_to_nvidia
from tools.api_sources import Function, Node, Sources, Thing, annotation, text_of

ROOT = Path(__file__).resolve().parent.parent
API, REFERENCE = Path("docs/api"), Path("docs/reference")
#: A longer signature has one parameter a line.
WIDTH = 98
NOTE = "<!-- `python -m tools.reference` makes this page from {} and the docstrings. Change those. -->\n\n"
#: The end of the index page.
TYPES = """
## Types in signatures

Five types are `Any` for type checkers, because the objects belong to frameworks that ncclpy does not import:

- `BufferLike`: an array or another buffer of those that [`Communicator`](communicator.md) names.
- `StreamLike`: a stream object or a handle; [`Communicator`](communicator.md) says what None means.
- `DeviceLike`: the ordinal of a device, or an object with the attribute `device_id`.
- `DataTypeLike`: a `DataType`, its number or name, or a numpy dtype.
- `OpLike`: a `ReduceOp`, its name, or a `CustomOp`.

`SupportsIndex` is an int or an object with the method `__index__`.
"""

# Signatures.


def _defaults(node: Node | None) -> dict[str, str]:
    """Return the defaults of a function or the values of a class's fields, by name."""
    if isinstance(node, ast.ClassDef):
        fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
        return {ast.unparse(each.target): text_of(each.value) for each in fields if each.value}
    if not isinstance(node, Function):
        return {}
    plain = [*node.args.posonlyargs, *node.args.args]
    values = [*zip(reversed(plain), reversed(node.args.defaults), strict=False)]
    values += [(each, value) for each, value in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if value]
    return {each.arg: text_of(value) for each, value in values}


def parameters(sources: Sources, thing: Thing) -> list[str]:
    """Return the parameters of a function, without self or cls, with types and defaults."""
    node = thing.node
    assert isinstance(node, Function)
    defaults, known = _defaults(node), _defaults(thing.source)

    def shown(each: ast.arg, stars: str = "") -> str:
        default = known.get(each.arg, "...") if defaults.get(each.arg) == "..." else defaults.get(each.arg)
        if default and re.fullmatch(r"_\w+|[A-Z_]+", default):
            default = sources.constant(thing.module, default) or ("..." if default.startswith("_") else default)
        words = f"{stars}{each.arg}" + (f": {annotation(each.annotation)}" if each.annotation else "")
        return words if default is None else f"{words} = {default}" if each.annotation else f"{words}={default}"

    args = node.args
    found = [*map(shown, args.posonlyargs), *["/"] * bool(args.posonlyargs), *map(shown, args.args)]
    found = found[found[:1] in (["self"], ["cls"]) :]
    found += [shown(args.vararg, "*")] if args.vararg else ["*"] * bool(args.kwonlyargs)
    return [*found, *map(shown, args.kwonlyargs), *([shown(args.kwarg, "**")] if args.kwarg else [])]


def constructor(sources: Sources, thing: Thing) -> list[str] | None:
    """Return the parameters of a class, which may be its fields; None if programs do not make it."""
    node = thing.node
    assert isinstance(node, ast.ClassDef)
    if thing.has("dataclass") or "NamedTuple" in map(ast.unparse, node.bases):
        keywords = ["*"] * any("kw_only=True" in ast.unparse(each) for each in node.decorator_list)
        fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
        known = _defaults(node) | _defaults(thing.source)
        return keywords + [_field(each, known.get(ast.unparse(each.target))) for each in fields]
    members = sources.members(thing, inherited=True)
    for name in ("__init__", "__new__"):
        if (function := members.get(name)) and (function.stub or not thing.stub):
            found = parameters(sources, function)
            return None if any("NoReturn" in each for each in found) else found
    return None


def _field(node: ast.AnnAssign, default: str | None) -> str:
    """Return a field of a record as a parameter."""
    words = f"{ast.unparse(node.target)}: {annotation(node.annotation)}"
    if default and (found := re.match(r"(?:dataclasses\.)?field\(default=(\(\)|[^,()]+)", default)):
        default = found[1]
    elif default == "..." and words.endswith("| None"):  # a stub; the source calls a function to make the field
        default = "None"
    return f"{words} = {default}" if default else words


def signature(sources: Sources, thing: Thing, name: str) -> tuple[str, dict[str, str]]:
    """Return a signature without self and cls, one for each overload, and the types of the parameters by name."""
    if thing.overloads:
        variants = [signature(sources, Thing(thing.module, thing.source, each), name) for each in thing.overloads]
        names = {each: {types.get(each) for _, types in variants} for _, types in variants for each in types}
        same = {each: found.pop() or "" for each, found in names.items() if len(found) == 1}
        return "\n\n".join(f"@overload\n{text}" for text, _ in variants), same
    node, end = thing.node, ""
    if isinstance(node, ast.AnnAssign) or thing.is_attribute:
        return f"{name}: {thing.type}", {}
    if isinstance(node, ast.ClassDef):
        start, found = f"class {name}", constructor(sources, thing)
        if _is_special(sources, thing) and "__init__" not in sources.members(thing, inherited=False):
            found = [text_of(base).rpartition(".")[2] for base in node.bases]
    else:
        start = "".join(f"@{each}\n" for each in ("classmethod", "staticmethod") if thing.has(each))
        start += ("async " if isinstance(node, ast.AsyncFunctionDef) else "") + f"def {name}"
        found = parameters(sources, thing)
        end = f" -> {annotation(node.returns)}" if node.returns else ""
    types = {each.partition(":")[0].lstrip("*"): each.partition(": ")[2].partition(" = ")[0] for each in found or ()}
    line = "" if found is None else f"({', '.join(found)}){end}"
    if found and len(start.rpartition("\n")[2] + line) > WIDTH:
        line = "(\n" + "".join(f"    {each},\n" for each in found) + f"){end}"
    return start + line, types


def _is_special(sources: Sources, thing: Thing) -> bool:
    """Return whether a class is an enum or an exception: its bases say more than its constructor."""
    assert isinstance(thing.node, ast.ClassDef)
    known = any(re.search(r"(?:Enum|Flag|Error|Exception)$", text_of(base)) for base in thing.node.bases)
    return known or any(_is_special(sources, base) for base in sources.bases(thing))


# Docstrings as Markdown.


def inline(text: str) -> str:
    """Return a paragraph as one line: roles and double backquotes become code, C functions links; `name` stays."""
    text = re.sub(r":(?:\w+:)*\w+:`~?([^`<]*?)(?: <[^`]*>)?`", r"`\1`", " ".join(text.split()))
    text = re.sub(r"``([^`]+)``", r"`\1`", link_to_nvidia(text))
    text = re.sub(r"`(\w+) <([^`>]+)>`__", r"[`\1`](\2)", text)
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"(?=[<*])", r"\\", part) for part in parts)


def prose(text: str) -> str:
    """Return paragraphs, lists, definitions and programs as Markdown."""
    blocks = []
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        if block.lstrip().startswith(">>>"):
            blocks.append(f"```pycon\n{inspect.cleandoc(block)}\n```")
        elif block.startswith("- "):
            blocks.append("\n".join(f"- {inline(each)}" for each in re.split(r"^- ", block, flags=re.MULTILINE)[1:]))
        elif re.match(r"\S[^\n]*\n {4}", block):
            blocks.append("\n".join(item(code(head), body) for head, body in definitions(block)))
        else:
            blocks.append(inline(block))
    return "\n\n".join(blocks)


def definitions(text: str) -> Iterator[tuple[str, str]]:
    """Yield each head of a definition list with the indented text below it."""
    for part in re.split(r"\n(?=\S)", text.strip("\n")):
        head, _, body = part.partition("\n")
        yield head, inspect.cleandoc(body)


def item(head: str, body: str) -> str:
    """Return one item of a list, on one line unless its text has several paragraphs."""
    return re.sub(r"\n(?=.)", "\n  ", f"- {head}: {prose(body)}") if body.strip() else f"- {head}"


def code(names: str) -> str:
    """Return names that stand between commas as code."""
    return ", ".join(f"`{name.strip()}`" for name in names.split(","))


def sections(docstring: str) -> list[tuple[str, str]]:
    """Return the title and the text of each section; the title of the first is empty."""
    parts = re.split(r"^([A-Z][\w ]*)\n-{3,}$", docstring, flags=re.MULTILINE)
    return [*zip(["", *parts[1::2]], parts[0::2], strict=True)]


def typed(text: str, types: dict[str, str]) -> Iterator[str]:
    """Yield the items of a list of parameters or attributes; a type is in the docstring's words, else the stub's."""
    for head, body in definitions(text):
        names, _, words = head.partition(" : ")
        known = {types.get(name.strip(" *"), "") for name in names.split(",")}
        words = inline(words) if words else f"`{known.pop()}`" if len(known) == 1 and "" not in known else ""
        yield item(code(names) + f" ({words})" * bool(words), body)


# Pages.


class Pages:
    """The pages of one tree."""

    def __init__(self, root: Path) -> None:
        self.root, self.sources = root, Sources(root)

    def all(self) -> dict[Path, str]:
        """Return the text of each page by its path below the root."""
        found = sorted((self.root / API).glob("*.md"))
        if not found:
            raise FileNotFoundError(f"no pages in {self.root / API}")
        return {REFERENCE / path.name: self.page(path.name) for path in found}

    def page(self, name: str) -> str:
        """Return the page of the reference for a page of docs/api."""
        text = (self.root / API / name).read_text()
        text = re.sub(r"^```\{toctree\}\n.*?^```\n", "", text, flags=re.MULTILINE | re.DOTALL)
        parts = re.split(r"^```\{eval-rst\}\n(.*?)^```\n", text, flags=re.MULTILINE | re.DOTALL)
        told = ""
        for index in range(1, len(parts), 2):
            module, made = self._block(parts[index])
            parts[index] = made if module == told else f"Module: `{module}`\n\n{made}"
            told = module
        end = TYPES if name == "index.md" else ""
        text = re.sub(r"\n{3,}", "\n\n", "".join(parts)).rstrip()
        return f"{NOTE.format((API / name).as_posix())}{text}\n{end}"

    def _block(self, block: str) -> tuple[str, str]:
        """Return the module of a block of directives, and the block as Markdown."""
        module, made = "", []
        for kind, name, text in re.findall(r"^\.\. (\w+):: (\S+)\n((?: +\S.*\n)*)", block, re.MULTILINE):
            options = dict(re.findall(r"^ +:([\w-]+):((?:.*\n)(?: {5,}.*\n)*)", text, re.MULTILINE))
            wanted = [each.strip() for each in options.get("members", "").split(",") if each.strip()]
            if kind in ("currentmodule", "automodule"):
                module = name
                made += [prose(self.sources.module_docstring(name)) + "\n"] if kind == "automodule" else []
                made += [self.entry(f"{module}.{each}", each) for each in wanted]
            else:
                full = name if name.startswith("ncclpy.") else f"{module}.{name}"
                members = wanted if "members" in options else None
                made.append(self.entry(full, name, members, inherited="inherited-members" in options))
        return module, "\n".join(made)

    def entry(self, full: str, name: str, wanted: list[str] | None = None, *, inherited: bool = False) -> str:
        """Return a public name as Markdown.

        Parameters
        ----------
        full, name : str
            The dotted name with its module, and as it is shown.
        wanted : list of str, optional
            The members to show of a class, all if it is empty; by default none.
        inherited : bool
            Whether the members of base classes are among all.
        """
        thing = self.sources.find(full)
        if thing is None:
            raise LookupError(f"{full} is in docs/api, but not in the sources")
        if not isinstance(thing.node, ast.ClassDef):
            return self._described(thing, self.sources.find(full.rpartition(".")[0]), name, "###")
        members = self.sources.members(thing, inherited=inherited or bool(wanted))
        shown = {each: members[each] for each in wanted or members if wanted is not None and not each.startswith("_")}
        made = [self._described(thing, None, name, "###", shown)]
        for each, member in shown.items():
            if not member.is_attribute and self.sources.docstring(member, thing, each):
                made.append(self._described(member, thing, f"{name.rpartition('.')[2]}.{each}", "####"))
        return "\n".join(made)

    def _described(
        self, thing: Thing, owner: Thing | None, name: str, mark: str, members: dict[str, Thing] | None = None
    ) -> str:
        short = name.rpartition(".")[2]
        line, types = signature(self.sources, thing, short)
        docstring = self.sources.docstring(thing, owner, short)
        if not docstring:
            raise LookupError(f"{name} is in docs/api, but has no docstring")
        made = [f"{mark} `{name}`", f"```python\n{line}\n```"]
        attributes: list[str] = []
        if isinstance(thing.node, ast.ClassDef):
            every = self.sources.members(thing, inherited=True)
            types |= {each: member.type for each, member in every.items() if member.is_attribute}
            attributes = [*self._attributes(thing, docstring, members or {}), *_constants(thing)]
        for title, text in sections(docstring):
            if title in ("Parameters", "Attributes"):
                body = "\n".join([*typed(text, types), *(attributes if title == "Attributes" else ())])
                attributes = [] if title == "Attributes" else attributes
            elif title in ("Raises", "Returns"):
                shown = code if title == "Raises" else inline
                body = "\n".join(item(shown(head), words) for head, words in definitions(text))
            else:
                body = prose(text)
            made.append(f"**{title}**\n\n{body}" if title else body)
        return "\n\n".join([*made, *(["**Attributes**\n\n" + "\n".join(attributes)] if attributes else [])]) + "\n"

    def _attributes(self, thing: Thing, docstring: str, members: dict[str, Thing]) -> Iterator[str]:
        """Yield the attributes among the members that the class's own docstring does not list."""
        lists = [text for title, text in sections(docstring) if title in ("Parameters", "Attributes")]
        heads = [head.partition(" : ")[0] for text in lists for head, _ in definitions(text)]
        told = {name.strip() for head in heads for name in head.split(",")}
        fields = [each.partition(":")[0] for each in constructor(self.sources, thing) or ()]
        for name, member in members.items():
            words = sections(self.sources.docstring(member, thing, name))[0][1]
            in_signature = isinstance(member.node, ast.AnnAssign) and name in fields
            if member.is_attribute and name not in told and not in_signature:
                yield item(f"`{name}`" + f" (`{member.type}`)" * bool(member.type), words)


def _constants(thing: Thing) -> Iterator[str]:
    """Yield the members of an enum."""
    node = thing.node
    if isinstance(node, ast.ClassDef) and any(re.search(r"(?:Enum|Flag)$", ast.unparse(base)) for base in node.bases):
        yield from (f"- `{ast.unparse(each)}`" for each in node.body if isinstance(each, ast.Assign))


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Write the pages; with --check, name those that differ and return 1 if there are any."""
    parser = argparse.ArgumentParser(prog="python -m tools.reference", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; name the pages that differ")
    check = parser.parse_args(arguments).check
    pages = Pages(root).all()
    there = {path.relative_to(root): path.read_text() for path in (root / REFERENCE).glob("*.md")}
    different = sorted(path for path in {*pages, *there} if pages.get(path) != there.get(path))
    for path in different:
        if check:
            print(f"{path}: is not what python -m tools.reference writes")
        elif path in pages:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(pages[path])
        else:
            (root / path).unlink()
    print(f"{len(pages)} pages, {len(different)} {'differ' if check else 'written'}")
    return 1 if check and different else 0


if __name__ == "__main__":
    sys.exit(main())
