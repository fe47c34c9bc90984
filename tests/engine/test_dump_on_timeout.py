"""NCCLPY_DUMP_ON_TIMEOUT, read at import: the recorder's dump is in a file when NcclTimeout arrives."""

from __future__ import annotations

import json
import socket
import textwrap

import pytest

import testing
from ncclpy.cli.main import main

pytestmark = pytest.mark.usefixtures("host_engine")

BEGIN = """
import json, logging, os, sys, threading, time
import numpy as np, ncclpy, testing

def dump(name):
    with open(name) as file:
        return json.load(file)

def states(name):
    return [entry["state"] for entry in dump(name)["entries"]]

def late(call):
    try:
        call()
    except ncclpy.NcclTimeout as error:
        return error
    raise AssertionError("it was in time")
"""


def run(code, folder, pattern="rank-%r.json", **more):
    """Run a program with the variable set, in `folder`; return what it printed and its errors."""
    code = f"import os; os.chdir({str(folder)!r})\n{BEGIN}\n{textwrap.dedent(code)}"
    env = {"NCCLPY_LIBRARY": "host", "NCCLPY_DUMP_ON_TIMEOUT": pattern, **more}
    done = testing.run_python(code, env=env)
    return done.stdout, done.stderr


def test_the_file_is_there_when_the_error_arrives(tmp_path):
    run(
        """
        comms = ncclpy.Communicator.init_all([0, 1], timeout=30)
        error = late(lambda: comms[0].all_reduce(np.ones(4), timeout=0.2))
        assert os.listdir() == ["new"] and os.listdir("new") == ["rank-0-1.json"], os.listdir()
        found = dump("new/rank-0-1.json")
        said, _, where = str(error).partition(". This rank called ")
        assert found["reason"] == f"NcclTimeout: {said}" and where == "all_reduce #0 at <string>:22", found["reason"]
        (entry,) = found["entries"]
        assert (entry["state"], entry["error"], entry["sequence"]) == ("failed", said, 0), entry
        os._exit(0)
        """,
        tmp_path,
        "new/rank-%r.json",
    )


def test_what_the_signs_stand_for(tmp_path):
    out, _ = run(
        """
        uid = ncclpy.get_unique_id()
        late(lambda: ncclpy.Communicator.init(6, 5, uid, timeout=0.3))
        print(os.getpid(), os.listdir())
        """,
        tmp_path,
        "%p %h 100%% %r",
    )
    pid, names = out.split(" ", 1)
    assert eval(names) == [f"{pid} {socket.gethostname()} 100% 5"]


@pytest.mark.parametrize(
    ("pattern", "word"),
    [
        ("rank-%q.json", "%q"),
        ("folder/", "is a folder"),
        pytest.param("rank-%", "'%'", marks=pytest.mark.slow),
        pytest.param(".", "is a folder", marks=pytest.mark.slow),
    ],
)
def test_a_pattern_that_is_wrong_is_warned_of_at_import(tmp_path, pattern, word):
    _, errors = run(
        """
        comms = ncclpy.Communicator.init_all([0, 1], timeout=30)
        late(lambda: comms[0].all_reduce(np.ones(4), timeout=0.2))
        assert ncclpy.recorder.snapshot()["entries"] == []
        assert os.listdir() == [], os.listdir()
        """,
        tmp_path,
        pattern,
    )
    assert "RuntimeWarning: NCCLPY_DUMP_ON_TIMEOUT=" in errors and word in errors and "No dump" in errors


def test_an_empty_variable_does_nothing(tmp_path):
    _, errors = run(
        """
        comms = ncclpy.Communicator.init_all([0, 1], timeout=30)
        late(lambda: comms[0].all_reduce(np.ones(4), timeout=0.2))
        assert ncclpy.recorder.snapshot()["entries"] == [] and os.listdir() == []
        """,
        tmp_path,
        "",
    )
    assert errors == ""


