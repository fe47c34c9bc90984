"""The data that ``ncclpy perf`` sends, and its check of results. No library is loaded."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from ncclpy.cli.perf import check, data
from ncclpy.cli.perf.collectives import Segment
from ncclpy.cli.perf.datatypes import TYPES

DTYPES = {name: kind.native for name, kind in TYPES.items() if kind.native} | {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "f8e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "f8e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
REDUCE = {"prod": np.multiply, "max": np.maximum, "min": np.minimum}


def reduced(name: str, op: str, inputs: list[np.ndarray]) -> np.ndarray:
    """Reduce in the type itself, in random order, rounding after each step: the worst that a library may do."""
    dtype, nranks = DTYPES[name], len(inputs)
    operands = [bits.view(dtype) for bits in inputs]
    if op == "mulsum":
        operands = [
            (values * np.array(data.scalar(rank), dtype)).astype(dtype) for rank, values in enumerate(operands)
        ]
    if op == "avg" and TYPES[name].digits:
        operands = [(values * np.array(1 / nranks, dtype)).astype(dtype) for values in operands]
    order = np.random.default_rng(nranks).permutation(nranks)
    result = operands[order[0]].copy()
    for rank in order[1:]:
        result = REDUCE.get(op, np.add)(result, operands[rank]).astype(dtype)
    if op == "avg" and not TYPES[name].digits:
        result //= np.array(nranks, dtype)
    return result


def reader(array: np.ndarray):
    raw = array.view(np.uint8)

    def read(offset, target):
        target[:] = raw[offset : offset + len(target)]

    return read


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("op", ["sum", "prod", "max", "min", "avg", "mulsum"])
def test_reduction_in_any_order_is_right_and_poison_is_wrong(name, op):
    kind = TYPES[name]
    for nranks in (1, 2, 3, 4, 5, 8, 16, 17, 33):
        made = data.make(name, op, nranks, 2000, (1, nranks))
        result = reduced(name, op, [block.bits for block in made.inputs])
        assert check.count_wrong(kind, reader(result), 0, 2000, made.reduced, 0) == 0, nranks
        poison = np.full(2000 * kind.itemsize, check.POISON, np.uint8)
        # A poisoned byte is a valid integer, so that some may be right by chance.
        assert check.count_wrong(kind, reader(poison), 0, 2000, made.reduced, 0) > 1500, nranks


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("op", ["sum", "prod", "max", "min", "avg"])
def test_omitted_rank_is_detected(name, op):
    made = data.make(name, op, 4, 2000, (2,))
    result = reduced(name, op, [block.bits for block in made.inputs[:3]])
    assert check.count_wrong(TYPES[name], reader(result), 0, 2000, made.reduced, 0) > 100


@pytest.mark.parametrize("name", ["bfloat16", "f8e4m3", "f8e5m2"])
def test_small_floats_agree_with_ml_dtypes(name):
    kind = TYPES[name]
    bits = np.arange(1 << 8 * kind.itemsize).astype(kind.bits)
    with np.errstate(invalid="ignore"):
        values = bits.view(DTYPES[name]).astype(np.float64)
    assert np.array_equal(kind.decode(bits), values, equal_nan=True)
    finite = np.isfinite(values)
    assert np.array_equal(kind.decode(kind.encode(values[finite])), values[finite])
    between = np.random.default_rng(0).uniform(-400, 400, 10000)
    rounded = kind.decode(kind.encode(between))
    ulp = 2.0 ** (np.floor(np.log2(np.abs(between))) - kind.digits + 1)
    assert np.all(np.abs(rounded - between) <= ulp / 2)


def test_other_seeds_ranks_and_operators_give_other_data():
    first = data.make("float", "sum", 2, 1000, (8, 1))
    again = data.make("float", "sum", 2, 1000, (8, 1))
    assert all(np.array_equal(a.bits, b.bits) for a, b in zip(first.inputs, again.inputs, strict=True))
    assert not np.array_equal(first.inputs[0].bits, first.inputs[1].bits)
    assert not np.array_equal(first.inputs[0].bits, data.make("float", "sum", 2, 1000, (8, 2)).inputs[0].bits)


@pytest.mark.parametrize("name", ["int8", "half", "double"])
def test_long_outputs_are_checked_to_the_last_element(name):
    kind = TYPES[name]
    made = data.make(name, None, 2, 1 << 30, (3,))
    assert len(made.inputs[1].bits) == data.PERIOD
    # More than one chunk, and more than one period, beginning in the middle of a period.
    phase, length = 70001, check.CHUNK // kind.itemsize + data.PERIOD + 5
    output = np.resize(np.roll(made.inputs[1].bits, -phase), length + 2)
    segment = Segment(0, length, 1, phase)

    def wrong():
        return check.count_wrong(kind, reader(output), 0, length, made.block(segment.source), segment.phase)

    assert wrong() == 0
    for place in (0, 1, data.PERIOD - 1, check.CHUNK // kind.itemsize, length - 1):
        output[place] ^= 1
        assert wrong() == 1, place
        output[place] ^= 1
    output[length] ^= 1
    assert wrong() == 0, "what lies behind the output is not part of it"


def test_data_at_wrong_offset_are_detected():
    made = data.make("uint8", None, 1, 1 << 20, (4,))
    output = np.resize(made.inputs[0].bits, 1 << 20)
    output[: 1 << 19] = output[1 << 19 :].copy()
    assert check.count_wrong(TYPES["uint8"], reader(output), 0, 1 << 20, made.inputs[0], 0) > 1 << 18


def test_memory_outside_the_output_must_stay_untouched():
    output = np.full(4096, check.POISON, np.uint8).view(np.float32)
    assert check.count_touched(TYPES["float"], reader(output), 0, 1024) == 0
    output[1000] = 1.0
    assert check.count_touched(TYPES["float"], reader(output), 0, 1024) == 1
    assert check.count_touched(TYPES["float"], reader(output), 1001, 23) == 0


def test_zero_may_have_either_sign():
    kind = TYPES["f8e4m3"]
    made = data.make(kind.name, "sum", 2, 1000, (5,))
    zeros = np.flatnonzero(made.reduced.bits == 0)
    assert len(zeros)
    output = made.reduced.bits.copy()
    output[zeros] = 0x80
    assert check.count_wrong(kind, reader(output), 0, 1000, made.reduced, 0) == 0
    output[zeros[0]] = 0x7F  # NaN
    assert check.count_wrong(kind, reader(output), 0, 1000, made.reduced, 0) == 1
