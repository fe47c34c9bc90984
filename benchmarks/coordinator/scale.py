"""How the time of negotiation grows: with ranks, and with names that are new or known.

Three things are measured. First, a negotiation through the tree as if every rank had a core of its own: the ranks'
nodes run one after the other, each call is timed, and each rank's clock is computed from these times; network time is
not included. Second, the same for control planes with their connections and threads, all in one process, which share
its cores. Third, two such ranks with many names.
"""

from __future__ import annotations

import argparse

import numpy as np

from benchmarks.pages import report, words
from benchmarks.work import results, workers

SIDE = "benchmarks.coordinator.scale_side"
RANKS, NAMES = [2, 4, 8, 16, 32, 64, 128, 256], [10, 100, 1000, 10_000]
OURS = "ncclpy's control plane"
WAY, SHARED = "an agreement, a core a rank", "an agreement, all ranks in one process"
NEW, KNOWN = "names that are new", "names that are known"
#: The factor by which the largest number of ranks, or names, may exceed the fitted line and count as no worse.
MORE = 1.5


def run(chosen: argparse.Namespace) -> int:
    """Measure in fresh processes, fit, print and write."""
    command = ["--scale", *(["--rounds", str(chosen.rounds)] if chosen.rounds != 5 else [])]
    if chosen.most_ranks != RANKS[-1]:
        command += ["--most-ranks", str(chosen.most_ranks)]
    ranks = [n for n in RANKS if n <= chosen.most_ranks]
    result = results.new("coordinator", command, engine="host", rounds=chosen.rounds)
    rows: dict[tuple[str, int], dict] = {}
    for number in range(chosen.rounds):
        for size in ranks:
            for operation, do in ((WAY, "way"), (SHARED, "shared")):
                row = {"operation": operation, "rival": OURS, "road": f"{size} ranks", "ranks": size}
                _take(rows, row, size, _measured(do, size=size))
        for operation, new in ((NEW, True), (KNOWN, False)):
            for count in NAMES:
                row = {"operation": operation, "rival": OURS, "road": f"{count:,} names"}
                _take(rows, row, count, _measured("names", count=count, new=new))
        print(f"round {number + 1} of {chosen.rounds}", flush=True)
    result["rows"] = list(rows.values())
    result["notes"] = [
        f"{words.shown(WAY)}: the ranks' calls are timed one after the other, and added up as if each rank had a core "
        "and the network took no time, with 8 ranks per machine. For a name that all ranks know, from the first bring "
        "until the last rank has the response.",
        f"{SHARED}: with sockets and threads, all on the cores of this machine, so the time grows with the ranks.",
        "Names: two ranks in one process bring that many at once; from the first bring until the last rank has all "
        "responses.",
        *judged(rows, ranks),
    ]
    if chosen.json:
        results.save(result, chosen.json)
    print(report.text(result))
    return 0


def _take(rows: dict[tuple[str, int], dict], row: dict, count: int, sample: float) -> None:
    found = rows.setdefault((row["operation"], count), {**row, "measure": "time", "unit": "us", "samples": []})
    found["samples"].append(sample)


def _measured(do: str, **parameters: object) -> float:
    process = workers.WorkerProcess(SIDE)
    try:
        return float(process.ask(do, deadline=workers.FIRST_DEADLINE, **parameters))
    finally:
        process.close()


def judged(rows: dict[tuple[str, int], dict], ranks: list[int]) -> list[str]:
    """Return how the rows grow, in words: with the logarithm of the ranks, and with the number of names, or worse."""
    said = []
    for operation, counts, line, of in (
        (WAY, ranks, np.log2(ranks), "log2(ranks)"),
        (NEW, NAMES, np.array(NAMES, float), "names"),
        (KNOWN, NAMES, np.array(NAMES, float), "names"),
    ):
        medians = np.array([np.median(rows[operation, count]["samples"]) for count in counts])
        # Relative errors, else the largest number of names alone decides the fit.
        b, a = np.polyfit(line, medians, 1, w=1 / medians)
        fitted = a + b * line[-1]
        verdict = "no worse than the formula" if medians[-1] <= MORE * fitted else "worse than the formula"
        said.append(
            f"{words.shown(operation)}: {a:.3g} us + {b:.3g} us * {of}, and with {counts[-1]:,}, "
            f"{medians[-1] / fitted:.2f} times what this formula gives: {verdict}."
        )
    return said
