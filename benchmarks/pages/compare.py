"""The changes between two results of one experiment, and whether they exceed the noise.

Rows of the same name are paired. A row is better or worse if both of these hold, else it is the same:

- the 99% interval of the ratio of the medians, B over A, does not contain 1. The interval is found by bootstrap: the
  samples of either side are resampled, with replacement, thousands of times, and each resample has its ratio;
- the ratio is further from 1 than --threshold. Two runs differ by more than the rounds of one run: memory has other
addresses, a core's or a GPU's clock differs. Two runs of one program show how large the threshold must be.

A row with fewer than 4 samples on a side is not judged: so few separate by chance. Less is better, except for
bandwidths and rates.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from benchmarks.pages import summary, words
from benchmarks.pages.markdown import number, table

#: Resamples of the bootstrap, the share of their ratios outside the interval, and the seed that makes it repeatable.
DRAWS = 4000
LEFT_OUT = 0.01
SEED = 1
#: With 4 samples on each side, all of one side exceed all of the other by chance in 3% of the cases; with 3, in 10%.
FEWEST = 4
#: Units of which more is better.
MORE_IS_BETTER = ("GB/s", "1000/s")
#: The fields that identify a row in its result.
NAME = ("operation", "rival", "road", "measure", "unit")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("a", type=Path, metavar="A.json", help="the result to compare with")
    parser.add_argument("b", type=Path, metavar="B.json", help="the result that is judged")
    parser.add_argument(
        "--threshold", type=float, default=0.05, metavar="PART", help="smallest change that counts (default: 0.05)"
    )
    parser.add_argument("--changed", action="store_true", help="leave out the rows that are the same")
    parser.add_argument("--fail-on-regression", action="store_true", help="exit with 1 if a row got worse")


def run(chosen: argparse.Namespace) -> int:
    """Print the comparison; return 1 for a regression if asked to, 2 for files that cannot be compared."""
    try:
        a, b = load(chosen.a), load(chosen.b)
        same_experiment(a, b)
    except ValueError as error:
        print(f"python -m benchmarks compare: {error}", file=sys.stderr)
        return 2
    pairs = [(name, *judge(*samples, name[-1], chosen.threshold)) for name, samples in paired(a, b)]
    print(_text(a, b, pairs, changed_only=chosen.changed))
    worse = sum(verdict == "worse" for *_, verdict in pairs)
    return 1 if worse and chosen.fail_on_regression else 0


def load(path: Path) -> dict:
    """Return the result in the file `path`.

    Raises
    ------
    ValueError
        If the file has no result; the message names it.
    """
    try:
        result = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(result, dict) or not {"experiment", "rows", "settings"} <= result.keys():
        raise ValueError(f"{path} is not a result: an experiment of `python -m benchmarks` writes one with --json")
    return result


def same_experiment(a: dict, b: dict) -> None:
    """Raise ``ValueError`` unless both results are of one experiment on one engine."""
    for what, first, second in (
        ("experiments", a["experiment"], b["experiment"]),
        ("engines", a["settings"].get("engine", ""), b["settings"].get("engine", "")),
    ):
        if first != second:
            raise ValueError(f"different {what}, {first!r} and {second!r}: their rows mean different things")


def paired(a: dict, b: dict) -> list[tuple[tuple, tuple[list, list]]]:
    """Return ``(name, (samples of A, samples of B))`` of every row that both have, in the order of B."""
    ours, theirs = _samples(a), _samples(b)
    return [(name, (ours[name], samples)) for name, samples in theirs.items() if name in ours]


def judge(a: list[float], b: list[float], unit: str, threshold: float) -> tuple[float, float, float, str, str]:
    """Return the median of `a`, that of `b`, their ratio, its interval in words, and the verdict."""
    before, after = summary.median(a), summary.median(b)
    if before <= 0:
        return before, after, float("nan"), "", "same" if before == after else "not judged"
    ratio = after / before
    if min(len(a), len(b)) < FEWEST:
        return before, after, ratio, "", "not judged"
    low, high = interval(a, b)
    if low <= 1 <= high or abs(ratio - 1) <= threshold:
        verdict = "same"
    else:
        verdict = "better" if (ratio > 1) == (unit in MORE_IS_BETTER) else "worse"
    return before, after, ratio, f"{low:.3f}-{high:.3f}", verdict


def interval(a: list[float], b: list[float]) -> tuple[float, float]:
    """Return the interval of the ratio of the medians, `b` over `a`; both are above zero."""
    generator = np.random.default_rng(SEED)
    medians = []
    for side in (a, b):
        samples = np.asarray(side)
        medians.append(np.median(samples[generator.integers(len(samples), size=(DRAWS, len(samples)))], axis=1))
    low, high = np.quantile(medians[1] / medians[0], (LEFT_OUT / 2, 1 - LEFT_OUT / 2))
    return float(low), float(high)


def _samples(result: dict) -> dict[tuple, list[float]]:
    return {tuple(row[key] for key in NAME): row["samples"] for row in result["rows"] if row.get("samples")}


def _text(a: dict, b: dict, pairs: list[tuple], *, changed_only: bool) -> str:
    parts = []
    differ = [
        f"{key}: {_word(a.get(part, {}).get(key))} -> {_word(b.get(part, {}).get(key))}"
        for part in ("machine", "versions", "settings")
        for key in sorted(a.get(part, {}).keys() | b.get(part, {}).keys())
        if key != "load" and _word(a.get(part, {}).get(key)) != _word(b.get(part, {}).get(key))
    ]
    if differ:
        parts.append("Not the same in both:\n\n" + "".join(f"- {line}\n" for line in differ))
    body = [
        [
            *map(words.shown, name[:4]),
            f"{number(before)} {name[4]}",
            f"{number(after)} {name[4]}",
            f"{ratio:.3f}",
            spread,
            verdict,
        ]
        for name, before, after, ratio, spread, verdict in pairs
        if not changed_only or verdict != "same"
    ]
    if body:
        head = ["operation", words.RIVAL, words.ROAD, "measure", "A", "B", "B / A", "99% interval", ""]
        parts.append(table(head, body) + "\n")
    for side, rows, other, reasons in (("A", a, b, _reasons(b)), ("B", b, a, _reasons(a))):
        alone = [name for name in _samples(rows) if name not in _samples(other)]
        if alone:
            lines = [f"- {', '.join(map(words.shown, name[:4]))}{reasons.get(name[1], '')}\n" for name in alone]
            parts.append(f"Only in {side}:\n\n" + "".join(lines))
    verdicts = [verdict for *_, verdict in pairs]
    counts = [f"{verdicts.count(word)} {word}" for word in ("worse", "better", "same", "not judged")]
    parts.append(f"{len(pairs)} rows in both: {', '.join(counts)}.")
    return "\n".join(parts)


def _word(value: object) -> object:
    return words.shown(value) if isinstance(value, str) else value


def _reasons(result: dict) -> dict[str, str]:
    """Return why each rival that is missing in a result is missing, for rows that only the other result has."""
    return {row["rival"]: f" ({row['missing']})" for row in result["rows"] if "missing" in row}
