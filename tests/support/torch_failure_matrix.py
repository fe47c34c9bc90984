"""Run cases of `torch_failures.py` on four ranks, and tell what the others did.

As a program it runs those that are named, or all; it prints a line for each that broke the rule, and a summary, and
exits with 1 if one did.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

PROGRAM = Path(__file__).with_name("torch_failures.py")
SIZE = int(os.environ.get("FAILURE_RANKS", "4"))  # 2 where there are two GPUs
WHO = min(2, SIZE - 1)
WHATS = ("kill", "raise", "absent", "stop")
WHERES = ("loop", "log", "last")
BEHINDS = ("nothing", "barrier", "sync", "destroy")
#: Below the ports that the system gives to others; each run has one of its own, as several may run at once.
PORTS = itertools.count(12_000 + os.getpid() % 1000 * 20)
#: What those that go on sum.
LEFT = f"RECOVERED {SIZE * (SIZE - 1) / 2} ({WHO},)"


@dataclass
class Survivor:
    """One of the other ranks: how its process ended, how long after the failure, and what it said."""

    rank: int
    code: int | None
    seconds: float
    printed: str
    said: str

    def problems(self, recovers: bool) -> list[str]:
        """Return what is wrong with it: a number, a success, or a text that does not name the rank."""
        found = []
        if "RESULT" in self.printed or "DESTROYED" in self.printed:
            found.append(f"printed {self.printed!r}")
        if self.code is None:
            found.append("still there")
        elif recovers and LEFT not in self.printed:
            found.append(f"did not go on: code {self.code}, printed {self.printed!r}")
        elif not recovers and self.code == 0:
            found.append("exited with 0")
        if not re.search(rf"ranks? [\d, -]*{WHO}\b", self.said):
            found.append("does not name the rank")
        return [f"rank {self.rank}: {each}" for each in found]


def run_case(case: str, on_error: str = "", limit: float = 4.0, patience: float = 100.0) -> list[Survivor]:
    """Return what became of the other ranks."""
    with tempfile.TemporaryDirectory(prefix="torch-failure-") as folder:
        port = next(PORTS)
        processes = []
        for rank in range(SIZE):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(SIZE),
                "LOCAL_WORLD_SIZE": str(SIZE),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "ON_ERROR": on_error,
                "LIMIT": str(limit),
            }
            with open(f"{folder}/{rank}.out", "w") as out, open(f"{folder}/{rank}.err", "w") as err:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, PROGRAM, case, folder],
                        env=os.environ | environment,
                        stdout=out,
                        stderr=err,
                        cwd="/",
                    )
                )
        ends: dict[int, float] = {}
        begun = time.time()
        others = [rank for rank in range(SIZE) if rank != WHO]
        while len(ends) < len(others) and time.time() - begun < patience:
            for rank in others:
                if rank not in ends and processes[rank].poll() is not None:
                    ends[rank] = time.time()
            time.sleep(0.01)
        for process in processes:
            process.kill()
            process.wait()
        stamp = Path(folder, "stamp")
        at = float(stamp.read_text()) if stamp.exists() else begun
        return [
            Survivor(
                rank,
                processes[rank].returncode if rank in ends else None,
                ends.get(rank, float("inf")) - at,
                Path(folder, f"{rank}.out").read_text().strip(),
                Path(folder, f"{rank}.err").read_text(),
            )
            for rank in others
        ]


def problems_of(on_error: str, survivors: list[Survivor]) -> list[str]:
    """Return what broke the rule in a case."""
    return [each for survivor in survivors for each in survivor.problems(on_error == "abort")]


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--on-error", default="")
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--limit", type=float, default=6.0)
    given = parser.parse_args()
    cases = given.cases or ["-".join(each) for each in itertools.product(WHATS, WHERES, BEHINDS)]
    runs = [case for _ in range(given.times) for case in cases]
    failed, times = 0, []
    with ThreadPoolExecutor(given.at_once) as pool:
        found = pool.map(lambda case: (case, run_case(case, given.on_error, given.limit)), runs)
        for case, survivors in found:
            problems = problems_of(given.on_error, survivors)
            failed += bool(problems)
            if case.split("-")[0] in ("kill", "raise"):
                times += [each.seconds for each in survivors]
            if problems:
                print(case, problems, flush=True)
                print("   ", survivors[0].said[-600:].replace("\n", "\n    "), flush=True)
    times.sort()
    deaths = (
        f"; after deaths they ended within {times[len(times) // 2]:.2f} s, {times[-1]:.2f} s at most" if times else ""
    )
    print(f"{given.on_error or 'default'}: {len(runs)} runs of {len(cases)} cases, {failed} broke the rule{deaths}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
