"""Signatures of operations: as bytes, which all ranks must bring alike, and as text, to say how they differ."""

from __future__ import annotations

import enum
import functools
import struct
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from ncclpy.coordinator.buffers import KINDS
from ncclpy.errors import NcclError, listed, spans
from ncclpy.types import ReduceOp, Result

__all__ = [
    "Kind",
    "Signature",
    "as_error",
    "differences",
    "pack",
    "pack_all",
    "unpack",
    "unpack_all",
]


class Kind(enum.IntEnum):
    """Name the operations; the collectives have the numbers of `core.arguments.operation`."""

    ALL_REDUCE = KINDS["all_reduce"]
    BROADCAST = KINDS["broadcast"]
    ALL_GATHER = KINDS["all_gather"]
    REDUCE_SCATTER = KINDS["reduce_scatter"]
    ALL_TO_ALL = KINDS["all_to_all"]
    BARRIER = 32
    ALL_REDUCE_SPARSE = 33
    BEGINNING = 34  # no signature has this kind: at the beginning the ranks compare `session.Options` instead


class Signature(NamedTuple):
    """What an operation's array must have in common with the arrays of the other ranks.

    Attributes
    ----------
    kind
        The operation.
    dtype
        The array's type, as its package names it; "" if there is no array.
    datatype
        NCCL's number of the type that carries the data.
    unit
        Elements of `datatype` for one element of the array.
    op
        The operator, -1 for none.
    root
        The rank that sends, -1 for none.
    counted
        Whether counts were given; None for an operation without counts.
    on_device
        Whether the array is in device memory.
    prescale, postscale
        Factors of the input and of the result, or None.
    shape
        The part of the array's shape that must be the same: all dimensions, or all but the first.
    rows
        For a sparse array, the first dimension of its indices; -1 if these have one dimension only, and for other
        operations.
    """

    kind: Kind
    dtype: str = ""
    datatype: int = 0
    unit: int = 1
    op: int = -1
    root: int = -1
    counted: bool | None = None
    on_device: bool = False
    prescale: float | None = None
    postscale: float | None = None
    shape: tuple[int, ...] = ()
    rows: int = -1

    @property
    def elements(self) -> int:
        """Return how many elements of `datatype` an array of this shape has."""
        return self.unit * prod(self.shape)


#: kind, data type, unit, op, root, counted, on_device, which scales are given, prescale, postscale, rows, length of
#: `dtype`, number of dimensions.
_HEAD = struct.Struct("=BBIiiBBBddqBB")
_LENGTH = struct.Struct("=I")
_COUNTED = (None, False, True)


def pack(signature: Signature) -> bytes:
    """Return a signature as bytes; equal signatures give equal bytes."""
    s = signature
    name = s.dtype.encode()
    scales = (s.prescale is not None) | (s.postscale is not None) << 1
    head = _HEAD.pack(
        s.kind, s.datatype, s.unit, s.op, s.root, _COUNTED.index(s.counted), s.on_device, scales,
        s.prescale or 0.0, s.postscale or 0.0, s.rows, len(name), len(s.shape),
    )  # fmt: skip
    return head + name + struct.pack(f"={len(s.shape)}q", *s.shape)


@functools.lru_cache(maxsize=4096)
def unpack(packed: bytes) -> Signature:
    """Return what `pack` has packed."""
    kind, datatype, unit, op, root, counted, on_device, scales, prescale, postscale, rows, nname, ndim = (
        _HEAD.unpack_from(packed)
    )
    end = _HEAD.size + nname
    return Signature(
        Kind(kind),
        packed[_HEAD.size : end].decode(),
        datatype,
        unit,
        op,
        root,
        _COUNTED[counted],
        bool(on_device),
        prescale if scales & 1 else None,
        postscale if scales & 2 else None,
        struct.unpack_from(f"={ndim}q", packed, end),
        rows,
    )


def pack_all(signatures: Sequence[Signature]) -> bytes:
    """Return the signatures of operations that are brought together, as bytes."""
    parts = []
    for signature in signatures:
        packed = pack(signature)
        parts += [_LENGTH.pack(len(packed)), packed]
    return b"".join(parts)


