"""Workers as processes of their own, one for each device."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from multiprocessing.connection import Connection, wait
from typing import Any

from ncclpy.cli.perf.arguments import Arguments
from ncclpy.cli.perf.ranks import GRACE, SLICE, RankRunner
from ncclpy.cli.perf.worker import Worker


class _Link:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def exchange(self, value: Any) -> list[Any]:
        self._connection.send(("exchange", value))
        values: list[Any] = self._connection.recv()
        return values

    def report(self, what: str, value: Any) -> None:
        self._connection.send((what, value))


def _child(arguments: Arguments, index: int, library: str, connection: Connection, control: Connection) -> None:
    """Run one worker in a thread; wait until it has ended, or until `control` is closed.

    The parent closes `control` to abort the run; it is also closed when the parent ends.
    """
    import ncclpy

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends this process
    ncclpy.use(library)
    worker = Worker(arguments, index, 1, _Link(connection))

    def run() -> None:
        try:
            worker.run()
            message: tuple[str, Any] = ("done", None)
        except BaseException:
            message = ("error", traceback.format_exc())
        try:
            connection.send(message)
        except OSError:
            pass  # the parent has ended

    thread = threading.Thread(target=run, name=f"ncclpy-perf-{index}", daemon=True)
    thread.start()
    while thread.is_alive():
        # The poll is short, since the loop has to notice the end of the thread too.
        if control.poll(0.05):
            threading.Thread(target=worker.abort, daemon=True).start()
            thread.join(GRACE / 2)
            os._exit(1)  # without an orderly end, which after an abort is not worth waiting for


class Processes(RankRunner):
    """One process for each device, with the library that this process has loaded.

    They are spawned, not forked: NCCL does not survive a fork.
    """

    def __init__(self, arguments: Arguments, library: str) -> None:
        super().__init__(arguments.nranks, arguments.timeout)
        context = multiprocessing.get_context("spawn")
        self._connections: list[Connection] = []
        self._controls: list[Connection] = []
        self._processes = []
        self._child_ends: list[Connection] = []
        self._open: dict[Connection, int] = {}
        for index in range(self.size):
            connection, child_connection = context.Pipe()
            child_control, control = context.Pipe(duplex=False)
            self._connections.append(connection)
            self._controls.append(control)
            self._child_ends += [child_connection, child_control]
            self._processes.append(
                context.Process(
                    target=_child,
                    args=(arguments, index, library, child_connection, child_control),
                    name=f"ncclpy-perf-{index}",
                    daemon=True,
                )
            )

    def start(self) -> None:
        """Start all processes."""
        for process in self._processes:
            process.start()
        for connection in self._child_ends:
            connection.close()  # then only the child holds this end of the pipe, which closes when the child ends
        self._open = {connection: index for index, connection in enumerate(self._connections)}

    def receive(self, timeout: float) -> tuple[int, str, Any] | None:
        """Return the next message, or ``None`` after `timeout` seconds.

        If a process closes its pipe without "done" or "error", for example because it was killed, the message is an
        error that says so.
        """
        deadline = time.monotonic() + timeout
        while self._open:
            left = max(0.0, deadline - time.monotonic())
            ready = wait(list(self._open), min(left, SLICE))
            if not ready and left <= SLICE:
                return None
            if not ready:
                continue
            connection = next(one for one in self._open if one in ready)
            index = self._open[connection]
            try:
                what, value = connection.recv()
            except (EOFError, ConnectionResetError):
                del self._open[connection]
                process = self._processes[index]
                process.join(GRACE)
                return index, "error", f"its process {process.pid} {_ending(process.exitcode)}"
            if what in ("done", "error"):
                del self._open[connection]
            return index, what, value
        time.sleep(max(0.0, deadline - time.monotonic()))
        return None

    def answer(self, worker: int, value: Any) -> None:
        """Answer an exchange."""
        try:
            self._connections[worker].send(value)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the process has ended: receive() reports that

    def abort(self) -> None:
        """Tell all processes to abort and end."""
        for control in self._controls:
            control.close()

    def join(self, timeout: float) -> None:
        """Wait for the processes and kill those that do not end."""
        deadline = time.monotonic() + timeout
        for process in self._processes:
            if process.pid is None:
                continue
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()


def _ending(exitcode: int | None) -> str:
    if exitcode is None:
        return "has closed its pipe but has not ended"
    if exitcode < 0:
        return f"ended with signal {signal.Signals(-exitcode).name}"
    return f"ended with exit status {exitcode}"
