"""Order of the report of ``ncclpy trace``: cycles of waiting ranks come first, and common reasons are merged."""

from __future__ import annotations

import pytest
from test_cli_trace import document, entry, launched, lines_of, trace

from ncclpy.cli.trace.report import Reasons

__all__ = ["trace"]  # the fixture

TITLE = "ranks wait for each other: they called these operations in different orders"
ORDER = "all ranks have to call the operations of these communicators in one order"


def in_circle(size, at=107.5, **changes):
    """Return dumps of processes in a cycle: each waits in a communicator for the next, which waits in another one."""
    made = []
    for rank in range(size):
        mine, other = f"pair/{rank} 0a", f"pair/{(rank - 1) % size} 0a"
        waits = launched(0, 1, at + rank, communicator=mine, device=rank, **changes)
        done = [entry(0, communicator=mine, device=rank), entry(1, communicator=other, device=rank)]
        made.append(document(*done, waits, pid=rank))
    return made


@pytest.mark.parametrize("state", ["launched", "failed"])
def test_two_groups_entered_in_different_order_are_reported_first(trace, state):
    changes = {"state": state} | ({"completed": 120.0, "error": "NcclTimeout: late"} if state == "failed" else {})
    status, said, _ = trace(*in_circle(2, **changes))
    how = "failed" if state == "failed" else "launched and not completed"
    assert status == 1
    assert lines_of(said)[1:6] == [
        "",
        TITLE,
        f"rank 0 (node7 pid 0): all_reduce of 1024 float32 (sum), sequence 1 of communicator pair/0 0a, {how}, waited "
        "for rank 1",
        f"rank 0 (node7 pid 1): all_reduce of 1024 float32 (sum), sequence 1 of communicator pair/1 0a, {how}, waited "
        "for rank 1",
        ORDER,
    ]
    assert said.splitlines()[-1].endswith(", 1 circle of waiting ranks") and said.count(TITLE) == 1


def test_cycle_of_three_is_reported_once_in_wait_order(trace):
    told = lines_of(trace(*in_circle(3))[1])
    begin = told.index(TITLE) + 1
    steps = told[begin : told.index(ORDER)]
    processes = [each.partition("(node7 pid ")[2][0] for each in steps]
    assert len(steps) == 3 and "".join(processes) in ("012", "120", "201")


def test_waits_at_different_times_are_no_cycle(trace):
    first, second = in_circle(2)
    first["entries"][2] |= {"state": "failed", "completed": 108.0, "error": "given up"}  # the other rank came at 108.5
    status, said, _ = trace(first, second)
    assert status == 1 and "wait for each other" not in said


def test_ranks_waiting_for_late_rank_are_no_cycle(trace):
    dumps = [document(entry(rank, nranks=3), launched(rank, 1, nranks=3), pid=rank) for rank in (0, 1)]
    status, said, _ = trace(*dumps, document(entry(2, nranks=3), pid=2))
    assert status == 1 and "waits for rank 2" in said and "wait for each other" not in said


def test_receives_from_each_other_are_a_cycle_in_one_communicator(trace):
    def receives(rank):
        return document(launched(rank, 0, operation="recv", op=None, root=1 - rank), pid=rank)

    told = lines_of(trace(receives(0), receives(1))[1])
    at = told.index("ranks wait for each other in communicator 9f3a6c0d")
    recv = "recv of 1024 float32 from rank {}, sequence 0, launched and not completed, waited for rank {}"
    assert sorted(told[at + 1 : at + 3]) == [
        f"rank {rank} (node7 pid {rank}): " + recv.format(1 - rank, 1 - rank) for rank in (0, 1)
    ]


WHY = "all_reduce on device 1 was not done within its timeout of {} s; its communicator is aborted. " + "Why? " * 80


def with_reason(rank, dumped, failed, ended):
    group = {"name": "g", "number": 1, "rank": rank, "size": 3, "made": 90.0, "ended": 115.0 + rank, "error": ended}
    here = {"communicator": "g 0a", "nranks": 3, "state": "failed", "completed": 115.0 + rank, "error": failed}
    return document(launched(rank, 1, **here), groups=[group], reason=dumped, pid=rank)


