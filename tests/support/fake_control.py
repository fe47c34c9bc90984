"""A control plane within one process: ranks are threads, and one lock stands for rank 0."""

from __future__ import annotations

import difflib
import threading
import time
from collections import deque

from ncclpy.core.errors import NcclAborted


class Hub:
    """What the ranks of one coordinator share."""

    def __init__(self, size, timeout, stall_after):
        self.size, self.timeout, self.stall_after = size, timeout, stall_after
        self.changed = threading.Condition()
        self.queues = [deque() for _ in range(size)]
        self.groups = {0: tuple(range(size))}
        self.brought = {}  # (group, key) -> {rank: deque of (fixed, own, joinable, moment)}
        self.warned = set()
        self.joined, self.last = set(), None
        self.defined = {}
        self.frame = []
        self.held = set()  # sets of which rank 0 has yet to launch what it was told last
        self.closing = None
        self.ended = self.over = False
        self.closed = set()
        self.frames = 0

    # Under the lock.

    def tell(self, record):
        if self.over:
            return
        self.frame.append(record)
        self.flush()

    def flush(self):
        frame, rest = [], []
        for record in self.frame:
            of_set = record[0] in ("run", "mismatch", "after_join", "overdue")
            waits = record[1] in self.held if of_set else bool(rest)
            (rest if waits or any(each[0] == "ended" for each in rest) else frame).append(record)
        self.frame = rest
        if frame:
            self.held |= {record[1] for record in frame if record[0] == "run"}
            self.frames += 1
            self.over |= any(record[0] == "ended" for record in frame)
            for queue in self.queues:
                queue.append(list(frame))
            self.changed.notify_all()

    def look(self, group, key):
        """See whether all have brought an operation."""
        ranks = self.brought.get((group, key), {})
        members = self.groups[group]
        have = [rank for rank in members if ranks.get(rank)]
        absent = [rank for rank in members if rank in self.joined and rank not in have]
        if not have or len(have) + len(absent) < len(members):
            return
        taken = {rank: ranks[rank].popleft() for rank in have}
        if not any(ranks.values()):
            del self.brought[group, key]
        self.warned.discard((group, key))
        values = {}
        for rank in have:
            values.setdefault(taken[rank][0], []).append(rank)
        fixed, _, joinable, _ = taken[have[0]]
        if len(values) > 1:
            self.tell(("mismatch", group, key, tuple((value, tuple(who)) for value, who in values.items())))
        elif absent and not joinable:
            self.tell(("after_join", group, key, fixed, tuple(absent)))
        else:
            owns = tuple(taken[rank][1] if rank in taken else b"" for rank in members)
            self.tell(("run", group, key, fixed, owns, tuple(absent)))
        self.look(group, key)

    def look_at_all(self):
        for group, key in list(self.brought):
            self.look(group, key)

    def end(self, rank, lost, reason):
        if not self.ended:
            self.ended = True
            if lost:
                self.held.clear()
            self.tell(("ended", rank, tuple(lost), reason))
            self.changed.notify_all()

    def look_at_clocks(self):
        """Find what is overdue, or has stalled; return the seconds until the next such moment."""
        moment = time.monotonic()
        for (group, key), ranks in list(self.brought.items()):
            have = [rank for rank in self.groups[group] if ranks.get(rank)]
            if not have:
                continue
            missing = tuple(rank for rank in self.groups[group] if rank not in have)
            begun = min(ranks[rank][0][3] for rank in have)
            fixed = ranks[have[0]][0][0]
            if self.timeout is not None and moment - begun > self.timeout:
                for rank in have:
                    ranks[rank].popleft()
                self.tell(("overdue", group, key, fixed, tuple(have), missing))
            elif moment - begun > self.stall_after and (group, key) not in self.warned:
                self.warned.add((group, key))
                near = tuple(
                    (other, tuple(rank for rank in self.groups[group] if self.brought[group, other].get(rank)))
                    for g, other in self.brought
                    if g == group and other != key and any(self.brought[g, other].values())
                    and difflib.SequenceMatcher(None, other, key).ratio() > 0.7
                )  # fmt: skip
                record = ("stalled", group, key, fixed, tuple(have), missing, moment - begun, near)
                self.queues[0].append([record])
                self.changed.notify_all()


