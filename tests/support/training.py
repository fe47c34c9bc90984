"""Loops like those of training on two groups of one device, compared with a model of the registrations of each.

Two ranks draw the same moves from one seed. On GPUs they are processes: a rank in a thread could wait, in an
allocation, for the device, which waits for the other rank.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import random

from frames import LONG, failure_of, frame_of, gone, lies_in

import ncclpy
import testing
from ncclpy import memory


class Source:
    """The source of a loop's arrays: here a numpy pool, in which each array is a segment."""

    framework = "numpy"
    sizes = (10, 1000, 20_000, 100_000)  # elements

    def __init__(self, frame, group):
        self.frame = frame
        self.registry = memory.SegmentRegistry.default()
        self.open(group)

    def open(self, group):
        self.pool = memory.pool("numpy", group)

    def inside(self):
        """Return a context in which arrays are allocated from this source."""
        return self.pool

    def there(self, arrays):
        """Return the existing segments according to the framework; `arrays` are the arrays of the loop."""
        return {(self.frame.pointer(array), array.nbytes, self.frame.device) for array in arrays}

    def agree(self):
        """Return whether the framework's other counters are as expected."""
        return True

    def renew(self, group):
        """Continue with new memory; earlier arrays may still exist."""
        self.pool.close()
        self.open(group)

    def close(self):
        self.pool.close()


class TorchSource(Source):
    """A torch `MemPool` over memory of ncclpy."""

    framework = "torch"
    # Sizes of torch's small blocks, of segments shared by several tensors, and of tensors with their own segment.
    sizes = (10, 1000, 60_000, 500_000, 3_000_000, 6_000_000)

    def __init__(self, frame, group):
        self.pools = set()  # also closed pools, as their tensors live on
        super().__init__(frame, group)

    def open(self, group):
        self.pool = memory.pool("torch", group)
        self.pools.add(tuple(self.pool.resource.id))

    def there(self, arrays):
        return {
            (segment["address"], segment["total_size"], segment["device"])
            for segment in self.frame.torch.cuda.memory_snapshot()
            if segment["device"] == self.frame.device and self.counts(segment)
        }

    def counts(self, segment):
        return tuple(segment["segment_pool_id"]) in self.pools


class HookedSource(TorchSource):
    """torch's own allocator, with hooks that report every segment."""

    def open(self, group):
        self.hooks = memory.attach("torch", hooks=True)
        self.before = self.hooks.counters()

    def inside(self):
        return contextlib.nullcontext()

    def counts(self, segment):
        return True

    def agree(self):
        """Return whether no segment was left out, no communicator aborted, and torch could free everything."""
        return self.hooks.counters() == self.before | {"followed": self.hooks.counters()["followed"]}

    def renew(self, group):
        """Close the hooks and attach new ones: existing memory is registered again, as other segments."""
        self.hooks.close()
        assert self.registry.segments(self.frame.device) == []
        self.open(group)

    def close(self):
        self.hooks.close()


class CupySource(Source):
    """A CuPy pool, which counts the memory of its allocator."""

    framework = "cupy"
    sizes = TorchSource.sizes

    def open(self, group):
        self.attached = memory.attach("cupy")
        self.frame.pool = self.attached.resource

    def inside(self):
        return contextlib.nullcontext()

    def there(self, arrays):
        segments = set(self.registry.segments(self.frame.device))
        assert all(any(p <= self.frame.pointer(a) < p + n for p, n, _ in segments) for a in arrays)
        return segments

    def agree(self):
        segments = self.registry.segments(self.frame.device)
        return sum(nbytes for _, nbytes, _ in segments) == self.frame.pool.total_bytes()

    def renew(self, group):
        """Do nothing: a new CuPy pool would not count the arrays left from the old one."""

    def close(self):
        self.attached.close()


SOURCES = {"pool": Source, "torch pool": TorchSource, "torch hooks": HookedSource, "cupy": CupySource}


def refusals(registry):
    return sum(registry.counters()["refused"].values())


