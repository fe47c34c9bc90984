"""The pages on performance, made from the results in benchmarks/results; no figure on them is typed by hand.

docs/performance.md is made by `front`; a further page for each benchmark has all tables. With matplotlib the pictures
are drawn anew as well.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from benchmarks import ROOT
from benchmarks.pages import bandwidth, front, growth, plot, summary, targets, words
from benchmarks.pages.markdown import number, spread, table
from benchmarks.work import results

PAGE = ROOT / "docs" / "performance.md"
#: The further pages, in the folder of its name.
TITLES = {
    "overhead": "What a call costs",
    "instructions": "How many instructions a call takes",
    "manager": "What the Manager costs",
    "nccl-tests": "Bandwidth compared with nccl-tests",
    "collectives": "Every collective by size",
    "registered": "Registered buffers and symmetric windows",
    "memory": "What registered memory costs",
    "mpi": "The host engine compared with MPI",
    "process_group": "What a process group costs",
    "coordinator": "What negotiation between ranks costs",
    "torch": "The backend of torch.distributed",
    "reports": "What status reports cost",
    "recovery": "How fast a group recovers",
    "scale": "How costs grow with the number of ranks",
    "bootstrap": "What a store costs",
    "import": "What the import costs",
}
#: The operation of the picture on an experiment's page.
PICTURED = {"collectives": "all_reduce", "scale": "init"}
PICTURES = "figures/performance"
#: Columns of figures that fit on the site, besides the row's names.
COLUMNS = 4
ALONE = (
    "On one GPU an operation in place has nothing to do, and NCCL launches nothing for it. Rows marked with * are in "
    "place, also those of torch.distributed. The C loop is out of place: do not compare them with it."
)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    parser.add_argument("--results", type=Path, default=results.FOLDER, help="folder with the JSON files")
    parser.add_argument(
        "--output", type=Path, default=PAGE, help="the first page to write (default: docs/performance.md)"
    )


def run(chosen: argparse.Namespace) -> int:
    """Write the pages."""
    found = results.load_all(chosen.results)
    if not found:
        print(f"no results in {chosen.results}: run an experiment with --json first")
        return 1
    folder = chosen.output.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.md"):
        old.unlink()
    for path, text in pages(found, folder.name).items():
        (chosen.output.parent / path).write_text(text)
    chosen.output.write_text(first_page(found, folder.name))
    print(f"wrote {chosen.output} and {folder} from {', '.join(name for name, _ in found)}")
    if importlib.util.find_spec("matplotlib") is None:
        print("their pictures stay as they are: matplotlib is not installed")
    else:
        _draw(found, chosen.output.parent / PICTURES)
    return 0


def _draw(found: list[tuple[str, dict]], folder: Path) -> None:
    """Draw the pictures of the pages anew."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.png"):
        old.unlink()
    figures = front.draw(_by_stem(found))
    for name, result in found:
        operation = _pictured(result)
        if operation is not None:
            figures[plot.file_name(Path(name).stem, operation)] = plot.draw(result)[operation]
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=plot.SITE_DPI)


def _pictured(result: dict) -> str | None:
    """Return the operation of the picture on a result's page."""
    wanted = PICTURED.get(result["experiment"])
    if result["settings"].get("gpus") == 1:
        return None  # a single rank has no bandwidth
    operations = [row["operation"] for row in result["rows"] if row.get("samples")]
    return next((operation for operation in operations if wanted and operation.split(", ")[0] == wanted), None)


def _by_stem(found: list[tuple[str, dict]]) -> dict[str, dict]:
    return {Path(name).stem: result for name, result in found}


def _benchmark(result: dict) -> str:
    """Return the name of the page that a result is on."""
    return "registered" if "--registered" in result["command"] else result["experiment"]


def first_page(found: list[tuple[str, dict]], folder: str = PAGE.stem) -> str:
    """Return the page that users read first; the others are in `folder` beside it."""
    further = {f"{folder}/{name}.md": TITLES[name] for name in _names(found)}
    return front.page(_by_stem(found), further, PICTURES)


def pages(found: list[tuple[str, dict]], folder: str = PAGE.stem) -> dict[str, str]:
    """Return ``{path: text}`` of the pages with all tables, for ``(file name, result)`` pairs."""
    return {
        f"{folder}/{name}.md": "\n".join(
            [
                f"# {TITLES[name]}\n",
                f"How to read the tables, and the other benchmarks: [Performance](../{folder}.md#all-tables).\n",
                *(section(file, result) for file, result in found if _benchmark(result) == name),
            ]
        )
        for name in _names(found)
    }


def _names(found: list[tuple[str, dict]]) -> list[str]:
    there = {_benchmark(result) for _, result in found}
    return [name for name in TITLES if name in there]