class FakeControl:
    """One rank's end of a `Hub`."""

    def __init__(self, hub, rank):
        self._hub, self.rank, self.size = hub, rank, hub.size

    def bring(self, group, key, fixed, own, joinable):
        assert type(key) is bytes and type(fixed) is bytes and type(own) is bytes
        hub = self._hub
        with hub.changed:
            if hub.ended or self.rank in hub.closed:
                raise NcclAborted("the control plane has ended")
            ranks = hub.brought.setdefault((group, key), {})
            ranks.setdefault(self.rank, deque()).append((fixed, own, joinable, time.monotonic()))
            hub.look(group, key)

    def next(self, timeout):
        hub = self._hub
        end = time.monotonic() + timeout
        with hub.changed:
            while True:
                if hub.queues[self.rank]:
                    return hub.queues[self.rank].popleft()
                if hub.over or self.rank in hub.closed:
                    return None
                if time.monotonic() >= end:
                    return []
                if self.rank == 0:
                    hub.look_at_clocks()
                    hub.changed.wait(0.02)
                else:
                    hub.changed.wait(min(1.0, max(0.0, end - time.monotonic())))

    def launched(self, group):
        hub = self._hub
        if self.rank == 0:
            with hub.changed:
                hub.held.discard(group)
                hub.flush()

    def join(self):
        hub = self._hub
        with hub.changed:
            hub.joined.add(self.rank)
            hub.last = self.rank
            if len(hub.joined) == hub.size:
                hub.joined.clear()
                hub.tell(("all_joined", hub.last))
            hub.look_at_all()

    def define(self, ranks):
        hub = self._hub
        with hub.changed:
            waiting = hub.defined.setdefault(ranks, set())
            waiting.add(self.rank)
            if waiting == set(ranks):
                del hub.defined[ranks]
                number = len(hub.groups)
                hub.groups[number] = tuple(ranks)
                hub.tell(("group", number, tuple(ranks)))

    def shutdown(self, drain, reason):
        hub = self._hub
        with hub.changed:
            if hub.ended:
                return
            if not drain:
                hub.end(self.rank, (), reason)
            elif hub.closing is None:
                hub.closing = self.rank, reason
                hub.tell(("closing", self.rank, reason))
                hub.end(self.rank, (), reason)  # what all have brought is told by now

    def have(self, group, key):
        hub = self._hub
        with hub.changed:
            ranks = hub.brought.get((group, key), {})
            return tuple(rank for rank in hub.groups[group] if ranks.get(rank))

    def lose(self, rank):
        """Do as if a rank's process had died."""
        with self._hub.changed:
            self._hub.end(-1, (rank,), f"the process of rank {rank} has ended")

    def counters(self):
        return {"cache_hits": 0}

    def close(self):
        with self._hub.changed:
            self._hub.closed.add(self.rank)
            self._hub.changed.notify_all()


class Hubs:
    """What stands in for `open_control`: the n-th coordinator of a rank in a place meets the n-th of the others."""

    def __init__(self):
        self._lock = threading.Lock()
        self._made = {}
        self._hubs = {}
        self.controls = []

    def __call__(self, rank, size, store, name, *, cache, timeout, stall_after):
        where = store.prefix if hasattr(store, "prefix") else getattr(store, "_prefix", repr(type(store)))
        with self._lock:
            place = where, name, size
            number = self._made[place, rank] = self._made.get((place, rank), 0) + 1
            hub = self._hubs.setdefault((place, number), None)
            if hub is None:
                hub = self._hubs[place, number] = Hub(size, timeout, stall_after)
            control = FakeControl(hub, rank)
            self.controls.append(control)
            return control
