"""The calls of a rank: what each brings, what all ranks must bring alike, and how it is launched."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

from ncclpy.coordinator.buffers import TensorEntry
from ncclpy.coordinator.keys import as_name
from ncclpy.coordinator.plan import Call
from ncclpy.coordinator.reductions import reduction, reduction_of, signature_of
from ncclpy.coordinator.signature import Kind, Signature, pack_all
from ncclpy.process_group.sparse import SparseSum, maker_of
from ncclpy.types import as_integer

if TYPE_CHECKING:
    from ncclpy.coordinator.backends import DataPlane
    from ncclpy.coordinator.buffers import FusedLaunch

__all__ = ["AllGather", "AllReduceSparse", "AllToAll", "Barrier", "Broadcast", "ReduceScatter"]


def _rows_of(shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Return the first dimension and the other ones; an array without dimensions is one row."""
    return (shape[0], shape[1:]) if shape else (1, ())


def _maker_of(array: Any) -> Any:
    maker = maker_of(array)
    if maker is None:
        kind = type(array)
        raise TypeError(
            f"array: the result is a new array, so an array of numpy, CuPy or torch is expected, got "
            f"{kind.__module__}.{kind.__qualname__}"
        )
    return maker


def _check_one_memory(parts: Sequence[TensorEntry]) -> None:
    """Raise unless all arrays of a call are in device memory, or all in CPU memory: one data plane carries them."""
    other = next((part for part in parts if part.on_device != parts[0].on_device), None)
    if other is not None:
        places = [("CPU memory", "device memory")[part.on_device] for part in (parts[0], other)]
        raise ValueError(
            f"arrays: that of {parts[0].name!r} is in {places[0]}, that of {other.name!r} in {places[1]}: use a call "
            "for each memory"
        )


class _Outputs:
    """Make a result's array: like the brought array, on the stream that was current when the operation was brought.

    The launching thread may be another one, with another current device and stream. There the framework's allocator
    would hand out and reuse the result's memory in the order of the launching thread's stream, with which the user's
    stream is never synchronised.
    """

    def __init__(self, like: Any) -> None:
        maker = _maker_of(like)
        self._like, self._make, self._here = like, maker.space, maker.here(like)

    def space(self, shape: tuple[int, ...]) -> Any:
        """Return a new array of the same package, type and device."""
        return self._make(shape, self._like)

    def __enter__(self) -> Callable[[tuple[int, ...]], Any]:
        self._here.__enter__()
        return self.space

    def __exit__(self, *error: Any) -> None:
        self._here.__exit__(*error)


class Broadcast(Call):
    """Broadcast an array of the root to all ranks."""

    def __init__(self, name: str, array: Any, root: int, device: int, rank: int, size: int) -> None:
        root = as_integer(root, "root")
        if not 0 <= root < size:
            raise ValueError(f"root: rank {root} does not exist, there are {size} (0 to {size - 1})")
        part = TensorEntry(Kind.BROADCAST, device, as_name(name), array, rank != root)
        self.begin(part, signature_of(Kind.BROADCAST, part, part.shape, root=root))

    def launch(self, plane: DataPlane, owns: Sequence[bytes], absent: int) -> FusedLaunch | None:
        return plane.broadcast(self.parts[0], self.signatures[0].root)


class AllGather(Call):
    """Concatenate the arrays that all ranks bring under each name, along the first dimension."""

    def __init__(self, names: Sequence[str], arrays: Sequence[Any], device: int) -> None:
        self._outputs = [_Outputs(array) for array in arrays]
        try:
            for name, array in zip(names, arrays, strict=True):
                self.parts.append(TensorEntry(Kind.ALL_GATHER, device, as_name(name), array))
            _check_one_memory(self.parts)
        except BaseException as error:
            self.withdraw(error)
            raise
        rows, entries = zip(*[_rows_of(part.shape) for part in self.parts], strict=True)
        self.own = struct.pack(f"={len(rows)}q", *rows)
        signatures = map(partial(signature_of, Kind.ALL_GATHER), self.parts, entries)
        self.begin_all(self.parts, tuple(signatures))

    def launch(self, plane: DataPlane, owns: Sequence[bytes], absent: int) -> list[FusedLaunch | None]:
        rows_by_rank = [struct.unpack(f"={len(self.parts)}q", own) for own in owns]
        begun = []
        for part, signature, outputs, rows in zip(
            self.parts, self.signatures, self._outputs, zip(*rows_by_rank, strict=True), strict=True
        ):
            with outputs as new_array:
                result = new_array((sum(rows), *signature.shape))
                part.result_in(result)
                begun.append(plane.gather(part, [each * prod(signature.shape) for each in rows], result))
        return begun


