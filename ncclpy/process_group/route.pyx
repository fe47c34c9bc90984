"""Which way two ranks tell each other what they bring to messages: through memory that both have, or through the store.

Either both go the one way or both the other. Each puts into the store where its memory is found, opens the other's, and
says whether it could; both look at what both have said. That is done when the two first have a message, by the threads that
hold messages back, and what is begun meanwhile waits for it: who begins a message waits for nobody.

Each message is known by its channel and its number there. The channels of two ranks are the blocks of the lower one to the
higher one, those the other way, and each communicator that the two have as a pair, one after the other.
"""

import json

from libc.string cimport strncpy

from ncclpy.core.datatypes cimport NAME
from ncclpy.process_group.mailbox cimport Note

from ncclpy.bootstrap.asked import decode
from ncclpy.bootstrap.place import BOOT_ID
from ncclpy.process_group import mailbox
from ncclpy.process_group.shared_memory import read_offer


cdef class Route:
    """One peer of a rank's."""

    cdef bint tell(self, tuple key, tuple message):
        if self.state == SHARED and not self.untold and self._post(key, message):
            self.post.ring()
            return True
        self.untold[key] = message
        return False

    cdef bint tell_again(self):
        cdef bint told = False
        while self.untold:
            for key, message in self.untold.items():  # the first of them
                break
            if not self._post(key, message):
                break
            del self.untold[key]
            told = True
        if told:
            self.post.ring()
        return told

    cdef bint _post(self, tuple key, tuple message):
        cdef Note note
        cdef bytes name
        note.channel, note.place = key
        _, note.kind, _, note.count, note.tag = message
        name = (<str>message[2]).encode()
        strncpy(note.type, name, NAME)
        note.type[NAME] = 0
        return self.post.put(&note)

    cdef tuple look(self, tuple key):
        cdef Note note
        found = self.come.get(key)
        # What others wait for is kept for them, what nobody has asked for yet stays where it is bounded.
        while found is None and self.state == SHARED and self.post.next(&note):
            message = (self.rank, note.kind, (<bytes>note.type).decode("ascii", "replace"), note.count, note.tag)
            other = (note.channel, note.place)
            self.come[other] = message
            if other == key:
                found = message
        return found

    cdef int forget(self, tuple key) except -1:
        self.come.pop(key, None)
        return 0

    cdef int meet(self, Mailbox mine) except -1:
        cdef int state = self.state
        store, theirs = self.store, None
        if state == UNMET:
            offered = {"machine": BOOT_ID}
            offered.update(mine.offered())
            store.set(self._place(self.rank, "offers"), json.dumps(offered).encode())
            return OFFERED
        if state == OFFERED:
            theirs = self._read(self._place(self.peer, "offers"))
            if theirs is None:
                return OFFERED
            store.delete(self._place(self.peer, "offers"))  # it was for this rank alone
            offered = decode(read_offer, theirs, store, self._place(self.peer, "offers"), self.peer)
            # Both see both, and so come to the same end.
            if not BOOT_ID or offered["machine"] != BOOT_ID or "fd" not in offered or not mine.offered():
                return STORED
            try:
                self.opened = mailbox.attach(
                    mine, self.rank, self.peer, offered["pid"], offered["fd"], offered["token"]
                )
            except (OSError, TypeError, ValueError, OverflowError):
                pass  # the peer hears of it
            store.set(self._place(self.rank, "opened"), b"n" if self.opened is None else b"y")
            return OPENED
        if state == OPENED:
            theirs = self._read(self._place(self.peer, "opened"))
            if theirs is None:
                return OPENED
            store.delete(self._place(self.peer, "opened"))
            opened, self.opened = self.opened, None
            if opened is None or theirs != b"y":
                return STORED
            self.post = opened
            return SHARED
        return state

    cdef str key_of(self, tuple key, int rank):
        return f"check/{channel_text(key[0], self.rank, self.peer)}/{key[1]}/{rank}"

    def _place(self, rank, what):
        return f"check/between {min(self.rank, self.peer)} and {max(self.rank, self.peer)}/{what}/{rank}"

    def _read(self, key):
        return self.store.compare_set(key, None, None)[1]


cdef Route new_route(store, int rank, int peer):
    cdef Route route = Route.__new__(Route)
    route.store, route.rank, route.peer = store, rank, peer
    route.untold, route.come = {}, {}
    return route


cdef str channel_text(int channel, int rank, int peer):
    low, high = min(rank, peer), max(rank, peer)
    if channel == 0:
        return f"blocks from {low} to {high}"
    if channel == 1:
        return f"blocks from {high} to {low}"
    label = f"{low}:{high}" if channel == 2 else f"{low}:{high}#{channel - 2}"
    return f"pair {label!r}"
