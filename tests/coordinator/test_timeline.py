"""The timeline of operations, and the statistics."""

from __future__ import annotations

import json
import logging
import os
import re
import threading

import numpy as np
import pytest
from coordinator_ranks import run_coordinators
from group_ranks import DEADLINE

import ncclpy
import testing


def test_trace_has_phases_of_each_operation(tmp_path):
    names = ['a "name"\n', "b", "层\0", "\ud800"]

    def body(coordinator):
        works = coordinator.grouped_all_reduce(names, [np.ones(10) for _ in names])
        works.append(coordinator.all_gather("rows", np.ones((3, 2))))
        for work in works:
            work.wait(DEADLINE)
        bad = coordinator.all_reduce("bad", np.ones(1 + coordinator.rank))
        bad.exception(DEADLINE)
        coordinator.barrier("end").wait(DEADLINE)

    run_coordinators(2, body, timeline=tmp_path / "trace.{rank}")
    for rank in range(2):
        events = json.loads((tmp_path / f"trace.{rank}").read_text())
        assert {event["pid"] for event in events} == {rank}
        rows = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
        assert set(names) | {"rows", "bad", "end"} == set(rows)
        for name, phases in (
            ("b", ["negotiate", "fuse", "run"]),
            ("rows", ["negotiate", "run"]),
            ("bad", ["negotiate"]),
        ):
            found = [event for event in events if event["tid"] == rows[name] and event["ph"] == "X"]
            assert [event["name"] for event in found if event["name"] != "wait for data"] == phases
            assert all(event["dur"] >= 0 and event["args"]["operation"] == name for event in found)
            moments = [event["ts"] for event in found]
            assert moments == sorted(moments)


@pytest.mark.parametrize("path", ["/dev/full", "/no/such/folder/trace"])
def test_unwritable_trace_is_warned_of_once(path, caplog, monkeypatch):
    caplog.set_level(logging.WARNING, "ncclpy.coordinator")
    died = []
    monkeypatch.setattr(threading, "excepthook", died.append)

    def body(coordinator):
        for step in range(30):
            array = np.ones(4)
            coordinator.all_reduce("x", array).wait(DEADLINE)
            coordinator.all_reduce("y" * 5000, np.ones(2)).wait(DEADLINE)
            assert array[0] == 2, step
        testing.wait_for(lambda: caplog.records, "a warning")

    run_coordinators(2, body, timeline=path)
    assert len(caplog.records) == 1 and not died
    assert path in caplog.text and re.search("No space left|No such file", caplog.text)
    assert path not in [os.path.realpath(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd")]


def events_of(path):
    events = json.loads(path.read_text())
    return {event["args"]["name"] for event in events if event["name"] == "thread_name"}


def test_timeline_that_is_started_and_stopped_has_what_was_brought_between(tmp_path):
    def body(coordinator):
        path = tmp_path / "{rank}"
        part = coordinator.process_set([0, 1], DEADLINE)
        coordinator.stop_timeline()  # there is none
        coordinator.all_reduce("before", np.ones(2)).wait(DEADLINE)
        for times in ("first", "second"):
            coordinator.start_timeline(f"{path} {times}")
            with pytest.raises(ValueError, match="is being written: call stop_timeline"):
                coordinator.start_timeline(path)
            with pytest.raises(TypeError, match="cannot take memory"):
                coordinator.all_reduce("refused", "text")
            for work in coordinator.grouped_all_reduce(["a", "b"], [np.ones(2), np.ones(3)]):
                work.wait(DEADLINE)
            part.all_reduce(f"part {times}", np.ones(2)).wait(DEADLINE)
            coordinator.stop_timeline()
            coordinator.all_reduce("between", np.ones(2)).wait(DEADLINE)
        coordinator.barrier("end").wait(DEADLINE)

    run_coordinators(2, body)
    for rank in range(2):
        assert events_of(tmp_path / f"{rank} first") == {"a", "b", "part first"}
        assert events_of(tmp_path / f"{rank} second") == {"a", "b", "part second"}


def test_timeline_without_a_rank_in_its_path_is_of_rank_0(tmp_path):
    def body(coordinator):
        coordinator.start_timeline(tmp_path / "trace")
        with pytest.raises(ValueError, match="is being written"):
            coordinator.start_timeline(tmp_path / "other")
        coordinator.all_reduce("a", np.ones(2)).wait(DEADLINE)

    run_coordinators(2, body)  # the coordinator's end ends the file
    assert events_of(tmp_path / "trace") == {"a"} and os.listdir(tmp_path) == ["trace"]


def test_timeline_of_a_closed_coordinator_is_refused(tmp_path):
    def body(coordinator):
        coordinator.close(DEADLINE)
        with pytest.raises(ncclpy.NcclAborted, match="does nothing more"):
            coordinator.start_timeline(tmp_path / "trace")
        coordinator.stop_timeline()

    run_coordinators(2, body, shut=False)
    assert not os.listdir(tmp_path)


def test_stats():
    def body(coordinator):
        coordinator.all_reduce("a", np.ones(4, np.float32)).wait(DEADLINE)
        coordinator.barrier("b").wait(DEADLINE)
        coordinator.all_reduce("c", np.ones(1 + coordinator.rank)).exception(DEADLINE)
        coordinator.barrier("d").wait(DEADLINE)
        return coordinator.stats()

    for stats in run_coordinators(2, body):
        assert stats["operations"] == {"all_reduce": 1, "barrier": 2} and stats["bytes"] == 16
        assert stats["brought"] == 4 and stats["disagreements"] == 1 and stats["launches"] == 3
        assert stats["pending"] == 0 and stats["frames"] >= 4 and stats["cache_hits"] == 0
