"""The one thread of a coordinator that calls MPI: it relays the control plane's frames, and runs operations on data.

The control plane (`ncclpy.coordinator.control`) talks to each neighbour through a stream socket. Over MPI this socket
is one end of a socket pair. At the other end this thread reads what the control plane writes, and sends it in messages
of MPI to the neighbour. There the same thread writes it to the neighbour's control plane, by a socket pair too. An
empty message says that the sender's control plane has closed its socket.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ncclpy.coordinator.control import await_readable, be_punctual
from ncclpy.errors import NcclAborted, NcclError, NcclTimeout, seconds
from ncclpy.interop.mpi.types import MPI
from ncclpy.types import Result

__all__ = ["MpiCall", "MpiThread", "is_running"]

#: The tags of messages that relay frames, and of agreements on new communicators. They must differ: contrary to the
#: standard, Open MPI uses ordinary messages for these agreements, and would take frames for its own messages.
_FRAME_TAG, _AGREEMENT_TAG = 1, 2
#: The most bytes of a frame in one message.
_MAX_MESSAGE_BYTES = 64 << 10
#: MPI has nothing to sleep on, so the thread polls. The pause between two polls is this fraction of the time since the
#: last progress, within these bounds in seconds; a wait ends late by that fraction. The upper bound determines the
#: cost of an idle rank: with cold caches a poll takes up to 150 us, which is 0.06% of a core.
_PAUSE_FRACTION, _SHORTEST_PAUSE, _LONGEST_PAUSE = 0.01, 50e-6, 0.25
#: Seconds without sleep after a step that made progress: usually an answer follows soon, and MPI transfers data only
#: while it is called. With sleeps an operation takes a third longer, from the last rank's call to its end.
_SPIN = 200e-6
#: Seconds that an end waits for the neighbours' end messages, and that an exit waits until messages are sent.
_END_TIMEOUT, _EXIT_TIMEOUT = 10.0, 2.0


class MpiCall:
    """One operation on data.

    Parameters
    ----------
    queue
        The started operations of its process set: they end in the order in which they were launched, as on a stream.
    what
        Its name, for errors.
    brought
        The arrays of this rank (`TensorEntry`); their works end with this operation.
    start
        Starts the operation and returns its MPI requests; called by the thread.
    finish
        Stores the results; called once the requests are complete, unless the works have failed before.
    failed
        Ends the works with an error; MPI may still execute the operation.
    done
        Called once MPI has completed the operation, or if the works have failed before the operation was started.
    limit
        Seconds for the operation.
    """

    def __init__(
        self,
        queue: deque[MpiCall],
        what: str,
        brought: Sequence[Any],
        start: Callable[[], list[Any]],
        finish: Callable[[], None],
        failed: Callable[[MpiCall, BaseException], None],
        done: Callable[[MpiCall], None],
        limit: float,
    ) -> None:
        self.queue, self.what, self.brought = queue, what, brought
        self.start, self.finish, self.failed, self.done = start, finish, failed, done
        self.limit, self.deadline = limit, 0.0
        self.requests: list[Any] = []
        self.is_dead = False  # its works have failed; MPI may still touch its memory


class _NeighbourConnection:
    """The connection to one neighbour on the control plane."""

    def __init__(self, rank: int, end: socket.socket) -> None:
        self.rank, self.end = rank, end
        self.arriving: deque[tuple[Any, bytearray]] = deque()
        self.unwritten = bytearray()
        self.end_sent = self.end_received = False  # whether this rank, and the neighbour, has sent its end message


class _CommCreation:
    """The creation of a communicator of some ranks; this rank may not be among them."""

    def __init__(self, members: Sequence[int] | None, made: Callable[[Any, BaseException | None], None]) -> None:
        self.members, self.made = members, made
        self.barrier: Any = None


class MpiThread:
    """The thread that calls MPI, and its tasks.

    Parameters
    ----------
    comm
        A communicator for this thread alone.
    ends
        For each neighbour on the control plane, the end of a socket pair; this rank's control plane has the other end.
    """

    def __init__(self, comm: Any, ends: dict[int, socket.socket]) -> None:
        self.comm = comm
        self._connections = {rank: _NeighbourConnection(rank, end) for rank, end in ends.items()}
        for connection in self._connections.values():
            connection.end.setblocking(False)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._tasks: deque[MpiCall | _CommCreation] = deque()
        self._sends: list[tuple[Any, bytes]] = []
        self._active: list[deque[MpiCall]] = []  # queues with started operations
        self._creations: deque[_CommCreation] = deque()
        self._status = MPI.Status()
        self._ending = self._exiting = self._has_stopped = False
        self._lock = threading.Lock()  # guards `_wake_fd`: nothing may write to it once it is closed
        self._end_deadline = 0.0
        self._is_orderly = False
        self._comms: list[Any] = [comm]
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="ncclpy-mpi", daemon=True)
        _running.add(self)
        self._thread.start()

    # Called by other threads.

    def launch(self, launch: MpiCall) -> None:
        """Have the thread start an operation, after those before it."""
        self._add_task(launch)

    def make(self, members: Sequence[int] | None, made: Callable[[Any, BaseException | None], None]) -> None:
        """Have the thread make a communicator of some ranks. All ranks call this in the same order.

        Ranks that are not members pass None. ``made(comm, error)`` is called on members with the new communicator, and
        on any rank with an error if the thread ends before.
        """
        self._add_task(_CommCreation(members, made))

    def free_at_end(self, comm: Any) -> None:
        """Have the thread free a communicator at an orderly end."""
        self._comms.append(comm)

    def end(self, orderly: bool) -> bool:
        """Wait for the end messages of the neighbours and the end of the thread; return whether it has ended.

        Communicators are freed only after an orderly end: `MPI_Comm_free` is collective.
        """
        self._is_orderly = orderly
        self._end_deadline = time.monotonic() + _END_TIMEOUT
        self._ending = True
        self._wake_thread()
        self._thread.join(_END_TIMEOUT + _EXIT_TIMEOUT)
        return not self._thread.is_alive()

    def leave_at_exit(self) -> None:
        """Have the thread leave MPI, which is finalised next."""
        self._end_deadline = time.monotonic() + _EXIT_TIMEOUT
        self._exiting = self._ending = True
        self._wake_thread()
        self._thread.join(2 * _EXIT_TIMEOUT)

    def _add_task(self, task: MpiCall | _CommCreation) -> None:
        self._tasks.append(task)
        if not self._wake_thread():
            self._refuse()

    def _wake_thread(self) -> bool:
        """Wake the thread; return whether it runs."""
        with self._lock:
            if not self._has_stopped:
                os.eventfd_write(self._wake_fd, 1)
            return not self._has_stopped

    # The thread.

    def _run(self) -> None:
        be_punctual()
        try:
            self._loop()
        except BaseException as error:  # an error of MPI, as its error handler returns: the thread cannot continue
            self.error = error
        for connection in self._connections.values():  # this tells the control plane that the neighbours are gone
            connection.end.close()
        _kept_for_mpi.extend(self._sends)
        _running.discard(self)
        with self._lock:
            self._has_stopped = True
            os.close(self._wake_fd)
        self._refuse()

    def _refuse(self) -> None:
        """Fail the tasks that the thread will not run any more."""
        error = NcclAborted("the thread that calls MPI has ended")
        error.__cause__ = self.error
        queues, self._active = self._active, []
        for launch in [launch for queue in queues for launch in queue]:
            _kept_for_mpi.append(launch)  # MPI may still write into its memory
            launch.failed(launch, error)
        for task in _drained(self._tasks):  # a thread that has just added a task may run this too
            if isinstance(task, MpiCall):
                task.failed(task, error)
            else:
                task.made(None, error)
        for making in _drained(self._creations):
            making.made(None, error)

    def _loop(self) -> None:
        ready: list[int] = []
        moment = last = time.monotonic()
        while True:
            progressed = bool(ready) and self._read(ready)
            if self._tasks or self._creations:
                progressed |= self._start()
            if self._connections:
                progressed |= self._receive()
                progressed |= self._write()
            if self._sends or self._active:
                progressed |= self._complete(moment)
            moment = time.monotonic()
            if progressed:
                last = moment
            if self._ending and self._is_over(moment):
                break
            open_connections = [each for each in self._connections.values() if not each.end_sent]
            watched = [self._wake_fd, *(each.end.fileno() for each in open_connections)]
            waited = moment - last
            if progressed or waited < _SPIN:
                ready = await_readable(watched, 0.0)
                if not progressed and not ready:
                    os.sched_yield()
            else:
                ready = await_readable(watched, min(_LONGEST_PAUSE, max(_SHORTEST_PAUSE, waited * _PAUSE_FRACTION)))
        all_ended = all(each.end_received for each in self._connections.values())
        if self._is_orderly and all_ended and not self._sends and not self._active:
            for comm in reversed(self._comms):
                comm.Free()

    def _is_over(self, moment: float) -> bool:
        if self._exiting:  # the control plane has not ended: the neighbours are told that this rank is gone
            for connection in self._connections.values():
                self._send_end(connection)
            return not self._sends or moment >= self._end_deadline
        done = not (self._sends or self._active or self._tasks or self._creations)
        done = done and all(
            connection.end_sent and connection.end_received for connection in self._connections.values()
        )
        return done or moment >= self._end_deadline

    # The control plane's frames.

    def _read(self, ready: list[int]) -> bool:
        """Send what the control plane has written for its neighbours."""
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        progressed = False
        for connection in self._connections.values():
            if connection.end_sent or connection.end.fileno() not in ready:
                continue
            progressed = True
            try:
                piece = connection.end.recv(_MAX_MESSAGE_BYTES)
            except BlockingIOError:
                continue
            except OSError:  # closed with data that were never read
                piece = b""
            if piece:
                self._send(connection, piece)
            else:
                self._send_end(connection)
        return progressed

    def _send(self, connection: _NeighbourConnection, piece: bytes) -> None:
        self._sends.append((self.comm.Isend([piece, MPI.BYTE], connection.rank, _FRAME_TAG), piece))

    def _send_end(self, connection: _NeighbourConnection) -> None:
        if not connection.end_sent:
            connection.end_sent = True
            self._send(connection, b"")

    def _receive(self) -> bool:
        """Receive what the neighbours have sent."""
        progressed = False
        while (
            self._connections and (message := self.comm.Improbe(MPI.ANY_SOURCE, _FRAME_TAG, self._status)) is not None
        ):
            progressed = True
            connection = self._connections[self._status.source]
            buffer = bytearray(self._status.Get_count(MPI.BYTE))
            connection.arriving.append((message.Irecv([buffer, MPI.BYTE]), buffer))
        return progressed

    def _write(self) -> bool:
        """Write to the control plane what has arrived from the neighbours."""
        progressed = False
        for connection in self._connections.values():
            while connection.arriving and connection.arriving[0][0].Test():
                progressed = True
                _, piece = connection.arriving.popleft()
                connection.unwritten += piece
                connection.end_received = connection.end_received or not piece
            if connection.unwritten:
                try:
                    sent = connection.end.send(connection.unwritten)
                except BlockingIOError:
                    continue
                except OSError:  # the control plane has ended, and does not read any more
                    sent = len(connection.unwritten)
                del connection.unwritten[:sent]
                progressed = True
            if progressed and connection.end_received and not connection.unwritten:
                with contextlib.suppress(OSError):
                    connection.end.shutdown(socket.SHUT_WR)
        return progressed

    # Operations on data.

    def _start(self) -> bool:
        progressed = bool(self._tasks)
        while self._tasks:
            task = self._tasks.popleft()
            if isinstance(task, _CommCreation):
                self._creations.append(task)
                continue
            if task.is_dead:
                task.done(task)
                continue
            for part in task.brought:
                part.begin()
            try:
                task.requests = task.start()
            except Exception as error:
                _kept_for_mpi.append(task)  # requests that it has begun may still run
                task.failed(task, _as_error(task.what, error))
                continue
            task.deadline = time.monotonic() + task.limit
            if not task.queue:
                self._active.append(task.queue)
            task.queue.append(task)
        if self._creations:
            progressed |= self._make()
        return progressed

    def _make(self) -> bool:
        """Take the next step in making the first communicator in the queue.

        MPI's call blocks until all members have made it. Meanwhile this thread relays no frames, but a member may wait
        for frames before it makes the call. So the call is made only when a nonblocking barrier has shown that all
        ranks have reached this creation. All ranks make the communicators in one order.
        """
        first = self._creations[0]
        if first.barrier is None:
            first.barrier = self.comm.Ibarrier()
        if not first.barrier.Test():
            return False
        self._creations.popleft()
        if first.members is not None:
            all_ranks = self.comm.Get_group()
            subgroup = all_ranks.Incl(list(first.members))
            made = self.comm.Create_group(subgroup, _AGREEMENT_TAG)
            subgroup.Free()
            all_ranks.Free()
            self._comms.append(made)
            first.made(made, None)
        return True

    def _complete(self, moment: float) -> bool:
        """End the operations that MPI has completed."""
        progressed = False
        if self._sends:
            waiting = [each for each in self._sends if not each[0].Test()]
            progressed = len(waiting) < len(self._sends)
            self._sends = waiting
        for queue in list(self._active):
            while queue and self._has_ended(queue[0], moment):
                progressed = True
                queue.popleft()
            if not queue:
                self._active.remove(queue)
        return progressed

    def _has_ended(self, launch: MpiCall, moment: float) -> bool:
        """Return whether MPI has completed an operation, and end it then; after its deadline fail its works."""
        try:
            if not MPI.Request.Testall(launch.requests):
                if moment >= launch.deadline and not launch.is_dead:
                    launch.failed(launch, _overdue(launch))
                return False
            if not launch.is_dead:
                launch.finish()
        except Exception as error:
            launch.failed(launch, _as_error(launch.what, error))
        if not launch.is_dead:
            for part in launch.brought:
                part.finish()
        launch.done(launch)
        return True


def _drained(queue: deque[Any]) -> Iterator[Any]:
    while True:
        try:
            yield queue.popleft()
        except IndexError:
            return


def _as_error(what: str, error: Exception) -> NcclError:
    made = NcclError(f"{what}: MPI could not do it: {error}", result=Result.SYSTEM_ERROR)
    made.__cause__ = error
    return made


def _overdue(launch: MpiCall) -> NcclTimeout:
    return NcclTimeout(
        f"{launch.what}: all ranks have brought it, and MPI has not done it within {seconds(launch.limit)}"
    )


#: Threads that call MPI; and memory that MPI may access until the process ends.
_running: weakref.WeakSet[MpiThread] = weakref.WeakSet()
_kept_for_mpi: list[Any] = []


def is_running() -> bool:
    """Return whether a thread of this process calls MPI."""
    return bool(_running)


@atexit.register
def _leave() -> None:
    """End the threads: mpi4py finalises MPI after Python's own exit functions."""
    for thread in list(_running):
        thread.leave_at_exit()
