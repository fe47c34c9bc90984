"""The compiler's own record of the reduction loops: each is vectorised, for every data type and operator."""

from __future__ import annotations

import ast
import gzip
import json
import os
import platform
import re
import shlex
import subprocess

import pytest
from paths import ROOT
from sanitizers import KERNELS, build

FOLDER = ROOT / "ncclpy/host/reduction"
COMPILER = shlex.split(os.environ.get("CXX", "g++"))
#: Sum, product, maximum and minimum for eight types that are accumulated in themselves. Wrapping sums and products of
#: three signed types share instances with the unsigned ones.
OWN = 8 * 4 - 3 * 2
#: The same for four types that are accumulated in float32.
SMALL = 4 * 4
#: The number of instances of each function. A small type's inputs and results may each be the accumulator.
INSTANCES = {
    "combine": OWN + SMALL * 4,
    "combine_nontemporal": OWN + SMALL,
    "fold_average": 12,
    "fold_premultiplied": 12 - 3,
}


def build_flags():
    """Return the flags of each instruction set, as the build uses them."""
    text = (FOLDER / "meson.build").read_text()
    common = ast.literal_eval(re.search(r"kernel_args = (\[.*?\])", text, re.DOTALL)[1])
    variants = dict(re.findall(r"'(\w+)': (\[.*\])", text))
    return {name: common + ast.literal_eval(flags) for name, flags in variants.items()}


def is_gcc():
    said = subprocess.run([*COMPILER, "--version"], capture_output=True, text=True, check=True, timeout=20).stdout
    return "Free Software Foundation" in said


def records(nodes):
    for node in nodes:
        yield node
        yield from records(node.get("children", ()))


def lines_with(text):
    return {n for n, line in enumerate(KERNELS.read_text().splitlines(), 1) if text in line}


def compile_kernels(flags, folder, record, source=KERNELS):
    """Compile the kernels with an optimisation record."""
    command = [
        *COMPILER,
        "-std=c++17",
        *flags,
        "-DNCCLPY_KERNELS=kernels",
        f"-I{FOLDER}",
        f"-I{FOLDER.parent}",
        f"-I{FOLDER.parents[1] / 'abi'}",
    ]
    command += ["-c", source, "-o", folder / "kernels.o", record]
    environment = {**os.environ, "CCACHE_DISABLE": "1"}  # ccache would return an object without its record
    subprocess.run(list(map(str, command)), check=True, timeout=120, cwd=folder, env=environment)


def loops(flags, folder):
    """Return ``{(function, line): vectorised}`` for each loop over elements in each instance of the kernel."""
    compile_kernels(flags, folder, "-fsave-optimization-record")
    (packed,) = folder.glob("*.opt-record.json.gz")
    over_elements = lines_with("for (size_t i = 0")
    found = {}
    for record in records(json.loads(gzip.decompress(packed.read_bytes()))[2]):
        where = record.get("location", {})
        said = "".join(part for part in record.get("message", ()) if isinstance(part, str))
        assert not said.startswith("applying unroll and jam"), "two inputs in one loop: it is not vectorised"
        if not where.get("file", "").endswith(KERNELS.name) or where["line"] not in over_elements:
            continue
        if said.startswith(("loop vectorized", "couldn't vectorize loop")):
            key = record["function"], where["line"]
            # GCC analyses the remainder loop of the last few elements once more, without success.
            found[key] = found.get(key, False) or record["kind"] == "success"
    names = sorted({name for name, _ in found})
    plain = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True, timeout=20)
    short = plain.stdout.replace("ncclpy::host::(anonymous namespace)::", "")
    plain = dict(zip(names, short.splitlines(), strict=True))
    return {(plain[name], line): vectorised for (name, line), vectorised in found.items()}


records_of_gcc = pytest.mark.skipif(
    not is_gcc() or platform.machine() != "x86_64",
    reason="GCC's optimisation record is read, for the instruction sets of x86-64",
)


@records_of_gcc
@pytest.mark.parametrize(
    "types", [pytest.param(r"\w+", id="all", marks=pytest.mark.slow), pytest.param("int32_t", id="one")]
)
def test_no_reduction_loop_is_left_unvectorised(types, tmp_path):
    """A short variant: GCC's list of lines, which does not name the type and operator of each entry."""
    source = tmp_path / KERNELS.name
    source.write_text(re.sub(rf"\n    case ncc\w+: return run_operator<(?!({types})>).*", "", KERNELS.read_text()))
    compile_kernels(build_flags()["avx512"], tmp_path, f"-fopt-info-vec-all={tmp_path / 'said'}", source)
    entries = re.findall(rf"{KERNELS.name}:(\d+):\d+: (\w+): +(.*)", (tmp_path / "said").read_text())
    over_elements = lines_with("for (size_t i = 0")
    whole = {int(line) for line, _, said in entries if said.startswith("loop vectorized using 64 byte vectors")}
    missed = {int(line) for line, kind, said in entries if kind == "missed" and said == "couldn't vectorize loop"}
    vectors = over_elements
    if types == "int32_t":  # for elements that are their own accumulator it is a copy
        vectors = vectors - (
            lines_with("E::store(acc[i], result[i])")
            | lines_with("E::load(input(0)[i])")
            | lines_with("divide(Divided(")
        )
    assert len(vectors) >= 4 and vectors <= whole
    assert over_elements & missed == lines_with("divide(Divided("), "only averages of integers divide one by one"


# SSE2, the baseline, has no 64-bit comparison or product. One variant takes 8 s: the record has 160 MB.
@pytest.mark.campaign
@records_of_gcc
@pytest.mark.timeout(240)
@pytest.mark.parametrize("instructions", ["avx2", "avx512"])
def test_every_reduction_loop_is_vectorised(instructions, tmp_path):
    found = loops(build_flags()[instructions], tmp_path)
    names = {name for name, _ in found}
    assert {key: len([name for name in names if f"{key}<" in name]) for key in INSTANCES} == INSTANCES
    scalar = {(name, line) for (name, line), vectorised in found.items() if not vectorised}
    # No instruction set divides vectors of integers; a division happens once for each element of an average, not for
    # each input.
    assert {line for _, line in scalar} == lines_with("divide(Divided(")
    assert not [name for name, _ in scalar if re.search("fold_average<(SmallFloat|float|double)", name)]


@pytest.mark.slow  # 10 s for the compiler
def test_one_output_equals_each_of_two(tmp_path):
    """One output is written directly, and two are copies of a block: a program compares them."""
    program = tmp_path / "kernels"
    sources = [ROOT / "tests/host/reduction/kernels.cpp", KERNELS, FOLDER / "reduce.cpp"]
    build(program, build_flags()["baseline"], sources)
    done = subprocess.run([program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    cases = 12 * 5 * 6 * (3 + 4 + 6) * 4  # types, operators, counts, in place or not of so many inputs, ways
    assert int(done.stdout) in (cases, 2 * cases, 3 * cases), "of each copy that this processor runs"
