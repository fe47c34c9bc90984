"""Calls made of groups: parts of different sizes, lists, point to point; and other ways to launch collectives."""

from __future__ import annotations

import functools
import inspect

import numpy as np
import pytest

import conformance
import ncclpy
import testing
from ncclpy import DataType


@pytest.fixture(scope="module", params=conformance.worlds(), ids="{}ranks".format)
def comms(request):
    yield from testing.communicators(request.param)


@pytest.fixture(params=["threads", "group"])
def each(request, comms):
    """Return ``each(issue)``, which calls ``issue(rank, comm)`` on every rank, in threads or in one group."""

    def threads(issue):
        testing.run_threads(len(comms), lambda rank: issue(rank.rank, comms[rank.rank]), comms=comms)

    def group(issue):
        def call():
            with ncclpy.group():
                for rank, comm in enumerate(comms):
                    issue(rank, comm)

        testing.run_with_deadline(call)

    return threads if request.param == "threads" else group


def ragged(nranks: int, seed: int) -> list[int]:
    """Return counts of very different sizes, zeros among them."""
    return [int(count) for count in np.random.default_rng(seed).choice([0, 1, 5, 17, 300, 1023], nranks)]


def values(datatype, rank, count):
    return conformance.sample(datatype, "sum", rank, 1 << 14)[:count]


def empty(lib, comm, datatype, count):
    return lib.make(np.zeros(count, testing.DTYPES[datatype]), comm.device)


COUNTS = {
    "zeros": lambda n: [0] * n,
    "equal": lambda n: [3] * n,
    **{f"ragged{seed}": lambda n, seed=seed: ragged(n, seed) for seed in range(4)},
}


def of_types(*datatypes):
    return pytest.mark.parametrize("datatype", datatypes, ids=lambda datatype: datatype.name.lower())


def of_types_and_operators(first, *others):
    """Parametrise with every operator of every type; outside of campaigns, one for each type but the first."""
    return pytest.mark.parametrize(
        ("datatype", "op"),
        [
            pytest.param(
                datatype,
                op,
                id=f"{datatype.name.lower()}-{op}",
                marks=[] if datatype == first or op == "avg" else [pytest.mark.campaign],
            )
            for datatype in (first, *others)
            for op in conformance.OPS
        ],
    )


def every_count(test):
    """Run a test with all counts in turn: separate tests would take longer to start than to run."""

    @functools.wraps(test)
    def run(*args, **given):
        for name, counts in COUNTS.items():
            try:
                test(*args, counts=counts, **given)
            except Exception as error:
                raise AssertionError(f"with counts {name}: {type(error).__name__}: {error}") from error

    signature = inspect.signature(test)
    parameters = [parameter for name, parameter in signature.parameters.items() if name != "counts"]
    run.__signature__ = signature.replace(parameters=parameters)
    return run


@every_count
@of_types(*DataType)
def test_all_gather_by_counts(comms, each, arrays, counts, datatype):
    counts = counts(len(comms))
    sends = [arrays.make(values(datatype, r, counts[r]), comm.device) for r, comm in enumerate(comms)]
    recvs = [empty(arrays, comm, datatype, sum(counts)) for comm in comms]
    each(lambda r, comm: comm.all_gather(arrays.argument(sends[r]), arrays.argument(recvs[r]), counts))
    expected = np.concatenate([values(datatype, r, count) for r, count in enumerate(counts)])
    for r, recv in enumerate(recvs):
        assert np.array_equal(arrays.read(recv), expected), f"{datatype!r}, counts {counts}, rank {r}"


@every_count
@of_types_and_operators(DataType.FLOAT32, DataType.BFLOAT16, DataType.INT8, DataType.UINT64)
def test_reduce_scatter_by_counts(comms, each, arrays, counts, op, datatype):
    nranks = len(comms)
    counts = counts(nranks)
    total = max(sum(counts), 1)
    samples = [conformance.sample(datatype, op, r, total)[: sum(counts)] for r in range(nranks)]
    sends = [arrays.make(sample, comm.device) for sample, comm in zip(samples, comms, strict=True)]
    recvs = [empty(arrays, comm, datatype, count) for count, comm in zip(counts, comms, strict=True)]
    case = conformance.Case("reduce_scatter", datatype, op)
    ops = [conformance.Operators(comm).get(case) or op for comm in comms]
    each(lambda r, comm: comm.reduce_scatter(arrays.argument(sends[r]), arrays.argument(recvs[r]), ops[r], counts))
    whole = conformance.reduced(datatype, op, nranks, total)
    bound = conformance.tolerance(datatype, op, nranks, total)
    start = 0
    for r, count in enumerate(counts):
        part = slice(start, start + count)
        wrong = conformance.differences(arrays.read(recvs[r]), whole[part], None if bound is None else bound[part])
        assert not wrong, f"{datatype!r} {op}, counts {counts}, rank {r}: {wrong}"
        start += count


