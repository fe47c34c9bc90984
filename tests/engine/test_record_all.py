"""Plain calls in the recorder: off by default, with names and numbers that are the same on all ranks."""

from __future__ import annotations

import contextlib
import json
import threading

import numpy as np
import pytest

import ncclpy
import testing
from ncclpy.cli.main import main

communicators = contextlib.contextmanager(testing.communicators)


@pytest.fixture(autouse=True)
def recorder():
    ncclpy.recorder.resize(2000)
    yield
    ncclpy.recorder.record_all(False)
    ncclpy.recorder.resize(2000)


@pytest.fixture
def pair():
    with communicators(2) as comms:
        yield comms


def entries(**wanted):
    found = ncclpy.recorder.snapshot()["entries"]
    return [entry for entry in found if all(entry[name] == value for name, value in wanted.items())]


def everywhere(comms, call):
    """Make a call on each rank, each in a thread of its own."""
    testing.run_threads(len(comms), lambda rank: call(comms[rank.rank], rank.rank), comms=comms)


def test_nothing_is_recorded_unless_asked(pair, host_engine):
    everywhere(pair, lambda comm, _: comm.all_reduce(np.ones(4)))
    assert entries() == []
    ncclpy.recorder.record_all()
    everywhere(pair, lambda comm, _: comm.all_reduce(np.ones(4)))
    assert len(entries()) == 2
    ncclpy.recorder.record_all(False)
    everywhere(pair, lambda comm, _: comm.all_reduce(np.ones(4)))
    assert len(entries()) == 2


def test_fields_of_an_entry(pair, host_engine):
    everywhere(pair, lambda comm, _: comm.all_reduce(np.ones(4)))  # counts, although it is not recorded
    ncclpy.recorder.record_all()
    everywhere(pair, lambda comm, _: comm.all_reduce(np.ones(6, np.float32), op="max"))
    everywhere(pair, lambda comm, _: comm.broadcast(np.ones(3, np.int8), root=1))
    for rank in range(2):
        first, second = entries(rank=rank)
        assert (first["operation"], first["op"], first["dtype"]) == ("all_reduce", "max", "float32")
        assert (first["count"], first["nbytes"], first["root"], first["key"]) == (6, 24, None, None)
        assert (second["operation"], second["op"], second["root"]) == ("broadcast", None, 1)
        assert [first["sequence"], second["sequence"]] == [1, 2]
        assert first["state"] == second["state"] == "completed", "the calls have waited for data in CPU memory"
        assert first["nranks"] == 2 and first["device"] == pair[rank].device
        assert first["created"] <= first["launched"]
    assert len({entry["communicator"] for entry in entries()}) == 1


def test_call_on_a_stream_is_called_and_not_completed(pair, host_engine):
    ncclpy.recorder.record_all()
    with ncclpy.Stream(0) as a, ncclpy.Stream(1) as b:
        with ncclpy.group():
            for comm, stream in zip(pair, (a, b), strict=True):
                comm.all_reduce(np.ones(4), stream=stream)
        a.synchronize()
        b.synchronize()
    assert [entry["state"] for entry in entries()] == ["called"] * 2
    assert [(entry["rank"], entry["sequence"]) for entry in entries()] == [(0, 0), (1, 0)]


def test_group_is_recorded_when_it_ends(pair, host_engine):
    ncclpy.recorder.record_all()
    arrays = [np.ones(4), np.ones(4)]
    with ncclpy.group():
        for comm, array in zip(pair, arrays, strict=True):
            comm.all_reduce(array)
        assert entries() == []
    assert [entry["state"] for entry in entries()] == ["completed"] * 2
    with pytest.raises(RuntimeError), ncclpy.group():
        pair[0].all_reduce(arrays[0])
        raise RuntimeError("nothing is launched")
    assert len(entries()) == 2


