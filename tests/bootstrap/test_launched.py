"""`rendezvous` with rank 0 as the server: how the ranks of a launcher find it and each other.

The launchers here are shells with a launcher's name and variables; test_launchers.py starts real ones.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import runs
import thread_ranks
from foreign_stores import free_port

import ncclpy
from ncclpy.bootstrap import LocalStore, Place, StoreError, launched, rendezvous
from ncclpy.bootstrap.rank_rendezvous import RankRendezvous

LONG = 60  # seconds that only a hang takes

#: Prefixes of launchers' variables.
VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_", "OMPI_", "PMI_", "MPI_", "SLURM_", "MASTER_", "TORCHELASTIC_"),
    *("NCCLPY_STORE", "NCCLPY_RUN", "NCCLPY_LAUNCHER"),
)

#: The process that starts the ranks of MPICH on a machine.
PROXY = "hydra_pmi_proxy"
START = """
size=$1; shift
for rank in $(seq 0 $((size - 1))); do
    PMI_RANK=$rank PMI_SIZE=$size MPI_LOCALRANKID=$rank MPI_LOCALNRANKS=$size "$@" &
    pids="$pids $!"
done
code=0
for pid in $pids; do wait $pid || code=$?; done
exit $code
"""


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """Return a function that starts a program as `size` ranks, which meet in the test's folder."""
    for name in [name for name in os.environ if name.startswith(VARIABLES)]:
        monkeypatch.delenv(name)
    shell = tmp_path / PROXY
    shutil.copy(shutil.which("sh"), shell)
    started = []

    def start(size, program, **env):
        path = tmp_path / f"program-{len(started)}.py"
        path.write_text(textwrap.dedent(program))
        process = subprocess.Popen(
            [shell, "-c", START, "launcher", str(size), sys.executable, str(path)],
            cwd=tmp_path,
            env=runs.environment({"TMPDIR": str(tmp_path), **env}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.communicate()


def ended(process):
    """Wait for the ranks; return the lines that they printed, sorted."""
    out, err = process.communicate(timeout=LONG)
    assert (process.returncode, err) == (0, "")
    return sorted(out.splitlines())


MEET = """
    from ncclpy.bootstrap import rendezvous
    place, store = rendezvous(60)
    assert store.timeout == 60
    words = b" ".join(store.gather("all", place.rank, place.size, b"%d" % place.rank)).decode()
    print(f"{place.launcher} {place.rank}/{place.size}: {words}\\n", end="", flush=True)
"""


def met(size):
    """Return what `size` ranks print."""
    return [f"mpich {rank}/{size}: {' '.join(map(str, range(size)))}" for rank in range(size)]


def test_ranks_of_one_machine_meet_by_file(launch, tmp_path):
    assert ended(launch(3, MEET)) == met(3)
    folder = tmp_path / f"ncclpy-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700 and list(folder.iterdir()) == []


def test_two_jobs_at_a_time_do_not_meet(launch):
    jobs = [launch(2, MEET), launch(2, MEET)]
    assert [ended(job) for job in jobs] == [met(2), met(2)]


def test_meeting_file_is_removed_before_any_rank_continues(launch):
    """Rank 0 is delayed as it removes the file: a program that rank 1 starts next would take it for its own."""
    program = """
    import glob, os, pathlib, tempfile, time
    real = pathlib.Path.unlink
    pathlib.Path.unlink = lambda self: (time.sleep(0.4), real(self))
    from ncclpy.bootstrap import rendezvous
    place, store = rendezvous(60)
    print(glob.glob(f"{tempfile.gettempdir()}/ncclpy-*/*"), flush=True)
    """
    assert ended(launch(2, program)) == ["[]", "[]"]


def test_rank_that_starts_before_rank_0_waits(launch):
    assert ended(
        launch(2, 'import os, time; time.sleep(0 if int(os.environ["PMI_RANK"]) else 0.4)\n' + textwrap.dedent(MEET))
    ) == met(2)


def test_rank_0_serves_at_given_address(launch, tmp_path):
    assert ended(launch(2, MEET, MASTER_ADDR="127.0.0.1", MASTER_PORT=f"{free_port()}")) == met(2)
    assert not list(tmp_path.glob("ncclpy-*"))


def test_missing_rank_is_named(launch):
    program = """
    import ncclpy
    from ncclpy.bootstrap import environment, rendezvous
    if environment().rank == 2:
        raise SystemExit
    try:
        rendezvous(1.2)
    except ncclpy.NcclTimeout as error:
        print(2 in error.missing, flush=True)
    """
    assert ended(launch(3, program)) == ["True", "True"]


@pytest.fixture
def ranks(monkeypatch):
    """Return a function that makes this process a rank of MPICH, without a parent process of MPICH."""

    def become(rank, size, local_rank, local_size):
        numbers = {"PMI_RANK": rank, "PMI_SIZE": size, "MPI_LOCALRANKID": local_rank, "MPI_LOCALNRANKS": local_size}
        for name, number in numbers.items():
            monkeypatch.setenv(name, f"{number}")
        monkeypatch.setenv("NCCLPY_LAUNCHER", "mpich")
        monkeypatch.delenv("MASTER_ADDR", raising=False)
        monkeypatch.delenv("MASTER_PORT", raising=False)
        monkeypatch.setattr(launched, "_store", None)

    return become


def test_several_machines_need_an_address(ranks):
    ranks(1, 4, 1, 2)
    with pytest.raises(ValueError, match=r"has started 4 ranks, 2 of them on this machine, .*Set MASTER_ADDR and"):
        rendezvous(1)


def test_unknown_launcher_process_is_an_error(ranks):
    ranks(0, 2, 0, 2)
    with pytest.raises(ValueError, match=r"is not found among the parents of this one\. Set MASTER_ADDR=127"):
        rendezvous(1)


def test_folder_readable_by_others_is_refused(ranks, tmp_path, monkeypatch):
    ranks(0, 2, 0, 2)
    monkeypatch.setattr(launched, "_launcher_process", lambda launcher: "1-1")
    monkeypatch.setattr(launched.tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / f"ncclpy-{os.getuid()}").mkdir(mode=0o755)
    with pytest.raises(StoreError, match=r"its mode is 755 .*set TMPDIR to a folder of your own"):
        rendezvous(1)


def test_rank_0_that_does_not_serve_is_named(ranks, tmp_path, monkeypatch):
    ranks(1, 2, 1, 2)
    monkeypatch.setattr(launched, "_launcher_process", lambda launcher: "1-1")
    monkeypatch.setattr(launched.tempfile, "gettempdir", lambda: str(tmp_path))
    place = launched.environment()
    monkeypatch.setattr(launched, "environment", lambda: time.sleep(0.05) or place)  # the error has the given timeout
    with pytest.raises(ncclpy.NcclTimeout, match=r"rank 0 of 2 has not written .*/mpich-1-1 within 200 ms"):
        rendezvous(0.2)


def run_env_ranks(size, program, **env):
    """Run a program as `size` ranks with RANK, WORLD_SIZE and an address in the environment; return their output."""
    told = {"WORLD_SIZE": f"{size}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{free_port()}", **env}
    clean = {name: value for name, value in runs.environment({}).items() if not name.startswith(VARIABLES)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program)],
            cwd="/",
            env=clean | told | {"RANK": f"{rank}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        return [each.communicate(timeout=LONG)[0].strip() for each in started]
    finally:
        for each in started:
            each.kill()


def test_rank_and_world_size_alone_make_a_communicator_of_devices_in_order(host_engine):
    program = """
        import numpy as np, ncclpy
        from ncclpy.bootstrap import environment, rendezvous
        assert environment().local_rank is None
        with ncclpy.Communicator.from_env(timeout=60) as comm, ncclpy.init_process_group(timeout=60) as group:
            place, _ = rendezvous()
            values = np.ones(1)
            comm.all_reduce(values)
            group.all_reduce(values).wait()
            print(comm.device, group.device, place.local_rank, place.local_size, values[0])
    """
    assert run_env_ranks(2, program, NCCLPY_HOST_DEVICES="2") == ["0 0 0 2 4.0", "1 1 1 2 4.0"]


def locate(names, size, seconds):
    """Locate ranks in threads on machines named by letters; return the result or the error of each rank."""
    store = LocalStore()

    def be(rank):
        threading.current_thread().name = names[rank]
        place = Place(rank, size, None, None, "torchrun")
        try:
            return launched._locate(place, RankRendezvous(store, "this job", rank, size), time.monotonic() + seconds)
        except ncclpy.NcclTimeout as late:
            return late.missing, str(late).partition(" within")[0]

    return thread_ranks.run_ranks(len(names), be, LONG + 30)


def test_ranks_of_each_machine_are_numbered_in_their_order(monkeypatch):
    monkeypatch.setattr(launched, "machine", lambda: threading.current_thread().name)
    assert locate("abaa", 4, LONG) == [(0, 3), (0, 1), (1, 3), (2, 3)]


def test_rank_without_machine_is_same_error_on_all():
    late = (
        "rank 2 of 3 did not arrive to count the ranks of each machine, as LOCAL_RANK or LOCAL_WORLD_SIZE is not set"
    )
    assert locate("aa", 3, 1.0) == [([2], late)] * 2


def test_rank_and_world_size_without_address_name_missing_variables(monkeypatch):
    for name in [name for name in os.environ if name.startswith(VARIABLES)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(launched, "_store", None)
    with pytest.raises(ValueError, match=r"has started 4 ranks and has set no address .*\. Set MASTER_ADDR"):
        rendezvous(1)


@pytest.mark.parametrize(("timeout", "error"), [("1", TypeError), (-1, ValueError), (float("nan"), ValueError)])
def test_invalid_timeout_is_refused(timeout, error):
    with pytest.raises(error, match="timeout: expected seconds >= 0 or None"):
        rendezvous(timeout)
