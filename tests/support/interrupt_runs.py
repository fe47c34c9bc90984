"""Random programs with waits that end early, many times: ``python interrupt_runs.py --seeds A-B [--jobs N]``.

A worker runs many seeds, one after the other, which is fast and shows what a seed leaves behind. A program with
several processes has peers, which stay until a seed kills them. The supervisor names the seed in which a worker hangs
or dies, ends the worker, and continues with the next seed in a new one. Prints one JSON object for each seed that
fails (for all with ``--verbose``), and one with the sums; ``--seeds SEED`` repeats a seed.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import gc
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
import warnings

HANGS = 40.0  # seconds without output of a worker
MET = 2  # descriptors with which a process watches the processes that it has met, and keeps its ids
POOLED = 12  # threads of ncclpy that may stay for reuse


class Levels:
    """The resources of a process between seeds."""

    def __init__(self, peers):
        self.peers = peers
        self.first = leak_check.settle(self.look, lambda seen: not seen["pooled"] and not seen["ours"], 3.0)

    def look(self):
        from ncclpy.core.runtime.stream import in_flight

        python, native = leak_check.python_threads(), leak_check.threads(leak_check.LASTING_MANAGER)
        return {
            "descriptors": leak_check.descriptors() - 2 * len(self.peers),
            "mappings": leak_check.mappings(),
            "threads": [name for name in python if not name.startswith(("ncclpy", "Dummy"))],  # also unnamed new ones
            "ours": [name for name in python if name.startswith("ncclpy")],
            "pooled": [name for name in native if name.startswith("ncclpy")],
            "in flight": in_flight(),
            "alive": arrays.alive(),
        }

    def look_again(self):
        gc.collect()  # an unreferenced error may hold frames, and these the arrays
        return self.look()

    def problems(self):
        """Return what the last seed has left behind after a time for settling."""

        def settled(seen):
            return (
                seen["descriptors"] <= self.first["descriptors"] + MET
                and seen["mappings"] <= self.first["mappings"]
                and seen["threads"] == self.first["threads"]
                and len(seen["ours"]) + len(seen["pooled"]) <= POOLED
                and not seen["in flight"]
                and not seen["alive"]
            )

        seen = leak_check.settle(self.look, settled, 0.02)
        if not settled(seen):
            seen = leak_check.settle(self.look_again, settled, 2.0)
        if settled(seen):
            return []
        later = leak_check.settle(self.look_again, settled, 5.0)  # tells late ends from leaks
        return [f"left behind: {seen}, before: {self.first}, 5 s later {'nothing' if settled(later) else later}"]


class Peer:
    """Another process, which runs its ranks of a worker's programs."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--peer"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, **what):
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def answer(self, timeout):
        """Return the answer of the peer; None if it has died."""
        if not select.select([self.process.stdout], [], [], timeout)[0]:
            return {"problems": [f"peer {self.process.pid} says nothing for {timeout} s"], "outcomes": []}
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def end(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


def after(program, caught, levels):
    """Drop a program, and return everything that was wrong with it."""
    problems = program.problems
    program.forget()
    for warning in caught:
        comm = warning.source
        if issubclass(warning.category, ResourceWarning) and program.signals and comm is not None:
            # The handler has raised between the end of init and the assignment of the communicator to its name.
            comm.abort() if hasattr(comm, "abort") else comm.close()
        else:
            problems.append(f"{warning.category.__name__}: {warning.message}")
        comm = None
    warning = None
    caught.clear()
    problems += levels.problems()
    problems += arrays.touched()
    return problems


def make(seed):
    """Return the program of a seed; one in eight has a Manager."""
    return managers.ManagerProgram(seed, arrays) if seed % 8 == 7 else programs.make(seed, arrays)


def run(seed, levels, peers, caught):
    begun = time.monotonic()
    program = make(seed)
    while len(peers) < program.processes - 1:
        peers.append(Peer())
    helping = peers[: program.processes - 1]
    for number, peer in enumerate(helping, 1):
        peer.ask(seed=seed, process=number, uids=[bytes(uid).hex() for uid in program.uids])
    outcomes, problems, stuck = [], [], False
    try:
        outcomes += program.run()
    except programs.Stuck:
        stuck = True
    for number, peer in enumerate(helping, 1):
        answer = peer.answer(20)
        if answer is None:
            peer.end()
            peers.remove(peer)
            outcomes.append("killed")
            if number != program.victim:
                problems.append(f"process {number} has died: {peer.process.returncode}")
        else:
            outcomes += answer["outcomes"]
            problems += [f"process {number}: {each}" for each in answer["problems"]]
    events = [list(event) for event in program.events]
    problems += after(program, caught, levels) if not stuck else program.problems
    return {
        "seed": seed, "outcomes": outcomes, "problems": problems, "seconds": round(time.monotonic() - begun, 3),
        "events": events, "stuck": stuck,
    }  # fmt: skip


def prepare():
    """Set up a process that runs programs; return the list of warnings caught from now on."""
    global arrays, leak_check, managers, programs
    import interrupt_managers as managers
    import interrupt_programs as programs
    import leak_check
    import poisoned_arrays

    arrays = poisoned_arrays.MortalArrays(1.0 if "asan" in os.environ.get("LD_PRELOAD", "") else 0.2)
    faulthandler.enable()
    sys.setswitchinterval(1e-4)
    programs.be_deaf()
    signal.signal(signal.SIGUSR1, lambda *_: None)
    sys.unraisablehook = lambda told: None if isinstance(told.exc_value, programs.ENDS) else caught_unraisable(told)
    caught = warnings.catch_warnings(record=True).__enter__()
    warnings.simplefilter("always")
    programs.warm_up(arrays)
    managers.warm_up(arrays)
    return caught


def caught_unraisable(told):
    warnings.warn(f"{told.err_msg}: {told.exc_value!r} in {told.object!r}", RuntimeWarning, stacklevel=1)


def work(first, last):
    """Run seeds; print the begin and the result of each."""
    caught, peers = prepare(), []
    levels = Levels(peers)
    for seed in range(first, last + 1):
        print(json.dumps({"begin": seed}), flush=True)
        done = run(seed, levels, peers, caught)
        print(json.dumps(done), flush=True)
        if done["problems"]:
            break  # later seeds must not get the blame
    for peer in peers:
        peer.end()
    sys.stdout.flush()
    os._exit(0)


def be_peer():
    import ncclpy

    caught = prepare()
    levels = Levels([])
    for line in sys.stdin:
        asked = json.loads(line)
        uids = [ncclpy.UniqueId.from_bytes(bytes.fromhex(uid)) for uid in asked["uids"]]
        program = programs.make(asked["seed"], arrays, asked["process"], uids)
        try:
            outcomes = program.run()
        except programs.Stuck:
            print(json.dumps({"problems": program.problems, "outcomes": []}), flush=True)
            os._exit(0)
        print(json.dumps({"problems": after(program, caught, levels), "outcomes": outcomes}), flush=True)
    os._exit(0)


class Worker:
    """The supervisor's side of a process that runs seeds."""

    def __init__(self, seeds):
        self.seeds = seeds
        self.now = None
        self.errors = open(os.memfd_create("errors"), "w+")
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--work", f"{seeds[0]}-{seeds[-1]}"],
            stdout=subprocess.PIPE, stderr=self.errors, text=True, start_new_session=True,
        )  # fmt: skip

    def results(self):
        """Yield the results of the seeds; a seed that hangs or dies is a failure and ends the worker."""
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(lines,), daemon=True).start()
        while True:
            try:
                line = lines.get(timeout=HANGS)
            except queue.Empty:
                self.process.send_signal(signal.SIGABRT)
                time.sleep(1)
                yield self._failed(f"no word for {HANGS} s")
                return
            if not line:
                if self.now is not None or self.process.wait() != 0:
                    yield self._failed(f"died: {self.process.wait()}")
                return
            told = json.loads(line)
            self.now = told.get("begin")
            if self.now is None:
                yield told

    def _read(self, lines):
        while line := self.process.stdout.readline():
            lines.put(line)
        lines.put("")

    def _failed(self, why):
        self.errors.seek(0)
        return {"seed": self.seeds[0] if self.now is None else self.now, "outcomes": [], "seconds": 0,
                "problems": [why, self.errors.read()[-6000:]]}  # fmt: skip

    def end(self):
        try:
            os.killpg(self.process.pid, signal.SIGKILL)  # its session: the worker and its peers
        except ProcessLookupError:
            pass
        self.process.wait()
        self.errors.close()


