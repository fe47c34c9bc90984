"""The command ``ncclpy trace``: its arguments, and what it does.

``ncclpy`` imports this module for every command, so the modules that read dumps are imported inside functions.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ncclpy.cli.arguments import require_matplotlib, writable

_EPILOG = """\
Each DUMP is a file that the recorder of one process wrote, or a folder with such files. To see which rank the others
wait for, give the dumps of all processes.

Exit status: 0 nothing is stuck or failed, 1 something is, 2 a dump that cannot be read, or bad arguments.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``ncclpy trace``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument(
        "dumps", nargs="+", type=Path, metavar="DUMP", help="a dump of the recorder (JSON), or a folder with dumps"
    )
    parser.add_argument("--all", action="store_true", help="print long lists whole, not only their first 20 lines")
    parser.add_argument("--chrome", type=_output, metavar="FILE", help="write a trace for Perfetto or Chrome (JSON)")
    parser.add_argument("--png", type=_output, metavar="FILE", help="draw the timeline (PNG; needs matplotlib)")


def _output(text: str) -> Path:
    """Return the path of an output file; refuse a dump, as ``--chrome a.json b.json`` may be meant to read both."""
    from ncclpy.cli.trace.dump import FORMAT

    path = writable(text)
    with path.open("rb") as file:
        is_dump = path.is_file() and FORMAT.encode() in file.read(4096)
    if is_dump:
        raise argparse.ArgumentTypeError(f"{text!r} is a dump of the recorder; it is not overwritten")
    return path


def run(parser: argparse.ArgumentParser, given: argparse.Namespace) -> int:
    """Print what is stuck, write the requested files, and return the exit status."""
    from ncclpy.cli.trace import report, stuck
    from ncclpy.cli.trace.reading import files_of, latest, read_all

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
    text = report.text(dumps, findings, everything=given.all)
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
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
