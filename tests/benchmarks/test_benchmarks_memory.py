"""The cost of registered memory, on the host engine; no test here checks a time."""

import json

import pytest
from benchmark_runs import run

from benchmarks.memory import main as memory
from benchmarks.pages import report, targets
from benchmarks.work import workers


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    path = tmp_path_factory.mktemp("memory") / "result.json"
    printed = run("memory", "--host", "--rounds", 1, "--json", path)
    assert printed.count("### a segment") == 2, "its part, as soon as it is there, and all parts"
    return json.loads(path.read_text())


@pytest.mark.slow
def test_all_costs_of_memory_are_measured(result):
    assert result["settings"]["engine"] == "host"
    found = {(row["rival"], row["road"], row["measure"]): row["samples"] for row in result["rows"]}
    assert {len(samples) for samples in found.values()} == {1}
    for rival in ("ncclpy.Communicator", "ncclpy.bindings"):
        for kind in ("plain memory, no registry", "plain memory", "memory.alloc", "windows"):
            assert found.pop((rival, kind, "host"))
    for rival in (memory.OURS, memory.THEIRS):
        for kind in ("memory.alloc", "memory of others"):
            for count in ("1 communicator", "2 communicators"):
                for measure in ("comes", "next call", "comes, with that call", "goes"):
                    assert min(found.pop((rival, f"{kind}, {count}", measure))) > 0
    # Each numpy array is a segment, allocated and freed: so the count is known.
    assert found.pop((memory.POOL, 'memory.pool("numpy")', "reaches ncclpy")) == [2.0 * memory.ALLOCATIONS]
    assert {measure for _, _, measure in found} == {"time"}


@pytest.mark.slow
def test_result_is_a_page_with_its_targets(result):
    as_of_gpus = {**result, "settings": {**result["settings"], "engine": "gpu"}}
    pool = 'memory.pool("torch")'
    as_of_gpus["rows"] = [
        {**row, "road": pool} if row["road"].startswith("memory.pool") else row for row in result["rows"]
    ]
    judged = targets.judge(as_of_gpus)
    assert [one["text"] for one in judged] == [one.text for one in targets.TARGETS if one.experiment == "memory"]
    assert None not in [one["kept"] for one in judged] and not judged[-1]["kept"]
    page = report.pages([("memory-host.json", as_of_gpus)])["performance/memory.md"]
    assert page.startswith("# What registered memory costs") and "### Targets" in page
    assert all(len(line.split(" | ")) <= 7 for line in page.splitlines() if line.startswith("| "))


def test_rows_measured_before_a_failure_are_kept(tmp_path, monkeypatch):
    def fails(phase, rounds):
        phase.add("an operation", "ours", "a road", "time", 1.0)
        raise workers.WorkerFailed("it failed:\nno memory")

    def goes_on(phase, rounds):
        phase.add("another", "ours", "a road", "time", 2.0)

    monkeypatch.setattr(memory, "PHASES", {"calls": fails, "events": goes_on})
    path = tmp_path / "result.json"
    chosen = memory.argparse.ArgumentParser()
    memory.arguments(chosen)
    parsed = chosen.parse_args(["--gpu", "2", "--only", "calls", "events", "--rounds", "1", "--json", str(path)])
    assert memory.run(parsed) == 1
    rows = json.loads(path.read_text())["rows"]
    assert [row.get("samples", row.get("missing")) for row in rows] == ["failed: calls: no memory", [1.0], [2.0]]
