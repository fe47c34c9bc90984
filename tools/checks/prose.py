"""Comments, docstrings and pages name what acts, in the words of docs/glossary.md; names of tests say what is tested.

Checked are comments and docstrings of code, and pages without their code: how often who, nobody and the like stand for
what acts, by a thousand words of an area; and words and names of earlier trees that the glossary has replaced.
layers.toml has the limits. Where today's tree is above the aim, the limit is what it has: it may fall, not rise.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .source import LAYERS, Problem, settings

#: Words that hide what acts.
AGENTS = re.compile(
    r"\b(?:who|whom|whose|whoever|nobody|somebody|anybody|everybody|someone|anyone|everyone|himself|(?:of|for) ours)\b",
    re.IGNORECASE,
)
_WORD = re.compile(r"[A-Za-z][A-Za-z']*")

_PYTHON = re.compile(
    r"""(?P<comment>\#[^\n]*)
    | (?P<long>[rRbBuUfF]{0,2}(?:\"{3}(?:\\.|[^\\])*?\"{3}|'{3}(?:\\.|[^\\])*?'{3}))
    | (?P<short>[rRbBuUfF]{0,2}(?:"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'))""",
    re.VERBOSE | re.DOTALL,
)
_NATIVE = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)
    | (?P<long>R"\((?:.|\n)*?\)")
    | (?P<short>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])+')""",
    re.VERBOSE | re.DOTALL,
)
_FENCE = re.compile(r"^(```|~~~|:::).*?^\1[ \t]*$|`[^`\n]*`", re.MULTILINE | re.DOTALL)


class Passage(NamedTuple):
    """A comment, a docstring or the text of a page."""

    line: int
    text: str


def passages(path: Path) -> Iterator[Passage]:
    """Yield the prose of a file."""
    text = path.read_text()
    if path.suffix == ".md":
        yield Passage(1, _FENCE.sub(lambda found: "\n" * found[0].count("\n"), text))
        return
    python = path.suffix in (".py", ".pyx", ".pxd", ".pyi")
    for found in (_PYTHON if python else _NATIVE).finditer(text):
        before = text[text.rfind("\n", 0, found.start()) + 1 : found.start()]
        if found["comment"] or (python and found["long"] and not before.strip()):
            yield Passage(1 + text.count("\n", 0, found.start()), found[0])


def files(root: Path, area: str) -> Iterator[Path]:
    """Yield the files of an area that have prose."""
    suffixes = {".py", ".pyx", ".pxd", ".pyi", ".c", ".cpp", ".h", ".hpp", ".md"}
    for path in sorted((root / area).rglob("*")) if (root / area).is_dir() else [root / area]:
        if path.suffix in suffixes and "__pycache__" not in path.parts:
            yield path


def check(root: Path) -> Iterator[Problem]:
    """Yield the areas with too many such words, and each place of a name that the glossary has replaced."""
    limits = settings(root)["prose"]
    for area, limit in limits["agents"].items():
        words = agents = 0
        for path in files(root, area):
            for passage in passages(path):
                words += len(_WORD.findall(passage.text))
                agents += len(AGENTS.findall(passage.text))
        rate = 1000 * agents / max(1, words)
        if rate > limit:
            yield Problem(root / LAYERS, 1, f"{area}: {rate:.2f} of 1,000 words are who, nobody and the like; {limit} may be")
        elif rate < limit - 0.5:
            yield Problem(root / LAYERS, 1, f"{area}: only {rate:.2f} of 1,000 words: lower the limit, which is {limit}")
    replaced = re.compile(rf"\b(?:{'|'.join(limits['replaced'])})\b")
    for area in limits["agents"]:
        for path in files(root, area):
            if path.name not in limits["apart"]:
                yield from _found(path, replaced, "the glossary has another word for {}")
    names = re.compile(rf"\bdef (test_(?:{'|'.join(limits['tests'])})_\w*)")
    for path in files(root, "tests"):
        yield from _found(path, names, "{}: a test's name is subject_condition_expectation")


def _found(path: Path, pattern: re.Pattern[str], message: str) -> Iterator[Problem]:
    for number, line in enumerate(path.read_text().split("\n"), 1):
        for found in pattern.finditer(line):
            yield Problem(path, number, message.format(found[found.lastindex or 0]))
