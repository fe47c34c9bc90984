"""Programs of the early-end campaign in which threads bring keys to a Manager; see `interrupt_programs`.

Each rank is a thread, and one of them is the main thread; all bring the same keys, each in its own order. A rank waits
for its works at once, later, for an instant or not at all, and drops the arrays of failed works.
"""

from __future__ import annotations

import contextlib
import random
import threading
import traceback

import interrupt_programs as programs

import ncclpy

WAITS = ("at once", "at once", "later", "in an instant", "by a callback", "never")
EVENTS = ("interrupt", "interrupt", "alarm", "alarm", "hint", "close", "abort", "skip", "mismatch", "faults")


class Seat:
    """The attributes of a communicator that an operation uses."""

    def __init__(self, nranks, rank):
        self.nranks, self.rank = nranks, rank

    def __repr__(self):
        return f"<seat {self.rank} of {self.nranks}>"


class Participation(programs.Operation):
    """One rank's part in a collective of a Manager."""

    def __init__(self, arrays, seat, step, more):
        super().__init__(arrays, seat, step, more)
        self.work = None
        if self.kind == "ring":
            self.kind, self.wanted = "all_reduce", sum(1.0 + rank + step.number for rank in range(seat.nranks))

    def bring(self, manager, key, **options):
        options |= {"device": self.comm.rank, "num_local": self.comm.nranks}
        if self.kind != "broadcast":
            self.work = getattr(manager, self.kind)(key, self.send, self.recv, **options)
        elif self.comm.rank == self.root:
            self.work = manager.broadcast_send(key, self.send, **options)
            self.recv = self.send
        else:
            self.work = manager.broadcast_recv(key, self.recv, **options)

    def wait(self):
        self.work.wait()
        self.check()


class Participant:
    """One rank: the keys that it brings, and its outcome."""

    def __init__(self, program, rank):
        self.program, self.rank = program, rank
        self.seat, self.outcome = Seat(program.nranks, rank), None
        self.steps = list(program.steps)
        random.Random(f"{program.seed} {rank}").shuffle(self.steps)

    def run(self):
        later = []
        try:
            for step in self.steps:
                if step.number != self.program.skips.get(self.rank):
                    self.step(step, later)
            for participation in later:
                participation.wait()
            self.outcome = "right"
        except programs.WrongResult as error:
            self.outcome = "wrong"
            self.program.problems.append(f"rank {self.rank}: {error}")
        except BaseException as error:
            self.outcome = type(error).__name__
            if not self.program.is_an_end(error):
                self.program.problems.append(f"rank {self.rank}:\n{traceback.format_exc()}")

    def step(self, step, later):
        program, told = self.program, threading.Event()
        how = program.waits[self.rank][step.number]
        more = step.number == program.mismatches.get(self.rank)
        participation = Participation(program.arrays, self.seat, step, more)
        options = {"timeout": step.limit if program.disturbed else 20.0} if step.style == "limit" else {}
        if how == "by a callback":
            options["on_done"] = lambda _: told.set()
        participation.bring(program.manager, f"{program.seed} {step.number}", **options)
        if how == "in an instant":
            with contextlib.suppress(ncclpy.NcclTimeout):
                participation.work.wait(timeout=0.001)
        if how == "at once" and not program.shuffled:
            participation.wait()
        elif how != "never":
            later.append(participation)


