"""The process in which callgrind counts instructions: each road runs between marks.

Its second argument is a JSON object: the no-op library, the rivals' modules, and a file for the names of the roads.
"""

import ctypes
import json
import sys
from pathlib import Path

from benchmarks import rivals
from benchmarks.overhead.instructions import CALLS, SAMPLES, WARM
from benchmarks.work import setting


def main() -> None:
    """Run every road."""
    options = json.loads(sys.argv[2])
    place = setting.on_noop(options["library"])
    import ncclpy

    ncclpy.use(options["library"])
    mark = ctypes.CDLL(options["library"]).noopMark
    told = []
    for module in options["rivals"]:
        rival = rivals.load(module)
        for road in rival.open(place):
            road.host(WARM)
            mark()
            for _ in range(SAMPLES):
                road.host(CALLS)
                mark()
            told.append({"rival": rival.NAME, "operation": road.operation, "road": road.name})
    # Modules of one Cython share their types by way of a module that is named after it.
    cython = next(name.removeprefix("_cython_") for name in sys.modules if name.startswith("_cython_"))
    Path(options["told"]).write_text(json.dumps({"roads": told, "cython": cython}))
