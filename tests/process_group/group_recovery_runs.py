"""Groups that lose ranks and gain others, at random: ``python group_recovery_runs.py SEED RUNS``.

The ranks are threads, each with its own client of one TCPStore, so that a rank dies as a process does: its lease ends,
and its communicator aborts. Each step is a sum that a model predicts; some ranks die, before a call, within it, or
while the others recover, some stay away for longer than the others wait, and new ones join. After each recovery and
each admission all members must agree on the members and on the steps done. The ranks that are left must finish in
time. Prints one JSON object per run.
"""

from __future__ import annotations

import json
import logging
import random
import sys
import threading
import time

import numpy as np

import ncclpy
from ncclpy.bootstrap import TCPStore

#: Seconds: deadline of a run, timeout of an operation, patience of recover(), absence of a rank that stays away.
DEADLINE = 60.0
LIMIT = 1.5
PATIENCE = 1.5
AWAY = 4.0
STEPS = 12


class Died(Exception):
    """This rank is dead."""


class NotAdmitted(Exception):
    """The other ranks have finished without admitting this one."""


class Problem(Exception):
    """A violated expectation."""


class Member:
    """One rank: the number that it keeps, its steps, and its fate."""

    def __init__(self, run, number, fate):
        self.run, self.number, self.fate = run, number, fate
        self.store = TCPStore("127.0.0.1", run.port)
        self.group = None
        self.results: list[int] = []
        self.start = self.first = 0  # steps done when this membership began, and the number of its next collective
        self.members: list[int] = []
        self.outcome = "unfinished"
        self.recoveries = 0

    def live(self, size):
        try:
            if size is None:
                self.join()
            else:
                options = {"device": self.number, "timeout": 20.0, "check": self.run.check}
                self.group = ncclpy.ProcessGroup(self.store, self.number, size, **options)
            self.outcome = "finished" if self.steps() else "left behind"
            self.group.close()
        except Died:
            self.outcome = "died"
        except NotAdmitted:
            self.outcome = "not admitted"
        except Problem as error:
            self.run.problems.append(f"member {self.number}: {error}")
        except Exception as error:
            self.run.problems.append(f"member {self.number}: {type(error).__name__}: {error}")
        finally:
            if self.outcome != "died":
                self.store.close()

    def join(self):
        """Ask to be admitted until the other ranks have finished; one of them may die meanwhile."""
        while not self.run.over.is_set():
            try:
                options = {"device": self.number % 8, "timeout": 2.0, "check": self.run.check}
                self.group = ncclpy.ProcessGroup.join(self.store, **options)
            except ncclpy.NcclError:
                continue
            self.outcome = "joined"
            return
        raise NotAdmitted

    def steps(self):
        knows = self.outcome != "joined"  # whether this rank knows the steps done
        agreed = False
        while True:
            try:
                if not agreed:
                    self.agree(knows)
                    knows = agreed = True
                step = len(self.results)
                if step >= STEPS:
                    return True
                if step % 3 == 2 and self.run.admits and self.group.admit(10.0):
                    agreed = False
                    continue
                self.befall("before", step)
                work = self.group.all_reduce(np.array([self.number + 1000 * step]), timeout=LIMIT)
                self.befall("within", step)
                total = int(work.result(20.0)[0])
                expected = sum(self.members) + 1000 * step * len(self.members)
                if total != expected:
                    raise Problem(f"step {step} of {self.members}: {total}, not {expected}")
                self.results.append(total)
            except ncclpy.NcclError:
                agreed = False
                if not self.recover():
                    return False

    def recover(self):
        """Continue with the ranks that are left; return whether this rank is one of them."""
        self.recoveries += 1
        if self.recoveries > 12:
            raise Problem("it recovers again and again")
        self.befall("recovers", len(self.results))
        try:
            found = self.group.recover(PATIENCE)
        except ncclpy.NcclTimeout:
            return True  # the next call of the caller recovers again
        except ncclpy.NcclError as error:
            if "continues without" in str(error) and self.fate is not None and self.fate[0] == "stays":
                return False
            raise
        finished = -1 if found.last_finished is None else found.last_finished
        del self.results[self.start + max(0, finished + 1 - self.first) :]
        return True

    def agree(self, knows):
        """Exchange the members and the results of the steps done, which ranks that have joined do not know."""
        told = np.zeros(2 * self.group.size, np.int64)
        mine = np.array([self.number, len(self.results) if knows else -1])
        self.group.all_gather(mine, told).wait(20.0)
        numbers, lengths = told[::2].tolist(), told[1::2].tolist()
        known = [length for length in lengths if length >= 0]
        if not known:
            raise Problem(f"nobody of {numbers} knows what is behind all")
        if len(set(known)) != 1:
            raise Problem(f"{numbers} have {lengths} steps behind them")
        behind = np.array([*self.results, *[0] * (known[0] - len(self.results))], np.int64)
        if known[0]:
            self.group.broadcast(behind, root=next(i for i, length in enumerate(lengths) if length >= 0)).wait(20.0)
        if knows and behind.tolist() != self.results:
            raise Problem(f"others have {behind.tolist()} behind them, this one {self.results}")
        self.group.barrier().wait(20.0)
        self.results, self.members = behind.tolist(), numbers
        self.start, self.first = known[0], self.group.seq
        self.run.memberships.add((known[0], tuple(numbers)))

    def befall(self, where, step):
        if self.fate is None or self.fate[1] != where or (self.fate[2] != step and where != "recovers"):
            return
        kind = self.fate[0]
        self.fate = (kind, None, None)
        if kind == "stays":
            time.sleep(AWAY)
            return
        communicator = self.group.communicator
        self.store.close()
        if communicator is not None:
            communicator.abort()
        raise Died