@every_count
@of_types(DataType.INT8, DataType.FLOAT16, DataType.FLOAT32, DataType.FLOAT64)
def test_all_to_all_by_counts(comms, each, arrays, counts, datatype):
    nranks = len(comms)
    # Counts from rank i to rank j, rotated by i, so that rows and columns differ.
    matrix = [[counts(nranks)[(i + j) % nranks] * (1 + i % 2) for j in range(nranks)] for i in range(nranks)]
    outgoing = [values(datatype, i, sum(matrix[i])) for i in range(nranks)]
    sends = [arrays.make(outgoing[i], comm.device) for i, comm in enumerate(comms)]
    incoming = [[matrix[i][j] for i in range(nranks)] for j in range(nranks)]
    recvs = [empty(arrays, comm, datatype, sum(incoming[j])) for j, comm in enumerate(comms)]
    each(lambda r, comm: comm.all_to_all(arrays.argument(sends[r]), arrays.argument(recvs[r]), matrix[r], incoming[r]))
    for j, recv in enumerate(recvs):
        parts = [np.split(outgoing[i], np.cumsum(matrix[i])[:-1])[j] for i in range(nranks)]
        assert np.array_equal(arrays.read(recv), np.concatenate(parts)), f"{datatype!r}, rank {j}"


def test_counts_are_elements_of_complex_arrays(host_engine, comms2):
    counts = [1, 2]
    sends = [np.array([1 + 2j]), np.array([3j, 4])]
    recvs = [np.zeros(3, complex) for _ in comms2]
    scattered = [np.zeros(count, complex) for count in counts]
    exchanged = [np.zeros(2, complex) for _ in comms2]

    def call():
        with ncclpy.group():
            for r, comm in enumerate(comms2):
                comm.all_gather(sends[r], recvs[r], counts)
        with ncclpy.group():
            for r, comm in enumerate(comms2):
                comm.reduce_scatter(recvs[r], scattered[r], counts=counts)
        with ncclpy.group():
            for r, comm in enumerate(comms2):
                comm.all_to_all(recvs[r][:2], exchanged[r], [1, 1], [1, 1])

    testing.run_with_deadline(call)
    assert all(recv.tolist() == [1 + 2j, 3j, 4] for recv in recvs)
    assert [part.tolist() for part in scattered] == [[2 + 4j], [6j, 8]]
    assert [part.tolist() for part in exchanged] == [[1 + 2j, 1 + 2j], [3j, 3j]]


V_CALLS = {
    "all_gather by counts": ([2, 3], lambda comm, send, recv, counts: comm.all_gather(send, recv, counts), 2, 5),
    "reduce_scatter by counts": (
        [2, 3],
        lambda comm, send, recv, counts: comm.reduce_scatter(send, recv, counts=counts),
        5,
        2,
    ),
    "all_to_all by counts": (
        [2, 3],
        lambda comm, send, recv, counts: comm.all_to_all(send, recv, counts, [1, 4]),
        5,
        5,
    ),
}


@pytest.mark.parametrize("method", V_CALLS)
def test_counts_that_do_not_fit_are_refused(comms2, arrays, method):
    good, call, sends, recvs = V_CALLS[method]
    comm = comms2[0]

    def buffer(count):
        return arrays.argument(arrays.make(np.zeros(count, np.float32), comm.device))

    def rejected(word, *arguments):
        with pytest.raises((TypeError, ValueError), match=word):
            testing.run_with_deadline(lambda: call(comm, *arguments), 10)

    rejected("send", buffer(sends + 1), buffer(recvs), good)
    rejected("recv", buffer(sends), buffer(recvs + 1), good)
    rejected("counts", buffer(sends), buffer(recvs), [*good, 0])
    rejected("counts", buffer(sends), buffer(recvs), good[:1])
    rejected("counts", buffer(sends), buffer(recvs), [-2, 7])
    rejected("recv", buffer(sends), arrays.argument(arrays.make(np.zeros(recvs, np.int32), comm.device)), good)


# Lists of buffers, one per rank