class Loop:
    """One loop; `run` returns its moves."""

    def __init__(self, world, groups, kind, seed):
        self.world, self.groups, self.random = world, groups, random.Random(seed)
        self.registry = memory.SegmentRegistry.default()
        self.frame = frame_of(world.device, SOURCES[kind].framework)
        self.source = SOURCES[kind](self.frame, groups[0])
        self.arrays = []
        self.expected = [set(), set()]  # segments that each group must have registered
        self.refused = [set(), set()]  # segments that NCCL refused to register
        self.values = itertools.count(1)
        self.did = []
        self.private = self.private_array = self.graph = self.captured = None

    def run(self, steps):
        moves = [self.grow, self.grow, self.drop, self.reduce, self.reduce, self.gather, self.scatter]
        moves += [self.let_go_in_flight, self.give_back, self.renew_group, self.renew_source]
        if self.frame.torch is not None:
            moves += [self.pool_of_its_own, self.replay, self.replay]
        for move in (self.grow, self.reduce, *(self.random.choice(moves) for _ in range(steps))):
            self.did.append(move.__name__)
            move()
            self.check()
        self.finish()
        return self.did

    # The model.

    def there(self):
        return self.source.there(self.arrays)

    def call(self, number, operation, *arrays):
        """Call an operation of a group: afterwards the group has registered all segments, and nothing else changed."""
        there, refused = self.there(), refusals(self.registry)
        work = getattr(self.groups[number], operation)(*arrays)
        self.frame.await_(work)  # the operation has been launched
        self.called(number, there, refused)
        self.check()

    def called(self, number, there, refused):
        self.expected[number] |= there - self.refused[number]
        more = refusals(self.registry) - refused
        if more:
            have = set(self.registry.registered(self.groups[number].communicator))
            missing = self.expected[number] - have
            assert len(missing) == more, (self.did, missing, self.registry.counters())
            self.expected[number] -= missing
            self.refused[number] |= missing

    def shrunk(self):
        """Update the model after segments may have been freed, and their registrations removed."""
        there = self.there()
        for known in (*self.expected, *self.refused):
            known &= there

    def seen(self):
        comms = [group.communicator for group in self.groups]
        return [set(self.registry.registered(comm)) if comm is not None else set() for comm in comms]

    def is_right(self):
        counters, seen = self.registry.counters(), self.seen()
        return (
            set(self.registry.segments(self.world.device)) == self.there()
            and seen == self.expected
            and (counters["leaving"] or counters["registrations"] == sum(map(len, seen)))
            and self.source.agree()
        )

    def check(self):
        # torch's segments are final when its call returns; other segments are removed by a thread.
        if self.frame.torch is None:
            with contextlib.suppress(AssertionError):
                testing.wait_for(self.is_right, timeout=LONG / 3)
        assert self.is_right(), (
            self.did, self.registry.counters(), sorted(self.registry.segments()), sorted(self.there()),
            *zip(map(sorted, self.seen()), map(sorted, self.expected), strict=True),
        )  # fmt: skip

    def expect(self, array, value):
        found = self.frame.found(array)
        assert found == (value, value), (self.did, found, value)

    # The moves.

    def new(self, count):
        """Return an array that the loop holds until `forget`."""
        with self.source.inside():
            self.arrays.append(self.frame.new(count))
        return self.arrays[-1]

    def forget(self, *arrays):
        self.arrays = [each for each in self.arrays if not any(each is one for one in arrays)]
        del arrays
        self.shrunk()

    def pick(self):
        if not self.arrays:
            self.grow()
        return self.random.randrange(2), self.random.choice(self.arrays), next(self.values)

    def stream(self):
        return self.frame.side() if self.random.random() < 0.5 else contextlib.nullcontext()

    def grow(self):
        self.new(self.random.choice(self.source.sizes))

    def drop(self):
        if self.arrays:
            self.forget(self.random.choice(self.arrays))

    def reduce(self):
        number, array, value = self.pick()
        with self.stream():
            self.frame.fill(array, value + self.world.rank)
            self.call(number, "all_reduce", array)
            self.expect(array, 2 * value + 1)

    def gather(self):
        number, send, value = self.pick()
        with self.stream():
            count = len(send)
            recv = self.new(2 * count)
            self.frame.fill(send, value + self.world.rank)
            self.call(number, "all_gather", send, recv)
            self.expect(recv[:count], value)
            self.expect(recv[count:], value + 1)
        self.forget(recv)

    def scatter(self):
        number, recv, value = self.pick()
        with self.stream():
            count = len(recv)
            send = self.new(2 * count)
            self.frame.fill(send[:count], value + self.world.rank)
            self.frame.fill(send[count:], value + 10 + self.world.rank)
            self.call(number, "reduce_scatter", send, recv)
            self.expect(recv, 2 * (value + 10 * self.world.rank) + 1)
        self.forget(send)

    def let_go_in_flight(self):
        """Drop a sent array, and give its memory back, while both groups may still use it."""
        number, _, value = self.pick()
        count = self.random.choice(self.source.sizes)
        with self.stream():
            send, recv, other = self.new(count), self.new(count), self.new(count)
            self.frame.fill(send, value + self.world.rank)
            self.frame.fill(other, value + 5 + self.world.rank)
            if self.random.randrange(2) == self.world.rank:
                self.frame.be_busy()  # the other rank's operations wait for this rank
            self.call(number, "all_reduce", send, recv)
            self.call(1 - number, "all_reduce", other)
            self.forget(send)
            del send
            self.give_back()
            self.check()
            self.expect(recv, 2 * value + 1)
            self.expect(other, 2 * value + 11)
        self.forget(recv, other)

    def give_back(self):
        self.frame.give_back()
        self.shrunk()

    def renew_source(self):
        if self.graph is not None:  # the graph's memory stays: hooks cannot close while a graph may run
            return
        self.source.renew(self.groups[0])
        if isinstance(self.source, HookedSource):
            for known in (*self.expected, *self.refused):
                known.clear()
        self.give_back()

    def renew_group(self):
        """Close the second group, or abort it with its registrations, and make a new one."""
        if self.random.random() < 0.6:
            return
        group, how = self.groups[1], self.random.choice(["close", "abort"])
        drained = self.registry.drain(0.5 if self.graph else LONG)  # a graph may hold memory
        assert drained or self.graph, self.registry.counters()
        before, comm = self.registry.counters(), group.communicator
        self.world.meet()
        if how == "abort":
            group.abort("the loop goes on without it")
            testing.wait_for(lambda: comm is None or self.registry.registered(comm) == [], "the abort", LONG)
        group.close(LONG)
        after = self.registry.counters()
        known = len(self.expected[1])
        assert after["deregistered"] - before["deregistered"] == (known if how == "close" else 0), (self.did, how)
        assert before["registrations"] - after["registrations"] == known, (self.did, how)
        self.expected[1], self.refused[1] = set(), set()
        self.groups[1] = self.world.group(name=f"{group.name}'")

    def pool_of_its_own(self):
        """Use another torch pool, and sometimes drop it with all its memory."""
        if self.private is None:
            self.private = self.frame.torch.cuda.MemPool()
            with self.frame.torch.cuda.use_mem_pool(self.private):
                self.private_array = self.frame.new(700_000)
        value = next(self.values)
        self.frame.fill(self.private_array, value + self.world.rank)
        self.call(self.random.randrange(2), "all_reduce", self.private_array)
        self.expect(self.private_array, 2 * value + 1)
        if self.random.random() < 0.5:
            self.drop_private()

    def drop_private(self):
        self.private_array = None
        self.private = None  # torch may free its memory here, or with the cache
        self.shrunk()

    def capture(self):
        """Capture operations of the first group, on an earlier tensor and on one of the graph's pool."""
        torch, group = self.frame.torch, self.groups[0]
        static = self.new(5000)
        self.frame.fill(static, 0)
        self.call(0, "all_reduce", static)
        torch.cuda.synchronize()
        gc.collect()
        self.give_back()  # otherwise the capture would do so when it begins
        self.graph = torch.cuda.CUDAGraph()
        refused = refusals(self.registry)
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            doubled = static * 2
            group.all_reduce(static)
            group.all_reduce(doubled)
        self.captured = static, doubled
        self.called(0, self.there(), refused)

    def replay(self):
        if self.graph is None:
            self.capture()
            self.check()
        static, doubled = self.captured
        value = next(self.values)
        if not any(each is static for each in self.arrays):  # dropped before, but still held by the graph
            self.arrays.append(static)
        self.frame.fill(static, value + self.world.rank)
        self.graph.replay()
        self.expect(static, 2 * value + 1)
        self.expect(doubled, 4 * value + 2)

    def finish(self):
        """Drop everything. The groups stay, except for a captured first group, which would hold memory."""
        captured = self.graph is not None
        if captured:
            self.graph.reset()
        self.graph = self.captured = self.private_array = self.private = None
        self.arrays = []
        self.frame.trim()
        self.shrunk()
        self.check()
        if captured:
            self.world.meet()
            self.groups[0].close(LONG)
            self.expected[0] = set()
            self.groups[0] = self.world.group(name=f"{self.groups[0].name}'")
            self.check()
        self.source.close()
        clean = gone(self.frame, self.registry)
        assert clean is True, (self.did, clean)


