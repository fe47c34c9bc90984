"""Random programs under random faults, many times: `python fault_runs.py SEED RUNS`.

Ranks are threads. Before the deadline each rank must either finish its program with right results or have an error; a
wrong result must be explained by a fault that has fired. Prints one JSON object for each run; a failing run is
repeated with its own seed and one run.
"""

import ctypes
import json
import random
import sys
import threading
import time

import leak_check
import numpy as np
from nccl_calls import IN_PROGRESS, SUM, Config, Nccl, NcclError

from ncclpy.core.runtime.search import host_engine_path

FLOAT32 = 7
PATIENCE = 0.15  # after a fault has fired, ranks stuck for this long are aborted
DEADLINE = 15.0
ACTIONS = "error,error:ncclRemoteError,busy:3,busy:5ms,delay:3ms,hang,hang:20ms,corrupt"

nccl = Nccl(host_engine_path())
nccl.library.ncclpyHostSetFaults.argtypes = [ctypes.c_char_p]
nccl.library.ncclpyHostFaultsFired.restype = ctypes.c_char_p


class WrongResult(Exception):
    """A wrong result; states whether the host engine wrote it because another rank was aborted."""

    def __init__(self, text, values):
        super().__init__(text)
        self.is_of_an_abort = bool((values.view(np.uint8) == 0x5A).any())


class Rank:
    def __init__(self, rank, nranks, seed, uid, blocking):
        self.rank, self.nranks, self.uid = rank, nranks, uid
        self.random = random.Random(seed)  # the same in every rank
        self.config = Config(blocking=blocking)
        self.comm, self.child = ctypes.c_void_p(), ctypes.c_void_p()
        self.kept = []  # buffers must outlive what may still run on the stream
        self.outcome = None
        self.initialised = False

    def run(self):
        try:
            nccl.driver.use(self.rank)
            self.stream = nccl.driver.stream(1)
            nccl.init_into(self.comm, self.nranks, self.uid, self.rank, self.config)
            self.ready()
            self.initialised = True
            for _ in range(6):
                self.step()
            nccl.ncclCommFinalize(self.comm)
            self.ready()
            self.outcome = "right"
        except NcclError as error:
            self.outcome = f"{error.code} {error.text}"
        except WrongResult as error:
            # NCCL does not tell other ranks of an abort.
            self.outcome = "beside an abort" if error.is_of_an_abort else f"wrong {error}"

    def ready(self):
        while (code := nccl.async_error(self.comm)) == IN_PROGRESS:
            time.sleep(0.0002)
        if code:
            raise NcclError("ncclCommGetAsyncError", code, nccl.last_error(self.comm))

    def step(self):
        kind, count = self.random.randrange(6), self.random.choice([1, 700, 40_000])
        n = self.nranks
        x, y = np.full(count, self.rank + 1, np.float32), np.zeros(count * n, np.float32)
        self.kept += [x, y]
        send, recv = x.ctypes.data, y.ctypes.data
        if kind == 0:
            nccl.ncclAllReduce(send, recv, count, FLOAT32, SUM, self.comm, self.stream)
            want = np.full(count, n * (n + 1) / 2)
        elif kind == 1:
            nccl.ncclAllGather(send, recv, count, FLOAT32, self.comm, self.stream)
            want = np.repeat(np.arange(1, n + 1), count)
        elif kind == 2:
            root = self.random.randrange(n)
            nccl.ncclBroadcast(send, recv, count, FLOAT32, root, self.comm, self.stream)
            want = np.full(count, root + 1)
        elif kind == 3:
            nccl.ncclGroupStart()
            try:
                nccl.ncclSend(send, count, FLOAT32, (self.rank + 1) % n, self.comm, self.stream)
                nccl.ncclRecv(recv, count, FLOAT32, (self.rank - 1) % n, self.comm, self.stream)
            except NcclError:
                nccl.library.ncclGroupEnd()
                raise
            nccl.ncclGroupEnd()
            want = np.full(count, (self.rank - 1) % n + 1)
        elif kind == 4:
            nccl.ncclCommSplit(self.comm, 0, -self.rank, ctypes.byref(self.child), None)
            self.ready()
            if self.child:
                nccl.ncclCommDestroy(self.child)
                self.child.value = None
            return
        else:
            handle = ctypes.c_void_p()
            nccl.ncclCommRegister(self.comm, send, x.nbytes, ctypes.byref(handle))
            nccl.ncclCommDeregister(self.comm, handle)
            return
        self.ready()
        nccl.driver.cuStreamSynchronize(self.stream)
        self.ready()
        if not (y[: len(want)] == want).all():
            raise WrongResult(f"{kind} with {count} elements", y[: len(want)])


