"""Training-like loops of two processes, each with a device and two groups; segments are allocated and freed often.

What is registered is compared with a model after each call (`training.py`). The loops run on the host engine with
numpy's arrays; on two GPUs with torch's, by its hooks and by a pool, and with CuPy's.

On GPUs run the short loops, and the tests of one GPU, under memcheck too; that takes longer than all other tests here:

    NCCLPY_TEST_PATIENCE=8 compute-sanitizer --tool memcheck --target-processes all --report-api-errors no \
        --error-exitcode 9 --log-file memcheck.%p python -m pytest -n 0 --timeout 900 \
        tests/memory/test_training_gpu.py tests/memory/test_torch_hooks_gpu.py -k "short or hooks_gpu and not runs_out"
    grep -h "ERROR SUMMARY" memcheck.* | sort | uniq -c   # 0 errors in each

Failing calls are not reported: torch, CuPy and NCCL ask a device for features that it may lack, and check the result.
"""

from __future__ import annotations

import pytest
from group_fixtures import IN_A_STORE, launched
from training import SOURCES, loops

import ncclpy
import testing

#: The sources of arrays on each engine.
KINDS = {"host": ["pool"], "cuda": ["torch hooks", "torch pool", "cupy"]}


def need(kind):
    if kind not in KINDS[ncclpy.library().engine]:
        pytest.skip(f"the {ncclpy.library().engine} engine has no {kind}")
    if kind == "cupy":
        pytest.importorskip("cupy")


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("steps", [pytest.param(8, id="short"), pytest.param(60, id="long")])
def test_loop_on_two_groups(run, kind, steps):
    need(kind)
    first, second = run(loops, [kind], [130], steps)
    assert first == second and len(first[0]) == steps + 2


@pytest.mark.parametrize(
    ("seed", "count"),
    # On GPUs this takes half a minute: most loops make communicators anew.
    [
        (100, 4),
        pytest.param(100, 12, marks=[pytest.mark.slow]),
        *(pytest.param(1000 * i, 40, marks=[pytest.mark.campaign]) for i in range(1, 4)),
    ],
)
def test_random_loops(run, seed, count):
    """Torch's memory is registered by hooks in one loop, and comes from a pool in the next, in one process."""
    kinds = [kind for kind in KINDS[ncclpy.library().engine] if kind != "cupy"]
    done = set()
    for some in range(seed, seed + count, 12):  # as many as fit into one deadline
        first, second = run(loops, kinds, range(some, min(some + 12, seed + count)), 25)
        assert first == second
        done.update(*first)
    assert {"let_go_in_flight", "renew_group", "renew_source", "give_back", "gather", "scatter"} <= done
    assert ncclpy.library().engine == "host" or {"replay", "pool_of_its_own"} <= done


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] if kind in KINDS["host"] else []) for kind in SOURCES]
)
def test_abort_with_segments_registered(kind, tmp_path):
    """The processes also end by themselves, without an error."""
    testing.need_processes(2)
    need(kind)
    program = f"""
    import training
    from group_fixtures import World
    with store:
        said = training.abort_in_flight(World(rank, size, store, "processes"), {kind!r})
        print("said", rank, repr(said), flush=True)
    """
    code, said = launched(tmp_path, 2, IN_A_STORE + program.replace("\n    ", "\n"))
    assert code == 0, said
    lines = dict(line.split("said ", 1)[1].split(" ", 1) for line in said.splitlines() if "said " in line)
    assert "all_reduce" in lines["0"] and lines["1"] == "''", said
