"""The conformance matrix and its numpy model: the result of every collective, for every type and operator.

A `Case` is one call. It makes a rank's buffers, issues the call and compares with numpy, whether ranks are threads,
one thread with groups, or processes. Receive buffers are poisoned and followed by a guard, so that a missing or
surplus element is detected; out of place, the send buffer must not change.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np

import ncclpy
from ncclpy import DataType, ReduceOp
from testing import DTYPES, arrays

RANKS = (1, 2, 3, 4, 8)
SIZES = (0, 1, 17, 1023)
LARGE = 1 << 20
GUARD = 16
POISON = 0x5A

PRE_MUL_SUM = "pre_mul_sum"
OPS = ("sum", "prod", "max", "min", "avg", PRE_MUL_SUM)
REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")
MOVES = ("broadcast", "all_gather", "all_to_all", "gather", "scatter")
IN_PLACE = ("all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather", "gather", "scatter")

# Bits of the significand with the hidden one: integers up to 2**bits are exact, the unit roundoff is 2**-bits.
BITS = {
    DataType.FLOAT16: 11,
    DataType.BFLOAT16: 8,
    DataType.FLOAT32: 24,
    DataType.FLOAT64: 53,
    DataType.FLOAT8E4M3: 4,
    DataType.FLOAT8E5M2: 3,
}


def worlds(long=(4,), slow=()) -> list:
    """Return the numbers of ranks as parameters; those in `long` run in campaigns only, those in `slow` in CI."""
    import pytest

    marks = {**dict.fromkeys(slow, pytest.mark.slow), **dict.fromkeys(long, pytest.mark.campaign)}
    return [pytest.param(n, marks=marks.get(n, ())) for n in RANKS]


def is_float(datatype: DataType) -> bool:
    """Return whether NCCL's type is a floating-point one."""
    return datatype in BITS


def scalar_of(datatype: DataType):
    """Return the factor of pre_mul_sum: a power of two for floats, so that the product is exact."""
    return 0.5 if is_float(datatype) else 3


