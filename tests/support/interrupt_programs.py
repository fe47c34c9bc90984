"""Programs of the early-end campaign, each made from a seed; `interrupt_runs` runs them.

A program has ranks in up to three processes; each rank is a thread that makes the same collectives, and one rank is
the main thread. Events: signals, aborts and closes from other threads, faults, kills, a rank that leaves out a step or
brings other sizes. Without an event every rank must finish with right results. With one a rank may end in an error,
but a result without an error is right; the arrays of a rank are freed as soon as it fails.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
import traceback

import numpy as np

import ncclpy

PATIENCE = 0.12  # seconds after the last event until stuck communicators are aborted
CLEAN_PATIENCE = 15.0  # the same in programs without events
LIMIT = 8.0  # seconds in which an abort must end the calls of all threads
PUTS = 30
COUNTS = (1, 200, 5000, 40_000)
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "ring")
STYLES = ("plain", "plain", "group", "plan", "stream", "limit", "child", "register", "window", "put", "barrier")
EVENTS = ("interrupt", "interrupt", "alarm", "alarm", "hint", "close", "abort", "skip", "mismatch", "faults")
FAULTS = "error,error:ncclRemoteError,delay:3ms,hang:20ms,hang:200ms,hang"
SIGNALS = {"interrupt": signal.SIGINT, "alarm": signal.SIGALRM, "hint": signal.SIGUSR1}
CALLS = (
    "AllReduce", "AllGather", "ReduceScatter", "AlltoAll", "Broadcast", "Send", "Recv", "CommSplit", "GroupEnd",
    "PutSignal", "WaitSignal",
)  # fmt: skip


class Late(Exception):
    """The exception of the SIGALRM handler."""


class WrongResult(Exception):
    is_of_an_abort = False


def wrong_result(text, values):
    """Return the error of a wrong result; it tells whether the host engine wrote the result for an aborted rank."""
    error = WrongResult(f"{text}, got {values[:8]}")
    error.is_of_an_abort = bool((np.ascontiguousarray(values).view(np.uint8) == 0x5A).any())
    return error


ENDS = (ncclpy.NcclError, KeyboardInterrupt, Late)


def raise_late(*_):
    raise Late


def listen():
    signal.signal(signal.SIGALRM, raise_late)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def be_deaf():
    """Ignore signals from here on: a handler that raises in `Thread.join` makes it take the thread for ended."""
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.signal(signal.SIGINT, lambda *_: None)


def is_an_end(error: BaseException) -> bool:
    """Return whether an operation may end with this error in a program with events."""
    if isinstance(error, ENDS):
        return True
    # Another thread has closed the communicator.
    return isinstance(error, ValueError) and any(word in str(error) for word in ("closed", "finalized"))


def undisturbed(function, *arguments, **options):
    """Call a function, and repeat it until no signal handler raises in it."""
    while True:
        try:
            return function(*arguments, **options)
        except (KeyboardInterrupt, Late):
            continue


def quietly(function, *arguments, **options):
    try:
        return function(*arguments, **options)
    except BaseException as error:
        if not is_an_end(error):
            raise
        return None


class Step:
    """A step of all ranks, made from the seed before the program runs."""

    def __init__(self, choose: random.Random, number: int):
        self.number = number
        self.style, self.kind = choose.choice(STYLES), choose.choice(KINDS)
        self.count = choose.choice(COUNTS) if choose.random() < 0.98 else 500_000
        self.root = choose.random()
        self.limit = choose.choice([0.03, 5.0])
        self.launches = choose.randint(1, 3)


class Operation:
    """One rank's part in a collective, with its arrays."""

    def __init__(self, arrays, comm, step: Step, more: int = 0):
        n, rank, count, kind = comm.nranks, comm.rank, step.count + more, step.kind
        root = int(step.root * n)
        values = np.arange(1.0, n + 1) + step.number
        spread = kind in ("reduce_scatter", "all_to_all")
        gathered = kind in ("all_gather", "all_to_all")
        self.comm, self.kind, self.root = comm, kind, root
        self.send = arrays.make(count * n if spread else count, values[rank])
        self.recv = arrays.make(count * n if gathered else count, -1.0)
        if kind in ("all_reduce", "reduce_scatter"):
            self.wanted = values.sum()
        elif gathered:
            self.wanted = np.repeat(values, count)
        else:
            self.wanted = values[root if kind == "broadcast" else (rank - 1) % n]

    def call(self, **options):
        comm, n = self.comm, self.comm.nranks
        if self.kind == "ring":
            with ncclpy.group():
                comm.send(self.send, (comm.rank + 1) % n, **options)
                comm.recv(self.recv, (comm.rank - 1) % n, **options)
        elif self.kind == "broadcast":
            comm.broadcast(self.send, self.recv, root=self.root, **options)
        else:
            getattr(comm, self.kind)(self.send, self.recv, **options)

    def check(self):
        if not (self.recv == self.wanted).all():
            raise wrong_result(f"{self.kind} on {self.comm!r}: wanted {self.wanted}", self.recv)


