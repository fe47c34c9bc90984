"""Compare what all ranks bring to a collective before NCCL is called.

Each rank writes a note of what it brings to the group's n-th collective into an exchange, which all ranks can read. It
waits until all ranks have written a note for that number, and reads them. All waiting ranks read the same notes, so
all reach the same result. With ``check="first"`` a rank that has compared the same calls before does not wait. It only
leaves a digest of its calls in shared memory or, in the store, sets its note once another rank asks for it. A rank
that brings other calls at that number, which it has not compared before, waits: it finds the digest or the note, and
with it the disagreement.

The thread that begins the collective waits. It holds this rank's turn (`CollectiveCheck.begin`), so that one thread of
a rank waits at a time, and no other lock of the package. A rank that leaves early marks its note, so that ranks that
arrive later do not proceed without it.
"""

import json
import os
import threading

from cpython.exc cimport PyErr_CheckSignals

from ncclpy.abi.nccl cimport ncclInvalidUsage
from ncclpy.core.runtime.wait cimport SLICE, deadline_after, now

from ncclpy.bootstrap.store_arguments import StoreDamaged, decode
from ncclpy.bootstrap.place import BOOT_ID
from ncclpy.errors import NcclAborted, NcclError, NcclTimeout, ranks, seconds, spans
from ncclpy.process_group.check import shared_memory
from ncclpy.process_group.check.mismatch import disagreement, unpack
from ncclpy.process_group.check.shared_memory import read_offer
from ncclpy.process_group.check.store_exchange import StoreExchange

_WHAT = "to compare the collectives"
#: Seconds to wait in the store for a note that is too long for shared memory.
_NOTE_TIMEOUT = 10.0
#: The number of calls that are remembered.
_MAX_KNOWN = 1 << 16