def test_reason_of_all_ranks_is_printed_once(trace):
    of_one = "process group 'g' was ended by rank 0 of 3: " + WHY.format("8")
    first = with_reason(0, "NcclTimeout: " + WHY.format("8"), WHY.format("8"), "NcclTimeout: " + WHY.format("8"))
    others = [with_reason(rank, "NcclTimeout: " + of_one, of_one, "NcclTimeout: " + of_one) for rank in (1, 2)]
    status, said, _ = trace(first, *others)
    assert status == 1 and said.count("was not done within its timeout") == 1
    assert said.count("same as process group 'g'") == 3 + 2, "of each dump, and of each way to say it"
    assert said.index("process groups that have failed") < said.index("was not done within its timeout")


def test_different_reasons_are_all_printed(trace):
    other = WHY.replace("device 1", "device 2").format("8")
    status, said, _ = trace(
        document(
            launched(0, 1, state="failed", completed=115.0, error=WHY.format("8")),
            launched(0, 2, state="failed", completed=115.0, error=other),
            launched(0, 3, state="failed", completed=115.0),
            reason="SIGUSR2",
        )
    )
    assert status == 1 and said.count("was not done within its timeout") == 2
    assert "reason: SIGUSR2" in said and "no error was recorded" in said and "same as" not in said


def test_summary_precedes_the_dumps(trace):
    status, said, _ = trace(document(entry(0), launched(0, 1)), document(entry(1), pid=2))
    told = said.splitlines()
    assert status == 1 and told[2].startswith("the ranks diverge at sequence 1")
    assert next(index for index, line in enumerate(told) if line.startswith("rank0.json")) == 6


STACK = ["/job/train.py:41 in load", "/job/train.py:88 in main"]


@pytest.mark.parametrize("stack", [STACK, ["\x1b[2J" + each for each in STACK], None, 3, [3], {"a": 1}, []])
def test_python_stack_of_awaited_rank_is_shown(trace, stack):
    status, said, errors = trace(document(entry(0), launched(0, 1)), document(entry(1), pid=2, stack=stack))
    told = [line for line in lines_of(said) if line.startswith("its Python: ")]
    usual = [] if not stack or stack == [3] or isinstance(stack, (int, dict)) else stack
    assert (status, errors, len(told)) == (1, "", bool(usual)) and said.replace("\n", "").isprintable()
    if stack == STACK:
        assert told == ["its Python: job/train.py:41 in load, called by job/train.py:88 in main"]


def test_call_lines_tell_ranks_with_same_call_apart(trace):
    def rank(number, line):
        call = launched(number, 1, nranks=4, site=f"/home/me/job/train.py:{line}")
        return document(entry(number, nranks=4), call, pid=number)

    told = lines_of(trace(rank(0, 41), rank(1, 88), rank(2, 41), document(entry(3, nranks=4), pid=3))[1])
    assert told[2:6] == [
        "the ranks diverge at sequence 1 of communicator 9f3a6c0d (4 ranks)",
        "ranks 0, 2: all_reduce of 1024 float32 (sum), called at job/train.py:41, launched and not completed",
        "rank 1: all_reduce of 1024 float32 (sum), called at job/train.py:88, launched and not completed",
        "rank 3: never launched it",
    ]
    steps = [line for line in lines_of(trace(*in_circle(2, site="a/b/c.py:7"))[1]) if "called at b/c.py:7, " in line]
    assert len(steps) == 3, "both steps of the circle, and where the ranks diverge"


@pytest.mark.parametrize("site", [3, ["a.py:1"], {"file": "a.py"}])
def test_line_that_is_no_text_is_refused(trace, site):
    status, _, errors = trace(document(entry(0, site=site)))
    assert status == 2 and "entries[0].site is " in errors and "not text" in errors


def test_dumps_without_lines_are_read(trace):
    old = launched(0, 1)
    del old["site"]
    status, said, errors = trace(document(old))
    assert (status, errors) == (1, "") and "called at" not in said


def test_truncated_reason_still_has_python_stacks(trace):
    stack = ". Python of rank 1: job/train.py:41 in load, called by job/train.py:88 in main"
    error = WHY.format("8") + stack
    _, said, _ = trace(document(launched(0, 1, state="failed", completed=115.0, error=error)))
    (line,) = [line for line in said.splitlines() if "was not done within" in line]
    assert line.endswith("..." + stack) and len(line) < 600


def test_reason_with_different_call_lines_is_printed_once():
    reasons = Reasons()
    text = "all_reduce on device 0 was not done within its timeout of 1 s; its communicator is aborted"
    assert reasons.say(f"{text}. This rank called all_reduce #1 at job/train.py:41", "rank 0") == f"{text}."
    assert reasons.say(f"{text}. This rank called all_reduce #1 at job/train.py:88", "rank 1") == "same as rank 0"
