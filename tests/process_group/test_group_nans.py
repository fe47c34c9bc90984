"""check_nan: a rank checks the data that it sends, and no other."""

from __future__ import annotations

import logging

import ml_dtypes
import numpy as np
import pytest
from group_ranks import DEADLINE, run_groups

import ncclpy
from ncclpy.bootstrap import LocalStore

NAN = float("nan")


def with_nan(count=4, at=2, dtype=np.float32):
    array = np.ones(count, dtype)
    array[at] = NAN
    return array


#: Calls in which `bad`, the array with the NaN, is sent and `good` is not; in `ROOTED`, only the root sends.
CALLS = {
    "all_reduce": lambda group, bad, good, root: group.all_reduce(bad),
    "all_reduce to another": lambda group, bad, good, root: group.all_reduce(bad, good),
    "reduce": lambda group, bad, good, root: group.reduce(bad, good if root == group.rank else None, root=root),
    "all_gather": lambda group, bad, good, root: group.all_gather(bad[:2], good),
    "all_gather to a list": lambda group, bad, good, root: group.all_gather(bad[:2], [good[:2], good[2:]]),
    "reduce_scatter": lambda group, bad, good, root: group.reduce_scatter(bad, good[:2]),
    "reduce_scatter of a list": lambda group, bad, good, root: group.reduce_scatter([bad[:2], good[:2]], good[2:]),
    "all_to_all": lambda group, bad, good, root: group.all_to_all(bad, good),
    "all_to_all of a list": lambda group, bad, good, root: group.all_to_all(
        list(bad.reshape(2, 2)), list(good.reshape(2, 2))
    ),
    "gather": lambda group, bad, good, root: group.gather(bad[:2], good if root == group.rank else None, root),
    "send": lambda group, bad, good, root: group.send(bad, 1 - group.rank),
}
ROOTED = {
    "broadcast": lambda group, bad, good, root: group.broadcast(bad, root=root),
    "broadcast to another": lambda group, bad, good, root: group.broadcast(bad, good, root=root),
    "scatter": lambda group, bad, good, root: group.scatter(bad, good[:2], root),
    "scatter of a list": lambda group, bad, good, root: group.scatter([good[:2], bad[:2]], good[2:], root),
}


@pytest.mark.parametrize("call", [*CALLS, *ROOTED])
def test_call_with_nan_does_not_begin(host_engine, call):
    """Nothing is begun, and the group stays usable."""

    def body(group):
        if group.rank == 0:
            with pytest.raises(
                ValueError, match=rf"{call.split()[0]} on rank 0 of process group 'n' has 1 NaN,.* index [01]\b"
            ):
                (CALLS | ROOTED)[call](group, with_nan(at=1), np.ones(4, np.float32), 0)
        total = np.ones(1)
        group.all_reduce(total).wait(DEADLINE)
        return total[0], group.seq

    assert run_groups(2, body, name="n", check_nan=True) == [(2, 1)] * 2


@pytest.mark.parametrize("call", ROOTED)
def test_nan_on_rank_that_does_not_send_is_ignored(host_engine, call):
    """Rank 0 has the NaN and does not send: the root is rank 1."""

    def body(group):
        bad = with_nan(at=1) if group.rank == 0 else np.full(4, 3, np.float32)
        good = np.zeros(4, np.float32)
        ROOTED[call](group, bad, good, 1).wait(DEADLINE)
        return 3 in bad.tolist() + good.tolist() or 0 in good.tolist()

    run_groups(2, body, check_nan=True)


def test_received_memory_is_not_checked(host_engine):
    def body(group):
        array = with_nan() if group.rank == 0 else np.ones(4, np.float32)
        (group.recv if group.rank == 0 else group.send)(array, 1 - group.rank).wait(DEADLINE)
        group.all_reduce(array, with_nan()).wait(DEADLINE)  # an overwritten receive array is not checked either
        return array.tolist()

    assert run_groups(2, body, check_nan=True) == [[1] * 4] * 2


def alone(**options):
    return ncclpy.ProcessGroup(LocalStore(), 0, 1, device=0, timeout=DEADLINE, **options)


def test_error_tells_count_and_place_of_nans(host_engine):
    with alone(check_nan=True) as group:
        array = np.ones((3, 4), np.float32)
        array[1, 2] = array[2, 3] = NAN
        with pytest.raises(ValueError, match=r"has 2 NaNs, the first at index \(1, 2\)"):
            group.all_reduce(array)
        with pytest.raises(ValueError, match=r"send\[0\] of all_to_all .* 1 NaN, the first at index 2"):
            group.all_to_all([with_nan()], [np.ones(4, np.float32)])
        group.all_reduce(np.array([np.inf, -np.inf, 0.0])).wait(DEADLINE)
        group.all_reduce(np.ones(0)).wait(DEADLINE)
        group.barrier().wait(DEADLINE)


