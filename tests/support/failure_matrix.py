"""Run cases of programs in which one rank fails, and check the other ranks.

The programs are `torch_failures.py` and `road_failures.py`. Run as a program, this file runs the named cases, or all,
prints a line for each case with a problem, and a summary, and exits with 1 if there was a problem.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warm_ranks import launched, run_forks

WHATS = ("kill", "raise", "absent", "stop")
CASES = {
    "torch_failures": (WHATS, ("loop", "log", "last"), ("nothing", "barrier", "sync", "destroy")),
    "road_failures": (
        WHATS,
        ("group", "manager", "coordinator", "communicator"),
        ("loop", "log"),
        ("wait", "stream", "close"),
    ),
}
#: What the ranks of a program would import after the fork: an optimizer's first step imports torch._dynamo.
IMPORTS = {
    "torch_failures": ("torch", "torch._dynamo", "torch.nn.parallel", "ncclpy.interop.torch", "failure_matrix"),
    "road_failures": ("testing", "failure_matrix"),
}
#: Ports below the system's ephemeral range; each run has its own, as several may run at once.
PORTS = itertools.count(12_000 + os.getpid() % 1000 * 20)


def all_cases(program: str) -> list[str]:
    """Return the names of all cases of a program."""
    return ["-".join(each) for each in itertools.product(*CASES[program])]


def with_all_cases_on_gpus(program: str, few: Sequence[str]) -> list[Any]:
    """Return test parameters: a few cases, and the others for a campaign on GPUs."""
    import pytest

    marks = [pytest.mark.gpu, pytest.mark.campaign]
    return [*few, *(pytest.param(case, marks=marks) for case in all_cases(program) if case not in few)]


def failing(size: int) -> int:
    """Return the rank that fails: not the first, which serves torch's store, and of four not the last."""
    return min(2, size - 1)


def fail(what: str, folder: str) -> None:
    """Fail as the case says; note the time of the failure."""
    with open(f"{folder}/stamp", "w") as file:
        file.write(str(time.time()))
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "raise":
        raise RuntimeError("boom")
    time.sleep(100)
    os._exit(0)


@dataclass
class Survivor:
    """One of the other ranks: the end of its process, its seconds after the failure, and its output.

    `reached` is False if an earlier error, such as a slow start, kept the failing rank from its failure.
    """

    rank: int
    size: int
    reached: bool
    code: int | None
    seconds: float
    printed: str
    said: str

    def problems(self, case: str, recovers: bool) -> list[str]:
        """Return the problems: a result, a success, a wrong error class, or a text without the failed rank."""
        found, failed = [], failing(self.size)
        recovered = f"RECOVERED {self.size * (self.size - 1) / 2} ({failed},)"  # the sum of the survivors
        if "RESULT" in self.printed or "ENDED" in self.printed:
            found.append(f"printed {self.printed!r}")
        if self.code is None:
            found.append("still there")
        elif recovers and recovered not in self.printed:
            found.append(f"did not recover: code {self.code}, printed {self.printed!r}")
        elif not recovers and self.code == 0:
            found.append("exited with 0")
        elif self.code < 0:
            found.append(f"was ended by signal {-self.code}")
        if not self.reached:
            return [f"rank {self.rank}: {each}" for each in [*found, "the failing rank did not reach its failure"]]
        if re.search("coordinator-.*-close", case):  # ended by the first shutdown, not by the failure
            return [f"rank {self.rank}: {each}" for each in found]
        wanted = "NcclRemoteError" if case.startswith(("kill", "raise")) else "NcclTimeout"
        if not recovers and wanted not in self.said:  # an exit's dump has it
            found.append(f"raised no {wanted}")
        if not re.search(rf"ranks? [\d, -]*{failed}\b", self.said):
            found.append("does not name the rank")
        return [f"rank {self.rank}: {each}" for each in found]


