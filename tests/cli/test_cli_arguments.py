"""The command line of ``ncclpy perf``: defaults, invalid combinations, and error messages."""

from __future__ import annotations

import argparse

import pytest

import ncclpy
from ncclpy.cli import main
from ncclpy.cli.perf.arguments import OPS, add_arguments, from_namespace
from ncclpy.cli.perf.datatypes import TYPES


def parse(line: str):
    parser = argparse.ArgumentParser(prog="ncclpy perf")
    add_arguments(parser)
    return from_namespace(parser, parser.parse_args(line.split()))


def test_defaults_are_those_of_nccl_tests():
    given = parse("all_reduce")
    assert (given.minbytes, given.maxbytes, given.stepbytes, given.stepfactor) == (32 << 20, 32 << 20, 1 << 20, 1)
    assert (given.iters, given.warmup_iters, given.agg_iters, given.check, given.root) == (20, 1, 1, 1, 0)
    assert given.cases() == [("float", "sum", -1)]


def test_all_flags():
    line = "reduce -b 8 -e 1G -i 4 -f 2 -g 2 -t 3 -n 5 -m 2 -w 0 -d half -o max -r 5 -c 0 -z 3 -a 2 -T 9 --processes"
    given = parse(line)
    assert (given.minbytes, given.maxbytes, given.stepbytes, given.stepfactor) == (8, 1 << 30, 4, 2)
    assert (given.ngpus, given.nthreads, given.nranks, given.processes) == (2, 3, 6, True)
    assert (given.iters, given.agg_iters, given.warmup_iters, given.check) == (5, 2, 0, 0)
    assert (given.blocking, given.average, given.timeout) == (3, 2, 9.0)
    assert given.cases() == [("half", "max", 5)]
    long = "reduce --minbytes 8 --maxbytes 1G --stepbytes 4 --stepfactor 2 --ngpus 2 --nthreads 3 --iters 5 "
    long += "--agg_iters 2 --warmup_iters 0 --datatype float16 --op max --root 5 --check 0 --blocking 3 --average 2 "
    long += "--timeout 9"
    assert parse(long + " --processes") == given


def test_only_one_end_of_the_sweep():
    assert (parse("all_reduce -b 8").minbytes, parse("all_reduce -b 8").maxbytes) == (8, 32 << 20)
    assert (parse("all_reduce -e 8").minbytes, parse("all_reduce -e 8").maxbytes) == (8, 8)
    assert (parse("all_reduce -b 1G").minbytes, parse("all_reduce -b 1G").maxbytes) == (1 << 30, 1 << 30)


def test_all_types_operators_and_roots():
    assert len(parse("all_reduce -d all -o all").cases()) == len(TYPES) * len(OPS)
    assert parse("broadcast -g 3 -r all -o all").cases() == [("float", None, root) for root in range(3)]
    assert parse("broadcast -g 3 -r -1").cases() == parse("broadcast -g 3 -r all").cases()
    assert len(parse("reduce -g 2 -r all -o all -d all").cases()) == 2 * len(TYPES) * len(OPS)
    assert parse("all_gather -o all").cases() == [("float", None, -1)]
    assert len(parse("barrier -d all -o all").cases()) == 1


@pytest.mark.parametrize("name", ["fp8_e4m3", "f8e4m3", "float8_e4m3fn"])
def test_type_has_several_names(name):
    assert parse(f"all_reduce -d {name}").datatypes == ("f8e4m3",)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("all_reduced", ["invalid choice", "all_reduce"]),
        ("allreduce", ["invalid choice: 'allreduce'", "did you mean all_reduce?"]),
        ("alltoall_perf", ["did you mean all_to_all?"]),
        ("reduceScatter", ["did you mean reduce_scatter?"]),
        ("xyz", ["(there are all_reduce, "]),
        ("all_reduce -b eight", ["'eight'", "is not a size"]),
        ("all_reduce -b 8K -e 8", ["8192", "less than"]),
        ("all_reduce -b 8 -e 16 -i 0", ["-i 0"]),
        ("all_reduce -b 0 -e 16 -f 2", ["-b 0"]),
        ("all_reduce -g 0", ["'0'", ">= 1"]),
        ("all_reduce -n -1", ["-n"]),
        ("all_reduce -d float3", ["float3", "bfloat16", "all"]),
        ("all_reduce -o xor", ["xor", "mulsum", "all"]),
        ("reduce -g 2 -r 2", ["2 ranks", "0 to 1"]),
        ("all_reduce -T 0", ["seconds"]),
        ("all_reduce -z 4", ["-z"]),
        ("all_reduce --json /nowhere/at/all.json", ["/nowhere/at/all.json", "cannot be written"]),
    ],
)
def test_bad_arguments_are_explained(line, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(line)
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words), said
    assert "Traceback" not in said


def test_plot_without_matplotlib_is_refused_before_measuring(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        parse(f"all_reduce --plot {tmp_path}/figure.png")
    assert "ncclpy[perf]" in capsys.readouterr().err


def test_version_is_printed(capsys):
    with pytest.raises(SystemExit) as stopped:
        main.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"ncclpy {ncclpy.__version__}\n"


def test_commands_are_listed_without_a_command(capsys):
    assert main.main([]) == 2
    said = capsys.readouterr().err
    assert all(f"\n    {name} " in said for name in ("info", "perf", "trace")), said
