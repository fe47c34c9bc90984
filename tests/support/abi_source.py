"""Read the hand-written C declarations as text, the reference of the ABI tests."""

from __future__ import annotations

import re
from typing import NamedTuple

from paths import ROOT

ABI = ROOT / "ncclpy" / "abi"


class Function(NamedTuple):
    """One row of an X-macro list; `since` is 0 for the driver's."""

    since: int
    returns: str
    name: str
    parameters: tuple[tuple[str, str], ...]  # (type, name)


def nccl_functions() -> list[Function]:
    """Return NCCLPY_NCCL_FUNCTIONS."""
    return [
        Function(int(since), returns.strip(), name, _parameters(parameters))
        for since, returns, name, parameters in _rows(
            "nccl_abi.h", "NCCLPY_NCCL_FUNCTIONS", r"X\((\d+),\s*([\w* ]+?),\s*(nccl\w+),\s*\(([^()]*)\)\)"
        )
    ]


def driver_functions() -> list[Function]:
    """Return NCCLPY_DRIVER_FUNCTIONS."""
    return [
        Function(0, returns.strip(), name, _parameters(parameters))
        for returns, name, parameters in _rows(
            "driver_abi.h", "NCCLPY_DRIVER_FUNCTIONS", r"X\(([\w* ]+?),\s*(cu\w+),\s*\(([^()]*)\)\)"
        )
    ]


class Names(NamedTuple):
    """The types, values and constants that one of ncclpy's headers declares."""

    macros: list[str]
    enums: list[str]
    values: list[str]
    fields: dict[str, dict[str, int]]  # {struct: {field: first release that has it, 0 if the struct always had it}}


def declared(header: str) -> Names:
    """Return a header's declarations without functions; names that begin with NCCLPY are not part of NCCL."""
    text = (ABI / header).read_text()
    macros = re.findall(r"^#define ((?!NCCLPY)\w+) \S", text, re.MULTILINE)
    enums, values, fields = [], [], {}
    for body, name in re.findall(r"^typedef enum \{(.*?)\} (\w+);", text, re.MULTILINE | re.DOTALL):
        enums.append(name)
        listed = re.sub(r"/\*.*?\*/", "", body, flags=re.DOTALL).split(",")
        values += [item.split("=")[0].strip() for item in listed if item.strip()]
    for body, name in re.findall(r"^typedef struct(?: \w+)? \{\n(.*?)^\} (\w+);", text, re.MULTILINE | re.DOTALL):
        if not name.startswith("ncclpy"):
            fields[name] = _fields(body)
    return Names(macros, enums, values, fields)


def _fields(body: str) -> dict[str, int]:
    # A struct or union inside counts as one field.
    body = re.sub(r"(struct|union) \{.*?\}", r"\1", body, flags=re.DOTALL)
    found = {}
    for declaration, comment in re.findall(r"^\s*(\w[^;]*);(?:\s*/\* ([\d.]+) \*/)?", body, re.MULTILINE):
        major, minor, patch = ([*map(int, comment.split(".")), 0, 0][:3]) if comment else (0, 0, 0)
        for part in declaration.split(","):
            found[re.findall(r"\w+", part.split("[")[0])[-1]] = major * 10000 + minor * 100 + patch
    return found


def snake_case(symbol: str) -> str:
    """Return the Python name of a C function: ncclCommInitRank -> comm_init_rank."""
    name = symbol.removeprefix("nccl").replace("AlltoAll", "AllToAll")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _rows(header: str, macro: str, pattern: str) -> list[tuple[str, ...]]:
    text = (ABI / header).read_text().replace("\\\n", "\n")
    body = text[text.index(f"#define {macro}(X)") : text.index("typedef struct {\n#define NCCLPY_DECLARE_POINTER")]
    body = re.sub(r"/\*.*?\*/", "", body, flags=re.DOTALL)
    rows = re.findall(pattern, body, re.DOTALL)
    assert len(rows) == len(re.findall(r"^\s*X\(", body, re.MULTILINE)), f"a row of {macro} was not understood"
    return rows


def _parameters(text: str) -> tuple[tuple[str, str], ...]:
    text = " ".join(text.split())
    if text in ("", "void"):
        return ()
    found = [re.fullmatch(r"(.*?[ *])(\w+)", parameter.strip()) for parameter in text.split(",")]
    return tuple((m.group(1).strip(), m.group(2)) for m in found if m is not None)
