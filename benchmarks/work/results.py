"""Results on disk: one JSON file for each experiment, with all samples."""

import argparse
import datetime
import json
import os
import shlex
from pathlib import Path

from benchmarks import ROOT
from benchmarks.work import machine

FOLDER = ROOT / "benchmarks" / "results"


def new(experiment: str, command: list[str], **settings: object) -> dict:
    """Start a result: what was run, when, and on which machine.

    Parameters
    ----------
    experiment : str
        The experiment's name on the command line.
    command : list of str
        Its arguments as typed to repeat it.
    **settings
        Other settings that decide the numbers: rounds, sizes, engine.
    """
    return {
        "experiment": experiment,
        "command": shlex.join([*_environment(), "python", "-m", "benchmarks", experiment, *command]),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "machine": machine.describe(),
        "versions": machine.versions(),
        "settings": settings,
        "rows": [],
    }


def options(chosen: argparse.Namespace, defaults: dict[str, object]) -> list[str]:
    """Return the options in `defaults` that were given another value, as typed on the command line."""
    typed: list[str] = []
    for name, default in defaults.items():
        value = getattr(chosen, name)
        if value != default:
            typed += [f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, list) else [value])]
    return typed


def _environment() -> list[str]:
    """Return the environment variables that change NCCL, as typed before a command; a library's path is left out."""
    return [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith("NCCL_") or (name == "NCCLPY_LIBRARY" and "/" not in value)
    ]


def gpus_used(result: dict) -> list[str]:
    """Return the GPUs that a result was measured on: its machine may have more of them than it used."""
    gpus, settings = result["machine"]["gpus"], result["settings"]
    return list(gpus[: settings.get("gpus", settings.get("ranks", len(gpus)))])


def save(result: dict, path: Path) -> None:
    """Write `result`, one row a line; samples keep five digits, more than their precision."""
    for row in result["rows"]:
        for key, value in row.items():
            if key.startswith("samples"):
                row[key] = [float(f"{sample:.5g}") for sample in value]
    head = json.dumps({key: value for key, value in result.items() if key != "rows"}, indent=1)
    rows = ",\n  ".join(json.dumps(row) for row in result["rows"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{head[:-2]},\n "rows": [\n  {rows}\n ]\n}}\n')


def load_all(folder: Path = FOLDER) -> list[tuple[str, dict]]:
    """Return ``(file name, result)`` of every result in `folder`, by name."""
    return [(path.name, json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))]