def test_a_file_that_cannot_be_written_does_not_hide_the_error(tmp_path):
    (tmp_path / "file").write_text("")
    _, errors = run(
        """
        comms = ncclpy.Communicator.init_all([0, 1], timeout=30)
        late(lambda: comms[0].all_reduce(np.ones(4), timeout=0.2))
        assert os.listdir() == ["file"]
        """,
        tmp_path,
        "file/rank-%r.json",
    )
    assert "the recorder's dump cannot be written to" in errors and "file/rank-0-1.json" in errors


CALLS = {
    "a call": """
        late(lambda: comms[0].all_reduce(np.ones(4), timeout=0.2))
    """,
    "a group": """
        def group():
            with ncclpy.group(timeout=0.2):
                comms[0].all_reduce(np.ones(4))
        late(group)
    """,
    "a plan": """
        plan = ncclpy.Plan()
        with plan.record():
            comms[0].all_reduce(np.ones(4))
        late(lambda: plan.launch(timeout=0.2))
    """,
    "a stuck call of a plan": """
        plan = ncclpy.Plan()
        with plan.record():
            for comm in comms:
                comm.all_reduce(np.ones(4))
        with ncclpy.faults("rank=0 call=AllReduce do=hang"):
            late(lambda: plan.launch(timeout=0.2))
    """,
    "a graph": """
        plan = ncclpy.Plan()
        with plan.record():
            comms[0].all_reduce(np.ones(4), timeout=0.2)
        graph = plan.capture()
        late(graph.launch)
    """,
    "a split": """
        late(lambda: comms[0].split(0, timeout=0.2))
    """,
    "a finalize": """
        comm = ncclpy.Communicator.init(1, 0, ncclpy.get_unique_id(), timeout=0.5)
        with ncclpy.faults("rank=0 call=CommFinalize do=hang"):
            late(comm.finalize)
        os.rename("rank-0.json", "rank-0-1.json")
    """,
    "a call of a child": """
        with ncclpy.group():
            children = [comm.split(comm.rank) for comm in comms]
        assert [child.rank for child in children] == [0, 0]
        with ncclpy.faults("call=AllReduce at=run do=hang"):
            late(lambda: children[1].all_reduce(np.ones(4), timeout=0.2))
    """,
    "the watcher's verdict": """
        stream = ncclpy.Stream(0)
        comms[0].all_reduce(np.ones(4), stream=stream, timeout=0.2)
        late(lambda: stream.synchronize(30))
    """,
    "a work of a Manager": """
        manager = ncclpy.Manager(timeout=0.5)
        with ncclpy.faults("rank=1 call=AllReduce at=run do=hang"):
            works = [manager.all_reduce("k", np.ones(4), device=device, num_local=2) for device in (0, 1)]
            late(works[0].wait)
        testing.wait_for(lambda: os.path.exists("rank-0-1.json"))
    """,
    "a gathering": """
        manager = ncclpy.Manager(timeout=0.3)
        work = manager.all_reduce("k", np.ones(4), device=0, num_local=2)
        late(work.wait)
        testing.wait_for(lambda: os.path.exists("rank-0-1.json"))
    """,
    "communicators of a Manager": """
        manager = ncclpy.Manager(timeout=0.5)
        key = manager.generate_communicator_key()
        work = manager.all_reduce(
            "k", np.ones(4), device=0, num_local=1, num_global=2, communicator_key=key, global_rank=0
        )
        manager.signal_multi_node_ready("k")
        late(work.wait)
        testing.wait_for(lambda: os.path.exists("rank-0-1.json"))
    """,
    "a wait for initialisation": """
        comm = ncclpy.Communicator.init(3, 2, ncclpy.get_unique_id(), config=ncclpy.Config(blocking=False))
        late(lambda: comm.wait_ready(0.3))
        os.rename("rank-2.json", "rank-0-1.json")
    """,
    "a close": """
        ncclpy.core.ending._ENDING = 0.2
        comm = ncclpy.Communicator.init(1, 0, ncclpy.get_unique_id(), abortable=True)
        with ncclpy.faults("rank=0 call=CommDestroy do=hang; rank=0 call=CommFinalize do=hang"):
            late(lambda: comm.close(timeout=0.3))
        os.rename("rank-0.json", "rank-0-1.json")
    """,
    "an await": """
        import asyncio
        config = ncclpy.Config(blocking=False)
        async def wait():
            comm = ncclpy.Communicator.init(3, 2, ncclpy.get_unique_id(), config=config)
            await comm.ready(timeout=0.3)
        late(lambda: asyncio.run(wait()))
        testing.wait_for(lambda: os.path.exists("rank-2.json"))
        os.rename("rank-2.json", "rank-0-1.json")
    """,
}


