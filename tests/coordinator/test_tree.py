"""Connections of the control plane: one tree among machines, and one on each machine."""

from __future__ import annotations

import math
import random

import pytest

from ncclpy.coordinator.connections import Tree


@pytest.mark.parametrize("seed", range(40))
def test_every_rank_is_below_the_root_once(seed):
    rng = random.Random(seed)
    size = rng.randint(1, 300)
    machines = [f"m{rng.randrange(rng.choice([1, 3, 40]))}" for _ in range(size)]
    tree = Tree(machines)
    assert tree.parents[0] is None and None not in tree.parents[1:]
    assert tree.below(0) == tuple(range(size))
    for rank in range(size):
        parts = [tree.below(child) for child in tree.children[rank]]
        assert sorted([rank, *(each for part in parts for each in part)]) == list(tree.below(rank))
        assert len(tree.children[rank]) <= 16
    crossings = [
        rank for rank, parent in enumerate(tree.parents) if parent is not None and machines[rank] != machines[parent]
    ]
    assert len(crossings) == len(set(machines)) - 1, "of each machine one rank speaks with others"


@pytest.mark.parametrize(("size", "a_machine"), [(2, 2), (64, 64), (128, 8), (1024, 8), (10_000, 8)])
def test_depth_is_the_logarithm(size, a_machine):
    tree = Tree([str(rank // a_machine) for rank in range(size)])
    assert tree.depth() <= 1 + math.ceil(math.log(max(1, size // a_machine), 8)) + math.ceil(math.log(a_machine, 8))
