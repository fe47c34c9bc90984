"""Dumps of processes in NCCLPY_DUMP_DIR after their group failed, and the report of ``ncclpy trace`` on them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap

import pytest

import testing
from ncclpy.bootstrap import TCPStore
from ncclpy.cli.main import main

pytestmark = pytest.mark.usefixtures("host_engine")

BEGIN = """
import os, sys, threading, time
import numpy as np, ncclpy, testing
from ncclpy.bootstrap import TCPStore

rank, size, store = int(sys.argv[1]), int(sys.argv[2]), TCPStore("127.0.0.1", int(sys.argv[3]))

def make(timeout=20, name="default", **options):
    return ncclpy.ProcessGroup(store, rank, size, device=rank, name=name, timeout=timeout, **options)

FOLDER = os.environ["NCCLPY_DUMP_DIR"]

def written():
    testing.wait_for(lambda: any(name.endswith(f"-{os.getpid()}.json") for name in os.listdir(FOLDER)))

def all_have_written(number=size):
    testing.wait_for(lambda: len([name for name in os.listdir(FOLDER) if name.endswith(".json")]) >= number)
"""


@pytest.fixture
def ranks(tmp_path, capsys):
    """Return a function that runs a program as `size` processes, and returns their dumps and the report."""

    def run(size, code, killed=()):
        code = f"{BEGIN}\n{textwrap.dedent(code)}\nos._exit(0)"
        env = os.environ | {"NCCLPY_LIBRARY": "host", "NCCLPY_DUMP_DIR": str(tmp_path)}
        env["PYTHONPATH"] = os.pathsep.join([os.path.dirname(testing.__file__), env.get("PYTHONPATH", "")])
        with TCPStore("127.0.0.1", 0, serve=True, linger=0) as store:
            processes = [
                subprocess.Popen([sys.executable, "-c", code, str(rank), str(size), str(store.port)], env=env, cwd="/")
                for rank in range(size)
            ]
            try:
                for rank, process in enumerate(processes):
                    assert process.wait(60) == (-signal.SIGKILL if rank in killed else 0), f"rank {rank}"
            finally:
                for process in processes:
                    process.kill()
                    process.wait()
        dumps = {}
        for path in tmp_path.iterdir():
            name = re.fullmatch(r"rank-(\d+)-.*-(\d+)\.json", path.name)
            assert name is not None, path
            assert int(name[2]) == processes[int(name[1])].pid
            dumps[int(name[1])] = json.loads(path.read_text())
        assert main(["trace", str(tmp_path)]) == 1
        said, errors = capsys.readouterr()
        assert errors == ""
        return dumps, said

    return run


def part(said):
    """Return the lines of the report on where the ranks diverge."""
    told = said.splitlines()
    at = next(number for number, line in enumerate(told) if line.startswith("the ranks diverge"))
    return told[at : told.index("", at)]


def brought(lines):
    """Return the last call of each rank; "ended" stands for failed, and for the states shortly before a failure."""
    found = {}
    for line in lines:
        ranks, _, what = line.strip().partition(": ")
        if ranks == "late":  # on a busy machine also one of the two ranks that joined in time
            continue
        first, _, last = ranks.split()[1].partition("-")
        ends = "called and not launched|launched and not completed|failed"
        what = re.sub(rf", called at <string>:\d+, ({ends})$", " ended", what)
        found.update(dict.fromkeys(range(int(first), int(last or first) + 1), what))
    return found


def test_rank_that_joins_after_deadline_is_named(ranks):
    """Rank 2 sleeps for longer than the others wait: every rank writes a dump, and rank 2's tells when it joined."""
    dumps, said = ranks(
        3,
        """
        if rank == 2:
            all_have_written(2)
            time.sleep(0.5)
        else:
            store.barrier("both have begun", rank, 2)
        group = make(timeout=1)
        try:
            group.all_reduce(np.ones(4)).wait()
        except ncclpy.NcclError:
            pass
        else:
            sys.exit(1)
        written()
        all_have_written(3)  # a process that comes behind the end of the others begins a new attempt
        """,
    )
    assert sorted(dumps) == [0, 1, 2]
    head, *lines = part(said)
    assert head == "the ranks diverge at sequence 0 of process group 'default' (3 ranks), which was never made"
    ended = "all_reduce of 4 float64 (sum) ended"
    assert brought(lines) == {0: ended, 1: ended, 2: "never launched it"}
    (late,) = [line for line in said.splitlines() if line.startswith("late: ")]
    found = re.fullmatch(
        r"late: rank 2 of 3 made process group 'default' (\d+\.\d{3}) s after rank [01], (\d+\.\d{3}) s after the "
        r"group had ended on rank [01]",
        late,
    )
    assert found is not None and float(found[1]) > float(found[2]) + 0.5 > 0.9, late
    end = r"1 failed process group, 1 standstill with ranks missing, (rank 2|ranks [01]-2|ranks 0, 2) late"
    assert re.fullmatch(rf"stuck: ([12] failures?, )?{end}", said.splitlines()[-1])


