"""Sums of sparse arrays over all ranks, with different numbers of entries."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from group_fixtures import in_threads
from group_ranks import DEADLINE, run_groups

import ncclpy
import testing
from ncclpy.bootstrap import LocalStore

PACKAGES = {"torch": testing.TorchArrays, "cupy": testing.CupyArrays}


@pytest.fixture(params=["of the run", *PACKAGES])
def kind(request, arrays):
    """The kind of the summed arrays: those of the run, torch's or CuPy's; each must support addition."""
    if request.param in PACKAGES:
        pytest.importorskip(request.param, reason=f"needs {request.param}")
        if request.param == "cupy" and ncclpy.library().engine == "host":
            pytest.skip("CuPy's arrays are on GPUs")
    elif arrays.name == "ncclpy.Buffer":
        pytest.skip("plain memory cannot add")
    return request.param


def brought(rank, dimensions, entry, dtype, counts):
    """Return the indices, with duplicates, and the values of one rank."""
    random = np.random.default_rng(rank)
    shape = (counts[rank],) if dimensions is None else (dimensions, counts[rank])
    return random.integers(0, 3, shape), random.integers(0, 5, (counts[rank], *entry)).astype(dtype)


def dense(indices, values):
    """Return the dictionary of sums by index that sparse entries stand for."""
    sums = {}
    columns = np.atleast_2d(indices).T
    for index, value in zip(map(tuple, columns.tolist()), values.astype(np.float64), strict=True):
        sums[index] = sums.get(index, 0) + value
    return sums


SHAPES = {"plain": (None, ()), "one dimension": (1, ()), "two": (2, ()), "rows": (None, (3,)), "blocks": (3, (2, 2))}


def sum_of(world, kind, counts, dimensions, entry):
    lib = PACKAGES[kind]() if kind in PACKAGES else world.lib
    with world.group() as group:
        indices, values = brought(world.rank, dimensions, entry, np.float32, counts)
        work = group.all_reduce_sparse(lib.make(indices, world.device), lib.make(values, world.device))
        found = [lib.read(each) for each in work.result(DEADLINE)]
        assert work.result() is work.result(), "made once"
        return found


def check_sums(results, counts, dimensions, entry):
    wanted = {}
    for rank in range(len(results)):
        for index, value in dense(*brought(rank, dimensions, entry, np.float32, counts)).items():
            wanted[index] = wanted.get(index, 0) + value
    for indices, values in results:
        assert indices.dtype == np.int64 and values.dtype == np.float32
        assert indices.shape == ((len(wanted),) if dimensions is None else (dimensions, len(wanted)))
        assert values.shape == (len(wanted), *entry)
        found = dense(indices, values)
        assert list(found) == sorted(wanted)
        assert all((found[index] == wanted[index]).all() for index in wanted)
        assert (indices == results[0][0]).all() and (values == results[0][1]).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("counts", [(7, 5, 3), (0, 6, 1), (4, 0, 0), (0, 0, 0)], ids=str)
def test_sums(host_engine, kind, shape, counts):
    check_sums(in_threads(3, sum_of, kind, counts, *SHAPES[shape]), counts, *SHAPES[shape])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("counts", [(7, 5), (0, 6), (0, 0)], ids=str)
def test_sums_of_processes(processes, kind, shape, counts):
    """On GPUs the ranks are processes: an allocation between two launches would wait for the other thread's kernel."""
    check_sums(processes.run(sum_of, kind, counts, *SHAPES[shape]), counts, *SHAPES[shape])


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.complex64, ml_dtypes.bfloat16])
def test_types(host_engine, dtype):
    def body(group):
        work = group.all_reduce_sparse(np.array([group.rank, 5]), np.array([1, 2], dtype))
        indices, values = work.result(DEADLINE)
        assert values.dtype == dtype
        return indices.tolist(), values.astype(np.complex128).real.tolist()

    assert run_groups(2, body) == [([0, 1, 5], [1, 1, 4])] * 2


def test_sparse_sum_between_other_operations(host_engine):
    """The sparse sum has other operations before and behind it."""

    def body(group):
        array = np.ones(1000)
        before = group.all_reduce(array)
        told = []
        work = group.all_reduce_sparse(np.arange(4), np.ones(4))
        work.add_done_callback(lambda work: told.append(work.result()))
        behind = group.all_reduce(array)
        assert [each.tolist() for each in work.result(DEADLINE)] == [[0, 1, 2, 3], [2] * 4]
        before.wait(DEADLINE)
        behind.wait(DEADLINE)
        testing.wait_for(lambda: told, "the callback")
        assert told[0] is work.result()
        return array[0], group.seq

    assert run_groups(2, body) == [(4, 4)] * 2


