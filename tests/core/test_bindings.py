"""Every function of ncclpy.bindings against an NCCL that records its arguments."""

from __future__ import annotations

import numpy as np
import pytest
from abi_source import nccl_functions, snake_case
from recorder import Recorded, link_recorder, shared_recorder

from ncclpy import SUM, DataType, Result, bindings, synchronize

FUNCTIONS = {function.name: function for function in nccl_functions()}

# Written by C, so not arguments of the Python function. "int*" is also the list of ncclCommShrink; see SPECIAL.
OUT = {
    "int*", "uint64_t*", "size_t*", "void**", "ncclComm_t*", "ncclWindow_t*", "ncclResult_t*", "ncclRedOp_t*",
    "ncclCftLeId*", "ncclParamHandle_t*", "const char**",
    *(f"{sign}int{bits}_t*" for sign in ("", "u") for bits in (8, 16, 32, 64)),
}  # fmt: skip
ADDRESSES = {
    "void*", "const void*", "ncclComm_t", "const ncclComm_t", "cudaStream_t", "ncclWindow_t", "ncclParamHandle_t",
    "ncclMultimemHandle_t", "const ncclDevCommRequirements_t*", "const ncclDevComm_t*", "ncclDevComm_t*",
}  # fmt: skip
NUMBERS = {
    "int", "unsigned int", "size_t", "ncclResult_t", "ncclDataType_t", "ncclRedOp_t", "ncclScalarResidence_t",
    "ncclCommMemStat_t", "ncclCftTeamMode_t",
}  # fmt: skip

# Functions with Python arguments that differ from those of C: arguments, what C sees, what is returned.
ID = {"id": 9}
SUCCESS = {"result": "SUCCESS"}


def _pending(value):
    return {"pending": value, "result": "SUCCESS"}


SPECIAL = {
    "ncclGetUniqueId": ([], None, {"id": 70}),
    "ncclCommGetUniqueId": ([4096], [4096, None], {"id": 71}),
    "ncclCommInitAll": ([[5, 6]], ["out", 2, 5], [70, 0]),
    "ncclCommInitRankScalable": ([4, 3, [ID, {"id": 8}]], ["out", 4, 3, 2, "id 9", None], 70),
    "ncclCommShrink": ([4096, [3, 5], None, 1], [4096, "out 3", 2, "out", None, 1], _pending(73)),
    "ncclCommSplit": ([4096, 2, 3], [4096, 2, 3, "out", None], _pending(73)),
    "ncclCommGrow": ([4096, 8, ID, 3], [4096, 8, "id 9", 3, "out", None], _pending(74)),
    "ncclCommWindowRegister": (
        [4096, 8192, 100, 2], [4096, 8192, 100, "out", 2], _pending(73),
    ),
    "ncclWaitSignal": ([[[1, 2, 3, 4], [5, 6, 7, 8]], 4096, 8192], [2, [1, 2, 3, 4], 4096, 8192], SUCCESS),
    "ncclGroupSimulateEnd": ([], [{"size": 24, "magic": 0x74685283, "version": 23203}], 70.5),
    "ncclSetEncryption": (
        [1, "secret"], [{"size": 32, "magic": 0xCAFEBEEF, "version": 23203, "mode": 1, "psk": "secret"}],
        SUCCESS,
    ),
    "ncclParamGet": ([4096, 200], [4096, None, 200, None], {"bytes": 73}),
    "ncclParamGetParameter": (["KEY"], ["KEY", "out", None], "V" * 72),
    "ncclParamGetAllParameterKeys": ([], ["out", None], ["FIRST", "SECOND"] + ["MORE"] * 69),
    "ncclCommQueryProperties": ([4096], None, None),  # see test_properties
}  # fmt: skip


@pytest.fixture(scope="module")
def recorder_object(tmp_path_factory):
    return shared_recorder(tmp_path_factory)[0]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return shared_recorder(tmp_path_factory)[1]


@pytest.fixture(scope="module")
def recorded(library):
    child = Recorded(library)
    yield child
    assert child.close() == ""


def _expected(function):
    """Return (arguments, what C sees, what is returned) of a function with the same arguments in Python and C."""
    args, seen, out = [], [], []
    for i, (kind, name) in enumerate(function.parameters):
        if kind in OUT:
            seen.append(None)
            out.append("V" * 99 if kind == "const char**" else 70 + i)
        elif kind in ADDRESSES:
            args.append(0x10000 * (i + 1))
            seen.append(args[-1])
        elif kind in NUMBERS:
            args.append(20 + i)
            seen.append(args[-1])
        elif kind == "const char*":
            args.append(f"KEY {name}")
            seen.append(args[-1])
        elif kind == "ncclUniqueId":
            args.append({"id": 20 + i})
            seen.append(f"id {20 + i}")
        elif kind == "ncclTeam_t":
            args.append([30 + i, 40 + i, 50 + i])
            seen.append(args[-1])
        elif kind in ("ncclConfig_t*", "const ncclCollConfig_t*"):
            args.append(None)
            seen.append(None)
        else:
            raise AssertionError(f"{function.name}: what is a {kind}?")
    if out:
        returned = out[0] if len(out) == 1 else out
    else:
        returned = {
            "ncclResult_t": SUCCESS,
            "ncclTeam_t": {"nranks": 7, "rank": 8, "stride": 9},
            "const char*": "text",
            "int": 77,
            "void": None,
        }[function.returns]
    return args, seen, returned


