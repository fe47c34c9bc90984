"""`ncclpy run` on several machines, all of which are this one: launchers that meet, fail and exit."""

import contextlib
import re
import signal
import socket
import time

import pytest
import runs
from foreign_stores import free_port

TOKEN = {"NCCLPY_STORE_TOKEN": "of the tests"}


@pytest.fixture
def program(tmp_path):
    """Return a function that writes a program; the program's first argument is the folder for its notes."""

    def write(text):
        path = tmp_path / "program.py"
        path.write_text(runs.NOTE + text)
        return path, tmp_path

    return write


@contextlib.contextmanager
def machines(counts, *arguments, host="127.0.0.1", flags=()):
    """Start a launcher per machine, with `counts` processes; machine 0 is last, so that the others must wait."""
    shown = f"[{host}]" if ":" in host else host
    common = ["--nnodes", len(counts), "--rdzv", f"{shown}:{free_port()}", *flags]
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(runs.started("-n", counts[node], "--node-rank", node, *common, *arguments, env=TOKEN))
            for node in reversed(range(len(counts)))
        ]
        yield started[::-1]


def ended(launchers):
    """Wait for all launchers; return their exit codes, outputs and errors."""
    written = [launcher.communicate(timeout=runs.TIMEOUT) for launcher in launchers]
    return [launcher.returncode for launcher in launchers], [out for out, _ in written], [err for _, err in written]


@pytest.mark.parametrize(
    "host", ["127.0.0.1", *(pytest.param(host, marks=pytest.mark.slow) for host in ("::1", "localhost"))]
)
def test_ranks_are_numbered_over_all_machines(host_engine, program, host):
    try:
        socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        pytest.skip(f"needs an address {host} on this machine: {error}")
    arguments = program("""
import numpy as np, ncclpy
from ncclpy.bootstrap import environment
place = environment()
with ncclpy.Communicator.from_env(device=place.rank, timeout=60) as comm:
    array = np.full(4, comm.rank + 1.0)
    comm.all_reduce(array)
    print(*place[:5], os.environ["GROUP_RANK"], os.environ["MASTER_ADDR"], array[0])
""")
    with machines([2, 1], *arguments, host=host) as launchers:
        codes, outs, errs = ended(launchers)
    assert codes == [0, 0], errs
    assert sorted(outs[0].splitlines()) == [f"[{rank}] {rank} 3 {rank} 2 ncclpy 0 {host} 6.0" for rank in range(2)]
    assert outs[1].splitlines() == [f"[2] 2 3 0 1 ncclpy 1 {host} 6.0"]
    assert errs == ["", ""]


WAITING = """
note()
if rank == 0:
    while not pathlib.Path(sys.argv[1], "go").exists():
        time.sleep(0.01)
    sys.exit(7)
time.sleep(1000)
"""


def test_failure_on_one_machine_ends_all(program):
    path, folder = program(WAITING)
    with machines([2, 2, 1], path, folder, flags=["--grace", "0.2"]) as launchers:
        pids = runs.wait_for_pids(folder, 5)
        (folder / "go").touch()
        codes, _, errs = ended(launchers)
    assert codes == [7, 7, 7]
    assert all(re.search(r"rank 0 \(process \d+\) ended with exit code 7", err) for err in errs), errs
    assert "(machine 0)" not in errs[0] and "(machine 0)" in errs[1] and "(machine 0)" in errs[2]
    runs.wait_until_gone(pids)


@pytest.mark.slow
def test_no_kill_lets_other_machines_continue(program):
    path, folder = program("""
note()
if rank == 0:
    sys.exit(7)
while not pathlib.Path(sys.argv[1], "go").exists():
    time.sleep(0.01)
print("survived")
""")
    with machines([1, 1], path, folder, flags=["--no-kill", "--grace", "0"]) as launchers:
        pids = runs.wait_for_pids(folder, 2)
        while "rank 0" not in launchers[1].stderr.readline():
            pass
        time.sleep(0.2)
        (folder / "go").touch()
        codes, outs, _ = ended(launchers)
    assert (codes, outs) == ([7, 7], ["", "[1] survived\n"])
    runs.wait_until_gone(pids)


