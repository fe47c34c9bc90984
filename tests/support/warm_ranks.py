"""Ranks like those of `ncclpy run`, in forks of a process that has imported numpy and ncclpy, for a fast start.

A new Python that imports both takes a quarter of a second of processor time, as does the launcher. The fork has the
environment of a rank of the launcher, and runs its program as ``__main__``. The launcher itself has its own tests.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import gc
import importlib
import json
import os
import queue
import secrets
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import traceback
import warnings
from pathlib import Path

from paths import with_support

#: What the warm process imports, unless others are named.
IMPORTS = (
    "encodings.idna",
    "numpy",
    "ncclpy.bootstrap.launched",
    "ncclpy.host",
    "ncclpy.peers.launcher_peers",
    "ncclpy.process_group",
    "testing",
)
_idle: dict[tuple[str, ...], queue.LifoQueue[subprocess.Popen]] = collections.defaultdict(queue.LifoQueue)


def run_ranks(folder, size, program, *, only=None, timeout=100.0, variables=None):
    """Run a program, a text with numpy and ncclpy imported, as `size` ranks; return their exit codes and output.

    Parameters
    ----------
    folder
        The folder for program and output: a test's `tmp_path`.
    size, program
        The number of ranks, and the program of each.
    only
        The ranks that end by themselves, by default all; the others are killed when these have ended.
    timeout
        Seconds after which all are killed, and the test fails.
    variables
        More environment variables; those read at the import, such as NCCLPY_DUMP_DIR, have no effect.
    """
    path = Path(folder) / "program.py"
    path.write_text("import os, signal, time\nimport numpy as np, ncclpy\n" + textwrap.dedent(program))
    outputs = [Path(folder) / f"output-{rank}" for rank in range(size)]
    for each in outputs:  # here: a rank may be killed before it opens its own
        each.write_text("")
    with launched(size) as environments:
        ranks = [({**each, **(variables or {})}, out, out) for each, out in zip(environments, outputs, strict=True)]
        codes = [code for code, _ in run_forks([path], ranks, timeout, only=only)]
    said = "".join(each.read_text(errors="replace") for each in outputs)
    assert None not in codes, f"ranks {_late(codes)} not done after {timeout} s:\n{said}"
    return codes, said


@contextlib.contextmanager
def launched(size):
    """Serve a store, and yield the environment of each rank, as `ncclpy run` would set it."""
    from ncclpy.bootstrap import TCPStore

    token, name = secrets.token_hex(8), secrets.token_hex(4)
    with TCPStore("127.0.0.1", 0, serve=True, token=token, linger=0) as store:
        common = {
            "NCCLPY_STORE": f"127.0.0.1:{store.port}",
            "NCCLPY_STORE_TOKEN": token,
            "NCCLPY_RUN_ID": name,
            "TORCHELASTIC_RUN_ID": name,
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "PYTHONPATH": with_support(),
        }
        yield [{**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


def run_program(path, variables, timeout=100.0):
    """Run a program in its folder, with warnings as errors; return its exit code and output."""
    output = Path(path).with_suffix(".output")
    output.write_text("")  # here: the program may be killed before it opens the file
    [(code, _)] = run_forks([path], [({**os.environ, **variables}, output, output)], timeout, how="strict")
    return code, output.read_text(errors="replace")


def run_snippet(code, environment, timeout):
    """Run a program to the end of its interpreter; return exit code, output and errors. See `testing.run_python`."""
    with tempfile.TemporaryDirectory() as folder:
        path, output, errors = (Path(folder) / name for name in ("program.py", "output", "errors"))
        path.write_text(code)
        [(ended, _)] = run_forks([path], [(environment, output, errors)], timeout, how="snippet")
        said = output.read_text(errors="replace"), errors.read_text(errors="replace")
    assert ended is not None, f"not done after {timeout} s:\n{said[0]}\n{said[1]}"
    return ended, *said


def run_forks(command, ranks, timeout, *, only=None, how="", imports=IMPORTS):
    """Run a program in a fork for each rank, all at once; return the exit code and the time of the end of each.

    Parameters
    ----------
    command
        The path of the program, and its arguments.
    ranks
        The environment, the file for output, and the file for errors of each.
    timeout
        Seconds after which all are killed: the code of ranks of `only` that were not done is None.
    only
        The ranks that end by themselves, by default all; the others are killed when these have ended.
    how
        ``""`` exits without the interpreter's finalisation, ``"strict"`` also changes to the program's folder and has
        warnings as errors; ``"whole"`` runs to the end of the interpreter, ``"snippet"`` too, like ``python -c``.
    imports
        The modules that the process has imported before; each set has its own processes, which are used again.
    """
    try:
        process = _idle[imports].get_nowait()
    except queue.Empty:
        process = subprocess.Popen(
            [sys.executable, __file__, *imports], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/"
        )
        atexit.register(_end, process)
    order = list(command), ranks, timeout, sorted(range(len(ranks)) if only is None else only), how
    process.stdin.write(json.dumps(order, default=str) + "\n")
    process.stdin.flush()
    answer = json.loads(process.stdout.readline())
    _idle[imports].put(process)
    return answer


def _late(codes):
    return [rank for rank, code in enumerate(codes) if code is None]


def _end(process):
    process.stdin.close()
    process.stdout.close()
    process.wait(30)


# The functions from here on run in the warm process.


def _serve():
    """Read orders and fork; return, in a fork, its program and how to run it; return None at the end."""
    while line := sys.stdin.readline():
        command, ranks, timeout, only, how = json.loads(line)
        pids = []
        for environment, output, errors in ranks:
            pid = os.fork()
            if pid == 0:
                _become(environment, output, errors)
                if how == "strict":
                    os.chdir(Path(command[0]).parent)
                    warnings.simplefilter("error")
                return command, how
            pids.append(pid)
        sys.stdout.write(json.dumps(_ends_of(pids, timeout, set(only))) + "\n")
        sys.stdout.flush()
    return None


def _ends_of(pids, timeout, only):
    """Return exit codes and times of ends; when those in `only` have ended, and at the timeout, all are killed."""
    ended, end = {}, time.monotonic() + timeout
    while not only <= ended.keys() and time.monotonic() < end:
        # Not reaped: the id of a reaped process could belong to another one when it is killed.
        for rank, pid in enumerate(pids):
            if rank not in ended and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                ended[rank] = time.time()
        time.sleep(0.002)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    late = only - ended.keys()
    return [(None if rank in late else code, ended.get(rank, float("inf"))) for rank, code in enumerate(codes)]


def _become(environment, output, errors):
    """Take over an environment, and write to these files from now on."""
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, name in enumerate((os.devnull, output, errors)):
        opened = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdin = open(0, closefd=False)
    sys.stdout.reconfigure(write_through=True)


def _run(path):
    """Run a program to its end; then exit without the interpreter's finalisation, which would touch all its memory."""
    code = 0
    try:
        exec(compile(Path(path).read_text(), path, "exec"), {"__name__": "__main__", "__file__": path})
        threading._shutdown()  # waits for non-daemon threads
    except SystemExit as left:
        code = 0 if left.code is None else left.code if isinstance(left.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    from ncclpy.engine import unread_failures

    os._exit(code or unread_failures.exit_code)


if __name__ == "__main__":
    for each in sys.argv[1:]:
        importlib.import_module(each)
    gc.collect()
    gc.freeze()  # a collection in a fork would touch, and so copy, all objects
    found = _serve()
    if found is not None:
        sys.argv, how = found
        program = sys.argv[0]
        if how == "snippet":
            sys.argv = ["-c"]
            exec(compile(Path(program).read_text(), "<string>", "exec"), vars())
        elif how == "whole":
            exec(compile(Path(program).read_text(), program, "exec"), vars())
        else:
            _run(program)
