"""Every collective by size beside its rivals: run on the host engine, both ways; no test here looks at a time."""

import argparse
import json

import pytest
from benchmark_runs import run

from benchmarks.collectives import main as collectives
from benchmarks.collectives import mpi_side, nccl_tests
from benchmarks.pages import bandwidth, report, targets

HEAD = "#       size         count      type   redop    root     time   algbw   busbw  #wrong\n"


def nccl_tests_that_print(folder, name, sizes, microseconds=10.0, wrong=0):
    """Write a program in the place of one of nccl-tests'."""
    lines = "".join(f" {size} 2 float sum -1 {microseconds} 0.1 0.1 {wrong} 9.0 0.1 0.1 0\n" for size in sizes)
    program = folder / nccl_tests.BINARIES[name]
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{HEAD}{lines}END\n")
    program.chmod(0o755)


def test_every_collective_is_measured_on_cpus(tmp_path):
    path = tmp_path / "result.json"
    run("collectives", "--sizes", "8", "1K", "--rounds", 1, "--json", path)
    result = json.loads(path.read_text())
    rows = [row for row in result["rows"] if "samples" in row]
    assert {row["road"] for row in rows if row["rival"] == "ncclpy"} == {
        f"{name} {size}" for name in collectives.NAMES for size in ("8 B", "1 KiB")
    }
    assert {row["measure"] for row in rows} == {"time"}
    missing = {row["rival"]: row["missing"] for row in result["rows"] if "missing" in row}
    assert missing["MPICH"] == "not given (--mpich PYTHON)"
    assert not any(reason.startswith("failed") for reason in missing.values()), missing
    assert {"torch.distributed"} <= missing.keys() | {row["rival"] for row in rows}


def test_what_runs_on_gpus_runs_on_the_host_engine(tmp_path):
    path = tmp_path / "result.json"
    nccl_tests_that_print(tmp_path, "all_gather", [0, 16, 32])
    nccl_tests_that_print(tmp_path, "sendrecv", [8, 16, 32], wrong=3)
    printed = run(
        *("collectives", "--gpu", 2, "--registered", "--nccl-tests", tmp_path, "--rounds", 1, "--json", path),
        *("--sizes", "8", "32", "--collectives", "all_gather", "sendrecv", "reduce"),
        status=1,
        NCCLPY_LIBRARY="host",
    )
    result = json.loads(path.read_text())
    assert result["settings"]["engine"] == "host"
    samples = {
        (row["rival"], row["road"], row["measure"]): row["samples"] for row in result["rows"] if "samples" in row
    }
    for rival in ("ncclpy", "ncclpy, registered", "ncclpy, windows"):
        for road in ("all_gather 8 B", "sendrecv 32 B", "reduce 32 B"):
            assert {(rival, road, "time"), (rival, road, "latency")} <= samples.keys()
    # A size of 0 is one that nccl-tests has rounded down to nothing.
    assert ("nccl-tests", "all_gather 8 B", "time") not in samples
    assert samples["nccl-tests", "all_gather 32 B", "time"] == [10.0]
    failed = [row["missing"] for row in result["rows"] if row["rival"] == "nccl-tests" and "missing" in row]
    assert failed[0] == "failed: sendrecv: 3 wrong elements out of place"
    assert failed[1].startswith("failed: reduce: ") and "No such file" in failed[1]
    assert "latency, us" in printed


def test_a_rival_that_dies_is_a_row_and_the_others_go_on():
    sweep = collectives.Sweep(False, 2, [8], ["all_reduce", "reduce"])

    class Dead:
        def send(self, do, parameters):
            raise collectives.workers.WorkerLost("a worker died:\nBus error")

        def close(self):
            pass

    side = collectives.PythonRival("ours", [Dead(), Dead()], sweep)
    side.sample()
    side.sample()
    assert sweep.rows([]) == [{"rival": "ours", "missing": "failed: all_reduce: Bus error"}]


@pytest.mark.parametrize(("text", "size"), [("8", 8), ("512K", 512 << 10), ("1g", 1 << 30)])
def test_sizes_are_read(text, size):
    assert collectives._size(text) == size


@pytest.mark.parametrize("text", ["0", "", "8T", "-1", "1.5G"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is no size"):
        collectives._size(text)


@pytest.mark.parametrize(
    ("collective", "elements"),
    [
        ("all_reduce", (256, 256)),
        ("sendrecv", (256, 256)),
        ("gather", (64, 256)),
        ("scatter", (256, 64)),
        ("all_to_all", (256, 256)),
    ],
)
def test_a_size_is_that_of_the_larger_buffer(collective, elements):
    assert mpi_side.plan(collective, 1024, 4, 4) == elements


def rows(rival, microseconds, measure="time", nbytes=1 << 30):
    return {
        "operation": "all_reduce, 8 ranks",
        "rival": rival,
        "road": "all_reduce 1 GiB",
        "measure": measure,
        "unit": "us",
        "bytes": nbytes,
        "bus_bytes": 2 * nbytes * 7 / 8,
        "samples": microseconds,
    }


def test_bus_bandwidth_follows_from_time():
    # 2 GiB * 7/8 in 10 ms.
    assert bandwidth.bus(rows("ncclpy", []), 10_000.0) == pytest.approx(187.904819)


def test_the_page_has_times_bandwidths_and_ratios():
    result = {"experiment": "collectives", "settings": {"engine": "gpu"}}
    result["rows"] = [rows("ncclpy", [5000.0, 5010.0]), rows("nccl-tests", [5005.0, 5005.0])]
    text = report.text(result)
    assert "| 1 GiB | ncclpy     | 5005.0 (5002.5-5007.5) |          | 375.4 |" in text
    assert "| 1 GiB | nccl-tests | 5005.0 (5005.0-5005.0) | 1.00     | 375.4 |" in text
    judged = {target["text"]: target for target in targets.judge(result)}
    promise = judged["all_reduce 1 GiB: bus bandwidth at least 0.99 times nccl-tests'"]
    assert promise["kept"] and promise["reached"] == pytest.approx(1.0, abs=1e-3)
    result["rows"][0]["samples"] = [5100.0, 5100.0]
    assert not next(target for target in targets.judge(result) if target["text"] == promise["text"])["kept"]
