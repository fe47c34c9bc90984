"""Counts of instructions: which samples belong to which row, and when two results are compared."""

import copy
import json

import benchmark_runs  # noqa: F401
import pytest

from benchmarks.overhead import instructions

VERSIONS = {"python": "3.13.0", "numpy": "2.5", "cython": "3_3_0", "compiler": "12.2.0", "architecture": "x86_64"}


def result(**roads):
    named = {"rival": "ncclpy.Communicator", "operation": "all_reduce", "measure": "instructions"}
    rows = [{**named, "unit": "instructions", "road": road, "samples": [n] * 5} for road, n in roads.items()]
    settings = {"engine": "noop"}
    return {"experiment": "instructions", "settings": settings, "versions": dict(VERSIONS), "rows": rows}


@pytest.mark.parametrize(
    "roads, code, said",
    [
        ({"a": 1000.0, "b": 500.0}, 0, "0 worse"),
        ({"a": 1019.0, "b": 400.0}, 0, "0 worse"),
        ({"a": 1021.0, "b": 500.0}, 1, "a: 1,021 instructions, 1,000 before: 1.021 times"),
        ({"a": 1000.0}, 1, "b: it is not there any more"),
    ],
)
def test_higher_count_is_reported(tmp_path, capsys, roads, code, said):
    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps(result(a=1000.0, b=500.0)))
    assert instructions.against(result(**roads), kept) == code
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("what", VERSIONS)
def test_other_program_is_not_compared(tmp_path, capsys, what):
    kept, now = result(a=1000.0), copy.deepcopy(result(a=2000.0))
    now["versions"][what] = "another"
    (tmp_path / "kept.json").write_text(json.dumps(kept))
    assert instructions.against(now, tmp_path / "kept.json") == 0
    assert f"Not compared with kept.json: {what} " in capsys.readouterr().out
