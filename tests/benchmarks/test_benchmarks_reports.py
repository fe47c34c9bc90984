"""The cost of desync reports: the experiment on few ranks, and the line through its medians."""

import json

import pytest
from benchmark_runs import run

from benchmarks.pages import growth, report, summary
from benchmarks.process_group import losses, reports
from benchmarks.work import results

OPERATIONS = {*reports.LINES, reports.HEARD, reports.IDLE, reports.SERVER}


@pytest.mark.slow
def test_every_number_of_ranks_is_measured(tmp_path):
    path = tmp_path / "result.json"
    printed = run("reports", "--ranks", 2, 3, "--rounds", 1, "--json", path)
    rows = json.loads(path.read_text())["rows"]
    found = {(row["operation"], row["ranks"]): row["samples"] for row in rows}
    assert found.keys() == {(operation, nranks) for operation in OPERATIONS for nranks in (2, 3)}
    for nranks in (2, 3):
        assert found[reports.IDLE, nranks] == [0.0], "who does nothing tells nothing"
        # Each rank writes one key a second, and counting began in the middle of a second.
        assert 0 < found[reports.BUSY, nranks][0] <= 2 * nranks
        assert all(found[operation, nranks][0] > 0 for operation in reports.LINES)
    assert "### As a + b n" in printed


def test_page_on_scale_has_the_lines_that_were_fitted():
    result = dict(results.load_all())["reports.json"]
    page = (report.PAGE.parent / "scale.md").read_text()
    assert growth.line_table(result) in page, "the table under `What ranks tell of themselves`"
    medians = {
        row["ranks"]: summary.median(row["samples"]) for row in result["rows"] if row["operation"] == reports.ABORT
    }
    assert f"From 128 to 256 it took {medians[256] / medians[128]:.1f} times as long." in page


def test_page_on_scale_has_the_line_of_recovery():
    result = dict(results.load_all())["recovery.json"]
    page = (report.PAGE.parent / "scale.md").read_text()
    assert growth.line_table(result) in page, "the table under `Going on without a rank`"
    medians = {
        row["ranks"]: summary.median(row["samples"]) for row in result["rows"] if row["operation"] == losses.KILL
    }
    assert f"8 processes on two cores take {medians[8] / 1e3:.2f} s, 64 take {medians[64] / 1e3:.1f} s" in page


def rows_of(value, ranks=(2, 4, 8), **more):
    series = {"operation": "o", "rival": "r", "measure": "value", "unit": "ms", **more}
    return [{**series, "road": f"{n} ranks", "ranks": n, "samples": [value(n)]} for n in ranks]


def test_line_is_found_again():
    (line,) = growth.lines({"rows": rows_of(lambda n: 3.0 + 0.5 * n, line=True)})
    assert (line.a, line.b, line.off) == pytest.approx((3.0, 0.5, 0.0), abs=1e-9)
    assert line.ranks == [2, 4, 8]
    (bent,) = growth.lines({"rows": rows_of(lambda n: float(n * n), line=True)})
    assert bent.off == pytest.approx(abs(bent.a + 8 * bent.b - 64) / 64) and bent.off > 0.01


def test_rows_have_a_line_only_on_request():
    rows = rows_of(lambda n: 3.0 + 0.5 * n)
    assert growth.lines({"rows": rows}) == []
    text = report.text({"experiment": "reports", "settings": {}, "rows": rows})
    assert "### How it grows" in text and "a + b n" not in text
