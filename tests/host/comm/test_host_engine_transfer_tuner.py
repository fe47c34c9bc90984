"""Large collectives among processes use the faster of two transports, with the same results."""

import subprocess

import pytest
import rank_programs as bodies
from host_ranks import Processes
from sanitizers import ROOT, build

FLOAT16, INT8 = 6, 0


@pytest.fixture(scope="module")
def ways(tmp_path_factory):
    program = tmp_path_factory.mktemp("ways") / "ways"
    build(
        program,
        ["-O0", "-g0"],
        [ROOT / "tests/host/comm/tuner_choices.cpp", ROOT / "ncclpy/host/comm/transfer_tuner.cpp"],
    )

    def run(prefers, *rows):
        """Return how many collectives of each row (number, microseconds of each transport) used the second
        transport.
        """
        command = [program, str(int(prefers)), *(str(each) for row in rows for each in row)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return [int(line) for line in done.stdout.split()]

    return run


@pytest.mark.parametrize("prefers", [False, True])
def test_faster_transport_is_used_and_trials_cost_little(ways, prefers):
    (second,) = ways(prefers, (3000, 100, 50))
    assert 2900 < second < 3000
    (second,) = ways(prefers, (3000, 10, 100))
    assert 0 < second <= 8 * prefers + 6 * 3, "tries are rare where they cost much"


def test_equally_fast_transports_are_both_used(ways):
    (second,) = ways(False, (3000, 50, 50))
    assert 0 < second < 3000


def test_choice_follows_a_change_of_speed(ways):
    assert ways(True, (1000, 100, 90), (1000, 20, 90), (1000, 400, 90))[1:] == pytest.approx([60, 950], abs=60)
    first, second = ways(False, (2000, 50, 200), (1000, 400, 200))
    assert first < 40 and second > 950, "at once, where what was better has become worse than the other was"


def test_unmeasurable_transport_is_not_tried_again_and_again(ways):
    """An unmeasurable transport is not used where the other one can be measured."""
    assert ways(False, (3000, 0, 0))[0] < 150
    assert ways(True, (3000, 0, 0))[0] > 2850
    assert ways(True, (3000, 50, 0))[0] < 150


def test_first_choice_is_the_preferred_transport(ways):
    assert ways(True, (8, 1, 1)) == [8]
    assert ways(False, (8, 1, 1)) == [0]
    assert ways(False, (11, 1, 1)) == [3], "and then tries the other"


@pytest.mark.parametrize("nranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_both_transports_give_the_same_results(nccl, nranks):
    """Run each operation so often that both transports have been tried, and one chosen."""
    processes = Processes()
    try:
        for count in (40_000, 140_001):
            processes.run(nccl, nranks, bodies.every_reduction, [count], (FLOAT16,))
            processes.run(nccl, nranks, bodies.every_copy, [count] * 5, (FLOAT16,))
    finally:
        processes.close()


@pytest.mark.parametrize(
    ("reads", "placement"),
    [
        pytest.param(1, [0, 1], id="1-processes"),
        pytest.param(0, [0, 1], id="0-processes", marks=pytest.mark.slow),
        pytest.param(0, [0, 0], id="0-threads", marks=pytest.mark.slow),
        pytest.param(1, [0, 0], id="1-threads", marks=pytest.mark.slow),
    ],
)
def test_nontemporal_results_are_complete(nccl, monkeypatch, placement, reads):
    monkeypatch.setenv("NCCLPY_HOST_READ_PEERS", str(reads))
    processes = Processes()
    try:
        for count in (4_200_001, 8_400_000):  # a rank's part of the result, or all of it, has 8 MiB or more
            processes.run(nccl, 2, bodies.every_copy, [count], (INT8,), placement=placement)
            processes.run(nccl, 2, bodies.large_sums, count, placement=placement)
    finally:
        processes.close()
