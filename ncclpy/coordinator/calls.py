"""What a named operation is for this rank: what it brings, what the others have to bring alike, and its launch."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from math import isfinite, prod
from typing import TYPE_CHECKING, Any

from ncclpy.coordinator.brought import Brought
from ncclpy.coordinator.names import key_of
from ncclpy.coordinator.plan import reduction
from ncclpy.coordinator.signature import Kind, Signature, pack_all
from ncclpy.core.types import AVG, ReduceOp, as_integer, as_op
from ncclpy.process_group.sparse import SparseSum, maker_of

if TYPE_CHECKING:
    from ncclpy.coordinator.plane import Plane
    from ncclpy.coordinator.slots import Carried
    from ncclpy.engine.work import Work

__all__ = ["AllGather", "AllReduce", "AllReduceSparse", "AllToAll", "Barrier", "Broadcast", "Call", "ReduceScatter"]

#: The numbers of `core.operation`.
_ALL_REDUCE, _BROADCAST, _ALL_GATHER, _REDUCE_SCATTER, _ALL_TO_ALL = 0, 1, 3, 4, 5


class Call:
    """One operation, or several that are brought together.

    Attributes
    ----------
    names
        Of the operations.
    key
        By which the ranks find each other's.
    parts
        The arrays.
    signatures
        What has to be the same on all ranks, by array.
    own
        What is this rank's own, for the others to know.
    joinable
        Whether it has a meaning without ranks that have joined.
    """

    names: tuple[str, ...]
    key: bytes
    parts: list[Brought]
    signatures: tuple[Signature, ...]
    own = b""
    joinable = False

    @property
    def fixed(self) -> bytes:
        """Return the signatures as bytes."""
        return pack_all(self.signatures)

    @property
    def work(self) -> Work:
        """Return the work of its only, or its last, array."""
        return self.parts[-1].work

    def begin(self, part: Brought, signature: Signature) -> None:
        """Be an operation of one array."""
        self.names, self.key = (part.name,), key_of((part.name,))
        self.parts, self.signatures = [part], (signature,)

    def fail(self, error: BaseException) -> None:
        """Bring all of its works to their end."""
        for part in self.parts:
            part.fail(error)

    def withdraw(self, error: BaseException) -> None:
        """Forget it, as it could not be begun: the caller is told, and nobody else."""
        for part in self.parts:
            part.withdraw(error)

    def launch(self, plane: Plane, owns: Sequence[bytes], absent: int) -> Carried | None:
        """Launch it, once all ranks have brought it; all-reduces are launched by their plan."""
        raise NotImplementedError


def _signature(kind: Kind, part: Brought, shape: tuple[int, ...], **more: Any) -> Signature:
    return Signature(kind, part.dtype, part.datatype, part.unit, on_device=part.on_device, shape=shape, **more)


def _rows_of(shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Return the first dimension and the others; an array without any is one row."""
    return (shape[0], shape[1:]) if shape else (1, ())


def _new(like: Any, shape: tuple[int, ...]) -> Any:
    """Return a new array of the same package, type and device."""
    return _maker_of(like).room(shape, like)


def _maker_of(array: Any) -> Any:
    maker = maker_of(array)
    if maker is None:
        kind = type(array)
        raise TypeError(
            f"array: the result is a new array, so an array of numpy, CuPy or torch is expected, got "
            f"{kind.__module__}.{kind.__qualname__}"
        )
    return maker


def _op_of(op: Any) -> Any:
    return AVG if type(op) is str and op.lower() == "average" else op


def _scale(value: Any, argument: str) -> float | None:
    if value is None:
        return None
    number = float(value)
    if not isfinite(number):
        raise ValueError(f"{argument}: expected a finite number, got {value!r}")
    return number


class AllReduce(Call):
    """Arrays that are reduced in place, each by itself; all of them or none."""

    joinable = True

    def __init__(
        self,
        names: Sequence[str],
        arrays: Sequence[Any],
        op: Any,
        device: int,
        size: int,
        prescale: Any = None,
        postscale: Any = None,
    ) -> None:
        self.names, self.key = tuple(names), key_of(names)
        self.parts = []
        prescale, postscale = _scale(prescale, "prescale"), _scale(postscale, "postscale")
        op = _op_of(op)
        signatures = []
        try:
            for name, array in zip(names, arrays, strict=True):
                part = Brought(_ALL_REDUCE, device, name, array, True)
                self.parts.append(part)
                code = part.op_code(op, size)
                signature = _signature(
                    Kind.ALL_REDUCE, part, part.shape, op=code, prescale=prescale, postscale=postscale
                )
                if prescale is not None or postscale is not None:
                    _check_scales(signature, as_op(op))
                signatures.append(signature)
        except BaseException as error:
            self.withdraw(error)
            raise
        self.signatures = tuple(signatures)


def _check_scales(signature: Signature, op: int) -> None:
    if op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise ValueError(
            f"prescale, postscale: sums and averages are scaled, not {ReduceOp(op).name.lower()}: scale the array"
        )
    if "float" not in signature.dtype and "complex" not in signature.dtype:
        raise ValueError(f"prescale, postscale: {signature.dtype} has no fractions: convert the array, or scale it")


class Broadcast(Call):
    """An array of the root's, for all."""

    def __init__(self, name: str, array: Any, root: int, device: int, rank: int, size: int) -> None:
        root = as_integer(root, "root")
        if not 0 <= root < size:
            raise ValueError(f"root: rank {root} does not exist, there are {size} (0 to {size - 1})")
        part = Brought(_BROADCAST, device, name, array, rank != root)
        self.begin(part, _signature(Kind.BROADCAST, part, part.shape, root=root))

    def launch(self, plane: Plane, owns: Sequence[bytes], absent: int) -> Carried | None:
        return plane.broadcast(self.parts[0], self.signatures[0].root)


