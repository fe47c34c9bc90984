"""Which operations of one frame are one launch: from what all ranks know alike, so that all launch the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ncclpy.coordinator.signature import Kind, Signature
from ncclpy.core.types import DataType, ReduceOp

__all__ = ["Part", "Step", "plan", "reduction"]

_NO_FACTOR = 1.0


class Part(NamedTuple):
    """One array of an operation.

    Attributes
    ----------
    operation
        Which one of the frame.
    place
        Which of the arrays that were brought together under its key.
    signature
        What all ranks brought.
    """

    operation: int
    place: int
    signature: Signature


class Step(NamedTuple):
    """What is launched at once.

    Attributes
    ----------
    parts
        All-reduces that are copied together, or one operation.
    fused
        Whether they are copied.
    absent
        How many ranks have joined and bring nothing of their own.
    """

    parts: tuple[Part, ...]
    fused: bool
    absent: int


def plan(
    operations: Sequence[tuple[Sequence[Signature], int]], fusion_bytes: int, large: int, staged: bool
) -> list[Step]:
    """Return the launches of a frame's operations, in their order.

    An all-reduce joins the first launch before it that has its type, operator, scales and memory, and room: not only
    the one just before it.

    Parameters
    ----------
    operations
        The signatures of the arrays that each brings, and how many ranks are absent from it.
    fusion_bytes
        The most that is copied together; 0 to copy nothing that need not be.
    large
        An array of so many bytes is not copied: the copies would take longer than a launch of its own.
    staged
        Whether arrays of CPU memory have to be copied to the device in any case.
    """
    steps: list[list[Part]] = []
    sizes: list[int] = []
    absences: list[int] = []
    open_ones: dict[tuple, int] = {}
    for number, (signatures, absent) in enumerate(operations):
        for place, signature in enumerate(signatures):
            part = Part(number, place, signature)
            key = None
            if signature.kind is Kind.ALL_REDUCE:
                nbytes = signature.elements * DataType(signature.datatype).itemsize
                if nbytes < large and nbytes < fusion_bytes:
                    key = signature._replace(shape=(), dtype="", unit=1), absent
                    found = open_ones.get(key)
                    if found is not None and sizes[found] + nbytes <= fusion_bytes:
                        steps[found].append(part)
                        sizes[found] += nbytes
                        continue
            elif place:
                continue  # the operation launches all that belongs to it
            if key is not None:
                open_ones[key] = len(steps)
                sizes.append(nbytes)
            else:
                sizes.append(0)
            steps.append([part])
            absences.append(absent)
    return [
        Step(tuple(parts), _is_copied(parts, absent, staged), absent)
        for parts, absent in zip(steps, absences, strict=True)
    ]


def _is_copied(parts: Sequence[Part], absent: int, staged: bool) -> bool:
    first = parts[0].signature
    if first.kind is not Kind.ALL_REDUCE:
        return False
    return len(parts) > 1 or (staged and not first.on_device)


def reduction(signature: Signature, size: int, absent: int) -> tuple[int, float | None]:
    """Return NCCL's operator, and what each input is multiplied by first, if it is.

    Raises
    ------
    ValueError
        If there is none: an average of integers is NCCL's own, which divides by all ranks.
    """
    op, factor = signature.op, _NO_FACTOR
    if signature.prescale is not None:
        factor *= signature.prescale
    if signature.postscale is not None:
        factor *= signature.postscale
    if op == ReduceOp.AVG and (absent or factor != _NO_FACTOR):
        kind = DataType(signature.datatype)
        if kind.name.startswith(("INT", "UINT")):
            raise ValueError(
                f"the average of {signature.dtype} arrays after {absent} of {size} ranks have joined: integers cannot "
                "be divided by the ranks that are left; sum them, and divide the result"
            )
        op = ReduceOp.SUM
        factor /= size - absent
    return int(op), None if factor == _NO_FACTOR else factor
