"""No number results from a failed collective: the ranks of a torch program when one of them fails."""

from __future__ import annotations

import pytest
from failure_matrix import problems_of, run_case, with_all_cases_on_gpus

CASES = with_all_cases_on_gpus(
    "torch_failures", ["kill-loop-nothing", "raise-log-barrier", "absent-last-destroy", "stop-last-sync"]
)


@pytest.mark.parametrize("on_error", ["", "exit", "abort"], ids=["default", "exit", "abort"])
@pytest.mark.parametrize("case", CASES)
def test_failed_rank_ends_others_without_a_number(extension, case, on_error):
    # A death is known earlier than a deadline.
    survivors = run_case("torch_failures", case, on_error, 4 if case.startswith(("absent", "stop")) else 10)
    assert problems_of(case, on_error == "abort", survivors) == [], [each.said[-2000:] for each in survivors]