class ReduceScatter(Call):
    """Reduce the arrays that all ranks bring under each name; each rank gets some rows of each result."""

    def __init__(
        self,
        names: Sequence[str],
        arrays: Sequence[Any],
        op: Any,
        device: int,
        rank: int,
        size: int,
        prescale: Any = None,
        postscale: Any = None,
    ) -> None:
        self._rows: list[list[int]] = []
        self._results: list[Any] = []
        signatures = []
        try:
            for name, array in zip(names, arrays, strict=True):
                outputs = _Outputs(array)
                part = TensorEntry(Kind.REDUCE_SCATTER, device, as_name(name), array)
                self.parts.append(part)
                signatures.append(reduction_of(Kind.REDUCE_SCATTER, part, op, size, prescale, postscale))
                if not part.shape:
                    raise ValueError("array: it has no first dimension, of which each rank would get a part")
                rows, entry = _rows_of(part.shape)
                self._rows.append([rows // size + (each < rows % size) for each in range(size)])
                self._results.append(outputs.space((self._rows[-1][rank], *entry)))
                part.result_in(self._results[-1])
            _check_one_memory(self.parts)
        except BaseException as error:
            self.withdraw(error)
            raise
        self.begin_all(self.parts, tuple(signatures))

    def launch(self, plane: DataPlane, owns: Sequence[bytes], absent: int) -> list[FusedLaunch | None]:
        begun = []
        for part, signature, rows, result in zip(self.parts, self.signatures, self._rows, self._results, strict=True):
            op, factor = reduction(signature, len(owns), absent)
            row = prod(signature.shape[1:])
            begun.append(plane.scatter(part, op, factor, [each * row for each in rows], result))
        return begun


class AllToAll(Call):
    """Exchange rows: each rank has rows for each rank."""

    def __init__(self, name: str, array: Any, send_counts: Sequence[int] | None, device: int, rank: int, size: int):
        self._outputs = _Outputs(array)
        part = TensorEntry(Kind.ALL_TO_ALL, device, as_name(name), array)
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
        self.begin(part, signature_of(Kind.ALL_TO_ALL, part, entry, counted=send_counts is not None))

    def launch(self, plane: DataPlane, owns: Sequence[bytes], absent: int) -> FusedLaunch | None:
        part, signature = self.parts[0], self.signatures[0]
        counts = [struct.unpack(f"={len(owns)}q", own) for own in owns]
        received = tuple(each[self._rank] for each in counts)
        row = prod(signature.shape)
        even = len(set(owns)) == 1 and len(set(counts[0])) == 1 and counts[0][0] * row > 0
        sent = [each * row for each in counts[self._rank]]
        with self._outputs as new_array:
            result = new_array((sum(received), *signature.shape))
            if signature.counted:
                part.result_in(None, lambda: (result, received))
            else:
                part.result_in(result)
            return plane.exchange(part, sent, [each * row for each in received], even, result)


class Barrier(Call):
    """Wait for all ranks; no data."""

    def __init__(self, name: str, device: int) -> None:
        self.begin(TensorEntry(Kind.ALL_REDUCE, device, as_name(name), None), Signature(Kind.BARRIER))

    def launch(self, plane: DataPlane, owns: Sequence[bytes], absent: int) -> FusedLaunch | None:
        plane.barrier(self.parts[0])
        return None


class AllReduceSparse(Call):
    """Gather the indices and values of all ranks; they are summed when the work's result is asked for."""

    def __init__(self, name: str, indices: Any, values: Any, device: int, size: int) -> None:
        self._sum, self._outputs = SparseSum(indices, values, size), _Outputs(values)
        first = TensorEntry(Kind.ALL_GATHER, device, as_name(name), indices)
        second = TensorEntry(Kind.ALL_GATHER, device, as_name(name), values)
        second.result_in(None, self._sum)
        rows = -1 if len(first.shape) == 1 else first.shape[0]
        self.begin(second, signature_of(Kind.ALL_REDUCE_SPARSE, second, second.shape[1:]))
        self.parts = [first, second]
        self.fixed = pack_all((signature_of(Kind.ALL_REDUCE_SPARSE, first, (), rows=rows), *self.signatures))
        self.own = struct.pack("=q", second.shape[0])

    def launch(self, plane: DataPlane, owns: Sequence[bytes], absent: int) -> list[FusedLaunch | None]:
        self._sum.expect([struct.unpack("=q", own)[0] for own in owns])
        with self._outputs:
            return [
                plane.gather(part, counts, whole)
                for part, (counts, whole) in zip(self.parts, self._sum.spaces(), strict=True)
            ]
