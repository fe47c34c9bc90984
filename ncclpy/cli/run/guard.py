"""Find and kill what is left of a run; as a separate program, it outlives a launcher that is killed.

The launcher starts it with a pipe as its standard input and writes the process id of each rank to it. When the pipe
ends without the line `DONE`, the launcher is dead, and the guard kills what it has left behind. It imports nothing
of ncclpy, so that it starts at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Collection

#: The last line of a launcher that has left nothing behind.
DONE = b"done\n"
#: Seconds to wait for killed processes to end; one that hangs in the kernel cannot.
_PATIENCE = 5.0


def left(sessions: Collection[int], mark: str) -> list[int]:
    """Return the processes that belong to the sessions, or have the mark in their initial environment.

    A process that leaves its rank's session, as daemons do, is found by the mark; one that has overwritten its
    environment with its title, by the session.
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
            continue  # it has ended, or is another user's
        found.append(int(name))
    return found


def kill(sessions: Collection[int], mark: str, rounds: int = 1) -> list[int]:
    """Kill what is left until nothing was found for `rounds` rounds; return what could not be killed."""
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
    """Wait for the launcher's end, and kill what it has left unless it has written `DONE`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # meant for the launcher, which may need this process then
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
