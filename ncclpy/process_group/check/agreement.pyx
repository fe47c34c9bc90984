"""Whether the ranks bring the same to a collective, found out before NCCL is called.

Each rank notes what it brings to the group's n-th collective on a board that all can read, then waits until all have
noted something for that number, and looks. All that wait see the same notes, so all come to the same end. With
``check="first"`` a rank whose calls were compared before notes them and waits for nobody. If they are new to another
rank at that number, the two disagree, and that one finds the note.

The thread that begins the collective waits, one at a time of a rank, under no lock of the package. Who leaves early
marks its note, so that who comes later does not go on without it.
"""

import json
import os
import threading

from cpython.exc cimport PyErr_CheckSignals

from ncclpy.abi.nccl cimport ncclInvalidUsage
from ncclpy.core.runtime.wait cimport SLICE, deadline_after, now

from ncclpy.bootstrap.asked import StoreDamaged, decode
from ncclpy.bootstrap.place import BOOT_ID
from ncclpy.errors import NcclAborted, NcclError, NcclTimeout, ranks, seconds, spans
from ncclpy.process_group.check import shared_memory
from ncclpy.process_group.check.disagreement import disagreement, unpack
from ncclpy.process_group.check.shared_memory import read_offer
from ncclpy.process_group.check.stored_board import StoredBoard

_WHAT = "to compare the collectives"
#: Seconds for a note that is too long for shared memory to come from the store.
_LONG = 10.0
#: So many calls are remembered.
_MANY = 1 << 16


