"""Growth with the number of ranks: the experiment on the host engine, and the fit."""

import json

import pytest
from benchmark_runs import run

from benchmarks.pages import growth, report
from benchmarks.scale import main as scale


@pytest.mark.parametrize("ranks", [[2], pytest.param([2, 5], marks=pytest.mark.slow)], ids=["of 2", "of 2 and 5"])
def test_every_step_is_measured_in_one_process_and_in_several(tmp_path, ranks):
    path = tmp_path / "result.json"
    printed = run("scale", "--ranks", *ranks, "--most-processes", 2, "--rounds", 1, "--json", path)
    rows = json.loads(path.read_text())["rows"]
    for operation in (*scale.STEPS, *scale.MEMORY.values()):
        measured = {(row["rival"], row["ranks"]) for row in rows if row["operation"] == operation}
        assert measured == {*((scale.ONE_PROCESS, n) for n in ranks), (scale.PROCESSES, 2)}
    assert all(min(row["samples"]) > 0 for row in rows if row["unit"] == "us")
    assert ("### How it grows" in printed) == (len(ranks) > 1)


def rows_of(value, rounds=3, ranks=(2, 4, 8, 16), operation="init"):
    return [
        {
            "operation": operation,
            "rival": "ours",
            "road": f"{n} ranks",
            "measure": "time",
            "unit": "us",
            "ranks": n,
            "samples": [value(n, number) for number in range(rounds)],
        }
        for n in ranks
    ]


def test_power_law_is_found_again():
    (fit,) = growth.fits({"rows": rows_of(lambda n, number: 3.0 * n ** (1.5 + 0.1 * number))})
    assert fit.exponents == pytest.approx([1.5, 1.6, 1.7])
    assert fit.factors == pytest.approx([3.0] * 3)
    assert fit.last == pytest.approx([1.5, 1.6, 1.7])
    assert fit.medians == pytest.approx([3.0 * n**1.6 for n in (2, 4, 8, 16)])


def test_constant_part_hides_growth_from_the_fit_but_not_from_the_last_two():
    (fit,) = growth.fits({"rows": rows_of(lambda n, number: 10.0 + n)})
    assert fit.exponents[0] < 0.5 < fit.last[0]


def test_no_fit_of_one_point_or_of_zeros():
    assert growth.fits({"rows": rows_of(lambda n, number: 1.0, ranks=(2,))}) == []
    assert growth.fits({"rows": rows_of(lambda n, number: 0.0)}) == []


def test_round_without_a_value_is_left_out_of_the_fit():
    (fit,) = growth.fits({"rows": rows_of(lambda n, number: float(n) if number else 0.0)})
    assert fit.exponents == pytest.approx([1.0, 1.0])


def test_page_has_medians_and_exponents():
    text = report.text({"experiment": "scale", "settings": {}, "rows": rows_of(lambda n, number: float(n))})
    assert "| 16    | 16.0 (16.0-16.0) |" in text
    assert "| init      | ours    | 2 to 16 | 1.00            | 1.00 to 1.00 | 1.00" in text