def listed(lib, comm, datatype, counts):
    return [empty(lib, comm, datatype, count) for count in counts]


def arguments(lib, parts):
    return [lib.argument(part) for part in parts]


def same(lib, parts, expected):
    return all(np.array_equal(lib.read(part), want) for part, want in zip(parts, expected, strict=True))


@every_count
@of_types(*DataType)
def test_all_gather_into_a_list(comms, each, arrays, counts, datatype):
    counts = counts(len(comms))
    expected = [values(datatype, r, count) for r, count in enumerate(counts)]
    sends = [arrays.make(expected[r], comm.device) for r, comm in enumerate(comms)]
    recvs = [listed(arrays, comm, datatype, counts) for comm in comms]
    each(lambda r, comm: comm.all_gather(arrays.argument(sends[r]), arguments(arrays, recvs[r])))
    for r, recv in enumerate(recvs):
        assert same(arrays, recv, expected), f"{datatype!r}, counts {counts}, rank {r}"


@every_count
@of_types_and_operators(DataType.FLOAT32, DataType.BFLOAT16, DataType.INT8)
def test_reduce_scatter_of_a_list(comms, each, arrays, counts, op, datatype):
    nranks = len(comms)
    counts = counts(nranks)
    total = max(sum(counts), 1)
    ends = np.cumsum(counts)[:-1]
    samples = [np.split(conformance.sample(datatype, op, r, total)[: sum(counts)], ends) for r in range(nranks)]
    sends = [[arrays.make(part, comm.device) for part in samples[r]] for r, comm in enumerate(comms)]
    recvs = listed_each(arrays, comms, datatype, counts)
    case = conformance.Case("reduce_scatter", datatype, op)
    ops = [conformance.Operators(comm).get(case) or op for comm in comms]
    each(lambda r, comm: comm.reduce_scatter(arguments(arrays, sends[r]), arrays.argument(recvs[r]), ops[r]))
    whole = conformance.reduced(datatype, op, nranks, total)[: sum(counts)]
    bound = conformance.tolerance(datatype, op, nranks, total)
    bounds = [None] * nranks if bound is None else np.split(bound[: sum(counts)], ends)
    for r, expected in enumerate(np.split(whole, ends)):
        wrong = conformance.differences(arrays.read(recvs[r]), expected, bounds[r])
        assert not wrong, f"{datatype!r} {op}, counts {counts}, rank {r}: {wrong}"


def listed_each(lib, comms, datatype, counts):
    return [empty(lib, comm, datatype, count) for comm, count in zip(comms, counts, strict=True)]


@every_count
@of_types(DataType.INT8, DataType.FLOAT16, DataType.FLOAT64)
def test_all_to_all_of_lists(comms, each, arrays, counts, datatype):
    nranks = len(comms)
    matrix = [[counts(nranks)[(i + j) % nranks] * (1 + i % 2) for j in range(nranks)] for i in range(nranks)]
    outgoing = [np.split(values(datatype, i, sum(row)), np.cumsum(row)[:-1]) for i, row in enumerate(matrix)]
    sends = [[arrays.make(part, comm.device) for part in outgoing[i]] for i, comm in enumerate(comms)]
    recvs = [listed(arrays, comm, datatype, [row[j] for row in matrix]) for j, comm in enumerate(comms)]
    each(lambda r, comm: comm.all_to_all(arguments(arrays, sends[r]), arguments(arrays, recvs[r])))
    for j, recv in enumerate(recvs):
        assert same(arrays, recv, [row[j] for row in outgoing]), f"{datatype!r}, rank {j}"


@every_count
@of_types(DataType.UINT8, DataType.FLOAT32)
@pytest.mark.parametrize("root", [0, -1], ids=["first", "last"])
@pytest.mark.parametrize("others", [None, []], ids=["None elsewhere", "a list elsewhere"])
def test_gather_and_scatter_with_lists(comms, each, arrays, counts, datatype, root, others):
    nranks = len(comms)
    counts, root = counts(nranks), root % nranks
    expected = [values(datatype, r, count) for r, count in enumerate(counts)]
    sends = [arrays.make(part, comm.device) for part, comm in zip(expected, comms, strict=True)]
    gathered = listed(arrays, comms[root], datatype, counts)
    each(
        lambda r, comm: comm.gather(
            arrays.argument(sends[r]), arguments(arrays, gathered) if r == root else others, root=root
        )
    )
    assert same(arrays, gathered, expected), f"{datatype!r}, counts {counts}"
    back = listed_each(arrays, comms, datatype, counts)
    each(
        lambda r, comm: comm.scatter(
            arguments(arrays, gathered) if r == root else others, arrays.argument(back[r]), root=root
        )
    )
    assert same(arrays, back, expected), f"{datatype!r}, counts {counts}"


