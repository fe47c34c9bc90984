"""Stream order of process groups with slow producers and consumers; deadlines begin when the device could start."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from group_ranks import DEADLINE, run_groups
from producer_streams import RAW, Gate, Side, read

import ncclpy
import testing

pytestmark = pytest.mark.usefixtures("no_collection")


def run(body, **options):
    """Call ``body(group, side, meet)`` on two connected ranks; `meet` waits for the other rank."""
    meeting = threading.Barrier(2)

    def one(group):
        side = Side(group.device)
        try:
            group.all_reduce(side.buffer, stream=side.stream).wait(DEADLINE)
            result = body(group, side, lambda: meeting.wait(DEADLINE / 2))
            side.close()
            return result
        except BaseException:
            meeting.abort()
            raise

    return run_groups(2, one, **options)


def test_slow_producers():
    def body(group, side, meet):
        results = []
        for step in range(1, 6):
            side.fill(step * (group.rank + 1), slowly=step % 2 == group.rank)
            group.all_reduce(side.buffer, stream=side.stream).wait(DEADLINE)
            results.append(set(RAW.read(side.memory).tolist()))
        return results

    assert run(body) == [[{3 * step} for step in range(1, 6)]] * 2


@pytest.mark.parametrize("coalesced", [False, True])
def test_operation_waits_for_its_producers_on_device(coalesced):
    """A block waits for all producers of its operations, but not for work queued later; the calls return at once."""

    def body(group, side, meet):
        second, done = Side(group.device), Side(group.device)
        gates = [Gate(0), Gate(0)] if group.rank == 0 else []
        meet()  # making a gate waits for the devices
        if gates:
            gates[0].shut(second.stream if coalesced else side.stream)
        side.fill(2)
        second.fill(3)
        if coalesced:
            with group.coalescing() as work:
                group.all_reduce(done.buffer, stream=done.stream)
                group.all_reduce(side.buffer, stream=side.stream)
                group.all_reduce(second.buffer, stream=second.stream)
        else:
            work = group.all_reduce(side.buffer, stream=side.stream)
            group.all_reduce(second.buffer, stream=second.stream)
        if group.rank == 0:
            work.synchronize(done.stream)  # the CPU waits only for the launch
            assert work.state == "launched" and not work.is_completed() and not done.stream.is_done()
            gates[0].open()
        work.wait(DEADLINE)
        group.wait_for_pending_works(DEADLINE)
        late = None
        work = group.all_reduce(done.buffer, stream=done.stream)
        if gates:
            gates[1].shut(done.stream)  # behind it
        work.wait(DEADLINE)
        if gates:
            late = done.stream.is_done()
            gates[1].open()
        meet()
        for gate in gates:
            gate.close()
        results = [set(RAW.read(each.memory).tolist()) for each in (side, second)]
        second.close()
        done.close()
        return results, late

    assert run(body) == [([{4}, {6}], False), ([{4}, {6}], None)]


def test_pipelines_of_producer_communication_and_consumer():
    """Many steps are in flight; the CPU waits only at the end."""

    def body(group, side, meet):
        consumer, steps = Side(group.device), 30
        for step in range(1, steps + 1):
            side.fill(step, slowly=step % 10 == group.rank)
            group.all_reduce(side.buffer, stream=side.stream).synchronize(consumer.stream)
            consumer.keep(side.memory, step)
            side.stream.wait(consumer.stream.record())  # the next step writes after this one was read
        consumer.stream.synchronize(DEADLINE)
        good = all(np.all(consumer.read(step) == 2 * step) for step in range(1, steps + 1))
        consumer.close()
        return good

    assert run(body) == [True, True]


@pytest.mark.parametrize("timing", [False, True])
def test_deadlines_begin_when_the_device_could(timing):
    """A deadline excludes the time of the producer and of earlier operations, and includes everything after."""

    def body(group, side, meet):
        second = Side(group.device)
        gate = Gate(0) if group.rank == 0 else None
        meet()
        if gate is not None:
            gate.shut(side.stream)
            with group.deadline(1):
                works = [group.all_reduce(side.buffer, stream=side.stream)]
                works.append(group.all_reduce(second.buffer, stream=second.stream, timeout=0.95))
                with group.coalescing() as work:
                    group.all_reduce(second.buffer, stream=second.stream)
                    group.all_reduce(side.buffer, stream=side.stream)
                works.append(work)
            time.sleep(1.3)
            states = [work.state for work in works]
            gate.open()
            assert group.error is None and states == ["launched"] * 3
        else:
            works = [group.all_reduce(each.buffer, stream=each.stream) for each in (side, second)]
            with group.coalescing() as work:
                group.all_reduce(second.buffer, stream=second.stream)
                group.all_reduce(side.buffer, stream=side.stream)
            works.append(work)
        for work in works:
            work.wait(DEADLINE)
        meet()
        if gate is not None:
            gate.close()
        meet()
        if group.rank == 0:  # the other rank does not come
            lonely = group.all_reduce(side.buffer, stream=side.stream, timeout=0.3)
            with pytest.raises(ncclpy.NcclTimeout, match="was not done within its timeout"):
                lonely.wait(DEADLINE)
        testing.wait_for(lambda: group.error is not None, "the end of the group")
        second.close()

    run(body, timing=timing)


def test_pairs_beside_collectives_from_two_threads():
    """The two threads do not wait for each other: each has the same order as its peer thread on the other rank."""

    def body(group, side, meet):
        group.connect(peers=[1 - group.rank])
        errors, got = [], []
        memory = RAW.make(np.zeros(1000, np.int32), group.device)

        def messages():
            try:
                with ncclpy.Stream(group.device) as stream:
                    for step in range(60):
                        if step % 2 == group.rank:
                            testing.write(memory.pointer, np.full(1000, step, np.int32), group.device)
                            group.send(memory.buffer, 1 - group.rank, stream=stream).wait(DEADLINE)
                        else:
                            group.recv(memory.buffer, 1 - group.rank, stream=stream).wait(DEADLINE)
                            got.append(set(read(memory, stream).tolist()) == {step})
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=messages)
        thread.start()
        results = []
        for step in range(60):
            side.fill(step)
            group.all_reduce(side.buffer, stream=side.stream).synchronize(side.stream)
            if step % 10 == 9:
                results.append(set(read(side.memory, side.stream).tolist()))
        thread.join(DEADLINE / 2)
        assert not thread.is_alive() and not errors, errors
        return results, got

    assert run(body) == [([{2 * step} for step in range(9, 60, 10)], [True] * 30)] * 2


def test_two_groups_of_one_device_from_two_threads():
    """Each thread has its own group, with one order on both ranks; operations of the two groups have no order."""

    def body(group, side, meet):
        other = group.new_group([0, 1])
        other.connect()
        errors, sides = [], (side, Side(group.device))

        def steps(one, mine, factor):
            for step in range(60):
                mine.fill(step % 50)
                work = one.all_reduce(mine.buffer, stream=mine.stream)
                work.synchronize(mine.stream)
                if step % 7 == 3:
                    work.wait(DEADLINE)
                    assert set(read(mine.memory, mine.stream).tolist()) == {2 * (step % 50)}, factor

        def second():
            try:
                steps(other, sides[1], "the second group")
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=second)
        thread.start()
        steps(group, side, "the first group")
        thread.join(DEADLINE / 2)
        assert not thread.is_alive() and not errors, errors
        other.close()
        sides[1].close()
        return group.seq, other.seq

    assert run(body) == [(61, 60)] * 2
