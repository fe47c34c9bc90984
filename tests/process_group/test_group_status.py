"""The state of other ranks in errors: every rank's error tells what each other rank does."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import re
import signal
import textwrap
import threading
import time
import weakref
from dataclasses import replace

import numpy as np
import pytest
from group_fixtures import TOLD
from group_ranks import DEADLINE, run_groups
from warm_ranks import run_ranks

import ncclpy
import testing
from ncclpy.bootstrap import FileStore, LocalStore, StoreError, TCPStore
from ncclpy.peers import inquiry, reports, status
from ncclpy.peers.rank_state import OperationInfo
from ncclpy.peers.reports import Reports
from ncclpy.process_group import lifecycle

# Ranks as threads: the calls of other ranks.


def program(group, what, together):
    group.all_reduce(np.ones(2)).wait(DEADLINE)
    part = group.new_group([0, 1, 2]) if what == "another group" else None
    if part is not None:
        part.connect(timeout=DEADLINE)
    together.wait(DEADLINE)
    one = np.ones(1024, np.float32)
    if what == "another root":  # so large that the root waits, too
        group.broadcast(np.ones(16384, np.float32), root=2 if group.rank == 2 else 0, timeout=0.5)
    elif group.rank < 2:
        group.all_reduce(one, timeout=0.5)
    elif what == "another call":
        group.broadcast(np.ones(4), root=1)
    elif what == "another count":
        group.all_reduce(np.ones(2048, np.float32))
    elif what == "another type":
        group.all_reduce(np.ones(1024, np.float64))
    elif what == "another op":
        group.all_reduce(one, op="max")
    elif what == "a send first":
        group.send(np.ones(3), 1)
    elif what == "another order":
        group.broadcast(np.ones(8192), root=2), group.all_reduce(one)
    elif what == "another group":
        part.all_reduce(np.ones(3))
    elif what == "a split":
        with contextlib.suppress(ncclpy.NcclError):
            group.split(0)
    elif what in SLOWLY:
        group.close()
        testing.wait_for(lambda: ended[id(together)], "the others")
        return None
    testing.wait_for(lambda: group.error is not None, "the end")
    ended[id(together)] = True
    if part is not None:
        part.abort()
        part.close()
    return group.error


ended: dict[int, bool] = {}

ROOTED = OperationInfo("broadcast", 1, "float32", 16384, None, 2)
#: States other than "running" and "idle".
STATES = {"closed": "closed", "closing": "closed", "another group": "in_other_group", "a split": "in_rendezvous"}
WHERE = {"another group": "g/0", "a split": "split()"}

INSTEAD = {
    "no call": ("rank 2 has finished all_reduce #0 and is in no operation since", None),
    "another call": ("broadcast #1 (float64 x 4, root 1)", OperationInfo("broadcast", 1, "float64", 4, None, 1)),
    "another count": (
        "all_reduce #1 (float32 x 2,048, sum)",
        OperationInfo("all_reduce", 1, "float32", 2048, "sum", None),
    ),
    "another type": (
        "all_reduce #1 (float64 x 1,024, sum)",
        OperationInfo("all_reduce", 1, "float64", 1024, "sum", None),
    ),
    "another op": (
        "all_reduce #1 (float32 x 1,024, max)",
        OperationInfo("all_reduce", 1, "float32", 1024, "max", None),
    ),
    "another root": ("broadcast #1 (float32 x 16,384, root 2)", ROOTED),
    "another order": (
        "broadcast #1 (float64 x 8,192, root 2)",
        OperationInfo("broadcast", 1, "float64", 8192, None, 2),
    ),
    "another group": (
        "rank 2 has finished all_reduce #0 and is blocked in all_reduce #0 (float64 x 3, sum) of process group 'g/0' "
        "since",
        OperationInfo("all_reduce", 0, "float64", 3, "sum", None),
    ),
    "a split": ("rank 2 has finished all_reduce #0 and is in split(), which waits for others to arrive since", None),
    "a send first": ("rank 2 is in send #0 to rank 1 (float64 x 3)", OperationInfo("send", 0, "float64", 3, None, 1)),
    "closed": ("rank 2 has closed the group after all_reduce #0", None),
    "closing": ("rank 2 has closed the group after all_reduce #0", None),
}
SLOWLY = {"closed": "", "closing": "rank=2 call=CommFinalize do=delay:0.9s; rank=2 call=CommDestroy do=delay:0.5s"}


@pytest.mark.parametrize("what", INSTEAD)
def test_error_tells_what_other_rank_does(host_engine, monkeypatch, what):
    """The first failing rank reports for all; for another count, type or reduction the host engine fails at once."""
    said, current = INSTEAD[what]
    monkeypatch.setattr(reports, "PATIENCE", DEADLINE)  # long, so that all ranks answer on a busy machine
    together = threading.Barrier(3)
    ended[id(together)] = False
    with ncclpy.faults(SLOWLY.get(what, "")):
        errors = run_groups(3, lambda group: program(group, what, together), name="g")
    for error in filter(None, errors):
        assert said in str(error), error
        assert [each.rank for each in error.ranks] == [0, 1, 2] and error.ranks[2].current == current
        assert error.ranks[2].state == STATES.get(what, "idle" if current is None else "running")
        assert error.ranks[2].where == WHERE.get(what)
        mine = (
            replace(ROOTED, root=0)
            if what == "another root"
            else OperationInfo("all_reduce", 1, "float32", 1024, "sum", None)
        )
        assert error.ranks[0].current == mine
        told = rf"ranks 0-1 (wait|are) in {mine.name} (\(.*\) )?since \d"
        assert re.search(rf"of process group 'g': (rank 2 .*; {told}|{told}.*; rank 2 )", str(error)), error
    said = [testing.without_line(str(error)) for error in filter(None, errors)]
    assert len({each.partition(" of process group 'g': ")[2] for each in said}) == 1


@pytest.mark.parametrize("kind", ["local", "tcp"])
def test_rank_held_up_by_its_own_stream_is_reported(host_engine, kind):
    """Rank 1 has called too, but its stream has not reached the operation: all ranks report that until it has."""

    def body(group):
        with ncclpy.ProcessGroup(group.store, group.rank, 2, device=group.device, name="second") as second:
            second.all_reduce(np.ones(2)).wait(DEADLINE)
            group.barrier().wait(DEADLINE)
            if group.rank == 1:
                stream = ncclpy.Stream(group.device)
                second.all_reduce(np.ones(2)).synchronize(stream)
                work = group.all_reduce(np.ones(4), stream=stream)
            else:
                testing.wait_for(lambda: group.state()[1].state == "blocked_on_input", "its call")
                told.append(group.state()[1].current)
                testing.wait_for(
                    lambda: b'"blocked_on_input":true' in store.get("ncclpy/group/g/1/status/1"), "what it tells"
                )
                second.all_reduce(np.ones(2))
                testing.wait_for(lambda: group.state()[1].state == "running", "its stream")
                work = group.all_reduce(np.ones(4))
            work.wait(DEADLINE)
            together.wait(DEADLINE)
            found = group.state()[1]
            together.wait(DEADLINE)
            return found

    told, together = [], threading.Barrier(2)
    with TCPStore("127.0.0.1", 0, serve=True) if kind == "tcp" else LocalStore() as store:
        found = run_groups(2, body, store=store, name="g")
    assert told == [OperationInfo("all_reduce", 1, "float64", 4, "sum", None)]
    assert [(each.state, each.finished) for each in found] == [("idle", told[0])] * 2


def test_error_names_rank_held_up_by_its_own_stream(host_engine):
    def body(group):
        with ncclpy.ProcessGroup(group.store, group.rank, 2, device=group.device, name="second") as second:
            second.all_reduce(np.ones(2)).wait(DEADLINE)
            group.barrier().wait(DEADLINE)
            if group.rank == 1:
                stream = ncclpy.Stream(group.device)
                second.all_reduce(np.ones(2)).synchronize(stream)
                group.all_reduce(np.ones(4), stream=stream)
            else:
                group.all_reduce(np.ones(4), timeout=0.5)
            if group.rank == 1:  # its stream waits for the second group: it hears of that group's end
                with pytest.raises(ncclpy.NcclAborted, match="process group 'second'"):
                    testing.wait_for(lambda: False, "the end of the second group")
            testing.wait_for(lambda: group.error is not None, "the end")
            second.abort()
            return group.error

    for error in run_groups(2, body, name="g"):
        assert [each.state for each in error.ranks] == ["running", "blocked_on_input"], error
        assert re.search(
            r"of process group 'g': rank 1 has begun all_reduce #1, which waits for its stream since \S+ m?s \(a "
            r"kernel, or a copy, before it has not ended\); rank 0 waits in all_reduce #1 since ",
            str(error),
        ), error


class Late(LocalStore):
    """A store in which each operation takes `late` seconds."""

    late = 0.0

    def _check_usable(self):
        time.sleep(self.late)
        super()._check_usable()


@pytest.mark.parametrize("late", [0.05, pytest.param(0.2, marks=pytest.mark.slow)])
def test_slow_store_still_gives_report_in_error(host_engine, late):
    def body(group):
        group.all_reduce(np.ones(2)).wait(DEADLINE)
        together.wait(DEADLINE)
        store.late = late
        if group.rank < 4:
            group.all_reduce(np.ones(2), timeout=0.5)
        testing.wait_for(lambda: group.error is not None, "the end")
        together.wait(DEADLINE)
        store.late = late
        return group.error

    together, store = threading.Barrier(8), Late()
    for error in run_groups(8, body, store=store):
        assert "': ranks 4-7 have finished all_reduce #0 and are in no operation since " in str(error), error
        assert "; ranks 0-3 wait in all_reduce #1 since " in str(error), error
        assert [each.state for each in error.ranks] == ["running"] * 4 + ["idle"] * 4
    testing.wait_for(
        lambda: not [key for key in store.keys("") if "/answer/" in key], "the answers to be cleared away"
    )


@pytest.mark.parametrize("kind", ["local", "file", "tcp"])
def test_state(arrays, tmp_path, kind):
    """Any rank may call `state` at any time, without an effect on operations."""
    stores = {
        "local": LocalStore,
        "file": lambda: FileStore(tmp_path / "s"),
        "tcp": lambda: TCPStore("127.0.0.1", 0, serve=True),
    }

    def body(group):
        array = arrays.make(np.ones(8, np.float32), group.device)
        together.wait(DEADLINE)
        assert [(each.state, each.finished) for each in group.state(DEADLINE / 4)] == [("idle", None)] * 2
        together.wait(DEADLINE)
        group.all_reduce(arrays.argument(array)).wait(DEADLINE)
        together.wait(DEADLINE)
        work = group.all_reduce(arrays.argument(array)) if group.rank == 0 else None
        together.wait(DEADLINE)
        found = group.state(DEADLINE / 4)  # a generous timeout: ranks that share one FileStore take turns
        together.wait(DEADLINE)
        (work or group.all_reduce(arrays.argument(array))).wait(DEADLINE)
        return found

    together = threading.Barrier(2)
    with stores[kind]() as store:
        for found in run_groups(2, body, store=store):
            assert [each.rank for each in found] == [0, 1]
            assert found[1].state == "idle" and found[1].current is None
            assert found[1].finished == OperationInfo("all_reduce", 0, "float32", 8, "sum", None)
            assert found[1].since >= 0 and found[1].heard >= 0
            assert found[0].state == "running" and found[0].current == OperationInfo(
                "all_reduce", 1, "float32", 8, "sum", None
            )


@pytest.mark.parametrize(
    "kind", [pytest.param("a thread of the store's tells it", marks=pytest.mark.slow), "Python tells it"]
)
def test_status_is_published_periodically_and_on_change(host_engine, kind, monkeypatch):
    def body(group):
        for _ in range(125):
            group.all_reduce(np.ones(1)).wait(DEADLINE)
            time.sleep(0.02 * pace)
        time.sleep(3.5 * pace)  # a time without changes
        quiet.append(time.monotonic())

    told, quiet = [], []
    native = kind != "Python tells it"
    pace = 1.0 if native else 0.25
    monkeypatch.setattr(status, "_PUBLISH_INTERVAL", pace)
    with TCPStore("127.0.0.1", 0, serve=True) if native else LocalStore() as store:
        with store.watch("ncclpy/group/", lambda change: told.append((time.monotonic(), change))):
            run_groups(2, body, store=store)
            testing.wait_for(
                lambda: sum(each.value is None and "/status/" in each.key for _, each in told) == 2, "their last"
            )
    for rank in range(2):
        mine = [(moment, each.value) for moment, each in told if each.key.endswith(f"/status/{rank}")]
        assert mine.pop()[1] is None, "cleared away by the last rank"
        times = [moment for moment, _ in mine][:-1]
        read = [json.loads(value) for _, value in mine]
        done = [(each["current"], each["finished"]) for each in read]
        assert len(times) <= (times[-1] - times[0]) / pace + 3, "when the group is made, and once a pace"
        assert times[-1] < min(quiet) - 0.9 * pace, "not where nothing changes"
        assert all(one != other for one, other in itertools.pairwise(done[:-1]))
        assert done[0] == (None, None) and read[0]["since"] is None
        finished = [each["seq"] for _, each in done if each is not None]
        assert finished == sorted(finished) and finished[-1] == 124 and len(set(finished)) >= 3
        for each in read:
            assert each["process"]["pid"] == os.getpid() and abs(each["at"] - time.time()) < 60
        assert ["closed" in each for each in read] == [False] * (len(read) - 1) + [True]


def test_rank_that_shares_no_process_is_searched_in_all_local_groups(host_engine, monkeypatch):
    """A group's only rank in its process may wait in any group there; the operation that began first is reported."""
    monkeypatch.setattr(reports, "PATIENCE", 0.05)  # no other rank answers
    with LocalStore() as store, LocalStore() as far:
        with ncclpy.ProcessGroup(store, 0, 2, name="one", device=0) as one:
            others = [ncclpy.ProcessGroup(far, 0, 2, name=name, device=1) for name in ("first", "second")]
            try:
                assert one.state(0.1)[0].state == "idle"
                others[1].all_reduce(np.ones(2))
                others[0].broadcast(np.ones(2))
                mine = one.state(0.1)[0]
                assert (mine.state, mine.where, mine.current.operation) == ("in_other_group", "second", "all_reduce")
            finally:
                for other in others:
                    other.abort()
                    other.close()
            assert one.state(0.1)[0].state == "idle", "what has ended is nowhere"


