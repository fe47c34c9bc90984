"""The scalar of pre_mul_sum: rounded once to the data type, to nearest, and refused where it is not a value of it."""

from __future__ import annotations

import math
import sys

import fake_torch
import ml_dtypes
import numpy as np
import pytest
from buffer_checks import rejects

import ncclpy
import testing

SMALL = {
    "bfloat16": ml_dtypes.bfloat16,
    "float8e4m3": ml_dtypes.float8_e4m3fn,
    "float8e5m2": ml_dtypes.float8_e5m2,
}


def product(comm, scalar, dtype, one):
    """Return 1 x scalar as computed by NCCL."""
    array = np.ones(1, one)
    with comm.pre_mul_sum(scalar, dtype) as op:
        comm.all_reduce(array, op=op)
    return array[0]


def same(a, b):
    return (np.isnan(a) and np.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))


def hard_cases(kind):
    """Yield doubles at, and just beside, the middle between two neighbours, and beyond the range; and the right value.

    ml_dtypes is no reference: it converts by way of float32, and so rounds twice.
    """
    step = 1 if kind.itemsize == 1 else 97
    unsigned = np.uint8 if kind.itemsize == 1 else np.uint16
    finite = [bits for bits in range(2 ** (8 * kind.itemsize - 1)) if math.isfinite(unsigned(bits).view(kind))]
    for bits in finite[:-1:step]:
        low, high = (float(unsigned(number).view(kind)) for number in (bits, bits + 1))
        middle = (low + high) / 2
        yield low, low
        yield middle, high if bits % 2 else low
        yield math.nextafter(middle, 0), low
        yield math.nextafter(middle, math.inf), high
    below, largest = (float(unsigned(bits).view(kind)) for bits in finite[-2:])
    beyond = math.nan if kind == ml_dtypes.float8_e4m3fn else math.inf  # it has no infinity
    middle = largest + (largest - below) / 2
    yield math.nextafter(middle, 0), largest
    yield middle, beyond if finite[-1] % 2 else largest
    for value in (math.nextafter(middle, math.inf), 1e300, math.inf):
        yield value, beyond
    yield math.nan, math.nan
    yield 5e-324, 0.0


@pytest.mark.parametrize("name", SMALL)
def test_small_floats_are_rounded_to_nearest_even(host_engine, comm1, name):
    for value, want in hard_cases(np.dtype(SMALL[name])):
        for sign in (1, -1):
            got = float(product(comm1, sign * value, name, SMALL[name]))
            assert same(got, sign * want), f"{sign * value!r}: {got!r}, not {sign * want!r}"


@pytest.mark.parametrize("name", SMALL)
def test_small_floats_need_no_ml_dtypes(host_engine, comm1, monkeypatch, name):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)  # importing it now fails
    assert product(comm1, 0.5, name, SMALL[name]) == 0.5


def test_number_is_rounded_once(host_engine, comm1):
    # By way of float32 (an integer: by way of a double), each of these becomes a tie and is rounded down.
    assert product(comm1, 1 + 2**-8 + 2**-30, "bfloat16", SMALL["bfloat16"]) == 1 + 2**-7
    assert product(comm1, 2**60 + 2**36 + 1, "float32", np.float32) == 2**60 + 2**37


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize(
    "scalar", [0.1, -0.0, 1 / 3, 65519.9, 65520.0, 1e-45, 5e-324, math.inf, math.nan, 3, -(2**70), True]
)
def test_floats_are_rounded_as_by_numpy(host_engine, comm1, dtype, scalar):
    with np.errstate(over="ignore"):
        want = np.float64(scalar).astype(dtype)
    assert same(product(comm1, scalar, dtype, dtype), want)


@pytest.mark.parametrize(
    "scalar", [np.float32(0.5), np.int8(2), np.bool_(True), ml_dtypes.bfloat16(0.5), np.longdouble(2)]
)
def test_numpy_numbers_are_accepted(host_engine, comm1, scalar):
    assert product(comm1, scalar, "float32", np.float32) == float(scalar)


@pytest.mark.parametrize("datatype", [member for member in ncclpy.DataType if "INT" in member.name])
def test_integers(host_engine, comm1, datatype):
    kind = np.dtype(testing.DTYPES[datatype])
    limits = np.iinfo(kind)
    for value in (3, 3.0, int(limits.max), int(limits.min)):
        assert product(comm1, value, datatype, kind) == value
    for value in (0.5, math.inf, int(limits.max) + 1, int(limits.min) - 1):
        with rejects("scalar", repr(value), datatype.name, kind=ValueError):
            comm1.pre_mul_sum(value, datatype)


@pytest.mark.parametrize("scalar", [np.complex64(1), np.str_("2"), np.datetime64(0, "s"), "2", None])
def test_scalars_that_are_not_numbers_are_refused(comm1, scalar):
    with rejects("scalar", kind=TypeError):
        comm1.pre_mul_sum(scalar, "float32")


def test_buffers_of_another_type_or_size_are_refused(host_engine, comm1):
    for array in (
        np.ones(2, np.uint8),
        np.ones(1, np.int16),
        np.ones(1, ml_dtypes.float8_e8m0fnu),
        np.ones(1, np.int8),
    ):
        with rejects("scalar", "expected one element of uint8", kind=ValueError):
            comm1.pre_mul_sum(array, "uint8")
    with rejects("scalar", "negative", kind=ValueError):
        comm1.pre_mul_sum(fake_torch.Tensor(np.ones(1, np.uint8), negative=True), "uint8")
