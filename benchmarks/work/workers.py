"""The parent side: fresh processes that hold the rivals, and requests to one of them or to all at once."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time

from benchmarks import ROOT

#: Seconds for one request, and for the first ones, which import frameworks, perhaps from a cold disk.
DEADLINE = 60
FIRST_DEADLINE = 240

# The root is on the path only while `benchmarks` is imported: `ncclpy` must be the installed package.
START = f"""
import importlib, sys
sys.path.insert(0, {str(ROOT)!r})
module = importlib.import_module(sys.argv[1])
sys.path.remove({str(ROOT)!r})
module.main()
"""


class WorkerFailed(RuntimeError):
    """A worker raised, died or did not answer; the message has the end of its output."""


class WorkerLost(WorkerFailed):
    """A worker died or hangs: no more requests can go to it, or to workers that communicate with it."""


class WorkerProcess:
    """One child process, which runs the ``main()`` of `module`; `ask` calls one of its methods.

    `variables` extend its environment."""

    def __init__(self, module: str = "benchmarks.work.worker", variables: dict[str, str] | None = None):
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=tempfile.gettempdir(),
            env=os.environ | (variables or {}),
        )

    def ask(self, do: str, *, deadline: float = DEADLINE, **parameters: object):
        """Send one request and return its answer within `deadline` seconds."""
        return ask_all([(self, parameters)], do, deadline=deadline)[0]

    def send(self, do: str, parameters: dict) -> None:
        """Write one request."""
        try:
            self._process.stdin.write(json.dumps({"do": do, **parameters}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerLost(f"a worker died before {do!r}:\n{self._last_words()}") from None

    def receive(self, do: str, until: float):
        """Read one answer; `until` is on `time.monotonic`'s clock."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            # Each request has one answer of one line, so Python's buffer is empty when the next is read.
            if not selector.select(max(0.0, until - time.monotonic())):
                raise WorkerLost(f"a worker did not answer {do!r} in time:\n{self._last_words()}")
        line = self._process.stdout.readline()
        if not line:
            raise WorkerLost(f"a worker died in {do!r}:\n{self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerFailed(f"{do!r} failed in a worker:\n{answer['error']}")
        return answer["value"]

    def close(self) -> None:
        """End the child: by closing its pipe, then by killing it."""
        try:
            self._process.stdin.close()
            self._process.wait(5)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def kill(self) -> None:
        """End the child at once, also one that is stopped."""
        self._process.kill()

    def _last_words(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-3000:]


def ask_all(requests: list[tuple[WorkerProcess, dict]], do: str, *, deadline: float = DEADLINE) -> list:
    """Send the request to all workers at once, for what is collective; return the answers in order."""
    until = time.monotonic() + deadline
    for worker, parameters in requests:
        worker.send(do, parameters)
    answers, failures = [], []
    for worker, _ in requests:
        try:
            answers.append(worker.receive(do, until))
        except WorkerFailed as failure:
            failures.append(failure)
    if any(isinstance(failure, WorkerLost) for failure in failures):
        # One rank's exception makes the others hang: both belong in the message.
        raise WorkerLost("\n".join(map(str, failures)))
    if failures:
        raise failures[0]
    return answers
