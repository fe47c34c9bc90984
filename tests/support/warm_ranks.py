"""Ranks like those of `ncclpy run`, in forks of a process that has imported numpy and ncclpy, for a fast start.

A new Python that imports both takes a quarter of a second of processor time, as does the launcher. The fork has the
environment of a rank of the launcher, and runs its program as ``__main__``. The launcher itself has its own tests.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import select
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

_warm: subprocess.Popen | None = None


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
    from ncclpy.bootstrap import TCPStore

    path = Path(folder) / "program.py"
    path.write_text("import os, signal, time\nimport numpy as np, ncclpy\n" + textwrap.dedent(program))
    token, name = secrets.token_hex(8), secrets.token_hex(4)
    outputs = [Path(folder) / f"output-{rank}" for rank in range(size)]
    for each in outputs:
        each.unlink(missing_ok=True)
    with TCPStore("127.0.0.1", 0, serve=True, token=token, linger=0) as store:
        common = {
            "NCCLPY_STORE": f"127.0.0.1:{store.port}",
            "NCCLPY_STORE_TOKEN": token,
            "NCCLPY_RUN_ID": name,
            "TORCHELASTIC_RUN_ID": name,
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])),
        }
        common |= variables or {}
        environments = [{**os.environ, **common, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(size)]
        ranks = [(environment, str(output), None) for environment, output in zip(environments, outputs, strict=True)]
        codes = _order(str(path), ranks, only, timeout)
    said = "".join(each.read_text(errors="replace") for each in outputs)
    assert codes is not None, f"not done after {timeout} s:\n{said}"
    return codes, said


def run_program(path, variables, timeout=100.0):
    """Run a program in its folder, with warnings as errors; return its exit code and output."""
    output = Path(path).with_suffix(".output")
    output.unlink(missing_ok=True)
    [code] = _order(str(path), [({**os.environ, **variables}, str(output), None)], None, timeout, how="strict") or [
        None
    ]
    return code, output.read_text(errors="replace")


def run_snippet(code, environment, timeout):
    """Run a program to the end of its interpreter; return exit code, output and errors. See `testing.run_python`."""
    with tempfile.TemporaryDirectory() as folder:
        path, output, errors = (Path(folder) / name for name in ("program.py", "output", "errors"))
        path.write_text(code)
        codes = _order(str(path), [(environment, str(output), str(errors))], None, timeout, how="whole")
        said = output.read_text(errors="replace"), errors.read_text(errors="replace")
    assert codes is not None, f"not done after {timeout} s:\n{said[0]}\n{said[1]}"
    return codes[0], *said


def _order(path, ranks, only, timeout, how=""):
    """Have the warm process run a program for each rank; return the exit codes, None if they were not done in time."""
    process = _started()
    process.stdin.write(json.dumps([path, ranks, sorted(range(len(ranks)) if only is None else only), how]) + "\n")
    process.stdin.flush()
    # Unbuffered: a buffer could read early exit codes together with the process ids, unseen by select.
    answers = process.stdout.buffer.raw
    pids = json.loads(answers.readline())
    if select.select([answers], [], [], timeout)[0]:
        return json.loads(answers.readline())
    for pid in pids:  # the warm process reaps only when the order is done, so that no process id is reused
        os.kill(pid, signal.SIGKILL)
    answers.readline()
    return None


def _started():
    global _warm
    if _warm is None or _warm.poll() is not None:
        _warm = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/"
        )
        atexit.register(_end, _warm)
    return _warm


def _end(process):
    process.stdin.close()
    process.stdout.close()
    process.wait(30)


# The functions from here on run in the warm process.


def _serve():
    """Read orders and fork; return, in a fork, its program and how to run it; return None at the end."""
    while line := sys.stdin.readline():
        path, ranks, only, how = json.loads(line)
        pids = []
        for environment, output, errors in ranks:
            pid = os.fork()
            if pid == 0:
                become(environment, output, errors)
                if how == "strict":
                    os.chdir(Path(path).parent)
                    warnings.simplefilter("error")
                return path, how
            pids.append(pid)
        _say(pids)
        _say(_end_of(pids, only))
    return None


def _say(answer):
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _end_of(pids, only):
    """Return the exit codes of processes; when those in `only` have ended, the others are killed."""
    left, killed = {pids[rank] for rank in only}, False
    ended = set()
    while len(ended) < len(pids):
        # Not reaped: the id of a reaped process could belong to another one when a test kills it.
        for pid in pids:
            if pid not in ended and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                ended.add(pid)
        if left <= ended and not killed:
            killed = True
            for pid in set(pids) - ended:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def become(environment, output, errors):
    """Take over an environment, and write to these files from now on."""
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, name in enumerate((os.devnull, output, errors or output)):
        opened = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdin = open(0, closefd=False)
    sys.stdout.reconfigure(write_through=True)


def _run(path):
    """Run a program to its end; then exit without the interpreter's finalisation, which would touch all its memory."""
    code = 0
    sys.argv = [path]
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
    os._exit(code)


if __name__ == "__main__":
    import encodings.idna  # noqa: F401
    import gc

    import numpy  # noqa: F401

    import ncclpy.bootstrap.launched
    import ncclpy.host
    import ncclpy.peers.launcher_peers
    import ncclpy.process_group  # noqa: F401
    import testing  # noqa: F401

    gc.collect()
    gc.freeze()  # a collection in a fork would touch, and so copy, all objects
    found = _serve()
    if found is not None:
        program, how = found
        if how == "whole":
            sys.argv = ["-c"]
            exec(compile(Path(program).read_text(), "<string>", "exec"), vars())
        else:
            _run(program)
