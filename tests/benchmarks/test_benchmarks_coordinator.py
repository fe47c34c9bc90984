"""The cost of negotiation: every way that is measured has its samples."""

import argparse
import json

import launchers
import pytest
from benchmark_runs import run

from benchmarks.coordinator import main, scale, scale_side
from benchmarks.coordinator.models import MODELS


def test_models_are_those_of_their_papers():
    counts = {model: make() for model, make in MODELS.items()}
    assert [len(counts["ResNet-50"]), len(counts["GPT-2"])] == [161, 148]
    assert [sum(counts["ResNet-50"]), sum(counts["GPT-2"])] == [25_557_032, 124_439_808]


class Here:
    """A worker process replaced by calls in this process."""

    def __init__(self, module):
        assert module == scale.SIDE
        self.side = scale_side.Side()

    def ask(self, do, deadline, **parameters):
        return getattr(self.side, f"do_{do}")(**parameters)

    def close(self):
        pass


@pytest.mark.parametrize("where", ["here", pytest.param("in fresh processes", marks=pytest.mark.slow)])
def test_growth_with_ranks_and_names_is_measured(tmp_path, monkeypatch, where):
    monkeypatch.setattr(scale, "NAMES", [10, 100])  # without effect in another process, where names are not checked
    if where == "here":
        monkeypatch.setattr(scale.workers, "WorkerProcess", Here)
    path = tmp_path / "result.json"
    scale.run(argparse.Namespace(rounds=1, most_ranks=4, json=path))
    result = json.loads(path.read_text())
    found = {(row["operation"], row["road"]) for row in result["rows"] if min(row["samples"]) > 0}
    ways = {(way, f"{n} ranks") for way in (scale.WAY, scale.SHARED) for n in (2, 4)}
    assert found == ways | {(each, f"{n} names") for each in (scale.NEW, scale.KNOWN) for n in (10, 100)}
    assert sum("times what this formula gives" in note for note in result["notes"]) == 3


@pytest.mark.parametrize("power, verdict", [(0.0, "no worse"), (1.0, "no worse"), (2.0, ": worse")])
def test_faster_growth_is_reported(power, verdict):
    ranks = [2, 4, 8, 16, 32, 64, 128]
    rows = {(scale.WAY, n): {"samples": [5 + n.bit_length() ** (3 * power if power > 1 else power)]} for n in ranks}
    rows |= {(each, n): {"samples": [5 + 2 * n**power]} for each in (scale.NEW, scale.KNOWN) for n in scale.NAMES}
    assert all(verdict in said for said in scale.judged(rows, ranks))


@pytest.mark.slow
def test_every_way_is_measured(tmp_path):
    path = tmp_path / "result.json"
    printed = run("coordinator", "--rounds", 1, "--models", "ResNet-50", "--json", path)
    rows = [row for row in json.loads(path.read_text())["rows"] if "missing" not in row]
    launches = [row for row in rows if row["operation"].startswith("from the last bring")]
    assert {row["road"] for row in launches} == {
        f"over a {way}, rank {last} last" for way in main.WAYS for last in (0, 1)
    }
    assert all(len(row["samples"]) == main.CALLS and min(row["samples"]) > 0 for row in launches)
    steps = [row for row in rows if row["operation"] == "the gradients of ResNet-50, 97 MiB, 2 processes"]
    assert len(steps) == 6 and all(min(row["samples"]) > 0 for row in steps)
    assert "### the gradients of ResNet-50" in printed


@pytest.mark.launchers
@pytest.mark.parametrize("engine", main.ENGINES)
def test_mpi_is_measured(monkeypatch, engine):
    monkeypatch.setattr(main, "CALLS", 20)
    chosen = argparse.Namespace(models=["ResNet-50"], ranks=2)
    rows = main._over_mpi(chosen, "MPICH", launchers.mpi("mpich") / "bin/python", engine)
    road = f"over MPICH, data by {main.ENGINES[engine]}"
    expected = {f"{road}, rank 0 last", f"{road}, rank 1 last"}
    expected |= {f"ResNet-50: {how}, {road}" for how in ("in any order", "grouped")}
    assert {row["road"] for row in rows} == expected
    assert {len(row["samples"]) for row in rows} == {20, main.STEPS} and all(min(row["samples"]) > 0 for row in rows)
