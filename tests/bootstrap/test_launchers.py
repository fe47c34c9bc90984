"""Real launchers: what `environment` reads under each, and communicators made from it.

`.ci/fetch_launchers FOLDER` fetches both MPIs; torch and mpi4py are installed beside ncclpy, Slurm is Debian's. A
missing launcher is a failure, not a skip, as these tests run only on request.
"""

import contextlib
import getpass
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import runs
from foreign_stores import free_port
from launchers import LAUNCHERS, for_mpi, launch, mpi
from paths import ROOT

pytestmark = pytest.mark.launchers

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--local-addr", "127.0.0.1"]


@pytest.fixture
def program(tmp_path):
    def write(text):
        path = tmp_path / "program.py"
        path.write_text(text)
        return path

    return write


PROGRAM = """
import sys, numpy as np, ncclpy
from ncclpy.bootstrap import environment
place = environment()
for again in range(2):
    with ncclpy.Communicator.from_env(timeout=60) as comm:
        assert (comm.rank, comm.nranks, comm.device) == (place.rank, place.size, place.local_rank)
        array = np.full(4, comm.rank + 1.0)
        comm.all_reduce(array)
# In one write: other ranks write to the same pipe.
sys.stdout.write(f"<{place.launcher} {place.rank}/{place.size} {place.local_size} {array[0]:g}>\\n")
"""


def check(out, launcher, size):
    assert sorted(re.findall("<.*?>", out)) == [
        f"<{launcher} {rank}/{size} {size} {size * (size + 1) / 2:g}>" for rank in range(size)
    ], out


@pytest.mark.parametrize("name", ["openmpi", "mpich"])
def test_mpirun(host_engine, tmp_path, program, name):
    """Without an address the ranks of one machine meet by a file, also with a shell between launcher and rank."""
    mpirun = [mpi(name) / "bin/mpirun", "-n", 3]
    check(launch([*mpirun, sys.executable, program(PROGRAM)], tmp_path), name, 3)
    check(launch([*mpirun, "sh", "-c", f"{sys.executable} {program(PROGRAM)}; true"], tmp_path), name, 3)


@pytest.mark.parametrize("name", ["openmpi", "mpich"])
def test_mpirun_with_an_address(host_engine, tmp_path, program, name):
    """Rank 0 serves at the address."""
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{free_port()}"}
    check(launch([mpi(name) / "bin/mpirun", "-n", 3, sys.executable, program(PROGRAM)], tmp_path, env), name, 3)


@pytest.mark.parametrize("name", ["openmpi", "mpich"])
def test_two_jobs_at_a_time_do_not_meet(host_engine, tmp_path, program, name):
    commands = [[mpi(name) / "bin/mpirun", "-n", size, sys.executable, program(PROGRAM)] for size in (2, 3)]
    env = runs.environment(LAUNCHERS)
    jobs = [
        subprocess.Popen(list(map(str, command)), cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)
        for command in commands
    ]
    try:
        for job, size in zip(jobs, (2, 3), strict=True):
            check(job.communicate(timeout=100)[0], name, size)
    finally:
        for job in jobs:
            job.kill()
            job.communicate()


@pytest.mark.parametrize("name", ["openmpi", "mpich"])
def test_ranks_of_several_machines_need_an_address(tmp_path, program, name):
    """One machine stands for two: each rank is told that it is alone on its machine."""
    local = {"openmpi": "OMPI_COMM_WORLD_LOCAL_{}", "mpich": "MPI_LOCAL{}"}[name]
    names = [local.format(part) for part in (("RANK", "SIZE") if name == "openmpi" else ("RANKID", "NRANKS"))]
    path = program(f"""
import os
os.environ.update({{"{names[0]}": "0", "{names[1]}": "1"}})
from ncclpy.bootstrap import rendezvous
try:
    rendezvous(30)
except ValueError as error:
    print("<", error, ">")
""")
    out = launch([mpi(name) / "bin/mpirun", "-n", 2, sys.executable, path], tmp_path)
    assert out.count(f"< {name} has started 2 ranks, 1 of them on this machine, and has set no address") == 2
    assert "Set MASTER_ADDR and MASTER_PORT" in out


