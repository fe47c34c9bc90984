"""The recorder: its entries, dumps that never wait, and the output of ``ncclpy trace`` for a real dump."""

from __future__ import annotations

import _thread
import json
import os
import threading
import time
import weakref

import numpy as np
import pytest
from manager_clients import DEADLINE, Data, one_error, some_devices, sum_works

import ncclpy
import testing
from ncclpy.bootstrap import LocalStore
from ncclpy.cli.main import main


@pytest.fixture(autouse=True)
def fresh():
    """Begin each test with an empty recorder of the usual size."""
    ncclpy.recorder.resize(2000)
    yield
    ncclpy.recorder.resize(2000)


def entries(**wanted):
    found = json.loads(ncclpy.recorder.dump())["entries"]
    return [entry for entry in found if all(entry[name] == value for name, value in wanted.items())]


def test_entries_of_works(manager):
    n = some_devices(2)
    sum_works(manager, "first", range(n))[1]()
    data = Data(n, count=100, dtype=np.float64)
    works = [manager.broadcast_send(("step", 1), data.input(0), device=0, num_local=n)]
    works += [manager.broadcast_recv(("step", 1), data.input(r), device=r, num_local=n) for r in range(1, n)]
    for work in works:
        work.wait(DEADLINE)
    dump = json.loads(ncclpy.recorder.dump(reason="a test"))
    assert (dump["format"], dump["version"], dump["reason"], dump["pid"]) == (
        "ncclpy-recorder",
        1,
        "a test",
        os.getpid(),
    )
    assert dump["engine"] == ncclpy.library().engine and dump["nccl"] == ".".join(map(str, ncclpy.library().version))
    assert dump["recorded"] == 2 * n and dump["capacity"] == 2000 and len(dump["entries"]) == 2 * n
    assert abs(dump["wall"] - time.time()) < 5 and abs(dump["monotonic"] - time.monotonic()) < 5
    for entry in dump["entries"][:n]:
        assert entry["key"] == "'first'" and entry["operation"] == "all_reduce" and entry["op"] == "sum"
        assert (entry["dtype"], entry["count"], entry["nbytes"]) == ("float32", 8, 32)
    for rank, entry in enumerate(dump["entries"][n:]):
        assert entry["key"] == "('step', 1)" and entry["operation"] == "broadcast" and entry["op"] is None
        assert (entry["dtype"], entry["count"], entry["nbytes"]) == ("float64", 100, 800)
        assert (entry["rank"], entry["nranks"], entry["device"]) == (rank, n, rank)
        assert entry["root"] == 0 and entry["sequence"] == 1 and entry["state"] == "completed"
        assert entry["created"] <= entry["launched"] <= entry["completed"] <= dump["monotonic"]
        assert entry["thread"] == threading.get_ident() and entry["error"] is None
    assert len({entry["communicator"] for entry in dump["entries"]}) == 1
    assert len({entry["launch"] for entry in dump["entries"]}) == 2
    assert [entry["id"] for entry in dump["entries"]] == list(range(2 * n))


def test_errors_are_recorded(manager):
    some_devices(2)
    data = Data(2)
    works = [manager.all_reduce("k", data.input(r), device=r, num_local=2, num_global=2 + r) for r in range(2)]
    error = one_error(works)
    text = testing.without_line(str(error))  # an entry has the line in a field of its own
    assert [entry["error"] for entry in entries(state="failed")] == [text] * 2
    assert all(entry["launched"] is None and entry["sequence"] is None for entry in entries())


def test_ring_wraps(manager):
    n = some_devices(2)
    ncclpy.recorder.resize(10)
    for step in range(20):
        sum_works(manager, step, range(n))[1]()
    dump = json.loads(ncclpy.recorder.dump())
    assert (dump["capacity"], dump["recorded"], len(dump["entries"])) == (10, 20 * n, 10)
    assert [entry["id"] for entry in dump["entries"]] == list(range(20 * n - 10, 20 * n))


def test_recorder_of_capacity_0_records_nothing(manager):
    n = some_devices(2)
    ncclpy.recorder.resize(0)
    sum_works(manager, 0, range(n))[1]()
    dump = json.loads(ncclpy.recorder.dump())
    assert (dump["capacity"], dump["entries"]) == (0, [])
    ncclpy.recorder.resize(3)
    sum_works(manager, 1, range(n))[1]()
    assert entries()
    with pytest.raises(ValueError, match="capacity"):
        ncclpy.recorder.resize(-1)


def test_resizing_while_others_record(manager):
    n = some_devices(2)
    stop = []

    def resize():
        size = 0
        while not stop:
            ncclpy.recorder.resize(size % 7)
            json.loads(ncclpy.recorder.dump())
            size += 1

    thread = threading.Thread(target=resize, daemon=True)
    thread.start()
    step, end = 0, time.monotonic() + 0.7  # the other thread seldom releases the GIL: a step may take long
    while time.monotonic() < end:
        sum_works(manager, step, range(n))[1]()
        step += 1
    stop.append(True)
    thread.join(DEADLINE)
    assert not thread.is_alive()
    assert step


