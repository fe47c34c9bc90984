"""No result from a failed collective: the behaviour of several processes when one of them fails, with each API.

`failure_matrix.py road_failures` runs all cases.
"""

from __future__ import annotations

import pytest
from failure_matrix import problems_of, run_case, with_all_cases_on_gpus

import ncclpy

CASES = (
    "kill-group-loop-stream",
    "raise-group-log-wait",
    "absent-group-loop-close",
    "stop-group-log-stream",
    "kill-manager-loop-wait",
    "raise-manager-loop-stream",
    "absent-manager-log-stream",
    "stop-manager-loop-close",
    "kill-coordinator-loop-close",
    "raise-coordinator-loop-stream",
    "absent-coordinator-loop-wait",
    "stop-coordinator-log-stream",
    "kill-communicator-log-stream",
    "raise-communicator-loop-close",
    "absent-communicator-loop-stream",
    "stop-communicator-loop-wait",
)


def limit_of(case):
    """Return the deadline of a case; a death is known earlier than a deadline.

    The communicators are made within it, for which NCCL may take seconds.
    """
    if case.startswith(("absent", "stop")):
        return 2 if ncclpy.library().engine == "host" else 8
    return 10


@pytest.mark.parametrize("case", with_all_cases_on_gpus("road_failures", CASES))
def test_failed_rank_ends_others_without_a_number(case):
    survivors = run_case("road_failures", case, limit=limit_of(case))
    assert problems_of(case, False, survivors) == [], [each.said[-2000:] for each in survivors]


@pytest.mark.parametrize("case", CASES[:4])
def test_failed_rank_ends_processes_of_a_group_that_exits(case):
    survivors = run_case("road_failures", case, "exit", limit_of(case))
    assert problems_of(case, False, survivors) == [], [each.said[-2000:] for each in survivors]