class Run:
    def __init__(self, seed):
        choose = random.Random(seed)
        self.seed = seed
        self.served = TCPStore("127.0.0.1", 0, serve=True, linger=0)
        self.port = self.served.port
        self.check = choose.choice(["off", "off", "first", "always"])
        self.problems: list[str] = []
        self.over = threading.Event()
        self.memberships: set[tuple[int, tuple[int, ...]]] = set()
        size = choose.randrange(2, 6)
        self.size = size
        fates = [None] * size
        for rank in choose.sample(range(size), choose.randrange(0, size)):
            kind = choose.choice(["dies", "dies", "dies", "stays"])
            where = choose.choice(["before", "within", "recovers"])
            fates[rank] = (kind, where, choose.randrange(STEPS))
        joins = choose.choice([0, 0, 1, 2])
        self.admits = joins > 0
        self.fates = fates
        self.joining = [choose.uniform(0, 1.5) for _ in range(joins)]

    def go(self):
        begun = time.monotonic()
        members = [Member(self, rank, fate) for rank, fate in enumerate(self.fates)]
        threads = [threading.Thread(target=member.live, args=(self.size,), daemon=True) for member in members]
        for thread in threads:
            thread.start()
        for delay in self.joining:
            time.sleep(delay)
            if not any(thread.is_alive() for thread in threads):
                break
            members.append(Member(self, len(members), None))
            threads.append(threading.Thread(target=members[-1].live, args=(None,), daemon=True))
            threads[-1].start()
        for thread in threads[: self.size]:
            thread.join(max(0.0, begun + DEADLINE - time.monotonic()))
        self.over.set()
        for thread in threads[self.size :]:
            thread.join(max(0.0, begun + DEADLINE - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            self.problems.append("a rank did not come to its end")
        finished = [member for member in members if member.outcome == "finished"]
        for member in finished:
            if len(member.results) != STEPS:
                self.problems.append(f"member {member.number} has finished after {len(member.results)} steps")
        doomed = {number for number, fate in enumerate(self.fates) if fate is not None}
        for member in members[: self.size]:
            if member.number not in doomed and member.outcome != "finished":
                self.problems.append(f"member {member.number} is {member.outcome}")
        for member in members:
            if member.group is not None and member.outcome == "died":
                member.group.abort("dead")
                member.group.close()
        self.served.close()
        return {
            "seed": self.seed,
            "seconds": round(time.monotonic() - begun, 3),
            "ranks": self.size,
            "check": self.check,
            "fates": self.fates,
            "joined": len(members) - self.size,
            "outcomes": [member.outcome for member in members],
            "recoveries": max(member.recoveries for member in members),
            "memberships": len(self.memberships),
            "problems": self.problems,
        }


def main():
    logging.disable(logging.WARNING)
    seed, runs = int(sys.argv[1]), int(sys.argv[2])
    for each in range(seed, seed + runs):
        print(json.dumps(Run(each).go()), flush=True)


if __name__ == "__main__":
    main()
