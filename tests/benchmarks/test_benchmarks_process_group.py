"""The cost of a process group: each step for each number of ranks, and pairs."""

import json
from urllib.parse import quote

import pytest
from benchmark_runs import run

from benchmarks.pages import targets
from benchmarks.process_group import checks, losses, pairs, recovery, standing
from benchmarks.work import workers
from ncclpy.bootstrap import TCPStore


@pytest.mark.slow
def test_every_step_is_measured_as_threads_and_as_processes(tmp_path):
    path = tmp_path / "result.json"
    options = "--ranks", 2, 5, "--most-processes", 2, "--pairs", 2, "--rounds", 1, "--json", path
    printed = run("process_group", "--host", *options)
    rows = json.loads(path.read_text())["rows"]
    for operation in standing.STEPS:
        of = [row for row in rows if row["operation"] == operation]
        measured = {(row["rival"], row["ranks"]) for row in of}
        assert measured == {(standing.THREADS, 2), (standing.THREADS, 5), (standing.PROCESSES, 2)}
        assert all(len(row["samples"]) == 1 and min(row["samples"]) > 0 for row in of)
    (memory,) = [row for row in rows if row["measure"] == "memory of a pair"]
    # Two pairs need little memory; as other processes share less meanwhile, the difference may be below 0.
    assert (memory["rival"], memory["road"], len(memory["samples"])) == (pairs.OURS, "2 pairs", 1)
    (made,) = [row for row in rows if row["measure"] == "to make a pair, all at once"]
    assert made["road"] == "2 pairs" and min(made["samples"]) > 0
    assert "### How it grows" in printed and "### pairs" in printed
    compared = {(row["road"], row["measure"]): row["samples"] for row in rows if row["road"].startswith("check=")}
    roads = [road + of for _, of in checks.OPERATIONS.values() for road in checks.ROADS]
    assert compared.keys() == {(road, measure) for road in roads for measure in ("median", "minimum")}
    for road in roads:
        least, median = compared[road, "minimum"], compared[road, "median"]
        assert len(median) == 1 and all(0 < low <= middle for low, middle in zip(least, median, strict=True))


def test_part_of_the_experiment_is_measured(tmp_path):
    path = tmp_path / "result.json"
    options = "--only", "standing", "--ranks", 2, "--most-processes", 0, "--rounds", 1, "--json", path
    printed = run("process_group", "--host", *options)
    rows = {row["operation"]: row for row in json.loads(path.read_text())["rows"]}
    assert set(standing.STEPS) <= rows.keys() and all(row["rival"] == standing.THREADS for row in rows.values())
    assert "to start" in printed


def test_ranks_that_cannot_share_memory_compare_by_the_store():
    """Ranks with notes in the store compare there."""
    sides = [workers.WorkerProcess(checks.SIDE) for _ in range(2)]
    try:
        port = sides[0].ask("serve")
        workers.ask_all(
            [(side, {"rank": i, "port": port, "roads": checks.ROADS}) for i, side in enumerate(sides)], "open"
        )
        with TCPStore("127.0.0.1", port) as store:
            by_store = {key.split("/")[2] for key in store.keys("ncclpy/group/") if "/check/" in key}
        workers.ask_all([(side, {}) for side in sides], "close")
    finally:
        for side in reversed(sides):
            side.close()
    assert by_store == {quote(road, safe="") for road, (_, shares) in checks.ROADS.items() if not shares}


def test_target_for_64_ranks_is_judged_where_it_is_measured():
    rows = [
        {**standing.Standing(rival, 64)._row("to stand", 0), "samples": [reached]}
        for rival, reached in ((standing.THREADS, 2000.0), (standing.PROCESSES, 4000.0))
    ]
    judged = targets.judge({"experiment": "process_group", "settings": {"engine": "host"}, "rows": rows})
    assert [each["kept"] for each in judged] == [True, False]


@pytest.mark.parametrize("processes", [[], pytest.param([2], marks=pytest.mark.slow)], ids=["threads", "both"])
def test_recovery_of_a_group_is_measured(tmp_path, processes):
    path = tmp_path / "result.json"
    run("recovery", "--processes", *processes, "--threads", 3, "--rounds", 1, "--json", path)
    rows = json.loads(path.read_text())["rows"]
    found = {(row["operation"], row["ranks"]): row["samples"][0] for row in rows}
    steps = losses.NOTICED, losses.WHOLE, losses.KILL, losses.SHRINK, losses.ANEW
    killed = {(each, size) for each in steps for size in processes}
    assert found.keys() == killed | {(losses.RECOVER, 3), (losses.FIRST, 3)}
    assert all(found[losses.KILL, size] >= found[losses.NOTICED, size] for size in processes)
    assert all(each > 0 for each in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("how", losses.LOSSES)
def test_recovery_without_a_rank_and_with_a_new_one_is_measured(how):
    """The experiment for GPUs."""
    found = recovery.lose(how, 3, 1, "host")
    to_error, to_whole, to_next = losses.LOSSES[how]
    assert found.keys() == {to_error, to_whole, to_next, losses.JOIN, losses.JOINED}
    assert 0 < found[to_error] < found[to_next] and 0 < found[losses.JOINED] < found[losses.JOIN]
    if how == "stop":  # the deadline counts from the collective, half a second before
        assert found[to_error] > losses.STOPPED_DEADLINE / 2
