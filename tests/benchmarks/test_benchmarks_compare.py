"""``python -m benchmarks compare``: differences between two results, from made-up samples."""

import json
import random

import pytest
from benchmark_runs import run

from benchmarks.__main__ import main
from benchmarks.pages import compare


def result(rows, experiment="overhead", **more):
    return {"experiment": experiment, "settings": {}, "machine": {}, "versions": {}, "rows": rows, **more}


def row(road, samples, unit="us"):
    return {"operation": "op", "rival": "ours", "road": road, "measure": "time", "unit": unit, "samples": samples}


def noisy(center, seed, n=20, spread=0.1):
    generator = random.Random(seed)
    return [center * (1 + spread * generator.uniform(-1, 1)) for _ in range(n)]


def verdict(a, b, unit="us", threshold=0.05):
    return compare.judge(a, b, unit, threshold)[-1]


@pytest.fixture
def compared(tmp_path, monkeypatch, capsys):
    """Write two results and compare them; return what is printed."""

    def go(a, b, *options, status=0):
        paths = []
        for name, content in (("a.json", a), ("b.json", b)):
            path = tmp_path / name
            path.write_text(content if isinstance(content, str) else json.dumps(content))
            paths.append(path)
        monkeypatch.setattr("sys.argv", ["benchmarks", "compare", *map(str, paths), *options])
        assert main() == status
        return "".join(capsys.readouterr())

    return go


def test_same_distribution_is_the_same():
    assert [verdict(noisy(10, seed), noisy(10, seed + 1000)) for seed in range(50)] == ["same"] * 50


def test_real_difference_is_found():
    assert [verdict(noisy(10, seed), noisy(12, seed + 1000)) for seed in range(50)] == ["worse"] * 50
    assert [verdict(noisy(12, seed), noisy(10, seed + 1000)) for seed in range(50)] == ["better"] * 50


def test_difference_within_the_spread_is_the_same():
    assert verdict(noisy(10, 1, spread=0.8), noisy(11, 2, spread=0.8)) == "same"


def test_certain_difference_below_the_threshold_is_the_same():
    a, b = noisy(10, 1, spread=0.001), noisy(10.3, 2, spread=0.001)
    assert verdict(a, b) == "same"
    assert verdict(a, b, threshold=0.01) == "worse"


@pytest.mark.parametrize("unit", ["GB/s", "1000/s"])
def test_higher_bandwidths_and_rates_are_better(unit):
    assert verdict(noisy(300, 1), noisy(360, 2), unit) == "better"
    assert verdict(noisy(360, 1), noisy(300, 2), unit) == "worse"


@pytest.mark.parametrize("n", [1, 3])
def test_few_samples_are_not_judged(n):
    assert verdict([10.0] * n, [20.0] * 30) == "not judged"
    assert verdict([10.0] * 30, [20.0] * n) == "not judged"


def test_interval_is_the_spread_of_the_medians():
    assert compare.interval([10.0] * 5, [20.0] * 5) == (2.0, 2.0)
    low, high = compare.interval(noisy(10, 1, 200), noisy(20, 2, 200))
    assert 1.9 < low < 2.0 < high < 2.1


def test_zeros_have_no_ratio():
    assert verdict([0.0] * 5, [0.0] * 5) == "same"
    assert verdict([0.0] * 5, [1.0] * 5) == "not judged"


def test_table_has_medians_ratio_and_verdict(compared):
    a = result([row("kept", [10.0] * 5), row("slower", [10.0] * 5), row("gone", [1.0])])
    b = result([row("kept", [10.0] * 5), row("slower", [20.0] * 5), row("new", [1.0])])
    printed = compared(a, b)
    lines = {line.split("|")[3].strip(): line for line in printed.splitlines() if line.startswith("| op")}
    assert [cell.strip() for cell in lines["slower"].split("|")[5:10]] == [
        "10.0 us",
        "20.0 us",
        "2.000",
        "2.000-2.000",
        "worse",
    ]
    assert lines["kept"].split("|")[9].strip() == "same"
    assert "Only in A:\n\n- op, ours, gone, time\n" in printed
    assert "Only in B:\n\n- op, ours, new, time\n" in printed
    assert "2 rows in both: 1 worse, 0 better, 1 same, 0 not judged." in printed
    assert "kept" not in compared(a, b, "--changed")


def test_rival_missing_on_one_side_has_its_reason(compared):
    missing = {"rival": "ours", "missing": "not installed"}
    assert "- op, ours, road, time (not installed)" in compared(result([row("road", [1.0])]), result([missing]))


def test_regression_fails_on_request(compared):
    fast, slow = result([row("road", [10.0] * 5)]), result([row("road", [20.0] * 5)])
    compared(fast, slow)
    compared(fast, slow, "--fail-on-regression", status=1)
    compared(slow, fast, "--fail-on-regression")


def test_other_machines_and_settings_are_reported(compared):
    a = result([], machine={"cores": 2, "load": 0.1}, versions={"numpy": "2.0"}, settings={"rounds": 5})
    b = result([], machine={"cores": 4, "load": 0.2}, versions={"numpy": "2.0"}, settings={"rounds": 6})
    assert compared(a, b).startswith("Not the same in both:\n\n- cores: 2 -> 4\n- rounds: 5 -> 6\n\n")


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (result([]), result([], "mpi"), "different experiments, 'overhead' and 'mpi'"),
        (result([]), result([], settings={"engine": "gpu"}), "different engines, '' and 'gpu'"),
        (result([]), "{}", "b.json is not a result"),
        ("oops", result([]), "a.json is not JSON"),
    ],
)
def test_results_that_cannot_be_compared_are_refused(compared, a, b, message):
    assert message in compared(a, b, status=2)


def test_missing_file_is_named(tmp_path):
    printed = run("compare", tmp_path / "a.json", tmp_path / "b.json", status=2)
    assert "a.json cannot be read: No such file or directory" in printed
