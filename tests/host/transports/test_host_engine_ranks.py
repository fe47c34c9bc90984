"""1 to 16 ranks, as threads, as processes and as a mix, and sizes on both sides of every boundary of the engine."""

from __future__ import annotations

import os

import pytest
import rank_programs as bodies
from host_ranks import Processes
from nccl_calls import AVG, SUM

FLOAT16, FLOAT32, INT64, INT8 = 6, 7, 4, 0
MOST = 16


@pytest.fixture(scope="module", params=["reading peers", "not reading peers"])
def processes(request):
    """Processes that see 16 devices; this process only makes the ids."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCCLPY_HOST_DEVICES", str(MOST))
        patch.setenv("NCCLPY_HOST_ABORT_CORRUPTS", "0")  # data that have arrived when a rank revokes must be right
        patch.setenv("NCCLPY_HOST_READ_PEERS", str(int(request.param == "reading peers")))
        processes = Processes()
        yield processes
        processes.close()


# The process that runs each rank.
PLACEMENTS = {
    "threads": lambda n: [0] * n,
    "processes": lambda n: list(range(n)),
    "mix": lambda n: [rank % (3 if n > 3 else 2) for rank in range(n)],
}


def worlds(numbers, long, slow=()):
    """Return parameters (number of ranks, placement), each world once; numbers in `long` run in campaigns only."""
    seen = set()
    found = []
    for n in numbers:
        for name, place in PLACEMENTS.items():
            if tuple(place(n)) not in seen:
                seen.add(tuple(place(n)))
                marks = [pytest.mark.campaign] if n in long else [pytest.mark.slow] if (n, name) in slow else []
                found.append(pytest.param(n, place(n), id=f"{n}-{name}", marks=marks))
    return found


@pytest.fixture
def run(nccl, processes, nranks, placement):
    """Return ``run(body, *arguments)``, which runs a body as the given ranks."""
    return lambda body, *arguments: processes.run(nccl, nranks, body, *arguments, placement=placement)


@pytest.mark.parametrize("processes", ["reading peers"], indirect=True)
@pytest.mark.parametrize(
    ("nranks", "placement"), worlds(range(1, MOST + 1), {6, 7, *range(9, 16)}, {(8, "processes"), (16, "processes")})
)
def test_collectives_of_any_number_of_ranks_equal_numpy(run, nranks):
    run(bodies.every_reduction, (1, 1000), (FLOAT16, INT64))
    run(bodies.every_copy, (1, 1000), (INT8,))
    run(bodies.all_pairs, (1, 3000))
    if nranks > 1:
        run(bodies.splits)


# Bytes: a contribution beside a record, or beside a message's kind; an inline contribution, by the number of ranks; a
# piece of a message; a block that the kernel may copy between processes; and large ones: a step of a staged
# collective, or a message that is offered; the limit of what a caller with a time limit may run.
BOUNDARIES = {
    "little": lambda _: 64,
    "little piece": lambda _: 40,
    "inline": lambda nranks: min(32 << 10, (64 << 10) // nranks // 64 * 64),
    "piece": lambda _: 16 << 10,
    "pulled": lambda _: 64 << 10,
}


LARGE = {"step": lambda _: 256 << 10, "brief": lambda _: 1 << 20}


def check_around(run, nranks, nbytes, reduced):
    """Copy and send all sizes beside a boundary, and reduce some of them."""
    counts = sorted({nbytes // 4 + more for more in (-1, 0, 1)} | {nbytes // 4 // nranks + more for more in (0, 1)})
    run(bodies.every_copy, counts, (FLOAT32,))
    run(bodies.all_pairs, [4 * count for count in counts])
    run(bodies.every_reduction, counts[reduced], (FLOAT32,))


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize(("nranks", "placement"), worlds((2, 3, 5), long={2, 5}))
def test_sizes_around_boundaries_equal_numpy(run, nranks, boundary):
    check_around(run, nranks, BOUNDARIES[boundary](nranks), slice(None))


def large():
    """Return parameters (processes, number of ranks, placement, boundary), most of which are slow."""
    quick = [("reading peers", "3-mix", "brief"), ("not reading peers", "3-processes", "step")]
    found = []
    for world in worlds((2, 3, 5), long={2, 5}):
        for how in ("reading peers", "not reading peers"):
            for boundary in LARGE:
                marks = world.marks or [pytest.mark.slow] * ((how, world.id, boundary) not in quick)
                found.append(
                    pytest.param(how, *world.values, boundary, id=f"{how}-{world.id}-{boundary}", marks=marks)
                )
    return found


@pytest.mark.parametrize(("processes", "nranks", "placement", "boundary"), large(), indirect=["processes"])
def test_sizes_around_large_boundaries_equal_numpy(run, nranks, boundary):
    check_around(run, nranks, LARGE[boundary](nranks), slice(-2, None))


@pytest.fixture
def crowded(processes):
    """Bind all processes to one core: with more ranks than cores other transports are chosen."""
    had = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(had)})  # the processes start on first use
    try:
        crowd = Processes()
        yield crowd
    finally:
        os.sched_setaffinity(0, had)
    crowd.close()


@pytest.mark.parametrize("processes", ["reading peers"], indirect=True)
@pytest.mark.parametrize(
    ("nranks", "placement"),
    [pytest.param(2, [0, 1], id="processes"), pytest.param(3, [0, 1, 0], id="mix", marks=pytest.mark.slow)],
)
def test_reductions_of_ranks_on_one_core_around_the_read_size_equal_numpy(nccl, crowded, nranks, placement):
    block = (1 << 20) // 4
    for counts, code in (([block - 1, nranks * block + 1], FLOAT32), ([2 * block + 33], FLOAT16)):
        crowded.run(nccl, nranks, bodies.every_reduction, counts, (code,), (SUM, AVG), placement=placement)


# Revoke at a different moment in each turn.
@pytest.mark.parametrize(
    "turns", [range(0, 10, 5), pytest.param(range(10), marks=pytest.mark.slow)], ids=["some", "all"]
)
@pytest.mark.parametrize("processes", ["reading peers"], indirect=True)
def test_reader_of_a_revoking_rank_waits_at_the_barrier(nccl, crowded, turns):
    for turn in turns:
        crowded.run(nccl, 2, bodies.revoked_in_the_middle, 64 << 20, 20, turn * 0.007, placement=[0, 1])


@pytest.mark.parametrize(
    "turns", [range(0, 10, 5), pytest.param(range(10), marks=pytest.mark.slow)], ids=["some", "all"]
)
@pytest.mark.parametrize("processes", ["reading peers"], indirect=True)
def test_data_read_from_a_revoking_rank_is_not_delivered(nccl, processes, tmp_path, turns):
    for turn in turns:
        body, done = bodies.sender_revokes_in_the_middle, tmp_path / str(turn)
        _, arrived = processes.run(nccl, 2, body, 64 << 20, 5, turn * 0.004, done)
        assert arrived >= 1
