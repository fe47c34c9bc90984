"""The processes of a run: started, watched, sent signals, and ended."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from ncclpy.cli.run import guard

#: Environment variable of each rank: the id of its run, after the ids of the runs around that run. Children inherit
#: the variable, so the guard finds by a run's id the processes that the run has left.
RUN_IDS = "NCCLPY_RUN_ID"
# Exit codes of a shell, for programs that cannot be started.
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126


class StartError(Exception):
    """Report that the program cannot be started.

    Attributes
    ----------
    code : int
        The exit code that a shell returns for such a program.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Rank:
    """One process.

    Attributes
    ----------
    rank : int
        Its rank among all processes.
    pid : int
        Its process id; the process leads a session of its own.
    code : int or None
        How it ended, as a shell reports it: its exit code, or 128 plus the signal's number. None while it runs.
    """

    def __init__(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self.rank = rank
        self.pid = process.pid
        self.code: int | None = None
        self._process = process

    def poll(self) -> bool:
        """Note how the process has ended; return whether it has ended since the last call."""
        if self.code is not None:
            return False
        # WNOWAIT does not reap the process: no other process may get its id until its whole session has been killed.
        result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if result is None:
            return False
        self.code = result.si_status + (0 if result.si_code == os.CLD_EXITED else 128)
        return True

    def send(self, number: int, *, group: bool = True) -> None:
        """Send a signal to the process, or to its whole process group."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # a process started by sudo belongs to root
                (os.killpg if group else os.kill)(self.pid, number)

    def reap(self) -> None:
        """Reap the process, which has ended."""
        self._process.wait()

    def describe_end(self) -> str:
        """Return in words how the process has ended."""
        code = self.code or 0
        if code > 128:
            with contextlib.suppress(ValueError):
                return f"was ended by {signal.Signals(code - 128).name}"
        return f"ended with exit code {code}"


class Ranks:
    """All processes of one launcher, and the guard that ends them if the launcher cannot."""

    def __init__(self) -> None:
        # A run within another run appends its id to the ids of the outer runs: each launcher finds these processes.
        self.id = secrets.token_hex(8)
        self.run_ids = "/".join(filter(None, [os.environ.get(RUN_IDS), self.id]))
        self.all: list[Rank] = []
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, self.id],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # out of reach of the terminal, and of a signal to the launcher's group
        )

    def start(self, rank: int, command: Sequence[str], env: Mapping[str, str], stdin: int | None) -> tuple[int, int]:
        """Start the process of a rank; return the reading ends of its standard output and standard error."""
        pipes: list[int] = []
        try:
            pipes += os.pipe()
            pipes += os.pipe()
            out, out_theirs, err, err_theirs = pipes
            process = subprocess.Popen(
                command,
                env={**env, RUN_IDS: self.run_ids},
                stdin=stdin,
                stdout=out_theirs,
                stderr=err_theirs,
                start_new_session=True,
            )
        except OSError as error:
            for each in pipes:
                os.close(each)
            code = _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE
            needs = " (raise ulimit -n: the launcher needs two descriptors for each process)"
            hint = needs if error.errno == errno.EMFILE else ""
            raise StartError(f"{command[0]!r} cannot be started: {error.strerror}{hint}", code) from None
        os.close(out_theirs)
        os.close(err_theirs)
        self.all.append(Rank(rank, process))
        self._tell_guard(b"%d\n" % process.pid)
        return out, err

    def _tell_guard(self, line: bytes) -> None:
        assert self._guard.stdin is not None
        with contextlib.suppress(OSError):  # the guard was killed
            self._guard.stdin.write(line)
            self._guard.stdin.flush()

    @property
    def running(self) -> list[Rank]:
        """The ranks that have not ended yet."""
        return [rank for rank in self.all if rank.code is None]

    def poll(self) -> list[Rank]:
        """Return the ranks that have ended since the last call."""
        return [rank for rank in self.all if rank.poll()]

    def send(self, number: int, *, group: bool = True) -> None:
        """Send a signal to all ranks that have not ended."""
        for rank in self.all:
            rank.send(number, group=group)

    def end(self) -> list[int]:
        """Kill all processes of the run, also those that ranks have started; return the ids of those that remain."""
        stuck = guard.kill({rank.pid for rank in self.all}, self.id)
        for rank in self.all:
            if rank.pid not in stuck:
                rank.poll()
                rank.reap()
        return stuck

    def close(self) -> None:
        """Tell the guard that the launcher has ended the run, and wait until the guard has ended."""
        self._tell_guard(guard.DONE)
        assert self._guard.stdin is not None
        with contextlib.suppress(OSError):
            self._guard.stdin.close()
        self._guard.wait()
