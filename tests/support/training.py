"""Loops as training has them, on two groups of one device, beside a model that says what each has to have registered.

Two ranks draw the same moves from one seed. On GPUs they are processes: of ranks in threads one may wait, in an
allocation, for the device that waits for the other.
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
    """Where the arrays of a loop come from: here a pool of numpy's, whose segments are the arrays."""

    framework = "numpy"
    sizes = (10, 1000, 20_000, 100_000)  # elements

    def __init__(self, frame, group):
        self.frame = frame
        self.registry = memory.SegmentRegistry.default()
        self.open(group)

    def open(self, group):
        self.pool = memory.pool("numpy", group)

    def inside(self):
        """Return a context in which arrays are allocated there."""
        return self.pool

    def there(self, arrays):
        """Return the segments that there are, as the framework says itself; `arrays` are those that the loop has."""
        return {(self.frame.pointer(array), array.nbytes, self.frame.device) for array in arrays}

    def agree(self):
        """Return whether all else that the framework counts is as it should be."""
        return True

    def renew(self, group):
        """Go on with new memory; arrays of before may still be there."""
        self.pool.close()
        self.open(group)

    def close(self):
        self.pool.close()


class TorchSource(Source):
    """torch's, of a `MemPool` over memory of ncclpy's."""

    framework = "torch"
    # Of torch's small blocks, of segments that several tensors share, and of tensors with a segment each.
    sizes = (10, 1000, 60_000, 500_000, 3_000_000, 6_000_000)

    def __init__(self, frame, group):
        self.pools = set()  # also those that were closed: their tensors live on
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
    """torch's own, whose hooks tell of every segment."""

    def open(self, group):
        self.hooks = memory.attach("torch", hooks=True)
        self.before = self.hooks.counters()

    def inside(self):
        return contextlib.nullcontext()

    def counts(self, segment):
        return True

    def agree(self):
        """No segment was left out, no communicator aborted, and torch was let free everything."""
        return self.hooks.counters() == self.before | {"followed": self.hooks.counters()["followed"]}

    def renew(self, group):
        """Close the hooks and open them anew: what is there is taken in again, as other segments."""
        self.hooks.close()
        assert self.registry.segments(self.frame.device) == []
        self.open(group)

    def close(self):
        self.hooks.close()


class CupySource(Source):
    """CuPy's, of a pool that counts what it has from its allocator."""

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
        """Do nothing: the arrays that another pool of CuPy's has left behind would not be counted by this one."""

    def close(self):
        self.attached.close()


SOURCES = {"pool": Source, "torch pool": TorchSource, "torch hooks": HookedSource, "cupy": CupySource}


def refusals(registry):
    return sum(registry.counters()["refused"].values())


class Loop:
    """One loop; `run` returns what it did."""

    def __init__(self, world, groups, kind, seed):
        self.world, self.groups, self.random = world, groups, random.Random(seed)
        self.registry = memory.SegmentRegistry.default()
        self.frame = frame_of(world.device, SOURCES[kind].framework)
        self.source = SOURCES[kind](self.frame, groups[0])
        self.arrays = []
        self.expected = [set(), set()]  # what each group has to have registered
        self.refused = [set(), set()]  # what NCCL would not register there
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
        """Call an operation of a group: afterwards it has registered what is there, and nothing else has changed."""
        there, refused = self.there(), refusals(self.registry)
        work = getattr(self.groups[number], operation)(*arrays)
        self.frame.await_(work)  # it has been launched
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
        """Segments may have gone, and with them what was registered of them."""
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
        # torch's segments are what they are when it returns; the others' are taken away by a thread.
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

    # What happens.

    def new(self, count):
        """Return an array that the loop has until it is told to drop it."""
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
        """What is sent is let go of, and given back to the device, while both groups may still be at it."""
        number, _, value = self.pick()
        count = self.random.choice(self.source.sizes)
        with self.stream():
            send, recv, other = self.new(count), self.new(count), self.new(count)
            self.frame.fill(send, value + self.world.rank)
            self.frame.fill(other, value + 5 + self.world.rank)
            if self.random.randrange(2) == self.world.rank:
                self.frame.be_busy()  # the other one's operations wait for this rank's
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
        if self.graph is not None:  # its memory stays: hooks cannot be closed, as nobody knows when it runs
            return
        self.source.renew(self.groups[0])
        if isinstance(self.source, HookedSource):
            for known in (*self.expected, *self.refused):
                known.clear()
        self.give_back()

    def renew_group(self):
        """The second group is closed, or aborted with all that it has registered, and made anew."""
        if self.random.random() < 0.6:
            return
        group, how = self.groups[1], self.random.choice(["close", "abort"])
        drained = self.registry.drain(0.5 if self.graph else LONG)  # a graph may keep memory of ours
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
        """A pool of torch's comes, and goes with all that is in it."""
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
        self.private = None  # torch may free what is in it here, or with the cache
        self.shrunk()

    def capture(self):
        """Capture operations of the first group: on a tensor of before, and on one of the graph's own pool."""
        torch, group = self.frame.torch, self.groups[0]
        static = self.new(5000)
        self.frame.fill(static, 0)
        self.call(0, "all_reduce", static)
        torch.cuda.synchronize()
        gc.collect()
        self.give_back()  # here, or the capture would do so as it begins
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
        if not any(each is static for each in self.arrays):  # it was dropped: the graph has it still
            self.arrays.append(static)
        self.frame.fill(static, value + self.world.rank)
        self.graph.replay()
        self.expect(static, 2 * value + 1)
        self.expect(doubled, 4 * value + 2)

    def finish(self):
        """Let everything go. The groups stay, but for the first if a graph has captured it: that keeps memory."""
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
    """Run a loop for each seed, with memory of each kind in turn; return what each did."""
    groups = [world.group(name="first"), world.group(name="second")]
    for group in groups:
        group.barrier().wait(LONG)  # connected
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
    """Have an operation meet nobody until its deadline, with segments registered; then go on with another group.

    Returns what rank 0 is told.
    """
    groups = [world.group(name="doomed"), world.group(name="other")]
    loop = Loop(world, groups, kind, 0)
    doomed, registry, frame = groups[0], loop.registry, loop.frame
    for _ in range(4):
        loop.grow()
        loop.call(0, "all_reduce", loop.arrays[-1])
        loop.call(1, "all_reduce", loop.arrays[-1])
    stuck = loop.new(6_000_000)  # too large for a segment that others are in
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
    if kind == "torch pool":  # of which torch gives nothing back as long as it is there
        loop.source.renew(groups[0])
        loop.forget(*loop.arrays)

    def is_freed():
        """Ask once more: what has failed keeps its arrays until a thread has found the device done with them."""
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
