"""Read the hand-written C declarations as text: what the tests compare everything else with."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
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
