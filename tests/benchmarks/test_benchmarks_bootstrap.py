"""What a store costs: the experiment, with few clients."""

import json

from benchmark_runs import run


def test_every_row_of_ours_is_measured(tmp_path):
    path = tmp_path / "result.json"
    printed = run("bootstrap", "--clients", 5, 9, "--processes", 2, "--rounds", 1, "--json", path)
    rows = {(row["operation"], row["road"]): row for row in json.loads(path.read_text())["rows"] if "samples" in row}
    ours = {key for key, row in rows.items() if row["rival"] == "ncclpy.TCPStore"}
    assert ours >= {
        ("round trip of one client", "set"),
        ("round trip of one client", "get"),
        ("16 pipelined clients", "set and get"),
        *((what, f"{count} clients") for what in ("to connect all", "barrier of all") for count in (5, 9)),
    }
    assert all(min(row["samples"]) > 0 for row in rows.values())
    assert "### How it grows" in printed and "set and get at least 50,000 keys a second" in printed
