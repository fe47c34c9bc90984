"""The benchmarks of the torch backend and of torch's own backends: every row has its samples."""

import json

from benchmark_runs import run

from benchmarks.torch_backend import main


def test_every_layer_is_measured(host_engine, tmp_path):
    path = tmp_path / "result.json"
    run("torch", "--rounds", 1, "--sizes", 8, 1 << 20, "--json", path)
    rows = [row for row in json.loads(path.read_text())["rows"] if "missing" not in row]
    wanted = {main.RIVALS["ncclpy"], main.RIVALS["gloo"], main.GROUP}
    roads = {f"all_reduce of {size}" for size in ("8 B", "1 MiB")}
    found = {(row["rival"], row["road"], row["measure"]) for row in rows}
    assert found == {(rival, road, what) for rival in wanted for road in roads for what in ("host", "latency")}
    assert all(len(row["samples"]) == 1 and row["samples"][0] > 0 for row in rows)


def test_steps_are_measured(host_engine, tmp_path):
    path = tmp_path / "result.json"
    run("torch", "--rounds", 1, "--training", "--layers", 1, "--json", path)
    rows = {(row["rival"], row["road"]): row["samples"] for row in json.loads(path.read_text())["rows"]}
    for backend in ("ncclpy", "gloo"):
        rival = main.RIVALS[backend]
        assert rows[rival, "DDP"][0] > rows[rival, "DDP, without communication"][0] / 2 > 0
        assert rows[rival, "FSDP2"][0] > 0 and (rival, "DDP, communication") in rows
        assert rows[rival, "DDP, with buckets that are not sent"][0] > 0
