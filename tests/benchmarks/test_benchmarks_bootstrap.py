"""The cost of a store: the experiment, with few clients."""

import argparse
import json

import pytest
from benchmark_runs import run

from benchmarks.bootstrap import main
from benchmarks.work import workers

GROWING = (
    "to connect all",
    "barrier of all",
    "the server's time to connect a client",
    "the server's time in a barrier, a client",
    "the server's memory, a client",
)


@pytest.mark.parametrize(
    ("counts", "processes"), [([5], 1), pytest.param([5, 9], 2, marks=pytest.mark.slow)], ids=["one process", "two"]
)
def test_every_row_of_ncclpy_is_measured(tmp_path, counts, processes):
    path = tmp_path / "result.json"
    printed = run("bootstrap", "--clients", *counts, "--processes", processes, "--rounds", 1, "--json", path)
    rows = [row for row in json.loads(path.read_text())["rows"] if "samples" in row]
    ours = {(row["operation"], row["road"]) for row in rows if row["rival"] == "ncclpy.TCPStore"}
    assert ours >= {
        ("round trip of one client", "set"),
        ("round trip of one client", "get"),
        ("16 pipelined clients", "set and get"),
        *((what, f"{count} clients") for what in GROWING for count in counts),
    }
    assert all(min(row["samples"]) > 0 for row in rows if row["unit"] != "KiB")
    assert len({(row["rival"], row["road"], row["measure"]) for row in rows}) == len(rows), "targets tell them apart"
    assert ("### How it grows" in printed) == (
        len(counts) > 1
    ) and "set and get at least 50,000 keys a second" in printed


class Answering:
    """A process that reports every rival as present."""

    def __init__(self, module):
        pass

    def ask(self, do, deadline):
        return dict.fromkeys(main.RIVALS)

    def close(self):
        pass


@pytest.fixture
def fails(monkeypatch):
    """Return a function that makes a rival fail with many clients, and measures."""

    def measured(rival, failure, path):
        asked = []

        def measure(whose, clients, nprocesses, patience):
            asked.append((whose, clients))
            if whose == rival and clients >= 9 and asked.count((whose, clients)) == 2:
                raise failure
            if not clients:
                return []
            return [main._row("barrier of all", f"{clients} clients", "time", "us", 1.0) | {"ranks": clients}]

        monkeypatch.setattr(main, "measure", measure)
        monkeypatch.setattr(main.workers, "WorkerProcess", Answering)
        chosen = argparse.Namespace(**main.DEFAULTS | {"clients": [5, 9], "json": path, "rounds": 3})
        main.run(chosen)
        return json.loads(path.read_text())["rows"], asked

    return measured


FAILURES = {
    "DistError: timed out": workers.WorkerFailed(
        "'connect' failed in a worker:\nTraceback ...\nDistError: timed out\n"
    ),
    "no answer in time": workers.WorkerLost("no answer in time:\nwhat it said last\n"),
}


@pytest.mark.parametrize("why", FAILURES)
def test_failure_of_a_rival_is_reported_and_the_rest_is_measured(fails, tmp_path, capsys, why):
    rows, asked = fails("torch TCPStore", FAILURES[why], tmp_path / "result.json")
    assert {"rival": "torch TCPStore", "missing": f"9 clients at once: {why}"} in rows
    measured = {(row["rival"], row["ranks"]): len(row["samples"]) for row in rows if row.get("ranks")}
    assert measured == {("ncclpy.TCPStore", 5): 3, ("ncclpy.TCPStore", 9): 3, ("torch TCPStore", 5): 3}
    assert asked.count(("torch TCPStore", 9)) == 2, "it is not tried again"
    assert f"- torch TCPStore: 9 clients at once: {why}" in capsys.readouterr().out


def test_failure_of_ncclpy_ends_the_run(fails, tmp_path):
    with pytest.raises(workers.WorkerFailed, match="of ours"):
        fails("ncclpy.TCPStore", workers.WorkerFailed("of ours"), tmp_path / "result.json")
