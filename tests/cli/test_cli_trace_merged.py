"""``ncclpy trace`` on the dumps of many ranks: where they diverge, late ranks, and ranks without a dump."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from test_cli_trace import chrome, document, entry, launched, lines_of

import testing
from ncclpy.cli.main import main
from ncclpy.cli.trace import reading
from ncclpy.cli.trace.dump import read
from ncclpy.cli.trace.table import divide, table_of, table_of_text

ADVICE = "A rank is missing or stuck: see which did not arrive, with ncclpy.recorder.dump() and `ncclpy trace`"


def failed(rank, sequence, began, ended, error="it was not done in 2 s", **changes):
    """Return the entry of a plain call that was made at `began` and failed at `ended`."""
    times = {"created": began, "launched": ended, "completed": ended}
    return entry(
        rank, sequence, **({"launch": None, "state": "failed", "error": error, "nranks": 3} | times | changes)
    )


def group(rank, size=3, made=90.0, ended=None, name="default"):
    error = None if ended is None else "NcclTimeout: not in time"
    return {"name": name, "number": 1, "rank": rank, "size": size, "made": made, "ended": ended, "error": error}


def written(text):
    """Return JSON in a recorder's layout: one entry per line."""
    return json.dumps(text).replace('[{"', '[\n{"').replace('}, {"', '},\n{"') + "\n"


@pytest.fixture
def trace(tmp_path, monkeypatch, capsys):
    """Return a function that writes the dump of each rank into a folder, and returns the command's report."""
    monkeypatch.chdir(tmp_path)

    def run(*documents, flags=(), status=1):
        folder = Path("dumps")
        folder.mkdir(exist_ok=True)
        for path in folder.iterdir():
            path.unlink()
        for number, content in enumerate(documents):
            name = f"rank-{number}.json"
            (folder / name).write_text(written({"pid": number, "clock": "one"} | content | {"pid": number}))
        assert main(["trace", "dumps", *flags]) == status
        said, errors = capsys.readouterr()
        assert errors == ""
        return said

    return run


def section(said, start):
    """Return the lines of the section of a report that begins with `start`."""
    told = said.splitlines()
    at = next(number for number, line in enumerate(told) if line.startswith(start))
    end = next((number for number in range(at, len(told)) if not told[number]), len(told))
    return told[at:end]


def one(*entries, **changes):
    return document(*entries, **({"clock": "one"} | changes))


def test_rank_that_came_after_others_gave_up_is_named(trace):
    """Three ranks with a timeout of 2 s; rank 2 joins after 4 s: rank 2 is named, not the others' failures."""
    gone = "rank 0 of 3 is dead"
    said = trace(
        one(entry(0, 0, nranks=3), failed(0, 1, 110.0, 112.0, f"rank 0: not done. {ADVICE}")),
        one(entry(1, 0, nranks=3), failed(1, 1, 110.001, 112.001, f"rank 1: not done. {ADVICE}")),
        one(entry(2, 0, nranks=3), failed(2, 1, 114.0, 114.5, gone)),
    )
    assert section(said, "the ranks diverge") == [
        "the ranks diverge at sequence 1 of communicator 9f3a6c0d (3 ranks)",
        "  ranks 0-2: all_reduce of 1024 float32 (sum), failed",
        "  late: rank 2 called 4.000 s after rank 0, 2.000 s after the call had failed on rank 0",
    ]
    assert section(said, "failed") == [
        "failed",
        "  all_reduce of 1024 float32 (sum), ranks 0-1, communicator 9f3a6c0d, sequence 1, node7 pid 0 and 1 more: "
        "rank 0: not done. (so on rank 0; on the others with other numbers)",
        f"  all_reduce of 1024 float32 (sum), rank 2, communicator 9f3a6c0d, sequence 1, node7 pid 2: {gone}",
    ]
    assert said.splitlines()[-1] == "stuck: 3 failures, rank 2 late"
    assert "`ncclpy trace`" not in said


def test_ranks_that_failed_together_were_not_late(trace):
    said = trace(*(one(failed(rank, 0, 110.0 + rank / 100, 112.0)) for rank in range(3)))
    assert "late" not in said and "the ranks diverge" not in said
    assert said.splitlines()[-1] == "nothing is stuck now, but something has failed: 3 failures"


def test_group_operations_count_from_their_launch(trace):
    """A rank that began early, but with late input, was late."""
    other = failed(1, 0, 110.0, 112.0, launch=3, launched=111.9, nranks=2)
    said = trace(one(failed(0, 0, 110.0, 112.0, launch=3, launched=110.1, nranks=2)), one(other))
    assert "  late: rank 1 called 1.800 s after rank 0" in said.splitlines()


