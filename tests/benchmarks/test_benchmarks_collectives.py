"""Every collective by size, compared with rivals: both modes run on the host engine; no test here checks a time."""

import argparse
import json
import types

import pytest
from benchmark_runs import run

from benchmarks.collectives import main as collectives
from benchmarks.collectives import mpi_side, nccl_tests
from benchmarks.collectives.rivals import Place
from benchmarks.collectives.side import Side
from benchmarks.pages import bandwidth, report, targets

HEAD = "#       size         count      type   redop    root     time   algbw   busbw  #wrong\n"


def nccl_tests_that_print(folder, name, sizes, microseconds=10.0, wrong=0):
    """Write a program that replaces one of nccl-tests."""
    lines = "".join(f" {size} 2 float sum -1 {microseconds} 0.1 0.1 {wrong} 9.0 0.1 0.1 0\n" for size in sizes)
    program = folder / nccl_tests.BINARIES[name]
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{HEAD}{lines}END\n")
    program.chmod(0o755)


# Each rival is two processes.
@pytest.mark.parametrize(
    ("names", "without"),
    [(["all_reduce", "sendrecv"], collectives.PLAIN[1:]), pytest.param(collectives.NAMES, [], marks=pytest.mark.slow)],
    ids=["two of ours", "all"],
)
def test_every_collective_is_measured_on_cpus(tmp_path, names, without):
    path = tmp_path / "result.json"
    chosen = ("--collectives", *names, *(["--without", *without] if without else []))
    run("collectives", "--sizes", "8", "--rounds", 1, *chosen, "--json", path)
    result = json.loads(path.read_text())
    rows = [row for row in result["rows"] if "samples" in row]
    assert {row["road"] for row in rows if row["rival"] == "ncclpy"} == {f"{name} 8 B" for name in names}
    assert {row["measure"] for row in rows} == {"time"}
    missing = {row["rival"]: row["missing"] for row in result["rows"] if "missing" in row}
    assert missing["MPICH"] == "not given (--mpich PYTHON)"
    assert not any(reason.startswith("failed") for reason in missing.values()), missing
    assert without or {"torch.distributed"} <= missing.keys() | {row["rival"] for row in rows}


@pytest.mark.slow
def test_modes_for_gpus_run_on_the_host_engine(tmp_path):
    path = tmp_path / "result.json"
    nccl_tests_that_print(tmp_path, "all_gather", [0, 32])
    nccl_tests_that_print(tmp_path, "sendrecv", [8, 32], wrong=3)
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
    # nccl-tests reports size 0 where it has rounded a size down to nothing.
    assert ("nccl-tests", "all_gather 8 B", "time") not in samples
    assert samples["nccl-tests", "all_gather 32 B", "time"] == [10.0]
    failed = [row["missing"] for row in result["rows"] if row["rival"] == "nccl-tests" and "missing" in row]
    assert failed[0] == "failed: sendrecv: 3 wrong elements out of place"
    assert failed[1].startswith("failed: reduce: ") and "No such file" in failed[1]
    assert "latency, us" in printed


@pytest.mark.slow
def test_calls_are_replayed_beside_nccl_tests(tmp_path):
    path = tmp_path / "result.json"
    nccl_tests_that_print(tmp_path, "all_reduce", [8, 2048, 8, 2048])
    run(
        *("collectives", "--gpu", 2, "--registered", "--nccl-tests", tmp_path, "--rounds", 1, "--cycles", 2),
        *("--sizes", "8", "2K", "--replayed", "8", "2K", "--collectives", "all_reduce", "--json", path),
        *("--without", "ncclpy.ProcessGroup", "torch.distributed", "cupy.cuda.nccl"),
        NCCLPY_LIBRARY="host",
    )
    result = json.loads(path.read_text())
    samples = {(row["rival"], row["road"]): row["samples"] for row in result["rows"] if row["measure"] == "time"}
    rivals = (
        "ncclpy",
        "ncclpy, registered",
        "ncclpy, windows",
        *(f"nccl-tests{flag}" for flag in ("", " -R 1", " -R 2")),
    )
    roads = [f"all_reduce {size}{how}" for size in ("8 B", "2 KiB") for how in ("", ", replayed")]
    assert samples.keys() == {(rival, road) for rival in rivals for road in roads}
    assert {len(each) for each in samples.values()} == {2}
    assert samples["nccl-tests -R 1", "all_reduce 2 KiB, replayed"] == [10.0, 10.0]
    assert "### all_reduce, 2 ranks, replayed" in report.text(result)
    result["settings"]["engine"] = "gpu"
    judged = [target["text"] for target in targets.judge(result) if "replayed as graphs: " in target["text"]]
    assert len(judged) == 3 and all("of 2, furthest off: all_reduce" in text for text in judged)


