"""Random programs of collectives, messages and splits, compared with a plain interpreter of the same program.

A program is a list of steps over communicators that splits make from the first one; `execute` runs it on ranks that
are threads or processes, `interpret` computes with numpy what every rank must get. NCCLPY_TEST_EXAMPLES lengthens the
test.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
from host_ranks import as_threads
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from nccl_calls import AVG, MAX, MIN, PROD, SUM

INT64 = 4
OPS = {
    SUM: lambda parts: np.add.reduce(parts),
    PROD: lambda parts: np.multiply.reduce(parts),
    MAX: lambda parts: np.maximum.reduce(parts),
    MIN: lambda parts: np.minimum.reduce(parts),
    AVG: lambda parts: np.sign(np.add.reduce(parts)) * (abs(np.add.reduce(parts)) // len(parts)),
}
COUNTS = (1, 2, 255, 256, 257, 3000, 40_000)


def data(step: int, member: int, count: int) -> np.ndarray:
    """Return the contribution of a rank of the world to a step."""
    return (np.arange(count, dtype=np.int64) * 7 + step * 31 + member * 1009) % 2003 - 1000


def members_of(program) -> list[list[list[int]]]:
    """Return, for every communicator number, its instances as lists of the world's ranks, in their order."""
    nranks, steps = program
    made = [[list(range(nranks))]]
    for step in steps:
        if step[0] != "split":
            continue
        _, parent, colors, keys = step
        instances = []
        for group in made[parent % len(made)]:
            for color in sorted({colors[rank] for rank in group} - {-1}):
                chosen = [rank for rank in group if colors[rank] == color]
                # Equal keys keep the parent's order, which `group` has.
                instances.append(sorted(chosen, key=lambda rank: keys[rank]))
        made.append(instances)
    return made


def expected(number: int, step, group: list[int], rank: int) -> np.ndarray | None:
    """Return what `rank` receives in a step of its communicator `group`; None: nothing."""
    kind, n, me = step[0], len(group), group.index(rank)
    if kind == "messages":
        arrived = [
            data(number * 100 + i, group[source % n], count)
            for i, (source, target, count) in enumerate(step[3])
            if target % n == me
        ]
        return np.concatenate(arrived) if arrived else None
    _, _, _, root, count, op = step
    root %= n
    parts = [data(number, other, count) for other in group]
    blocks = [data(number, other, count * n).reshape(n, count) for other in group]
    if kind == "all_reduce":
        return OPS[op](parts)
    if kind == "reduce":
        return OPS[op](parts) if me == root else None
    if kind == "reduce_scatter":
        return OPS[op]([block[me] for block in blocks])
    if kind == "broadcast":
        return parts[root]
    if kind == "all_gather":
        return np.concatenate(parts)
    if kind == "gather":
        return np.concatenate(parts) if me == root else None
    if kind == "scatter":
        return blocks[root][me]
    return np.concatenate([block[me] for block in blocks])  # all_to_all


def issue(nccl, comm, kind, send, recv, count, op, root, stream):
    s, r = send.ctypes.data, recv.ctypes.data
    if kind in ("all_reduce", "reduce_scatter"):
        call = nccl.ncclAllReduce if kind == "all_reduce" else nccl.ncclReduceScatter
        call(s, r, count, INT64, op, comm, stream)
    elif kind == "reduce":
        nccl.ncclReduce(s, r, count, INT64, op, root, comm, stream)
    elif kind in ("broadcast", "gather", "scatter"):
        call = {"broadcast": nccl.ncclBroadcast, "gather": nccl.ncclGather, "scatter": nccl.ncclScatter}[kind]
        call(s, r, count, INT64, root, comm, stream)
    else:
        call = nccl.ncclAllGather if kind == "all_gather" else nccl.ncclAlltoAll
        call(s, r, count, INT64, comm, stream)


def execute(rank, program) -> list[np.ndarray | None]:
    """Run a program as one rank, waiting for nothing before its end; return the result of each step."""
    nccl, (_, steps) = rank.nccl, program
    streams = [rank.stream, nccl.driver.stream(1)]
    groups = members_of(program)
    results, kept = [], []
    with rank.communicator() as world:
        comms = [world]
        for number, step in enumerate(steps):
            which = step[1] % len(comms)
            comm = comms[which]
            group = next((one for one in groups[which] if rank.rank in one), None)
            if step[0] == "split":
                # A communicator that this rank is not in is split without this rank.
                comms.append(None if comm is None else nccl.split(comm, step[2][rank.rank], step[3][rank.rank]))
                results.append(None)
                continue
            if comm is None:
                results.append(None)
                continue
            n, stream = len(group), streams[step[2] % 2]
            if step[0] == "messages":
                results.append(exchange(nccl, comm, number, step, group, rank.rank, stream, kept))
                continue
            kind, _, _, root, count, op = step
            whole = count * n if kind in ("reduce_scatter", "scatter", "all_to_all") else count
            send = data(number, rank.rank, whole)
            wanted = expected(number, step, group, rank.rank)
            recv = np.zeros(1 if wanted is None else len(wanted), np.int64)
            issue(nccl, comm, kind, send, recv, count, op, root % n, stream)
            kept.append(send)
            results.append(None if wanted is None else recv)
        for stream in streams:
            nccl.driver.cuStreamSynchronize(stream)
        for comm in comms[1:]:
            if comm is not None:
                nccl.ncclCommDestroy(comm)
    nccl.driver.cuStreamDestroy_v2(streams[1])
    return results


