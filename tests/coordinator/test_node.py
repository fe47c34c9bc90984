"""A rank's node in the tree: random programs compared with a model, and damaged frames."""

from __future__ import annotations

import random

import node_runs
import pytest

import testing
from ncclpy.coordinator.control import Node


@pytest.mark.parametrize(
    ("seed", "runs"),
    [
        (1, 80),
        pytest.param(201, 1500, marks=pytest.mark.slow),
        pytest.param(100_000, testing.share(20_000), marks=[pytest.mark.campaign]),
    ],
)
def test_all_ranks_hear_the_same_in_one_order(seed, runs, capsys):
    node_runs.main(seed, runs)
    hits, evicted, joins, sets = map(int, capsys.readouterr().out.split())
    assert min(hits, evicted, joins, sets) > runs // 10, "of each there is to be something"


def damage(rng, frame):
    """Return a frame with some bytes changed, added or removed."""
    frame = bytearray(frame)
    for _ in range(rng.randint(1, 4)):
        what = rng.random()
        if what < 0.4 and frame:
            frame[rng.randrange(len(frame))] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
        elif what < 0.6:
            frame.insert(rng.randint(0, len(frame)), rng.randrange(256))
        elif what < 0.8 and frame:
            del frame[rng.randrange(len(frame))]
        else:
            del frame[rng.randint(0, len(frame)) :]
    return bytes(frame)


@pytest.mark.parametrize(
    ("seed", "runs"), [(1, 400), pytest.param(50_000, testing.share(10_000), marks=[pytest.mark.campaign])]
)
def test_damaged_frame_is_an_error_or_another_frame(seed, runs):
    refused = 0
    for each in range(seed, seed + runs):
        rng = random.Random(each)
        program = node_runs.Program(each)
        deliver = program.net.deliver

        def spoil(net=program.net, rng=rng, deliver=deliver):
            for lines in (net.up, net.down):
                for line in lines:
                    if line and rng.random() < 0.05:
                        line[0] = damage(rng, line[0])
            return deliver()

        program.net.deliver = spoil
        try:
            program.run()
        except ValueError:
            refused += 1
        except (AssertionError, KeyError, IndexError):  # the model's, as it is another program now
            pass
    assert refused > runs // 10


def test_operation_takes_few_bytes_in_steady_state():
    root = Node(0, 2, True, [(1, (1,))], cache=64)
    leaf = Node(1, 2, False, [], cache=64)
    names = [f"layer{i}/weight/gradient".encode() for i in range(50)]
    sizes = []
    for _ in range(3):
        sent = 0
        for node in (root, leaf):
            for name in names:
                node.bring(0, name, b"float32 sum " + bytes(40))
        for frame in leaf.up():
            sent += len(frame)
            root.from_child(0, frame)
        root.launched(0)
        for frame in root.down():
            leaf.from_parent(frame)
        heard = [record[2] for frame in root.records() for record in frame]
        root.launched(0)
        for frame in root.down():
            leaf.from_parent(frame)
        heard += [record[2] for frame in root.records() for record in frame]
        assert sorted(heard) == sorted(names)
        root.launched(0)
        sizes.append(sent)
    assert sizes[0] > 50 * 50 and sizes[1] == sizes[2] <= 50 * 5


def test_one_new_shape_leaves_the_rest_of_the_cache():
    root = Node(0, 1, True, [], cache=8)
    for shape in (b"2", b"2", b"3", b"3"):
        for name in (b"x", b"y"):
            root.bring(0, name, shape if name == b"x" else b"always")
            root.launched(0)
    assert root.counters()["hits"] == 2 + 3  # x: each shape once; y: all but the first


