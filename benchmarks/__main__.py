"""The command line: ``python -m benchmarks EXPERIMENT``, each experiment one module."""

import sys
from pathlib import Path

from benchmarks import ROOT

# The source tree is no package to measure: what is installed is. Without this, `python -m` in the root would import
# the unbuilt ncclpy beside this folder.
sys.path[:] = [place for place in sys.path if Path(place or ".").resolve() != ROOT]

import argparse  # noqa: E402

from benchmarks import import_time, nccl_tests, overhead, report  # noqa: E402

EXPERIMENTS = {"overhead": overhead, "nccl-tests": nccl_tests, "import": import_time, "report": report}


def main() -> int:
    """Parse the command line and run one experiment; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="experiment", required=True)
    for name, module in EXPERIMENTS.items():
        module.arguments(commands.add_parser(name, description=module.__doc__, help=module.__doc__.splitlines()[0]))
    chosen = parser.parse_args()
    return EXPERIMENTS[chosen.experiment].run(chosen)


if __name__ == "__main__":
    sys.exit(main())
