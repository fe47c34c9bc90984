"""Comments, docstrings and pages name what acts, and use the words of docs/glossary.md; tests say what they test.

Three things are checked, with limits in layers.toml: how often words of `AGENTS` stand for what acts, by a thousand
words of an area's comments, docstrings and pages; names of earlier trees that the glossary has replaced; and
names of tests that begin with such a word instead of a subject.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .source import LAYERS, Problem, settings

#: Words that hide what acts.
AGENTS = re.compile(
    r"\b(?:who|whom|whose|whoever|nobody|somebody|anybody|everybody|someone|anyone|everyone|himself)\b"
    r"|\b(?:of|for) ours\b",
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
#: Code in a page.
_CODE = re.compile(r"^(```|~~~|:::).*?^\1[ \t]*$|`[^`\n]*`", re.MULTILINE | re.DOTALL)

_OF_PYTHON = (".py", ".pyx", ".pxd", ".pyi")
_OF_C = (".c", ".cpp", ".h", ".hpp")


class Passage(NamedTuple):
    """A comment, a docstring or the text of a page."""

    line: int
    text: str


def passages(path: Path) -> Iterator[Passage]:
    """Yield the prose of a file."""
    text = path.read_text()
    if path.suffix == ".md":
        yield Passage(1, _CODE.sub(lambda found: "\n" * found[0].count("\n"), text))
        return
    python = path.suffix in _OF_PYTHON
    for found in (_PYTHON if python else _NATIVE).finditer(text):
        before = text[text.rfind("\n", 0, found.start()) + 1 : found.start()]
        if found["comment"] or (python and found["long"] and not before.strip()):
            yield Passage(1 + text.count("\n", 0, found.start()), found[0])


def files(root: Path, area: str) -> Iterator[Path]:
    """Yield the files of an area, a folder or one file, that have prose."""
    for path in sorted((root / area).rglob("*")) if (root / area).is_dir() else [root / area]:
        if path.suffix in (*_OF_PYTHON, *_OF_C, ".md") and "__pycache__" not in path.parts:
            yield path


def check(root: Path) -> Iterator[Problem]:
    """Yield areas with too many such words, and each place of a replaced name or of a test without a subject."""
    limits = settings(root)["prose"]
    for area in limits["areas"]:
        words = agents = 0
        for passage in (each for path in files(root, area) for each in passages(path)):
            words += len(_WORD.findall(passage.text))
            agents += len(AGENTS.findall(passage.text))
        rate = 1000 * agents / max(1, words)
        if rate > limits["agents"]:
            text = f"{area}: {rate:.2f} of 1,000 words hide what acts, see AGENTS; {limits['agents']} may"
            yield Problem(root / LAYERS, 1, text)
    replaced = re.compile(rf"\b(?:{'|'.join(limits['replaced'])})\b")
    for path in (each for area in limits["areas"] for each in files(root, area)):
        if path.name not in limits["history"]:
            yield from _found(path, replaced, "{}: docs/glossary.md has another word for it")
    names = re.compile(rf"\bdef (test_(?:{'|'.join(limits['tests'])})_\w*)")
    for path in (each for each in files(root, "tests") if each.name not in limits["history"]):
        yield from _found(path, names, "{}: a test's name is subject_condition_expectation")


def _found(path: Path, pattern: re.Pattern[str], message: str) -> Iterator[Problem]:
    for number, line in enumerate(path.read_text().split("\n"), 1):
        for found in pattern.finditer(line):
            yield Problem(path, number, message.format(found[found.lastindex or 0]))