@pytest.mark.parametrize("symbol", FUNCTIONS)
def test_arguments_reach_c_without_the_gil(recorded, symbol):
    args, seen, returned = SPECIAL.get(symbol) or _expected(FUNCTIONS[symbol])
    reply = recorded(snake_case(symbol), *args)
    assert "raised" not in reply, reply
    assert reply["seen"]["function"] == symbol
    assert reply["seen"]["gil"] == 0
    if seen is not None:
        assert len(reply["seen"]["args"]) == len(seen)
        for found, wanted in zip(reply["seen"]["args"], seen, strict=True):
            assert wanted is None or found == wanted
    if symbol == "ncclGetVersion":
        returned = 23203
    if symbol != "ncclCommQueryProperties":
        assert reply["returned"] == returned


RETURNS_RESULT = [name for name, function in FUNCTIONS.items() if function.returns == "ncclResult_t"]


@pytest.mark.parametrize("symbol", [name for name in RETURNS_RESULT if name != "ncclGetVersion"])
def test_error_code_raises(recorded, symbol):
    args, _, _ = SPECIAL.get(symbol) or _expected(FUNCTIONS[symbol])
    reply = recorded(snake_case(symbol), *args, result=4)
    assert reply["raised"] == "NcclError"
    assert reply["result"] == 4
    assert reply["function"] == symbol
    assert reply["detail"] == "text"
    assert reply["version"] == [2, 32, 3]
    assert symbol in reply["message"] and "2.32.3" in reply["message"]


@pytest.mark.parametrize(
    ("code", "kind"), [(6, "NcclRemoteError"), (8, "NcclTimeout"), (1, "NcclError"), (99, "NcclError")]
)
def test_codes_have_their_exceptions(recorded, code, kind):
    reply = recorded("comm_destroy", 4096, result=code)
    assert (reply["raised"], reply["result"]) == (kind, code)
    assert str(code) in reply["message"]


@pytest.mark.parametrize(
    ("function", "args"),
    [
        ("all_reduce", [1, 2, 3, 7, 0, 4096, 0]),
        ("all_reduce_config", [1, 2, 3, 7, 0, 4096, 0, None]),
        ("group_end", []),
        ("comm_finalize", [4096]),
        ("put_signal", [1, 2, 3, 4, 5, 6, 7, 8, 9, 4096, 0]),
    ],
)
def test_in_progress_is_returned(recorded, function, args):
    assert recorded(function, *args, result=7)["returned"] == {"result": "IN_PROGRESS"}


def test_in_progress_init_returns_the_handle(recorded):
    assert recorded("comm_init_rank_config", 2, ID, 0, {"config": {"blocking": False}}, result=7)["returned"] == 70


@pytest.mark.parametrize(
    ("function", "args"),
    [
        ("comm_split", [4096, 0, 0]),
        ("comm_shrink", [4096, [1]]),
        ("comm_grow", [4096, 4, None, -1]),
        ("comm_window_register", [4096, 8192, 64]),
    ],
)
def test_handle_written_later_arrives(recorded, function, args):
    reply = recorded(function, *args, result=7, defer=1)
    assert reply["returned"] == {"pending": 0, "result": "IN_PROGRESS"}
    assert reply["later"] == {"pending": 0xABCDEF, "result": "IN_PROGRESS"}


def test_handle_dropped_before_it_is_written_is_not_overwritten(recorded):
    def places(defer):
        return [recorded("comm_split", 4096, 0, 0, result=7, defer=defer)["place"] for _ in range(50)]

    assert len(set(places(2))) == 50, "NCCL will still write there: the place must never be used again"
    assert len(set(places(1))) < 50, "once NCCL has written, the place goes with the handle"


def test_async_error_is_returned_even_if_unknown(recorded):
    # The recorder fills position 1 with 71, which is no ncclResult_t.
    assert recorded("comm_get_async_error", 4096)["returned"] == 71


def test_split_and_grow_pass_config_or_default(recorded):
    split = recorded("comm_split", 4096, 0, 0, {"config": {"split_share": True, "comm_name": "left"}})
    config = split["seen"]["args"][4]
    assert (config["splitShare"], config["commName"]) == (1, "left")
    assert recorded("comm_grow", 0, 4, ID, 3)["seen"]["args"][5]["size"] == 120, "a new rank has no parent"


