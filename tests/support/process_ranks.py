"""Ranks as processes that call functions of modules: their start, pipes, deadline, tracebacks and end."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import sys
import time
import traceback
from multiprocessing import forkserver
from typing import Any

from paths import with_support

import ncclpy

_pipe: Any = None


class RankProcesses:
    """Processes that make calls on request; they are started by the first request, and killed after a failure.

    Each has the environment and the cores that this process has at its start.

    Parameters
    ----------
    begin, arguments
        ``begin(number, *arguments)`` returns the function that a process calls for each request.
    reused
        Whether a process serves several requests; otherwise it ends after its first.
    context
        The multiprocessing context, by default that of `process_context`.
    name
        What a process is called in errors, before its number.
    """

    def __init__(self, begin, *arguments, reused=True, context=None, name="rank"):
        self._context = context or process_context()
        self._begin, self._reused, self._name = (begin, arguments), reused, name
        self._processes: list = []
        self._pipes: list = []

    @property
    def started(self) -> bool:
        """Whether there are processes."""
        return bool(self._processes)

    def run(self, requests, deadline: float, ends=()) -> list:
        """Have process n call its function with the arguments ``requests[n]``; return the results in their order.

        A failure is an `AssertionError` with the traceback of each process that has failed. The result is None for the
        processes in `ends` that end instead of returning; all are killed then.
        """
        end = time.monotonic() + deadline
        with contextlib.ExitStack() as failed:
            failed.callback(self.close)
            while len(self._processes) < len(requests):
                self._start(len(self._processes))
            for pipe, request in zip(self._pipes, requests, strict=False):
                with contextlib.suppress(BrokenPipeError):  # it has ended, which recv() reports
                    pipe.send(request)
            results, errors = self._collect(len(requests), end, ends)
            if late := [f"{self._name} {n}" for n in range(len(requests)) if n not in results | errors]:
                when = "2 s later" if errors else f"after {deadline} s"
                errors[len(requests)] = f"{', '.join(late)} not done {when}; their processes were killed"
            if errors:
                raise AssertionError("\n".join(errors.values()))
            if not ends:
                failed.pop_all()
        return [results[number] for number in range(len(requests))]

    def _collect(self, count, end, ends):
        """Receive until all have answered or a deadline; return results and errors by number."""
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        while waiting := [number for number in range(count) if number not in results and number not in errors]:
            pipes = [self._pipes[number] for number in waiting]
            ready = multiprocessing.connection.wait(pipes, max(0.0, end - time.monotonic()))
            if not ready:
                break
            for number, pipe in zip(waiting, pipes, strict=True):
                if pipe not in ready:
                    continue
                try:
                    kind, word = pipe.recv()
                except (EOFError, ConnectionResetError):
                    if number in ends:
                        results[number] = None
                        continue
                    self._processes[number].join(5)
                    errors[number] = f"{self._name} {number} died with exit code {self._processes[number].exitcode}"
                else:
                    if kind == "share":
                        for other in self._pipes[:count]:
                            with contextlib.suppress(BrokenPipeError):  # it has ended, which recv() reports
                                other.send(word)
                    elif kind == "failed":
                        errors[number] = f"{self._name} {number} failed in its process:\n{word}"
                    else:
                        results[number] = word
            if errors:
                # The others then fail too, and may report first: all errors are collected.
                end = min(end, time.monotonic() + 2)
        return results, errors

    def _start(self, number):
        ours, theirs = self._context.Pipe()
        arguments = (dict(os.environ), os.sched_getaffinity(0), theirs, number, self._reused, *self._begin)
        process = self._context.Process(target=_serve, args=arguments, name=f"{self._name} {number}", daemon=True)
        process.start()
        theirs.close()
        self._processes.append(process)
        self._pipes.append(ours)

    def close(self, patience: float = 0.0) -> None:
        """End the processes; kill those that have not exited after `patience` seconds."""
        if patience:
            for pipe in self._pipes:
                pipe.close()
        end = time.monotonic() + patience
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))
            process.kill()
            process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []


def process_context():
    """Return the multiprocessing context for the processes of tests.

    They are forks of a server that has imported numpy, pytest and `testing`, and made no other calls: the imports
    would take each process a third of a second of processor time. The server keeps its first environment and cores.
    """
    # Without PYTHONSAFEPATH the server would import sources of the current folder. LD_PRELOAD needs new processes.
    if ncclpy.library().engine == "cuda" or sys.version_info < (3, 11) or "LD_PRELOAD" in os.environ:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["numpy", "pytest", "testing"])
    began = {"PYTHONPATH": with_support(), "PYTHONSAFEPATH": "1"}
    before = {name: os.environ.get(name) for name in began}
    os.environ.update(began)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return context


# The functions from here on run in the processes.


def _serve(environment, cores, pipe, number, reused, begin, arguments):
    """Receive requests, and send back the result or the traceback of each."""
    global _pipe
    _pipe, call = pipe, None
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)
    os.sched_setaffinity(0, cores)  # before the engine reads the set of cores
    while True:
        try:
            request = pipe.recv()
        except (EOFError, ConnectionResetError):  # the tests have ended
            return
        try:
            call = call or begin(number, *arguments)
            pipe.send(("done", call(*request)))
        except BaseException:
            pipe.send(("failed", traceback.format_exc()))
            if not reused:
                os._exit(1)  # no clean-up, as the other ranks may never come
        if not reused:
            return


def share(word):
    """Return the value of the one process that passes one instead of None, in all processes of a request."""
    if word is not None:
        _pipe.send(("share", word))
    return _pipe.recv()