cdef class Agreement:
    """The comparisons of one group.

    Parameters
    ----------
    notices : Notices
        What the ranks tell each other by.
    timeout : float
        Seconds in which they have to meet.
    first : bool
        Whether to compare only what is new to a rank.
    """

    def __init__(self, notices, double timeout, bint first):
        self.notices, self.timeout, self.first = notices, timeout, first
        self.name, self.rank, self.size = notices.name, notices.rank, notices.size
        self.turn = threading.Lock()
        self.known, self.long, self.met = {}, [], []

    cdef int begin(self, double deadline, object wanted) except -1:
        """Wait for this thread's turn."""
        turn = self.turn
        if turn.acquire(False):
            return 0
        while not turn.acquire(timeout=max(0.0, min(SLICE, deadline - now()))):
            if not wanted():
                raise NcclAborted(f"process group {self.name!r} has ended")
            if now() >= deadline:
                raise NcclTimeout(
                    f"rank {self.rank} of process group {self.name!r}: another thread still waits for the other ranks to "
                    "bring what it has begun"
                )
        return 0

    cdef int end(self) except -1:
        self.turn.release()
        return 0

    cdef int close(self) except -1:
        board, self.board = self.board, None  # the memory goes with the last wait in it
        self.found = None
        if board is not None:
            board.close()
        return 0

    cdef int agree(self, long long number, Signature brought, double limit, object wanted) except -1:
        cdef bytes calls = brought.calls, note = None
        cdef double deadline
        cdef int found
        cdef bint ends = False, has_messages = len(brought.messages) > 0
        board = self.board
        if board is None:
            self.board = board = self._meet(wanted)
        # What a rank sends to some is not known to the others: that is compared each time.
        if not self.first or has_messages or calls not in self.known:
            note = brought.packed()
            if board.too_long(note):
                self._put_long(number, note)
        try:
            board.put(number, calls, note, has_messages)
            if note is None:
                return 0
            deadline = deadline_after(limit)
            while True:
                found = board.look(number, calls, max(0.0, min(SLICE, deadline - now())))
                if found:
                    break
                PyErr_CheckSignals()
                if not wanted():
                    if board.look(number, calls, 0.0):  # one that has found out has ended it
                        break
                    raise NcclAborted(f"process group {self.name!r} has ended")
                if now() >= deadline:
                    absent = board.absent(number)
                    if not absent:
                        continue
                    late = NcclTimeout(
                        f"{ranks(spans(absent))} of {self.size} did not come to compare collective {number} of process "
                        f"group {self.name!r} within {seconds(limit)}. NCCL was not called"
                    )
                    late.missing = absent
                    raise late
            text = None if found == 1 else self._disagreement(board, number, &ends)
        except StoreDamaged:  # the others find the same, and are not to take this one for gone
            raise
        except BaseException:
            if note is not None:
                board.leave(number, note)
            raise
        if text is not None:
            self.ends = ends
            self.found = NcclError(
                f"process group {self.name!r}: the ranks disagree on collective {number}: {text}. Rank {self.rank} has not "
                "called NCCL", result=ncclInvalidUsage,
            )
            raise self.found
        if self.first and not has_messages:
            if len(self.known) >= _MANY:  # all ranks forget at the same number
                self.known.clear()
            self.known[calls] = note
        if self.met:
            self._forget_meetings()
        return 0

    cdef str _disagreement(self, object board, long long number, bint* ends):
        """Say how what all bring differs, None if it fits; and whether somebody has gone on already."""
        found = board.brought(number)
        left = [rank for rank in range(self.size) if found[rank] is False]
        if left:
            late = NcclTimeout(
                f"{ranks(spans(left))} of {self.size} came to compare collective {number} of process group {self.name!r}, "
                "and left before all others were there. NCCL was not called"
            )
            late.missing = left
            raise late
        if not board.shared:
            ends[0] = board.passed()
            return self._difference(found, number)
        notes = []
        before = None
        for rank, note in enumerate(found):
            if note is None or type(note) is int:  # one that has waited for nobody
                ends[0] = True
                if before is None:
                    before = {shared_memory.digest(calls): known for calls, known in self.known.items()}
                note = before.get(note)
            elif not note:
                note = self.notices.store.get(self._long_key(number, rank), _LONG)
            notes.append(note)
        return self._difference(notes, number)

    def _difference(self, notes, number):
        """Say how notes differ, once each was read."""
        for rank, note in enumerate(notes):
            if note is not None:
                decode(unpack, note, self.notices.store, StoredBoard.key(number, rank), rank)
        return disagreement(notes)

    @staticmethod
    def _long_key(number, rank):
        return f"check/long/{number}/{rank}"

    def _put_long(self, number, note):
        key = self._long_key(number, self.rank)
        store = self.notices.store
        store.set(key, note)
        self.long.append(key)
        while len(self.long) > 2:  # of those before the last one all are through
            store.delete(self.long.pop(0))

    cdef object _meet(self, object wanted):
        """Return the board, once all ranks have come: in shared memory if they can all have that."""
        arrivals, everyone = self.notices.arrivals, list(range(self.size))
        what = f"{_WHAT} of process group {self.name!r}"
        mine = {"machine": BOOT_ID, "pid": os.getpid()}
        fd, board = -1, None
        try:
            if self.rank == 0 and mine["machine"]:
                try:
                    fd, token = shared_memory.create_board(self.size)
                    mine.update(fd=fd, token=token.hex())
                except OSError:
                    pass  # then it is the store
            packed = arrivals.meet(
                "check/meeting", everyone, what, json.dumps(mine).encode(), arrivals.combined("check/meeting", read_offer),
                self.timeout, wanted,
            )
            all_of_them = arrivals.parts("check/meeting", packed, read_offer)
            first = all_of_them[0]
            self.met = ["check/meeting"]
            if "fd" not in first or any(each["machine"] != first["machine"] for each in all_of_them):
                return StoredBoard(self.notices.store, self.rank, self.size, self.first)
            try:
                board = shared_memory.attach_board(first["pid"], first["fd"], first["token"], self.rank, self.size)
            except (OSError, TypeError, ValueError, OverflowError):
                pass  # all hear of it
            packed = arrivals.meet(
                "check/opened", everyone, what, b"false" if board is None else b"true",
                arrivals.combined("check/opened", _answer), self.timeout, wanted,
            )
            self.met.append("check/opened")
            if board is None or not all(arrivals.parts("check/opened", packed, _answer)):
                return StoredBoard(self.notices.store, self.rank, self.size, self.first)
            return board
        finally:
            if fd >= 0:
                os.close(fd)

    def _forget_meetings(self):
        if self.rank == 0:
            for place in self.met:
                self.notices.arrivals.forget(place, list(range(self.size)))
        self.met = []


def _answer(packed):
    """Return whether a rank has opened the memory of the first one."""
    return {b"true": True, b"false": False}[packed]
