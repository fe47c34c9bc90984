"""Pictures of results, from made-up samples."""

import json

import pytest
from benchmark_runs import run

from benchmarks.pages import plot

pytest.importorskip("matplotlib")


def result(rows):
    return {
        "experiment": "made-up",
        "settings": {},
        "machine": {"gpus": ["NVIDIA H200, 580"] * 2},
        "date": "2026-11-21",
        "rows": rows,
    }


def row(operation, rival, samples, measure="time", **more):
    road = " ".join(map(str, more.values())) or "road"
    row = {"operation": operation, "rival": rival, "road": road, "measure": measure, "unit": "us", "samples": samples}
    return {**row, **more}


def lines_of(panel):
    """Return ``{label: (x, y)}`` of the lines with error bars."""
    return {
        container.get_label(): tuple(list(values) for values in container[0].get_data())
        for container in panel.containers
    }


def test_bandwidth_time_and_latency_over_sizes():
    made_up = result(
        [
            row("all_reduce", "ncclpy", [10.0, 20.0, 30.0], bytes=8, bus_bytes=8),
            row("all_reduce", "ncclpy", [1000.0] * 3, bytes=1 << 20, bus_bytes=1_000_000),
            row("all_reduce", "nccl-tests", [2000.0] * 3, bytes=1 << 20, bus_bytes=1_000_000),
            row("all_reduce", "ncclpy", [25.0], "latency", bytes=8, bus_bytes=8),
        ]
    )
    (figure,) = plot.over_sizes(made_up).values()
    bus, time, latency = map(lines_of, figure.axes)
    assert bus == {"ncclpy": ([1 << 20], [1.0]), "nccl-tests": ([1 << 20], [0.5])}
    assert time["ncclpy"] == ([8, 1 << 20], [20.0, 1000.0])
    assert latency == {"ncclpy": ([8], [25.0])}
    assert figure.get_suptitle() == "all_reduce: made-up on 2 x NVIDIA H200, 2026-11-21"


def test_time_over_ranks_with_the_fitted_line():
    made_up = result([row("init", "threads", [3.0 * n**1.5] * 2, ranks=n) for n in (2, 4, 8)])
    (figure,) = plot.over_ranks(made_up).values()
    (panel,) = figure.axes
    measured = lines_of(panel)["threads: exponent 1.50"]
    assert measured == ([2, 4, 8], pytest.approx([3.0 * n**1.5 for n in (2, 4, 8)]))
    fitted = next(line for line in panel.lines if line.get_linestyle() == "--")
    assert list(fitted.get_ydata()) == pytest.approx(measured[1])


def test_bars_with_quartiles_for_all_else():
    made_up = result([row("call", "ours", [1.0, 2.0, 3.0, 4.0, 5.0]), row("call", "theirs", [7.0], "latency")])
    (figure,) = plot.bars(made_up).values()
    time, latency = figure.axes
    assert [bar.get_width() for bar in time.patches] == [3.0]
    assert [list(segment[:, 0]) for segment in time.collections[0].get_segments()] == [[2.0, 4.0]]
    assert [bar.get_width() for bar in latency.patches] == [7.0]
    assert [label.get_text() for label in latency.get_yticklabels()] == ["theirs: road"]


def test_picture_is_written_for_each_operation(tmp_path):
    path = tmp_path / "made-up.json"
    path.write_text(json.dumps(result([row("a call", "ours", [1.0]), row("group of 64", "ours", [1.0])])))
    printed = run("plot", path, "-o", tmp_path / "pictures")
    pictures = sorted((tmp_path / "pictures").iterdir())
    assert [picture.name for picture in pictures] == ["made-up-a-call.png", "made-up-group-of-64.png"]
    assert printed.split() == [str(picture) for picture in pictures]
    assert all(picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") for picture in pictures)


def test_result_without_samples_has_no_picture(tmp_path):
    path = tmp_path / "empty.json"
    path.write_text(json.dumps(result([])))
    assert "empty.json has no samples" in run("plot", path, "-o", tmp_path, status=2)