@pytest.mark.parametrize("name", ["openmpi", "mpich"])
def test_mpi4py_communicator_is_a_store(tmp_path, program, name):
    path = program("""
import sys
from mpi4py import MPI
from ncclpy.bootstrap import TCPStore, as_store
world = MPI.COMM_WORLD
with as_store(world) as store:
    assert type(store) is TCPStore and store.host == "127.0.0.1"
    values = store.gather("all", world.rank, world.size, b"%d" % world.rank, 60)
    sys.stdout.write(f"<{world.rank} {b' '.join(values).decode()}>\\n")
    # Of every other rank alone: another store.
    half = world.Split(world.rank % 2)
    with as_store(half) as other:
        assert other.port != store.port
        other.barrier("half", half.rank, half.size, 60)
        assert other.keys() == []
    store.barrier("end", world.rank, world.size, 60)
try:
    as_store(MPI.COMM_WORLD.Get_group())
except TypeError as error:
    assert "mpi4py.MPI.Group" in str(error)
else:
    raise AssertionError("a group was taken for a communicator")
""")
    out = launch([mpi(name) / "bin/mpirun", "-n", 3, sys.executable, path], tmp_path, for_mpi(name))
    assert sorted(re.findall("<.*?>", out)) == [f"<{rank} 0 1 2>" for rank in range(3)]


# torchrun


def test_torchrun_serves_the_store(host_engine, tmp_path, program):
    path = program("import os; assert os.environ['TORCHELASTIC_USE_AGENT_STORE'] == 'True'\n" + PROGRAM)
    check(launch([*TORCHRUN, "--nproc-per-node", 3, path], tmp_path), "torchrun", 3)


def test_torchrun_that_serves_no_store(host_engine, tmp_path, program):
    path = program("import os; assert os.environ['TORCHELASTIC_USE_AGENT_STORE'] == 'False'\n" + PROGRAM)
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", 2, path]
    check(launch(command, tmp_path, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}), "torchrun", 2)


def test_torchrun_restart_uses_new_keys(host_engine, tmp_path, program):
    """The agent's store outlives the first attempt, in which rank 1 fails after rank 0 has stored its unique id."""
    path = program(
        """
import os, time
from ncclpy.bootstrap import rendezvous
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    place, store = rendezvous(60)
    if place.rank == 1:
        store.get("ncclpy/communicator-1", 60)
        os._exit(1)
"""
        + PROGRAM
    )
    check(launch([*TORCHRUN, "--nproc-per-node", 2, "--max-restarts", 1, path], tmp_path), "torchrun", 2)


def test_torch_makes_its_process_group_under_ncclpy_run(tmp_path, program):
    """The program can serve at MASTER_PORT, which the launcher reserves against other processes."""
    path = program("""
import sys, datetime, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
ones = torch.ones(2)
dist.all_reduce(ones)
sys.stdout.write(f"<{dist.get_rank()} {ones[0]:g}>\\n")
dist.destroy_process_group()
""")
    done = runs.run("-n", 3, path, env={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}, timeout=100)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall("<.*>", done.stdout)) == [f"<{rank} 3>" for rank in range(3)]


# Slurm


