"""Run the programs in examples/, and the commands of the guides that start them."""

import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from foreign_stores import free_port
from paths import ROOT

import ncclpy
import testing
from ncclpy.cli.main import main

EXAMPLES = ROOT / "examples"
GUIDE = ROOT / "docs" / "guides" / "processes.md"
LAST_LINES = {
    "aggregated_groups": "operations in one plan",
    "data_parallel_numpy": "weights [ 1.  -2.   0.5]",
    "data_parallel_torch": "devices, loss fell: True",
    "elastic_training": "weights [ 1.  -2.   0.5]",
    "manager_threads": "9 collectives of",
    "gradients_in_any_order": "alike: True",
    "serving_group": "60 requests answered",
    "ring": "rank 0 saw the tokens of",
    "weights_to_engines": "both engines have the trainer's last version",
}
# Open MPI needs these to start four processes, as root, on a machine with two cores.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
LAUNCHED = {"with_mpi", "from_env", "missing_ranks"}
#: The package that each cluster example needs, and its last output.
CLUSTERS = {
    "with_dask": ("distributed", "2 workers, means [10.5 11.5 12.5]"),
    "with_ray": ("ray", "3 actors, weights [ 1.  -2.   0.5]"),
}


def test_every_example_is_run_and_listed():
    there = {path.stem for path in EXAMPLES.glob("*.py")}
    assert there == set(LAST_LINES) | LAUNCHED | set(CLUSTERS)
    page = (ROOT / "docs" / "examples.md").read_text()
    assert [name for name in sorted(there) if f"(../examples/{name}.py)" not in page] == []


def needs(*modules):
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in ("elastic_training", "weights_to_engines")))
        for name in sorted(LAST_LINES)
    ],
)
def test_example(name):
    needs(
        *(
            ["torch"]
            if "torch" in name
            or name in ("gradients_in_any_order", "weights_to_engines")
            or ncclpy.library().engine == "cuda"
            else []
        )
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / f"{name}.py"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert LAST_LINES[name] in done.stdout.splitlines()[-1]


@pytest.mark.launchers
@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", CLUSTERS)
def test_example_of_a_cluster(host_engine, name, tmp_path):
    """Each example starts its own cluster on this machine, which takes some 10 s."""
    module, last = CLUSTERS[name]
    needs(module)
    process = subprocess.Popen(
        [sys.executable, EXAMPLES / f"{name}.py"],
        cwd=tmp_path,
        env=os.environ | {"RAY_AUTH_MODE": "disabled"},  # otherwise Ray writes a token into the home folder
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=150)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"{name} did not end in 150 s\n{out}\n{err}")
    assert process.returncode == 0, out + err
    assert out.splitlines()[-1] == last, out + err
    if name == "with_ray":
        assert out.count("rank 3 of 4 is dead") == 3 and "lost: [3] [3] [3]" in out, out