def test_record_of_failed_group_does_not_hold_its_store(host_engine):
    store = LocalStore()
    with ncclpy.ProcessGroup(store, 0, 1, device=0) as group:
        group.abort("enough")
    kept = weakref.ref(store)
    del group, store
    gc.collect()
    testing.wait_for(lambda: gc.collect() >= 0 and kept() is None, "the end of the store")


def test_late_operation_with_on_error_report_names_late_rank(host_engine):
    def body(group):
        group.all_reduce(np.ones(2)).wait(DEADLINE)
        if group.rank == 1:
            testing.wait_for(late.is_set, "the other's deadline")
        error = group.all_reduce(np.ones(2), timeout=0.3 if group.rank == 0 else None).exception(DEADLINE)
        late.set()
        group.wait_for_pending_works(DEADLINE)
        return error

    late = threading.Event()
    first, second = run_groups(2, body, on_error="report")
    assert second is None and [each.state for each in first.ranks] == ["running", "idle"]
    assert "continues. all_reduce #1 (float64 x 2, sum) of process group 'default': rank 1 has finished" in str(first)


def test_lost_store_is_named_in_error(host_engine):
    def body(group):
        group.all_reduce(np.ones(2)).wait(DEADLINE)
        together.wait(DEADLINE)
        if group.rank == 0:
            store.close()
            return group.all_reduce(np.ones(2), timeout=0.3).exception(DEADLINE)
        testing.wait_for(lambda: store.closed, "its end")
        return None

    together = threading.Barrier(2)
    with LocalStore() as store:
        error = run_groups(2, body, store=store)[0]
    assert isinstance(error, ncclpy.NcclTimeout) and error.ranks is None
    assert "What the other ranks do is not known: " in str(error)


