"""The C declarations, Cython's, the bindings, their stubs and the host engine's exports name the same functions."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess

import pytest
from abi_source import ABI, ROOT, Function, declared, driver_functions, nccl_functions, snake_case

from ncclpy import bindings
from ncclpy.core.runtime import search

NCCL = nccl_functions()
DRIVER = driver_functions()


def _members(pxd: str, table: str) -> dict[str, tuple[str, list[str]]]:
    """Return {member: (return type, parameter types)} of a table declared in a .pxd."""
    text = (ABI / pxd).read_text()
    body = text[text.index(f"ctypedef struct {table}:") :]
    found = re.findall(r"^        ([\w* ]+?) \(\*(\w+)\)\(([^()]*)\) noexcept nogil$", body, re.MULTILINE)
    assert len(found) == body.count("noexcept nogil"), f"a member of {table} was not understood"
    return {
        name: (returns, [" ".join(part.split()) for part in parameters.split(",") if part.strip()])
        for returns, name, parameters in found
    }


@pytest.mark.parametrize(
    ("functions", "pxd", "table"),
    [(NCCL, "nccl.pxd", "ncclpy_nccl_table"), (DRIVER, "driver.pxd", "ncclpy_driver_table")],
    ids=["nccl", "driver"],
)
def test_pxd_declares_the_list(functions: list[Function], pxd: str, table: str):
    members = _members(pxd, table)
    assert list(members) == [function.name for function in functions], "same functions in the same order"
    for function in functions:
        returns, parameters = members[function.name]
        assert returns == function.returns, function.name
        # Cython cannot say "const ncclComm_t", which for a parameter is no different.
        wanted = [kind.replace("const ncclComm_t", "ncclComm_t") for kind, _ in function.parameters]
        assert parameters == wanted, function.name


@pytest.mark.parametrize("header", ["nccl", "driver"])
def test_pxd_declares_types_as_the_header_does(header: str):
    names = declared(f"{header}_abi.h")
    text = (ABI / f"{header}.pxd").read_text()
    enums = re.findall(r"^    ctypedef enum (\w+):\n((?:        \w+\n)+)", text, re.MULTILINE)
    assert {name for name, _ in enums} <= set(names.enums)
    assert [value for _, body in enums for value in body.split()] == [
        value for value in names.values if value != "ncclNumOps_dummy"
    ]
    structs = re.findall(r"^    ctypedef struct (\w+):\n((?:        [^(\n]+\n)+)", text, re.MULTILINE)
    for name, body in structs:
        fields = [re.findall(r"\w+", part.split("[")[0])[-1] for part in body.strip().replace("\n", ",").split(",")]
        # ncclConfigExt_t is opaque to Cython.
        assert fields == list(names.fields[name]) or fields == ["pass"], name
    assert {name for name, _ in structs} == set(names.fields)


def test_no_symbol_is_declared_twice():
    for functions in (NCCL, DRIVER):
        names = [function.name for function in functions]
        assert len(set(names)) == len(names)


def test_bindings_are_the_list():
    public = {name for name in bindings.__all__ if name[0].islower()}
    assert public == {snake_case(function.name) for function in NCCL}
    assert len(NCCL) == 89


# Python's parameters are C's in C's order, without those that C writes; these names differ from C's.
RENAMED = {
    "comm_id": "unique_id", "myrank": "rank", "comm_ids": "unique_ids", "n_ranks": "nranks", "shrink_flags": "flags",
    "revoke_flags": "flags", "win_flags": "flags", "win": "window", "reqs": "requirements", "out_dev_comm": "dev_comm",
    "h": "handle", "ptr": "pointer", "peer_world": "peer", "cft_team": "team", "exclude_ranks_list": "exclude",
    "signal_descs": "descriptors", "devlist": "devices",
}  # fmt: skip
DROPPED = {
    "ncclCommInitRankScalable": {"n_id"},
    "ncclCommInitAll": {"ndev"},
    "ncclCommShrink": {"exclude_ranks_count"},
    "ncclWaitSignal": {"n_desc"},
    "ncclGetUniqueId": {"unique_id"},
    "ncclCommGetUniqueId": {"unique_id"},
    "ncclCommQueryProperties": {"props"},
    "ncclGroupSimulateEnd": {"sim_info"},
    "ncclParamGet": {"out", "len"},
    "ncclParamGetAllParameterKeys": {"table", "table_len"},
    "ncclParamGetParameter": {"value", "value_len"},
    "ncclRedOpCreatePreMulSum": {"op"},
    "ncclMemAlloc": {"ptr"},
    "ncclParamBind": {"out"},
}
OUT_NAMES = {
    "newcomm", "out", "out_ptr", "out_user_ptr", "le_id", "le_offset", "async_error", "version", "value",
}  # fmt: skip
OUT_OF = {
    "ncclCommCount": "count", "ncclCommCuDevice": "device", "ncclCommUserRank": "rank", "ncclCommRegister": "handle",
    "ncclCommWindowRegister": "win", "ncclCommInitRank": "comm", "ncclCommInitRankConfig": "comm",
    "ncclCommInitAll": "comm",
}  # fmt: skip


@pytest.mark.parametrize("function", NCCL, ids=lambda function: function.name)
def test_parameters_are_in_c_order(function: Function):
    names = []
    for _, c_name in function.parameters:
        name = snake_case(c_name)
        if name in DROPPED.get(function.name, set()) | OUT_NAMES or OUT_OF.get(function.name) == c_name:
            continue
        names.append(RENAMED.get(name, name))
    if function.name == "ncclSetEncryption":
        names = ["mode", "psk"]  # the two fields of its struct
    assert list(inspect.signature(getattr(bindings, snake_case(function.name))).parameters) == names


def test_stubs_name_the_bindings():
    folder = ROOT / "ncclpy" / "core" / "bindings"
    for source in sorted(folder.glob("*.pyx")):
        defined = set(re.findall(r"^def (\w+)\(", source.read_text(), re.MULTILINE))
        tree = ast.parse(source.with_suffix(".pyi").read_text())
        assert {node.name for node in tree.body if isinstance(node, ast.FunctionDef)} == defined, source.name


@pytest.mark.parametrize("name", bindings.__all__)
def test_docstrings_name_the_c_function(name: str):
    text = inspect.getdoc(getattr(bindings, name))
    assert text
    if name[0].islower():
        symbol = next(function.name for function in NCCL if snake_case(function.name) == name)
        assert f"``{symbol}``" in text, "the C function is not named"


def _exports() -> set[str]:
    output = subprocess.run(
        ["nm", "-D", "--defined-only", search.host_engine_path()],
        check=True,
        capture_output=True,
        text=True,
        timeout=30,
    ).stdout
    return {line.split()[-1] for line in output.splitlines()}


def test_host_engine_exports_every_driver_call():
    assert {function.name for function in DRIVER} - _exports() == set()


def test_host_engine_exports_every_function_of_nccl():
    assert {function.name for function in NCCL} - _exports() == set()


def test_host_engine_exports_nothing_else():
    known = {function.name for function in NCCL + DRIVER}
    extra = {name for name in _exports() - known if not name.startswith("ncclpy")}
    assert extra == set()
