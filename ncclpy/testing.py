"""Helpers for tests of programs that communicate: ranks as threads or processes, under one deadline.

Import `ncclpy.testing` by its name; `import ncclpy` does not import it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.reduction
import os
import pickle
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import ncclpy
from ncclpy.core.runtime import wait
from ncclpy.errors import note, seconds

__all__ = ["run_ranks"]

#: Errors that usually follow from another rank's failure; they are reported last.
_CONSEQUENCES = (ncclpy.NcclTimeout, ncclpy.NcclRemoteError, ncclpy.NcclAborted)
#: Seconds for the other ranks to end once one has failed.
_GRACE = 5.0
#: The share of the deadline that one wait of a rank's communicator may take. It is less than 1 so that the error of
#: such a wait, which names ranks, is raised before the deadline passes.
_SHARE = 0.75
#: Seconds of one wait for a rank's report, after which Python handles signals.
_SLICE = 0.5


class _Report(NamedTuple):
    """The result or the error of one rank."""

    rank: int
    value: Any = None
    error: BaseException | None = None


class _Job(NamedTuple):
    """What each rank does."""

    nranks: int
    unique_id: bytes
    begin: float
    timeout: float
    config: ncclpy.Config | None
    body: Callable[..., Any]
    args: tuple[Any, ...]

    def run(self, rank: int, keep: Callable[[ncclpy.Communicator], None]) -> Any:
        """Call the body of one rank with a communicator, which is also passed to `keep`."""
        unique_id = ncclpy.UniqueId.from_bytes(self.unique_id)
        # All processes count from `begin`; a rank that starts late still has a tenth of its share.
        share = self.timeout * _SHARE
        share = max(self.begin + share - time.monotonic(), share / 10)
        with ncclpy.Communicator.init(
            self.nranks, rank, unique_id, device=rank, config=self.config, timeout=share
        ) as comm:
            keep(comm)
            value = self.body(comm, *self.args)
            try:
                comm.close()
            except (ncclpy.NcclRemoteError, ncclpy.NcclAborted):
                comm.abort()  # the body has handled a failure after which the communicator cannot be closed
            return value


def run_ranks(
    nranks: int,
    body: Callable[..., Any],
    *args: Any,
    processes: bool = False,
    timeout: float = 60.0,
    config: ncclpy.Config | None = None,
    env: Mapping[str, str] | None = None,
    killed: Collection[int] = (),
) -> list[Any]:
    """Call a function once for each rank, all at the same time, and return what each has returned.

    Each rank gets a communicator of its own, on the device with its number. When one rank fails, the communicators of
    the others are aborted, so that none waits any longer; the errors of the others are collected too.

    Parameters
    ----------
    nranks : int
        The number of ranks; as many devices are needed.
    body : callable
        Called as ``body(comm, *args)``; ``comm.rank`` is the rank. For processes it must be a function of a module,
        since each process imports it.
    *args
        Passed to `body`, the same for all ranks. For processes they are pickled, as are the results.
    processes : bool, optional
        Whether each rank is a process of its own (started with spawn) instead of a thread.
    timeout : float, optional
        Seconds until all ranks must be done. A single wait of a communicator may take up to three quarters of it.
    config : Config, optional
        The configuration of the communicators.
    env : mapping, optional
        Environment variables of the processes, such as ``{"NCCLPY_FAULTS": "rank=1 call=AllReduce do=kill"}``.
    killed : collection of int, optional
        Ranks that must die before `body` returns, for example by `env`; only for processes. Their result is None.

    Returns
    -------
    list
        What the ranks returned, in the order of the ranks.

    Raises
    ------
    BaseException
        The first error that is no consequence of another rank's failure. Consequences are timeouts, errors about
        another rank, aborts, and any `NcclError` that arrives after the first failure. If there are only consequences,
        the first of them is raised, an abort only if there is nothing else. The errors of the other ranks are its
        notes.
    TimeoutError
        If ranks are not done in time, or within 5 s after the first failure, and all errors are consequences. The
        message says where each of these ranks is. Threads cannot be ended and are left behind; processes are killed.
    RuntimeError
        If the process of a rank outside `killed` dies, or if a rank in `killed` returns.
    ValueError
        If there are fewer devices than ranks, if `killed` has a number that is no rank, or if `env` or `killed` is
        given for threads.
    TypeError
        If `body`, `args` or `config` cannot be pickled for processes.
    """
    if (env or killed) and not processes:
        raise ValueError("env and killed are for processes of their own: pass processes=True")
    have = ncclpy.device_count()
    if not 0 < nranks <= have:
        hint = f"; NCCLPY_HOST_DEVICES={nranks} shows more" if ncclpy.library().engine == "host" else ""
        raise ValueError(f"nranks is {nranks}, and there are {have} devices, one for each rank{hint}")
    beyond = [rank for rank in killed if not 0 <= rank < nranks]
    if beyond:
        raise ValueError(f"killed names rank {beyond[0]}, and the ranks are 0 to {nranks - 1}")
    job = _Job(nranks, bytes(ncclpy.get_unique_id()), time.monotonic(), timeout, config, body, args)
    ranks: _Threads | _Processes = _Processes(job, env or {}, killed) if processes else _Threads(job)
    try:
        ranks.start()
        return _watch(ranks, nranks, timeout)
    except BaseException:
        ranks.stop()  # after Ctrl-C too
        raise
    finally:
        ranks.end()


def _watch(ranks: _Threads | _Processes, nranks: int, timeout: float) -> list[Any]:
    """Collect the reports of all ranks; return the results or raise."""
    deadline = time.monotonic() + timeout
    reports: dict[int, _Report] = {}
    stuck: list[int] = []
    late: set[int] = set()
    when = ""  # set once the ranks are told to stop: the time at which stuck ranks were not done, for the error
    while len(reports) < nranks:
        report = ranks.next(max(0.0, deadline - time.monotonic()))
        if report is not None:
            reports[report.rank] = report
            if when:
                late.add(report.rank)
        if not when and (report is None or report.error is not None):
            # The first failure, or the deadline: the other ranks get a little time to end.
            if report is None:
                stuck, when = [rank for rank in range(nranks) if rank not in reports], f"in {seconds(timeout)}"
            else:
                when = f"{seconds(_GRACE)} after rank {report.rank} had failed"
            ranks.stop()
            deadline = time.monotonic() + _GRACE
        elif report is None:
            stuck = stuck or [rank for rank in range(nranks) if rank not in reports]
            break
    if not when:
        return [reports[rank].value for rank in range(nranks)]
    # `ordered` has the errors in the order of arrival, but consequences of other errors last.
    errors = [(report.rank, report.error) for report in reports.values() if report.error is not None]
    # Any NcclError that arrives after the ranks were stopped counts as a consequence: the stop may have caused it, for
    # example on a rank that joined too late.
    consequent = {
        rank for rank, error in errors if isinstance(error, ncclpy.NcclError if rank in late else _CONSEQUENCES)
    }
    ordered = [(f"rank {rank}", error) for rank, error in errors if rank not in consequent]
    if stuck:
        names = f"rank{'s' if len(stuck) > 1 else ''} {', '.join(map(str, stuck))}"
        stacks = "".join(f"\nrank {rank} is at:\n{ranks.where(rank)}" for rank in stuck)
        ordered.append(("besides", TimeoutError(f"{names} not done {when}{stacks}")))
    consequences = [(f"rank {rank}", error) for rank, error in errors if rank in consequent]
    ordered += sorted(consequences, key=lambda one: isinstance(one[1], ncclpy.NcclAborted))
    (source, first), others = ordered[0], ordered[1:]
    if source != "besides":
        note(first, f"raised by {source}")
    for other, error in others:
        note(first, f"{other}: {type(error).__name__}: {error}")
    raise first


def _stack_of(thread: int | None) -> str:
    """Return the stack of a thread, without the frames of this module."""
    frame = wait.frame_of_thread(thread or 0)
    stack = traceback.extract_stack(frame) if frame else traceback.StackSummary()
    own_frames = [number for number, entry in enumerate(stack) if entry.filename == __file__]
    below = stack[own_frames[-1] + 1 :] if own_frames else []
    return "".join(traceback.format_list(below or stack))


class _Threads:
    """Ranks as threads of this process."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        self._reports: queue.SimpleQueue[_Report] = queue.SimpleQueue()
        self._comms: dict[int, ncclpy.Communicator] = {}
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._run, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(job.nranks)
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def _run(self, rank: int) -> None:
        def keep(comm: ncclpy.Communicator) -> None:
            self._comms[rank] = comm
            if self._stopping:
                comm.abort()

        try:
            self._reports.put(_Report(rank, value=self._job.run(rank, keep)))
        except BaseException as error:
            self._reports.put(_Report(rank, error=error))

    def next(self, timeout: float) -> _Report | None:
        """Return the next report; None if none arrives in time."""
        deadline = time.monotonic() + timeout
        while True:  # in slices: a signal that the system delivers to another thread does not end this thread's wait
            left = deadline - time.monotonic()
            with contextlib.suppress(queue.Empty):
                return self._reports.get(timeout=max(0.0, min(_SLICE, left)))
            if left <= 0:
                return None

    def stop(self) -> None:
        """Abort the communicators; the thread of a rank aborts a communicator that is made later."""
        self._stopping = True
        with ncclpy.group():
            for comm in list(self._comms.values()):
                comm.abort()

    def where(self, rank: int) -> str:
        """Return the stack of a rank's thread."""
        return _stack_of(self._threads[rank].ident)

    def end(self) -> None:
        """Leave behind what still runs: a thread cannot be ended from outside."""


