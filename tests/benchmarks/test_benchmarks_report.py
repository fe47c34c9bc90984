"""The pages on performance: they follow from the results, and a reader can take them in."""

import re

import benchmark_runs  # noqa: F401  the benchmarks are imported through it
import pytest

from benchmarks.pages import front, plot, report, summary
from benchmarks.work import results

DOCS = report.PAGE.parent
FOUND = results.load_all()
PAGES = {"performance.md": report.first_page(FOUND), **report.pages(FOUND)}


def pictures_of(page):
    """Return the names of a page's pictures, in their order."""
    return [path.rpartition("/")[2] for path in re.findall(r"!\[[^]]*\]\(([^)]*)\)", PAGES[page])]


def lines_of(page):
    """Return the lines of all tables of a page, without their heads."""
    return [line for line in PAGES[page].splitlines() if line.startswith("| ") and not set(line) <= set("| -")]


def test_pages_follow_from_the_kept_results():
    kept = {path.relative_to(DOCS).as_posix() for path in [report.PAGE, *report.PAGE.with_suffix("").iterdir()]}
    assert kept == PAGES.keys(), "run `python -m benchmarks report`"
    for path, text in PAGES.items():
        assert (DOCS / path).read_text() == text, f"{path}: run `python -m benchmarks report`"
    pictures = {path.name for path in (DOCS / report.PICTURES).iterdir()}
    assert pictures == {name for page in PAGES for name in pictures_of(page)}


def test_every_result_has_its_tables():
    text = "\n".join(PAGES.values())
    assert len(FOUND) > 10
    assert [name for name, _ in FOUND if f"benchmarks/results/{name}" not in text] == []


def test_first_page_is_read_in_two_minutes():
    # A heading and a few lines for each kind of user: each line's result exists, with the command that repeats it.
    assert len(lines_of("performance.md")) == sum(1 + len(lines) for lines in front.LINES.values())
    assert max(map(len, front.LINES.values())) <= 7
    for name in {line.result for lines in front.LINES.values() for line in lines}:
        command = dict(FOUND)[f"{name}.json"]["command"]
        assert f"- `python -m {command.partition('python -m ')[2]}`" in PAGES["performance.md"]
    assert pictures_of("performance.md") == [f"{picture.name}.png" for picture in front.PICTURES]
    assert len(front.PICTURES) <= 3
    found = {name.removesuffix(".json"): result for name, result in FOUND}
    for picture in front.PICTURES:
        samples, _ = front.bars(picture, found)
        assert samples.keys() == picture.bars.keys(), "a bar's row is in no result"
        assert len(samples) <= 8


def test_figures_of_the_first_page_are_those_of_the_tables():
    line = next(line for line in lines_of("performance.md") if "nccl4py" in line)
    ours, theirs, ratio = re.findall(r"([\d.]+) us", line) + re.findall(r"([\d.]+) +\|$", line)
    table = PAGES["performance/overhead.md"].partition("## On 4 GPUs")[2].splitlines()
    of_ours = next(row for row in table if re.match(r"\| ncclpy.Communicator +\| all_reduce\(torch tensor\) +\|", row))
    of_theirs = next(row for row in table if re.match(r"\| nccl4py Communicator +\| allreduce\(torch tensor\)", row))
    assert f"| {ours} (" in of_ours and f"| {theirs} (" in of_theirs
    assert float(ratio) == pytest.approx(float(ours) / float(theirs), rel=0.05)


def test_figures_in_guides_are_those_of_the_results():
    samples = {
        row["rival"]: row["samples"]
        for row in dict(FOUND)["collectives-registered-gpu4.json"]["rows"]
        if row.get("road") == "all_reduce 8 B" and row["measure"] == "latency"
    }
    plain, windows, torch = (
        f"{summary.median(samples[rival]):.1f}" for rival in ("ncclpy", "ncclpy, windows", "torch.distributed")
    )
    words = f"{plain} us in plain memory, {windows} us in symmetric windows, and {torch} us with torch.distributed"
    assert words in " ".join((DOCS / "guides" / "inference.md").read_text().split())


@pytest.mark.parametrize("page", PAGES)
def test_no_table_is_wider_than_the_site(page):
    # In the site's font 7 columns of figures fit side by side; a cell's words wrap, its figures do not.
    for line in lines_of(page):
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        assert len(cells) <= 7, line
        longest = [max(map(len, cell.replace("(", " (").split()), default=0) for cell in cells]
        assert sum(longest) <= 84, line


def row(road, us, rival="ncclpy.Communicator"):
    return {"operation": "all_reduce", "rival": rival, "road": road, "measure": "host", "unit": "us", "samples": us}


def test_one_gpu_in_place_is_marked_beside_a_loop_that_is_not():
    rows = [
        row("ncclAllReduce", [4.0], "C loop"),
        row("all_reduce(ints)", [4.1]),
        row("all_reduce(x), in place", [0.3]),
    ]
    result = {"experiment": "overhead", "settings": {"engine": "gpu", "gpus": 1}, "rows": rows}
    assert "all_reduce(x), in place * |" in report.text(result)
    assert report.ALONE in report.text(result)
    result["settings"]["gpus"] = 2
    assert " *" not in report.text(result) and report.ALONE not in report.text(result)


def made_up(ours, theirs):
    pause, loop = front.COSTLY[1].ours, front.COSTLY[1].theirs
    rows = [
        {"rival": rival, "road": road, "measure": measure, "unit": "us", "samples": us, "operation": "launch"}
        for (rival, road, measure), us in ((pause, ours), (loop, theirs))
    ]
    return {"manager-gpu4": {"experiment": "manager", "settings": {"engine": "gpu"}, "rows": rows}}


def test_higher_costs_are_reported_while_they_are_higher():
    page = front.page(made_up([40.0], [20.0]), {}, "pictures")
    assert (
        "so 40.0 us pass from the last add until all 4 GPUs have their operation; a loop in C takes 20.0 us"
        in " ".join(page.split())
    )
    assert "## Where it costs more" not in front.page(made_up([19.0], [20.0]), {}, "pictures")


def test_higher_cost_with_a_shorter_median_says_so():
    page = front.page(made_up([6.0, 7.0, 20.0], [5.0, 8.0, 9.0]), {}, "pictures")
    assert "Round by round: 1.20 times as long, though the median of all rounds is shorter." in " ".join(page.split())
    assert "shorter" not in front.page(made_up([40.0], [20.0]), {}, "pictures")


def test_picture_has_room_for_short_bars_beside_a_long_one():
    pytest.importorskip("matplotlib")
    rows = [row(f"road {n}", [10.0 + n, 11.0 + n]) for n in range(6)] + [row("nonblocking", [190.0, 200.0])]
    result = {"experiment": "overhead", "settings": {}, "machine": {"gpus": []}, "rows": rows}
    (figure,) = plot.bars(result).values()
    (panel,) = figure.axes
    assert panel.get_xlim()[1] < 25.0
    assert "195.0 →" in [text.get_text() for text in panel.texts]


def test_legend_covers_no_line():
    pytest.importorskip("matplotlib")
    result = dict(FOUND)["collectives-registered-gpu4.json"]
    figure = plot.draw(result)["all_reduce, 4 ranks"]
    (legend,) = figure.legends
    figure.canvas.draw()
    box = legend.get_window_extent()
    assert [panel.get_legend() for panel in figure.axes] == [None] * len(figure.axes)
    assert not any(box.overlaps(panel.get_window_extent()) for panel in figure.axes)
    assert figure.get_figwidth() == plot.SITE_WIDTH
