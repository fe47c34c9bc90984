"""Operations brought before their input is ready: they are negotiated at once, and wait on the device."""

from __future__ import annotations

import gc
import json
import threading
import time
import weakref

import numpy as np
import pytest
from coordinator_ranks import run_coordinators
from graphs import Graph
from group_ranks import DEADLINE
from producer_streams import RAW, Gate, Side

import ncclpy

pytestmark = pytest.mark.usefixtures("no_collection")


class Streamed:
    """Device memory of bytes that names its stream."""

    def __init__(self, side, count=None):
        self.side, self.shape = side, (side.count if count is None else count,)
        self.__cuda_array_interface__ = {
            "shape": self.shape,
            "typestr": "|u1",
            "data": (side.memory.pointer, False),
            "version": 3,
            "stream": side.stream.handle,
        }


def run(body, **options):
    """Call ``body(coordinator, sides, gate, meet)`` on two ranks; rank 0 has a gate."""
    meeting = threading.Barrier(2)

    def one(coordinator):
        device = coordinator._session.device
        sides = [Side(device, 64) for _ in range(3)]
        try:
            coordinator.grouped_all_reduce(["0", "1"], [Streamed(side) for side in sides[:2]], "max")[0].wait(DEADLINE)
            coordinator.all_reduce("2", Streamed(sides[2])).wait(DEADLINE)
            gate = Gate(0) if coordinator.rank == 0 else None
            meeting.wait(DEADLINE / 2)
            result = body(coordinator, sides, gate, lambda: meeting.wait(DEADLINE / 2))
            coordinator.barrier("done").wait(DEADLINE)
            meeting.wait(DEADLINE / 2)
            if gate is not None:
                gate.close()
            meeting.wait(DEADLINE / 2)
            for side in sides:
                side.close()
            return result
        except BaseException:
            meeting.abort()
            raise

    return run_coordinators(2, one, **options)


@pytest.mark.parametrize("fused", [False, True])
def test_operation_waits_for_its_producer_on_device(fused):
    def body(coordinator, sides, gate, meet):
        first, second, _ = sides
        if gate is not None:
            gate.shut(first.stream)
        first.fill(2)  # behind the gate on rank 0
        second.fill(3)
        arrays = [Streamed(first), Streamed(second)]
        if fused:
            works = coordinator.grouped_all_reduce(["a", "b"], arrays)
        else:
            works = [coordinator.all_reduce(name, array) for name, array in zip("ab", arrays, strict=True)]
        if gate is not None:
            works[0].synchronize(second.stream)  # the CPU waits only for the launch
            assert works[0].state == "launched" and not works[0].is_completed()
            gate.open()
        for work in works:
            work.wait(DEADLINE)
        return [set(RAW.read(side.memory).tolist()) for side in (first, second)]

    assert run(body) == [[{4}, {6}]] * 2


def test_trace_shows_operations_waiting_for_data(tmp_path):
    def body(coordinator, sides, gate, meet):
        first, *_ = sides
        if gate is not None:
            gate.shut(first.stream)
        first.fill(2)
        work = coordinator.all_reduce("late", Streamed(first))
        if gate is not None:
            work.synchronize(sides[1].stream)
            time.sleep(0.3)
            gate.open()
        work.wait(DEADLINE)

    run(body, timeline=tmp_path / "trace.{rank}")
    events = json.loads((tmp_path / "trace.0").read_text())
    found = {each["name"]: each["dur"] for each in events if each.get("args", {}).get("operation") == "late"}
    assert list(found) == ["negotiate", "wait for data", "run"]
    assert found["wait for data"] > 0.2e6 and found["wait for data"] > found["run"], "microseconds"


def test_process_set_runs_beside_unready_operation():
    def body(coordinator, sides, gate, meet):
        part = coordinator.process_set([0, 1], DEADLINE)
        slow, fast, _ = sides
        part.all_reduce("warm", Streamed(fast)).wait(DEADLINE)
        if gate is not None:
            gate.shut(slow.stream)
        slow.fill(2)
        fast.fill(3)
        late = coordinator.all_reduce("slow", Streamed(slow))
        part.all_reduce("fast", Streamed(fast)).wait(DEADLINE)
        assert coordinator.rank == 1 or not late.is_completed()
        if gate is not None:
            gate.open()
        late.wait(DEADLINE)
        return [set(RAW.read(side.memory).tolist()) for side in (slow, fast)]

    assert run(body) == [[{4}, {6}]] * 2


def test_stream_waits_for_work():
    def body(coordinator, sides, gate, meet):
        first, second, reader = sides
        first.fill(1 + coordinator.rank)
        second.fill(2 + coordinator.rank, slowly=True)
        works = coordinator.grouped_all_reduce(["a", "b"], [Streamed(first), Streamed(second)])
        for work in works:
            work.synchronize(reader.stream)
        reader.keep(first.memory, 0)
        reader.keep(second.memory, 1)
        reader.stream.synchronize(DEADLINE)
        return [set(reader.read(place).tolist()) for place in range(2)]

    assert run(body) == [[{3}, {5}]] * 2


def test_cpu_and_device_memory_are_a_mismatch(host_engine):
    def body(coordinator, sides, gate, meet):
        array = np.zeros(64, np.uint8) if coordinator.rank else Streamed(sides[0])
        return str(coordinator.all_reduce("x", array).exception(DEADLINE))

    texts = run(body)
    assert texts[0] == texts[1] and "memory of the device on rank 0, of the CPU on rank 1" in texts[0]


def test_captured_stream_is_refused(host_engine):
    def body(coordinator, sides, gate, meet):
        graph = Graph(sides[0].stream)
        with graph.capture(), pytest.raises(ValueError, match="its stream is being captured"):
            coordinator.all_reduce("x", Streamed(sides[0]))
        graph.close()
        return coordinator.stats()["pending"]

    assert run(body) == [0, 0]


def test_work_releases_arrays_at_its_end():
    def body(coordinator, sides, gate, meet):
        arrays = [Streamed(side) for side in sides[:2]]
        gone = [weakref.ref(array) for array in arrays]
        works = coordinator.grouped_all_reduce(["a", "b"], arrays)
        del arrays
        for work in works:
            work.wait(DEADLINE)
        assert all(reference() is not None for reference in gone)  # the works hold their results
        del works, work
        coordinator.barrier("later").wait(DEADLINE)
        for _ in range(100):
            gc.collect()
            if not any(reference() is not None for reference in gone):
                return True
            threading.Event().wait(0.02)
        return False

    assert run(body) == [True, True]
    assert ncclpy.in_flight() == []