@pytest.mark.parametrize("node", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_lost_launcher_ends_the_others(program, node):
    """The launcher of machine 0 takes the store with it."""
    path, folder = program("note(); time.sleep(1000)")
    with machines([1, 1, 1], path, folder, flags=["--grace", "0.2"]) as launchers:
        pids = runs.wait_for_pids(folder, 3)
        launchers[node].send_signal(signal.SIGKILL)
        codes, _, errs = ended(launchers)
        assert codes[node] == -signal.SIGKILL
        for other in {0, 1, 2} - {node}:
            assert codes[other] == 1
            assert re.search(rf"the launcher on \S+ \(machine {node}\).* is gone", errs[other])
    runs.wait_until_gone(pids)


def test_store_stays_until_all_machines_are_done(program):
    """Machine 0's process ends at once; machine 1's uses the store after that, and fails."""
    path, folder = program("""
from ncclpy.bootstrap import rendezvous
note()
if rank == 1:
    while not pathlib.Path(sys.argv[1], "go").exists():
        time.sleep(0.01)
    place, store = rendezvous(60)
    store.set("key", b"1")
    print(store.get("key"))
    sys.exit(3)
""")
    with machines([1, 1], path, folder) as launchers:
        pids = runs.wait_for_pids(folder, 2)
        runs.wait_until_gone([int((folder / "pid-0").read_text())])
        time.sleep(0.2)
        (folder / "go").touch()
        codes, outs, errs = ended(launchers)
    assert (codes, outs, errs[0]) == ([3, 3], ["", "[1] b'1'\n"], "")
    runs.wait_until_gone(pids)


def test_missing_machine_is_named(program):
    path, folder = program("")
    address = f"127.0.0.1:{free_port()}"
    done = runs.run("-n", 1, "--nnodes", 2, "--rdzv", address, "--timeout", 0.5, path, folder, env=TOKEN)
    assert done.returncode == 1
    assert re.search("ncclpy run: NcclTimeout: .*rank 1 of 2 did not arrive", done.stderr)
    done = runs.run(
        "-n", 1, "--nnodes", 2, "--node-rank", 1, "--rdzv", address, "--timeout", 0.5, path, folder, env=TOKEN
    )
    assert done.returncode == 1
    assert done.stderr.startswith("ncclpy run: ") and address.partition(":")[2] in done.stderr


def test_taken_port_and_missing_token_are_errors(program):
    path, folder = program("")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = runs.run("-n", 1, "--nnodes", 2, "--rdzv", address, path, folder, env=TOKEN)
    assert done.returncode == 1
    assert re.match(f"ncclpy run: OSError: .*{address}.*the port is taken", done.stderr)
    env = {"NCCLPY_STORE_TOKEN": ""}
    done = runs.run("-n", 1, "--nnodes", 2, "--rdzv", f"0.0.0.0:{free_port()}", path, folder, env=env)
    assert done.returncode == 1
    assert "NCCLPY_STORE_TOKEN" in done.stderr


def test_two_launchers_on_one_port(program):
    """A second launcher, as machine 0 or as an existing machine, gets an error; the first run continues."""
    path, folder = program("""
note()
while not pathlib.Path(sys.argv[1], "go").exists():
    time.sleep(0.01)
print("went on")
""")
    address = f"127.0.0.1:{free_port()}"
    common = ["-n", 1, "--nnodes", 2, "--rdzv", address]
    with contextlib.ExitStack() as stack:
        launchers = [
            stack.enter_context(runs.started(*common, "--node-rank", node, path, folder, env=TOKEN)) for node in (0, 1)
        ]
        pids = runs.wait_for_pids(folder, 2)
        late = [
            (0, TOKEN, f"OSError: .*{address}: the port is taken"),
            (1, TOKEN, "StoreError: machine 1 is there already"),
            (1, {"NCCLPY_STORE_TOKEN": "another"}, ".*has another token"),
        ]
        refused = [
            stack.enter_context(runs.started(*common, "--node-rank", node, path, folder, env=env))
            for node, env, _ in late
        ]
        for (_, _, words), launcher in zip(late, refused, strict=True):
            out, err = launcher.communicate(timeout=runs.TIMEOUT)
            assert (launcher.returncode, out) == (1, "")
            assert re.match(f"ncclpy run: {words}", err), err
        (folder / "go").touch()
        codes, outs, _ = ended(launchers)
    assert (codes, outs) == ([0, 0], ["[0] went on\n", "[1] went on\n"])
    runs.wait_until_gone(pids)


def test_program_missing_on_one_machine_ends_all(tmp_path):
    """Machine 1 looks for the program in another folder."""
    (tmp_path / "program").write_text("#!/bin/sh\nexec sleep 1000")
    (tmp_path / "program").chmod(0o755)
    (tmp_path / "empty").mkdir()
    common = ["-n", 1, "--grace", 0.2, "--nnodes", 2, "--rdzv", f"127.0.0.1:{free_port()}"]
    with (
        runs.started(*common, "--node-rank", 1, "./program", env=TOKEN, cwd=tmp_path / "empty") as other,
        runs.started(*common, "./program", env=TOKEN, cwd=tmp_path) as first,
    ):
        codes, _, errs = ended([first, other])
    assert codes == [127, 127]
    assert "rank 1: './program' cannot be started: No such file or directory on " in errs[0]
