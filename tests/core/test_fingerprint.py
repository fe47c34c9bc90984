"""The names by which ranks compare types of arrays: the same in all processes and for every way to read an array."""

from __future__ import annotations

import tracemalloc

import ml_dtypes
import numpy as np
import pytest

import ncclpy
from ncclpy.core.arguments.validation import type_of_array

#: More types than are remembered.
MANY = 1100

NAMES = {
    "float32": np.float32,
    "bool": bool,
    "int16": "i2",
    "uint16": "u2",
    "complex64": "c8",
    "complex128": "c16",
    "float128": "g",
    "bfloat16": ml_dtypes.bfloat16,
    "float8e4m3": ml_dtypes.float8_e4m3fn,
    "float8_e4m3": ml_dtypes.float8_e4m3,
    "float8_e8m0fnu": ml_dtypes.float8_e8m0fnu,
    "int4": ml_dtypes.int4,
    "datetime64[10s]": "M8[10s]",
    "timedelta64[us]": "m8[us]",
    "bytes24": "S3",
    "str64": "U2",
    "void24": "V3",
    "[('a', '<i4'), ('b', 'bfloat16'), ('c', '<M8[D]')]": [("a", "i4"), ("b", ml_dtypes.bfloat16), ("c", "M8[D]")],
    "[('a', ('<f4', (2, 3))), ('b', [('c', '>u2')])]": [("a", "f4", (2, 3)), ("b", [("c", ">u2")])],
    r"[('\xe9\ud800', '<i4')]": [("é\ud800", "i4")],
    "[('a', '|u1'), ('b', '<i4') at 4] of 12 bytes": {
        "names": ["a", "b"], "formats": ["u1", "i4"], "offsets": [0, 4], "itemsize": 12,
    },
    "[('b', '<i4') at 4, ('a', '<i4') at 0] of 8 bytes": {
        "names": ["b", "a"], "formats": ["i4", "i4"], "offsets": [4, 0],
    },
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_numpy_array_has_the_name_of_its_type(name):
    assert type_of_array(np.zeros(2, NAMES[name])) == name


def forget():
    """Use so many types that all earlier ones are forgotten."""
    for i in range(1, MANY):
        type_of_array(np.zeros(1, f"V{i}"))


def test_equal_types_have_one_name_in_any_order_of_use():
    plain = np.dtype([("a", "i4"), ("b", "f4")])
    titled = np.dtype([(("what it is", "a"), "i4"), ("b", "f4")])
    names = []
    for dtype in (plain, np.dtype([("a", "i4"), ("b", "f4")], align=True), np.dtype((np.record, plain)), titled):
        forget()
        names.append(type_of_array(np.zeros(1, dtype)))
    assert names == ["[('a', '<i4'), ('b', '<f4')]"] * 4


def test_long_name_is_cut_and_still_distinct():
    fields = [(f"field {i}", "f8") for i in range(300)]
    names = [type_of_array(np.zeros(1, [*fields, (last, "i8")])) for last in "xyx"]
    assert all(name.isascii() and len(name) == 155 for name in names)
    assert names[0] == names[2] != names[1]
    assert names[0].startswith("[('field 0', '<f8'), ('field 1', '<f8'),")
    assert "... (301 fields, 2408 bytes, #" in names[0]


def test_new_types_do_not_grow_memory():
    def see(what):
        for i in range(MANY):
            type_of_array(np.zeros(1, [(f"{what}{i}", "i4")]))

    see("a")
    tracemalloc.start()
    try:
        see("b")
        before = tracemalloc.get_traced_memory()[0]
        see("c")
        see("d")
        assert tracemalloc.get_traced_memory()[0] - before < 20 * MANY  # 2 * MANY types were seen
    finally:
        tracemalloc.stop()


def test_forgotten_type_is_still_equal(host_engine, comm1):
    first = np.ones(2, [("a", "i4")])
    buffer = ncclpy.Buffer.of(first)
    forget()
    comm1.broadcast(np.ones(2, [("a", "i4")]), buffer)
    with pytest.raises(TypeError, match=r"recv: data type \[\('a', '<i4'\)\] is not that of send, \[\('b', '<i4'\)\]"):
        comm1.broadcast(np.ones(2, [("b", "i4")]), first)


def test_buffer_keeps_the_name_of_its_type(host_engine):
    dates = np.array(["2026-11-27", "2026-11-28"], "M8[D]")
    buffer = ncclpy.Buffer.of(dates)
    forget()
    assert np.asarray(buffer).tolist() == dates.tolist()


class Exported:
    """An array that only exports DLPack."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u8", "f2", "f4", "f8", "c8", "c16", "?"])
def test_dlpack_and_numpy_tell_the_same_name(dtype):
    array = np.zeros(2, dtype)
    assert type_of_array(Exported(array)) == type_of_array(array)


@pytest.mark.parametrize(
    "dtype",
    "int16 uint16 bool uint8 float16 bfloat16 complex64 complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz "
    "float8_e5m2fnuz float8_e8m0fnu".split(),
)
def test_torch_and_numpy_tell_the_same_name(dtype):
    torch = pytest.importorskip("torch", reason="needs torch")
    numbers = np.zeros(2, getattr(ml_dtypes, dtype, None) or dtype)
    assert type_of_array(torch.zeros(2, dtype=getattr(torch, dtype))) == type_of_array(numbers)
