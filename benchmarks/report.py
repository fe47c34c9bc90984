"""The page docs/performance.md, made from the results in benchmarks/results; nothing on it is typed by hand.

With matplotlib its pictures are drawn anew as well.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from benchmarks import ROOT, bandwidth, growth, plot, results, summary, targets
from benchmarks.markdown import number, table

PAGE = ROOT / "docs" / "performance.md"

HEAD = """# Performance

Measured figures, each table with its machine and the command that repeats it. This page is written by
`python -m benchmarks report` from the raw samples in `benchmarks/results`; edit those, not this.

Times are medians of all rounds; behind them stand the first and the third quartile. Ratios are taken round by round,
then their median: what disturbs the machine in a round disturbs every road in it.
"""

TITLES = {
    "overhead": "What a call costs",
    "manager": "What the Manager costs",
    "nccl-tests": "Bandwidth beside nccl-tests",
    "collectives": "Every collective by size",
    "mpi": "The host engine beside MPI",
    "scale": "What grows with ranks",
    "import": "What the import costs",
}
#: The operation of which an experiment's picture stands on the page.
PICTURED = {"overhead": "all_reduce", "collectives": "all_reduce", "scale": "init"}
PICTURES = "figures/performance"
REGISTERED = "Registered buffers and symmetric windows"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    parser.add_argument("--results", type=Path, default=results.FOLDER, help="folder with the JSON files")
    parser.add_argument("--output", type=Path, default=PAGE, help="the page to write (default: docs/performance.md)")


def run(chosen: argparse.Namespace) -> int:
    """Write the page."""
    found = results.load_all(chosen.results)
    if not found:
        print(f"no results in {chosen.results}: run an experiment with --json first")
        return 1
    chosen.output.write_text(page(found))
    print(f"wrote {chosen.output} from {', '.join(name for name, _ in found)}")
    if importlib.util.find_spec("matplotlib") is None:
        print("its pictures stay as they are: matplotlib is not installed")
    else:
        _draw(found, chosen.output.parent / PICTURES)
    return 0


def _draw(found: list[tuple[str, dict]], folder: Path) -> None:
    """Draw the pictures of the page anew."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.png"):
        old.unlink()
    for name, result in found:
        figures = plot.draw(result) if _pictured(result) else {}
        for operation, figure in figures.items():
            if operation == _pictured(result):
                figure.savefig(folder / plot.file_name(Path(name).stem, operation), dpi=80)


def _pictured(result: dict) -> str | None:
    """Return the operation of a result whose picture stands on the page."""
    wanted = PICTURED.get(result["experiment"])
    operations = [row["operation"] for row in result["rows"] if row.get("samples")]
    return next((operation for operation in operations if wanted and operation.split(", ")[0] == wanted), None)


def page(found: list[tuple[str, dict]]) -> str:
    """Return the whole page for ``(file name, result)`` pairs."""
    order = list(TITLES)
    ranked = sorted(found, key=lambda item: (order.index(item[1]["experiment"]), item[0]))
    return "\n".join([HEAD, *(section(name, result) for name, result in ranked)])


def section(name: str, result: dict) -> str:
    """Return one result's part of the page."""
    machine, settings = result["machine"], dict(result["settings"])
    where = {"noop": " on a no-op library", "host": " on the host engine"}.get(settings.get("engine"), "")
    if machine["gpus"]:
        count = settings.get("gpus", len(machine["gpus"]))
        where = f" on {count} GPU{'s' if count != 1 else ''}"
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    gpus = f", {len(machine['gpus'])} x {machine['gpus'][0]}" if machine["gpus"] else ", no GPU"
    what = f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB"
    title = REGISTERED if "--registered" in result["command"] else TITLES[result["experiment"]]
    lines = [
        f"## {title}{where}",
        "",
        f"`{result['command']}`, {result['date']}; raw samples: `benchmarks/results/{name}`.",
        f"Machine: {what}, {machine['system']}{gpus}; load average {machine['load']} when it began.",
        f"Versions: {versions}.",
        f"Settings: {', '.join(f'{key} {value}' for key, value in settings.items())}.",
        "",
        *_picture(name, result),
        text(result),
    ]
    return "\n".join(lines)


