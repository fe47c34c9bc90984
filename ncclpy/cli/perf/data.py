"""The data that ranks send and the results that they must get back.

Every rank sends random values: a block of `PERIOD` elements, repeated, so that the result of a reduction has to be
computed for one block only. The period is a prime, so that data at a wrong offset do not look right.

Values for reductions are chosen so that every partial result is exact in the data type, for any order of the
operands and any precision of the additions. Then the result must be right to the last bit. The one exception
is the average of floats over a number of ranks that is no power of two, which gets an error bound.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ncclpy.cli.perf.datatypes import TYPES, Type

# Untyped: releases of numpy differ in the type of a reduction over a list of arrays.
_add: Any = np.add
_maximum: Any = np.maximum
_minimum: Any = np.minimum
_multiply: Any = np.multiply

# Elements in a block: a prime.
PERIOD = 131071

_lock = threading.Lock()


@dataclass(frozen=True)
class Block:
    """One period of data as bits. Where other bits may be right too, `low` and `high` bound the right values."""

    bits: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None


@dataclass(frozen=True)
class Data:
    """What every rank sends, and the reduction of it."""

    inputs: list[Block]
    reduced: Block | None

    def block(self, source: int | None) -> Block:
        """Return the data of rank `source`, or the reduction over all ranks for ``None``."""
        if source is not None:
            return self.inputs[source]
        assert self.reduced is not None
        return self.reduced


def scalar(rank: int) -> int:
    """Return the factor of `rank`'s mulsum operator, as in nccl-tests."""
    return 1 + rank % 2


def make(type_name: str, op: str | None, nranks: int, elements: int, seed: tuple[int, ...]) -> Data:
    """Return the data for one run.

    Parameters
    ----------
    type_name
        A key of `TYPES`.
    op
        ``"sum" "prod" "max" "min" "avg" "mulsum"``, or ``None`` if nothing is reduced.
    nranks
        The number of ranks.
    elements
        The number of elements in use; a block has at most so many.
    seed
        Numbers that identify the run; other numbers give other data.
    """
    # One process may run several ranks in threads: they share the data that one of them has made.
    with _lock:
        return _make(type_name, op, nranks, max(1, min(elements, PERIOD)), seed)


@lru_cache(maxsize=2)
def _make(type_name: str, op: str | None, nranks: int, length: int, seed: tuple[int, ...]) -> Data:
    kind = TYPES[type_name]
    common = _generator(seed, nranks)
    own = [_generator(seed, nranks, rank) for rank in range(nranks)]
    if op is None:
        return Data([Block(_random_bits(kind, generator, length)) for generator in own], None)
    if kind.digits == 0:
        return _integers(kind, op, own, length)
    return _floats(kind, op, common, own, length)


def _generator(seed: tuple[int, ...], *more: int) -> np.random.Generator:
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence([*seed, *more])))


def _random_bits(kind: Type, generator: np.random.Generator, length: int) -> np.ndarray:
    return np.frombuffer(generator.bytes(length * kind.itemsize), kind.bits)


def _integers(kind: Type, op: str, own: list[np.random.Generator], length: int) -> Data:
    """Return data of an integer type. All bits are random: integers wrap around, so sums and products stay exact."""
    assert kind.native is not None
    nranks = len(own)
    if op == "avg":
        # The sum must not wrap around, and older NCCLs divide negative integers as if they were unsigned.
        limit = np.iinfo(kind.native).max // nranks
        inputs = [generator.integers(0, limit, length, kind.native, endpoint=True) for generator in own]
        average = _add.reduce(inputs, dtype=kind.native) // nranks
        return Data([Block(values.view(kind.bits)) for values in inputs], Block(kind.encode(average)))
    inputs = [_random_bits(kind, generator, length) for generator in own]
    if op == "prod":
        inputs = [bits | kind.bits.type(1) for bits in inputs]  # even factors would soon give zero
        result = _multiply.reduce(inputs, dtype=kind.bits)
    elif op == "mulsum":
        result = sum((bits * kind.bits.type(scalar(rank)) for rank, bits in enumerate(inputs)), start=inputs[0] * 0)
    elif op == "sum":
        result = _add.reduce(inputs, dtype=kind.bits)
    else:
        compare = _maximum if op == "max" else _minimum
        result = compare.reduce([bits.view(kind.native) for bits in inputs])
    return Data([Block(bits) for bits in inputs], Block(np.ascontiguousarray(result).view(kind.bits)))


def _floats(kind: Type, op: str, common: np.random.Generator, own: list[np.random.Generator], length: int) -> Data:
    """Return data of a float type: small integers times a power of two, which is the same on all ranks per element."""
    nranks = len(own)
    exact = 1 << kind.digits
    # For avg the scale is at least 1, which leaves smaller exponents for the division by the number of ranks.
    scale = np.ldexp(1.0, common.integers(0 if op == "avg" else -3, 3, length, endpoint=True))
    turn = common.integers(0, nranks, length)
    weights = [scalar(rank) if op == "mulsum" else 1 for rank in range(nranks)]
    inputs = []
    for rank, generator in enumerate(own):
        place = (rank + turn) % nranks  # the ranks' roles differ from element to element
        if op == "prod":
            inputs.append(_factor(generator, place, nranks, exact, length))
            continue
        if op in ("max", "min"):
            amplitude = exact - 1
        else:
            amplitude = max(1, exact // sum(weights))
        values = generator.integers(-amplitude, amplitude, length, endpoint=True) * scale
        if op not in ("max", "min") and sum(weights) > exact:
            values[place >= exact // max(weights)] = 0.0  # with so many ranks only some may contribute
        inputs.append(values)
    blocks = [Block(kind.encode(values)) for values in inputs]
    if op in ("max", "min"):
        result = (_maximum if op == "max" else _minimum).reduce(inputs)
    elif op == "prod":
        result = _multiply.reduce(inputs)
    else:
        result = _add.reduce([values * weight for values, weight in zip(inputs, weights, strict=True)])
        if op == "avg":
            result = result / nranks
    error: float | np.ndarray = 0.0
    if op == "avg" and nranks & nranks - 1:
        # x is multiplied by 1/nranks, which rounds twice, and then each addition rounds once.
        error = (nranks + 2) * 2.0**-kind.digits * _add.reduce(np.abs(inputs)) / nranks
    return Data(blocks, Block(kind.encode(result), result - error, result + error))


def _factor(generator: np.random.Generator, place: np.ndarray, nranks: int, exact: int, length: int) -> np.ndarray:
    """Return a rank's factors of an exact product; the roles of the ranks (`place`) differ between the elements.

    One rank gives an odd number; with three or more ranks, a second one doubles and a third one halves. All ranks
    choose a sign.
    """
    values = np.where(generator.integers(0, 2, length), 1.0, -1.0)
    odd = generator.integers(0, exact // 2, length) * 2 + 1
    values[place == 0] *= odd[place == 0]
    if nranks > 2:
        values[place == 1] *= 2.0
        values[place == 2] *= 0.5
    return values
