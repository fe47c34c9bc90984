"""No object is used through a reference that another thread may release.

Cython calls ``self.member.method()``, for a method that Python does not see, without a reference of its own to the
member. If the method releases the GIL, even for one line of Python, another thread may set ``member`` to None, and the
object is freed during the call. So a member that is ever set to None is called through a local name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from .source import Problem, sources

CLASS = re.compile(r"cdef class (\w+)(?:\((\w+)\))?:")
MEMBER = re.compile(r"    cdef (?:readonly |public )?(_?[A-Z]\w*) (\w+(?:, \w+)*)$")
METHOD = re.compile(r"    cp?def [^(=]*?(\w+)\(self\b")
FUNCTION = re.compile(r"(?: {4})?(?:cdef|cpdef|def) [^=]*\(")
NAMED = re.compile(r"\b(_?[A-Z]\w*) (\w+)(?= not None|[,)=]| =|$)")
CALLED = re.compile(r"\b(\w+)\.(\w+)\.(\w+)\(")
SET_TO_NONE = re.compile(r"((?:[\w., ]+ = )+)(?:.*, )?None$")


def check(root: Path) -> Iterator[Problem]:
    """Yield each call through a member that is set to None somewhere."""
    texts = {path: path.read_text() for path in sources(root, "pxd", "pyx")}
    declared = Declared(texts)
    if not declared.given_up:
        raise ValueError("no member is set to None anywhere: the sources are not understood any more")
    for path, text in texts.items():
        for line, called in declared.borrowed(text):
            yield Problem(
                path, line, f"calls {called} of what may be set to None meanwhile: give it a local name first"
            )


class Declared:
    """The extension classes of some sources: the classes of members, and the members that are ever set to None."""

    def __init__(self, sources: dict[str, str]):
        self.bases: dict[str, str] = {}
        self.members: dict[str, dict[str, str]] = {}
        self.methods: set[str] = set()
        for text in sources.values():
            self._declare(text)
        self.given_up = {
            (self.declares(owner, member), member)
            for text in sources.values()
            for line, known in self.lines(text)
            if (found := SET_TO_NONE.search(line))
            for name, member in re.findall(r"([\w.]+)\.(\w+)", found[1])
            for owner in ([known[name]] if name in known else self.members)
        }

    def _declare(self, text: str):
        inside = ""
        for line in text.splitlines():
            line = line.split("  #")[0]
            if found := CLASS.match(line):
                inside = found[1]
                self.members.setdefault(inside, {})
                if found[2]:
                    self.bases[inside] = found[2]
            elif line and line[0] not in " #@":
                inside = ""
            elif inside and (found := MEMBER.match(line)):
                self.members[inside] |= dict.fromkeys(found[2].split(", "), found[1])
            elif inside and (found := METHOD.match(line)):
                self.methods.add(found[1])

    def declares(self, name: str, member: str) -> str:
        """Return which of a class and its bases has the member, '' if none."""
        while name and member not in self.members.get(name, {}):
            name = self.bases.get(name, "")
        return name

    def lines(self, text: str) -> Iterator[tuple[str, dict[str, str]]]:
        """Yield lines with the classes of the names that are known in them."""
        inside, known = "", {}
        for line in text.splitlines():
            line = line.split("  #")[0].rstrip()
            if found := CLASS.match(line):
                inside = found[1]
            elif line and line[0] not in " #@)":
                inside = ""
            if FUNCTION.match(line):
                known = {"self": inside} if line[0] == " " else {}
            known |= {name: kind for kind, name in NAMED.findall(line) if kind in self.members}
            yield line, known

    def borrowed(self, text: str) -> list[tuple[int, str]]:
        """Return the lines that call a method through a member that may be set to None, with their numbers."""
        return [
            (number, f"{name}.{member}.{method}")
            for number, (line, known) in enumerate(self.lines(text), 1)
            for name, member, method in CALLED.findall(line)
            if method in self.methods and (owner := self.declares(known.get(name, ""), member))
            if (owner, member) in self.given_up
        ]
