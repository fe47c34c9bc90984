"""The benchmarks run and report what they should; no test here checks a time."""

import json
import types

import pytest
from benchmark_runs import run

from benchmarks import noop
from benchmarks.collectives import nccl_tests
from benchmarks.manager import main as manager
from benchmarks.manager.side import Side
from benchmarks.overhead.road import Road
from benchmarks.pages import report, summary, targets
from benchmarks.work import results
from benchmarks.work.worker import Worker


@pytest.fixture(scope="module")
def overhead(tmp_path_factory):
    path = tmp_path_factory.mktemp("overhead") / "result.json"
    run("overhead", "--processes", "1", "--rounds", "1", "--json", str(path))
    return json.loads(path.read_text())


@pytest.mark.slow
def test_overhead_measures_every_way_of_ncclpy_on_the_noop_library(overhead):
    measured = {(row["rival"], row["road"]) for row in overhead["rows"] if "samples" in row}
    assert ("C loop", "ncclAllReduce") in measured
    assert ("ncclpy.bindings", "all_reduce(ints)") in measured
    for kind in ("prepared buffer", "int tuple", "numpy array"):
        assert ("ncclpy.Communicator", f"all_reduce({kind})") in measured
    assert ("ncclpy.Communicator", "with group(): pass") in measured
    assert {("ncclpy.Plan", f"{launch} of 64 x all_reduce") for launch in ("Plan.launch", "Graph.launch")} <= measured
    assert ("ncclpy.Communicator, nonblocking", "all_reduce(prepared buffer)") in measured
    assert all(len(row["samples"]) == 1 and min(row["samples"]) > 0 for row in overhead["rows"] if "samples" in row)


@pytest.mark.slow
def test_overhead_has_a_row_for_every_rival_that_cannot_run(overhead):
    missing = {row["rival"]: row["missing"] for row in overhead["rows"] if "missing" in row}
    assert "GPU" in missing["torch.distributed"]
    assert not any(reason.startswith("failed") for reason in missing.values()), missing


@pytest.mark.slow
def test_overhead_with_real_communication_runs_on_the_host_engine(tmp_path):
    path = tmp_path / "result.json"
    run("overhead", "--gpu", "2", "--rounds", "1", "--json", str(path), NCCLPY_LIBRARY="host")
    result = json.loads(path.read_text())
    measures = {(row["rival"], row["measure"]) for row in result["rows"] if "samples" in row}
    assert {("C loop", "host"), ("C loop", "latency"), ("ncclpy.Communicator", "latency")} <= measures
    assert result["settings"]["engine"] == "host"


@pytest.mark.slow
def test_host_engine_is_measured_without_an_mpi(tmp_path):
    path = tmp_path / "result.json"
    run("mpi", "--ranks", "2", "--sizes", "8", "1048576", "--rounds", "1", "--json", str(path))
    result = json.loads(path.read_text())
    measured = {(row["rival"], row["road"]) for row in result["rows"] if "samples" in row}
    for rival in ("ncclpy processes", "ncclpy threads"):
        assert {(rival, "all_reduce 8 B 2 ranks"), (rival, "broadcast 1 MiB 2 ranks")} <= measured
    assert ("roofline", "all_reduce 1 MiB 2 ranks") in measured
    assert {row["rival"]: row["missing"] for row in result["rows"] if "missing" in row} == {
        "MPICH": "not given (--mpich PYTHON)",
        "Open MPI": "not given (--openmpi PYTHON)",
    }
    assert {row["kept"] for row in targets.judge(result)} == {None}


@pytest.mark.slow
def test_manager_is_measured_on_one_device(tmp_path):
    path = tmp_path / "result.json"
    run(
        *("manager", "--rounds", "1", "--processes", "1", "--without", "callback", "--json", str(path)),
        NCCLPY_LIBRARY="host", NCCLPY_HOST_DEVICES="1",
    )  # fmt: skip
    result = json.loads(path.read_text())
    assert result["settings"]["devices"] == 1
    assert [row["missing"] for row in result["rows"] if row["rival"] == "ncclpy.Manager" and "missing" in row] == [
        "pending keys: such a key waits for its second device, and there is one"
    ]