def test_key_with_a_failing_repr_is_shown_by_its_type(manager):
    n = some_devices(2)

    class Key:
        def __repr__(self):
            raise RuntimeError("no name")

    key = Key()
    sum_works(manager, key, range(n))[1]()
    assert "Key" in entries()[0]["key"]
    manager.all_reduce(key, Data(1).input(0), device=0, num_local=2)
    assert "Key" in json.loads(ncclpy.recorder.dump())["gathering"][0]["key"]


def test_dump_whose_texts_end_like_json_is_json_with_a_line_for_each_entry(manager):
    sum_works(manager, "key", range(some_devices(2)))[1]()
    plain = ncclpy.recorder.dump(reason="x")
    for text in ("x [{", "}, {", '[{"a', '}, {"a', "[", "},", "[{\n"):
        dump = ncclpy.recorder.dump(reason=text)
        assert json.loads(dump)["reason"] == text
        assert len(dump.splitlines()) == len(plain.splitlines()) > 1


@pytest.mark.parametrize("fault", ["at=run do=hang", "do=hang"], ids=["on the device", "in the call"])
def test_dump_while_an_operation_hangs(manager, host_engine, tmp_path, fault):
    sum_works(manager, "warm", range(3))[1]()
    with ncclpy.faults(f"rank=1 call=AllReduce {fault}") as faults:
        works, _ = sum_works(manager, "hangs", range(3), op="max")  # the first of its kind: a lane makes the call
        testing.wait_for(lambda: faults.fired)
        if "run" in fault:  # the device may be quicker than the report of the launch
            testing.wait_for(lambda: works[1].state != "pending")
        manager.all_reduce("gathers", np.ones(3), device=2, num_local=3)
        path = tmp_path / "dump.json"
        text = testing.run_with_deadline(lambda: ncclpy.recorder.dump(path, reason="stuck"), DEADLINE)
        assert path.read_text() == text
        dump = json.loads(text)
        stuck = [entry for entry in dump["entries"] if entry["key"] == "'hangs'"]
        assert len(stuck) == 3 and stuck[1]["state"] == ("launched" if "run" in fault else "pending")
        assert {entry["state"] for entry in stuck} <= {"launched", "pending"}
        (waiting,) = [item for item in dump["gathering"] if item["key"] == "'gathers'"]
        assert waiting["arrived"] == [2] and waiting["missing"] == 2
        manager.abort("over")
        one_error(works)
    states = {entry["state"] for entry in entries(key="'hangs'")}
    assert states == {"failed"}
    assert all("over" in entry["error"] for entry in entries(key="'hangs'"))


def test_trace_of_a_real_dump(manager, host_engine, tmp_path, capsys):
    sum_works(manager, "warm", range(3))[1]()
    with ncclpy.faults("rank=1 call=AllReduce at=run do=hang"):
        works, _ = sum_works(manager, "hangs", range(3))
        works[0].synchronize(ncclpy.Stream(0))
        for device in (0, 2):
            manager.all_reduce("gathers", np.ones(3), device=device, num_local=4)
        path, picture = tmp_path / "dump.json", tmp_path / "trace.json"
        ncclpy.recorder.dump(path)
        status = main(["trace", str(path), "--chrome", str(picture)])
        said = capsys.readouterr().out
        manager.abort()
        one_error(works)
    assert status == 1
    assert "'hangs'" in said and "'gathers'" in said
    assert "arrived: 0, 2 (of 4 local)" in said and "waits for 2 more local participants" in said
    names = [event["name"] for event in json.loads(picture.read_text())["traceEvents"] if event["ph"] == "X"]
    assert any("not completed" in name for name in names) and any("not launched" in name for name in names)


def test_trace_when_nothing_is_stuck(manager, tmp_path, capsys):
    n = some_devices(2)
    ncclpy.recorder.resize(2000)  # groups of other tests may have failed
    for step in range(5):
        sum_works(manager, step, range(n))[1]()
    path = tmp_path / "dump.json"
    ncclpy.recorder.dump(path)
    assert main(["trace", str(path)]) == 0
    assert "nothing is stuck" in capsys.readouterr().out


def test_dump_of_several_processes_names_the_missing_rank(tmp_path, host_engine, capsys):
    """Two nodes, of which one does not call a collective: the trace names it."""
    name = ncclpy.Manager.generate_communicator_key()
    paths = testing.run_processes(2, node, name, str(tmp_path))
    assert main(["trace", *paths]) == 1
    said = capsys.readouterr().out
    assert "all_reduce" in said and "'second'" in said
    assert "rank 1" in said or "waits for" in said


def node(rank, name, folder):
    with ncclpy.Manager() as manager:

        def add(key):
            manager.signal_multi_node_ready(key)
            return manager.all_reduce(
                key, np.ones(4), device=rank.rank, num_local=1, num_global=2, global_rank=rank.rank,
                communicator_key=name,
            )  # fmt: skip

        add("first").wait(DEADLINE)
        work = add("second") if rank.rank == 0 else None
        if work is not None:
            work.synchronize(ncclpy.Stream(0))
        path = os.path.join(folder, f"rank{rank.rank}.json")
        ncclpy.recorder.dump(path)
        rank._share(b"" if rank.rank == 0 else None)  # both have written
        manager.abort("the test is over")
    return path


