"""The one thread of a coordinator that calls MPI: it relays the control plane's frames, and runs operations on data.

The control plane (`ncclpy.coordinator.control`) talks to its neighbours through stream sockets. Over MPI each of these
is one end of a socket pair. This thread reads at the other end what the control plane writes, and sends it as messages
to the thread of that neighbour, which writes it into a socket pair of its own. A message without bytes says that the
neighbour's end was closed.
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

#: The tags of messages that relay frames, and of agreements on new communicators. They must differ: Open MPI makes
#: these agreements by ordinary messages, whatever the standard says, and would take frames for its own.
_FRAMES, _AGREEMENTS = 1, 2
#: The most bytes of a frame in one message.
_PIECE = 64 << 10
#: Seconds between two polls of MPI, which has nothing to sleep on: this fraction of the time since something moved
#: last, so that a wait ends late by as much, within these bounds. The upper one determines the cost of an idle rank: a
#: poll takes up to 150 us if all that it needs has left the caches, so that is 0.06% of a core.
_PAUSE_FRACTION, _SHORTEST_PAUSE, _LONGEST_PAUSE = 0.01, 50e-6, 0.25
#: Seconds without sleep after something has moved: usually an answer is on its way by then, and data move only while
#: MPI is called. Otherwise an operation takes a third longer, from the last rank's call to its end.
_SPIN = 200e-6
#: Seconds for the end messages of the neighbours, and at exit for messages to arrive.
_FAREWELL, _AT_EXIT = 10.0, 2.0


class MpiCall:
    """One operation on data.

    Parameters
    ----------
    lane
        The lane of its set: operations of one lane end in the order in which they were launched, as on a stream.
    what
        Its name, for errors.
    brought
        The parts that end with this operation.
    start
        Returns the MPI requests that it consists of; called by the thread.
    finish
        Does what is left once they are complete.
    failed
        Called with an error, with which the works end; MPI may go on.
    done
        Called once MPI has completed it.
    limit
        Seconds for the operation.
    """

    def __init__(
        self,
        lane: deque[MpiCall],
        what: str,
        brought: Sequence[Any],
        start: Callable[[], list[Any]],
        finish: Callable[[], None],
        failed: Callable[[MpiCall, BaseException], None],
        done: Callable[[MpiCall], None],
        limit: float,
    ) -> None:
        self.lane, self.what, self.brought = lane, what, brought
        self.start, self.finish, self.failed, self.done = start, finish, failed, done
        self.limit, self.deadline = limit, 0.0
        self.requests: list[Any] = []
        self.is_dead = False  # its works have failed; MPI may still touch its memory


class _Line:
    """The connection to one neighbour on the control plane."""

    def __init__(self, rank: int, end: socket.socket) -> None:
        self.rank, self.end = rank, end
        self.arriving: deque[tuple[Any, bytearray]] = deque()
        self.unwritten = bytearray()
        self.said = self.heard = False  # whether this rank, and the neighbour, has sent its end message


class _Making:
    """A communicator of some ranks that this rank has to make, or that other ranks make without it."""

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
        By neighbour on the control plane, the socket with this rank's control plane at its other end.
    """

    def __init__(self, comm: Any, ends: dict[int, socket.socket]) -> None:
        self.comm = comm
        self._lines = {rank: _Line(rank, end) for rank, end in ends.items()}
        for line in self._lines.values():
            line.end.setblocking(False)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._tasks: deque[MpiCall | _Making] = deque()
        self._sends: list[tuple[Any, bytes]] = []
        self._active: list[deque[MpiCall]] = []  # lanes in which something runs
        self._making: deque[_Making] = deque()
        self._status = MPI.Status()
        self._ending = self._exiting = self._over = False
        self._lock = threading.Lock()  # guards `_wake`: nothing may write to it once it is closed
        self._until = 0.0
        self._orderly = False
        self._comms: list[Any] = [comm]
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="ncclpy-mpi", daemon=True)
        _running.add(self)
        self._thread.start()

    # Called by other threads.

    def launch(self, launch: MpiCall) -> None:
        """Have the thread start an operation, after those before it."""
        self._give(launch)

    def make(self, members: Sequence[int] | None, made: Callable[[Any, BaseException | None], None]) -> None:
        """Have the thread make a communicator of some ranks; all ranks call this alike, other ranks with None.

        On its members ``made(comm, error)`` is called then.
        """
        self._give(_Making(members, made))

    def own(self, comm: Any) -> None:
        """Have the thread free a communicator at an orderly end."""
        self._comms.append(comm)

    def end(self, orderly: bool) -> bool:
        """Wait for the end messages of the neighbours and the end of the thread; return whether it has ended.

        Communicators are freed only after an orderly end: `MPI_Comm_free` is collective.
        """
        self._orderly = orderly
        self._until = time.monotonic() + _FAREWELL
        self._ending = True
        self._nudge()
        self._thread.join(_FAREWELL + _AT_EXIT)
        return not self._thread.is_alive()

    def leave_at_exit(self) -> None:
        """Have the thread leave MPI before it is finalised."""
        self._until = time.monotonic() + _AT_EXIT
        self._exiting = self._ending = True
        self._nudge()
        self._thread.join(2 * _AT_EXIT)

    def _give(self, task: MpiCall | _Making) -> None:
        self._tasks.append(task)
        if not self._nudge():
            self._refuse()

    def _nudge(self) -> bool:
        """Wake the thread; return whether it runs."""
        with self._lock:
            if not self._over:
                os.eventfd_write(self._wake, 1)
            return not self._over

    # The thread.

    def _run(self) -> None:
        be_punctual()
        try:
            self._loop()
        except BaseException as error:  # an error of MPI, as its error handler returns: nothing can go on without it
            self.error = error
        for line in self._lines.values():  # for the control plane the neighbours are gone
            line.end.close()
        _kept.extend(self._sends)
        _running.discard(self)
        with self._lock:
            self._over = True
            os.close(self._wake)
        self._refuse()

    def _refuse(self) -> None:
        """Fail the tasks that the thread will not run any more."""
        error = NcclAborted("the thread that calls MPI has ended")
        error.__cause__ = self.error
        lanes, self._active = self._active, []
        for launch in [launch for lane in lanes for launch in lane]:
            _kept.append(launch)  # MPI may still write there
            launch.failed(launch, error)
        for task in _drained(self._tasks):  # a thread that gives a task may be here too
            if isinstance(task, MpiCall):
                task.failed(task, error)
            else:
                task.made(None, error)
        for making in _drained(self._making):
            making.made(None, error)

    def _loop(self) -> None:
        ready: list[int] = []
        moment = last = time.monotonic()
        while True:
            moved = bool(ready) and self._read(ready)
            if self._tasks or self._making:
                moved |= self._start()
            if self._lines:
                moved |= self._receive()
                moved |= self._write()
            if self._sends or self._active:
                moved |= self._complete(moment)
            moment = time.monotonic()
            if moved:
                last = moment
            if self._ending and self._is_over(moment):
                break
            watched = [self._wake, *(line.end.fileno() for line in self._lines.values() if not line.said)]
            waited = moment - last
            if moved or waited < _SPIN:
                ready = await_readable(watched, 0.0)
                if not moved and not ready:
                    os.sched_yield()
            else:
                ready = await_readable(watched, min(_LONGEST_PAUSE, max(_SHORTEST_PAUSE, waited * _PAUSE_FRACTION)))
        if self._orderly and not self._sends and not self._active and all(line.heard for line in self._lines.values()):
            for comm in reversed(self._comms):
                comm.Free()

    def _is_over(self, moment: float) -> bool:
        if self._exiting:  # the control plane has not ended: the neighbours are told that this rank is gone
            for line in self._lines.values():
                self._say_end(line)
            return not self._sends or moment >= self._until
        done = not (self._sends or self._active or self._tasks or self._making)
        done = done and all(line.said and line.heard for line in self._lines.values())
        return done or moment >= self._until

    # The control plane's frames.

    def _read(self, ready: list[int]) -> bool:
        """Send what the control plane has written for its neighbours."""
        if self._wake in ready:
            os.eventfd_read(self._wake)
        moved = False
        for line in self._lines.values():
            if line.said or line.end.fileno() not in ready:
                continue
            moved = True
            try:
                piece = line.end.recv(_PIECE)
            except BlockingIOError:
                continue
            except OSError:  # closed with data that were never read
                piece = b""
            if piece:
                self._send(line, piece)
            else:
                self._say_end(line)
        return moved

    def _send(self, line: _Line, piece: bytes) -> None:
        self._sends.append((self.comm.Isend([piece, MPI.BYTE], line.rank, _FRAMES), piece))

    def _say_end(self, line: _Line) -> None:
        if not line.said:
            line.said = True
            self._send(line, b"")

    def _receive(self) -> bool:
        """Receive what the neighbours have sent."""
        moved = False
        while self._lines and (message := self.comm.Improbe(MPI.ANY_SOURCE, _FRAMES, self._status)) is not None:
            moved = True
            line = self._lines[self._status.source]
            buffer = bytearray(self._status.Get_count(MPI.BYTE))
            line.arriving.append((message.Irecv([buffer, MPI.BYTE]), buffer))
        return moved

    def _write(self) -> bool:
        """Write what has arrived to the control plane."""
        moved = False
        for line in self._lines.values():
            while line.arriving and line.arriving[0][0].Test():
                moved = True
                _, piece = line.arriving.popleft()
                line.unwritten += piece
                line.heard = line.heard or not piece
            if line.unwritten:
                try:
                    sent = line.end.send(line.unwritten)
                except BlockingIOError:
                    continue
                except OSError:  # the control plane has ended, and does not read any more
                    sent = len(line.unwritten)
                del line.unwritten[:sent]
                moved = True
            if moved and line.heard and not line.unwritten:
                with contextlib.suppress(OSError):
                    line.end.shutdown(socket.SHUT_WR)
        return moved

    # Operations on data.

    def _start(self) -> bool:
        moved = bool(self._tasks)
        while self._tasks:
            task = self._tasks.popleft()
            if isinstance(task, _Making):
                self._making.append(task)
                continue
            if task.is_dead:
                task.done(task)
                continue
            for part in task.brought:
                part.begin()
            try:
                task.requests = task.start()
            except Exception as error:
                _kept.append(task)  # requests that it has begun may go on
                task.failed(task, _as_error(task.what, error))
                continue
            task.deadline = time.monotonic() + task.limit
            if not task.lane:
                self._active.append(task.lane)
            task.lane.append(task)
        if self._making:
            moved |= self._make()
        return moved

    def _make(self) -> bool:
        """Take the next step in making the first communicator that waits.

        Making a communicator blocks until all of its members do so, and meanwhile this thread relays no frame, which
        they may wait for. So it begins when all ranks have reached it, which a nonblocking barrier tells. All ranks
        make the communicators in one order.
        """
        first = self._making[0]
        if first.barrier is None:
            first.barrier = self.comm.Ibarrier()
        if not first.barrier.Test():
            return False
        self._making.popleft()
        if first.members is not None:
            everyone = self.comm.Get_group()
            some = everyone.Incl(list(first.members))
            made = self.comm.Create_group(some, _AGREEMENTS)
            some.Free()
            everyone.Free()
            self._comms.append(made)
            first.made(made, None)
        return True

    def _complete(self, moment: float) -> bool:
        """Take what MPI has completed to its end."""
        moved = False
        if self._sends:
            waiting = [each for each in self._sends if not each[0].Test()]
            moved = len(waiting) < len(self._sends)
            self._sends = waiting
        for lane in list(self._active):
            while lane and self._ends(lane[0], moment):
                moved = True
                lane.popleft()
            if not lane:
                self._active.remove(lane)
        return moved

    def _ends(self, launch: MpiCall, moment: float) -> bool:
        """Return whether MPI has completed an operation, which then ends."""
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


#: Threads that call MPI now and then; and memory that MPI may access for ever.
_running: weakref.WeakSet[MpiThread] = weakref.WeakSet()
_kept: list[Any] = []


def is_running() -> bool:
    """Return whether a thread of this process calls MPI."""
    return bool(_running)


@atexit.register
def _leave() -> None:
    """End the threads: mpi4py finalises MPI after Python's own exit functions."""
    for thread in list(_running):
        thread.leave_at_exit()
