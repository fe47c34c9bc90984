"""A process that stands still for a while, as one that is stopped or swapped out does, and goes on by itself."""

from __future__ import annotations

import os
import signal
import subprocess

#: Longer than what a process may stand still before it asks the store whether it has missed an end (engine/work.pyx).
_SECONDS = 0.6


def stand_still() -> None:
    """Stop this process, all its threads, and have another one send it on."""
    pid = os.getpid()
    script = f"until grep -q '^State:.T' /proc/{pid}/status; do sleep 0.01; done; sleep {_SECONDS}; kill -CONT {pid}"
    with subprocess.Popen(["timeout", "20", "sh", "-c", script]) as other:
        os.kill(pid, signal.SIGSTOP)
        other.wait(20)
