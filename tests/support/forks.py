"""For programs that fork: a check that every call in a child is refused, and a join with a deadline."""

from __future__ import annotations

import os
import signal
import sys
import time


def refused(calls) -> int:
    """Return the exit code of a child: 0 if each call raises at once an error that names the fork."""
    code = 0
    for number, call in enumerate(calls):
        begun = time.monotonic()
        try:
            call()
        except Exception as error:
            fault = "" if "fork" in str(error) else repr(error)
        else:
            fault = "was accepted"
        seconds = time.monotonic() - begun
        if not fault and seconds > 4:  # a call that waits would take longer
            fault = f"took {seconds:.1f} s"
        if fault:
            print(f"call {number}: {fault}", file=sys.stderr)
            code = 1
    return code


def join(pid: int, seconds: float = 20.0) -> None:
    """Wait for a child, and check that its exit code is 0; kill it at the deadline."""
    deadline = time.monotonic() + seconds
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise AssertionError(f"the child was not done after {seconds} s")
        time.sleep(0.001)
    code = os.waitstatus_to_exitcode(ended[1])
    assert code == 0, f"the child ended with exit code {code}"