def test_failing_report_still_ends_the_group(host_engine, monkeypatch, caplog):
    from ncclpy.process_group.group_status import GroupStatus

    def torn(*_):
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr(GroupStatus, "inquire", torn)

    def body(group):
        group.all_reduce(np.ones(2)).wait(DEADLINE)
        together.wait(DEADLINE)
        if group.rank == 0:
            return group.all_reduce(np.ones(2), timeout=0.3).exception(DEADLINE)
        testing.wait_for(lambda: group.error is not None, "the news")
        return group.error

    together = threading.Barrier(2)
    errors = run_groups(2, body)
    assert [type(error) for error in errors] == [ncclpy.NcclTimeout, ncclpy.NcclTimeout]
    assert "could not ask what the others do" in caplog.text


# Ranks that are processes.

WHAT = {
    "busy": (
        "def computes():\n    begins()\n    while True: pass\ncomputes()",
        "rank 1 has finished all_reduce #0 and is in",
    ),
    "holds the GIL": (
        "import ctypes\nsleep = ctypes.PyDLL(None).sleep\nbegins()\nsleep(60)",
        "rank 1 does not answer, and the process lives: "
        "its Python does not run (the GIL is held), last heard of after all_reduce #0",
    ),
    "stopped": (
        "begins()\nos.kill(os.getpid(), signal.SIGSTOP)",
        "rank 1's process is stopped (by SIGSTOP or a debugger), last heard of after all_reduce #0",
    ),
    "left": ("group.close()\nbegins()\ntime.sleep(60)", "rank 1 has closed the group after all_reduce #0"),
    "killed": (
        "begins()\nos.kill(os.getpid(), signal.SIGKILL)",
        "rank 1's process has ended, last heard of after all_reduce #0",
    ),
}


