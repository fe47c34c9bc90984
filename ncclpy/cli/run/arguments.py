"""The flags of ``ncclpy run``."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from ncclpy.bootstrap.address import as_host
from ncclpy.cli.arguments import positive

_EPILOG = """\
A program that ends in .py is run by this Python. Each process gets torchrun's variables: RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and so on.
"""
# Replaces "--" while argparse parses. It contains a NUL, which no argument of a process can contain.
_SEPARATOR = "\0--"


def _seconds(text: str) -> float:
    number = float(text)
    if not (number >= 0 and math.isfinite(number)):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return number


def as_address(text: str) -> tuple[str, int]:
    """Return host and port of ``host:port`` or ``[v6]:port``."""
    host, colon, port = text.rpartition(":")
    host = host.strip("[]")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise argparse.ArgumentTypeError(f"{text!r} is not host:port, with a port of 1 to 65535")
    try:
        return as_host(host), int(port)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not host:port; {error}") from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``ncclpy run``."""
    parser.epilog = _EPILOG
    parser.usage = "ncclpy run -n N [options] [--] program [args ...]"
    parser.add_argument("-n", "--nproc", type=positive, required=True, metavar="N", help="processes on this machine")
    parser.add_argument("-m", "--module", action="store_true", help="the program is the name of a Python module")
    parser.add_argument(
        "--no-kill",
        action="store_true",
        help="let the others continue when one process fails, and return its exit code",
    )
    parser.add_argument(
        "--grace",
        type=_seconds,
        default=5.0,
        metavar="SECONDS",
        help="how long the others have to end when one process has failed, before SIGTERM and again before SIGKILL "
        "(default: %(default)g)",
    )
    nodes = parser.add_argument_group("several machines: one launcher on each, all with the same --nnodes and --rdzv")
    nodes.add_argument("--nnodes", type=positive, default=1, metavar="N", help="how many machines (default: 1)")
    nodes.add_argument("--node-rank", type=int, default=0, metavar="I", help="which of them this is (default: 0)")
    nodes.add_argument(
        "--rdzv", type=as_address, metavar="HOST:PORT", help="where machine 0 serves the store, as the others reach it"
    )
    nodes.add_argument(
        "--timeout", type=_seconds, default=300.0, metavar="SECONDS", help="for the launchers to meet (default: 300)"
    )
    parser.add_argument("program", help="the program, or the module with -m")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments").required = False


def hide_separators(argv: Sequence[str]) -> list[str]:
    """Return the arguments with each ``--`` replaced: argparse would remove a ``--`` that belongs to the program."""
    return [_SEPARATOR if each == "--" else each for each in argv]


def check(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Restore each ``--`` that `hide_separators` has hidden; call ``parser.error`` if flags contradict each other."""
    words = [given.program, *given.args]
    if words[0] == _SEPARATOR:
        del words[0]
    if not words:
        parser.error("the following arguments are required: program")
    given.program, *given.args = ["--" if each == _SEPARATOR else each for each in words]
    if not 0 <= given.node_rank < given.nnodes:
        parser.error(f"--node-rank {given.node_rank}: expected 0 to {given.nnodes - 1}, with --nnodes {given.nnodes}")
    if given.nnodes > 1 and given.rdzv is None:
        parser.error("--nnodes needs --rdzv HOST:PORT, where machine 0 serves the store")