def supervise(first, last, jobs, until, verbose):
    """Run all seeds, `jobs` at a time, and return the sums."""
    todo = collections.deque(range(first, last + 1))
    lock, failed, outcomes, ran = threading.Lock(), [], collections.Counter(), 0
    slowest = (0.0, first)
    end = time.monotonic() + until

    def one():
        nonlocal ran, slowest
        while todo and time.monotonic() < end:
            with lock:
                seeds = [todo.popleft() for _ in range(min(50, len(todo)))]
            while seeds:
                worker = Worker(seeds)
                for result in worker.results():
                    with lock:
                        ran += 1
                        outcomes.update(result["outcomes"])
                        slowest = max(slowest, (result["seconds"], result["seed"]))
                        if result["problems"]:
                            failed.append(result["seed"])
                        if verbose or result["problems"]:
                            print(json.dumps(result), flush=True)
                    seeds = [seed for seed in seeds if seed > result["seed"]]
                worker.end()

    threads = [threading.Thread(target=one) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"ran": ran, "failed": sorted(failed), "outcomes": outcomes, "slowest": slowest}


def interval(text):
    first, _, last = text.partition("-")
    return int(first), int(last or first)


if __name__ == "__main__":
    os.environ.setdefault("NCCLPY_LIBRARY", "host")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=interval, default=(0, 299))
    parser.add_argument("--jobs", type=int, default=4, help="workers at a time: they wait most of the time")
    parser.add_argument("--until", type=float, default=1e9, help="seconds after which no more seeds are begun")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--work", type=interval, help=argparse.SUPPRESS)
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        be_peer()
    elif options.work:
        work(*options.work)
    else:
        begun = time.monotonic()
        sums = supervise(*options.seeds, options.jobs, options.until, options.verbose)
        print(json.dumps({**sums, "seconds": round(time.monotonic() - begun, 1)}), flush=True)
        sys.exit(bool(sums["failed"]))