def test_one_run_of_nccl_tests_covers_all_sizes_in_few_steps(tmp_path):
    program = tmp_path / nccl_tests.BINARIES["all_reduce"]
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    program.chmod(0o755)
    for sizes, launches in (([1 << 20, 4 << 20, 64 << 20], 0), ([8, 512], 20), ([8, 24, 32], 0), ([8], 0)):
        sweep = collectives.Sweep(True, 2, sizes, ["all_reduce"], 3, launches)
        collectives.NcclTests("nccl-tests", tmp_path, ["-R", "1"], "libnccl.so", sweep).sample()
        words = [row["missing"] for row in sweep.failed]
        assert any("24 B" in each for each in words) == (24 in sizes)
    assert [call.partition(" -t ")[0] for call in (tmp_path / "calls").read_text().splitlines()] == [
        "-b 1048576 -e 67108864 -f 4 -N 3",
        "-b 8 -e 512 -f 64 -N 3 -G 20",
        "-b 8 -e 32 -f 2 -N 3",
        "-b 8 -e 8 -f 2 -N 3",
    ]


def side_of_one_rank(count):
    """Return a single rank with calls that return their place in the buffers."""
    side = Side()
    side.place = Place(0, 1, True, count * 4, "", "", True)
    side.rival = types.SimpleNamespace(call=lambda collective, sent, received, first: lambda: first)
    return side


@pytest.mark.parametrize(("moving", "places"), [(True, [0, 2, 4, 0, 2]), (False, [0] * 5)])
def test_calls_go_through_the_buffers(moving, places):
    calls = side_of_one_rank(7)._calls("all_reduce", 8, 5, moving)
    assert [call() for call in calls] == places


def test_rival_that_dies_is_a_row_and_the_others_are_measured():
    sweep = collectives.Sweep(False, 2, [8], ["all_reduce", "reduce"])

    class Dead:
        def send(self, do, parameters):
            raise collectives.workers.WorkerLost("a worker died:\nBus error")

        def close(self):
            pass

    side = collectives.PythonRival("ours", [Dead(), Dead()], sweep)
    side.sample()
    side.sample()
    assert collectives.rows([sweep], []) == [{"rival": "ours", "missing": "failed: a run: Bus error"}]


class Answering:
    """A rank that can do everything but one collective, and notes its requests."""

    def __init__(self, rank, cannot):
        self.rank, self.cannot, self.asked = rank, cannot, []

    def send(self, do, parameters):
        self.asked.append((do, parameters))

    def receive(self, do, until):
        parameters = self.asked[-1][1]
        operations = parameters.get("operations", [parameters])
        if do == "check":
            return None
        if self.cannot in [operation["collective"] for operation in operations]:
            raise collectives.workers.WorkerFailed(f"no {self.cannot}")
        seconds = [operation["nbytes"] * (self.rank + 1) / 1e6 for operation in operations]
        return seconds if do == "samples" else seconds[0]


def test_samples_on_cpus_are_taken_together_and_failures_are_found_one_by_one():
    sweep = collectives.Sweep(False, 2, [8, 64], ["all_reduce", "reduce"])
    sweep.factors = {"all_reduce": 1.0, "reduce": 1.0}
    ranks = [Answering(rank, cannot="reduce") for rank in range(2)]
    side = collectives.PythonRival("ours", ranks, sweep)
    for _ in range(3):
        side.sample()
    # The time of the slowest rank, by operation.
    assert {row["road"]: row["samples"] for row in sweep.rows()} == {
        "all_reduce 8 B": [16.0] * 3,
        "all_reduce 64 B": [128.0] * 3,
    }
    assert sweep.failed == [{"rival": "ours", "missing": "failed: reduce: no reduce"}]
    for rank in ranks:
        assert [do for do, _ in rank.asked].count("check") == 4
        assert [do for do, _ in rank.asked][-2:] == ["samples"] * 2


@pytest.mark.parametrize(("text", "size"), [("8", 8), ("512K", 512 << 10), ("1g", 1 << 30)])
def test_sizes_are_read(text, size):
    assert collectives._size(text) == size


@pytest.mark.parametrize("text", ["0", "", "8T", "-1", "1.5G"])
def test_invalid_sizes_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size"):
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
def test_size_is_that_of_the_larger_buffer(collective, elements):
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


def test_page_has_times_bandwidths_and_ratios():
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


def test_size_furthest_off_counts():
    result = {"experiment": "collectives", "settings": {"engine": "gpu"}, "rows": []}
    for size, ours in (("1 MiB", 10.0), ("16 MiB", 12.0), ("64 MiB", 9.0)):
        for rival, microseconds in (("ncclpy, windows", ours), ("nccl-tests -R 2", 10.0)):
            road = f"all_gather {size}"
            result["rows"].append({"rival": rival, "road": road, "measure": "time", "samples": [microseconds] * 3})
    (promise,) = targets.judge(result)
    assert promise["text"].endswith("nccl-tests -R 2 (of 3, furthest off: all_gather 16 MiB)")
    assert (promise["reached"], promise["kept"]) == (pytest.approx(1.2), False)
    del result["rows"][3]  # a row without a rival's is not compared
    (promise,) = targets.judge(result)
    assert promise["text"].endswith("(of 2, furthest off: all_gather 1 MiB)") and promise["kept"]
    del result["rows"][4]
    (promise,) = targets.judge(result)
    assert promise["text"].endswith("(all_gather 1 MiB alone)")
    result["settings"]["gpus"] = 1
    assert targets.judge(result) == []
