"""The command line: ``python -m benchmarks EXPERIMENT``, each experiment one module."""

import argparse
import os
import sys

from benchmarks.bootstrap import main as bootstrap
from benchmarks.collectives import main as collectives
from benchmarks.collectives import mpi, nccl_tests
from benchmarks.coordinator import main as coordinator
from benchmarks.manager import main as manager
from benchmarks.memory import main as memory
from benchmarks.overhead import import_time, instructions
from benchmarks.overhead import main as overhead
from benchmarks.pages import compare, plot, report
from benchmarks.process_group import main as process_group
from benchmarks.process_group import recovery, reports
from benchmarks.scale import main as scale
from benchmarks.torch_backend import main as torch_backend

EXPERIMENTS = {
    "overhead": overhead,
    "instructions": instructions,
    "manager": manager,
    "nccl-tests": nccl_tests,
    "collectives": collectives,
    "memory": memory,
    "mpi": mpi,
    "process_group": process_group,
    "reports": reports,
    "recovery": recovery,
    "coordinator": coordinator,
    "torch": torch_backend,
    "scale": scale,
    "bootstrap": bootstrap,
    "import": import_time,
    "report": report,
    "compare": compare,
    "plot": plot,
}


def main() -> int:
    """Parse the command line and run one experiment; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="experiment", required=True)
    for name, module in EXPERIMENTS.items():
        module.arguments(commands.add_parser(name, description=module.__doc__, help=module.__doc__.splitlines()[0]))
    chosen = parser.parse_args()
    # For every measured process: numpy's linear algebra would start threads in each, which keep a core busy for a
    # tenth of a second although they have nothing to do.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    return EXPERIMENTS[chosen.experiment].run(chosen)


if __name__ == "__main__":
    sys.exit(main())