def test_status_of_rank_is_known_without_recorder(host_engine):
    def body(group):
        for _ in range(3):
            group.all_reduce(np.ones(1)).wait(DEADLINE)
        together.wait(DEADLINE)
        found = group.state(DEADLINE)
        together.wait(DEADLINE)
        return found

    together = threading.Barrier(2)
    capacity = ncclpy.recorder.snapshot()["capacity"]
    ncclpy.recorder.resize(0)
    try:
        found = run_groups(2, body)
    finally:
        ncclpy.recorder.resize(capacity)
    for states in found:
        assert [each.finished.seq for each in states] == [2, 2]


def test_begun_operation_is_reported_while_call_holds_gil(tmp_path):
    testing.need_processes(2)
    program = TOLD + (
        "if group.rank == 1:\n"
        "    import ctypes\n"
        "    group.broadcast(many, root=1), group.all_reduce(two)\n"
        "    sleep = ctypes.PyDLL(None).sleep\n"
        "    group.store.set('has begun', b'')\n"
        "    sleep(60)\n"
        "group.store.get('has begun')\n"
        "time.sleep(0.3)  # until the call has begun\n"
        "found = group.state()[1]\n"
        "print('rank 1 is', found.state, 'after', found.finished, 'in', found.current, found.heard < 5, flush=True)\n"
        "os._exit(0)\n"
    )
    output = run_ranks(tmp_path, 2, program, only=[0])[1]
    said = [line for line in output.splitlines() if "rank 1 is" in line]
    assert len(said) == 1, output
    where = r"in (broadcast #1 \(float32 x 1,024, root 1\)|all_reduce #2 \(float64 x 2, sum\)) True"
    assert re.search("rank 1 is unresponsive after .* " + where, said[0]), said


