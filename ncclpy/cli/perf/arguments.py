"""The arguments of one run of ``ncclpy perf``, and the sizes that it measures."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ncclpy.cli.arguments import count, parse_size, positive, require_matplotlib, size, writable
from ncclpy.cli.perf.collectives import COLLECTIVES, Collective
from ncclpy.cli.perf.datatypes import ALIASES, TYPES

OPS = ("sum", "prod", "max", "min", "avg", "mulsum")

_EPILOG = """\
Sizes take K, M and G (powers of 1024). Flags, sizes and columns are those of NVIDIA's nccl-tests.

  ncclpy perf all_reduce -b 8 -e 1G -f 2 -g 8              one process, 8 devices
  ncclpy perf all_gather -b 1M -e 64M -f 2 -g 4 -t 2       2 threads with 4 devices each
  ncclpy perf reduce_scatter -g 8 --processes -d bfloat16  one process per device

Exit status: 0 all right, 1 wrong values or a failure, 2 bad arguments, 130 interrupted.
"""


@dataclass(frozen=True)
class Arguments:
    """The checked arguments; the fields have nccl-tests' names.

    Attributes
    ----------
    datatypes, ops
        Names; every combination is measured.
    root
        The root's rank; -1 measures every rank as the root.
    """

    collective: str
    minbytes: int
    maxbytes: int
    stepbytes: int
    stepfactor: int
    ngpus: int
    nthreads: int
    processes: bool
    iters: int
    agg_iters: int
    warmup_iters: int
    datatypes: tuple[str, ...]
    ops: tuple[str, ...]
    root: int
    check: int
    blocking: int
    average: int
    timeout: float
    json: Path | None
    plot: Path | None

    @property
    def nranks(self) -> int:
        """Return the number of ranks: every thread, or every process, drives its own devices."""
        return self.ngpus * self.nthreads

    @property
    def buffer_bytes(self) -> int:
        """Return the bytes of a buffer: operations of one group run at the same time, each in memory of its own."""
        return self.maxbytes * self.agg_iters

    @property
    def kind(self) -> Collective:
        """Return the collective to measure."""
        return COLLECTIVES[self.collective]

    def cases(self) -> list[tuple[str, str | None, int]]:
        """Return every ``(data type, operator, root)`` to measure; operator None and root -1 where there is none."""
        kind = self.kind
        if kind.name == "barrier":
            return [("uint8", None, -1)]
        roots = [-1] if not kind.rooted else list(range(self.nranks)) if self.root == -1 else [self.root]
        ops: tuple[str | None, ...] = self.ops if kind.reduces else (None,)
        return [(datatype, op, root) for datatype in self.datatypes for op in ops for root in roots]


def sweep(smallest: int, largest: int, step: int, factor: int) -> Iterator[int]:
    """Yield the sizes of a sweep; a `factor` above 1 multiplies, otherwise `step` bytes are added."""
    size = smallest
    while size <= largest:
        yield size
        size = size * factor if factor > 1 else size + step


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``ncclpy perf`` to `parser`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    add = parser.add_argument
    add("collective", type=_collective, metavar="COLLECTIVE", help=", ".join(COLLECTIVES))
    add("-b", "--minbytes", type=size, metavar="SIZE", help="smallest size (default 32M)")
    add("-e", "--maxbytes", type=size, metavar="SIZE", help="largest size (default 32M)")
    add("-i", "--stepbytes", type=size, default="1M", metavar="SIZE", help="added from size to size (default 1M)")
    add("-f", "--stepfactor", type=positive, default=1, metavar="N", help="multiplies sizes instead of adding")
    add("-g", "--ngpus", type=positive, default=1, metavar="N", help="devices per thread (default 1)")
    add("-t", "--nthreads", type=positive, default=1, metavar="N", help="threads, each with -g devices (default 1)")
    add("--processes", action="store_true", help="one process for each of the -g times -t devices")
    add("-n", "--iters", type=positive, default=20, metavar="N", help="timed iterations (default 20)")
    add("-m", "--agg_iters", type=positive, default=1, metavar="N", help="operations aggregated in one group")
    add("-w", "--warmup_iters", type=count, default=1, metavar="N", help="warmup iterations (default 1)")
    add("-d", "--datatype", type=_datatypes, default="float", metavar="TYPE", help=f"{', '.join(TYPES)} or all")
    add("-o", "--op", type=_ops, default="sum", metavar="OP", help=f"{', '.join(OPS)} or all")
    add("-r", "--root", type=_root, default=0, metavar="RANK", help="root rank, or all (default 0)")
    add("-c", "--check", type=count, default=1, metavar="N", help="check each result N times (default 1)")
    add(
        "-z",
        "--blocking",
        type=int,
        choices=range(4),
        default=0,
        help="wait after each iteration: 1 with a barrier, 2 without, 3 with a barrier that is not timed",
    )
    add(
        "-a",
        "--average",
        type=int,
        choices=range(4),
        default=1,
        help="time over threads or processes: 0 rank 0, 1 average, 2 minimum, 3 maximum (default 1)",
    )
    add(
        "-T",
        "--timeout",
        type=_seconds,
        default=600.0,
        metavar="SECONDS",
        help="abort after this time without progress (default 600)",
    )
    add("--json", "-J", "--output_file", type=writable, metavar="FILE", help="write machine, versions and all results")
    add("--plot", type=writable, metavar="FILE", help="draw bus bandwidth and time (.png, .svg; needs matplotlib)")


def from_namespace(parser: argparse.ArgumentParser, given: argparse.Namespace) -> Arguments:
    """Return the `Arguments` of a parsed command line; call ``parser.error`` if arguments contradict each other."""
    default_size = parse_size("32M")
    minbytes = min(default_size, given.maxbytes or default_size) if given.minbytes is None else given.minbytes
    maxbytes = max(default_size, minbytes) if given.maxbytes is None else given.maxbytes
    if maxbytes < minbytes:
        parser.error(f"-e {maxbytes} is less than -b {minbytes} bytes")
    if given.stepfactor == 1 and given.stepbytes == 0 and maxbytes > minbytes:
        parser.error("-i 0 would never get from -b to -e; give a step, or a factor with -f 2")
    if given.stepfactor > 1 and minbytes == 0 and maxbytes > 0:
        parser.error("-b 0 stays 0 when multiplied; start at -b 8, or add with -i instead of -f")
    nranks = given.ngpus * given.nthreads
    if given.root >= nranks:
        parser.error(f"-r {given.root}: there are {nranks} ranks, 0 to {nranks - 1}")
    if given.plot is not None:
        require_matplotlib(parser, "--plot")
    return Arguments(
        collective=given.collective,
        minbytes=minbytes,
        maxbytes=maxbytes,
        stepbytes=given.stepbytes,
        stepfactor=given.stepfactor,
        ngpus=given.ngpus,
        nthreads=given.nthreads,
        processes=given.processes,
        iters=given.iters,
        agg_iters=given.agg_iters,
        warmup_iters=given.warmup_iters,
        datatypes=given.datatype,
        ops=given.op,
        root=given.root,
        check=given.check,
        blocking=given.blocking,
        average=given.average,
        timeout=given.timeout,
        json=given.json,
        plot=given.plot,
    )


def _collective(text: str) -> str:
    if text in COLLECTIVES:
        return text
    names = {name.replace("_", ""): name for name in COLLECTIVES}
    plain = text.lower().removesuffix("_perf").replace("_", "").replace("-", "")  # nccl-tests says all_reduce_perf
    close = difflib.get_close_matches(plain, names, n=1)
    hint = f"did you mean {names[close[0]]}? " if close else ""
    raise argparse.ArgumentTypeError(f"invalid choice: {text!r} ({hint}there are {', '.join(COLLECTIVES)})")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


def _root(text: str) -> int:
    return -1 if text in ("all", "-1") else count(text)


def _datatypes(text: str) -> tuple[str, ...]:
    if text == "all":
        return tuple(TYPES)
    name = ALIASES.get(text, text)
    if name not in TYPES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a data type; choose all or one of {', '.join(TYPES)}")
    return (name,)


def _ops(text: str) -> tuple[str, ...]:
    if text == "all":
        return OPS
    if text not in OPS:
        raise argparse.ArgumentTypeError(f"{text!r} is not an operator; choose all or one of {', '.join(OPS)}")
    return (text,)
