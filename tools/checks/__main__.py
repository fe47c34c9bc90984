"""Run the named checks, or all, and print their findings as path:line: message."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
CHECKS = ("borrowed", "foreign", "gil", "includes", "layers", "layout", "prose")


def main(arguments: list[str] | None = None) -> int:
    """Return 1 if there are findings."""
    parser = argparse.ArgumentParser(prog="python -m tools.checks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(CHECKS)}")
    names = parser.parse_args(arguments).names or CHECKS
    if unknown := set(names) - set(CHECKS):
        parser.error(f"no check is called {', '.join(sorted(unknown))}; there are {', '.join(CHECKS)}")
    count = 0
    for name in names:
        for problem in importlib.import_module(f"tools.checks.{name}").check(ROOT):
            print(f"{problem.path.relative_to(ROOT)}:{problem.line}: {problem.message} [{name}]")
            count += 1
    print(f"{len(names)} checks, {count} problems")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