# What is late by itself has its file from elsewhere than what is late in a group, in a plan, and so on.
QUICK = (
    "a group",
    "a plan",
    "a call of a child",
    "the watcher's verdict",
    "a work of a Manager",
    "a gathering",
    "a close",
)


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[] if what in QUICK else [pytest.mark.slow]) for what in CALLS]
)
def test_what_can_be_late(tmp_path, what):
    run(
        f"""
        comms = ncclpy.Communicator.init_all([0, 1], timeout=30)
        {CALLS[what].strip()}
        assert os.listdir() == ["rank-0-1.json"], os.listdir()
        assert dump("rank-0-1.json")["reason"].startswith("NcclTimeout: ")
        os._exit(0)
        """,
        tmp_path,
    )


@pytest.mark.slow
def test_works_of_the_manager_that_are_late_together(tmp_path):
    """Their file is written a few times, not hundreds, and in the end tells of all of them."""
    run(
        """
        written = []
        class Count(logging.Handler):
            def emit(self, record):
                if "dump is in" in record.getMessage():
                    written.append(time.monotonic())
        logging.getLogger("ncclpy").setLevel(logging.INFO)
        logging.getLogger("ncclpy").addHandler(Count())
        manager = ncclpy.Manager(timeout=30, fail_fast=False)
        def bring(key, **options):
            return [manager.all_reduce(key, np.ones(4), device=device, num_local=2, **options) for device in (0, 1)]
        for work in bring("warm"):
            work.wait()
        with ncclpy.faults("rank=1 call=AllReduce at=run do=hang"):
            works = [work for number in range(100) for work in bring(number, timeout=1.0)]
            gathered = [manager.all_reduce(("alone", number), np.ones(4), device=0, num_local=2, timeout=1.0)
                        for number in range(100)]
            errors = [work.exception(timeout=30) for work in works + gathered]
        assert sum(isinstance(error, ncclpy.NcclTimeout) for error in errors) >= 101, errors
        testing.wait_for(lambda: written)
        def told():
            entries = dump("rank-0-1.json")["entries"]
            return len(entries) == 302 and [entry["state"] for entry in entries].count("failed") == 300
        testing.wait_for(told, "the last state in the file", timeout=10)
        assert os.listdir() == ["rank-0-1.json"], os.listdir()
        assert all(after - before > 0.5 for before, after in zip(written, written[1:])), written
        os._exit(0)
        """,
        tmp_path,
    )


def test_the_end_of_the_process_writes_what_waits_for_its_turn(tmp_path):
    run(
        """
        ncclpy.engine.dumps._SPACING = 1000.0
        comms = ncclpy.Communicator.init_all([0, 1], timeout=30)
        with ncclpy.group():
            a, b = (comm.split(comm.rank) for comm in comms)
        with ncclpy.faults("call=AllReduce nth=* at=run do=hang"):
            late(lambda: a.all_reduce(np.ones(4), timeout=0.2))
            late(lambda: b.all_reduce(np.ones(4), timeout=0.2))
        assert states("rank-0-1.json") == ["failed"], "the second is a second later at the earliest"
        """,
        tmp_path,
    )
    found = json.loads((tmp_path / "rank-0-1.json").read_text())
    assert [entry["state"] for entry in found["entries"]] == ["failed"] * 2


