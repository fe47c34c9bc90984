"""The arguments of ``ncclpy trace``, without the modules that read dumps, which `ncclpy run` must not import."""

from __future__ import annotations

import argparse
from pathlib import Path

from ncclpy.cli.arguments import writable

_EPILOG = """\
Each DUMP is what one process's recorder wrote, or a folder of them; give those of all processes to see which rank the
others wait for.

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
    """Refuse to overwrite a dump: ``--chrome a.json b.json`` may have been meant to read both."""
    from ncclpy.cli.trace.dump import FORMAT

    path = writable(text)
    with path.open("rb") as file:
        is_dump = path.is_file() and FORMAT.encode() in file.read(4096)
    if is_dump:
        raise argparse.ArgumentTypeError(f"{text!r} is a dump of the recorder; it is not written over")
    return path
