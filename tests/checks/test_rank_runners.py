"""What the runner of ranks as threads, `thread_ranks`, says of ranks that fail or hang.

`tests/core/test_fork_exit.py` has ranks that fail beside others in a barrier.
"""

from __future__ import annotations

import threading

import pytest
import thread_ranks


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