def test_names_of_children_are_the_same_on_all_ranks(host_engine):
    names = {}

    def body(rank, comms):
        comm = comms[rank]
        halves = comm.split(rank % 2, key=rank)
        same = comm.split(0, key=rank)
        for child in (halves, same):
            child.all_reduce(np.ones(2))
        comm.all_reduce(np.ones(2))
        halves.close()
        same.close()

    ncclpy.recorder.record_all()
    with communicators(4) as comms:
        testing.run_threads(4, lambda rank: body(rank.rank, comms), comms=comms)
    for entry in entries():
        names.setdefault(entry["communicator"], []).append(entry["rank"])
    assert sorted(map(sorted, names.values())) == [[0, 1], [0, 1], [0, 1, 2, 3], [0, 1, 2, 3]]
    (parent,) = [name for name in names if "/" not in name]
    assert {name.split("/")[0] for name in names} == {parent}


def test_call_that_fails_says_why(pair, host_engine):
    ncclpy.recorder.record_all()
    with ncclpy.faults("rank=0 call=AllReduce do=error:ncclSystemError"), pytest.raises(ncclpy.NcclError):
        pair[0].all_reduce(np.ones(4))
    (entry,) = entries()
    assert entry["state"] == "failed" and "ncclAllReduce" in entry["error"] and entry["completed"] is not None
    testing.abort_all(pair)


def test_call_that_is_stuck_is_pending(host_engine):
    def call(comm):
        with pytest.raises(ncclpy.NcclError):
            comm.all_reduce(np.ones(4))

    ncclpy.recorder.record_all()
    with communicators(2, timeout=20) as comms:
        with ncclpy.faults("rank=0 call=AllReduce do=hang") as faults:
            thread = threading.Thread(target=call, args=comms[:1], daemon=True)
            thread.start()
            testing.wait_for(lambda: faults.fired, "the call")
            assert [entry["state"] for entry in entries()] == ["pending"]
            testing.abort_all(comms)
            thread.join(30)
            assert not thread.is_alive()
    assert [entry["state"] for entry in entries()] == ["failed"]


def test_call_that_is_stuck_has_its_number(host_engine):
    """A dump requested meanwhile can then be compared with those of other ranks."""

    def call(comm):
        with pytest.raises(ncclpy.NcclError):
            comm.all_reduce(np.ones(4))

    def group(comm):
        with pytest.raises(ncclpy.NcclError), ncclpy.group():
            comm.broadcast(np.ones(4))
            comm.all_reduce(np.ones(4))

    for body, numbers in ((call, [1]), (group, [1, 2])):
        ncclpy.recorder.resize(2000)
        with communicators(2, timeout=20) as comms:
            everywhere(comms, lambda comm, _: comm.all_reduce(np.ones(4)))
            ncclpy.recorder.record_all()
            thread = threading.Thread(target=body, args=comms[:1], daemon=True)
            thread.start()
            testing.wait_for(lambda numbers=numbers: len(entries(state="pending")) == len(numbers), "the call")
            assert [entry["sequence"] for entry in entries()] == numbers
            testing.abort_all(comms)
            thread.join(30)
            assert not thread.is_alive()
        ncclpy.recorder.record_all(False)


def test_trace_finds_the_rank_that_did_not_call(pair, host_engine, tmp_path, capsys):
    ncclpy.recorder.record_all()
    with ncclpy.Stream(0) as a, ncclpy.Stream(1) as b:
        streams = (a, b)
        everywhere(pair, lambda comm, rank: comm.all_reduce(np.ones(4), stream=streams[rank]))
        pair[0].all_reduce(np.ones(8), stream=a)  # rank 1 does not make this one
        path = tmp_path / "dump.json"
        ncclpy.recorder.dump(path)
        code = main(["trace", str(path), "--chrome", str(tmp_path / "chrome.json")])
        said = capsys.readouterr().out
        pair[1].all_reduce(np.ones(8), stream=b)
    assert code == 1, said
    assert "sequence 1 waits for rank 1" in said and "called" in said
    assert "rank 1" in said and json.loads((tmp_path / "chrome.json").read_text())