def exchange(nccl, comm, number, step, group, me, stream, kept):
    """Send and receive in one group."""
    n, place = len(group), group.index(me)
    mine = [message for message in step[3] if message[1] % n == place]
    recv = np.zeros(sum(count for _, _, count in mine), np.int64)
    at = 0
    nccl.ncclGroupStart()
    for i, (source, target, count) in enumerate(step[3]):
        if source % n == place:
            send = data(number * 100 + i, me, count)
            kept.append(send)
            nccl.ncclSend(send.ctypes.data, count, INT64, target % n, comm, stream)
        if target % n == place:
            nccl.ncclRecv(recv.ctypes.data + 8 * at, count, INT64, source % n, comm, stream)
            at += count
    nccl.ncclGroupEnd()
    return recv if mine else None


def check(program, answers):
    _, steps = program
    groups = members_of(program)
    made = 1
    for number, step in enumerate(steps):
        which = step[1] % made
        if step[0] == "split":
            made += 1
            continue
        for group in groups[which]:
            for rank in group:
                wanted = expected(number, step, group, rank)
                got = answers[rank][number]
                same = (wanted is None) == (got is None) and (wanted is None or np.array_equal(wanted, got))
                assert same, (
                    f"step {number} {step[:1]} of ranks {group}: rank {rank} of the world got {got}, not {wanted}"
                )


COLLECTIVES = ["all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather", "gather", "scatter", "all_to_all"]
small = st.integers(0, 7)
counts = st.sampled_from(COUNTS)
collective = st.tuples(st.sampled_from(COLLECTIVES), small, small, small, counts, st.sampled_from(list(OPS)))
messages = st.tuples(
    st.just("messages"), small, small, st.lists(st.tuples(small, small, counts), min_size=1, max_size=6)
)


def split(nranks):
    colors = st.lists(st.integers(-1, 2), min_size=nranks, max_size=nranks)
    keys = st.lists(st.integers(-3, 3), min_size=nranks, max_size=nranks)
    return st.tuples(st.just("split"), small, colors, keys)


def programs(most):
    return st.integers(1, most).flatmap(
        lambda n: st.tuples(st.just(n), st.lists(st.one_of(collective, collective, messages, split(n)), max_size=10))
    )


EXAMPLES = int(os.environ.get("NCCLPY_TEST_EXAMPLES", "0"))
profile = settings(
    deadline=None,
    derandomize=not EXAMPLES,  # the same programs each time, except in long runs
    database=None,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate, Phase.shrink],
)


def paste(program):
    note(f"# repeat with:\nfrom test_host_engine_programs import rerun\nrerun({program!r})")


def rerun(program):
    """Run a program that a test has printed, as threads."""
    from nccl_calls import Nccl

    from ncclpy.core.runtime.search import host_engine_path

    check(program, as_threads(Nccl(host_engine_path()), program[0], execute, program))


def every(few, some, many):
    """Return parameters: numbers of examples, more of them marked slow, and many more in campaigns."""
    more = pytest.param(some, marks=pytest.mark.slow), pytest.param(many, marks=pytest.mark.campaign)
    return pytest.mark.parametrize("examples", [few, *more])


@every(20, 150, 500)
def test_programs_of_threads_equal_the_interpreter(nccl, examples):
    @settings(profile, max_examples=EXAMPLES or examples)
    @given(program=programs(5))
    def run(program):
        paste(program)
        check(program, as_threads(nccl, program[0], execute, program))

    run()


@every(8, 60, 200)
@pytest.mark.parametrize("placement", ["processes", "mix"])
def test_programs_of_processes_equal_the_interpreter(nccl, processes, placement, examples):
    @settings(profile, max_examples=EXAMPLES or examples)
    @given(program=programs(4))
    def run(program):
        paste(program)
        places = [rank if placement == "processes" else rank // 2 for rank in range(program[0])]
        check(program, processes.run(nccl, program[0], execute, program, placement=places))

    run()


def test_interpreter_equals_results_by_hand():
    """Two ranks by hand: a mistake of both the engine and the interpreter would show."""
    program = (2, [("all_reduce", 0, 0, 0, 2, SUM), ("split", 0, [0, 0], [1, 0]), ("gather", 1, 0, 1, 1, SUM)])
    assert members_of(program)[1] == [[1, 0]]
    first, second = data(0, 0, 2), data(0, 1, 2)
    assert first.tolist() == [-1000, -993] and second.tolist() == [9, 16]
    assert expected(0, program[1][0], [0, 1], 0).tolist() == [-991, -977]
    assert expected(2, program[1][2], [1, 0], 0).tolist() == [data(2, 1, 1)[0], data(2, 0, 1)[0]]
    assert expected(2, program[1][2], [1, 0], 1) is None