def test_lists_in_place(comms, each, arrays):
    nranks = len(comms)
    counts = [3 + r for r in range(nranks)]

    def lists(base):
        return [
            [arrays.make(np.full(count, base * r, np.float32), comm.device) for count in counts]
            for r, comm in enumerate(comms)
        ]

    def own(parts):
        return [arrays.argument(part[r]) for r, part in enumerate(parts)]

    parts = lists(1)
    each(lambda r, comm: comm.all_gather(own(parts)[r], arguments(arrays, parts[r])))
    whole = [np.full(count, i, np.float32) for i, count in enumerate(counts)]
    assert all(same(arrays, part, whole) for part in parts)
    each(lambda r, comm: comm.reduce_scatter(arguments(arrays, parts[r]), own(parts)[r]))
    assert same(arrays, [part[r] for r, part in enumerate(parts)], [nranks * part for part in whole])
    parts = lists(2)
    each(lambda r, comm: comm.gather(own(parts)[r], arguments(arrays, parts[r])))
    assert same(arrays, parts[0], [2 * part for part in whole])
    each(lambda r, comm: comm.scatter(arguments(arrays, parts[r]), own(parts)[r]))
    assert same(arrays, [part[r] for r, part in enumerate(parts)], [2 * part for part in whole])


def test_lists_of_complex_and_bool_arrays(host_engine, comms2):
    sends = [np.array([1 + 2j]), np.array([3j, 4])]
    recvs = [[np.zeros(1, complex), np.zeros(2, complex)] for _ in comms2]
    flags = [[np.array([rank == 0]), np.array([False, rank == 1])] for rank in range(2)]
    found = [np.zeros(1, bool), np.zeros(2, bool)]

    def call():
        with ncclpy.group():
            for r, comm in enumerate(comms2):
                comm.all_gather(sends[r], recvs[r])
                comm.reduce_scatter(flags[r], found[r])

    testing.run_with_deadline(call)
    assert [[part.tolist() for part in recv] for recv in recvs] == [[[1 + 2j], [3j, 4]]] * 2
    assert [part.tolist() for part in found] == [[True], [False, True]]


def zeros(*counts, dtype=np.float32):
    return [np.zeros(count, dtype) for count in counts]


