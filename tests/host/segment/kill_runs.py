"""Kill a rank at a random moment of a random program, many times: `python kill_runs.py SEED RUNS`.

Prints one JSON object for each run. It forks its ranks, so it must not use the engine itself; a failing run is
repeated with its own seed and one run.
"""

import ctypes
import faulthandler
import json
import os
import random
import select
import signal
import sys
import time
import traceback

import numpy as np
from nccl_calls import REMOTE, SUM, Config, Nccl, NcclError

from ncclpy.core.runtime.search import host_engine_path

FLOAT32, INT64 = 7, 4
DEADLINE = 10.0


def descriptors():
    return len(os.listdir("/proc/self/fd"))


class Rank:
    """A rank in a process of its own: works until something fails, then reports the failure."""

    def __init__(self, rank, nranks, seed, pipe):
        self.rank, self.nranks, self.pipe = rank, nranks, pipe
        self.random = random.Random(seed)  # the same in every rank: all make the same calls
        self.nccl = Nccl(host_engine_path())
        self.nccl.driver.use(rank)
        self.stream = self.nccl.driver.stream(1)
        self.child = ctypes.c_void_p()

    def send(self, message):
        os.write(self.pipe[1], json.dumps(message).encode() + b"\n")

    def live(self):
        if self.rank == 0:
            self.send({"id": self.nccl.unique_id().hex()})
        uid = bytes.fromhex(os.read(self.pipe[0], 256).decode())
        before = descriptors()
        config = Config(blocking=self.random.choice([0, 1]))
        comm = ctypes.c_void_p()
        self.nccl.init_into(comm, self.nranks, uid, self.rank, config)
        while self.nccl.async_error(comm) == 7:
            time.sleep(0.0002)
        self.send({"ready": True})
        try:
            while True:
                self.step(comm)
        except NcclError as error:
            answer = {"code": error.code, "text": error.text, "at": time.monotonic()}
        answer["async"], answer["last"] = self.nccl.async_error(comm), self.nccl.last_error(comm)
        self.nccl.ncclCommAbort(comm)
        self.nccl.driver.cuStreamSynchronize(self.stream)
        # The watching thread keeps one descriptor and closes the others later; the table of ids keeps another one.
        end = time.monotonic() + 2
        while descriptors() > before + 2 and time.monotonic() < end:
            self.drop_child()  # a child that was made late
            time.sleep(0.001)
        answer["descriptors"] = descriptors() - before
        self.send(answer)

    def step(self, comm):
        nccl, kind = self.nccl, self.random.randrange(5)
        count = self.random.choice([1, 300, 5000, 200_000, 1_200_000])
        x, y = np.ones(count * self.nranks, np.float32), np.empty(count * self.nranks, np.float32)
        self.buffers = x, y  # they must outlive what the stream does with them after an error
        if kind == 0:
            nccl.ncclAllReduce(x.ctypes.data, y.ctypes.data, count, FLOAT32, SUM, comm, self.stream)
        elif kind == 1:
            nccl.ncclAllGather(x.ctypes.data, y.ctypes.data, count, FLOAT32, comm, self.stream)
        elif kind == 2:
            nccl.ncclAlltoAll(x.ctypes.data, y.ctypes.data, count, FLOAT32, comm, self.stream)
        elif kind == 3:
            nccl.ncclGroupStart()
            nccl.ncclSend(x.ctypes.data, count, FLOAT32, (self.rank + 1) % self.nranks, comm, self.stream)
            nccl.ncclRecv(y.ctypes.data, count, FLOAT32, (self.rank - 1) % self.nranks, comm, self.stream)
            nccl.ncclGroupEnd()
        else:
            self.split(comm)
        self.poll(comm)
        while not nccl.driver.ready("cuStreamQuery", self.stream):  # a dead rank's operation never completes
            self.poll(comm)
            time.sleep(0.0001)
        self.poll(comm)

    def split(self, comm):
        self.child = ctypes.c_void_p()
        self.nccl.ncclCommSplit(comm, self.rank % 2, 0, ctypes.byref(self.child), None)
        self.poll(comm)
        self.drop_child()

    def drop_child(self):
        if self.child:
            self.nccl.ncclCommAbort(self.child)
            self.child.value = None

    def poll(self, comm):
        while (code := self.nccl.async_error(comm)) == 7:
            time.sleep(0.0001)
        if code:
            raise NcclError("ncclCommGetAsyncError", code, self.nccl.last_error(comm))


def run(seed):
    choose = random.Random(seed)
    nranks = choose.randint(2, 6)
    victim = choose.randrange(nranks)
    children = []
    for rank in range(nranks):
        down, up = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            faulthandler.enable()
            try:
                Rank(rank, nranks, seed, (down[0], up[1])).live()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(down[0])
        os.close(up[1])
        children.append({"pid": pid, "down": down[1], "up": up[0], "said": b"", "answers": []})
    end = time.monotonic() + DEADLINE

    def hear(wanted, ranks):
        """Read what the ranks report until each has reported `wanted`."""
        missing = {rank for rank in ranks if not any(wanted in said for said in children[rank]["answers"])}
        while missing and time.monotonic() < end:
            pipes = {children[rank]["up"]: rank for rank in missing}
            for pipe in select.select(list(pipes), [], [], 0.1)[0]:
                child = children[pipes[pipe]]
                got = os.read(pipe, 65536)
                child["said"] += got
                *lines, child["said"] = child["said"].split(b"\n")
                child["answers"] += [json.loads(line) for line in lines]
                if not got or any(wanted in said for said in child["answers"]):
                    missing.discard(pipes[pipe])
        return [next((said for said in children[rank]["answers"] if wanted in said), None) for rank in ranks]

    problems = []
    uid = hear("id", [0])[0]["id"]
    for child in children:
        os.write(child["down"], uid.encode())
    if None in hear("ready", range(nranks)):
        problems.append("not all ranks came out of the initialisation")
    time.sleep(choose.random() * 0.02)
    os.kill(children[victim]["pid"], signal.SIGKILL)
    killed = time.monotonic()
    survivors = [rank for rank in range(nranks) if rank != victim]
    slowest = 0.0
    for rank, answer in zip(survivors, hear("code", survivors), strict=True):
        if answer is None:
            problems.append(f"rank {rank} did not notice")
            continue
        slowest = max(slowest, answer["at"] - killed)
        named = f"rank {victim} of {nranks} is dead: process {children[victim]['pid']}"
        if answer["code"] != REMOTE or answer["async"] != REMOTE:
            problems.append(f"rank {rank}: {answer}")
        elif named not in answer["text"] or named not in answer["last"]:
            problems.append(f"rank {rank} does not say {named!r}: {answer}")
        if answer["descriptors"] > 2:
            problems.append(f"rank {rank} keeps {answer['descriptors']} descriptors")
    for child in children:
        if problems:
            os.kill(child["pid"], signal.SIGKILL)
        status = os.waitpid(child["pid"], 0)[1]
        if child is not children[victim] and status != signal.SIGKILL * bool(problems):
            problems.append(f"process {child['pid']} ended with status {status}")
        os.close(child["down"])
        os.close(child["up"])
    return {"seed": seed, "ranks": nranks, "victim": victim, "noticed_ms": slowest * 1e3, "problems": problems}


if __name__ == "__main__":
    first, runs = int(sys.argv[1]), int(sys.argv[2])
    for number in range(runs):
        print(json.dumps(run(first + number)), flush=True)