@pytest.mark.parametrize("what", WHAT)
def test_error_tells_what_other_process_does(tmp_path, what):
    testing.need_processes(2)
    does, said = WHAT[what]
    program = TOLD + (
        "begins = lambda: group.store.set('has begun', b'')\n"
        "if group.rank == 1:\n" + textwrap.indent(does, "    ") + "\n    os._exit(0)\n"
        "group.store.get('has begun')\n"
        "error = group.all_reduce(many, timeout=0.5).exception(60)\n"
        "print('rank', group.rank, 'has', error, error.ranks[1].state, flush=True)\n"
        "group.close()\n"
    )
    output = run_ranks(tmp_path, 2, program, only=[0])[1]
    lines = [line for line in output.splitlines() if "rank 0 has " in line]
    assert len(lines) == 1, output
    for line in lines:
        assert said in line, line
        assert re.search(r"rank 0 waits in all_reduce #1 since \d", line), line
        called = r"\. Python of rank 1: \S+:\d+ in computes, called by \S+:\d+ in "
        assert ("Python of" in line) == (what == "busy") == bool(re.search(called, line)), line


def test_death_is_noticed_by_lease_alone(host_engine, tmp_path):
    """A receive from a living rank ends when a third rank has died: the lease tells, long before the deadline."""
    program = """
        from ncclpy.peers import status

        status._PUBLISH_INTERVAL = 0.1
        group = ncclpy.init_process_group(timeout=60)
        group.all_reduce(np.ones(2)).wait(60)
        group.connect(peers=[1 - group.rank] if group.rank < 2 else [])
        group.store.barrier('all have told', group.rank, 3)
        if group.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if group.rank == 1:
            time.sleep(60)
        begun = time.monotonic()
        error = group.recv(np.ones(4), 1).exception(60)
        print('rank 0 after', time.monotonic() - begun, 'has', type(error).__name__, error, flush=True)
        os._exit(0)
        """
    line = run_ranks(tmp_path, 3, program, only=[0])[1]
    assert float(re.search("rank 0 after ([0-9.]+)", line)[1]) < DEADLINE / 2
    gone = r"rank 2 of process group 'default' is gone: its (lease in the store|process, \d+,) has ended"
    assert re.search(gone, line), line
    assert "rank 2's process has ended" in line, line


