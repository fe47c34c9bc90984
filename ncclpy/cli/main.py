"""The command line's entry: parse, choose the engine, run, turn failures into messages and exit statuses."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status.

    Parameters
    ----------
    argv
        The arguments without the program's name; ``sys.argv[1:]`` by default.

    Returns
    -------
    int
        0 success, 1 wrong results, a failure or something stuck, 2 no command or bad dumps, 130 interrupted; for
        ``run`` the exit code of the first process that failed.

    Raises
    ------
    SystemExit
        With code 2 for bad arguments, and with code 0 after ``--help`` and ``--version``.
    """
    parser, perf, trace, run = _parsers()
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] == "run":
        from ncclpy.cli.run.arguments import hide_separators

        argv = hide_separators(argv)
    given = parser.parse_args(argv)
    if given.command is None:
        parser.print_help(sys.stderr)
        return 2
    if given.command == "run":
        from ncclpy.cli.run import command as launcher

        return launcher.run(run, given)
    try:
        if given.command == "info":
            return _info(given)
        if given.command == "trace":
            from ncclpy.cli.trace import command

            return command.run(trace, given)
        return _perf(perf, given)
    except KeyboardInterrupt:
        print("\nncclpy: interrupted; the communicators were aborted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader has closed the pipe, as in `ncclpy perf … | head`. Without this dup2 Python would flush standard
        # output at exit and report the broken pipe again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parsers() -> tuple[argparse.ArgumentParser, ...]:
    from ncclpy.cli.perf import arguments as perf_arguments
    from ncclpy.cli.run import arguments as run_arguments
    from ncclpy.cli.trace import command as trace_command

    parser = argparse.ArgumentParser(
        prog="ncclpy", description="NCCL for Python: look at it, measure it, find what is stuck, start programs."
    )
    parser.add_argument("--version", action=_Version, help="print the version of ncclpy and exit")
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    info = commands.add_parser("info", help="what is loaded, from where, on which devices; and hints")
    info.add_argument("--json", action="store_true", help="print it as JSON")
    perf = commands.add_parser("perf", help="time a collective and check its results, as nccl-tests does")
    perf_arguments.add_arguments(perf)
    trace = commands.add_parser("trace", help="what is stuck and which rank it waits for, from the recorder's dumps")
    trace_command.add_arguments(trace)
    run = commands.add_parser("run", help="start a program in several processes, one for each rank")
    run_arguments.add_arguments(run)
    return parser, perf, trace, run


class _Version(argparse.Action):
    """Print the version, which is looked up only for ``--version``: the look-up reads a file of the installation."""

    def __init__(self, **options: Any) -> None:
        super().__init__(nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"ncclpy {version('ncclpy')}")
        parser.exit()


def _info(given: argparse.Namespace) -> int:
    import json

    from ncclpy.cli import info

    facts = info.collect()
    print(json.dumps(facts, indent=1) if given.json else info.text(facts))
    return 1 if "error" in facts["library"] else 0


def _perf(parser: argparse.ArgumentParser, given: argparse.Namespace) -> int:
    from ncclpy.cli.info import choose_engine, first_line
    from ncclpy.cli.perf.arguments import from_namespace
    from ncclpy.errors import NcclError

    arguments = from_namespace(parser, given)
    try:
        library, reason = choose_engine()
        print(first_line(f"perf {arguments.collective}", library, reason), flush=True)
        from ncclpy.cli.perf import command
        from ncclpy.cli.perf.ranks import WorkerError

        try:
            return command.run(arguments)
        except command.ArgumentError as error:
            parser.error(str(error))
        except WorkerError as error:
            print(f"ncclpy perf: {error}", file=sys.stderr)
    except NcclError as error:
        print(f"ncclpy perf: {type(error).__name__}: {error}", file=sys.stderr)
    return 1
