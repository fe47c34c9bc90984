"""Waiting ranks spin with a core each and yield otherwise; a thread that shares its core moves to another one,
seldom.
"""

import ctypes
import os
import statistics
import subprocess
import time

import numpy as np
import pytest
from sanitizers import ROOT, build, compiled

import testing

CORES = len(os.sched_getaffinity(0))


@pytest.fixture(scope="module")
def waits(tmp_path_factory):
    program = tmp_path_factory.mktemp("waits") / "waits"
    engine = ROOT / "ncclpy/host"
    build(
        program,
        ["-O0", "-g0"],
        [ROOT / "tests/host/base/waits.cpp", engine / "base/wait.cpp", engine / "base/wait_control.cpp"],
    )

    def run(*arguments):
        command = [program, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout

    return run


@pytest.mark.skipif(CORES < 2, reason="needs two cores")
def test_thread_that_gets_its_core_back_late_moves_to_another(waits):
    # 3,000 late returns: a move at about half of 17 occasions, chosen by the last digits of the clock.
    assert 1 <= int(waits(2)) <= 17


def test_more_ranks_than_cores_no_thread_moves(waits):
    assert waits(CORES + 1) == "0\n"


def test_thread_bound_to_one_core_stays(waits):
    assert waits(1, "pinned") == "0\n"


@pytest.mark.parametrize(
    ("cores", "answer"),
    [
        (["0,1", "0,1"], "a core each"),
        (["0", "1"], "a core each"),  # as a launcher binds ranks
        (["0", "0"], "crowded"),
        (["0", "0", "1,2,3"], "crowded"),
        (["0,1", "0", "1", "2,3"], "crowded"),
        (["0,1", "1,2", "0,2"], "a core each"),
        (["0,1,2", "0,1,2", "3", "0,3"], "a core each"),
        (["0,1"] * 3, "crowded"),
        (["1023", "1022"], "a core each"),
    ],
    ids=" ".join,
)
def test_ranks_by_their_core_sets_are_crowded_or_not(waits, cores, answer):
    assert waits("know", *cores) == f"{answer}\n" * 2


# The C library's sched_yield replaced by one that takes no time and counts its calls.
COUNTER = """
static volatile long yields;
int sched_yield(void) { __atomic_fetch_add(&yields, 1, __ATOMIC_RELAXED); return 0; }
long counted_yields(void) { return __atomic_exchange_n(&yields, 0, __ATOMIC_RELAXED); }
"""


def yields_of_waits(rank, cores):
    """Return how many times rank 1 yields its core in each wait for an operation that rank 0 issues 2 ms late."""
    os.sched_setaffinity(0, {cores[rank.rank]})
    comm = rank.init()
    values, yields = np.zeros(1), []
    for turn in range(30):
        comm.barrier()
        ctypes.CDLL(None).counted_yields()
        if rank.rank == 0:
            time.sleep(2e-3)
            values[:] = turn
        comm.broadcast(values)
        yields.append(ctypes.CDLL(None).counted_yields())
        assert values[0] == turn
    return yields


@pytest.mark.skipif(CORES < 2, reason="needs two cores")
@pytest.mark.parametrize("bound", ["to a core each", pytest.param("to the same core", marks=pytest.mark.slow)])
def test_bound_ranks_wait_by_the_cores_of_all_ranks(tmp_path, monkeypatch, bound):
    """A rank bound to a core of its own is not crowded: the cores of all ranks count."""
    source, library = tmp_path / "counter.c", tmp_path / "counter.so"
    source.write_text(COUNTER)
    made = compiled(library, "-shared", "-fPIC", "-x", "c", "-std=c11", source)
    assert made.returncode == 0, made.stderr
    monkeypatch.setenv("LD_PRELOAD", f"{os.environ.get('LD_PRELOAD', '')} {library}".strip())
    first, second = sorted(os.sched_getaffinity(0))[:2]
    _, yields = testing.run_processes(2, yields_of_waits, [first, second if bound == "to a core each" else first])
    # With fewer cores than ranks a rank yields some 100 times and then sleeps; otherwise it yields for 300 us.
    if bound == "to a core each":
        assert max(yields) > 128
    else:
        assert 16 <= statistics.median(yields) <= 128
