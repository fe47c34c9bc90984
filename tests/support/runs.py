"""`ncclpy run` in a separate process, and checks for processes left behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import warm_ranks
from paths import SUPPORT

import ncclpy

TIMEOUT = 60


def command(*arguments):
    return [sys.executable, "-m", "ncclpy", "run", *map(str, arguments)]


def environment(extra=()):
    """Return this process's environment without variables of launchers."""
    left = ("NCCLPY_RUN", "NCCLPY_STORE", "PYTHONUNBUFFERED")
    env = {name: value for name, value in os.environ.items() if not name.startswith(left)}
    return env | dict(extra)


@contextlib.contextmanager
def started(*arguments, env=(), **options):
    """Start a launcher; kill it at the end of the block if it still runs."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # Not in the root of the tree, where `python -m` would import the sources as the package.
    process = subprocess.Popen(command(*arguments), env=environment(env), **({"cwd": SUPPORT} | pipes | options))
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def run(*arguments, env=(), timeout=TIMEOUT, **options):
    """Run a launcher to its end, in a fork of a process that has imported it unless there are options of `Popen`."""
    if not options and ncclpy.library().engine == "host":
        code = f"import sys; from ncclpy.cli.main import main; sys.exit(main({['run', *map(str, arguments)]!r}))"
        return subprocess.CompletedProcess("warm", *warm_ranks.run_snippet(code, environment(env), timeout))
    with started(*arguments, env=env, **options) as process:
        out, err = process.communicate(options.get("input"), timeout=timeout)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def of_rank(text, rank):
    """Return the lines of one rank without their prefix."""
    prefix = f"[{rank}] "
    return [line.removeprefix(prefix) for line in text.splitlines() if line.startswith(prefix)]


def state(pid):
    """Return the kernel's state of a process: R, S, D, T if stopped, Z, X."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(") ")[2][0]


def alive(pid):
    """Return whether a process runs; a zombie does not."""
    try:
        return state(pid) not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for_pids(folder, count):
    """Return the process ids that `count` processes have written into files of a folder."""
    deadline = time.monotonic() + TIMEOUT
    while True:
        found = [path.read_text() for path in folder.glob("pid-*")]
        if len([text for text in found if text.endswith("\n")]) >= count:
            return [int(text) for text in found]
        assert time.monotonic() < deadline, f"{len(found)} of {count} processes have begun"
        time.sleep(0.02)


def wait_until_gone(pids):
    """Return once none of the processes runs; kill them and fail if that takes too long."""
    deadline = time.monotonic() + TIMEOUT / 2
    while left := [pid for pid in pids if alive(pid)]:
        if time.monotonic() > deadline:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"processes {left} were left behind")
        time.sleep(0.02)


#: The beginning of a program: `note()` writes its process id into a file, for `wait_for_pids`.
NOTE = """
import os, pathlib, signal, subprocess, sys, time
rank = int(os.environ.get("RANK", -1))
def note(name=rank):
    pathlib.Path(sys.argv[1], f"pid-{name}").write_text(f"{os.getpid()}\\n")
"""
