"""Random programs of segments and communicators, compared with a model of what must be registered at each step.

    python segment_fuzz.py SEED RUNS

It ends with an error at the first seed that fails. It prints how often memory was freed that an operation still used,
and how often that was memory of an allocator to which hooks are attached.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch_stand_in
from leak_check import is_allocated, is_mapped

import ncclpy
import testing
from ncclpy import memory
from ncclpy.interop.torch import hooks as torch_hooks
from ncclpy.memory import registry as allocator

COUNT = 64
STEPS = 60
ODD = 4097  # bytes of each allocation in `storm`, which the model does not know


class CommunicatorSet:
    """The communicators of both devices, and a stream on each."""

    def __init__(self, comms):
        self.comms = comms
        self.children = []
        self.streams = [ncclpy.Stream(comm.device) for comm in comms]
        self.expected = [set(), set()]  # pointers of registered segments
        self.early = None  # arrays of an operation that rank 0 has begun and rank 1 has not

    def reduce(self, arrays, single=None):
        """Reduce on all ranks, or on one alone."""
        if single is not None:
            self.comms[single].all_reduce(arrays[single], stream=self.streams[single])
            return
        with ncclpy.group():
            for comm, array, stream in zip(self.comms, arrays, self.streams, strict=True):
                comm.all_reduce(array, stream=stream)

    def family(self):
        return [self, *(each for child in self.children for each in child.family())]

    def settle(self):
        if self.early is not None:
            self.reduce(self.early, 1)
            self.early = None
        for stream in self.streams:
            stream.synchronize(timeout=20)


class Program:
    def __init__(self, seed, torch):
        self.torch = torch
        self.hooks = None
        self.torchs = [{}, {}]  # per device: buffers over segments of torch, by address
        self.hooked = 0
        self.stormy = False
        self.random = random.Random(seed)
        self.registry = memory.SegmentRegistry.default()
        self.cliques = []
        self.arrays = [[], []]  # per device: buffers over memory of `memory.alloc`
        self.foreign = [{}, {}]
        self.did = []
        self.in_use = 0

    def run(self):
        assert self.registry.drain()
        before = self.registry.counters()
        moves = [self.make, self.split, self.close, self.abort, self.allocate, self.allocate, self.free, self.free]
        moves += [
            self.operate,
            self.operate,
            self.operate,
            self.begin,
            self.begin,
            self.begin,
            self.come,
            self.enlist,
            self.dismiss,
            self.drain,
            self.storm,
            self.attach,
            self.torch_allocates,
            self.torch_allocates,
            self.torch_frees,
            self.torch_frees,
        ]
        self.make()
        try:
            for _ in range(STEPS):
                move = self.random.choice(moves)
                self.did.append(move.__name__)
                move()
                self.check()
        finally:
            while self.cliques:
                self.end(self.cliques[0])
        if self.hooks is not None:
            self.hooks.close()
        for device in (0, 1):
            for pointer in self.torchs[device]:
                assert self.torch.free(pointer) is None
            for pointer in list(self.foreign[device]):
                self.registry.remove(pointer)
        pointers = [buffer.pointer for buffers in self.arrays for buffer in buffers]
        self.arrays = None
        gc.collect()
        assert self.registry.drain(20), self.registry.counters()
        after = self.registry.counters()
        for name in ("segments", "leaving", "registrations", "not_freed"):
            assert after[name] == before[name], (name, before, after)
        assert after["registered"] - before["registered"] >= after["deregistered"] - before["deregistered"]
        left = [pointer for pointer in pointers if is_allocated(pointer)]
        assert not left, left

    def check(self):
        for clique in self.cliques:
            assert not any(comm.closed for comm in clique.comms), self.did
            for comm, expected in zip(clique.comms, clique.expected, strict=True):
                got = {pointer for pointer, nbytes, _ in self.registry.registered(comm) if nbytes != ODD}
                assert got == expected, (self.did, comm, got, expected)

    # The steps of a program.

    def pick(self):
        return self.random.choice(self.cliques) if self.cliques else None

    def live(self, device):
        torchs = set() if self.hooks is None else set(self.torchs[device])
        return {buffer.pointer for buffer in self.arrays[device]} | set(self.foreign[device]) | torchs

    def called(self, clique, ranks=(0, 1)):
        """Note a call: it has registered everything that is there."""
        for rank in ranks:
            clique.expected[rank] |= self.live(rank)

    def settle(self, clique):
        if clique.early is not None:
            self.called(clique, (1,))
        clique.settle()

    def make(self):
        if len(self.cliques) < 3:
            blocking = self.random.random() < 0.8
            config = None if blocking else ncclpy.Config(blocking=False)
            self.cliques.append(CommunicatorSet(ncclpy.Communicator.init_all([0, 1], config=config)))

    def split(self):
        clique = self.pick()
        if clique is None or clique.early is not None or len(self.cliques) > 3:
            return
        with ncclpy.group():
            children = [comm.split(0) for comm in clique.comms]
        for child in children:
            child.wait_ready(timeout=20)
        self.called(clique)
        self.cliques.append(CommunicatorSet(children))
        clique.children.append(self.cliques[-1])

    def end(self, clique):
        """Close a clique, and the cliques that were split from it."""
        for each in clique.family():
            if each in self.cliques:
                each.settle()
        testing.close_all(clique.comms)
        self.forget(clique)

    def forget(self, clique):
        for each in clique.family():
            each.early = None  # the parent may still refer to it
            if each in self.cliques:
                self.cliques.remove(each)
                each.early = None
                for stream in each.streams:
                    stream.synchronize(timeout=20)
                    stream.close()

    def close(self):
        clique = self.pick()
        if clique is not None:
            self.end(clique)

    def abort(self):
        clique = self.pick()
        if clique is None or self.random.random() < 0.5:
            return
        deregistered = self.registry.counters()["deregistered"]
        for each in reversed(clique.family()):
            for comm in each.comms:
                comm.abort()
        assert self.registry.drain(20)
        assert self.stormy or self.registry.counters()["deregistered"] == deregistered, "an abort asks no peer"
        self.forget(clique)

    def allocate(self):
        device = self.random.randrange(2)
        made = memory.alloc(4 * COUNT, device)
        self.arrays[device].append(made.buffer("float32"))

    def free(self):
        """Free memory, which may be in use: it stays registered until the use is over."""
        device = self.random.randrange(2)
        if not self.arrays[device]:
            return
        buffer = self.random.choice(self.arrays[device])
        for clique in self.cliques:
            if clique.early is not None and clique.early[1] is buffer:
                self.settle(clique)
        self.arrays[device].remove(buffer)
        pointer = buffer.pointer
        del buffer
        self.gone(device, pointer)

    def gone(self, device, pointer):
        used = self.users(device, pointer)
        if used and device == 0:
            self.in_use += 1
            assert is_mapped(pointer), self.did
        for clique in used:
            self.settle(clique)
        assert self.registry.drain(20), (self.did, self.registry.counters())
        for clique in self.cliques:
            clique.expected[device].discard(pointer)

    def users(self, device, pointer):
        """Return the cliques that may be using the memory."""
        return [clique for clique in self.cliques if clique.early is not None and pointer in clique.expected[device]]

    def usable(self):
        """Return a buffer for each device; of torch's memory only while hooks keep it from being freed in use."""
        torchs = self.torchs if self.hooks is not None else ({}, {})
        return tuple(self.random.choice([*self.arrays[device], *torchs[device].values()]) for device in (0, 1))

    def operate(self):
        clique = self.pick()
        if clique is None or not all(self.arrays):
            return
        clique.settle()
        self.called(clique)
        clique.reduce(self.usable())

    def begin(self):
        """Begin an operation on rank 0, and not yet on rank 1."""
        clique = self.pick()
        if clique is None or clique.early is not None or not all(self.arrays):
            return
        arrays = self.usable()
        clique.reduce(arrays, 0)
        self.called(clique, (0,))
        # Rank 1's array is kept for its call; rank 0's may be freed.
        clique.early = (None, arrays[1])

    def come(self):
        clique = self.pick()
        if clique is not None:
            self.settle(clique)

    def enlist(self):
        device = self.random.randrange(2)
        array = np.zeros(COUNT, np.float32)
        self.registry.add(array.ctypes.data, array.nbytes, device)
        self.foreign[device][array.ctypes.data] = array

    def dismiss(self):
        device = self.random.randrange(2)
        if not self.foreign[device]:
            return
        pointer = self.random.choice(list(self.foreign[device]))
        for clique in self.cliques:
            self.settle(clique)
        self.registry.remove(pointer)
        del self.foreign[device][pointer]
        for clique in self.cliques:
            clique.expected[device].discard(pointer)

    def drain(self):
        """Let threads allocate memory and free it."""

        def visit(seed):
            own = random.Random(seed)
            kept = [memory.alloc(own.randrange(1, 5000), own.randrange(2)) for _ in range(4)]
            own.shuffle(kept)
            while kept:
                kept.pop()

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(visit, [self.random.random(), self.random.random()]))
        assert threading.active_count() < 1000

    def storm(self):
        """Let threads allocate and free by functions of attachments while communicators are made, used and closed."""
        for clique in self.cliques:
            self.settle(clique)
        self.stormy, enough = True, threading.Event()

        def churn(device):
            while not enough.is_set():
                kept = [allocator.take(ODD, device) for _ in range(3)]
                mine = memory.alloc(ODD, device)
                for pointer in kept:
                    allocator.give(pointer, device)
                del mine
                enough.wait(0.0002)

        with ThreadPoolExecutor(2) as pool:
            churning = [pool.submit(churn, device) for device in (0, 1)]
            try:
                for move in self.random.choices([self.make, self.split, self.close, self.abort, self.operate], k=4):
                    self.did.append(move.__name__)
                    move()
                    self.check()
            finally:
                enough.set()
            for each in churning:
                each.result(20)
        self.stormy = False
        assert self.registry.drain(20), (self.did, self.registry.counters())

    def attach(self):
        """Attach to torch; or close the hooks, after which torch's segments are no longer registered."""
        if self.hooks is None:
            self.hooks = torch_hooks.attach_hooks(timeout=20)
            return
        for clique in self.cliques:
            self.settle(clique)
        self.hooks.close()
        self.hooks = None
        for clique in self.cliques:
            for device in (0, 1):
                clique.expected[device] -= set(self.torchs[device])

    def torch_allocates(self):
        device = self.random.randrange(2)
        pointer = self.torch.allocate(8192, device)
        self.torchs[device][pointer] = ncclpy.Buffer(pointer, COUNT, "float32", device=device)

    def torch_frees(self):
        """Free a segment: the call returns when no operation uses the segment any more."""
        device = self.random.randrange(2)
        if not self.torchs[device]:
            return
        pointer = self.random.choice(list(self.torchs[device]))
        for clique in self.cliques:
            if clique.early is not None and clique.early[1].pointer == pointer:
                self.settle(clique)  # rank 1 has yet to use it
        del self.torchs[device][pointer]
        used = self.users(device, pointer) if device == 0 else []
        with ThreadPoolExecutor(1) as pool:
            freed = pool.submit(self.torch.free, pointer)
            if used:
                self.hooked += 1
                self.drain()  # meanwhile
                assert not freed.done() and is_mapped(pointer), self.did
            for clique in used:
                self.settle(clique)
            assert freed.result(20) is None, self.did
        for clique in self.cliques:
            clique.expected[device].discard(pointer)
        counters = self.hooks.counters() if self.hooks is not None else {}
        assert not any(counters.get(name) for name in ("not_followed", "aborted_for", "kept")), (self.did, counters)


def main(seed, runs, root=None):
    """Run `runs` programs; `root` is the folder of a stand-in for torch, by default a new one."""
    with contextlib.ExitStack() as ends:
        if root is None:
            folder = os.environ["XDG_CACHE_HOME"] = ends.enter_context(tempfile.TemporaryDirectory())
            root = torch_stand_in.build(Path(folder))
        torch = sys.modules["torch"] = torch_stand_in.Fake(root).load()
        run(torch, seed, runs)


def run(torch, seed, runs):
    in_use = hooked = 0
    for each in range(seed, seed + runs):
        program = Program(each, torch)
        try:
            program.run()
        except BaseException:
            print(f"seed {each}: {program.did}", file=sys.stderr)
            raise
        in_use += program.in_use
        hooked += program.hooked
    print(in_use, hooked)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *map(Path, sys.argv[3:]))