@pytest.mark.parametrize(
    ("changes", "called"),
    [
        ({"operation": "broadcast", "op": None, "root": 0}, "broadcast of 1024 float32 from rank 0"),
        ({"count": 1000}, "all_reduce of 1000 float32 (sum)"),
        ({"dtype": "float64"}, "all_reduce of 1024 float64 (sum)"),
    ],
)
def test_ranks_are_grouped_by_their_call(trace, changes, called):
    said = trace(
        one(launched(0, 4, nranks=5)),
        one(launched(1, 4, nranks=5, **changes)),
        one(launched(2, 4, nranks=5)),
        one(entry(3, 3, nranks=5)),
    )
    assert section(said, "the ranks diverge") == [
        "the ranks diverge at sequence 4 of communicator 9f3a6c0d (5 ranks)",
        "  ranks 0, 2: all_reduce of 1024 float32 (sum), launched and not completed",
        f"  rank 1: {called}, launched and not completed",
        "  rank 3: never launched it",
        "  rank 4: no dump",
    ]
    assert "no dump of rank 4 (of 5 in communicator 9f3a6c0d)" in said.splitlines()


def test_first_divergence_in_time_is_reported(trace):
    second = launched(0, 7, 120.0, communicator="0000")
    said = trace(one(entry(0), launched(0, 1), second), one(entry(1), entry(1, 6, communicator="0000")))
    (told,) = [line for line in said.splitlines() if line.startswith("the ranks diverge")]
    assert told == "the ranks diverge at sequence 1 of communicator 9f3a6c0d (2 ranks)"


def test_group_never_made_and_rank_that_came_after_its_end(trace):
    waits = {"communicator": "default (never made)", "launched": None, "launch": None}
    said = trace(
        one(failed(0, 0, 91.0, 92.0, "rank 2 did not arrive", **waits), groups=[group(0, ended=92.0)]),
        one(failed(1, 0, 91.0, 92.0, "rank 2 did not arrive", **waits), groups=[group(1, ended=92.0)]),
        one(groups=[group(2, made=95.5, ended=95.6)]),
    )
    assert section(said, "the ranks diverge") == [
        "the ranks diverge at sequence 0 of process group 'default' (3 ranks), which was never made",
        "  ranks 0-1: all_reduce of 1024 float32 (sum), failed",
        "  rank 2: never launched it",
    ]
    assert (
        "late: rank 2 of 3 made process group 'default' 5.500 s after rank 0, 3.500 s after the group had ended "
        "on rank 0" in said.splitlines()
    )
    told = lines_of(said)
    at = told.index("missing: rank 2 (node7 pid 2) has not launched it")
    assert told[at + 1 : at + 3] == ["last on it: nothing that is recorded", "now: nothing that is recorded"]
    assert section(said, "process groups that") == [
        "process groups that have failed",
        "  'default', 3 ranks, first on rank 0 (node7 pid 0): NcclTimeout: not in time",
    ]
    end = "stuck: 2 failures, 1 failed process group, 1 standstill with ranks missing, rank 2 late"
    assert said.splitlines()[-1] == end


def test_group_rank_without_operations_is_missing_not_unknown(trace):
    first = one(launched(0, 0, communicator="world ab12"), groups=[group(0, 2, name="world")])
    said = trace(first, one(groups=[group(1, 2, name="world")]))
    assert "missing: rank 1 (node7 pid 1) has not launched it" in lines_of(said) and "unknown" not in said
    said = trace(first)
    assert "no dump of rank 1 (of 2 in process group 'world')" in said.splitlines()
    assert "  rank 1: no dump" in said.splitlines()
    assert "the first operation that did not end on all ranks: sequence 0 of communicator world ab12 (2 ranks)" in said


def test_healthy_ranks_without_one_dump(trace):
    said = trace(*(one(entry(rank, nranks=3), groups=[group(rank)]) for rank in (0, 2)), status=0)
    assert said.splitlines()[-3:] == ["no dump of rank 1 (of 3 in process group 'default')", "", "nothing is stuck"]
    small = group(1, 2, name="a part")  # its other rank has no dump either
    said = trace(*(one(entry(rank, nranks=3), groups=[small, group(rank)]) for rank in (0, 2)), status=0)
    assert [line for line in said.splitlines() if line.startswith("no dump")] == [
        "no dump of rank 1 (of 3 in process group 'default')"
    ]