def test_root_reports_stalls_and_ends_overdue_operations():
    """Also if the ranks that have brought the operation are below a rank that has not."""
    root = Node(0, 3, True, [(1, (1, 2))], cache=8, timeout=10, stall_after=1)
    middle = Node(1, 3, False, [(2, (2,))], cache=8, timeout=10, stall_after=1)
    leaf = Node(2, 3, False, [], cache=8, timeout=10, stall_after=1)

    def exchange(time):
        for frame in leaf.up():
            middle.from_child(0, frame, time)
        for frame in middle.up():
            root.from_child(0, frame, time)
        frames = root.down()
        for frame in frames:
            middle.from_parent(frame, time)
        for frame in middle.down():
            leaf.from_parent(frame, time)

    leaf.bring(0, b"x", b"A", time=0.0)
    root.bring(0, b"y", b"B", time=0.0)
    exchange(0.0)
    for node in (leaf, middle, root):
        node.look(0.5)
    exchange(0.5)
    assert root.records() == []
    for node in (leaf, middle, root):
        node.look(2.0)
    exchange(2.0)
    root.look(2.0)
    told = [record for frame in root.records() for record in frame]
    x, y = sorted(told, key=lambda record: record[2])
    assert x[:6] == ("stalled", 0, b"x", b"A", (2,), (0, 1)) and x[6] == pytest.approx(2, abs=0.1)
    assert y[:6] == ("stalled", 0, b"y", b"B", (0,), (1, 2)) and (b"y", (0,)) in x[7]
    for node in (leaf, middle, root):
        node.look(11.0)
    exchange(11.0)
    root.look(11.0)
    exchange(11.0)
    heard = [[record for frame in node.records() for record in frame] for node in (root, middle, leaf)]
    assert ("overdue", 0, b"x", b"A", (2,), (0, 1)) in heard[2]
    assert ("overdue", 0, b"y", b"B", (0,), (1, 2)) in heard[0]
    assert heard[1] == []  # it has brought neither, and gets each verdict when it brings the operation
    middle.bring(0, b"x", b"A")
    assert middle.records() == [[("overdue", 0, b"x", b"A", (2,), (0, 1))]]
    assert not leaf.pending() and not root.pending()
    assert middle.condemned() == 1  # y


def test_record_of_overdue_operations_is_bounded():
    """A late rank gets the verdict of recent operations; forgotten ones count as new."""
    root = Node(0, 2, True, [(1, (1,))], cache=8, timeout=10)
    leaf = Node(1, 2, False, [], cache=8, timeout=10)
    sizes = []
    for turn in range(20_000):
        root.bring(0, b"%d" % turn, b"A", time=20.0 * turn)
        root.look(20.0 * turn + 11)
        for frame in root.down():
            leaf.from_parent(frame, 20.0 * turn + 11)
        root.records()
        sizes.append(leaf.condemned())
    assert sizes[999] == 1000 and 1000 < sizes[-1] <= sizes[10_000] < 5000
    leaf.bring(0, b"19999", b"A")
    assert leaf.records()[0][0][:3] == ("overdue", 0, b"19999") and leaf.condemned() == sizes[-1] - 1
    leaf.bring(0, b"0", b"A")
    assert leaf.records() == [] and leaf.pending()
    root.bring(0, b"0", b"A")
    for frame in leaf.up():
        root.from_child(0, frame)
    assert root.records()[-1][0][:3] == ("run", 0, b"0")
    long = bytes(1 << 20)
    for turn in range(3):
        root.bring(0, long + b"%d" % turn, b"A", time=1e6)
    root.look(2e6)
    for frame in root.down():
        leaf.from_parent(frame, 2e6)
    assert leaf.condemned() == 1  # the last one is kept, however long its name is
    root.shutdown(False, b"")
    for frame in root.down():
        leaf.from_parent(frame)
    assert leaf.condemned() == 0


def test_stall_is_reported_repeatedly_with_longer_pauses():
    root = Node(0, 2, True, [(1, (1,))], cache=8, timeout=1000, stall_after=1)
    root.bring(0, b"x", b"A", time=0.0)
    told = []
    for second in range(1, 64):
        root.look(float(second))
        told += [second for frame in root.records() for record in frame if record[0] == "stalled"]
    assert told == [1, 3, 7, 15, 31, 63]
