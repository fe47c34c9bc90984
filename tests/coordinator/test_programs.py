"""Programs of several ranks that hypothesis generates, and shrinks on failure, compared with numpy.

Each step has operations of all ranks or of a set, which each rank brings in its own order and from several threads.
Names repeat from step to step. In the end ranks run out of data at different times and join, and some programs are
shut down while ranks wait. `test_random_programs` has larger programs, without shrinking.
"""

from __future__ import annotations

import functools
import threading
import time
import traceback
from typing import NamedTuple

import numpy as np
import pytest
from coordinator_ranks import run_coordinators
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ncclpy
import testing

NAMES = ["a", "", "\0", "a\0", "слой/層", "\ud800", "x" * 300]
DTYPES = [np.float32, np.int64, np.uint8, np.float16]
OPS = {"sum": np.sum, "max": np.max, "min": np.min}
#: Seconds for a wait. A wait that takes as long is a failure, which shrinking repeats with smaller programs.
DEADLINE = 16
#: Seconds for a campaign; examples that do not fit on a slow machine are left out, with a message.
CAMPAIGN = testing.share(100)


class Operation(NamedTuple):
    place: int  # 0: all ranks, else one of the sets
    name: str
    kind: str
    op: str
    dtype: type
    rows: list[int]  # of each rank; if all must have the same, the first counts
    width: int
    who: int  # the root, or the rank that brings something else

    def array(self, step, rank, rows):
        values = np.arange(rows * self.width).reshape(rows, self.width)
        return ((values * 7 + step * 3 + rank * 5 + len(self.name)) % 23).astype(self.dtype)


class Program(NamedTuple):
    size: int
    over: str
    options: dict
    sets: list[list[int]]
    steps: list[tuple[list[Operation], list[list[int]], list[int]]]  # with each rank's order, and number of threads
    extras: list[int]
    ends: int | None  # the rank that shuts down while the others wait
    drains: bool


KINDS = ["all_reduce", "all_gather", "broadcast", "reduce_scatter", "all_to_all", "barrier", "differs", "grouped"]


@st.composite
def programs(draw):
    size = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    ranks = st.integers(0, size - 1)
    sets = draw(st.lists(st.lists(ranks, min_size=1, unique=True).map(sorted), max_size=2, unique_by=tuple))
    operation = st.builds(
        Operation,
        place=st.integers(0, len(sets)),
        name=st.sampled_from(NAMES),
        kind=st.sampled_from(KINDS),
        op=st.sampled_from(list(OPS)),
        dtype=st.sampled_from(DTYPES),
        rows=st.lists(st.integers(0, 5), min_size=size, max_size=size),
        width=st.sampled_from([1, 0, 3, 2000]),
        who=st.integers(0, 3),
    )
    steps = []
    for _ in range(draw(st.integers(0, 3))):
        operations = draw(st.lists(operation, min_size=1, max_size=8, unique_by=lambda each: (each.place, each.name)))
        orders = [draw(st.permutations(range(len(operations)))) for _ in range(size)]
        steps.append((operations, orders, [draw(st.integers(1, 3)) for _ in range(size)]))
    options = {"fusion_bytes": draw(st.sampled_from([64 << 20, 0, 500])), "cache": draw(st.sampled_from([1024, 0, 2]))}
    options["timeout"] = DEADLINE / 2
    extras = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    over, ends, drains = draw(st.sampled_from(["store", "group"])), draw(st.none() | ranks), draw(st.booleans())
    return Program(size, over, options, sets, steps, extras, ends, drains)


def members_of(program, operation):
    return list(range(program.size)) if operation.place == 0 else program.sets[operation.place - 1]


def brought(program, step, operation, rank):
    """Return the arrays that a rank brings."""
    members, rows = members_of(program, operation), operation.rows[0]
    if operation.kind == "all_gather":
        rows = operation.rows[rank]
    if operation.kind == "all_to_all":
        rows *= len(members)
    array = operation.array(step, rank, rows)
    if operation.kind == "differs" and rank == members[operation.who % len(members)]:
        array = array[None]
    return [array, array[:1].copy()] if operation.kind == "grouped" else [array]


def bring(place, program, step, operation, rank):
    members, name, arrays = members_of(program, operation), operation.name, brought(program, step, operation, rank)
    if operation.kind == "broadcast":
        return [place.broadcast(name, arrays[0], operation.who % len(members))]
    if operation.kind == "reduce_scatter":
        return [place.reduce_scatter(name, arrays[0], operation.op)]
    if operation.kind == "barrier":
        return [place.barrier(name)]
    if operation.kind == "grouped":
        return place.grouped_all_reduce([name, f"{name} 2"], arrays, operation.op)
    if operation.kind in ("all_gather", "all_to_all"):
        return [getattr(place, operation.kind)(name, arrays[0])]
    return [place.all_reduce(name, arrays[0], operation.op)]