@functools.lru_cache(maxsize=4096)
def unpack_all(packed: bytes) -> tuple[Signature, ...]:
    """Return what `pack_all` has packed."""
    found, offset = [], 0
    while offset < len(packed):
        (length,) = _LENGTH.unpack_from(packed, offset)
        offset += _LENGTH.size
        found.append(unpack(packed[offset : offset + length]))
        offset += length
    return tuple(found)


# Texts of the differences.


def _words(signature: Signature) -> dict[str, str]:
    """Return the properties of a signature as texts, by the names of the properties."""
    s = signature
    words = {"operation": s.kind.name.lower()}
    if s.kind in (Kind.BARRIER, Kind.BEGINNING):
        return words
    words["dtype"] = s.dtype
    if s.op >= 0:
        words["op"] = ReduceOp(s.op).name.lower()
    if s.prescale is not None or s.op >= 0:
        words["prescale"] = _scale(s.prescale)
        words["postscale"] = _scale(s.postscale)
    if s.kind in (Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.ALL_REDUCE_SPARSE):
        words["shape behind the first dimension"] = _shape(s.shape)
    else:
        words["shape"] = _shape(s.shape)
    if s.kind is Kind.ALL_REDUCE_SPARSE:
        words["indices"] = "(n,)" if s.rows < 0 else f"({s.rows}, n)"
    if s.root >= 0:
        words["root"] = str(s.root)
    if s.counted is not None:
        words["send_counts"] = "given" if s.counted else "not given"
    words["memory"] = "of the device" if s.on_device else "of the CPU"
    return words


def _scale(value: float | None) -> str:
    return "none" if value is None else repr(value)


def _shape(shape: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, shape))}{',' * (len(shape) == 1)})"


def differences(brought: Sequence[tuple[Signature, Sequence[int]]]) -> str:
    """Return a text of the properties that differ: the values of each, and the ranks that brought them."""
    words = [(_words(signature), ranks) for signature, ranks in brought]
    parts = []
    for thing in dict.fromkeys(thing for each, _ in words for thing in each):
        values: dict[str, list[int]] = {}
        for each, ranks in words:
            if thing in each:
                values.setdefault(each[thing], []).extend(ranks)
        if len(values) < 2:
            continue
        by_rank = sorted(values.items(), key=lambda item: min(item[1]))
        parts.append(f"{thing} {', '.join(f'{value} on {_rank_list(ranks)}' for value, ranks in by_rank)}")
    return "; ".join(parts)


def _rank_list(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {listed(spans(ranks))}"


def as_error(names: Sequence[str], brought: Sequence[tuple[bytes, Sequence[int]]], where: str) -> NcclError:
    """Return the error of ranks that bring different operations under one name, or under the names of one group.

    Parameters
    ----------
    names
        The names of the operations that are brought together; usually one name.
    brought
        Signatures as packed by `pack_all`, each with the ranks that brought them.
    where
        The coordinator or process set, for the message.
    """
    unpacked = [(unpack_all(packed), tuple(ranks)) for packed, ranks in brought]
    said = []
    count = max(len(signatures) for signatures, _ in unpacked)
    for place in range(count):
        name = names[place] if len(names) == count else names[0]
        each = [(signatures[place], ranks) for signatures, ranks in unpacked if place < len(signatures)]
        text = differences(each)
        if text:
            kinds = {signature.kind for signature, _ in each}
            what = kinds.pop().name.lower() if len(kinds) == 1 else "operation"
            said.append(f"{what} {name!r}: {text}")
    if not said:
        said = [f"{', '.join(map(repr, names[:4]))}, in a property that this text does not name"]
    head = "" if len(names) == 1 else f"of {len(names)} operations that were brought together, "
    error = NcclError(
        f"the ranks of {where} disagree on {head}{'. '.join(said)}. None of them has begun it",
        result=Result.INVALID_USAGE,
    )
    error.ranks = tuple(
        Brought(ranks, signatures if len(signatures) > 1 else signatures[0]) for signatures, ranks in unpacked
    )
    return error


class Brought(NamedTuple):
    """A signature, and the ranks that brought it, in the error of a disagreement.

    Attributes
    ----------
    ranks
        The ranks.
    what
        The `Signature`; a tuple of them for operations that were brought together.
    """

    ranks: tuple[int, ...]
    what: Signature | tuple[Signature, ...]