def section(name: str, result: dict) -> str:
    """Return one result's part of its page."""
    machine, settings = result["machine"], dict(result["settings"])
    where = {"noop": "On a no-op library", "host": "On the host engine"}.get(settings.get("engine"), "On CPUs")
    if machine["gpus"] and settings.get("engine") != "host":
        count = len(results.gpus_used(result))
        where = f"On {count} GPU{'s' if count != 1 else ''}"
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    gpus = f", {len(machine['gpus'])} x {machine['gpus'][0]}" if machine["gpus"] else ", no GPU"
    what = f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB"
    lines = [
        f"## {where}",
        "",
        f"`{result['command']}`, {result['date']}; raw samples: `benchmarks/results/{name}`.",
        f"Machine: {what}, {machine['system']}{gpus}; load average {machine['load']} when it began.",
        f"Versions: {versions}.",
        f"Settings: {', '.join(f'{key} {words.shown(str(value))}' for key, value in settings.items())}.",
        "",
        *_picture(name, result),
        text(result),
    ]
    return "\n".join(lines)


def _picture(name: str, result: dict) -> list[str]:
    operation = _pictured(result)
    if operation is None:
        return []
    return [f"![{operation}](../{PICTURES}/{plot.file_name(Path(name).stem, operation)})", ""]


def text(result: dict) -> str:
    """Return a result's tables: one for each operation, then the targets."""
    parts = []
    # Rows with sizes or numbers of ranks have tables of their own.
    plain = [row for row in result["rows"] if "samples" in row and not {"ranks", "bytes"} & row.keys()]
    alone = result["experiment"] == "overhead" and result["settings"].get("gpus") == 1
    for operation in dict.fromkeys(row["operation"] for row in plain):
        rows = [row for row in plain if row["operation"] == operation]
        if alone:
            rows = [_marked(row) for row in rows]
        parts.append(f"### {words.shown(operation)}\n")
        parts += [f"{one}\n" for one in _tables(rows)]
        if any(row["road"].endswith(" *") for row in rows):
            parts.append(f"{ALONE}\n")
    parts += [*bandwidth.tables(result), *growth.tables(result)]
    missing = [row for row in result["rows"] if "missing" in row]
    if missing:
        lines = [f"- {words.shown(row['rival'])}: {row['missing']}\n" for row in missing]
        parts.append("Not measured:\n\n" + "".join(lines))
    if result.get("notes"):
        parts.append("Notes:\n\n" + "".join(f"- {words.note(note)}\n" for note in result["notes"]))
    judged = targets.judge(result)
    if judged:
        parts.append(f"### Targets\n\n{_targets(judged)}\n")
    return "\n".join(parts)


def _marked(row: dict) -> dict:
    return {**row, "road": f"{row['road']} *"} if row["road"].endswith(", in place") else row


def _tables(rows: list[dict]) -> list[str]:
    """Return the rows of one operation; each measure has its column, and one for each baseline beside it."""
    roads: dict[tuple[str, str], dict[str, dict]] = {}
    for row in rows:
        roads.setdefault((row["rival"], row["road"]), {})[row["measure"]] = row
    baselines = _baselines(roads)
    measures = list(dict.fromkeys(row["measure"] for row in rows))
    step = max(1, COLUMNS // (1 + len(baselines)))
    return [_table(roads, baselines, measures[first : first + step]) for first in range(0, len(measures), step)]


def _table(roads: dict, baselines: list[tuple[str, str]], measures: list[str]) -> str:
    head, body = [words.RIVAL, words.ROAD], []
    for measure in measures:
        unit = next(rows[measure]["unit"] for rows in roads.values() if measure in rows)
        name = words.shown(measure)
        head += [name if name == unit else f"{name}, {unit}", *(f"x {rival}" for rival, _ in baselines)]
    for (rival, road), rows in roads.items():
        if not rows.keys() & set(measures):
            continue
        cells = [words.shown(rival), words.shown(road)]
        for measure in measures:
            if measure not in rows:
                cells += [""] * (1 + len(baselines))
                continue
            samples = rows[measure]["samples"]
            cells.append(spread(samples))
            for baseline in baselines:
                base = roads[baseline].get(measure, {}).get("samples", ())
                paired = len(base) == len(samples)
                cells.append(f"{summary.median(summary.ratios(samples, base)):.2f}" if paired else "")
        body.append(cells)
    return table(head, body)


def _baselines(roads: dict) -> list[tuple[str, str]]:
    """Return the roads that the others are compared with: the first of the lower bound and of the closest rival."""
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
            reached = f"{target['reached']:.4g}"  # enough digits to show the difference
        body.append([target["text"], limit, f"{reached} {unit}", spread, kept])
    reasons: dict[str, list[str]] = {}
    for target in judged:
        if target["kept"] is False and target["why"]:
            reasons.setdefault(target["why"], []).append(target["text"])
    because = "".join(f"\n- {'; '.join(texts)}: {why}." for why, texts in reasons.items())
    page = table(["target", "limit", "reached", "quartiles", ""], body)
    return f"{page}\n\nMissed, and why:\n{because}" if because else page