def test_properties(library, recorded):
    new = recorded("comm_query_properties", 4096)
    assert new["seen"]["args"][1] == {"size": 152, "magic": 0xCAFEBEEF, "version": 23203}
    assert new["returned"]["rank"] == 71
    assert new["returned"]["comm_hash"] == 7000000000000000000
    assert new["returned"]["gin_support"] == [False] * 63 + [True]
    assert new["returned"]["cft_counted_support"] is True
    child = Recorded(library, 22902)
    old = child("comm_query_properties", 4096)
    child.close()
    assert old["seen"]["args"][1]["version"] == 22902, "NCCL refuses a caller newer than itself"
    assert old["returned"]["comm_hash"] is None and old["returned"]["n_lsa_teams"] is None


@pytest.mark.parametrize(
    ("function", "args", "kind", "words"),
    [
        ("comm_init_rank", [2, "no id", 0], "TypeError", "unique id"),
        ("comm_init_rank", [2, 128, 0], "TypeError", "unique id"),
        ("comm_init_rank_config", [2, ID, 0, {"coll_config": {}}], "TypeError", "ncclpy.Config"),
        ("all_reduce_config", [1, 2, 3, 7, 0, 4096, 0, {"config": {}}], "TypeError", "ncclpy.CollConfig"),
        ("all_reduce", [None, 2, 3, 7, 0, 4096, 0], "TypeError", "integer"),
        ("all_reduce", [1, 2, -3, 7, 0, 4096, 0], "OverflowError", "negative"),
        ("all_reduce", [1, 2, 3], "TypeError", "7"),
        ("set_encryption", [1, 5], "TypeError", "psk"),
        ("set_encryption", [1, "a\0b"], "ValueError", "NUL"),
        ("param_bind", [5], "TypeError", "key"),
        ("param_get", [4096, -1], "ValueError", "max_len"),
        ("wait_signal", [[[1, 2]], 4096, 0], "ValueError", "unpack"),
    ],
)
def test_wrong_argument_is_refused_before_nccl(recorded, function, args, kind, words):
    before = recorded("comm_count", 4096)["seen"]
    reply = recorded(function, *args)
    assert reply["raised"] == kind and words in reply["message"], reply
    assert reply["seen"] == before, "NCCL was called"


OLD_VERSIONS = sorted({function.since for function in FUNCTIONS.values()})[:-1]
QUICK = (OLD_VERSIONS[0], OLD_VERSIONS[len(OLD_VERSIONS) // 2], OLD_VERSIONS[-1])


@pytest.mark.parametrize(
    "version", [pytest.param(each, marks=[] if each in QUICK else [pytest.mark.slow]) for each in OLD_VERSIONS]
)
def test_missing_function_names_its_release(recorder_object, tmp_path, version):
    lacking = {function.name: function.since for function in FUNCTIONS.values() if function.since > version}
    child = Recorded(link_recorder(recorder_object, tmp_path, sorted(lacking)), version)
    for symbol, function in FUNCTIONS.items():
        args, _, _ = SPECIAL.get(symbol) or _expected(function)
        reply = child(snake_case(symbol), *args)
        if symbol in lacking:
            release = f"{lacking[symbol] // 10000}.{lacking[symbol] // 100 % 100}.{lacking[symbol] % 100}"
            assert reply["raised"] == "NcclUnsupported"
            assert f"{symbol} needs NCCL {release}" in reply["message"]
            assert reply["function"] == symbol
        else:
            assert "raised" not in reply, reply
    assert child.close() == ""


@pytest.mark.usefixtures("host_engine")
def test_child_made_in_a_group_arrives_at_its_end():
    comms = bindings.comm_init_all(4)
    bindings.group_start()
    children = [bindings.comm_split(comm, rank % 2, -rank) for rank, comm in enumerate(comms)]
    assert [child.value for child in children] == [0, 0, 0, 0]
    assert not any(children)
    assert bindings.group_end() is Result.SUCCESS
    # A handle that has arrived works as its int.
    assert [bindings.comm_user_rank(child) for child in children] == [1, 1, 0, 0]
    data = [np.full(8, rank + 1, np.float32) for rank in range(4)]
    bindings.group_start()
    for array, child in zip(data, children, strict=True):
        pointer = array.ctypes.data
        assert bindings.all_reduce(pointer, pointer, 8, DataType.FLOAT32, SUM, child, 0) is Result.SUCCESS
    bindings.group_end()
    for device in range(4):
        synchronize(device)
    assert [array.tolist() for array in data] == [[4.0] * 8, [6.0] * 8] * 2
    for comm in [*children, *comms]:
        bindings.comm_destroy(comm)