BUSY = {
    "asleep in Python": "time.sleep(3600)",
    "in C": "import ctypes; ctypes.CDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)",
    "busy": "while True: pass",
}


@pytest.mark.parametrize(
    "where", [pytest.param(where, marks=[pytest.mark.slow] * (where == "asleep in Python")) for where in BUSY]
)
def test_missing_rank_dumps_when_it_hears_of_the_end(ranks, where):
    dumps, said = ranks(
        2,
        f"""
        group = make()
        group.barrier().wait()
        if rank == 1:
            threading.Thread(target=lambda: (all_have_written(), os._exit(0))).start()
            {BUSY[where]}
        else:
            assert isinstance(group.all_reduce(np.ones(4), timeout=0.5).exception(20), ncclpy.NcclTimeout)
            all_have_written()
        """,
    )
    assert dumps[0]["reason"].startswith("NcclTimeout: ")
    assert dumps[1]["reason"].startswith("NcclTimeout: process group 'default' was ended by rank 0 of 2: ")
    assert dumps[0]["clock"] == dumps[1]["clock"]
    head, *lines = part(said)
    assert re.fullmatch(r"the ranks diverge at sequence 1 of communicator default \w+ \(2 ranks\)", head)
    assert brought(lines) == {0: "all_reduce of 4 float64 (sum) ended", 1: "never launched it"}
    assert re.search(r"^  missing: rank 1 \(.* pid \d+\) has not launched it$", said, re.M)
    assert "    now: nothing in progress; last recorded was barrier of 1 " in said


def test_abort_is_dumped_by_all_ranks(ranks):
    dumps, said = ranks(
        3,
        """
        group = make()
        group.connect()
        store.barrier("all are connected", rank, size, 20)
        if rank == 1:
            group.abort("the loss is no number")
        testing.wait_for(lambda: group.error)
        all_have_written()
        """,
    )
    assert sorted(dumps) == [0, 1, 2]
    assert all("the loss is no number" in dump["reason"] for dump in dumps.values())
    assert all("the loss is no number" in dump["groups"][0]["error"] for dump in dumps.values())
    assert re.search(
        r"^  'default', 3 ranks, first on rank 1 \(.*\): NcclAborted: process group 'default' was aborted by rank "
        r"1: the loss is no number\. ",
        said,
        re.M,
    )
    assert said.splitlines()[-1] == "nothing is stuck now, but something has failed: 1 failed process group"


def test_two_groups_of_which_one_fails(ranks):
    dumps, said = ranks(
        2,
        """
        one, two = make(name="one"), make(name="two")
        one.barrier().wait(), two.barrier().wait()
        if rank == 0:
            assert isinstance(two.all_reduce(np.ones(4), timeout=0.5).exception(20), ncclpy.NcclTimeout)
        all_have_written()
        one.barrier().wait()
        store.barrier("end", rank, size, 60)  # otherwise a rank could exit before the other's barrier is done
        """,
    )
    for dump in dumps.values():
        assert {group["name"]: group["ended"] is None for group in dump["groups"]} == {"one": True, "two": False}
    assert re.fullmatch(r"the ranks diverge at sequence 1 of communicator two \w+ \(2 ranks\)", part(said)[0])


def test_killed_process_leaves_no_dump_and_is_named(ranks):
    dumps, said = ranks(
        3,
        """
        group = make()
        group.barrier().wait()
        store.barrier("begun", rank, size, 60)  # the others' is done as well
        if rank == 1:
            os.kill(os.getpid(), 9)
        assert group.all_reduce(np.ones(4), timeout=2).exception(20) is not None
        written()
        """,
        killed=[1],
    )
    assert sorted(dumps) == [0, 2]
    assert "no dump of rank 1 (of 3 in process group 'default')" in said.splitlines()
    assert "  rank 1: no dump" in said.splitlines()


def test_ranks_that_call_different_things(ranks):
    _, said = ranks(
        2,
        """
        group = make()
        group.barrier().wait()
        array = np.ones(4 + rank)
        assert group.all_reduce(array, timeout=2).exception(20) is not None
        written()
        """,
    )
    lines = {rank: f"all_reduce of {4 + rank} float64 (sum) ended" for rank in range(2)}
    assert brought(part(said)[1:]) == lines
    assert re.search(r"^mismatch on communicator default \w+ at sequence 1: ranks differ$", said, re.M)