FLOATS = [np.float16, np.float32, np.float64, np.complex64]
SMALL_FLOATS = [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]


@pytest.mark.parametrize("dtype", [*FLOATS, *SMALL_FLOATS])
def test_types_that_have_nans(host_engine, dtype):
    with alone(check_nan=True) as group:
        group.all_reduce(np.ones(4, dtype)).wait(DEADLINE)
        with pytest.raises(ValueError, match="1 NaN, the first at index 2"):
            group.all_reduce(with_nan(dtype=dtype))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64, np.bool_])
def test_types_without_nans(host_engine, dtype):
    with alone(check_nan=True) as group:
        group.all_reduce(np.ones(4, dtype)).wait(DEADLINE)


def test_block_with_nan_launches_nothing(host_engine):
    with alone(check_nan=True) as group:
        array = np.ones(4)
        with pytest.raises(ValueError, match="check_nan: the input of all_reduce"):
            group.all_reduce_coalesced([array, with_nan()])
        assert group.seq == 0


def test_without_check_nan_nans_are_sent(host_engine):
    with alone() as group:
        array = with_nan()
        group.all_reduce(array).wait(DEADLINE)
        assert np.isnan(array[2])


def test_groups_of_some_ranks_check_too(host_engine):
    with alone(check_nan=True) as group, group.new_group([0]) as child:
        with pytest.raises(ValueError, match="check_nan"):
            child.all_reduce(with_nan())


def test_memory_without_framework_is_skipped_with_warning(host_engine, caplog):
    array = with_nan()
    with alone(check_nan=True, name="raw") as group, caplog.at_level(logging.WARNING, logger="ncclpy.process_group"):
        for buffer in [ncclpy.Buffer.of(array)] * 2 + [(array.ctypes.data, 4, "float32")]:
            group.all_reduce(buffer).wait(DEADLINE)
    told = [record.getMessage() for record in caplog.records if "check_nan" in record.getMessage()]
    assert len(told) == 2 and "Buffer" in told[0] and "builtins.tuple" in told[1] and "'raw'" in told[0]


def test_check_waits_for_the_producer(host_engine):
    """An array that another stream still writes is checked after the write."""
    with ncclpy.Stream(0) as stream, alone(check_nan=True) as group:
        clean, array = np.ones(4, np.float32), with_nan()
        comm = ncclpy.Communicator.init_all([0])[0]
        with ncclpy.faults("call=AllReduce nth=1 at=run do=delay:300ms") as faults:
            buffers = [(each.ctypes.data, 4, "float32") for each in (clean, array)]
            comm.all_reduce(*buffers, stream=stream)  # which copies, late
            group.broadcast(array, stream=stream).wait(DEADLINE)
            assert faults.fired
        comm.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e5m2", "complex64", "int32"])
def test_tensors_of_torch(dtype):
    torch = pytest.importorskip("torch", reason="needs torch")
    place = "cuda:0" if ncclpy.library().engine == "cuda" else "cpu"
    ones = torch.ones(2, 3, dtype=torch.float32)
    bad = ones.clone()
    bad[1, 1] = NAN
    with alone(check_nan=True) as group:
        group.broadcast(ones.to(getattr(torch, dtype)).to(place)).wait(DEADLINE)
        if dtype == "int32":
            return
        for tensor in (bad.to(getattr(torch, dtype)).to(place), torch.nn.Parameter(bad.to(place), False)):
            with pytest.raises(ValueError, match=r"1 NaN, the first at index \(1, 1\)"):
                group.broadcast(tensor)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "int32"])
def test_arrays_of_cupy(dtype):
    cupy = pytest.importorskip("cupy", reason="needs CuPy")
    with alone(check_nan=True) as group:
        group.broadcast(cupy.ones((2, 3), dtype)).wait(DEADLINE)
        if dtype == "int32":
            return
        bad = cupy.ones((2, 3), dtype)
        bad[1, 1] = NAN
        with pytest.raises(ValueError, match=r"1 NaN, the first at index \(1, 1\)"):
            group.broadcast(bad)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int32"])
def test_arrays_of_jax(dtype, arrays, monkeypatch):
    """JAX arrays are read-only, so that the result goes to another array."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jnp = pytest.importorskip("jax.numpy", reason="needs JAX")
    ones = jnp.ones((2, 3), dtype)
    with alone(check_nan=True) as group:
        total = arrays.make(np.zeros(6, ones.dtype), 0)
        group.all_reduce(ones, arrays.argument(total)).wait(DEADLINE)
        assert (arrays.read(total) == 1).all()
        if dtype == "int32":
            return
        with pytest.raises(ValueError, match=r"1 NaN, the first at index \(1, 1\)"):
            group.all_reduce(ones.at[1, 1].set(NAN), arrays.argument(total))