def _picture(name: str, result: dict) -> list[str]:
    operation = _pictured(result)
    if operation is None:
        return []
    return [f"![{operation}]({PICTURES}/{plot.file_name(Path(name).stem, operation)})", ""]


def text(result: dict) -> str:
    """Return a result's tables: one for each operation, then the targets."""
    parts = []
    # What goes over sizes or numbers of ranks has tables of its own.
    plain = [row for row in result["rows"] if "samples" in row and not {"ranks", "bytes"} & row.keys()]
    operations = list(dict.fromkeys(row["operation"] for row in plain))
    for operation in operations:
        rows = [row for row in result["rows"] if row.get("operation") == operation]
        parts.append(f"### {operation}\n\n{_table(rows)}\n")
    parts += [*bandwidth.tables(result), *growth.tables(result)]
    missing = [row for row in result["rows"] if "missing" in row]
    if missing:
        parts.append("Not measured:\n\n" + "".join(f"- {row['rival']}: {row['missing']}\n" for row in missing))
    if result.get("notes"):
        parts.append("Notes:\n\n" + "".join(f"- {note}\n" for note in result["notes"]))
    judged = targets.judge(result)
    if judged:
        parts.append(f"### Targets\n\n{_targets(judged)}\n")
    return "\n".join(parts)


def _table(rows: list[dict]) -> str:
    """Return the rows of one operation; each measure has its columns, each baseline its ratio."""
    measures = list(dict.fromkeys(row["measure"] for row in rows))
    roads: dict[tuple[str, str], dict[str, dict]] = {}
    for row in rows:
        roads.setdefault((row["rival"], row["road"]), {})[row["measure"]] = row
    baselines = _baselines(roads)
    head = ["rival", "road"]
    for measure in measures:
        unit = next(row["unit"] for row in rows if row["measure"] == measure)
        head += [f"{measure}, {unit}", "quartiles", *(f"x {rival}" for rival, _ in baselines)]
    body = []
    for (rival, road), by_measure in roads.items():
        cells = [rival, road]
        for measure in measures:
            if measure not in by_measure:
                cells += [""] * (2 + len(baselines))
                continue
            samples = by_measure[measure]["samples"]
            low, high = summary.quartiles(samples)
            cells += [number(summary.median(samples)), f"{number(low)}-{number(high)}"]
            for baseline in baselines:
                base = roads[baseline].get(measure, {}).get("samples", ())
                paired = len(base) == len(samples)
                cells.append(f"{summary.median(summary.ratios(samples, base)):.2f}" if paired else "")
        body.append(cells)
    return table(head, body)


def _baselines(roads: dict) -> list[tuple[str, str]]:
    """Return the roads that others are compared with: the first of the floor and of the closest rival."""
    found = []
    for rival in ("C loop", "nccl4py bindings", "nccl-tests", "MPICH"):
        road = next((road for road in roads if road[0] == rival), None)
        if road is not None and len(roads) > 1:
            found.append(road)
    return found


def _targets(judged: list[dict]) -> str:
    body = []
    for target in judged:
        unit = target["unit"]
        limit = f"{'>=' if target['at_least'] else '<='} {target['limit']:g} {unit}"
        if target["reached"] is None:
            body.append([target["text"], limit, "", "", "not measured"])
            continue
        spread = "-".join(map(number, target["spread"]))
        kept = "kept" if target["kept"] else "**missed**"
        reached = number(target["reached"])
        if not target["kept"] and float(reached) == float(number(target["limit"])):
            reached = f"{target['reached']:.4g}"  # enough digits to see why
        body.append([target["text"], limit, f"{reached} {unit}", spread, kept])
    reasons: dict[str, list[str]] = {}
    for target in judged:
        if target["kept"] is False and target["why"]:
            reasons.setdefault(target["why"], []).append(target["text"])
    because = "".join(f"\n- {'; '.join(texts)}: {why}." for why, texts in reasons.items())
    page = table(["target", "limit", "reached", "quartiles", ""], body)
    return f"{page}\n\nMissed, and why:\n{because}" if because else page
