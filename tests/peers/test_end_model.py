"""No rank takes wrong data for a success, whatever the timing: the model of tests/support/end_model.py, many times."""

from __future__ import annotations

from collections import Counter

import pytest
from end_model import Run


@pytest.mark.parametrize(
    "runs", [800, pytest.param(20_000, marks=pytest.mark.slow), pytest.param(100_000, marks=pytest.mark.campaign)]
)
def test_no_run_of_the_model_hands_out_wrong_data(runs):
    outcomes: Counter[str | None] = Counter()
    corrupted = 0
    for seed in range(runs):
        run = Run(seed)
        assert not run.wrong, f"seed {seed}: ranks {run.wrong}"
        outcomes.update(rank.outcome for rank in run.ranks)
        corrupted += any(rank.kernel is False for rank in run.ranks)
        unsettled = [rank for rank in run.ranks if rank.launched and rank.outcome is None and rank.killed > 60]
        assert not unsettled, f"seed {seed}: ranks {[rank.number for rank in unsettled]} have no answer"
    assert min(outcomes["success"], outcomes["failed"], corrupted) > runs // 20, (outcomes, corrupted)


@pytest.mark.parametrize("less", [{"two_steps": False}, {"asks": False}])
def test_model_hands_out_wrong_data_without_a_part_of_the_protocol(less):
    assert any(Run(seed, **less).wrong for seed in range(2000))
