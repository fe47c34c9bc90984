"""What the commands have in common about the files that they write."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path


def writable(text: str) -> Path:
    """Open the file now: nobody wants to hear after an hour that it cannot be written."""
    path = Path(text)
    try:
        path.open("a").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: {error.strerror}") from None
    return path


def require_matplotlib(parser: argparse.ArgumentParser, flag: str) -> None:
    """End in ``parser.error`` if there is no matplotlib for what `flag` asks for; do not import it yet."""
    if importlib.util.find_spec("matplotlib") is None:
        parser.error(f"{flag} needs matplotlib, which is not installed: pip install 'ncclpy[perf]'")