def test_processes_are_compared_by_shared_clock_or_wall_clock(trace):
    """Rank 1's wall clock is 5 s ahead: on one machine that is not late; on two machines it cannot be known."""
    ends = [failed(rank, 0, 110.0, 112.0, nranks=2) for rank in range(2)]
    ahead = {"wall": document()["wall"] + 5}
    assert "late" not in trace(one(ends[0]), one(ends[1], **ahead))
    said = trace(one(ends[0]), one(ends[1], **ahead, clock="two", host="node8"))
    assert section(said, "the ranks diverge")[2:] == [
        "  late: rank 1 called 5.000 s after rank 0, 3.000 s after the call had failed on rank 0",
        "  (by the wall clocks of their machines, which may differ)",
    ]
    trace(one(ends[0]), one(ends[1], **ahead), flags=["--chrome", "out.json"])
    starts = [event["ts"] for events in chrome()[1].values() for event in events if event["cat"] == "gathering"]
    assert starts[0] == starts[1]


def compared(of="one", offset=0.0, error=0.0004):
    """Return rank 1's group, with the comparison of its clock with another."""
    return group(1, 2) | {"clock": {"of": of, "offset": offset, "error": error, "at": 100.0}}


def test_clocks_compared_through_store_are_one_time_line(trace):
    """Rank 1's wall clock is 5 s ahead, and its monotonic clock is 50 s behind."""
    there = failed(0, 0, 110.0, 112.0, nranks=2)
    elsewhere = {"wall": document()["wall"] + 5, "monotonic": document()["monotonic"] - 50, "clock": "two"}

    def of_rank_1(begun, **more):
        return one(failed(1, 0, begun - 50, 112.0 - 50, nranks=2), **elsewhere, host="node8", **more)

    groups = [compared(error=1.0), compared(offset=50.0)]  # the one with the smaller error counts
    said = trace(one(there, groups=[group(0, 2)]), of_rank_1(110.0, groups=groups[1:]))
    assert (
        "late: " not in said and "the clocks of 2 machines were compared through the store, to within 400 us" in said
    )
    said = trace(one(there, groups=[group(0, 2)]), of_rank_1(111.25, groups=groups))
    assert section(said, "the ranks diverge")[2:] == [
        "  late: rank 1 called 1.250 s after rank 0",
        "  (by their machines' clocks, compared through the store to within 400 us)",
    ]
    trace(one(there), of_rank_1(110.25, groups=groups), flags=["--chrome", "out.json"])
    starts = [event["ts"] for events in chrome()[1].values() for event in events if event["cat"] == "gathering"]
    assert abs(starts[1] - starts[0]) == 250_000


def test_many_ranks_that_did_the_same_are_one_line(trace):
    done = [entry(rank, 0, nranks=40, launched=100.5 + rank / 1000) for rank in range(40)]
    waits = [launched(rank, 1, 107.5 + rank / 1000, nranks=40) for rank in range(20)]
    said = trace(*(one(done[rank], *waits[rank : rank + 1]) for rank in range(40)))
    assert section(said, "the ranks diverge")[1:] == [
        "  ranks 0-19: all_reduce of 1024 float32 (sum), launched and not completed",
        "  ranks 20-39: never launched it",
    ]
    (row,) = section(said, "launched and not completed")[2:]
    assert re.split(r"  +", row.strip())[:5] == ["22.500 s", "all_reduce of 1024 float32 (sum)", "4096", "0-19", "0"]
    assert "node7 pid 0 and 19 more" in row
    missing = [line for line in lines_of(said) if line.startswith("missing")]
    assert missing == ["missing: ranks 20-39 (node7 pid 20, and 19 more) have not launched it"]
    assert "... and 20 more (--all shows them)" in said, "the list of dumps"


def test_folder_is_read_in_numeric_order_without_non_json_files(trace, tmp_path, capsys):
    trace(*(one(entry(rank, nranks=12)) for rank in range(12)), status=0)
    (tmp_path / "dumps" / "rank-3.json.4711.unfinished").write_text("{")
    (tmp_path / "dumps" / "note.txt").write_text("x")
    assert main(["trace", "dumps", "--all"]) == 0
    names = re.findall(r"rank-(\d+)\.json", capsys.readouterr().out)
    assert names == [str(number) for number in range(12)]


NASTY = ', "sequence": 5, "rank": 7, "created": }], "gathering": [\n},\n{"id": 3, "key": \\" \u00f6'


