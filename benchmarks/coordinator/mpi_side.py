"""One rank of mpi4py that reduces a model's gradients one by one, as a program without the package.

Its argument is a JSON object: the models' element counts, and the number of steps. Rank 0 prints the seconds of each.
"""

import json
import sys
import time

import numpy as np
from mpi4py import MPI


def main() -> None:
    """Measure every model."""
    options, world, found = json.loads(sys.argv[1]), MPI.COMM_WORLD, {}
    steps, warm = options.pop("steps"), options.pop("warm")
    for model, counts in options.items():
        arrays = [np.ones(count, np.float32) for count in counts]
        taken = []
        for _ in range(warm + steps):
            world.Barrier()
            began = time.perf_counter()
            for array in arrays:
                world.Allreduce(MPI.IN_PLACE, array, MPI.MAX)
            taken.append(time.perf_counter() - began)
        found[model] = taken[warm:]
    if world.rank == 0:
        print(json.dumps(found), flush=True)


main()