# The test above covers the host engine on one device.
@pytest.mark.parametrize(
    "engine", [pytest.param("noop", marks=pytest.mark.slow), pytest.param("host", marks=pytest.mark.campaign)]
)
def test_all_parts_of_the_manager_are_measured(engine, tmp_path):
    path = tmp_path / "result.json"
    variables = {"NCCLPY_LIBRARY": "host" if engine == "host" else ""}
    large = ("--large", "1048576") if engine == "host" else ()
    run("manager", "--rounds", "1", "--processes", "1", *large, "--json", str(path), **variables)
    result = json.loads(path.read_text())
    assert (result["settings"]["engine"], result["settings"]["devices"]) == (engine, 8)
    judged = {target["text"]: target["kept"] for target in targets.judge(result)}
    promised = [one.text for one in targets.TARGETS if (one.experiment, one.engine) == ("manager", engine)]
    assert list(judged) == promised and None not in judged.values()
    measured = {(row["rival"], row["road"], row["measure"]) for row in result["rows"] if "samples" in row}
    assert ("ncclpy.Manager", "64 threads", "adds") in measured
    assert ("C loop", "a group from one thread", "repeated") in measured
    assert ("ncclpy.Plan", "Graph.launch", "repeated") in measured


def test_nccl_tests_are_run_beside_the_manager(tmp_path):
    binary = tmp_path / "all_reduce_perf"
    binary.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\ncat <<END{OUTPUT.format(0)}END\n')
    binary.chmod(0o755)
    samples = [sample for take in manager._nccl_tests(tmp_path, 8, 1 << 30, manager.Table()) for sample in take()]
    assert [(sample[2], sample[-1]) for sample in samples] == [
        *((road, 5500.1) for road in ("-g N", "-t N -g 1", "-t N -g 1 -G 10")),
        ("1024 MiB", 341.64),
    ]
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call.split("-c 1 ")[1] for call in calls] == ["-g 8", "-t 8 -g 1", "-t 8 -g 1 -G 10", "-t 8 -g 1"]


def test_manager_that_does_not_launch_has_no_figures(tmp_path):
    side = Side()
    side.nccl, side.engine = (
        types.SimpleNamespace(library=lambda: types.SimpleNamespace(path=noop.build(tmp_path))),
        "noop",
    )
    with pytest.raises(RuntimeError, match="0 operations arrived instead of 8"), side.working("numpy array", 4, 2):
        pass


def test_import_time_is_measured(tmp_path):
    path = tmp_path / "result.json"
    run("import", "--rounds", "1", "--json", str(path))
    result = json.loads(path.read_text())
    rows = {row["rival"]: row for row in result["rows"]}
    assert len(rows["ncclpy"]["samples"]) == 1
    assert result["command"].endswith("python -m benchmarks import --rounds 1")


def test_command_has_options_other_than_the_default():
    defaults = {"most_processes": 16, "ranks": [2, 4], "rounds": 5}
    assert results.options(types.SimpleNamespace(**defaults), defaults) == []
    chosen = types.SimpleNamespace(most_processes=8, ranks=[3, 5], rounds=5)
    assert results.options(chosen, defaults) == ["--most-processes", "8", "--ranks", "3", "5"]


def test_report_names_command_machine_and_targets(tmp_path):
    overhead = dict(results.load_all())["overhead-noop.json"]
    results.save(overhead, tmp_path / "overhead.json")
    run("report", "--results", str(tmp_path), "--output", str(tmp_path / "page.md"))
    assert "[What a call costs](page/overhead.md)" in (tmp_path / "page.md").read_text()
    page = (tmp_path / "page" / "overhead.md").read_text()
    assert "python -m benchmarks overhead" in page
    assert overhead["machine"]["processor"] in page
    assert "an empty group() takes at most 0.4 us" in page