def test_dump_is_encoded_by_c(manager, monkeypatch):
    """json writes indents in Python: with a full ring that took most of the time of a dump."""
    sum_works(manager, "k", range(some_devices(2)))[1]()

    def slow(*args, **options):
        raise AssertionError("json's encoder in Python")

    monkeypatch.setattr(json.encoder, "_make_iterencode", slow)
    text = ncclpy.recorder.dump()
    assert len(text.splitlines()) >= 2, "a line an entry"
    assert json.loads(text)["entries"]


# The line of the program that made a call.


def calls(comm, array):
    return comm.all_reduce(array)


def site_in(function, offset=1):
    return f"{function.__code__.co_filename}:{function.__code__.co_firstlineno + offset}"


@pytest.fixture
def plain_calls(host_engine):
    ncclpy.recorder.record_all()
    comm = ncclpy.Communicator.init_all([0])[0]
    yield comm
    ncclpy.recorder.record_all(False)
    comm.close()


def test_site_of_a_plain_call_is_the_line_that_made_it(plain_calls):
    calls(plain_calls, np.ones(2))
    assert [entry["site"] for entry in entries()] == [site_in(calls)]


def test_site_of_plain_calls_in_a_group_is_the_line_of_each(plain_calls):
    def body():
        with ncclpy.group():
            calls(plain_calls, np.ones(2))
            with pytest.raises(ZeroDivisionError), ncclpy.group():
                plain_calls.barrier()  # this call is dropped
                raise ZeroDivisionError
            plain_calls.all_reduce(np.ones(2))

    body()
    assert [entry["site"] for entry in entries(operation="all_reduce")] == [site_in(calls), site_in(body, 6)]


def test_site_of_a_groups_call_made_before_recording_is_its_end(plain_calls):
    def body():
        with ncclpy.group():
            ncclpy.recorder.record_all(False)
            calls(plain_calls, np.ones(2))
            ncclpy.recorder.record_all()
            calls(plain_calls, np.ones(2))

    body()
    assert [entry["site"] for entry in entries(operation="all_reduce")] == [site_in(body), site_in(calls)]


def test_site_of_a_process_groups_call(host_engine):
    with ncclpy.ProcessGroup(LocalStore(), 0, 1, device=0, timeout=DEADLINE) as group:
        calls(group, np.ones(2)).wait(DEADLINE)
    assert [entry["site"] for entry in entries()] == [site_in(calls)]


def test_site_of_a_managers_call(manager):
    def adds():
        return manager.all_reduce("sited", np.ones(2), device=0, num_local=1)

    if ncclpy.library().engine != "host":
        pytest.skip("needs arrays of the CPU")
    adds().wait(DEADLINE)
    assert [entry["site"] for entry in entries()] == [site_in(adds)]


@pytest.mark.parametrize("package", ["/lib/site-packages/torch/distributed/x.py", ncclpy.__file__])
def test_site_is_outside_of_packages_that_call_for_the_program(plain_calls, package):
    source = "def inner(call, *arguments):\n    return call(*arguments)\n"
    scope = {}
    exec(compile(source, package, "exec"), scope)

    def wraps(comm, array):
        return scope["inner"](scope["inner"], comm.all_reduce, array)

    wraps(plain_calls, np.ones(2))
    assert [entry["site"] for entry in entries()] == [site_in(wraps)]


def test_site_of_deep_calls_in_packages_is_found_without_a_long_search(plain_calls):
    scope = {}
    source = "def inner(depth, call, array):\n    return inner(depth - 1, call, array) if depth else call(array)\n"
    exec(compile(source, "/lib/site-packages/torch/x.py", "exec"), scope)
    scope["inner"](100, plain_calls.all_reduce, np.ones(2))
    assert [entry["site"] for entry in entries()] == ["/lib/site-packages/torch/x.py:2"]


def test_site_in_a_thread_without_a_program_is_none_and_a_long_name_is_cut(plain_calls):
    array = np.ones(2)
    program = compile("call(array)", "x" * 5000, "exec")
    thread = threading.Thread(target=exec, args=(program, {"call": plain_calls.all_reduce, "array": array}))
    thread.start()
    thread.join(DEADLINE)
    _thread.start_new_thread(plain_calls.all_reduce, (array,))
    testing.wait_for(lambda: len(entries(state="completed")) == 2, "the second call")
    assert [entry["site"] for entry in entries()] == ["x" * 200 + ":1", None]


def test_site_keeps_no_frame_and_so_no_array(plain_calls):
    def body():
        class Held:
            pass

        held = Held()
        calls(plain_calls, np.ones(2))
        return weakref.ref(held)

    assert body()() is None and entries()[0]["site"] == site_in(calls)
