"""1 to 16 ranks, as threads, as processes and as a mix, and sizes on both sides of every boundary of the engine."""

from __future__ import annotations

import host_bodies as bodies
import pytest
from host_ranks import Processes

FLOAT16, FLOAT32, INT64, INT8 = 6, 7, 4, 0
MOST = 16


@pytest.fixture(scope="module", params=["reading peers", "not reading peers"])
def processes(request):
    """Processes that see 16 devices; this process only makes the ids."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCCLPY_HOST_DEVICES", str(MOST))
        patch.setenv("NCCLPY_HOST_READ_PEERS", str(int(request.param == "reading peers")))
        processes = Processes()
        yield processes
        processes.close()


PLACEMENTS = {
    "threads": lambda n: [0] * n,
    "processes": lambda n: list(range(n)),
    "mix": lambda n: [rank % 3 for rank in range(n)],
}


@pytest.fixture(params=PLACEMENTS)
def run(request, nccl, processes):
    """Return ``run(n, body, *arguments)``, which runs a body as n ranks."""
    place = PLACEMENTS[request.param]
    return lambda n, body, *arguments: processes.run(nccl, n, body, *arguments, placement=place(n))


@pytest.mark.parametrize("processes", ["reading peers"], indirect=True)
@pytest.mark.parametrize("nranks", range(1, MOST + 1))
def test_every_number_of_ranks(run, nranks):
    run(nranks, bodies.every_reduction, (1, 1000), (FLOAT16, INT64))
    run(nranks, bodies.every_copy, (1, 1000), (INT8,))
    run(nranks, bodies.all_pairs, (1, 3000))
    if nranks > 1:
        run(nranks, bodies.splits)


# Bytes: what travels inside the segment, a piece of a message, a block that
# the kernel copies between processes, a step of a staged collective.
BOUNDARIES = {"inline": 2048, "piece": 64 << 10, "pulled": 128 << 10, "step": 256 << 10}


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("nranks", [2, 3, pytest.param(5, marks=pytest.mark.campaign)])
def test_sizes_around_the_boundaries(run, nranks, boundary):
    nbytes = BOUNDARIES[boundary]
    counts = sorted({nbytes // 4 + more for more in (-1, 0, 1)} | {nbytes // 4 // nranks + more for more in (0, 1)})
    run(nranks, bodies.every_copy, counts, (FLOAT32,))
    run(nranks, bodies.all_pairs, [4 * count for count in counts])
    if boundary != "step":
        run(nranks, bodies.every_reduction, counts, (FLOAT32,))
    else:
        run(nranks, bodies.every_reduction, counts[-2:], (FLOAT32,))
