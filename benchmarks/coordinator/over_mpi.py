"""One rank of a coordinator over MPI; mpirun starts the ranks.

Its second argument is a JSON object: engine, models, steps, calls. Rank 0 prints the times and seconds of each.
"""

import json
import sys

from mpi4py import MPI

from benchmarks.coordinator.side import Side


def main() -> None:
    """Measure the latency and every model."""
    options, world, side = json.loads(sys.argv[2]), MPI.COMM_WORLD, Side()
    side.do_begin(False, world.size)
    side.do_open(world.rank, 0, "mpi", options["engine"])
    latency, models = {}, {}
    for last in {0, world.size - 1}:
        side.do_latency(options["calls"] // 5, last)
        latency[last] = world.gather(side.do_latency(options["calls"], last))
    for model in options["models"]:
        side.do_prepare(model)
        for grouped in (False, True):
            side.do_step(options["warm"], grouped)
            models[f"{model}: {'grouped' if grouped else 'in any order'}"] = side.do_step(options["steps"], grouped)
    side.coordinator.close(60)
    if world.rank == 0:
        print(json.dumps({"latency": latency, "models": models}), flush=True)
