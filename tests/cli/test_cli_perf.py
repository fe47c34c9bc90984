"""``ncclpy perf`` from the command line to the verdict, on the engine of the run."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import pty
import signal
import subprocess
import sys
import time

import pytest

import ncclpy
import testing
from ncclpy.cli.main import main
from ncclpy.cli.perf.collectives import COLLECTIVES
from ncclpy.cli.perf.datatypes import TYPES
from ncclpy.cli.perf.endpoint import GUARD, Endpoint
from ncclpy.cli.perf.report import Report
from ncclpy.core.runtime import device

PERF = [sys.executable, "-m", "ncclpy", "perf"]


def perf(capsys, line: str) -> tuple[int, list[list[str]], str]:
    """Return the exit status, the rows split into columns, and all of standard output."""
    status = main(["perf", *line.split()])
    output = capsys.readouterr().out
    return status, [row.split() for row in output.splitlines() if row and not row.startswith("#")], output


def assert_right(rows, sizes: int):
    assert len(rows) == sizes
    for row in rows:
        assert len(row) == 13, row
        assert row[8] == "0" and row[12] in ("0", "N/A"), row
        assert float(row[5]) > 0


@pytest.mark.parametrize("nranks", [1, 2, 4])
@pytest.mark.parametrize("collective", [name for name in COLLECTIVES if name != "barrier"])
def test_every_collective(collective, nranks, capsys):
    testing.need_devices(nranks)
    status, rows, output = perf(capsys, f"{collective} -b 8 -e 512K -f 16 -n 3 -g {nranks}")
    assert status == 0, output
    assert_right(rows, 5)
    assert "Out of bounds values : 0 OK" in output
    assert [row[0] for row in rows if row[1] != "0"], "some sizes move something"
    assert (rows[-1][12] == "N/A") == (collective in ("all_to_all", "sendrecv"))


@pytest.mark.parametrize("line", ["-g 2", "-t 2", "-g 2 --processes"])
def test_barrier(line, capsys):
    testing.need_devices(2)
    status, rows, _ = perf(capsys, f"barrier -n 5 {line}")
    assert status == 0
    assert len(rows) == 1 and rows[0][8] == "N/A" and float(rows[0][5]) > 0


def placements():
    """Yield each placement of ranks for each collective; campaigns only add collectives to placements."""
    for line in ("-t 4", "-t 2 -g 2", "-g 4 --processes", "-t 2 -g 2 --processes"):
        for collective in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "sendrecv", "gather"):
            slow = (collective, line[:2]) in {("all_reduce", "-t"), ("sendrecv", "-g")}
            marks = [] if "processes" not in line else [pytest.mark.slow] if slow else [pytest.mark.campaign]
            yield pytest.param(collective, line, marks=marks)
    yield "all_reduce", "-g 2 --processes"


@pytest.mark.parametrize(("collective", "line"), list(placements()))
def test_threads_and_processes(collective, line, capsys):
    options = line.split()
    count = math.prod(int(options[options.index(flag) + 1]) for flag in ("-t", "-g") if flag in options)
    testing.need_devices(count)
    status, rows, output = perf(capsys, f"{collective} -b 64 -e 256K -f 64 -n 3 -m 2 {line}")
    assert status == 0, output
    assert_right(rows, 3)
    pids = {words[words.index("Pid") + 1] for words in map(str.split, output.splitlines()) if "Pid" in words}
    assert len(pids) == (count if "processes" in line else 1)


@pytest.mark.parametrize("collective", ["all_reduce", pytest.param("reduce_scatter", marks=pytest.mark.slow)])
def test_all_types_and_operators(collective, capsys):
    testing.need_devices(3)
    status, rows, output = perf(capsys, f"{collective} -b 3K -e 3K -n 1 -g 3 -d all -o all")
    assert status == 0, output
    assert_right(rows, len({row[2] for row in rows}) * 6)
    assert {row[3] for row in rows} == {"sum", "prod", "max", "min", "avg", "mulsum"}
    if ncclpy.library().engine == "host":
        assert {row[2] for row in rows} == set(TYPES)


def test_all_roots(capsys):
    testing.need_devices(3)
    for collective in ("broadcast", "reduce", "gather", "scatter"):
        status, rows, _ = perf(capsys, f"{collective} -b 4K -e 4K -n 1 -g 3 -r all")
        assert status == 0
        assert [row[4] for row in rows] == ["0", "1", "2"]


def test_larger_than_a_period_and_odd(capsys):
    testing.need_devices(2)
    status, rows, output = perf(capsys, "all_reduce -b 6000002 -e 6000002 -n 1 -g 2 -d half -o max")
    assert status == 0, output
    assert rows[0][:3] == ["6000002", "3000001", "half"]


@pytest.mark.parametrize("blocking", [1, 2, 3])
def test_waiting_after_each_iteration(blocking, capsys):
    testing.need_devices(2)
    status, rows, output = perf(capsys, f"all_reduce -b 1K -e 1K -n 3 -t 2 -z {blocking}")
    assert status == 0
    assert "Blocking Enabled" in output
    assert_right(rows, 1)


def test_no_result_is_claimed_without_a_check(capsys):
    status, rows, output = perf(capsys, "all_reduce -b 1K -e 1K -n 1 -c 0")
    assert status == 0
    assert "OK" not in output and "nothing was checked" in output
    assert rows[0][8] == rows[0][12] == "N/A"


def test_bandwidth_is_size_over_time(capsys):
    testing.need_devices(4)
    _, rows, _ = perf(capsys, "all_reduce -b 4M -e 4M -n 3 -g 4")
    duration, algorithm, bus = map(float, rows[0][5:8])
    assert algorithm == pytest.approx(4 * 2**20 / duration / 1e3, rel=0.02, abs=0.006)
    assert bus == pytest.approx(1.5 * algorithm, rel=0.02, abs=0.012)


def test_json_has_machine_versions_arguments_and_results(capsys, tmp_path):
    testing.need_devices(2)
    path = tmp_path / "out.json"
    assert main(["perf", *f"all_gather -b 1K -e 4K -f 4 -n 2 -g 2 --json {path}".split()]) == 0
    document = json.loads(path.read_text())
    assert document["library"]["engine"] == ncclpy.library().engine
    assert document["library"]["version"] == list(ncclpy.library().version)
    assert document["version"].startswith("ncclpy ") and document["machine"]["numpy"]
    assert document["config"]["collective"] == "all_gather" and document["config"]["ngpus"] == 2
    assert [entry["rank"] for entry in document["devices"]] == [0, 1]
    assert [row["size"] for row in document["results"]] == [1024, 4096]
    assert document["out_of_bounds"] == {"count": 0, "okay": True}
    for row in document["results"]:
        for side in (row["out_of_place"], row["in_place"]):
            assert side["nwrong"] == 0 and side["time"] > 0
            assert side["bus_bw"] == pytest.approx(side["alg_bw"] / 2)
    assert document["errors"] == []


# Failures


@pytest.mark.parametrize("line", ["-g 4", "-t 2 -g 2"])
def test_corrupted_element_is_counted(line, capsys, monkeypatch, tmp_path):
    testing.need_devices(4)
    right = Endpoint.read

    def corrupted(self, pointer, target):
        right(self, pointer, target)
        if self.rank == 2 and pointer == self.recv:
            target[5] ^= 0x40

    monkeypatch.setattr(Endpoint, "read", corrupted)
    path = tmp_path / "out.json"
    status, rows, output = perf(capsys, f"all_reduce -b 1K -e 2K -f 2 -n 1 --json {path} {line}")
    assert status == 1
    assert [(row[8], row[12]) for row in rows] == [("1", "1")] * 2
    assert "Out of bounds values : 4 FAILED" in output
    assert json.loads(path.read_text())["out_of_bounds"] == {"count": 4, "okay": False}


@pytest.mark.parametrize("collective", [name for name in COLLECTIVES if name != "barrier"])
def test_call_that_does_nothing_is_detected(collective, capsys, monkeypatch):
    testing.need_devices(3)
    monkeypatch.setattr(Endpoint, "calls", lambda self, *args: [lambda: None, lambda: None])
    status, rows, output = perf(capsys, f"{collective} -b 48K -e 48K -n 1 -g 3")
    assert status == 1
    assert int(rows[0][8]) > 1000, output
    assert rows[0][12] == "N/A" or int(rows[0][12]) > 1000, output


def test_output_that_is_too_long_is_detected(capsys, monkeypatch):
    testing.need_devices(2)
    right = Endpoint.calls

    def longer(self, collective, layout, *rest):
        # Data sent from behind the buffer must not look like poison.
        with device.using(self.device):
            device.memset(self.send + self.nbytes, 0, GUARD, self.stream)
            self.stream.synchronize()
        return right(self, collective, type(layout)(layout.send + 4, layout.recv + 4, layout.count + 4), *rest)

    monkeypatch.setattr(Endpoint, "calls", longer)
    status, rows, output = perf(capsys, "all_reduce -b 1K -e 1K -n 1 -g 2")
    assert status == 1
    assert rows[0][8] == "8", output


def test_missing_rank_ends_run_at_deadline(capsys, monkeypatch, tmp_path):
    testing.need_devices(2)
    right = Endpoint.calls
    path = tmp_path / "out.json"
    with monkeypatch.context() as patch:
        patch.setattr(Endpoint, "calls", lambda self, *args: [] if self.rank == 1 else right(self, *args))
        start = time.monotonic()
        assert main(["perf", *f"all_reduce -b 1K -e 1K -n 1 -t 2 -T 0.7 --json {path}".split()]) == 1
        assert time.monotonic() - start < 20
    said = capsys.readouterr().err
    assert "NcclTimeout" in said and "0.7 s" in said and "worker 0 of 2" in said
    assert "the communicators were made" in said
    assert "NcclTimeout" in json.loads(path.read_text())["errors"][0]
    assert perf(capsys, "all_reduce -b 1K -e 1K -n 1 -t 2")[0] == 0, "the process is still good for another run"


def test_error_in_one_thread_ends_all(capsys, monkeypatch):
    testing.need_devices(2)

    def broken(self, *args):
        if self.rank == 1:
            raise RuntimeError("rank 1 has had enough")
        return 0

    monkeypatch.setattr(Endpoint, "wrong", broken)
    assert main(["perf", *"all_reduce -b 1K -e 1K -n 1 -t 2 -T 60".split()]) == 1
    said = capsys.readouterr().err
    assert "worker 1 of 2 failed" in said and "rank 1 has had enough" in said and "Traceback" in said


def test_background_failure_is_printed_in_full(capsys, host_engine):
    with ncclpy.faults("call=Broadcast at=run do=error:ncclRemoteError"):
        assert main(["perf", *"broadcast -b 1K -e 1K -n 1 -T 60".split()]) == 1
    said = capsys.readouterr().err
    assert "rank 0 failed in the background: <Result.REMOTE_ERROR: 6>; last error: injected fault" in said


def test_process_that_dies_ends_all(capsys, monkeypatch):
    testing.need_devices(2)
    shown = Report.row

    def kill(self, row):
        shown(self, row)
        os.kill(self.ranks[1].pid, signal.SIGKILL)

    monkeypatch.setattr(Report, "row", kill)
    start = time.monotonic()
    assert main(["perf", *"all_reduce -b 64K -e 4M -n 20 -f 2 -g 2 --processes -T 60".split()]) == 1
    assert time.monotonic() - start < 30
    said = capsys.readouterr().err
    assert "worker 1" in said and "SIGKILL" in said


@pytest.mark.parametrize("line", [pytest.param("-g 2", marks=pytest.mark.slow), "-t 2", "-g 2 --processes"])
def test_ctrl_c_ends_cleanly(line):
    testing.need_devices(2)
    command = [*PERF, *f"all_reduce -b 1M -e 1M -n 100000000 -c 0 {line}".split()]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/", start_new_session=True
    )
    try:
        while "(elements)" not in process.stdout.readline():
            assert process.poll() is None, process.stderr.read()
        time.sleep(0.3)
        os.killpg(process.pid, signal.SIGINT)  # like a terminal, to the children too
        start = time.monotonic()
        _, said = process.communicate(timeout=40)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert time.monotonic() - start < 20
    assert "interrupted" in said and "Traceback" not in said


def test_more_devices_than_available(capsys):
    count = ncclpy.device_count() + 1
    with pytest.raises(SystemExit) as stopped:
        main(["perf", "all_reduce", "-g", str(count)])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert f"need {count} devices" in said and f"there are {count - 1}" in said


def test_sizes_beyond_the_memory_are_cut(capsys, monkeypatch):
    monkeypatch.setattr("ncclpy.cli.perf.command.memory_limit", lambda nranks: 5000)
    status, rows, output = perf(capsys, "all_reduce -b 1K -e 16K -f 2 -n 1")
    assert status == 0
    assert "# Reducing maxBytes to 5000 due to memory limitation" in output
    assert [row[0] for row in rows] == ["1024", "2048", "4096"]


# From a shell


def outside(line: str, env: dict | None = None, **options):
    """Run a shell line that starts ``ncclpy``."""
    command = line.replace("ncclpy", f"{sys.executable} -m ncclpy", 1)
    environment = {**os.environ, **(env or {})}
    return subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=100, cwd="/", env=environment, **options
    )


def test_first_line_says_host_engine_without_gpu_and_choice():
    if os.path.exists("/dev/nvidiactl"):
        pytest.skip("needs a machine without a GPU")
    done = outside("ncclpy perf all_reduce -b 8 -e 8 -n 1 -g 2", env={"NCCLPY_LIBRARY": ""})
    assert done.returncode == 0, done.stderr
    first = done.stdout.splitlines()[0]
    assert first.startswith("# ncclpy perf all_reduce: host engine 2.32.3 on CPU memory (no GPU found: ")
    assert "libcuda" in first


def test_chosen_library_is_named_in_first_line(capsys):
    perf_line = perf(capsys, "all_reduce -b 8 -e 8 -n 1")[2].splitlines()[0]
    library = ncclpy.library()
    version = ".".join(map(str, library.version))
    if library.engine == "host":
        assert perf_line == f"# ncclpy perf all_reduce: host engine {version} on CPU memory (chosen by NCCLPY_LIBRARY)"
    else:
        assert perf_line.startswith(f"# ncclpy perf all_reduce: NCCL {version} from {library.path}")


def test_chosen_library_that_cannot_be_loaded_is_an_error():
    done = outside("ncclpy perf all_reduce -b 8 -e 8", env={"NCCLPY_LIBRARY": "/nowhere/libnccl.so.2"})
    assert done.returncode == 1
    assert "LibraryNotFound" in done.stderr and "/nowhere/libnccl.so.2" in done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""


def test_piped_output_has_results_only():
    done = outside("ncclpy perf all_reduce -b 8 -e 8 -n 1")
    assert done.stderr == ""


def test_closed_reader_prints_no_error():
    done = outside("set -o pipefail; ncclpy perf all_reduce -b 8 -e 4M -f 2 -n 1 -g 2 | head -1")
    assert done.stdout.startswith("# ncclpy perf")
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


def on_a_terminal(line: str, env: dict | None = None) -> tuple[int, str, str]:
    """Return status, standard output, and the output on a terminal as standard error."""
    ours, theirs = pty.openpty()
    command = [*PERF, *line.split()]
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=theirs,
            text=True,
            timeout=60,
            cwd="/",
            env={**os.environ, **(env or {})},
        )
    finally:
        os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 65536):
            shown += piece
    except OSError:
        pass  # a terminal reports its closed end by this error
    os.close(ours)
    return done.returncode, done.stdout, shown.decode()


def test_progress_on_a_terminal(tmp_path):
    # A replacement of tqdm, so that the test does not depend on its format.
    (tmp_path / "tqdm.py").write_text(
        "import sys\n"
        "class tqdm:\n"
        "    def __init__(self, total, **options): self.done, self.total = 0, total\n"
        "    def update(self): self.done += 1; print(f'[{self.done}/{self.total}]', file=sys.stderr)\n"
        "    def clear(self): pass\n"
        "    def refresh(self): pass\n"
        "    def close(self): print('closed', file=sys.stderr)\n"
    )
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))  # the rest may hold ncclpy
    status, _, shown = on_a_terminal("all_reduce -b 8 -e 32 -f 2 -n 1", {"PYTHONPATH": path})
    assert status == 0
    assert [f"[{done}/6]" in shown for done in range(1, 7)] == [True] * 6
    assert "closed" in shown


@pytest.mark.skipif(importlib.util.find_spec("tqdm") is not None, reason="needs an environment without tqdm")
def test_missing_tqdm_is_mentioned():
    status, _, shown = on_a_terminal("all_reduce -b 8 -e 8 -n 1")
    assert status == 0
    assert "tqdm" in shown and "ncclpy[perf]" in shown


def test_plot(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "figure.svg"
    assert perf(capsys, f"all_reduce -b 8 -e 1K -f 2 -n 1 --plot {path}")[0] == 0
    assert "bus bandwidth" in path.read_text()