DISAGREEMENTS = {
    "types": (np.arange(2), np.ones(2, np.float32), "values of 1 float64 each, rank 0 passes .* 1 float32 each"),
    "entries": (np.arange(2), np.ones((2, 3)), "values of 1 float64 each, rank 0 passes .* values of 3 float64"),
    "shapes of entries": (np.arange(2), np.ones((2, 1, 1)), "values of 1 float64 each, rank 0 passes .* 1x1 float64"),
    "types that NCCL carries alike": (
        np.arange(2), np.ones(2, complex), "values of 1 float64 each, rank 0 passes .* 1 complex128 each",
    ),
    "dimensions": (np.ones((2, 2), np.int64), np.ones(2), "indices without dimensions .* of 2 dimensions"),
}  # fmt: skip


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_disagreement_is_same_error_on_all_ranks(host_engine, what):
    """Every rank raises the error, and the group stays usable."""
    *first, words = DISAGREEMENTS[what]

    def body(group):
        arrays = first if group.rank == 0 else (np.arange(2), np.ones(2))
        with pytest.raises(ValueError, match=f"all_reduce_sparse: rank 1 passes .*{words}"):
            group.all_reduce_sparse(*arrays)
        total = np.ones(1)
        group.all_reduce(total).wait(DEADLINE)
        return total[0]

    assert run_groups(3, body) == [3] * 3


def alone(**options):
    return ncclpy.ProcessGroup(LocalStore(), 0, 1, device=0, timeout=DEADLINE, **options)


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ([(4, 3), (5, 3)], r"of shape \(5, 3\), rank 0 passes .* of shape \(4, 3\)"),
        ([None, (5, 3)], r"of shape \(5, 3\), rank 0 passes .* each$"),
    ],
)
def test_different_shapes_are_same_error_on_all_ranks(host_engine, shapes, said):
    def body(group):
        with pytest.raises(ValueError, match=f"rank 1 passes .*{said}"):
            group.all_reduce_sparse(np.arange(2), np.ones((2, 3)), shape=shapes[group.rank])
        with pytest.raises(ValueError, match=r"shape: \(4,\) does not fit"):
            group.all_reduce_sparse(np.arange(2), np.ones((2, 3)), shape=(4,))
        return group.all_reduce_sparse(np.arange(2), np.ones((2, 3)), shape=(4, 3)).result(DEADLINE)[1].sum()

    assert run_groups(2, body) == [12.0] * 2


def test_arrays_that_do_not_fit_begin_nothing(host_engine):
    with alone(check_nan=True) as group:
        for indices, values, error, words in (
            (np.arange(3), np.ones(2), ValueError, r"values: expected 3 .* got shape \(2,\)"),
            (np.arange(3), np.float64(1).reshape(()), ValueError, "values: expected 3"),
            (np.ones((1, 1, 1), np.int64), np.ones(1), ValueError, r"indices: expected shape \(n,\)"),
            (np.arange(3, dtype=np.int32), np.ones(3), TypeError, "indices: expected int64, got int32"),
            (
                np.arange(3),
                ncclpy.Buffer.of(np.ones(3)),
                TypeError,
                "values: expected an array of numpy, CuPy or torch",
            ),
            (np.arange(6)[::2], np.ones(3), ValueError, "not contiguous"),
            (np.arange(3), np.ones((3, 2))[:, 1], ValueError, "not contiguous"),
            ([0, 1], np.ones(2), TypeError, "indices: expected an array .* got builtins.list"),
            (np.arange(1), np.full(1, np.nan), ValueError, "check_nan: the input of all_reduce_sparse"),
        ):
            with pytest.raises(error, match=words):
                group.all_reduce_sparse(indices, values)
        with group.coalescing(), pytest.raises(ValueError, match="in a coalescing block"):
            group.all_reduce_sparse(np.arange(1), np.ones(1))
        assert group.seq == 0
        assert group.all_reduce_sparse(np.arange(1), np.ones(1)).result(DEADLINE)[1].tolist() == [1]


def test_missing_rank_is_waited_for_until_deadline(host_engine):
    def body(group):
        group.barrier().wait(DEADLINE)
        if group.rank == 0:
            with pytest.raises(ncclpy.NcclTimeout, match="all_gather"):
                group.all_reduce_sparse(np.arange(1), np.ones(1), timeout=0.3)
        else:
            testing.wait_for(lambda: group.error is not None, "the news")

    run_groups(2, body)


def test_interrupted_wait_ends_the_group(host_engine):
    """Otherwise the other ranks would wait for the second half, which the interrupted rank does not begin."""
    testing.run_python(
        """
        import signal, threading
        import numpy as np, ncclpy, testing
        from ncclpy.bootstrap import LocalStore

        store = LocalStore()
        groups = [ncclpy.ProcessGroup(store, rank, 2, device=rank, timeout=30) for rank in range(2)]
        barriers = [group.barrier() for group in groups]
        for barrier in barriers:
            barrier.wait()
        signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            groups[0].all_reduce_sparse(np.arange(1), np.ones(1))
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError
        assert "all_reduce_sparse() was left with KeyboardInterrupt" in str(groups[0].error)
        testing.wait_for(lambda: groups[1].error is not None)
        for group in groups:
            group.close()
        """,
        warm=True,
    )


def test_sparse_arrays_follow_their_stream(host_engine):
    """The sparse sum waits for values that another stream produces."""
    with ncclpy.Stream(0) as stream, alone() as group:
        comm = ncclpy.Communicator.init_all([0])[0]
        source, values = np.ones(4), np.zeros(4)
        with ncclpy.faults("call=AllReduce nth=1 at=run do=delay:300ms") as faults:
            comm.all_reduce(*[(each.ctypes.data, 4, "float64") for each in (source, values)], stream=stream)
            work = group.all_reduce_sparse(np.arange(4), values, stream=stream)
            assert faults.fired and work.result(DEADLINE)[1].tolist() == [1] * 4
        comm.close()