@functools.cache
def sample(datatype: DataType, op: str, rank: int, total: int) -> np.ndarray:
    """Return the values of `rank`; their reduction over up to 8 ranks is exact if the type permits it.

    Integers take their whole range (sums and products wrap in NCCL as in numpy), for avg an eighth of it, since the
    sum is not allowed to wrap before the division. Floats are small integers for sums, so that every partial sum fits
    the significand in any order; powers of two for products; anything for max and min, which never round.
    """
    dtype = DTYPES[datatype]
    random = np.random.default_rng((datatype, OPS.index(op), rank, total))
    if not is_float(datatype):
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        if op == "avg":
            low, high = -(-low // 8), high // 8
        return random.integers(low, high, total, dtype=dtype, endpoint=True)
    if op == "prod":
        values = random.choice([0.5, 1.0, 2.0, -1.0], total)
    elif op in ("max", "min"):
        values = random.normal(0, 10, total)
    else:
        bound = min(1000, max(1, 2 ** BITS[datatype] // 8))
        values = random.integers(-bound, bound, total, endpoint=True)
    return values.astype(dtype)


@functools.cache
def reduced(datatype: DataType, op: str, nranks: int, total: int) -> np.ndarray:
    """Return numpy's reduction of every rank's `sample`."""
    dtype = DTYPES[datatype]
    stack = np.stack([sample(datatype, op, rank, total) for rank in range(nranks)])
    if is_float(datatype):
        stack = stack.astype(np.float64)
    if op == "prod":
        result = np.multiply.reduce(stack, axis=0, dtype=stack.dtype)
    elif op in ("max", "min"):
        result = getattr(np, op)(stack, axis=0)
    elif op == PRE_MUL_SUM:
        result = np.add.reduce(stack * stack.dtype.type(scalar_of(datatype)), axis=0, dtype=stack.dtype)
    else:
        result = np.add.reduce(stack, axis=0, dtype=stack.dtype)
    if op == "avg":
        # NCCL divides integers towards zero.
        result = result / nranks if is_float(datatype) else np.sign(result) * (abs(result) // dtype.type(nranks))
    return result.astype(dtype)


@functools.cache
def tolerance(datatype: DataType, op: str, nranks: int, total: int) -> np.ndarray | None:
    """Return the allowed difference from numpy, or ``None`` for exact results.

    Only the average of floats over a number of ranks that is no power of two rounds: once for 1/n, once for each
    product with it, once for each addition, and once more in the cast, each by at most the unit roundoff times the
    sum of the magnitudes divided by n.
    """
    if op != "avg" or not is_float(datatype) or nranks & (nranks - 1) == 0:
        return None
    magnitudes = sum(abs(sample(datatype, op, rank, total).astype(np.float64)) for rank in range(nranks))
    return (nranks + 2) * 2.0 ** -BITS[datatype] * magnitudes / nranks


@dataclasses.dataclass(frozen=True)
class Case:
    """One collective call: collective, type, operator, placement of buffers, and elements per rank."""

    collective: str
    datatype: DataType
    op: str = "sum"
    in_place: bool = False
    count: int = 17
    root: int = 0

    def __str__(self):
        op = f" {self.op}" if self.collective in REDUCTIONS else ""
        place = "in place" if self.in_place else "out of place"
        return f"{self.collective} {self.datatype.name.lower()}{op} {place}, count {self.count}, root {self.root}"

    def prepare(self, lib, rank: int, nranks: int, device: int) -> Call:
        """Make the buffers that the collective uses on this rank."""
        whole = self.count * nranks
        pool = max(whole, SIZES[-1] * 8)
        mine = sample(self.datatype, self.op, rank, pool)
        chunk = slice(rank * self.count, (rank + 1) * self.count)
        at_root = rank == self.root
        sent = mine[: whole if self.collective in ("reduce_scatter", "all_to_all", "scatter") else self.count]
        expected = self._expected(rank, nranks, pool)

        sends = at_root or self.collective not in ("scatter", "broadcast")
        if not self.in_place:
            send = lib.make(sent, device) if sends else None
            recv = guarded = None
            if expected is not None:
                guarded = lib.make(_poison(len(expected) + GUARD, self.datatype), device)
                recv = guarded[: len(expected)]
            return Call(send, recv, guarded, expected, sent if sends else None)
        if self.collective in ("all_reduce", "reduce", "broadcast"):
            both = lib.make(sent if sends else _poison(self.count, self.datatype), device)
            return Call(both, None, both if expected is not None else None, expected)
        if self.collective in ("all_gather", "gather") and expected is not None:
            base = _poison(whole, self.datatype)
            base[chunk] = sent
            recv = lib.make(base, device)
            return Call(recv[chunk], recv, recv, expected)
        if self.collective in ("reduce_scatter", "scatter") and sends:
            send = lib.make(sent, device)
            return Call(send, send[chunk], send[chunk], expected)
        return dataclasses.replace(self, in_place=False).prepare(lib, rank, nranks, device)

    def _expected(self, rank: int, nranks: int, pool: int) -> np.ndarray | None:
        """Return this rank's expected result, ``None`` if the collective gives it none."""
        count, at_root = self.count, rank == self.root
        if self.collective in REDUCTIONS:
            total = reduced(self.datatype, self.op, nranks, pool)
            if self.collective == "reduce_scatter":
                return total[rank * count : (rank + 1) * count]
            return total[:count] if self.collective == "all_reduce" or at_root else None
        parts = [sample(self.datatype, self.op, r, pool) for r in range(nranks)]
        if self.collective == "broadcast":
            return parts[self.root][:count]
        if self.collective == "scatter":
            return parts[self.root][rank * count : (rank + 1) * count]
        if self.collective == "all_to_all":
            return np.concatenate([part[rank * count : (rank + 1) * count] for part in parts])
        if self.collective == "all_gather" or at_root:
            return np.concatenate([part[:count] for part in parts])
        return None

    def issue(self, lib, comm, call: Call, *, op=None, stream=None) -> None:
        """Make the call on one communicator; `op` stands for pre_mul_sum's operator."""
        send, recv = (None if array is None else lib.argument(array) for array in (call.send, call.recv))
        options = {"stream": stream} if stream is not None else {}
        if self.collective in REDUCTIONS:
            options["op"] = ReduceOp[self.op.upper()] if op is None else op
        if self.collective in ("reduce", "broadcast", "gather", "scatter"):
            options["root"] = self.root
        getattr(comm, self.collective)(send, recv, **options)

    def check(self, lib, call: Call, rank: int, nranks: int) -> str | None:
        """Return what is wrong with one rank's result, or ``None``."""
        if call.result is not None:
            got = lib.read(call.result)
            wrong = differences(got[: len(call.expected)], call.expected, self._tolerance(rank, nranks))
            if wrong:
                return f"{self}, rank {rank} of {nranks}: {wrong}"
            if np.any(got[len(call.expected) :].view(np.uint8) != POISON):
                return f"{self}, rank {rank} of {nranks}: wrote past the end of recv"
        if call.sent is not None and np.any(lib.read(call.send).view(np.uint8) != call.sent.view(np.uint8)):
            return f"{self}, rank {rank} of {nranks}: changed the send buffer"
        return None

    def _tolerance(self, rank, nranks):
        if self.collective not in REDUCTIONS:
            return None
        bound = tolerance(self.datatype, self.op, nranks, max(self.count * nranks, SIZES[-1] * 8))
        if bound is None:
            return None
        start = rank * self.count if self.collective == "reduce_scatter" else 0
        return bound[start : start + self.count]


@dataclasses.dataclass
class Call:
    """One rank's buffers of a case, and their expected contents."""

    send: object
    recv: object
    result: object
    expected: np.ndarray | None
    sent: np.ndarray | None = None  # contents that `send` must keep; None if it may change


def _poison(count: int, datatype: DataType) -> np.ndarray:
    dtype = DTYPES[datatype]
    return np.full(count * dtype.itemsize, POISON, np.uint8).view(dtype)


def differences(got: np.ndarray, expected: np.ndarray, bound: np.ndarray | None) -> str:
    if bound is None:
        wrong = got != expected
    else:
        wrong = ~(abs(got.astype(np.float64) - expected.astype(np.float64)) <= bound)
    if not np.any(wrong):
        return ""
    where = np.flatnonzero(wrong)
    first = where[0]
    return f"{len(where)} of {len(got)} elements differ, first [{first}]: got {got[first]}, expected {expected[first]}"


def cases(nranks: int, collectives=REDUCTIONS + MOVES) -> list[Case]:
    """Return the whole matrix of small sizes, and a few large ones, for a number of ranks."""
    found: list[Case] = []
    for collective in collectives:
        ops = OPS if collective in REDUCTIONS else ("sum",)
        places = (False, True) if collective in IN_PLACE else (False,)
        for datatype, op, in_place, count in itertools.product(DataType, ops, places, SIZES):
            if _nccl_refuses(datatype, op, nranks):
                continue
            found.append(Case(collective, datatype, op, in_place, count, root=len(found) % nranks))
        for datatype in (DataType.FLOAT32, DataType.UINT8):
            root = nranks - 1
            found.append(Case(collective, datatype, "sum", collective in IN_PLACE, LARGE // nranks, root))
    return found


def _nccl_refuses(datatype: DataType, op: str, nranks: int) -> bool:
    """Return whether the loaded NCCL is known to answer ncclInvalidArgument to this.

    NCCL up to 2.30.7 at least scales the 8-bit floats of a single rank only in code that its build leaves out
    (src/device/onerank.cu asks for __CUDA_ARCH__ on the host's side).
    """
    small = datatype in (DataType.FLOAT8E4M3, DataType.FLOAT8E5M2)
    return small and op == PRE_MUL_SUM and nranks == 1 and ncclpy.library().engine == "cuda"


class Operators:
    """The pre_mul_sum operators of one communicator, one per type, made at first use."""

    def __init__(self, comm):
        self._comm = comm
        self._made: dict = {}

    def get(self, case: Case):
        """Return the operator of a case, ``None`` if it is a built-in one."""
        if case.op != PRE_MUL_SUM or case.collective not in REDUCTIONS:
            return None
        if case.datatype not in self._made:
            self._made[case.datatype] = self._comm.pre_mul_sum(scalar_of(case.datatype), case.datatype)
        return self._made[case.datatype]


def run_rank(lib, comm, matrix: list[Case]) -> list[str]:
    """Run the matrix on one rank in its own thread or process, and return what was wrong.

    A wrong result does not end the run: the rank stays in step with the others.
    """
    operators = Operators(comm)
    wrong = []
    for case in matrix:
        call = case.prepare(lib, comm.rank, comm.nranks, comm.device)
        case.issue(lib, comm, call, op=operators.get(case))
        message = case.check(lib, call, comm.rank, comm.nranks)
        if message:
            wrong.append(message)
    return wrong


def run_group(lib, comms, matrix: list[Case]) -> list[str]:
    """Run the matrix on all ranks from one thread, one group per case, and return what was wrong."""
    operators = [Operators(comm) for comm in comms]
    wrong = []
    for case in matrix:
        calls = [case.prepare(lib, comm.rank, comm.nranks, comm.device) for comm in comms]
        ops = [made.get(case) for made in operators]
        with ncclpy.group():
            for comm, call, op in zip(comms, calls, ops, strict=True):
                case.issue(lib, comm, call, op=op)
        found = (case.check(lib, call, comm.rank, comm.nranks) for comm, call in zip(comms, calls, strict=True))
        wrong += filter(None, found)
    return wrong


def run_process(rank) -> list[str]:
    """Run the whole matrix as one of several processes; the function that `run_processes` calls."""
    return run_rank(arrays(), rank.init(timeout=60), cases(rank.nranks))


def report(wrong: list[str]) -> str:
    """Return the first few messages and how many there are."""
    more = f"\n... and {len(wrong) - 12} more" if len(wrong) > 12 else ""
    return f"{len(wrong)} wrong results:\n" + "\n".join(wrong[:12]) + more