class AllGather(Call):
    """Arrays of all ranks, one behind the other."""

    def __init__(self, name: str, array: Any, device: int) -> None:
        _maker_of(array)
        part = Brought(_ALL_GATHER, device, name, array)
        rows, entry = _rows_of(part.shape)
        self.own = struct.pack("=q", rows)
        self.begin(part, _signature(Kind.ALL_GATHER, part, entry))

    def launch(self, plane: Plane, owns: Sequence[bytes], absent: int) -> Carried | None:
        part, entry = self.parts[0], self.signatures[0].shape
        rows = [struct.unpack("=q", own)[0] for own in owns]
        result = _new(part.array, (sum(rows), *entry))
        part.result_in(result)
        return plane.gather(part, [each * prod(entry) for each in rows], result)


class ReduceScatter(Call):
    """The sum of all ranks' arrays, of which each rank gets some rows."""

    def __init__(self, name: str, array: Any, op: Any, device: int, rank: int, size: int) -> None:
        _maker_of(array)
        part = Brought(_REDUCE_SCATTER, device, name, array)
        try:
            code = part.op_code(_op_of(op), size)
            if not part.shape:
                raise ValueError("array: it has no first dimension, of which each rank would get a part")
            rows, entry = _rows_of(part.shape)
            self._rows = [rows // size + (each < rows % size) for each in range(size)]
            self._result = _new(array, (self._rows[rank], *entry))
        except BaseException as error:
            part.withdraw(error)
            raise
        part.result_in(self._result)
        self.begin(part, _signature(Kind.REDUCE_SCATTER, part, part.shape, op=code))

    def launch(self, plane: Plane, owns: Sequence[bytes], absent: int) -> Carried | None:
        signature = self.signatures[0]
        op, factor = reduction(signature, len(owns), absent)
        row = prod(signature.shape[1:])
        return plane.scatter(self.parts[0], op, factor, [each * row for each in self._rows], self._result)


class AllToAll(Call):
    """Rows of each rank's array, for each rank."""

    def __init__(self, name: str, array: Any, send_counts: Sequence[int] | None, device: int, rank: int, size: int):
        _maker_of(array)
        part = Brought(_ALL_TO_ALL, device, name, array)
        self._rank = rank
        try:
            if not part.shape:
                raise ValueError("array: it has no first dimension, of which each rank would get a part")
            rows, entry = _rows_of(part.shape)
            if send_counts is None:
                if rows % size:
                    raise ValueError(
                        f"array: {rows} rows cannot be divided by {size} ranks; pass send_counts, how many go to each"
                    )
                counts = [rows // size] * size
            else:
                counts = [as_integer(count, "send_counts", 0, 2**63 - 1) for count in send_counts]
                if len(counts) != size or sum(counts) != rows:
                    raise ValueError(
                        f"send_counts: expected {size} counts, one a rank, whose sum is the array's {rows} rows, got "
                        f"{counts}"
                    )
        except BaseException as error:
            part.withdraw(error)
            raise
        self.own = struct.pack(f"={size}q", *counts)
        self.begin(part, _signature(Kind.ALL_TO_ALL, part, entry, counted=send_counts is not None))

    def launch(self, plane: Plane, owns: Sequence[bytes], absent: int) -> Carried | None:
        part, signature = self.parts[0], self.signatures[0]
        counts = [struct.unpack(f"={len(owns)}q", own) for own in owns]
        received = tuple(each[self._rank] for each in counts)
        row = prod(signature.shape)
        result = _new(part.array, (sum(received), *signature.shape))
        if signature.counted:
            part.result_in(None, lambda: (result, received))
        else:
            part.result_in(result)
        even = len(set(owns)) == 1 and len(set(counts[0])) == 1 and counts[0][0] * row > 0
        sent = [each * row for each in counts[self._rank]]
        return plane.exchange(part, sent, [each * row for each in received], even, result)


class Barrier(Call):
    """Nothing, from all ranks."""

    def __init__(self, name: str, device: int) -> None:
        self.begin(Brought(_ALL_REDUCE, device, name, None), Signature(Kind.BARRIER))

    def launch(self, plane: Plane, owns: Sequence[bytes], absent: int) -> Carried | None:
        plane.barrier(self.parts[0])
        return None


class AllReduceSparse(Call):
    """Indices and values of all ranks: two gathers, and a sum where the result is asked for."""

    def __init__(self, name: str, indices: Any, values: Any, device: int, size: int) -> None:
        self._sum = SparseSum(indices, values, size)
        first = Brought(_ALL_GATHER, device, name, indices)
        second = Brought(_ALL_GATHER, device, name, values)
        second.result_in(None, self._sum)
        rows = -1 if len(first.shape) == 1 else first.shape[0]
        self.begin(second, _signature(Kind.ALL_REDUCE_SPARSE, second, second.shape[1:]))
        self.parts = [first, second]
        self.signatures = (_signature(Kind.ALL_REDUCE_SPARSE, first, (), rows=rows), *self.signatures)
        self.own = struct.pack("=q", second.shape[0])

    def launch(self, plane: Plane, owns: Sequence[bytes], absent: int) -> Carried | None:
        self._sum.expect([struct.unpack("=q", own)[0] for own in owns])
        for part, (sent, places) in zip(self.parts, self._sum.parts(), strict=True):
            plane.gather_parts(part, sent, places)
        return None