def loops(world, kinds, seeds, steps):
    """Run a loop for each seed, with memory of each kind in turn; return the moves of each."""
    groups = [world.group(name="first"), world.group(name="second")]
    for group in groups:
        group.barrier().wait(LONG)  # connects
    did = []
    for seed, kind in zip(seeds, itertools.cycle(kinds)):
        try:
            did.append(Loop(world, groups, kind, seed).run(steps))
        except BaseException as error:
            raise AssertionError(f"seed {seed} of {kind}: {error}") from error
    for group in groups:
        group.close(LONG)
    assert gone(frame_of(world.device, SOURCES[kinds[0]].framework), memory.SegmentRegistry.default()) is True
    return did


def abort_in_flight(world, kind):
    """Let an operation on registered segments time out without a peer; then continue with another group.

    Returns the error text of rank 0.
    """
    groups = [world.group(name="doomed"), world.group(name="other")]
    loop = Loop(world, groups, kind, 0)
    doomed, registry, frame = groups[0], loop.registry, loop.frame
    for _ in range(4):
        loop.grow()
        loop.call(0, "all_reduce", loop.arrays[-1])
        loop.call(1, "all_reduce", loop.arrays[-1])
    stuck = loop.new(6_000_000)  # too large to share a segment
    pointer = frame.pointer(stuck)
    frame.fill(stuck, 1)
    loop.call(1, "all_reduce", stuck)
    frame.found(stuck)
    assert registry.drain(LONG)
    world.meet()
    before, comm, said = registry.counters(), doomed.communicator, ""
    if world.rank == 0:
        said, seconds = failure_of(ncclpy.NcclTimeout, doomed.all_reduce(stuck, timeout=1.0).wait, LONG)
        assert 0.5 < seconds < LONG / 2, seconds
    testing.wait_for(lambda: doomed.error is not None, "rank 1 hears of it", LONG)
    testing.wait_for(lambda: registry.registered(comm) == [], "the abort", LONG)
    after = registry.counters()
    assert after["deregistered"] == before["deregistered"], "an abort asks no peer"
    assert after["registrations"] == len(registry.registered(groups[1].communicator)) == len(loop.expected[1])
    doomed.close(LONG)
    world.meet()
    loop.groups[0] = groups[0] = world.group(name="afterwards")
    loop.expected[0], loop.refused[0] = set(), set()
    loop.forget(stuck)
    del stuck
    if kind == "torch pool":  # torch gives no memory back while the pool exists
        loop.source.renew(groups[0])
        loop.forget(*loop.arrays)

    def is_freed():
        """Return whether the array is freed: a failed operation holds it until a thread finds the device done."""
        frame.trim()
        loop.shrunk()
        return registry.drain(0) and not lies_in(pointer, registry.segments())

    testing.wait_for(is_freed, "what the operation had is given back", LONG)
    loop.check()
    for _ in range(3):
        loop.reduce()
        loop.let_go_in_flight()
    loop.finish()
    for group in groups:
        group.close(LONG)
    return said