ONE = np.zeros(3, np.float32)
READ_ONLY = np.broadcast_to(np.float32(0), 3).copy()
READ_ONLY.flags.writeable = False
MISFITS = {
    "too few": (lambda c: c.all_gather(ONE, zeros(3)), r"recv: expected a list of 2 buffers, one a rank, got 1"),
    "too many": (lambda c: c.reduce_scatter(zeros(3, 3, 3), ONE), r"send: expected a list of 2 buffers.* got 3"),
    "none": (lambda c: c.gather(ONE, []), r"recv: expected a list of 2 buffers.* got 0"),
    "own part": (
        lambda c: c.all_gather(ONE, zeros(4, 3)),
        r"recv\[0\]: all_gather needs 3 elements to fit send, got 4",
    ),
    "own part of send": (
        lambda c: c.reduce_scatter(zeros(2, 9), ONE),
        r"send\[0\]: reduce_scatter needs 3 elements to fit recv, got 2",
    ),
    "own part of the root": (lambda c: c.gather(ONE, zeros(2, 9)), r"recv\[0\]: gather needs 3 .* fit send, got 2"),
    "own part of the sender": (lambda c: c.scatter(zeros(2, 9), ONE), r"send\[0\]: scatter needs 3 .*, got 2"),
    "own parts": (
        lambda c: c.all_to_all(zeros(2, 1), zeros(3, 1)),
        r"recv\[0\]: all_to_all needs 2 elements to fit send\[0\], got 3",
    ),
    "type": (
        lambda c: c.all_gather(ONE, [ONE.copy(), np.zeros(2)]),
        r"recv\[1\]: data type float64 is not that of send, float32",
    ),
    "type of two lists": (
        lambda c: c.all_to_all(zeros(1, 1), zeros(1) + zeros(1, dtype=np.int32)),
        r"recv\[1\]: data type int32 is not that of send\[0\], float32",
    ),
    "type within a list": (
        lambda c: c.all_to_all(zeros(1) + zeros(1, dtype=np.int8), zeros(1, 1)),
        r"send\[1\]: data type int8 is not that of send\[0\], float32",
    ),
    "read-only": (lambda c: c.gather(ONE, [ONE.copy(), READ_ONLY]), r"recv\[1\]: the array is read-only"),
    "strided": (lambda c: c.scatter([ONE, np.zeros(4, np.float32)[::2]], ONE.copy()), r"send\[1\]: .*not contiguous"),
    "no buffer": (lambda c: c.all_gather(ONE, [ONE.copy(), None]), r"recv\[1\]: cannot take memory from .*NoneType"),
    "one array for all": (
        lambda c: c.all_gather(ONE, zeros(3) * 2),
        r"recv\[1\]: it overlaps recv\[0\] .* all_gather needs memory of its own for each part that receives",
    ),
    "send is another's part": (
        lambda c: c.all_gather(ONE, [ONE.copy(), ONE]),
        r"send: it overlaps recv\[1\] .* works in place only where send is recv\[0\], this rank's part",
    ),
    "recv is another's part": (
        lambda c: c.scatter([ONE.copy(), ONE], ONE),
        r"recv: it overlaps send\[1\] .* works in place only where recv is send\[0\]",
    ),
    "in place": (
        lambda c: c.all_to_all([ONE, ONE.copy()], [ONE.copy(), ONE]),
        r"recv\[1\]: it overlaps send\[0\] .* all_to_all cannot work in place",
    ),
    "a list and a buffer": (
        lambda c: c.all_to_all(zeros(1, 1), np.zeros(2, np.float32)),
        r"send, recv: all_to_all takes two buffers or two lists of buffers, got list and ndarray",
    ),
    "the wrong one": (lambda c: c.all_gather(zeros(1, 1), ONE), r"send: cannot take memory from builtins.list"),
    "no lists here": (lambda c: c.all_reduce(zeros(1, 1)), r"send: cannot take memory from builtins.list"),
    "no type to reduce": (
        lambda c: c.reduce_scatter(zeros(2, 2, dtype="M8[s]"), np.zeros(2, "M8[s]")),
        r"NCCL cannot reduce datetime64",
    ),
    "no buffer to receive": (lambda c: c.scatter(zeros(1, 1), None), r"recv: every rank of a scatter needs a buffer"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_lists_that_do_not_fit_are_refused(host_engine, comms2, misfit):
    call, words = MISFITS[misfit]
    with pytest.raises((TypeError, ValueError), match=f"^{words}" if "NCCL" not in words else words):
        testing.run_with_deadline(lambda: call(comms2[0]), 10)


# Point to point


@of_types(*DataType)
def test_ring(comms, each, arrays, datatype):
    nranks = len(comms)
    for count in (1, 17, 1023):
        sends = [arrays.make(values(datatype, r, count), comm.device) for r, comm in enumerate(comms)]
        recvs = [empty(arrays, comm, datatype, count) for comm in comms]

        def issue(r, comm, sends=sends, recvs=recvs):
            with ncclpy.group():
                comm.send(arrays.argument(sends[r]), (r + 1) % nranks)
                comm.recv(arrays.argument(recvs[r]), (r - 1) % nranks)

        each(issue)
        for r, recv in enumerate(recvs):
            expected = values(datatype, (r - 1) % nranks, count)
            assert np.array_equal(arrays.read(recv), expected), f"{datatype!r}, count {count}, rank {r}"


def test_large_message(comms2, arrays):
    count = 1 << 22
    sent = np.random.default_rng(3).integers(0, 255, count, dtype=np.uint8)
    send, recv = arrays.make(sent, 0), arrays.make(np.zeros(count, np.uint8), 1)

    def rank(rank):
        if rank.rank == 0:
            comms2[0].send(arrays.argument(send), 1)
        else:
            comms2[1].recv(arrays.argument(recv), 0)
        ncclpy.synchronize(rank.device)

    testing.run_threads(2, rank, comms=comms2)
    assert np.array_equal(arrays.read(recv), sent)


def test_ping_pong_without_groups(comms2, arrays):
    rounds = 30

    def rank(rank):
        comm, other = comms2[rank.rank], 1 - rank.rank
        part = arrays.make(np.zeros(3, np.int64), comm.device)
        for turn in range(rounds):
            if turn % 2 == rank.rank:
                part = arrays.make(arrays.read(part) + 1, comm.device)
                comm.send(arrays.argument(part), other)
            else:
                comm.recv(arrays.argument(part), other)
        return arrays.read(part).tolist()

    found = testing.run_threads(2, rank, comms=comms2)
    assert found == [[rounds] * 3, [rounds] * 3]


def test_empty_messages(comms2, arrays):
    def rank(rank):
        part = arrays.argument(arrays.make(np.zeros(0, np.float32), rank.device))
        with ncclpy.group():
            comms2[rank.rank].send(part, 1 - rank.rank)
            comms2[rank.rank].recv(part, 1 - rank.rank)

    testing.run_threads(2, rank, comms=comms2)


# Nonblocking communicators and explicit streams run the same cases, a part of the matrix each.


def some_cases(nranks: int) -> list[conformance.Case]:
    """Return every 37th case of the matrix: all collectives, types and operators occur."""
    return conformance.cases(nranks)[::37]


def test_nonblocking_communicators(arrays):
    def rank(rank):
        comm = rank.init(config=ncclpy.Config(blocking=False))
        return conformance.run_rank(arrays, comm, some_cases(rank.nranks))

    wrong = [message for messages in testing.run_threads(3, rank) for message in messages]
    assert not wrong, conformance.report(wrong)


def test_nonblocking_groups(arrays):
    testing.need_devices(4)
    uid = ncclpy.get_unique_id()
    config = ncclpy.Config(blocking=False)
    with ncclpy.group():
        comms = [ncclpy.Communicator.init(4, rank, uid, device=rank, config=config) for rank in range(4)]
    wrong = testing.run_with_deadline(lambda: conformance.run_group(arrays, comms, some_cases(4)), 60)
    assert not wrong, conformance.report(wrong)
    testing.close_all(comms)


def test_split_communicators(comms4, arrays):
    def rank(rank):
        with comms4[rank.rank].split(rank.rank % 2, -rank.rank) as child:
            return conformance.run_rank(arrays, child, some_cases(2))

    wrong = [message for messages in testing.run_threads(4, rank, comms=comms4) for message in messages]
    assert not wrong, conformance.report(wrong)


def test_explicit_streams_and_many_operations_in_flight(comms, arrays):
    # Every case is enqueued on the stream before the first result is read.
    nranks = len(comms)
    matrix = [case for case in some_cases(nranks) if case.op != conformance.PRE_MUL_SUM]

    def rank(rank):
        comm = comms[rank.rank]
        with ncclpy.Stream(comm.device) as stream:
            calls = [case.prepare(arrays, rank.rank, nranks, comm.device) for case in matrix]
            ncclpy.synchronize(comm.device)
            for case, call in zip(matrix, calls, strict=True):
                case.issue(arrays, comm, call, stream=stream)
            stream.synchronize()
            pairs = zip(matrix, calls, strict=True)
            return [found for case, call in pairs if (found := case.check(arrays, call, rank.rank, nranks))]

    wrong = [message for messages in testing.run_threads(nranks, rank, comms=comms) for message in messages]
    assert not wrong, conformance.report(wrong)


def test_aggregated_cases_in_one_group(comms, arrays):
    nranks = len(comms)
    matrix = [case for case in some_cases(nranks) if case.op != conformance.PRE_MUL_SUM]
    calls = [[case.prepare(arrays, r, nranks, comm.device) for case in matrix] for r, comm in enumerate(comms)]

    def issue():
        with ncclpy.group():
            for comm, mine in zip(comms, calls, strict=True):
                for case, call in zip(matrix, mine, strict=True):
                    case.issue(arrays, comm, call)

    testing.run_with_deadline(issue)
    wrong = [
        found
        for r, mine in enumerate(calls)
        for case, call in zip(matrix, mine, strict=True)
        if (found := case.check(arrays, call, r, nranks))
    ]
    assert not wrong, conformance.report(wrong)


def test_operator_is_only_for_its_communicator_and_type(arrays, comms2):
    data = arrays.make(np.ones(4, np.float32), 0)
    doubles = arrays.make(np.ones(4, np.float64), 0)
    other = arrays.make(np.ones(4, np.float32), 1)
    with comms2[0].pre_mul_sum(2.0, "float32") as op:
        with pytest.raises(ValueError, match="op: this operator was made for another communicator"):
            comms2[1].all_reduce(arrays.argument(other), op=op)
        with pytest.raises(TypeError, match=r"op: this operator was made for .*, not for float64"):
            comms2[0].all_reduce(arrays.argument(doubles), op=op)
    with pytest.raises(ValueError, match="closed"):
        comms2[0].all_reduce(arrays.argument(data), op=op)
