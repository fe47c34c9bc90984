"""Random runs of process groups: the plan of a run, and the program of each rank."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

import leak_check
import numpy as np
from work_watch import WorkWatch

import ncclpy

DEADLINE = 15.0  # seconds after which a run must be over, whatever happens in it
NEVER = 1e-9  # the probability of a fault that does not happen
HEARD = 8.0  # seconds in which a rank that makes no call must hear that its group has ended; long for a loaded machine
ACTIONS = "error,error:ncclRemoteError,error:ncclInternalError,delay:3ms,hang,hang:20ms,corrupt"
CALLS = ("AllReduce", "AllGather", "ReduceScatter", "AlltoAll", "Broadcast", "Send", "Recv")
# These hangs are short: ncclpy cannot end a hang while there is no communicator yet, nor one in a call that ends it.
BRIEF_ACTIONS = "error,error:ncclRemoteError,delay:3ms,hang:150ms"
BRIEF_CALLS = ("GetUniqueId", "CommInitRankConfig", "CommSplit", "CommGetAsyncError")
END_ACTIONS = "delay:3ms,hang:150ms"
END_CALLS = ("CommAbort", "CommFinalize", "CommDestroy")  # no errors: a failed end would leave the communicator behind
#: The longest timeout, in seconds, of a run that must end by deadlines.
LONGEST = 0.6
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "ring", "batch", "barrier", "divide")
KINDS += ("itself", "uneven")


class Slow:
    """A store that answers slowly now and then, and that has no watches if `watches` is False."""

    choose = random.Random(0)
    watches = True

    def _check_usable(self):
        if self.choose.random() < 0.1:
            time.sleep(0.05)
        super()._check_usable()

    def _watch(self, prefix):
        if not self.watches:
            raise ncclpy.bootstrap.StoreError("this store cannot tell of changes")
        return super()._watch(prefix)


@dataclass
class Plan:
    """A run: what its ranks do, and what happens to rank 1, the victim.

    It happens before the victim's operation `when`: ``"stays"``, it begins no more operations; ``"aborts"`` the group;
    ``"killed"``, by itself. ``"absent"``: rank 1 is not started. None: nothing happens.
    """

    choose: random.Random
    rules: str = field(init=False)
    size: int = field(init=False)
    timeout: float = field(init=False)
    steps: list[tuple[str, int]] = field(init=False)
    when: int = field(init=False)
    slow: bool = field(init=False)
    watches: bool = field(init=False)
    victim: str | None = None

    def __post_init__(self):
        choose = self.choose
        seed, often = choose.getrandbits(30), choose.choice([NEVER, 0.0001, 0.005, 0.02, 0.1])
        self.timeout = choose.choice([0.3, LONGEST])
        if self.victim == "aborts" and choose.random() < 0.5:  # only the abort ends the run in time
            often, self.timeout = NEVER, 4 * DEADLINE
        rules = [f"random seed={seed} p={often} call={call} do={ACTIONS}" for call in CALLS]
        rules += [f"random seed={seed} p={often} call={call} do={BRIEF_ACTIONS}" for call in BRIEF_CALLS]
        rules += [f"random seed={seed} p={often} call={call} do={END_ACTIONS}" for call in END_CALLS]
        self.rules = "; ".join(rules)
        self.size = choose.choice([2, 3, 4])
        self.steps = [(choose.choice(KINDS), choose.choice([1, 60, 5000])) for _ in range(choose.randint(3, 15))]
        self.steps.append(("barrier", 1))  # ends only if all ranks begin it: a staying rank must hear of that
        self.when = choose.randrange(len(self.steps))
        self.slow, self.watches = choose.random() < 0.3, choose.random() < 0.7

    def lose_the_store(self):
        """Let deadlines end pending operations: without the store no rank hears of an abort."""
        self.timeout = min(self.timeout, LONGEST)


class RandomRank:
    """One rank's program: the same operations on every rank, and their expected results.

    Parameters
    ----------
    plan
        The run.
    rank
        Its rank.
    store
        Where the ranks meet.
    lost
        Whether the store is lost in this run, so that no rank has to hear of another's end.
    """

    def __init__(self, plan, rank, store, *, lost):
        self.plan, self.rank, self.store, self.lost = plan, rank, store, lost
        self.size, self.timeout = plan.size, plan.timeout
        self.watch = WorkWatch(f"rank {rank}")
        self.failures = []

    def add(self, work, right):
        self.watch.add(work, right)
        work.add_done_callback(self.watch.told)

    def run(self):
        try:
            group = ncclpy.ProcessGroup(self.store, self.rank, self.size, device=self.rank, timeout=self.timeout)
        except ncclpy.NcclError as error:
            if not self.lost:
                self.failures.append(repr(error))
            return
        except BaseException as error:
            self.failures.append(repr(error))
            return
        try:
            if self.timeout > DEADLINE:
                self._await_all()
            for number, (kind, count) in enumerate(self.plan.steps):
                if self.rank == 1 and number == self.plan.when:
                    if self.plan.victim == "stays":
                        self._stay(group)
                        break
                    if self.plan.victim == "aborts":
                        group.abort("it was asked for")
                    elif self.plan.victim == "killed":
                        self.be_killed()
                self.begin(group, kind, count)
        except ncclpy.NcclError:  # expected if the group has ended
            if group.error is None:
                self.failures.append("a call was refused by a group that works")
        except BaseException as error:
            self.failures.append(repr(error))
        try:
            self.close(group)
        except BaseException as error:
            self.failures.append(repr(error))

    def close(self, group):
        """Close a group; close() raises if the group fails, or its deadline passes, while works are in flight."""
        try:
            group.close(2 * self.timeout + 1)
        except ncclpy.NcclTimeout:
            pass
        except ncclpy.NcclError as error:
            if group.error is None:
                self.failures.append(f"close() of a group that works raised {error!r}")

    def _await_all(self):
        """Wait until all ranks have made the group.

        A rank that makes it after the process of another has aborted it and ended takes that process for one of an
        earlier attempt: it waits for the next process of that rank until the group's deadline.
        """
        self.store.add("made")
        while self.store.add("made", 0) < self.size:
            time.sleep(0.002)

    def be_killed(self):
        raise NotImplementedError("threads cannot be killed")

    def _stay(self, group):
        """Wait until this rank hears that the group has ended."""
        end = time.monotonic() + HEARD
        while group.error is None and time.monotonic() < end and not self.lost:
            time.sleep(0.002)
        if group.error is None and not self.lost:
            self.failures.append(f"it has not heard within {HEARD} s that its group has ended")

    def problems(self, deadline, faults):
        found, outcomes = self.watch.problems(deadline, faults)
        return [f"rank {self.rank}: {each}" for each in self.failures] + found, outcomes

    def begin(self, group, kind, count):
        n, rank = self.size, self.rank
        ranks = np.arange(1, n + 1, dtype=np.float32)
        mine = np.full(count, rank + 1, np.float32)
        whole = np.full(count * n, rank + 1, np.float32)
        got = np.zeros(count * n if kind in ("all_gather", "all_to_all") else count, np.float32)
        if kind == "all_reduce":
            self.add(group.all_reduce(mine, got), lambda: (got == ranks.sum()).all())
        elif kind == "all_gather":
            self.add(group.all_gather(mine, got), lambda: (got == np.repeat(ranks, count)).all())
        elif kind == "reduce_scatter":
            self.add(group.reduce_scatter(whole, got), lambda: (got == ranks.sum()).all())
        elif kind == "all_to_all":
            self.add(group.all_to_all(whole, got), lambda: (got == np.repeat(ranks, count)).all())
        elif kind == "broadcast":
            self.add(group.broadcast(mine, root=n - 1), lambda: (mine == n).all())
        elif kind == "ring":
            self.add(group.send(mine, (rank + 1) % n), lambda: True)
            self.add(group.recv(got, (rank - 1) % n), lambda: (got == (rank - 1) % n + 1).all())
        elif kind == "batch":
            with group.coalescing() as work:
                group.all_reduce(mine, got)
                group.broadcast(whole, root=0)
            self.add(work, lambda: (got == ranks.sum()).all() and (whole == 1).all())
        elif kind == "itself":
            self.add(group.send(mine, rank), lambda: True)
            self.add(group.recv(got, rank), lambda: (got == mine).all())
        elif kind == "uneven":
            send = np.full(n * (n + 1) // 2, rank + 1, np.float32)
            recv = np.zeros(n * (rank + 1), np.float32)
            counts = [each + 1 for each in range(n)], [rank + 1] * n
            self.add(group.all_to_all(send, recv, *counts), lambda: (recv == np.repeat(ranks, rank + 1)).all())
        elif kind == "divide":
            self._divide(group, mine)
        else:
            self.add(group.barrier(), lambda: True)

    def _divide(self, group, mine):
        """Split the group in two, and use this rank's half."""
        try:
            part = group.split(self.rank % 2)
        except ncclpy.NcclError:  # some ranks are missing, which does not end the group by itself
            return
        members = range(self.rank % 2, self.size, 2)
        try:
            self.add(part.all_reduce(mine), lambda: (mine == sum(each + 1 for each in members)).all())
        except ncclpy.NcclError:
            if part.error is None:
                self.failures.append("a call was refused by a part that works")
        self.close(part)


def left_over():
    """Return the threads that remain although they should have ended, after up to 15 s."""

    def look():
        return {
            "native": [name for name in leak_check.threads(leak_check.LASTING_MANAGER) if name.startswith("ncclpy")],
            "threads": [name for name in leak_check.python_threads() if name != "MainThread"],
        }

    return leak_check.settle(look, lambda seen: not any(seen.values()), patience=15)