class Rank:
    """One rank: its communicators, the operations that it must hold, and its outcome."""

    def __init__(self, program, rank):
        self.program, self.rank = program, rank
        self.comm = self.other = self.stream = None
        self.made = []  # all communicators, which must be ended
        self.held = []  # operations that a stream may still use
        self.outcome = None

    def born(self, comm):
        self.made.append(comm)
        return comm

    def birth(self):
        p = self.program
        if p.all_at_once:
            self.comm = p.family[self.rank]
        else:
            self.comm = self.born(
                ncclpy.Communicator.init(p.nranks, self.rank, p.uids[0], device=self.rank, **p.options)
            )
        self.comm.wait_ready(p.birth_limit)
        if p.second:
            self.other = self.born(
                ncclpy.Communicator.init(p.nranks, self.rank, p.uids[1], device=self.rank, **p.options)
            )
            self.other.wait_ready(p.birth_limit)
        p.note_birth()

    def run(self):
        try:
            self.run_to_its_end()
        except ncclpy.NcclError as late:
            # The thread waits by a stream: another rank's abort is raised in it after a handler has ended its wait.
            if not self.program.disturbed:
                raise
            self.outcome = type(late).__name__
            undisturbed(self.leave)

    def run_to_its_end(self):
        try:
            self.birth()
            for step in self.program.steps:
                if step.number == self.program.skips.get(self.rank):
                    continue
                self.step(step)
            self.close()
            self.outcome = "right"
        except WrongResult as error:
            self.outcome = "wrong"
            if self.program.processes > 1 and self.program.disturbed and error.is_of_an_abort:
                # Ranks that share only a unique id do not hear of an abort in another process.
                self.outcome = "NcclAborted"
            elif not self.program.skips:  # after a skip, a call may match another call of the others
                self.program.problems.append(f"rank {self.rank}: {error}")
        except BaseException as error:
            self.outcome = type(error).__name__
            if not is_an_end(error):
                self.program.problems.append(f"rank {self.rank}:\n{traceback.format_exc()}")
            elif not self.program.disturbed:
                self.program.problems.append(f"rank {self.rank}: nothing went wrong, but\n{traceback.format_exc()}")
        if self.outcome != "right":
            undisturbed(self.leave)

    def close(self):
        for comm in reversed(self.made):
            comm.close()

    def leave(self):
        """Abort this rank's communicators, then free its arrays, which its streams use until the aborts."""
        for comm in self.made:
            comm.abort()
        self.held.clear()

    def step(self, step):
        getattr(self, f"do_{step.style}")(step)

    def operation(self, step, comm=None):
        more = step.number == self.program.mismatches.get(self.rank)
        return Operation(self.program.arrays, self.comm if comm is None else comm, step, more)

    def do_plain(self, step):
        operation = self.operation(step)
        operation.call()
        operation.check()

    def do_group(self, step):
        operations = [self.operation(step), self.operation(step, self.other)]
        with ncclpy.group():
            for operation in operations:
                operation.call()
        for operation in operations:
            operation.check()

    def do_plan(self, step):
        plan, operation = ncclpy.Plan(), self.operation(step)
        with plan.record():
            operation.call()
        for _ in range(step.launches):
            plan.launch()
            operation.check()

    def do_stream(self, step):
        if self.stream is None:
            self.stream = ncclpy.Stream(self.rank)
        operation = self.operation(step)
        self.held.append(operation)  # until the stream is done, or the communicator has ended
        operation.call(stream=self.stream)
        self.stream.synchronize()
        self.held.clear()
        # An abort completes operations on a stream, which continues: the communicator tells whether they are valid.
        if self.comm.closed or self.comm.async_error() != ncclpy.Result.SUCCESS:
            self.comm.barrier()
            raise WrongResult(f"{self.comm!r} has ended, and a barrier says that all is well")
        operation.check()

    def do_limit(self, step):
        operation = self.operation(step)
        if self.program.endable and operation.kind != "ring":
            operation.call(timeout=step.limit if self.program.disturbed else CLEAN_PATIENCE)
        else:
            operation.call()
        operation.check()

    def do_child(self, step):
        child = self.born(self.comm.split(0, key=self.rank))
        child.wait_ready(self.program.birth_limit)
        operation = self.operation(step, child)
        operation.call()
        operation.check()
        child.close()
        self.made.remove(child)

    def do_register(self, step):
        operation = self.operation(step)
        registration = self.comm.register(operation.send)
        operation.call()
        operation.check()
        if step.launches > 1:
            registration.close()

    def do_window(self, step):
        operation = self.operation(step)
        window = self.comm.window(operation.send)
        operation.call()
        operation.check()
        if step.launches > 1:
            window.close()

    def do_put(self, step):
        """Put to the right neighbour many times and wait for the left one, in a group or one after the other."""
        comm, n, count = self.comm, self.comm.nranks, step.count
        memory = self.program.arrays.make(2 * count, float(comm.rank + step.number))
        window = comm.window(memory)
        with ncclpy.group() if step.launches > 2 else contextlib.nullcontext():
            for _ in range(PUTS):  # the peer may have ended
                comm.put_signal(memory[:count], window, (comm.rank + 1) % n, memory[:count].nbytes)
            comm.wait_signal((comm.rank - 1) % n, count=PUTS)
        if not (memory[count:] == (comm.rank - 1) % n + step.number).all():
            raise wrong_result(f"put on {comm!r}: wanted {(comm.rank - 1) % n + step.number}", memory[count:])
        if step.launches > 1:
            window.close()

    def do_barrier(self, step):
        self.comm.barrier()