class _Processes:
    """Ranks as processes of their own."""

    def __init__(self, job: _Job, env: Mapping[str, str], killed: Collection[int]) -> None:
        self._killed = killed
        self._stacks: dict[int, str] = {}
        self._pipes: dict[Any, int] = {}
        self._processes: list[Any] = []
        self._nranks = job.nranks
        library = ncclpy.library()
        # Each rank's process loads the library that this process uses. It sets the variables before it unpickles the
        # job, which imports the module of `body`.
        self._env = {"NCCLPY_LIBRARY": "host" if library.engine == "host" else library.path, **env}
        try:
            self._payload = bytes(multiprocessing.reduction.ForkingPickler.dumps(job))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(
                f"body, args and config go to processes of their own, and cannot be pickled: {error}"
            ) from error

    def start(self) -> None:
        """Start the processes."""
        context = multiprocessing.get_context("spawn")
        for rank in range(self._nranks):
            parent_end, child_end = context.Pipe()
            arguments = (rank, child_end, self._env, self._payload)
            process = context.Process(target=_process, args=arguments, name=f"rank {rank}")
            self._pipes[parent_end] = rank
            self._processes.append(process)
            process.start()
            child_end.close()

    def next(self, timeout: float) -> _Report | None:
        """Return the next report; None if none arrives in time."""
        deadline = time.monotonic() + timeout
        while True:
            ready: list[Any] = multiprocessing.connection.wait(
                list(self._pipes), max(0.0, deadline - time.monotonic())
            )
            if not ready:
                return None
            pipe = ready[0]
            rank = self._pipes[pipe]
            try:
                kind, content, text = pipe.recv()
            except (EOFError, OSError):
                self._forget(pipe)
                return self._ended(rank)
            if kind == "stack":
                self._stacks[rank] = content
                continue
            self._forget(pipe)
            if kind == "value" and rank in self._killed:
                return _Report(rank, error=RuntimeError(f"rank {rank} was to be killed, and has returned {content!r}"))
            if kind == "value":
                return _Report(rank, value=content)
            return _Report(rank, error=_rebuilt(rank, content, text))

    def _forget(self, pipe: Any) -> None:
        del self._pipes[pipe]
        pipe.close()

    def _ended(self, rank: int) -> _Report:
        """Return the report for a process that ended without sending one."""
        process = self._processes[rank]
        process.join()
        if rank in self._killed:
            return _Report(rank)
        how = f"ended with exit code {process.exitcode} before it had returned"
        if process.exitcode < 0:
            how = f"was killed by {signal.Signals(-process.exitcode).name}"
        return _Report(rank, error=RuntimeError(f"the process of rank {rank} {how}"))

    def stop(self) -> None:
        """Ask all ranks to abort their communicators."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # the rank's process has ended
                pipe.send("stop")

    def where(self, rank: int) -> str:
        """Return the stack that a rank's process sent when it was asked to stop, or say that it does not answer."""
        return self._stacks.get(rank, f"  process {self._processes[rank].pid}, which does not answer\n")

    def end(self) -> None:
        """Kill the processes; if all ranks have reported, first give the processes time to exit."""
        deadline = time.monotonic() + _GRACE
        for process in self._processes:
            if process.pid is None:
                continue  # it was never started
            if not self._pipes:  # all ranks have reported
                process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()