def test_report_says_why_a_target_is_missed():
    result = {"experiment": "overhead", "settings": {"engine": "gpu"}, "notes": []}
    result["rows"] = [
        {"rival": rival, "road": road, "operation": "all_reduce", "measure": "latency", "unit": "us", "samples": [us]}
        for rival, road, us in (
            ("ncclpy.Communicator", "all_reduce(torch tensor)", 9.0),
            ("torch.distributed", "all_reduce(torch tensor), in place", 10.0),
        )
    ]
    why = next(target.why for target in targets.TARGETS if target.over and target.over[0] == "torch.distributed")
    assert why and why in report.text(result)
    result["rows"][1]["samples"] = [20.0]
    assert why not in report.text(result)


def test_check_rejects_a_road_that_does_not_call_the_library(tmp_path):
    worker = Worker()
    worker.do_noop(str(noop.build(tmp_path)))
    worker.roads["idle"] = Road("idle", "all_reduce", lambda n: 0.0)
    assert worker.do_check("idle") == "128 operations made 0 all-reduces and 0 groups instead of 128 and 0"


def test_targets_are_judged_round_by_round():
    def row(rival, road, samples):
        return {"rival": rival, "road": road, "measure": "host", "samples": samples}

    result = {"experiment": "overhead", "settings": {"engine": "noop"}, "rows": []}
    result["rows"] = [
        row("C loop", "ncclAllReduce", [0.1, 5.0, 0.1]),
        row("ncclpy.bindings", "all_reduce(ints)", [0.2, 5.6, 0.2]),
        row("nccl4py bindings", "all_reduce(ints)", [0.3, 2.0, 0.1]),
    ]
    judged = {target["text"]: target for target in targets.judge(result)}
    ratio = judged["bindings.all_reduce is no slower than nccl4py's binding"]
    assert (ratio["reached"], ratio["kept"]) == (pytest.approx(2.0), False)
    difference = judged["bindings.all_reduce adds at most 0.3 us to the C loop"]
    assert (difference["reached"], difference["kept"]) == (pytest.approx(0.1), True)
    assert "an empty group() takes at most 0.4 us" not in judged, "the result says nothing of it"


def test_ratios_need_the_same_rounds():
    with pytest.raises(ValueError, match="2 samples cannot be compared round by round with 1"):
        summary.ratios([1.0, 2.0], [1.0])


OUTPUT = """
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
  1073741824     268435456     float     sum      -1   5500.1  195.22  341.64       {}   5501.0  195.19  341.59       0
# Out of bounds values : 0 OK
"""


def test_perf_and_nccl_tests_take_turns(tmp_path):
    binary = tmp_path / "all_reduce_perf"
    binary.write_text(f"#!/bin/sh\ncat <<'END'{OUTPUT.format(0)}END\n")
    binary.chmod(0o755)
    path = tmp_path / "result.json"
    options = ["--sizes", "1K", "--rounds", "2", "--iters", "2", "--json", str(path)]
    run("nccl-tests", "--dir", str(tmp_path), *options, NCCLPY_LIBRARY="host")
    samples = {(row["rival"], row["measure"]): row["samples"] for row in json.loads(path.read_text())["rows"]}
    assert samples["nccl-tests", "out of place"] == [341.64, 341.64]
    assert len(samples["ncclpy perf", "in place"]) == 2


def test_bandwidths_come_from_the_columns_of_nccl_tests():
    assert nccl_tests.bandwidths(OUTPUT.format(0)) == {"out of place": 341.64, "in place": 341.59}


def test_wrong_result_has_no_bandwidth():
    with pytest.raises(ValueError, match="3 wrong elements out of place"):
        nccl_tests.bandwidths(OUTPUT.format(3))