cdef class CollectiveCheck:
    """The comparisons of one group.

    Parameters
    ----------
    group_status : GroupStatus
        The group's part of the store.
    timeout : float
        Seconds for a rendezvous of the ranks.
    first : bool
        Whether to compare only calls that are new to a rank.
    """

    def __init__(self, group_status, double timeout, bint first):
        self.group_status, self.timeout, self.first = group_status, timeout, first
        self.name, self.rank, self.size = group_status.name, group_status.rank, group_status.size
        self.turn = threading.Lock()
        self.known, self.long, self.met = {}, [], []

    cdef int begin(self, double deadline, object wanted) except -1:
        """Acquire this rank's turn; raise NcclAborted once `wanted` returns False, NcclTimeout at the deadline."""
        turn = self.turn
        if turn.acquire(False):
            return 0
        while not turn.acquire(timeout=max(0.0, min(SLICE, deadline - now()))):
            if not wanted():
                raise NcclAborted(f"process group {self.name!r} has ended")
            if now() >= deadline:
                raise NcclTimeout(
                    f"rank {self.rank} of process group {self.name!r}: another thread still waits for the other ranks to "
                    "call the operation that it has begun"
                )
        return 0

    cdef int end(self) except -1:
        self.turn.release()
        return 0

    cdef int close(self) except -1:
        exchange, self.exchange = self.exchange, None  # its memory is unmapped after the last wait in it
        self.last_disagreement = None
        if exchange is not None:
            exchange.close()
        return 0

    cdef int agree(self, long long number, CallSignature call_signature, double limit, object wanted) except -1:
        cdef bytes calls = call_signature.calls, note = None
        cdef double deadline
        cdef int found
        cdef bint nccl_was_called = False, has_messages = len(call_signature.messages) > 0
        exchange = self.exchange
        if exchange is None:
            self.exchange = exchange = self._meet(wanted)
        # Only the two ranks of a message know it, so a call with messages is compared each time.
        if not self.first or has_messages or calls not in self.known:
            note = call_signature.packed()
            if exchange.too_long(note):
                self._put_long(number, note)
        try:
            exchange.put(number, calls, note, has_messages)
            if note is None:
                return 0
            deadline = deadline_after(limit)
            while True:
                found = exchange.look(number, calls, max(0.0, min(SLICE, deadline - now())))
                if found:
                    break
                PyErr_CheckSignals()
                if not wanted():
                    if exchange.look(number, calls, 0.0):  # a rank that found a disagreement may have ended the group
                        break
                    raise NcclAborted(f"process group {self.name!r} has ended")
                if now() >= deadline:
                    absent = exchange.absent(number)
                    if not absent:
                        continue
                    late = NcclTimeout(
                        f"{ranks(spans(absent))} of {self.size} did not arrive to compare collective {number} of "
                        f"process group {self.name!r} within {seconds(limit)}. NCCL was not called"
                    )
                    late.missing = absent
                    raise late
            text = None if found == 1 else self._disagreement(exchange, number, &nccl_was_called)
        except StoreDamaged:  # the other ranks find the same damage, so this rank is not marked as having left
            raise
        except BaseException:
            if note is not None:
                exchange.leave(number, note)
            raise
        if text is not None:
            self.nccl_was_called = nccl_was_called
            self.last_disagreement = NcclError(
                f"process group {self.name!r}: the ranks disagree on collective {number}: {text}. Rank {self.rank} has not "
                "called NCCL", result=ncclInvalidUsage,
            )
            raise self.last_disagreement
        if self.first and not has_messages:
            if len(self.known) >= _MAX_KNOWN:  # all ranks clear it at the same number
                self.known.clear()
            self.known[calls] = note
        if self.met:
            self._forget_rendezvous()
        return 0

    cdef str _disagreement(self, object exchange, long long number, bint* nccl_was_called):
        """Return how the ranks' calls differ, None if they agree; set `nccl_was_called` if a rank has called NCCL.

        Raises `NcclTimeout` if a rank has left the comparison.
        """
        found = exchange.brought(number)
        left = [rank for rank in range(self.size) if found[rank] is False]
        if left:
            late = NcclTimeout(
                f"{ranks(spans(left))} of {self.size} arrived to compare collective {number} of process group "
                f"{self.name!r}, and left before all others had arrived. NCCL was not called"
            )
            late.missing = left
            raise late
        if not exchange.shared:
            nccl_was_called[0] = exchange.passed()
            return self._difference(found, number)
        notes = []
        by_digest = None
        for rank, note in enumerate(found):
            if note is None or type(note) is int:  # the rank is far ahead, or did not wait
                nccl_was_called[0] = True
                if by_digest is None:
                    by_digest = {shared_memory.digest(calls): known for calls, known in self.known.items()}
                note = by_digest.get(note)
            elif not note:
                note = self.group_status.store.get(self._long_key(number, rank), _NOTE_TIMEOUT)
            notes.append(note)
        return self._difference(notes, number)

    def _difference(self, notes, number):
        """Return how the notes differ; a note that cannot be read raises StoreDamaged."""
        for rank, note in enumerate(notes):
            if note is not None:
                decode(unpack, note, self.group_status.store, StoreExchange.key(number, rank), rank)
        return disagreement(notes)

    @staticmethod
    def _long_key(number, rank):
        return f"check/long/{number}/{rank}"

    def _put_long(self, number, note):
        key = self._long_key(number, self.rank)
        store = self.group_status.store
        store.set(key, note)
        self.long.append(key)
        while len(self.long) > 2:  # all ranks have read this rank's notes before the last two
            store.delete(self.long.pop(0))

    cdef object _meet(self, object wanted):
        """Run a rendezvous and return the exchange: in shared memory if all ranks can map it, else in the store."""
        rendezvous, all_ranks = self.group_status.rendezvous, list(range(self.size))
        what = f"{_WHAT} of process group {self.name!r}"
        mine = {"machine": BOOT_ID, "pid": os.getpid()}
        fd, exchange = -1, None
        try:
            if self.rank == 0 and mine["machine"]:
                try:
                    fd, token = shared_memory.create_exchange(self.size)
                    mine.update(fd=fd, token=token.hex())
                except OSError:
                    pass  # the exchange will be in the store
            packed = rendezvous.meet(
                "check/meeting", all_ranks, what, json.dumps(mine).encode(), rendezvous.combined("check/meeting", read_offer),
                self.timeout, wanted,
            )
            all_of_them = rendezvous.parts("check/meeting", packed, read_offer)
            first = all_of_them[0]
            self.met = ["check/meeting"]
            if "fd" not in first or any(each["machine"] != first["machine"] for each in all_of_them):
                return StoreExchange(self.group_status.store, self.rank, self.size, self.first)
            try:
                exchange = shared_memory.attach_exchange(first["pid"], first["fd"], first["token"], self.rank, self.size)
            except (OSError, TypeError, ValueError, OverflowError):
                pass  # the second rendezvous tells the other ranks
            packed = rendezvous.meet(
                "check/opened", all_ranks, what, b"false" if exchange is None else b"true",
                rendezvous.combined("check/opened", _answer), self.timeout, wanted,
            )
            self.met.append("check/opened")
            if exchange is None or not all(rendezvous.parts("check/opened", packed, _answer)):
                return StoreExchange(self.group_status.store, self.rank, self.size, self.first)
            return exchange
        finally:
            if fd >= 0:
                os.close(fd)

    def _forget_rendezvous(self):
        if self.rank == 0:
            for place in self.met:
                self.group_status.rendezvous.forget(place, list(range(self.size)))
        self.met = []


def _answer(packed):
    """Return whether a rank has mapped rank 0's memory."""
    return {b"true": True, b"false": False}[packed]