def _process(rank: int, pipe: Any, env: dict[str, str], payload: bytes) -> None:
    """Run a rank in its own process, from start to exit."""
    os.environ.update(env)
    main = threading.get_ident()
    lock, stopping = threading.Lock(), threading.Event()
    comms: list[ncclpy.Communicator] = []

    def tell(kind: str, content: Any, text: str = "") -> None:
        message = multiprocessing.reduction.ForkingPickler.dumps((kind, content, text))  # may raise: no lock yet
        with lock:
            pipe.send_bytes(message)

    def keep(comm: ncclpy.Communicator) -> None:
        comms.append(comm)
        if stopping.is_set():
            comm.abort()

    def listen() -> None:
        with contextlib.suppress(EOFError, OSError):
            pipe.recv()
            tell("stack", _stack_of(main))
            stopping.set()
            for comm in comms:
                comm.abort()
            pipe.recv()  # raises EOFError when the parent has ended
        os._exit(1)

    threading.Thread(target=listen, daemon=True).start()
    try:
        tell("value", pickle.loads(payload).run(rank, keep))
    except BaseException as error:
        text = traceback.format_exc()
        try:
            pickle.loads(pickle.dumps(error))
            tell("error", error, text)
        except Exception:  # `error` cannot be pickled or unpickled
            tell("error", None, text)


def _rebuilt(rank: int, error: BaseException | None, text: str) -> BaseException:
    """Return the error of a process, with its traceback there as the cause.

    `error` is None for an exception that cannot be pickled: a `RuntimeError` stands for it.
    """
    if error is None:
        last = text.strip().rpartition("\n")[2]
        error = RuntimeError(f"rank {rank} raised what cannot be pickled: {last}")
    error.__cause__ = _Traceback(f"\n\nIn the process of rank {rank}:\n{text}")
    return error


class _Traceback(Exception):
    """The traceback of another process, as text."""
