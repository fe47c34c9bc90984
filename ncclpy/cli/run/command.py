"""``ncclpy run``: start the processes, watch them, and leave none behind."""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys

from ncclpy.cli.run import arguments
from ncclpy.cli.run.output import Output, colours, prefix
from ncclpy.cli.run.ranks import Ranks, StartError
from ncclpy.cli.run.rendezvous import LauncherRendezvous
from ncclpy.cli.run.supervise import Supervisor, say
from ncclpy.errors import NcclError

_INTERRUPTED = 130


def run(parser: argparse.ArgumentParser, given: argparse.Namespace) -> int:
    """Run the program in all processes and return the exit code.

    The code is that of the first failure; 128 plus the number of a signal that has ended the run; or else 0.
    """
    arguments.check(parser, given)
    _open_streams()
    try:
        rendezvous = LauncherRendezvous(given.rdzv, given.node_rank, given.nnodes, given.nproc, given.timeout)
    except (NcclError, OSError, ValueError) as error:
        say(f"{type(error).__name__}: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted before anything was started")
        return _INTERRUPTED
    with rendezvous:
        return _run(given, rendezvous)


def _open_streams() -> None:
    """Open each standard stream that is closed (as in a daemon), else a pipe or socket would get its descriptor."""
    for number, name, mode in (0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w"):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))


def _run(given: argparse.Namespace, rendezvous: LauncherRendezvous) -> int:
    try:
        ranks = Ranks()
    except OSError as error:
        say(f"no process can be started: {error.strerror}")
        return 1
    try:
        supervisor = Supervisor(ranks, given.grace, not given.no_kill, rendezvous.failed)
        output = Output(supervisor.broken)
        with supervisor.signals():
            try:
                rendezvous.watch(supervisor.failed_elsewhere)
                _start(given, rendezvous, ranks, output)
                output.start()
                code = supervisor.watch()
            except StartError as error:
                say(str(error))
                rendezvous.failed(error.code, f"rank {rendezvous.first + len(ranks.all)}: {error}")
                output.start()
                code = error.code
            finally:
                stuck = ranks.end()
            if stuck:
                say(f"processes {', '.join(map(str, stuck))} cannot be killed")
        # supervisor.signals() has restored Python's handlers, so Ctrl-C ends the two waits below: for the reader of
        # the output, and for the other launchers. After a signal that asked for the end, the first wait is bounded.
        output.finish(given.grace if supervisor.asked else math.inf)
        return rendezvous.end(code)
    except KeyboardInterrupt:
        return _INTERRUPTED
    finally:
        ranks.close()


def threads_of_each(nproc: int, cores: int) -> int:
    """Return how many threads each of a machine's processes may have."""
    return max(1, cores // nproc)


def _start(given: argparse.Namespace, rendezvous: LauncherRendezvous, ranks: Ranks, output: Output) -> None:
    command = _command(given)
    common = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    common.setdefault("PYTHONUNBUFFERED", "1")  # else a rank's output appears only at its end
    if given.nproc > 1 and "OMP_NUM_THREADS" not in common:
        cores = len(os.sched_getaffinity(0))
        common["OMP_NUM_THREADS"] = str(threads_of_each(given.nproc, cores))
        say(
            f"OMP_NUM_THREADS is not set: it is {common['OMP_NUM_THREADS']} for each of the {given.nproc} processes, "
            f"which share {cores} cores; otherwise their threads of numpy, torch and OpenMP would compete. Set it to "
            "choose another number"
        )
    common |= rendezvous.variables
    common |= {
        "WORLD_SIZE": str(rendezvous.size),
        "LOCAL_WORLD_SIZE": str(given.nproc),
        "GROUP_RANK": str(given.node_rank),
        "GROUP_WORLD_SIZE": str(given.nnodes),
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": str(rendezvous.size),
        "TORCHELASTIC_RUN_ID": ranks.id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }
    for local in range(given.nproc):
        rank = str(rendezvous.first + local)
        env = common | {"RANK": rank, "LOCAL_RANK": str(local), "ROLE_RANK": rank}
        # Rank 0 reads the launcher's standard input, as a program does that is started without a launcher.
        stdin = None if rank == "0" else subprocess.DEVNULL
        out, err = ranks.start(int(rank), command, env, stdin)
        for pipe, stream in (out, sys.stdout), (err, sys.stderr):
            output.add(pipe, stream.fileno(), prefix(int(rank), rendezvous.size, colours(stream)))


def _command(given: argparse.Namespace) -> list[str]:
    """Return the command of each process."""
    if given.module:
        return [sys.executable, "-m", given.program, *given.args]
    if given.program.endswith(".py"):
        return [sys.executable, given.program, *given.args]
    return [given.program, *given.args]