class ManagerProgram:
    """The program of one seed: a Manager, its participants, and events."""

    processes, victim, uids = 1, None, ()

    def __init__(self, seed, arrays):
        choose = random.Random(f"a Manager's program {seed}")
        self.seed, self.arrays = seed, arrays
        self.nranks = choose.randint(2, 4)
        self.options = {"timeout": choose.choice([None, 0.1, 20.0]), "fail_fast": choose.random() < 0.3}
        self.steps = [programs.Step(choose, number) for number in range(choose.randint(1, 6))]
        self.waits = [[choose.choice(WAITS) for _ in self.steps] for _ in range(self.nranks)]
        self.shuffled = choose.random() < 0.5  # different orders: waits at once would never end
        self.events, self.skips, self.mismatches, self.faults = [], {}, {}, None
        for _ in range(choose.choice([0, 1, 1, 1, 2, 2, 3])):
            self._add_event(choose)
        self.events.sort()
        self.disturbed = bool(self.events or self.skips or self.mismatches or self.faults)
        if not self.disturbed and self.options["timeout"] is not None:
            self.options["timeout"] = 20.0
        self.problems, self.signals, self.helpers = [], 0, []
        self.over = threading.Event()
        self.ranks, self.manager = [], None

    def _add_event(self, choose):
        kind, moment, rank = choose.choice(EVENTS), choose.random() ** 2 * 0.03, choose.randrange(self.nranks)
        if kind == "skip":
            self.skips[rank] = choose.randrange(len(self.steps))
        elif kind == "mismatch":
            self.mismatches[rank] = choose.randrange(len(self.steps))
        elif kind == "faults":
            often, calls = choose.choice([0.01, 0.05, 0.2]), ("AllReduce", "AllGather", "ReduceScatter", "Broadcast")
            rules = [f"random seed={self.seed} p={often} call={call} do={programs.FAULTS}" for call in calls]
            self.faults = "; ".join(rules)
        else:
            self.events.append((moment, kind, 0, rank))

    def is_an_end(self, error):
        if not self.disturbed:
            return False
        return programs.is_an_end(error) or (bool(self.mismatches) and isinstance(error, ValueError))

    def run(self):
        self.ranks = [Participant(self, rank) for rank in range(self.nranks)]
        if not self.shuffled:
            for rank in self.ranks:
                rank.steps = self.steps
        threads = [threading.Thread(target=rank.run, daemon=True, name="rank") for rank in self.ranks[1:]]
        oversees = threading.Thread(target=self.oversee, daemon=True, name="oversees")
        self.manager = ncclpy.Manager(**self.options)
        with ncclpy.faults(self.faults) if self.faults else contextlib.nullcontext():
            for thread in threads:
                thread.start()
            with contextlib.suppress(KeyboardInterrupt, programs.Late):  # a signal while the inner block ends
                with contextlib.suppress(KeyboardInterrupt, programs.Late):
                    oversees.start()
                    programs.listen()
                    self.ranks[0].run()
                programs.undisturbed(programs.be_deaf)
            programs.undisturbed(programs.be_deaf)
            self.end(threads, oversees)
        return [rank.outcome for rank in self.ranks]

    def oversee(self):
        programs.happen_in_time(self, self.events)
        if self.over.wait(programs.PATIENCE if self.disturbed else programs.CLEAN_PATIENCE):
            return
        self.manager.abort("the program is over")

    def happen(self, kind, rank):
        if kind in programs.SIGNALS:
            programs.send_signal(self, kind)
        else:
            target = {"close": self.manager.close, "abort": self.manager.abort}[kind]
            helper = threading.Thread(target=programs.quietly, args=(target,), daemon=True, name=kind)
            self.helpers.append(helper)
            helper.start()

    def end(self, threads, oversees):
        programs.join_in_time(self, threads, programs.LIMIT + (0 if self.disturbed else programs.CLEAN_PATIENCE))
        self.over.set()
        programs.join_in_time(self, [oversees, *self.helpers], programs.LIMIT)
        if self.disturbed:
            programs.quietly(self.manager.abort)
        self.manager.close(timeout=programs.LIMIT)

    def forget(self):
        self.ranks, self.helpers, self.manager = [], [], None


def warm_up(arrays):
    """Open everything that a process opens only once."""
    with ncclpy.Manager() as manager:
        step = programs.Step(random.Random(0), 0)
        parts = [Participation(arrays, Seat(2, rank), step, 0) for rank in range(2)]
        for part in parts:
            part.bring(manager, "warm up")
        for part in parts:
            part.wait()
