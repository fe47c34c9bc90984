"""The arithmetic of ``ncclpy perf``: sizes, counts, bandwidth factors, columns. No library is loaded."""

from __future__ import annotations

import pytest

from ncclpy.cli.arguments import parse_size
from ncclpy.cli.perf.arguments import sweep
from ncclpy.cli.perf.collectives import COLLECTIVES, Layout, Segment
from ncclpy.cli.perf.report import Rank, Row, Side

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8", 8),
        ("0", 0),
        ("512K", 512 * KIB),
        ("16m", 16 * MIB),
        ("1G", GIB),
        ("1.5G", 3 * GIB // 2),
        (" 4 KiB ", 4096),
    ],
)
def test_sizes_are_read_in_powers_of_1024(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "K", "-8", "8T", "1e3", "8 8", "eight"])
def test_invalid_size_is_refused(text):
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


def test_sweep_multiplies_or_adds_and_includes_its_end():
    assert list(sweep(8, 128, 0, 4)) == [8, 32, 128]
    assert list(sweep(8, 127, 0, 4)) == [8, 32]
    assert list(sweep(MIB, 3 * MIB, MIB, 1)) == [MIB, 2 * MIB, 3 * MIB]


# By hand from nccl-tests' src/*.cu: (collective, elements, itemsize, ranks) and (sent, received, count, offsets).
@pytest.mark.parametrize(
    ("name", "elements", "itemsize", "nranks", "layout"),
    [
        ("all_reduce", 1000, 4, 8, Layout(1000, 1000, 1000)),
        ("reduce", 7, 8, 3, Layout(7, 7, 7)),
        ("broadcast", 7, 1, 3, Layout(7, 7, 7)),
        ("sendrecv", 7, 1, 3, Layout(7, 7, 7)),
        # 1000 // 8 = 125 floats, rounded down to 16 bytes: 124.
        ("all_gather", 1000, 4, 8, Layout(124, 992, 124, send_offset=124)),
        ("gather", 1000, 4, 8, Layout(124, 992, 124, send_offset=124)),
        ("reduce_scatter", 1000, 4, 8, Layout(992, 124, 124, recv_offset=124)),
        ("scatter", 1000, 4, 8, Layout(992, 124, 124, recv_offset=124)),
        ("all_to_all", 1000, 4, 8, Layout(992, 992, 124)),
        # 1000 // 3 = 333 bytes, rounded down to 320 + 0: 333 & ~15 = 320.
        ("all_gather", 1000, 1, 3, Layout(320, 960, 320, send_offset=320)),
        # 1000 // 3 = 333 doubles, rounded down to pairs.
        ("all_gather", 1000, 8, 3, Layout(332, 996, 332, send_offset=332)),
        # 8 bytes among 4 ranks are zero elements.
        ("all_gather", 2, 4, 4, Layout(0, 0, 0)),
        ("barrier", 0, 1, 4, Layout(0, 0, 0)),
    ],
)
def test_counts_are_those_of_nccl_tests(name, elements, itemsize, nranks, layout):
    assert COLLECTIVES[name].layout(elements, itemsize, nranks) == layout


# By hand from doc/PERFORMANCE.md: busbw / algbw for 4 and for 8 ranks.
@pytest.mark.parametrize(
    ("name", "of_four", "of_eight"),
    [
        ("all_reduce", 1.5, 1.75),
        ("all_gather", 0.75, 0.875),
        ("reduce_scatter", 0.75, 0.875),
        ("all_to_all", 0.75, 0.875),
        ("gather", 0.75, 0.875),
        ("scatter", 0.75, 0.875),
        ("broadcast", 1.0, 1.0),
        ("reduce", 1.0, 1.0),
        ("sendrecv", 1.0, 1.0),
    ],
)
def test_bus_bandwidth_factors(name, of_four, of_eight):
    collective = COLLECTIVES[name]
    for nranks, factor in ((4, of_four), (8, of_eight)):
        layout = collective.layout(GIB // 4, 4, nranks)
        # One GiB in 10 ms is 107.3741824 GB/s.
        algorithm, bus = collective.bandwidth(layout, 4, 0.01, nranks)
        assert algorithm == pytest.approx(107.3741824)
        assert bus == pytest.approx(107.3741824 * factor)


def test_one_rank_has_no_bus():
    layout = COLLECTIVES["all_reduce"].layout(1000, 4, 1)
    assert COLLECTIVES["all_reduce"].bandwidth(layout, 4, 1.0, 1)[1] == 0.0


def test_expected_segments_of_each_rank():
    def expected(name, rank, root=-1, nranks=3):
        collective = COLLECTIVES[name]
        return collective.expected(collective.layout(48, 1, nranks), rank, nranks, root)

    assert expected("all_reduce", 1) == [Segment(0, 48, None, 0)]
    assert expected("reduce", 1, root=1) == [Segment(0, 48, None, 0)]
    assert expected("reduce", 0, root=1) is None
    assert expected("reduce_scatter", 2) == [Segment(0, 16, None, 32)]
    assert expected("broadcast", 0, root=2) == [Segment(0, 48, 2, 0)]
    assert expected("scatter", 1, root=2) == [Segment(0, 16, 2, 16)]
    assert expected("all_gather", 1) == [Segment(0, 16, 0, 0), Segment(16, 16, 1, 0), Segment(32, 16, 2, 0)]
    assert expected("gather", 1, root=1) == expected("all_gather", 1)
    assert expected("gather", 0, root=1) is None
    assert expected("all_to_all", 1) == [Segment(0, 16, 0, 16), Segment(16, 16, 1, 16), Segment(32, 16, 2, 16)]
    assert [expected("sendrecv", rank)[0].source for rank in range(3)] == [2, 0, 1]


def test_row_looks_as_in_nccl_tests():
    row = Row(
        1048576, 262144, "float", "sum", -1, Side(34.567, 30.33, 53.08, 0), Side(123456.7, 1234.5, 0.004, None), 20
    )
    # As by the format strings of src/util.cu, except for N/A, which is one column further right, under its title.
    line = "     1048576        262144     float     sum      -1    34.57   30.33   53.08       0"
    assert row.line() == line + "   123457  1234.5    0.00     N/A"


def test_rank_line_looks_as_in_nccl_tests():
    rank = Rank(3, 4242, "node1", 3, "0000:1b:00.0", "NVIDIA H200")
    assert rank.line() == "#  Rank  3 Group  0 Pid   4242 on      node1 device  3 [0000:1b:00.0] NVIDIA H200"
