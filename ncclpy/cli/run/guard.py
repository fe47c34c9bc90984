"""Find and kill the processes that a run has left. As a program of its own, the guard outlives a killed launcher.

The launcher starts the guard with a pipe as standard input and writes the process id of each rank to this pipe. If the
pipe ends without the line `DONE`, the launcher is dead, and the guard kills the processes that the launcher has left.
This file imports nothing of ncclpy, so that the guard starts quickly.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Collection

#: The line that a launcher writes last, when it has left no process behind.
DONE = b"done\n"
#: Seconds to wait for killed processes to end. A process that hangs in the kernel does not end.
_PATIENCE = 5.0


def left(sessions: Collection[int], mark: str) -> list[int]:
    """Return the processes that belong to the sessions, or have the mark in their initial environment.

    The mark finds a process that has left its rank's session, as daemons do. The session finds a process that has
    overwritten its environment with its title.
    """
    found = []
    wanted = os.fsencode(mark)
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                # After the name, which may contain any bytes: state, parent, group, session.
                state, _, _, session = file.read().rpartition(b") ")[2].split()[:4]
            if state in (b"Z", b"X"):
                continue
            if int(session) not in sessions:
                with open(f"/proc/{name}/environ", "rb") as file:
                    if wanted not in file.read():
                        continue
        except (OSError, ValueError):
            continue  # the process has ended, or belongs to another user
        found.append(int(name))
    return found


def kill(sessions: Collection[int], mark: str, rounds: int = 1) -> list[int]:
    """Kill what `left` finds, until it has found nothing `rounds` times in a row; return what is left after 5 s."""
    deadline = time.monotonic() + _PATIENCE
    quiet = 0
    while True:
        found = left(sessions, mark)
        quiet = 0 if found else quiet + 1
        if quiet >= rounds or time.monotonic() > deadline:
            return found
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def main() -> None:
    """Wait until the launcher has ended; if it has not written `DONE`, kill the processes that it has left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # the signal may have killed the launcher: then the guard has to act
    mark = sys.argv[1]
    sessions = set()
    for line in sys.stdin.buffer:
        if line == DONE:
            return
        if line.endswith(b"\n"):
            sessions.add(int(line))
    # Several rounds: a rank may be between fork and exec, with the launcher's environment.
    kill(sessions, mark, rounds=10)


if __name__ == "__main__":
    main()
