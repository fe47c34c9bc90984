"""Run ``ncclpy trace``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ncclpy.cli.arguments import require_matplotlib
from ncclpy.cli.trace import report, stuck
from ncclpy.cli.trace.dump import Dump
from ncclpy.cli.trace.reading import files_of, read_all


def run(parser: argparse.ArgumentParser, given: argparse.Namespace) -> int:
    """Print what is stuck, write the requested files, and return the exit status."""
    if given.png is not None:
        require_matplotlib(parser, "--png")
    files, errors = files_of(given.dumps)
    dumps, unreadable = read_all(files)
    errors += unreadable
    for error in errors:
        print(f"ncclpy trace: {error}", file=sys.stderr)
    if not dumps:
        return 2
    dumps, older = latest(dumps)
    for dump in older:
        print(f"ncclpy trace: {dump.path} is left out: a later dump of {dump.process} is given", file=sys.stderr)
    findings = stuck.find(dumps)
    said = report.text(dumps, findings, everything=given.all)
    encoding = sys.stdout.encoding or "utf-8"
    print(said.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    try:
        if given.chrome is not None:
            from ncclpy.cli.trace.timeline import write_chrome

            write_chrome(dumps, given.chrome)
        if given.png is not None:
            from ncclpy.cli.trace.picture import draw

            draw(dumps, given.png)
    except OSError as failure:
        print(
            f"ncclpy trace: {failure.filename or 'the output'} cannot be written: {failure.strerror}", file=sys.stderr
        )
        return 2
    return 2 if errors else int(bool(findings))


def latest(dumps: Sequence[Dump]) -> tuple[list[Dump], list[Dump]]:
    """Divide dumps into the last one of each process and earlier ones; host and pid identify a process."""
    last: dict[object, Dump] = {}
    for dump in dumps:
        known = dump.host is not None and dump.pid is not None
        process = (dump.host, dump.pid) if known else dump
        if process not in last or last[process].wall <= dump.wall:
            last[process] = dump
    kept = set(last.values())
    return [dump for dump in dumps if dump in kept], [dump for dump in dumps if dump not in kept]