def nasty():
    many = [entry(0, number, key=f"{number}{NASTY}", thread=2**40 + number) for number in range(5)]
    odd = [launched(0, 5, error=None), entry(0, 6, created=None, id=None), entry(0, None, launch=2**63 - 1)]
    return [*many, *odd, failed(0, 7, 110, 112.5, "a b"), failed(0, 8, 110, 112.5, "a c")]


def test_fast_parser_reads_what_slow_parser_does():
    entries = [{name: each[name] for name in list(each)[:9]} | {"tag": None} | each for each in nasty()]
    keys = list(entry())
    ordered = [{name: each[name] for name in [*keys[:10], "tag", *keys[10:]]} for each in entries]
    divided = divide(written(one(*ordered)).encode())
    assert divided is not None
    assert json.loads(divided[0])["entries"] == []
    for each in ordered:  # a key with unprintable characters takes the slow parser
        each["key"] = None if each["key"] is None else each["key"].replace("\n", " ")
    divided = divide(written(one(*ordered)).encode())
    fast, slow = table_of_text(divided[1]), table_of(json.loads(json.dumps(ordered)))
    assert fast is not None and slow is not None
    assert [fast.row(index) for index in range(len(fast))] == [slow.row(index) for index in range(len(slow))]
    assert len(fast) == len(ordered)
    assert [fast.row(0)[2], fast.row(8)[-1], fast.row(9)[-1]] == [ordered[0]["key"], "a b", "a c"]


@pytest.mark.parametrize(
    "change",
    [
        {"count": "8"}, {"rank": True}, {"created": -1}, {"launched": "1"}, {"state": "lost"}, {"error": 5},
        {"id": 1.5}, {"key": 4}, {"sequence": 2**65}, {"completed": 1e300},
    ],
)  # fmt: skip
def test_error_in_recorder_layout_is_still_found(tmp_path, capsys, change):
    keys = list(entry())
    wrong = {name: (entry() | change | {"tag": None})[name] for name in [*keys[:10], "tag", *keys[10:]]}
    path = tmp_path / "wrong.json"
    path.write_text(written(one(wrong)))
    assert divide(path.read_bytes()) is not None
    assert main(["trace", str(path)]) == 2
    assert f"entries[0].{next(iter(change))} " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("processes", "size"), [(False, 300), (True, 30), pytest.param(True, 1000, marks=pytest.mark.slow)]
)
def test_many_dumps(trace, tmp_path, monkeypatch, processes, size):
    """Read many small dumps, in this process and in several: rank 7 is missing, and the others' deadlines pass."""
    if processes:
        monkeypatch.setattr(reading, "_SINGLE_PROCESS_BYTES", 0)
        monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    error = "rank %d: all_reduce was not done within its timeout. " + ADVICE
    said = trace(
        *(
            one(
                *(entry(rank, number, nranks=size) for number in range(3)),
                *([failed(rank, 3, 110.0 + rank / 1e4, 112.0, error % rank, nranks=size)] if rank != 7 else []),
                host=f"node{rank // 8}",
            )
            for rank in range(size)
        )
    )
    assert said.splitlines()[0] == f"# ncclpy trace: {size} dumps, 1 communicator, {4 * size - 1} entries"
    assert section(said, "the ranks diverge") == [
        f"the ranks diverge at sequence 3 of communicator 9f3a6c0d ({size} ranks)",
        f"  ranks 0-6, 8-{size - 1}: all_reduce of 1024 float32 (sum), failed",
        "  rank 7: never launched it",
    ]
    assert len(section(said, "failed")) == 2
    assert said.splitlines()[-1] == f"stuck: {size - 1} failures, 1 standstill with ranks missing"
    assert len(said.splitlines()) < 50


def test_current_recorder_output_takes_fast_parser(tmp_path, host_engine):
    testing.run_python(
        f"""
        import numpy as np, ncclpy
        ncclpy.recorder.record_all()
        with ncclpy.Communicator.init(1, 0, ncclpy.get_unique_id(), device=0) as comm:
            comm.all_reduce(np.ones(3))
            comm.broadcast(np.ones(3), root=0)
        ncclpy.recorder.dump({str(tmp_path / "dump.json")!r})
        """,
        env={"NCCLPY_LIBRARY": "host"},
        warm=True,
    )
    divided = divide((tmp_path / "dump.json").read_bytes())
    assert divided is not None
    table = table_of_text(divided[1])
    assert table is not None and len(table) == 2
    first, second = read(tmp_path / "dump.json").entries
    assert (first.operation, first.count, second.operation, second.root) == ("all_reduce", 3, "broadcast", 0)
