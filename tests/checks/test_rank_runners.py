"""What the three runners of ranks (`thread_ranks`, `process_ranks`, `warm_ranks`) say of ranks that fail or hang.

`tests/core/test_fork_exit.py` has ranks that fail beside others in a barrier.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time

import process_ranks
import pytest
import thread_ranks
import warm_ranks


def test_first_error_of_threads_is_raised_with_the_others_as_notes():
    failed = threading.Event()

    def fails(rank):
        if rank == 1:
            raise KeyError("the first")
        assert failed.wait(30)
        raise ValueError(f"from rank {rank}")

    with pytest.raises(KeyError, match="the first") as raised:
        thread_ranks.run_ranks(3, fails, 30, lambda reason: failed.set())
    notes = "\n".join(raised.value.__notes__)
    assert notes.startswith("raised by rank 1") and "in fails" in notes
    assert "ValueError: from rank 0" in notes and "ValueError: from rank 2" in notes


@pytest.mark.parametrize("other", ["hangs", "fails"])
def test_thread_that_does_not_end_is_shown_with_its_stack(monkeypatch, other):
    monkeypatch.setattr(thread_ranks, "GRACE", 0.2)
    let_go, reasons = threading.Event(), []

    def body(rank):
        if rank == 1 and other == "fails":
            raise KeyError("lost")
        let_go.wait(60)

    said = {
        "hangs": r"2 of 2 ranks not done after 0\.2 s:\nrank 0:",
        "fails": "rank 1 failed, and rank 0 did not end",
    }
    with pytest.raises(AssertionError, match=f"(?s){said[other]}.*let_go.wait") as raised:
        thread_ranks.run_ranks(2, body, 0.2 if other == "hangs" else 60, reasons.append)
    let_go.set()
    assert reasons[0] == {"hangs": "not done after 0.2 s", "fails": "rank 1 failed: 'lost'"}[other]
    assert isinstance(raised.value.__cause__, KeyError) == (other == "fails")


def calls(number):
    return lambda function, *arguments: function(*arguments)


@pytest.fixture
def processes():
    processes = process_ranks.RankProcesses(calls)
    yield processes
    processes.close()


@pytest.mark.parametrize("reused", [True, False])
def test_processes_have_environment_and_cores_of_their_start(monkeypatch, reused):
    cores, before = {min(os.sched_getaffinity(0))}, os.sched_getaffinity(0)
    monkeypatch.setenv("FOR_RANKS", "1")
    processes = process_ranks.RankProcesses(calls, reused=reused)
    os.sched_setaffinity(0, cores)
    try:
        assert processes.run([(os.getenv, "FOR_RANKS"), (os.sched_getaffinity, 0)], 60) == ["1", cores]
    finally:
        os.sched_setaffinity(0, before)
        processes.close(5)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            (int, "x"),
            r"(?s)rank 1 failed in its process:.*in <lambda>.*ValueError: invalid literal.*rank 0 not done 2 s",
        ),
        ((os._exit, 3), r"rank 1 died with exit code 3\nrank 0 not done 2 s later"),
        ((time.sleep, 60), r"^rank 0, rank 1 not done after 1 s; their processes were killed$"),
    ],
    ids=["raises", "dies", "hangs"],
)
def test_failed_process_is_reported_and_replaced(processes, call, says):
    before = processes.run([(os.getpid,)] * 2, 60)
    with pytest.raises(AssertionError, match=says):
        processes.run([(time.sleep, 60), call], 1 if call[0] is time.sleep else 60)
    after = processes.run([(os.getpid,)] * 2, 60)
    assert not set(before) & set(after)
    assert after == processes.run([(os.getpid,)] * 2, 60), "they are used again"


def test_process_that_may_end_has_no_result(processes):
    assert processes.run([(os.getpid,), (os._exit, 3)], 60, ends=[1])[1] is None
    assert not processes.started


def test_warm_ranks_that_fail_show_codes_and_tracebacks(tmp_path):
    program = """
        if os.environ["RANK"] == "0":
            raise KeyError("lost")
        os.kill(os.getpid(), signal.SIGKILL if os.environ["RANK"] == "1" else signal.SIGSTOP)
    """
    codes, said = warm_ranks.run_ranks(tmp_path, 3, program, only=[0, 1])
    assert codes == [1, -signal.SIGKILL, -signal.SIGKILL]
    assert "program.py" in said and "KeyError: 'lost'" in said


def test_warm_ranks_that_hang_are_killed_and_named(tmp_path):
    program = "print('pid', os.getpid())\nif os.environ['RANK'] == '1':\n    time.sleep(60)"
    with pytest.raises(AssertionError, match=r"(?s)ranks \[1\] not done after 1 s:.*pid \d+.*pid \d+") as raised:
        warm_ranks.run_ranks(tmp_path, 2, program, timeout=1)
    pids = re.findall(r"pid (\d+)", str(raised.value))
    assert len(pids) == 2 and not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    assert warm_ranks.run_ranks(tmp_path, 1, "print('again')") == ([0], "again\n")


def test_warm_snippet_that_ends_at_once_is_not_waited_for():
    begun = time.monotonic()
    assert warm_ranks.run_snippet("import os\nos._exit(3)", dict(os.environ), 60) == (3, "", "")
    assert time.monotonic() - begun < 30