def wanted(program, step, operation, rank):
    """Return the expected result of each work."""
    members = members_of(program, operation)
    mine, everyone = members.index(rank), [brought(program, step, operation, each) for each in members]
    if operation.kind == "barrier":
        return [None]
    if operation.kind == "broadcast":
        return everyone[operation.who % len(members)]
    if operation.kind == "all_gather":
        return [np.concatenate([each[0] for each in everyone])]
    if operation.kind == "all_to_all":
        return [np.concatenate([np.array_split(each[0], len(members))[mine] for each in everyone])]
    totals = [
        OPS[operation.op](np.stack(each), axis=0).astype(operation.dtype) for each in zip(*everyone, strict=True)
    ]
    return [np.array_split(totals[0], len(members))[mine]] if operation.kind == "reduce_scatter" else totals


def check(program, step, operation, rank, works):
    if operation.kind == "differs" and len(members_of(program, operation)) > 1:
        error = works[0].exception(DEADLINE)
        assert isinstance(error, ncclpy.NcclError) and "disagree" in str(error), error
        return str(error)
    for work, right in zip(works, wanted(program, step, operation, rank), strict=True):
        result = work.result(DEADLINE)
        if right is not None:
            np.testing.assert_array_equal(result, right, f"step {step}: {operation}")
    return ""


def play(program, coordinator):
    """Be a rank; return the texts that must be the same on all ranks."""
    rank, said = coordinator.rank, []
    places = [coordinator]
    places += [coordinator.process_set(each, DEADLINE) if rank in each else None for each in program.sets]
    for step, (operations, orders, threads) in enumerate(program.steps):
        order = [i for i in orders[rank] if rank in members_of(program, operations[i])]
        works, failed = {}, []

        def go(part, step=step, operations=operations, works=works, failed=failed):
            try:
                for i in part:
                    works[i] = bring(places[operations[i].place], program, step, operations[i], rank)
            except BaseException as error:
                failed.append(error)

        others = [threading.Thread(target=go, args=(order[i :: threads[rank]],)) for i in range(1, threads[rank])]
        for each in others:
            each.start()
        go(order[:: threads[rank]])
        for each in others:
            each.join()
        if failed:
            raise failed[0]
        for i in sorted(works):
            text = check(program, step, operations[i], rank, works[i])
            said += [text] * (operations[i].place == 0)
    for extra in range(program.extras[rank]):
        array = np.full(5, 7.0)
        coordinator.all_reduce(f"extra {extra}", array, "average").wait(DEADLINE)
        np.testing.assert_allclose(array, 7)
    said.append(coordinator.join(DEADLINE))
    if program.ends is not None:
        if rank == program.ends:
            coordinator._close(DEADLINE, program.drains, "of its own")
        else:
            try:
                work = coordinator.barrier("never")
            except ncclpy.NcclAborted as error:  # if this rank had heard of the shutdown
                assert "of its own" in str(error)
            else:
                assert "of its own" in str(work.exception(DEADLINE))
    return said


def run(program):
    wrong = None
    try:
        play_it = functools.partial(play, program)
        found = run_coordinators(program.size, play_it, over=program.over, **program.options)
        assert all(each == found[0] for each in found), found
    except Exception:  # the first failing rank and its error vary: hypothesis must see one failure
        wrong = traceback.format_exc()
    if wrong is not None:
        raise AssertionError(wrong)


profile = settings(
    deadline=None, database=None, print_blob=False, suppress_health_check=list(HealthCheck), derandomize=True
)  # fmt: skip


@pytest.mark.timeout(400)  # hypothesis shrinks a failing program for up to five minutes
@pytest.mark.parametrize("examples", [8, pytest.param(120, marks=pytest.mark.slow)])
def test_program(host_engine, examples):
    @settings(profile, max_examples=examples)
    @given(program=programs())
    def some(program):
        run(program)

    some()


@pytest.mark.campaign
@pytest.mark.timeout(CAMPAIGN + 400)
def test_many_programs(host_engine):
    end, done = time.monotonic() + CAMPAIGN, []

    @settings(profile, max_examples=1000, derandomize=False)
    @given(program=programs())
    def many(program):
        if time.monotonic() < end:
            run(program)
            done.append(1)

    many()
    print(f"{len(done)} programs")
    assert len(done) > CAMPAIGN / 4
