"""``ncclpy trace`` on dumps made by hand. No library is loaded."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import pytest
from paths import ROOT

import testing
from ncclpy.cli.main import main

NOW = 130.0  # the monotonic clock of every dump, unless said otherwise


def entry(rank=0, sequence=0, **changes):
    """Return a completed all_reduce of 1024 float32, with `changes`."""
    usual = {
        "id": 1, "launch": 1, "key": None, "operation": "all_reduce", "op": "sum", "dtype": "float32", "count": 1024,
        "nbytes": 4096, "root": None, "communicator": "9f3a6c0d", "sequence": sequence, "rank": rank, "nranks": 2,
        "device": 0, "thread": 140213, "site": None, "state": "completed", "created": 100.25, "launched": 100.5,
        "completed": 101.0, "error": None,
    }  # fmt: skip
    return usual | changes


def launched(rank=0, sequence=0, at=107.5, **changes):
    """Return an entry that was launched `at` a time and has not completed."""
    usual = {"state": "launched", "created": at, "launched": at, "completed": None}
    return entry(rank, sequence, **(usual | changes))


def pending(rank=0, **changes):
    """Return an entry that has waited for its launch since second 110."""
    usual = {"state": "pending", "created": 110.0, "launched": None, "completed": None, "communicator": None}
    return entry(rank, None, **(usual | changes))


def gathering(**changes):
    usual = {"key": "'grad/1'", "operation": "all_reduce", "since": 120.0, "arrived": [0, 2], "num_local": 4}
    return usual | {"missing": 2, "waits_for": "2 more local participants"} | changes


def document(*entries, **changes):
    usual = {
        "format": "ncclpy-recorder", "version": 1, "host": "node7", "pid": 4711, "wall": 1795244000.25,
        "monotonic": NOW, "engine": "host", "nccl": "2.32.3", "reason": None, "capacity": 2000,
        "recorded": len(entries), "entries": list(entries), "gathering": [],
    }  # fmt: skip
    return usual | changes


@pytest.fixture
def trace(tmp_path, monkeypatch, capsys):
    """Return a function that writes documents, runs the command, and returns its status and output."""
    monkeypatch.chdir(tmp_path)

    def run(*documents, flags=()):
        names = []
        for rank, content in enumerate(documents):
            names.append(f"rank{rank}.json")
            Path(names[-1]).write_text(content if isinstance(content, str) else json.dumps(content))
        status = main(["trace", *names, *flags])
        return status, *capsys.readouterr()

    return run


def stuck(rank1, **changes):
    """Return the dumps of two processes: rank 0 waits in sequence 1; rank 1 has entries `rank1` after sequence 0."""
    return (
        document(entry(0), launched(0, 1)),
        document(entry(1), *rank1, host="node8", pid=4712, **changes),
    )


def lines_of(text):
    return [line.strip() for line in text.splitlines()]


def columns(text, start):
    """Return the fields, two blanks apart, of the lines that start with `start`."""
    return [re.split(r"  +", line) for line in lines_of(text) if line.startswith(start)]


def test_nothing_is_stuck(trace):
    status, said, errors = trace(
        document(entry(0), entry(0, 1), recorded=12345, reason="asked by SIGUSR1"),
        document(entry(1), entry(1, 1), host="node8", pid=12),
    )
    assert (status, errors) == (0, "")
    first, _, *headers, _, last = said.splitlines()
    assert first == "# ncclpy trace: 2 dumps, 1 communicator, 4 entries"
    assert last == "nothing is stuck"
    assert [re.split(r"  +", line) for line in headers] == [
        ["rank0.json", "node7 pid 4711", "host engine", "NCCL 2.32.3", "2 of 12345 entries",
         "written 2026-11-21 06:53:20.250 UTC", "reason: asked by SIGUSR1"],
        ["rank1.json", "node8 pid 12", "host engine", "NCCL 2.32.3", "2 of 2 entries",
         "written 2026-11-21 06:53:20.250 UTC"],
    ]  # fmt: skip
    assert headers[0].index("host engine") == headers[1].index("host engine"), "not aligned"


def test_example_of_the_manual(trace):
    status, said, _ = trace(
        *stuck([launched(1, 0, 108.0, communicator="51b2e077")]),
    )
    page = (ROOT / "docs" / "cli.md").read_text()
    promised = re.search(r"^\$ ncclpy trace rank0.json rank1.json\n(.*?)^```", page, re.M | re.S)[1]
    assert status == 1
    assert said == promised


def test_gathering_with_missing_participants(trace):
    status, said, _ = trace(document(pending(0, key="'grad/1'"), gathering=[gathering()]))
    assert status == 1
    assert columns(said, "10.000 s") == [
        ["10.000 s", "all_reduce", "'grad/1'", "arrived: 0, 2 (of 4 local)", "waits for 2 more local participants",
         "node7 pid 4711"],
    ]  # fmt: skip
    # Its participants are in the entries too, and are not counted twice.
    assert said.splitlines()[-1] == "stuck: 1 gathering"


@pytest.mark.parametrize(
    ("changes", "waits"),
    [
        ({"missing": 3, "waits_for": None}, "waits for 3 more participants"),
        ({"missing": None, "waits_for": None}, "waits for participants"),
        ({"missing": 0, "waits_for": "signal_multi_node_ready"}, "waits for signal_multi_node_ready"),
        ({"missing": 0, "waits_for": None}, None),
    ],
)
def test_gathering_tells_what_it_waits_for(trace, changes, waits):
    status, said, _ = trace(document(gathering=[gathering(**changes)]))
    assert status == (waits is not None)
    assert (waits or "nothing is stuck") in said


def test_simultaneous_launches_are_one_line_oldest_first(trace):
    ranks = [launched(rank, 7, 128.5, device=rank, key="'grad/0'", nranks=4, root=1, op=None) for rank in range(4)]
    for each in ranks:
        each["operation"] = "broadcast"
    other = launched(0, 3, 110.0, communicator="77", nranks=1, device=5, count=3, dtype="int8", nbytes=3)
    status, said, _ = trace(document(*ranks, other))
    rows = said[said.index("\nlaunched and not completed") + 1 :].splitlines()[2:4]
    assert [re.split(r"  +", row.strip()) for row in rows] == [
        ["20.000 s", "all_reduce of 3 int8 (sum)", "3", "0", "5", "77", "3", "node7 pid 4711", "-"],
        ["1.500 s", "broadcast of 1024 float32 from rank 1", "4096", "0-3", "0-3", "9f3a6c0d", "7", "node7 pid 4711",
         "'grad/0'"],
    ]  # fmt: skip
    assert status == 1
    assert "communicator 9f3a6c0d (4 ranks): sequence 7 is launched by every rank, completed by none" in said


def test_operation_that_was_not_launched(trace):
    status, said, _ = trace(document(pending(0, key="'a'")))
    assert status == 1
    assert columns(said, "20.000 s")[0][1:] == [
        "all_reduce of 1024 float32 (sum)", "4096", "0", "0", "-", "-", "node7 pid 4711", "'a'",
    ]  # fmt: skip
    assert said.splitlines()[-1] == "stuck: 1 operation not launched"


def test_missing_rank_and_its_last_operation_are_named(trace):
    _, said, _ = trace(*stuck([launched(1, 8, 108.0, communicator="51b2", operation="reduce", root=0)]))
    told = lines_of(said)
    at = told.index("communicator 9f3a6c0d (2 ranks): sequence 1 waits for rank 1")
    assert told[at + 1 : at + 5] == [
        "launched by rank 0: all_reduce of 1024 float32 (sum)",
        "missing: rank 1 (node8 pid 4712) has not launched it",
        "last on it: sequence 0, all_reduce of 1024 float32 (sum), completed 29.000 s ago",
        "now: reduce of 1024 float32 (sum) to rank 0 on communicator 51b2, launched 22.000 s ago and not completed",
    ]


def test_call_inside_nccl_waits_for_missing_rank(trace):
    """A plain call has its number before it returns; both dumps are written while the call is stuck."""
    inside = entry(0, 1, launch=None, state="pending", created=110.0, launched=None, completed=None)
    status, said, _ = trace(document(entry(0), inside), document(entry(1), host="node8", pid=4712))
    assert status == 1
    assert "communicator 9f3a6c0d (2 ranks): sequence 1 waits for rank 1" in said
    assert "missing: rank 1 (node8 pid 4712) has not launched it" in said
    status, said, _ = trace(document(entry(0), inside))
    assert status == 1 and "unknown: rank 1" in said
    beside = entry(1, 1, launch=None, state="pending", created=111.0, launched=None, completed=None)
    status, said, _ = trace(document(inside), document(beside, host="node8", pid=4712))
    assert status == 1 and "sequence 1 is launched by every rank, completed by none" in said


@pytest.mark.parametrize(
    ("entries", "changes", "now"),
    [
        ([], {}, "nothing in progress; last recorded was all_reduce of 1024 float32 (sum), completed 29.000 s ago"),
        (
            [],
            {"gathering": [gathering()]},
            "the process gathers all_reduce 'grad/1' and waits for 2 more local participants",
        ),
        ([pending(1, key="'k'")], {}, "all_reduce of 1024 float32 (sum) 'k', not launched for 20.000 s"),
        # Work of another device does not belong to this rank.
        ([launched(5, 0, communicator="8", device=3)], {}, "nothing in progress; last recorded was all_reduce of"),
    ],
)
def test_missing_rank_is_shown_with_its_current_operation(trace, entries, changes, now):
    status, said, _ = trace(*stuck(entries, **changes))
    assert status == 1
    told = lines_of(said)
    after = told.index("communicator 9f3a6c0d (2 ranks): sequence 1 waits for rank 1")
    assert next(line for line in told[after:] if line.startswith("now: ")).startswith(f"now: {now}")


def test_rank_without_launch_on_the_communicator(trace):
    first = document(launched(0, 0))
    second = document(pending(1, communicator="9f3a6c0d"), host="node8")
    _, said, _ = trace(first, second)
    assert "sequence 0 waits for rank 1" in said
    assert "last on it: nothing that is recorded" in said


def test_ranks_without_a_dump_are_named(trace):
    status, said, _ = trace(document(launched(3, 0, nranks=10**12)))
    assert status == 1
    assert "unknown: ranks 0-2, 4-999999999999; no dump given here has an entry of theirs" in said


def test_dump_older_than_launch_of_others_is_marked(trace):
    early = {"wall": 1795244000.25 - 25, "monotonic": NOW - 25}
    _, said, _ = trace(*stuck([], **early))
    assert "but its dump was written 2.500 s before the others launched" in said


def test_older_dump_of_healthy_job_reports_no_rank(trace):
    # Rank 0 completed more all_reduces than rank 1's dump has, so that rank 1 launched them after its dump.
    ahead = document(*(entry(0, number, launched=100.0 + number) for number in range(10)))
    behind = document(*(entry(1, number) for number in range(5)), host="node8")
    assert trace(ahead, behind)[0] == 0
    # A broadcast may end at its root before others launch it: rank 1 is late, unless its dump is older.
    for each in ahead["entries"]:
        each |= {"operation": "broadcast", "op": None, "root": 0}
    for each in behind["entries"]:
        each |= {"operation": "broadcast", "op": None, "root": 0}
    status, said, _ = trace(ahead, behind)
    assert status == 1 and "sequence 5 waits for rank 1" in said
    assert trace(ahead, behind | {"wall": behind["wall"] - 26, "monotonic": NOW - 26})[0] == 0


def test_wall_clocks_are_compared_instead_of_monotonic_times(trace):
    # Rank 1's machine was booted much later, so that its monotonic clock is behind.
    shift = {"created": 0.25, "launched": 0.5, "completed": 1.0}
    _, said, _ = trace(document(entry(0), launched(0, 1)), document(entry(1, **shift), host="b", monotonic=30.0))
    assert "sequence 1 waits for rank 1" in said and "but its dump" not in said


def test_failures_name_their_error_and_missing_rank(trace):
    error = "NcclTimeout: all_reduce\n  did not end in 30 s"
    failed = [launched(0, 1, state="failed", error=error, key="'grad/1'"), pending(0, state="failed", error="gone")]
    status, said, _ = trace(document(entry(0), *failed), document(entry(1), host="node8"))
    assert status == 1
    assert (
        "all_reduce of 1024 float32 (sum), 'grad/1', rank 0, communicator 9f3a6c0d, sequence 1, node7 pid 4711: "
        "NcclTimeout: all_reduce did not end in 30 s" in lines_of(said)
    )
    assert "communicator 9f3a6c0d (2 ranks): sequence 1 waits for rank 1" in said
    assert said.splitlines()[-1] == "stuck: 2 failures, 1 standstill with ranks missing"
    status, said, _ = trace(document(pending(0, state="failed", error="gone", operation="scatter")))
    assert status == 1
    assert said.splitlines()[-1] == "nothing is stuck now, but something has failed: 1 failure"


def test_missing_rank_may_have_no_dump(trace):
    error = "NcclTimeout: all_reduce did not end in 30 s"  # only ranks with a passed deadline write a dump
    status, said, _ = trace(document(entry(0, nranks=2), launched(0, 1, nranks=2, state="failed", error=error)))
    assert status == 1
    assert "unknown: rank 1; no dump given here has an entry of theirs" in lines_of(said)
    assert said.splitlines()[-1] == "stuck: 1 failure, 1 standstill with ranks unknown"


@pytest.mark.parametrize(
    ("changes", "called"),
    [
        ({"operation": "broadcast", "op": None, "root": 0}, "broadcast of 1024 float32 from rank 0"),
        ({"count": 1000}, "all_reduce of 1000 float32 (sum)"),
        ({"dtype": "float64"}, "all_reduce of 1024 float64 (sum)"),
        ({"op": "max"}, "all_reduce of 1024 float32 (max)"),
    ],
)
def test_ranks_that_call_different_things(trace, changes, called):
    status, said, _ = trace(
        document(*(launched(rank, 4, nranks=3, device=rank) for rank in (0, 2))),
        document(launched(1, 4, nranks=3, **changes), launched(1, 5, nranks=3), host="node8", pid=9),
        document(launched(2, 5, nranks=3, count=1), pid=3),
    )
    assert status == 1
    told = lines_of(said)
    at = told.index("mismatch on communicator 9f3a6c0d at sequence 4: ranks differ")
    assert told[at + 1 : at + 4] == [
        "ranks 0, 2 call all_reduce of 1024 float32 (sum) (node7 pid 4711)",
        f"rank 1 calls {called} (node8 pid 9)",
        "and at 1 later sequence number",
    ]


def test_compatible_calls_are_no_mismatch(trace):
    null = dict.fromkeys(("op", "dtype", "count", "root"))
    pairs = [
        (entry(0), entry(1, **null)),
        (entry(0, 1, operation="broadcast_send"), entry(1, 1, operation="broadcast_recv")),
        (entry(0, 2, operation="all_gather_v", count=5), entry(1, 2, operation="all_gather_v", count=6)),
    ]
    assert trace(document(*(each[0] for each in pairs)), document(*(each[1] for each in pairs), pid=2))[0] == 0


def test_send_waits_for_its_recv(trace):
    send = launched(0, 4, operation="send", op=None, root=2, nranks=3)
    status, said, _ = trace(document(send), document(entry(2, 1, nranks=3), host="node8", pid=7))
    told = lines_of(said)
    assert status == 1
    at = told.index("communicator 9f3a6c0d (3 ranks): rank 0 waits for rank 2")
    assert told[at + 1 : at + 4] == [
        "rank 0 (node7 pid 4711): send of 1024 float32 to rank 2, launched 22.500 s ago and not completed",
        "missing: rank 2 (node8 pid 7) is not in a recv",
        "last on it: sequence 1, all_reduce of 1024 float32 (sum), completed 29.000 s ago",
    ]
    recv = launched(2, 9, operation="recv", op=None, root=0, nranks=3)
    status, said, _ = trace(document(send), document(recv, host="node8", pid=7))
    assert status == 1, "both are still under way"
    assert "waits for rank" not in said and "mismatch" not in said
    _, said, _ = trace(document(send))
    assert "unknown: rank 2; no dump" in said


def test_sendrecv_waits_for_the_rank_that_sends(trace):
    def waits(rank, root, **changes):
        return launched(rank, 4, operation="sendrecv", op=None, root=root, nranks=3, **changes)

    mine = document(waits(0, 2))
    _, said, _ = trace(mine, document(entry(2, 1, nranks=3), host="node8", pid=7))
    assert "rank 0 waits for rank 2" in said and "rank 2 (node8 pid 7) is not in a send" in said
    assert "sendrecv of 1024 float32 from rank 2" in said
    for answer in (waits(2, 1), launched(2, 4, operation="send", op=None, root=None, nranks=3)):
        _, said, _ = trace(mine, document(answer, host="node8", pid=7))
        assert "rank 0 waits" not in said and "mismatch" not in said


def test_long_lists_are_cut_unless_all_is_asked_for(trace):
    many = document(*(launched(0, number, nranks=1, key=f"'{number}'") for number in range(50)))
    _, said, _ = trace(many)
    assert "... and 30 more (--all shows them)" in said and "'20'" not in said and "'19'" in said
    _, said, _ = trace(many, flags=["--all"])
    assert "more (--all" not in said and "'49'" in said


def test_null_and_missing_and_unknown_fields_are_no_error(trace):
    needed = {"format": "ncclpy-recorder", "version": 1, "wall": 5, "monotonic": 3}
    assert trace(needed)[:2] == (
        0,
        "# ncclpy trace: 1 dump, 0 communicators, 0 entries\n\nrank0.json  unknown host pid ?  unknown engine  "
        "NCCL of unknown version  0 of 0 entries  written 1970-01-01 00:00:05.000 UTC\n\nnothing is stuck\n",
    )
    nothing = dict.fromkeys(entry())
    status, said, _ = trace(
        dict.fromkeys(document()) | needed | {"entries": [nothing, {}, {"new": [1]}, {"launched": 0}], "later": {}},
        flags=["--chrome", "out.json"],
    )
    assert status == 1
    assert said.splitlines()[-1] == "stuck: 3 operations not launched, 1 operation not completed"


def test_text_of_a_dump_cannot_steer_the_terminal(trace):
    _, said, _ = trace(document(pending(0, key="\x1b[2J\ud800"), host="a\nb\u202e"))
    assert "\\x1b[2J\\ud800" in said and "a\\nb\\u202e" in said and "\x1b" not in said


def without(name):
    return {key: value for key, value in document().items() if key != name}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ["is not JSON", "line 1 column 1"]),
        (json.dumps(document(entry()))[:-20], ["is not JSON", "written to its end"]),
        ("[1]", ["the document is a list, not an object"]),
        ("[" * 100_000, ["is not a dump"]),
        ('{"format": ' + "9" * 5000 + "}", ["is not a dump"]),
        (json.dumps({"traceEvents": []}), ["its format is null, not 'ncclpy-recorder'"]),
        (document(version=2), ["version 2", "reads version 1"]),
        (without("wall"), ["wall is missing"]),
        (document(monotonic="3"), ["monotonic is '3', not a number of seconds"]),
        (document(wall=float("nan")), ["wall is a number out of bounds"]),
        (document(wall=1e300), ["wall is 1e+300, not a time"]),
        (document(entries={}), ["entries is an object, not a list"]),
        (document(None), ["entries[0] is null, not an object"]),
        (document(entry(), entry(count="8")), ["entries[1].count is '8', not an integer"]),
        (document(entry(count=True)), ["entries[0].count is true, not an integer"]),
        (document(entry(rank=2**65)), ["entries[0].rank has more than 64 bits"]),
        (document(entry(launched=[])), ["entries[0].launched is a list, not a number of seconds"]),
        (document(entry(created=-1)), ["entries[0].created is -1, not a time"]),
        (document(entry(operation=5)), ["entries[0].operation is 5, not text"]),
        (document(entry(state="lost")), ["entries[0].state is 'lost'", "pending, launched, completed, failed"]),
        (document(gathering=[gathering(arrived=["0"])]), ["gathering[0].arrived[0] is '0', not an integer"]),
    ],
)
def test_invalid_dump_is_refused_with_name_and_place(trace, content, words):
    status, said, errors = trace(content)
    assert (status, said) == (2, "")
    assert errors.startswith("ncclpy trace: rank0.json: ") and len(errors.splitlines()) == 1
    assert all(word in errors for word in words), errors


def test_files_that_cannot_be_read_or_written(tmp_path, capsys):
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert main(["trace", str(tmp_path / "none.json"), str(empty), str(binary)]) == 2
    second, first, third = capsys.readouterr().err.splitlines()
    assert first.endswith("none.json: cannot be read: No such file or directory")
    assert first.startswith("ncclpy trace: ") and second.endswith("empty: contains no dump (a file *.json)")
    assert third.endswith("binary.json: is not JSON: byte 0 is not UTF-8")
    with pytest.raises(SystemExit) as stopped:
        main(["trace", str(binary), "--chrome", str(tmp_path / "no" / "where.json")])
    assert stopped.value.code == 2
    assert "where.json' cannot be written: No such file" in capsys.readouterr().err


def test_readable_dumps_are_reported_beside_unreadable_one(trace):
    status, said, errors = trace(document(launched()), "{")
    assert status == 2
    assert "rank1.json: is not JSON" in errors and "1 operation not completed" in said


def test_last_dump_of_process_counts(trace):
    done = document(entry(0, nranks=1), wall=1795244009.0, monotonic=138.75)
    status, said, errors = trace(done, document(launched(0, nranks=1)))
    assert (status, "nothing is stuck" in said) == (0, True)
    assert "rank1.json is left out: a later dump of node7 pid 4711 is given" in errors
    assert trace(done | {"pid": None}, document(launched(0, nranks=1), pid=None))[0] == 1, "these may be two processes"


def test_dump_is_not_overwritten(trace, capsys):
    trace(document(), document())
    with pytest.raises(SystemExit):
        main(["trace", "--chrome", "rank0.json", "rank1.json"])
    assert "'rank0.json' is a dump" in capsys.readouterr().err
    assert json.loads(Path("rank0.json").read_text()) == document()


def chrome(path="out.json"):
    """Return the spans of a trace by (process name, thread name), in order of time."""
    written = json.loads(Path(path).read_text())
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"]["name"]
        for event in written["traceEvents"]
        if event["ph"] == "M" and "name" in event["args"]
    }
    threads: dict[tuple[str, str], list] = {}
    for event in sorted((each for each in written["traceEvents"] if each["ph"] == "X"), key=lambda each: each["ts"]):
        process = names["process_name", event["pid"], 0]
        threads.setdefault((process, names["thread_name", event["pid"], event["tid"]]), []).append(event)
    return written, threads


def times(events):
    return [(event["name"], event["ts"], event["dur"]) for event in events]


def test_trace_for_perfetto(trace):
    # The second machine's monotonic clock is 100 s behind, and its dump was written 2 s later.
    other = [
        entry(1, created=0.75, launched=1.0, completed=1.5, device=3),
        pending(1, created=9.0, device=None, state="failed", error="x"),
    ]
    trace(
        document(entry(0, key="'grad/0'"), launched(0, 1), pending(0, device=1), gathering=[gathering()]),
        document(*other, host="node8", pid=4711, wall=1795244002.25, monotonic=32.0),
        flags=["--chrome", "out.json"],
    )
    written, threads = chrome()
    seven, eight = "node7 pid 4711 (rank0.json)", "node8 pid 4711 (rank1.json)"
    # Second 0 is node7's 100.25, node8's 0.25.
    assert written["otherData"]["start"] == "2026-11-21 06:52:50.500 UTC"
    assert {place: times(events) for place, events in threads.items()} == {
        (seven, "device 0"): [("all_reduce", 250000, 500000), ("all_reduce (not completed)", 7250000, 22500000)],
        (seven, "device 0 gathering"): [("all_reduce", 0, 250000)],
        (seven, "device 1 gathering"): [("all_reduce (not launched)", 9750000, 20000000)],
        (seven, "process gathering"): [("all_reduce (not launched)", 19750000, 10000000)],
        (eight, "device 3"): [("all_reduce", 750000, 500000)],
        (eight, "device 3 gathering"): [("all_reduce", 500000, 250000)],
        (eight, "process gathering"): [("all_reduce (failed)", 8750000, 23000000)],
    }
    done, unfinished = threads[seven, "device 0"]
    assert (done["cat"], threads[seven, "device 0 gathering"][0]["cat"]) == ("operation", "gathering")
    assert done["args"].items() >= {"key": "'grad/0'", "sequence": 0, "communicator": "9f3a6c0d", "rank": 0}.items()
    assert "cname" not in done and unfinished["cname"] == "terrible"
    assert unfinished["args"]["state"] == "launched" and "error" not in unfinished["args"]
    assert threads[eight, "process gathering"][0]["args"]["error"] == "x"


def test_overlapping_operations_of_device_get_separate_threads(trace):
    # Three entries are queued at once and end one after the other; the fourth begins after the end of the first.
    queue = [entry(0, n, created=None, launched=100.0 + n / 8, completed=101.0 + n, nranks=1) for n in range(3)]
    trace(
        document(*queue, entry(0, 3, created=None, launched=101.5, completed=101.75)), flags=["--chrome", "out.json"]
    )
    _, threads = chrome()
    process = "node7 pid 4711 (rank0.json)"
    assert {thread: [event["args"]["sequence"] for event in events] for (_, thread), events in threads.items()} == {
        "device 0": [0, 3],
        "device 0 (2)": [1],
        "device 0 (3)": [2],
    }
    assert threads[process, "device 0 (2)"][0]["dur"] == 1875000


def test_times_that_run_backwards_have_no_length(trace):
    trace(document(entry(0, completed=99.0, nranks=1)), flags=["--chrome", "out.json"])
    _, threads = chrome()
    assert [event["dur"] for events in threads.values() for event in events if event["cat"] == "operation"] == [0]


def test_picture(trace):
    pytest.importorskip("matplotlib")
    names = [launched(0, n, operation=f"_$\\frac{n}$", device=n % 3, nranks=1) for n in range(20)]
    content = document(*names, entry(0, 30), gathering=[gathering()], host="a$b$\u6f22")
    trace(content, flags=["--png", "large.png"])
    trace(document(), flags=["--png", "empty.svg"])
    heights = []
    for path in (Path("large.png"), Path("empty.svg")):
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG\r\n\x1a\n") and data.endswith(b"IEND\xaeB`\x82")
        width, height = struct.unpack(">II", data[16:24])
        assert width == 1200
        heights.append(height)
    assert heights[0] == heights[1] + 4 * 40, "four rows: three devices and what the process gathers"


def test_picture_without_matplotlib_is_refused(trace, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stopped:
        trace(document(), flags=["--png", "out.png"])
    assert stopped.value.code == 2 and "ncclpy[perf]" in capsys.readouterr().err


def test_no_library_is_loaded_and_the_status_is_the_process_s(tmp_path):
    path = tmp_path / "dump.json"
    path.write_text(json.dumps(document(launched(), host="n\u00f6de")))
    done = testing.run_python(
        f"""
        import sys
        from ncclpy.cli.main import main
        status = main(["trace", {str(path)!r}])
        assert "matplotlib" not in sys.modules and "libncclpy_host" not in open("/proc/self/maps").read()
        sys.exit(status)
        """,
        env={"PYTHONIOENCODING": "ascii"},
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "n\\xf6de pid 4711" in done.stdout