@pytest.mark.slow
def test_a_file_is_written_once_a_second_and_never_half(tmp_path):
    run(
        """
        def rounds(number):
            for _ in range(number):
                comms = ncclpy.Communicator.init_all([0, 1], timeout=30)
                late(lambda: comms[0].all_reduce(np.ones(4), timeout=0.05))

        with ncclpy.Communicator.init(1, 0, ncclpy.get_unique_id()) as alone:
            for _ in range(1000):
                alone.all_reduce(np.ones(4))
        times, done = set(), False

        def look():
            while not done:
                try:
                    times.add(os.stat("rank-0-1.json").st_mtime_ns)
                    states("rank-0-1.json")
                except FileNotFoundError:
                    pass

        reader = threading.Thread(target=look)
        begun = time.monotonic()
        try:
            reader.start()
            rounds(10)
            seconds = time.monotonic() - begun
            several = len(times)
            ncclpy.engine.dumps._SPACING = 0.0
            rounds(10)
        finally:
            done = True
            reader.join()
        assert several <= seconds + 1, (several, seconds)
        assert len(times) > several
        """,
        tmp_path,
    )


def test_a_forked_child_writes_its_own(tmp_path):
    run(
        """
        if os.fork() == 0:
            comms = ncclpy.Communicator.init_all([0, 1], timeout=30)
            late(lambda: comms[0].all_reduce(np.ones(4), timeout=0.2))
            assert os.listdir() == [f"{os.getpid()}.json"]
            os._exit(0)
        assert os.wait()[1] == 0
        """,
        tmp_path,
        "%p.json",
    )


def test_a_forked_child_leaves_what_its_parent_has_to_write(tmp_path):
    run(
        """
        ncclpy.engine.dumps._SPACING, ncclpy.engine.dumps._PATIENCE = 1000.0, 30.0
        comms = ncclpy.Communicator.init_all([0, 1], timeout=30)
        with ncclpy.group():
            children = [comm.split(comm.rank) for comm in comms]
        with ncclpy.faults("call=AllReduce nth=* at=run do=hang"):
            for child in children:
                late(lambda: child.all_reduce(np.ones(4), timeout=0.2))
        import warnings
        warnings.simplefilter("ignore")  # Python's, of threads
        begun = time.monotonic()
        if os.fork() == 0:
            sys.exit(0)  # what is to be done at the end is done here
        assert os.wait()[1] == 0
        assert time.monotonic() - begun < 15, "it has waited for the thread that writes, which it does not have"
        assert os.listdir() == [f"{os.getpid()}.json"]
        """,
        tmp_path,
        "%p.json",
    )


RANK = """
rank = int(os.environ["RANK"])
if rank == 0:
    with open("id.unfinished", "wb") as file:
        file.write(bytes(ncclpy.get_unique_id()))
    os.rename("id.unfinished", "id")
testing.wait_for(lambda: os.path.exists("id"))
with open("id", "rb") as file:
    comm = ncclpy.Communicator.init(3, rank, file.read(), device=rank, timeout=20)
comm.all_reduce(np.ones(4))
if rank == 1:
    other = ncclpy.Communicator.init(1, 0, ncclpy.get_unique_id(), device=rank)
    other.all_reduce(np.ones(2))
    ncclpy.recorder.dump("rank-1.json")
else:
    late(lambda: comm.all_reduce(np.ones(8), timeout=1.0))
# One that ended before the others' deadlines would be what they tell of.
testing.wait_for(lambda: os.path.exists("rank-0.json") and os.path.exists("rank-2.json"))
os._exit(0)
"""


def test_trace_names_the_rank_that_did_not_come(tmp_path, capsys):
    """Once from the dumps of all, and once without that of the rank that is missing."""

    def start(rank):
        # Without a store the first to abort may complete the other's operation, which has no deadline to tell of then.
        return run(RANK, tmp_path, RANK=str(rank), NCCLPY_HOST_ABORT_CORRUPTS="0")

    testing.run_threads(3, lambda rank: start(rank.rank))
    names = [str(tmp_path / f"rank-{rank}.json") for rank in range(3)]
    assert main(["trace", *names]) == 1
    said = capsys.readouterr().out
    assert "sequence 1 waits for rank 1" in said, said
    assert "last on it: sequence 0, all_reduce of 4 float64 (sum), completed" in said, said
    assert "now: nothing in progress; last recorded was all_reduce of 2 float64" in said, said
    assert main(["trace", names[0], names[2]]) == 1
    assert "unknown: rank 1" in capsys.readouterr().out
