"""Training-like loops of two processes, a device and two groups each, with segments that come and go all the time.

What is registered is compared with a model after each call (`training.py`). The loops run on the host engine with
numpy's arrays; on two GPUs with torch's, by its hooks and by a pool, and with CuPy's.

On GPUs the short ones are for memcheck too, with those of one GPU, which take longer than all else here:

    NCCLPY_TEST_PATIENCE=8 compute-sanitizer --tool memcheck --target-processes all --report-api-errors no \
      --error-exitcode 9 --log-file memcheck.%p python -m pytest -n 0 --timeout 900 \
      tests/memory/test_training_gpu.py tests/memory/test_torch_hooks_gpu.py -k "short or hooks_gpu and not runs_out"
    grep -h "ERROR SUMMARY" memcheck.* | sort | uniq -c   # of 0 errors all

Calls that fail are left out: torch, CuPy and NCCL ask for what a device may not have, and look at the answer.
"""

from __future__ import annotations

import pytest
from group_worlds import IN_A_STORE, launched
from training import SOURCES, loops

import ncclpy
import testing

#: What each engine's arrays can come from.
KINDS = {"host": ["pool"], "cuda": ["torch hooks", "torch pool", "cupy"]}


def need(kind):
    if kind not in KINDS[ncclpy.library().engine]:
        pytest.skip(f"the {ncclpy.library().engine} engine has no {kind}")
    if kind == "cupy":
        pytest.importorskip("cupy")


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("steps", [pytest.param(8, id="short"), pytest.param(60, id="long")])
def test_a_loop_on_two_groups(run, kind, steps):
    need(kind)
    first, second = run(loops, [kind], [130], steps)
    assert first == second and len(first[0]) == steps + 2


@pytest.mark.parametrize(
    ("seed", "count"),
    # On GPUs half a minute: most loops make communicators anew.
    [
        (100, 4),
        pytest.param(100, 12, marks=[pytest.mark.slow]),
        *(pytest.param(1000 * i, 40, marks=[pytest.mark.campaign]) for i in range(1, 4)),
    ],
)
def test_random_loops(run, seed, count):
    """Memory of torch comes by hooks in one loop and from a pool in the next, in one process."""
    kinds = [kind for kind in KINDS[ncclpy.library().engine] if kind != "cupy"]
    done = set()
    for some in range(seed, seed + count, 12):  # what fits into one deadline
        first, second = run(loops, kinds, range(some, min(some + 12, seed + count)), 25)
        assert first == second
        done.update(*first)
    assert {"let_go_in_flight", "renew_group", "renew_source", "give_back", "gather", "scatter"} <= done
    assert ncclpy.library().engine == "host" or {"replay", "pool_of_its_own"} <= done


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] if kind in KINDS["host"] else []) for kind in SOURCES]
)
def test_an_abort_with_segments_registered(kind, tmp_path):
    """Also the processes come to their ends, by themselves and with no error."""
    testing.need_processes(2)
    need(kind)
    program = f"""
    import training
    from group_worlds import World
    with store:
        said = training.abort_in_flight(World(rank, size, store, "processes"), {kind!r})
        print("said", rank, repr(said), flush=True)
    """
    code, said = launched(tmp_path, 2, IN_A_STORE + program.replace("\n    ", "\n"))
    assert code == 0, said
    lines = dict(line.split("said ", 1)[1].split(" ", 1) for line in said.splitlines() if "said " in line)
    assert "all_reduce" in lines["0"] and lines["1"] == "''", said
