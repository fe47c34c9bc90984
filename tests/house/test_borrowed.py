"""No object is used by a reference that another thread may take away.

``self.member.method()`` of a method that Python does not see is called without a reference of its own: if it gives the
GIL away, even for one line of Python, another thread may set ``member`` to None, and the object is freed meanwhile. So
what is ever set to None is called by a local name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from paths import ROOT

CLASS = re.compile(r"cdef class (\w+)(?:\((\w+)\))?:")
MEMBER = re.compile(r"    cdef (?:readonly |public )?(_?[A-Z]\w*) (\w+(?:, \w+)*)$")
METHOD = re.compile(r"    cp?def [^(=]*?(\w+)\(self\b")
FUNCTION = re.compile(r"(?: {4})?(?:cdef|cpdef|def) [^=]*\(")
NAMED = re.compile(r"\b(_?[A-Z]\w*) (\w+)(?= not None|[,)=]| =|$)")
CALLED = re.compile(r"\b(\w+)\.(\w+)\.(\w+)\(")
SET_TO_NONE = re.compile(r"((?:[\w., ]+ = )+)(?:.*, )?None$")


class Declared:
    """The extension classes of some sources: whose member is of which class, and what is ever set to None."""

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

    def borrowed(self, text: str) -> list[str]:
        """Return the lines that call a method through a member that may be set to None meanwhile."""
        return [
            line.strip()
            for line, known in self.lines(text)
            for name, member, method in CALLED.findall(line)
            if method in self.methods and (owner := self.declares(known.get(name, ""), member))
            if (owner, member) in self.given_up
        ]


@pytest.fixture(scope="module")
def sources():
    package = ROOT / "ncclpy"
    return {
        str(path.relative_to(ROOT)): path.read_text()
        for kind in ("pxd", "pyx")
        for path in sorted(package.rglob(f"*.{kind}"))
    }


def test_what_may_be_set_to_none_is_called_by_a_local_name(sources):
    declared = Declared(sources)
    assert {("Work", "gathering"), ("Work", "launch"), ("Work", "handle")} <= declared.given_up
    found = {path: declared.borrowed(text) for path, text in sources.items()}
    assert not {path: lines for path, lines in found.items() if lines}


WORK = """
cdef class Awaited:
    cdef str missing(self):
        pass

cdef class Work:
    cdef Awaited awaited
    cdef Awaited kept

    cdef int tidy(self) except -1:
        self.awaited = None

    def wait(self):
        self.kept.missing()
        {}

cdef int other(Work work) except -1:
    {}
"""


@pytest.mark.parametrize(
    "here, there", [("self.awaited.missing()", "pass"), ("pass", "return work.awaited.missing()")]
)
def test_what_is_called_by_a_borrowed_reference_is_found(here, there):
    text = WORK.format(here, there)
    assert Declared({"work.pyx": text}).borrowed(text) == [here if there == "pass" else there]