def test_rank_that_exits_after_all_operations_does_no_harm(host_engine, tmp_path):
    output = run_ranks(
        tmp_path,
        3,
        """
        from ncclpy.peers import status

        status._PUBLISH_INTERVAL = 0.1
        group = ncclpy.init_process_group(timeout=60)
        group.all_reduce(np.ones(2)).wait(60)
        group.store.barrier('all are done', group.rank, 3)
        if group.rank == 2:
            os._exit(0)
        time.sleep(0.5)  # several times the period after which a waiting rank looks which ranks are there
        assert group.error is None, group.error
        print('rank', group.rank, 'is well', flush=True)
        group.close()
        """,
    )[1]
    assert output.count("is well") == 2, output


def test_state_with_closed_store_is_an_error(host_engine):
    with LocalStore() as store, ncclpy.ProcessGroup(store, 0, 1, device=0) as group:
        assert [each.state for each in group.state()] == ["idle"]
        store.close()
        with pytest.raises(StoreError, match="closed"):
            group.state()


class Stuck(LocalStore):
    """A store in which asked ranks do not answer (`silent`), or in which ends cannot be written (`stuck`)."""

    stuck = silent = False

    def _set(self, key: str, value: bytes, deadline: float) -> None:
        if not (self.silent and "/answer/" in key):
            super()._set(key, value, deadline)

    def _compare_set(self, key, expected, desired, deadline):
        while self.stuck and time.monotonic() < deadline:
            time.sleep(0.01)
        return super()._compare_set(key, expected, desired, deadline)


def test_stuck_store_does_not_delay_abort(host_engine, monkeypatch):
    monkeypatch.setattr(inquiry, "_ANSWER_TIMEOUT", 0.25)
    monkeypatch.setattr(lifecycle, "_TELL_TIMEOUT", 0.25)
    store = Stuck(20.0)
    with ncclpy.ProcessGroup(store, 0, 2, name="stuck") as group:
        store.stuck = True
        begin = time.monotonic()
        group.abort("enough")
        assert time.monotonic() - begin < 10 and "enough" in str(group.error)
        assert "is not known: the store has not answered within 0.25 s" in str(group.error)
        store.stuck = False


def test_abort_left_by_signal_handler_still_ends_group(host_engine):
    store = Stuck()
    with ncclpy.ProcessGroup(store, 0, 2, name="left"), ncclpy.ProcessGroup(store, 1, 2, name="left") as group:
        store.silent = True
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(KeyboardInterrupt):
                group.abort("enough")
        finally:
            signal.signal(signal.SIGALRM, before)
        assert "enough" in str(group.error)


def test_signal_handler_may_abort_during_abort_of_its_thread(host_engine):
    store = Stuck()
    with ncclpy.ProcessGroup(store, 0, 2, name="twice"), ncclpy.ProcessGroup(store, 1, 2, name="twice") as group:
        store.silent = True
        begin, took = time.monotonic(), []

        def abort(*_):
            group.abort("in between")
            took.append(time.monotonic() - begin)

        before = signal.signal(signal.SIGALRM, abort)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            group.abort("first")
        finally:
            signal.signal(signal.SIGALRM, before)
        assert took and took[0] < 2.5 and group.error is not None


def test_rank_that_closes_while_its_status_is_written_has_closed(host_engine):
    reports = Reports(LocalStore(), 0, 2, lambda: {"current": None, "finished": None}, bool, bool)
    store, inner = reports.store, reports.store.set
    closing = threading.Thread(target=reports.publish, kwargs={"closed": True})

    def late(key, value):
        store.set = inner
        closing.start()
        closing.join(0.2)  # close() waits for this write
        inner(key, value)

    store.set = late
    reports.publish()
    closing.join(DEADLINE)
    assert reports.has_closed(0)