def run_case(
    program: str,
    case: str,
    on_error: str = "",
    limit: float = 4,
    machines: bool = False,
    patience: float = 100,
) -> list[Survivor]:
    """Run a case and return the other ranks.

    With `machines`, or on fewer GPUs than ranks, each rank takes itself for a separate machine: NCCL lets ranks share
    a GPU then.
    """
    import ncclpy

    size = 4
    machines = machines or ncclpy.device_count() < size
    on_torch = program == "torch_failures"
    imports = IMPORTS[program]
    if ncclpy.library().engine == "cuda":
        imports += ("torch",)  # its arrays
    variables = {"OMP_NUM_THREADS": "1", "ON_ERROR": on_error, "LIMIT": str(limit)}
    with (
        tempfile.TemporaryDirectory(prefix="failure-") as folder,
        contextlib.nullcontext(by_torchrun(size)) if on_torch else launched(size) as environments,
    ):
        if machines:  # NCCL connects them by sockets
            variables |= {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        ranks = []
        for rank, each in enumerate(environments):
            each |= variables | ({"NCCL_HOSTID": f"machine-{rank}"} if machines else {})
            ranks.append((each, f"{folder}/{rank}.out", f"{folder}/{rank}.err"))
        others = [rank for rank in range(size) if rank != failing(size)]
        command = Path(__file__).with_name(f"{program}.py"), case, folder
        begun = time.time()
        ends = run_forks(command, ranks, patience, only=others, how="whole", imports=imports)
        stamp = Path(folder, "stamp")
        at = float(stamp.read_text()) if stamp.exists() else begun
        return [
            Survivor(
                rank,
                size,
                stamp.exists(),
                ends[rank][0],
                ends[rank][1] - at,
                Path(folder, f"{rank}.out").read_text().strip(),
                Path(folder, f"{rank}.err").read_text(errors="replace"),
            )
            for rank in others
        ]


def by_torchrun(size: int) -> list[dict[str, str]]:
    """Return the environment of each rank, as torchrun would set it; rank 0 serves torch's store."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(next(PORTS)), "WORLD_SIZE": str(size)}
    common |= {"LOCAL_WORLD_SIZE": str(size)}
    return [{**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


def problems_of(case: str, recovers: bool, survivors: list[Survivor]) -> list[str]:
    """Return the problems of all ranks of a case."""
    return [each for survivor in survivors for each in survivor.problems(case, recovers)]


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", choices=CASES)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--on-error", default="")
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--machines", action="store_true", help="have each rank take itself for a machine of its own")
    parser.add_argument("--limit", type=float, default=6.0)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no case after so many")
    given = parser.parse_intermixed_args()
    os.environ.setdefault("NCCLPY_HOST_ABORT_CORRUPTS", "1")  # as in conftest.py
    cases = given.cases or all_cases(given.program)
    recovers = given.program == "torch_failures" and given.on_error == "abort"
    end = time.monotonic() + given.seconds
    done, failed, unreached, times = 0, 0, 0, []

    def run(case):
        if time.monotonic() < end:
            return case, run_case(given.program, case, given.on_error, given.limit, given.machines)
        return case, None

    with ThreadPoolExecutor(given.at_once) as pool:
        for case, survivors in pool.map(run, cases * given.times):
            if survivors is None:
                continue
            done += 1
            problems = problems_of(case, recovers, survivors)
            reached = survivors[0].reached
            failed += bool(problems) and reached
            unreached += not reached
            if reached and case.startswith(("kill", "raise")):
                times += [each.seconds for each in survivors]
            if problems:
                print(case, problems, flush=True)
                for each in survivors:
                    print(f"    [{each.rank}]", each.said[-700:].replace("\n", "\n    "), flush=True)
    times.sort()
    deaths = f"; after deaths: median {times[len(times) // 2]:.2f} s, at most {times[-1]:.2f} s" if times else ""
    what = f"{given.program} {given.on_error or 'default'}: {done} runs of {len(cases)} cases"
    print(f"{what}, {failed} broke the rule, {unreached} did not reach the failure{deaths}")
    return 1 if failed or unreached or not done else 0


if __name__ == "__main__":
    sys.exit(main())