class Alone(Rank):
    """All ranks in the main thread, in groups."""

    def run(self):
        self.born = self.made.append
        super().run()

    def birth(self):
        for comm in self.program.family:
            comm.wait_ready(self.program.birth_limit)
        self.made += self.program.family
        self.program.note_birth()

    def step(self, step):
        operations = [Operation(self.program.arrays, comm, step) for comm in self.program.family]
        skipped = step.number in self.program.skips.values()
        if step.style == "plan":
            plan = ncclpy.Plan()
            with plan.record():
                for operation in operations[skipped:]:
                    operation.call()
            plan.launch()
        else:
            with ncclpy.group():
                for operation in operations[skipped:]:
                    operation.call()
        for operation in operations:
            operation.check()

    def close(self):
        undisturbed(self.close_all)

    def close_all(self):
        closing = [threading.Thread(target=quietly, args=(comm.close,), daemon=True) for comm in self.made]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join(LIMIT)


class Program:
    """The program of one seed: the ranks of one process, and events."""

    def __init__(self, seed: int, arrays, process: int = 0, uids=None):
        choose = random.Random(seed)
        self.seed, self.arrays, self.process = seed, arrays, process
        self.processes = choose.choice([1, 1, 1, 1, 1, 1, 1, 2, 2, 3])
        self.nranks = choose.randint(max(2, self.processes), 4)
        self.options = choose.choice(
            [
                {},
                {"timeout": choose.choice([0.06, 0.1])},
                {"timeout": 20.0},
                {"abortable": True},
                {"config": ncclpy.Config(blocking=False)},
                {"config": ncclpy.Config(blocking=False), "timeout": 0.1},
            ]
        )
        self.all_at_once = self.processes == 1 and choose.random() < 0.4
        self.alone = self.all_at_once and choose.random() < 0.4
        self.second = choose.random() < 0.3
        self.steps = [Step(choose, number) for number in range(choose.randint(2, 6))]
        for step in self.steps:
            if (step.style == "group" and not self.second) or (step.style in ("window", "put") and self.processes > 1):
                step.style = "plain"  # arrays cannot be shared with other processes
        self.events = []
        self.skips, self.mismatches, self.faults, self.victim = {}, {}, None, None
        for _ in range(choose.choice([0, 1, 1, 1, 2, 2, 3])):
            self._add_event(choose)
        if self.processes > 1 and choose.random() < 0.4:
            self.victim = choose.randrange(1, self.processes)
            self.events.append((choose.random() * 0.02, "kill", self.victim, 0))
        self.events.sort()
        self.disturbed = bool(self.events or self.skips or self.mismatches or self.faults)
        if self.faults and self.options in ({"abortable": True}, {"timeout": 20.0}):
            self.options = {"timeout": 0.3}  # only its deadline ends an init that hangs by a fault
        if not self.disturbed and self.options.get("timeout", 20) < 20:
            self.options["timeout"] = 20.0  # long, for a busy machine
        self.birth_limit = 5.0 if self.disturbed else CLEAN_PATIENCE  # long too, for processes that start late
        self.endable = bool({"timeout", "abortable", "config"} & set(self.options))
        self.ranks_here = [r for r in range(self.nranks) if r % self.processes == process]
        self.uids = [ncclpy.get_unique_id() for _ in range(2 if self.second else 1)] if uids is None else uids
        self.problems: list[str] = []
        self.over, self.is_born = threading.Event(), threading.Event()
        self._births, self._lock = 0, threading.Lock()
        self.family: list = []
        self.helpers: list[threading.Thread] = []
        self.signals = 0

    def _add_event(self, choose):
        kind, moment = choose.choice(EVENTS), choose.random() ** 2 * 0.03
        process, rank = choose.randrange(self.processes), choose.randrange(self.nranks)
        if kind == "skip":
            self.skips[rank] = choose.randrange(len(self.steps))
        elif kind == "mismatch":
            self.mismatches[rank] = choose.randrange(len(self.steps))
        elif kind == "faults":
            often, calls = choose.choice([0.01, 0.05, 0.2]), choose.sample(CALLS, 4)
            if "timeout" not in self.options:
                calls = [call for call in calls if call not in ("CommSplit", "GroupEnd")] or ["AllReduce"]
            rules = [f"random seed={self.seed} p={often} call={call} do={FAULTS}" for call in calls]
            self.faults = "; ".join(rules)
        else:
            self.events.append((moment, kind, process, rank))

    def note_birth(self):
        with self._lock:
            self._births += 1
            if self._births == (1 if self.alone else len(self.ranks_here)):
                self.is_born.set()

    def run(self):
        """Run this process's ranks in the main thread and others; return their outcomes."""
        self.ranks = [Alone(self, 0)] if self.alone else [Rank(self, rank) for rank in self.ranks_here]
        threads = [threading.Thread(target=rank.run, daemon=True, name="rank") for rank in self.ranks[1:]]
        oversees = threading.Thread(target=self.oversee, args=(threads,), daemon=True, name="oversees")
        faults = ncclpy.faults(self.faults) if self.faults else contextlib.nullcontext()
        try:
            undisturbed(self.begin)
        except ncclpy.NcclError as error:
            if not self.disturbed:
                self.problems.append(f"nothing goes wrong, but {error!r}")
            return [type(error).__name__]
        with faults:
            undisturbed(lambda: [thread.start() for thread in threads])
            with contextlib.suppress(KeyboardInterrupt, Late):  # a signal while the inner block ends
                with contextlib.suppress(KeyboardInterrupt, Late):  # or before the rank begins, or after its end
                    oversees.start()
                    listen()
                    self.ranks[0].run()
                undisturbed(be_deaf)
            undisturbed(be_deaf)
            self.end(threads, oversees)
        return [rank.outcome for rank in self.ranks]

    def begin(self):
        if self.all_at_once and not self.family:
            self.family = ncclpy.Communicator.init_all(range(self.nranks), **self.options)
            if not self.alone:
                for rank in self.ranks:
                    rank.made.append(self.family[rank.rank])

    def everything(self):
        return [comm for rank in self.ranks for comm in list(rank.made)] + self.family

    def oversee(self, threads):
        """Let the events happen; later abort stuck communicators."""
        if self.options.get("timeout", 20) == 20:  # nothing could end the init of the others
            self.is_born.wait(5)
        happen_in_time(self, [event for event in self.events if event[2] == self.process])
        if self.over.wait(PATIENCE if self.disturbed else CLEAN_PATIENCE):
            return
        while not self.over.wait(0.02):
            for comm in self.everything():
                quietly(comm.abort)

    def happen(self, kind, rank):
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind in SIGNALS:
            send_signal(self, kind)
        else:
            comms = self.everything()
            if comms:
                comm = comms[rank % len(comms)]
                target = comm.close if kind == "close" else comm.abort
                helper = threading.Thread(target=quietly, args=(target,), daemon=True, name=kind)
                self.helpers.append(helper)
                helper.start()

    def end(self, threads, oversees):
        """Wait until all threads have ended, and abort all communicators."""
        join_in_time(self, threads, LIMIT if self.disturbed else CLEAN_PATIENCE + LIMIT)
        self.over.set()
        join_in_time(self, [oversees], LIMIT)
        for comm in self.everything():
            comm.abort()
        join_in_time(self, self.helpers, LIMIT)
        for rank in self.ranks:
            rank.held.clear()
            if rank.stream is not None:
                rank.stream.synchronize(timeout=5)
                rank.stream.close()
                rank.stream = None

    def forget(self):
        self.ranks = self.family = self.helpers = []


