"""The one thread of a coordinator that calls MPI: it relays the control plane's frames, and runs operations on data.

The control plane (`ncclpy.coordinator.control`) speaks with its neighbours by stream sockets. Over MPI each of them is
one end of a pair; what it writes is read here at the other end and goes as messages to that neighbour's thread, which
writes it into a pair of its own. A message without bytes says that the neighbour's end was closed.
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

__all__ = ["Launch", "MpiThread", "is_running"]

#: Of messages that relay frames, and of agreements on new communicators: Open MPI's are messages among others,
#: whatever the standard says, and would take frames for their own.
_FRAMES, _AGREEMENTS = 1, 2
#: The most of a frame that is one message.
_PIECE = 64 << 10
#: Seconds between two looks at MPI, which has nothing to sleep on: a hundredth of what nothing has come for, so that a
#: wait ends late by as much. The longest is what an idle rank costs: a look takes up to 150 us where all that it needs
#: has left the caches, so this is 0.06% of a core.
_LATE, _SHORTEST, _LONGEST = 0.01, 50e-6, 0.25
#: Seconds for which it does not sleep at all behind what has moved: an answer is on its way by then, as a rule, and
#: data move only while MPI is called. Without that an operation takes a third longer, from the last bring to its end.
_EAGER = 200e-6
#: Seconds for the neighbours to say goodbye, and for what they are told to arrive when the process exits.
_FAREWELL, _AT_EXIT = 10.0, 2.0


class Launch:
    """One operation on data.

    Parameters
    ----------
    lane
        Of its set: the operations of one come to their ends in the order in which they were launched, as on a stream.
    what
        Its name, for errors.
    brought
        Whose works it is the end of.
    start
        Returns the requests of MPI that it consists of; called by the thread.
    finish
        Does what is left when they are done.
    failed
        Told of an error, which is the end of the works; MPI may go on.
    done
        Told when MPI has done with it.
    limit
        Seconds for it.
    """

    def __init__(
        self,
        lane: deque[Launch],
        what: str,
        brought: Sequence[Any],
        start: Callable[[], list[Any]],
        finish: Callable[[], None],
        failed: Callable[[Launch, BaseException], None],
        done: Callable[[Launch], None],
        limit: float,
    ) -> None:
        self.lane, self.what, self.brought = lane, what, brought
        self.start, self.finish, self.failed, self.done = start, finish, failed, done
        self.limit, self.deadline = limit, 0.0
        self.requests: list[Any] = []
        self.is_dead = False  # its works have failed; MPI may still touch its memory


class _Line:
    """The way to one neighbour on the control plane."""

    def __init__(self, rank: int, end: socket.socket) -> None:
        self.rank, self.end = rank, end
        self.arriving: deque[tuple[Any, bytearray]] = deque()
        self.unwritten = bytearray()
        self.said = self.heard = False  # that there is an end, by this rank and by the neighbour


class _Making:
    """A communicator of some ranks that is to be made, or, by others, is being made without them."""

    def __init__(self, members: Sequence[int] | None, made: Callable[[Any, BaseException | None], None]) -> None:
        self.members, self.made = members, made
        self.barrier: Any = None


class MpiThread:
    """The thread, and what it looks after.

    Parameters
    ----------
    comm
        A communicator of its own.
    ends
        By neighbour on the control plane, the socket at which this rank's control plane has the other end.
    """

    def __init__(self, comm: Any, ends: dict[int, socket.socket]) -> None:
        self.comm = comm
        self._lines = {rank: _Line(rank, end) for rank, end in ends.items()}
        for line in self._lines.values():
            line.end.setblocking(False)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._tasks: deque[Launch | _Making] = deque()
        self._sends: list[tuple[Any, bytes]] = []
        self._active: list[deque[Launch]] = []  # lanes in which something runs
        self._making: deque[_Making] = deque()
        self._status = MPI.Status()
        self._ending = self._exiting = self._over = False
        self._lock = threading.Lock()  # that nobody writes to what was closed
        self._until = 0.0
        self._orderly = False
        self._comms: list[Any] = [comm]
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="ncclpy-mpi", daemon=True)
        _running.add(self)
        self._thread.start()

    # What other threads ask for.

    def launch(self, launch: Launch) -> None:
        """Have an operation be started, behind those that came before it."""
        self._give(launch)

    def make(self, members: Sequence[int] | None, made: Callable[[Any, BaseException | None], None]) -> None:
        """Have a communicator of some ranks be made; all ranks call this alike, others than its members with None.

        Then ``made(comm, error)`` is called, on its members.
        """
        self._give(_Making(members, made))

    def own(self, comm: Any) -> None:
        """Have a communicator be freed at the end, if that is orderly."""
        self._comms.append(comm)

    def end(self, orderly: bool) -> bool:
        """Wait until the neighbours have said goodbye, and the thread ends; return whether it has.

        Only after an orderly end are the communicators given back: `MPI_Comm_free` is collective.
        """
        self._orderly = orderly
        self._until = time.monotonic() + _FAREWELL
        self._ending = True
        self._nudge()
        self._thread.join(_FAREWELL + _AT_EXIT)
        return not self._thread.is_alive()

    def leave_at_exit(self) -> None:
        """Have the thread be out of MPI before that is finalised."""
        self._until = time.monotonic() + _AT_EXIT
        self._exiting = self._ending = True
        self._nudge()
        self._thread.join(2 * _AT_EXIT)

    def _give(self, task: Launch | _Making) -> None:
        self._tasks.append(task)
        if not self._nudge():
            self._refuse()

    def _nudge(self) -> bool:
        """Wake the thread; return whether there is one."""
        with self._lock:
            if not self._over:
                os.eventfd_write(self._wake, 1)
            return not self._over

    # The thread.

    def _run(self) -> None:
        be_punctual()
        try:
            self._loop()
        except BaseException as error:  # of MPI, whose error handler returns: nothing goes on without it
            self.error = error
        for line in self._lines.values():  # to the control plane this rank's neighbours are gone
            line.end.close()
        _kept.extend(self._sends)
        _running.discard(self)
        with self._lock:
            self._over = True
            os.close(self._wake)
        self._refuse()

    def _refuse(self) -> None:
        """Fail what will not be done any more."""
        error = NcclAborted("the thread that calls MPI has ended")
        error.__cause__ = self.error
        lanes, self._active = self._active, []
        for launch in [launch for lane in lanes for launch in lane]:
            _kept.append(launch)  # MPI may still write there
            launch.failed(launch, error)
        for task in _drained(self._tasks):  # who gives a task may be here too
            if isinstance(task, Launch):
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
            if moved or waited < _EAGER:
                ready = await_readable(watched, 0.0)
                if not moved and not ready:
                    os.sched_yield()
            else:
                ready = await_readable(watched, min(_LONGEST, max(_SHORTEST, waited * _LATE)))
        if self._orderly and not self._sends and not self._active and all(line.heard for line in self._lines.values()):
            for comm in reversed(self._comms):
                comm.Free()

    def _is_over(self, moment: float) -> bool:
        if self._exiting:  # the control plane has not ended: the neighbours hear that this rank is gone
            for line in self._lines.values():
                self._say_end(line)
            return not self._sends or moment >= self._until
        done = not (self._sends or self._active or self._tasks or self._making)
        done = done and all(line.said and line.heard for line in self._lines.values())
        return done or moment >= self._until

    # The control plane's frames.

    def _read(self, ready: list[int]) -> bool:
        """Send what the control plane has for its neighbours."""
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
            except OSError:  # closed over something that was never read
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
        """Take what the neighbours have sent."""
        moved = False
        while self._lines and (message := self.comm.Improbe(MPI.ANY_SOURCE, _FRAMES, self._status)) is not None:
            moved = True
            line = self._lines[self._status.source]
            buffer = bytearray(self._status.Get_count(MPI.BYTE))
            line.arriving.append((message.Irecv([buffer, MPI.BYTE]), buffer))
        return moved

    def _write(self) -> bool:
        """Give it to the control plane, as it arrives."""
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
                except OSError:  # the control plane has ended, and reads no more
                    sent = len(line.unwritten)
                del line.unwritten[:sent]
                moved = True
            if moved and line.heard and not line.unwritten:
                with contextlib.suppress(OSError):
                    line.end.shutdown(socket.SHUT_WR)
        return moved

    # The data's operations.

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
                _kept.append(task)  # what it has begun before goes on
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
        """Go on with the communicator that is to be made next.

        To make one blocks until its members do so, and no frame is relayed meanwhile, for which they may wait. So it
        is begun when all ranks have come to it, which a barrier tells that blocks nobody; all make them in one order.
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
        """Bring what is done to its end."""
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

    def _ends(self, launch: Launch, moment: float) -> bool:
        """Return whether MPI has done an operation, of which that is the end then."""
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


def _overdue(launch: Launch) -> NcclTimeout:
    return NcclTimeout(
        f"{launch.what}: all ranks have brought it, and MPI has not done it within {seconds(launch.limit)}"
    )


#: Threads that are in MPI every now and then; and memory that it may touch for ever.
_running: weakref.WeakSet[MpiThread] = weakref.WeakSet()
_kept: list[Any] = []


def is_running() -> bool:
    """Return whether a thread of this process calls MPI."""
    return bool(_running)


@atexit.register
def _leave() -> None:
    """End the threads: mpi4py finalises MPI behind all that Python does at its exit."""
    for thread in list(_running):
        thread.leave_at_exit()
