"""What negotiation takes: every way that is measured has its samples."""

import json

from benchmark_runs import run

from benchmarks.coordinator import main
from benchmarks.coordinator.models import MODELS


def test_the_models_are_those_of_their_papers():
    counts = {model: make() for model, make in MODELS.items()}
    assert [len(counts["ResNet-50"]), len(counts["GPT-2"])] == [161, 148]
    assert [sum(counts["ResNet-50"]), sum(counts["GPT-2"])] == [25_557_032, 124_439_808]


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
    assert len(steps) == 5 and all(min(row["samples"]) > 0 for row in steps)  # flat of both ways is one row
    assert "### the gradients of ResNet-50" in printed