class Stuck(BaseException):
    """A thread does not end: this process cannot be used any more."""


def happen_in_time(program, events):
    """Let events happen, each at its moment, until the program is over."""
    began = time.monotonic()
    for moment, kind, _, rank in events:
        if program.over.wait(max(0.0, began + moment - time.monotonic())):
            return
        program.happen(kind, rank)


def send_signal(program, kind):
    if kind != "hint" and program.signals:
        return  # a second signal would interrupt the clean-up after the first
    program.signals += kind != "hint"
    os.kill(os.getpid(), SIGNALS[kind])


def join_in_time(program, threads, seconds):
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    frames = sys._current_frames()
    for thread in threads:
        if thread.is_alive():
            where = "".join(traceback.format_stack(frames.get(thread.ident)))
            program.problems.append(f"still runs: {thread.name}\n{where}")
            raise Stuck


def warm_up(arrays):
    """Open everything that a process opens only once."""
    comms = ncclpy.Communicator.init_all(range(4), timeout=20.0)
    step = Step(random.Random(0), 0)
    with ncclpy.group():
        for comm in comms:
            Operation(arrays, comm, step).call()
    for comm in comms:
        comm.abort()


def make(seed, arrays, process=0, uids=None):
    """Return the program of a seed, or one process's part in it."""
    return Program(seed, arrays, process, uids)