def on_threads(functions):
    threads = [threading.Thread(target=function, daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    return threads


def fired():
    return nccl.library.ncclpyHostFaultsFired().decode().splitlines()


def run(seed):
    choose = random.Random(seed)
    nranks, blocking = choose.randint(2, 4), choose.randint(0, 1)
    plan = f"random seed={seed} p={choose.choice([0.003, 0.01, 0.05])} do={ACTIONS}"
    uid = nccl.unique_id()
    assert nccl.library.ncclpyHostSetFaults(plan.encode()) == 0
    ranks = [Rank(rank, nranks, seed, uid, blocking) for rank in range(nranks)]
    begin = quiet_since = time.monotonic()
    threads = on_threads([rank.run for rank in ranks])
    problems = []
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.001)
        now = time.monotonic()
        if not fired():
            quiet_since = now
        if now - quiet_since > PATIENCE or now - begin > DEADLINE:
            break
    happened = fired()
    # Faults end before the closing, so that everything can be closed; hanging calls continue until the abort.
    nccl.library.ncclpyHostSetFaults(None)
    aborts = on_threads(
        [lambda c=c: nccl.library.ncclCommAbort(c) for rank in ranks for c in (rank.comm, rank.child) if c]
    )
    for what, started in (("abort", aborts), ("rank", threads)):
        for number, thread in enumerate(started):
            thread.join(max(0.01, begin + DEADLINE - time.monotonic()))
            if thread.is_alive():
                problems.append(f"{what} {number} still runs {DEADLINE} s after the start")
    for rank in ranks:
        if rank.comm and not problems:  # the initialisation left it behind after the abort of the others
            nccl.library.ncclCommAbort(rank.comm)
        if rank.outcome is None:
            problems.append(f"rank {rank.rank} has no answer")
        elif rank.outcome.startswith("wrong") and not any("corrupt" in line for line in happened):
            problems.append(f"rank {rank.rank}: {rank.outcome}")
        elif rank.outcome != "right" and not happened:
            problems.append(f"rank {rank.rank} without a fault: {rank.outcome}")
    if not problems:
        for rank in ranks:
            nccl.driver.cuStreamSynchronize(rank.stream)
            nccl.driver.cuStreamDestroy_v2(rank.stream)
    return {
        "seed": seed,
        "plan": plan,
        "fired": happened,
        "outcomes": [r.outcome for r in ranks],
        "problems": problems,
    }


def left_over():
    return {
        "threads": leak_check.threads(),
        "descriptors": leak_check.descriptors(),
        "shm": leak_check.shared_memory(),
    }


if __name__ == "__main__":
    first, runs = int(sys.argv[1]), int(sys.argv[2])
    # Descriptors that the process opens once.
    alone = Rank(0, 1, 0, nccl.unique_id(), blocking=0)
    alone.run()
    assert alone.outcome == "right", alone.outcome
    nccl.ncclCommAbort(alone.comm)
    nccl.driver.cuStreamDestroy_v2(alone.stream)
    end = time.monotonic() + 5
    while any(name.startswith("ncclpy") for name in leak_check.threads()) and time.monotonic() < end:
        time.sleep(0.01)  # the stream's thread ends later
    before = left_over()
    for number in range(runs):
        print(json.dumps(run(first + number)), flush=True)
    end = time.monotonic() + 5
    while (after := left_over()) != before and time.monotonic() < end:
        time.sleep(0.05)
    print(json.dumps({"before": before, "after": after}), flush=True)