# Daemons are in folders of root's PATH only.
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
SLURM_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
MpiParams=ports={ports[2]}-{ports[3]}
NodeName=here NodeHostname={host} NodeAddr=127.0.0.1 CPUs=8
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture(scope="module")
def slurm():
    """Start munge and Slurm on this machine, for this user; yield the environment in which srun finds them."""
    for name in ("munged", "slurmctld", "slurmd", "srun"):
        assert shutil.which(name, path=PATH), f"needs {name}, of Debian's slurm-wlm and munge"
    with contextlib.ExitStack() as stack:
        # Not pytest's folder: Slurm needs short socket names, and munge folders that no other user can write to.
        folder = Path("/run" if os.getuid() == 0 else Path.home(), f"ncclpy-slurm-{os.getpid()}")
        folder.mkdir(mode=0o755)
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        for name in ("state", "spool"):
            (folder / name).mkdir()
        (folder / "key").write_bytes(os.urandom(1024))
        (folder / "key").chmod(0o600)
        ports = [free_port(), free_port(), free_port()]
        conf = folder / "slurm.conf"
        conf.write_text(
            SLURM_CONF.format(
                host=socket.gethostname(), user=getpass.getuser(), folder=folder, ports=[*ports, ports[2] + 9]
            )
        )
        env = {"SLURM_CONF": str(conf), "PATH": PATH}
        munge = {
            "key-file": "key",
            "socket": "munge.socket",
            "pid-file": "pid",
            "log-file": "log",
            "seed-file": "seed",
        }
        for command in (
            ["munged", "--foreground", "--force", *(f"--{name}={folder}/{file}" for name, file in munge.items())],
            ["slurmctld", "-D", "-c"],
            ["slurmd", "-D", "-c", "-N", "here"],
        ):
            log = stack.enter_context(open(folder / f"{command[0]}.out", "w"))
            process = subprocess.Popen(command, env=os.environ | env, stdout=log, stderr=log)
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)
        deadline = time.monotonic() + 60
        while True:
            state = subprocess.run(
                ["sinfo", "-h", "-o", "%t"], env=os.environ | env, capture_output=True, text=True, timeout=60
            )
            if state.stdout.strip() == "idle":
                break
            logs = "\n".join(f"{path.name}: {path.read_text()[-1000:]}" for path in folder.glob("*.out"))
            assert time.monotonic() < deadline, f"{state.stdout}{state.stderr}\n{logs}"
            time.sleep(0.1)
        yield env


@pytest.mark.parametrize("options", [(), ("--mpi=pmi2",)], ids=["plain", "pmi2"])
def test_srun(host_engine, tmp_path, program, slurm, options):
    out = launch(["srun", *options, "-n", 3, sys.executable, program(PROGRAM)], tmp_path, slurm)
    check(out, "slurm", 3)


def test_srun_command_of_guide(host_engine, tmp_path, slurm):
    guide = (ROOT / "docs" / "guides" / "processes.md").read_text()
    command = re.findall(r"^srun .*from_env.py$", guide, re.M)
    assert len(command) == 1
    words = [
        {"python": sys.executable}.get(word, word.replace("examples/", f"{ROOT}/examples/"))
        for word in command[0].split()
    ]
    assert launch(words, tmp_path, slurm) == "4 ranks, sum 10.0\n"


def test_srun_with_reserved_ports(tmp_path, program, slurm):
    """The ranks of a step can meet at its first node and port."""
    path = program("from ncclpy.bootstrap import environment; print(environment()[4:])")
    out = launch(["srun", "-n", 1, "--resv-ports=1", sys.executable, path], tmp_path, slurm)
    port = re.fullmatch(r"\('slurm', 'here', (\d+)\)\n", out)
    low, high = re.search(r"ports=(\d+)-(\d+)", Path(slurm["SLURM_CONF"]).read_text()).groups()
    assert port and int(low) <= int(port[1]) <= int(high), out


def test_batch_script_is_no_rank(tmp_path, program, slurm):
    path = program("from ncclpy.bootstrap import environment; environment()")
    script = tmp_path / "job"
    script.write_text(f"#!/bin/sh\n{sys.executable} {path}\n")
    launch(["sbatch", "--wait", "-n", 2, "-o", tmp_path / "out", script], tmp_path, slurm, code=1)
    said = (tmp_path / "out").read_text()
    assert re.search(r"RuntimeError: no launcher has started this process.*the shell of Slurm's job \d+", said), said


@pytest.mark.parametrize("name", ["openmpi", "mpich"])
def test_mpirun_under_slurm_is_the_launcher(host_engine, tmp_path, program, slurm, name):
    command = ["salloc", "-n", 2, mpi(name) / "bin/mpirun", "-n", 2, sys.executable, program(PROGRAM)]
    check(launch(command, tmp_path, slurm), name, 2)


def test_ncclpy_run_under_slurm_is_the_launcher(host_engine, tmp_path, program, slurm):
    command = ["srun", "-n", 1, *runs.command("-n", 2, program(PROGRAM))]
    check(launch(command, tmp_path, slurm), "ncclpy", 2)