def test_elastic_training_with_shorter_steps(host_engine, tmp_path):
    text = (EXAMPLES / "elastic_training.py").read_text()
    computing = "time.sleep(0.02)  # as a model"
    assert text.count(computing) == 1
    (tmp_path / "quick.py").write_text(text.replace(computing, "time.sleep(0.001)  # as a model"))
    done = subprocess.run(
        [sys.executable, "-W", "error", tmp_path / "quick.py"], capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    assert LAST_LINES["elastic_training"] in done.stdout.splitlines()[-1]


@pytest.mark.campaign
def test_elastic_training_waits_for_late_newcomer(host_engine, tmp_path):
    """A busy machine takes seconds to start a process; the others must not finish before that."""
    text = (EXAMPLES / "elastic_training.py").read_text()
    joining = "        group = ncclpy.ProcessGroup.join("
    assert text.count(joining) == 1
    (tmp_path / "late.py").write_text(text.replace(joining, "        time.sleep(9)\n" + joining))
    done = subprocess.run(
        [sys.executable, "-W", "error", tmp_path / "late.py"], capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    assert LAST_LINES["elastic_training"] in done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_server_that_dies_before_its_answer(host_engine, tmp_path):
    """The others have done their part of the request; the new rank 0 finds that no rank has the answer."""
    text = (EXAMPLES / "serving_group.py").read_text()
    answering, killing = "                group.store.set(", "                processes[1 if"
    assert text.count(answering) == text.count(killing) == 1
    text = text.replace(
        answering,
        "                if number == 30 and group.size == 2:\n                    os.kill(os.getpid(), 9)\n"
        + answering,
    )
    text = text.replace(killing, "                number == REQUESTS // 3 and processes[1 if")  # one of its two kills
    text = text.replace("import subprocess\n", "import os\nimport subprocess\n")
    (tmp_path / "dies.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-W", "error", tmp_path / "dies.py"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert LAST_LINES["serving_group"] in done.stdout.splitlines()[-1]


def command(first_words, example):
    """Return the only command of the guide that begins with `first_words` and starts the example, as printed."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", GUIDE.read_text(), re.M | re.S)
    lines = {line for block in blocks for line in block.splitlines() if f"examples/{example}.py" in line}
    found = [line for line in lines if line.startswith(first_words + " ")]
    assert len(found) == 1, f"{GUIDE.name} has {len(found)} commands that begin with {first_words}"
    return found[0].removeprefix(first_words)


def run(launcher, arguments, tmp_path):
    """Run a shell command in the root of the project with this `python`; return its output."""
    testing.need_devices(4)  # on GPUs one for each process
    line = launcher + arguments.replace(" python ", f" {sys.executable} ")
    process = subprocess.Popen(
        ["bash", "-c", line],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"} | OPEN_MPI,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=90)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"{line} did not end in 90 s\n{out}\n{err}")
    assert process.returncode == 0, err
    return out


@pytest.mark.parametrize("example", ["with_mpi", "from_env"])
def test_mpirun(tmp_path, example):
    needs("mpi4py")
    beside = Path(sys.executable).with_name("mpirun")  # the mpirun of the MPI from pip is preferred to the system's
    mpirun = beside if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("needs mpirun")
    assert run(str(mpirun), command("mpirun", example), tmp_path) == "4 ranks, sum 10.0\n"


def test_torchrun(tmp_path, monkeypatch):
    needs("torch")
    monkeypatch.setenv("PET_MASTER_PORT", str(free_port()))  # the default port may be another program's
    out = run(f"{sys.executable} -m torch.distributed.run", command("torchrun", "from_env"), tmp_path)
    assert "4 ranks, sum 10.0\n" in out


def test_ncclpy_run(tmp_path):
    out = run(f"{Path(sys.executable).with_name('ncclpy')} run", command("ncclpy run", "from_env"), tmp_path)
    assert out == "[0] 4 ranks, sum 10.0\n"


def test_missing_rank_is_named_by_trace(tmp_path, capsys):
    """Waiting ranks dump at their deadline, the missing one on SIGUSR2 and SIGTERM; `ncclpy trace` names it."""
    testing.need_devices(3)
    folder = tmp_path / "new"
    variables = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"}
    variables["MASTER_PORT"] = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, EXAMPLES / "missing_ranks.py", folder, "1"],
            env=os.environ | variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(3)
    ]
    dumps = [folder / f"rank-{rank}-{socket.gethostname()}-{each.pid}.json" for rank, each in enumerate(processes)]
    try:
        outputs = [process.communicate(timeout=60)[0] for process in processes[:2]]
        assert [process.returncode for process in processes[:2]] == [1, 1], outputs
        assert all("NcclTimeout" in output for output in outputs), outputs
        assert sorted(path.name for path in folder.iterdir()) == [path.name for path in dumps[:2]]
        processes[2].send_signal(signal.SIGUSR2)
        testing.wait_for(dumps[2].exists, "the third dump")
        assert '"reason": "requested by SIGUSR2"' in dumps[2].read_text()
        assert processes[2].poll() is None, "it goes on"
        assert main(["trace", str(folder)]) == 1
        said = capsys.readouterr().out
        assert "(3 ranks): sequence 2 waits for rank 2" in said, said
        assert "missing: rank 2" in said and "last on it: sequence 1, all_reduce of 4 float64 (sum)" in said, said
        processes[2].send_signal(signal.SIGTERM)
        output = processes[2].communicate(timeout=60)[0]
        assert processes[2].returncode == 128 + signal.SIGTERM, output
        assert '"reason": "SIGTERM"' in (folder / "rank-2.json").read_text()
    finally:
        for process in processes:
            process.kill()
            process.communicate()
