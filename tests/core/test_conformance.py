"""Every collective, type and operator, in and out of place, on 1 to 8 ranks in every launch style, against numpy."""

from __future__ import annotations

import numpy as np
import pytest

import conformance
import ncclpy
import testing


# test_conformance_variants covers 8 ranks, with fewer types.
@pytest.fixture(scope="module", params=conformance.worlds(slow=(8,)), ids="{}ranks".format)
def comms(request):
    """Yield one set of communicators per number of ranks; threads and groups share it."""
    yield from testing.communicators(request.param)


@pytest.mark.parametrize("collective", conformance.REDUCTIONS + conformance.MOVES)
def test_threads(comms, arrays, collective):
    matrix = conformance.cases(len(comms), (collective,))
    found = testing.run_threads(
        len(comms), lambda rank: conformance.run_rank(arrays, comms[rank.rank], matrix), timeout=90, comms=comms
    )
    wrong = [message for messages in found for message in messages]
    assert not wrong, conformance.report(wrong)


@pytest.mark.parametrize("collective", conformance.REDUCTIONS + conformance.MOVES)
def test_one_thread_group(comms, arrays, collective):
    matrix = conformance.cases(len(comms), (collective,))
    wrong = testing.run_with_deadline(lambda: conformance.run_group(arrays, comms, matrix), 90)
    assert not wrong, conformance.report(wrong)


@pytest.mark.parametrize("nranks", [1, 2, pytest.param(3, marks=pytest.mark.slow), *conformance.worlds((4, 8))[3:]])
def test_processes(nranks):
    found = testing.run_processes(nranks, conformance.run_process, timeout=110)
    wrong = [message for messages in found for message in messages]
    assert not wrong, conformance.report(wrong)


@pytest.mark.parametrize("datatype", [d for d in ncclpy.DataType if conformance.is_float(d)])
def test_sum_of_any_floats_rounds_within_bounds(comms, arrays, datatype):
    # Every addition rounds by at most the unit roundoff of the magnitudes added so far, in any order.
    nranks = len(comms)
    dtype = testing.DTYPES[datatype]
    random = np.random.default_rng(datatype)
    parts = [random.normal(0, 1, 1023).astype(dtype) for _ in range(nranks)]
    buffers = [arrays.make(part, comm.device) for part, comm in zip(parts, comms, strict=True)]

    def issue():
        with ncclpy.group():
            for comm, buffer in zip(comms, buffers, strict=True):
                comm.all_reduce(arrays.argument(buffer))

    testing.run_with_deadline(issue)
    exact = np.add.reduce([part.astype(np.float64) for part in parts], axis=0)
    magnitudes = np.add.reduce([abs(part.astype(np.float64)) for part in parts], axis=0)
    bound = nranks * 2.0 ** -conformance.BITS[datatype] * magnitudes
    first = arrays.read(buffers[0]).astype(np.float64)
    assert np.all(abs(first - exact) <= bound), abs(first - exact).max()
    for buffer in buffers[1:]:
        # Every rank has the same bits: replicas must not drift apart.
        assert np.array_equal(arrays.read(buffer).astype(np.float64), first)


@pytest.mark.parametrize("datatype", ["float16", "bfloat16", "float8e4m3", "float8e5m2"])
def test_small_floats_accumulate_in_float32(host_engine, comms, datatype):
    # In the type itself, big + small stays big however often small is added; in float32 the small terms add up.
    nranks = len(comms)
    datatype = ncclpy.DataType[datatype.upper()]
    dtype = testing.DTYPES[datatype]
    bits = conformance.BITS[datatype]
    big, small = 2.0 ** (bits - 1), 0.25
    arrays = [np.array([big if rank == 0 else small], dtype) for rank in range(nranks)]

    def issue():
        with ncclpy.group():
            for comm, array in zip(comms, arrays, strict=True):
                comm.all_reduce(array)

    testing.run_with_deadline(issue)
    expected = np.array([big + small * (nranks - 1)]).astype(dtype)
    assert [array[0] for array in arrays] == [expected[0]] * nranks
