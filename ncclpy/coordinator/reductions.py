"""Operators and scales of all-reduces and other reductions, and how NCCL executes them."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any

from ncclpy.coordinator.data_plane import holds
from ncclpy.coordinator.signature import Kind, Signature, pack_all
from ncclpy.types import DataType, ReduceOp, as_op

if TYPE_CHECKING:
    from ncclpy.coordinator.buffers import TensorEntry

__all__ = ["pack_reductions", "reduction", "reduction_of", "signature_of"]

_NO_FACTOR = 1.0


def signature_of(kind: Kind, part: TensorEntry, shape: tuple[int, ...], **more: Any) -> Signature:
    """Return an array's signature: what the array must have in common with those of the other ranks."""
    return Signature(kind, part.dtype, part.datatype, part.unit, on_device=part.on_device, shape=shape, **more)


def _scale(value: Any, argument: str) -> float | None:
    if value is None:
        return None
    number = float(value)
    if not isfinite(number):
        raise ValueError(f"{argument}: expected a finite number, got {value!r}")
    return number


def pack_reductions(parts: Sequence[TensorEntry], op: Any, size: int, prescale: Any, postscale: Any) -> bytes:
    """Return the signatures of all-reduces as bytes; raise if an operator or factor cannot be used with its array."""
    return pack_all([reduction_of(Kind.ALL_REDUCE, part, op, size, prescale, postscale) for part in parts])


def reduction_of(kind: Kind, part: TensorEntry, op: Any, size: int, prescale: Any, postscale: Any) -> Signature:
    """Return the signature of an array's reduction; raise if the operator or a factor cannot be used with it."""
    before, after = _scale(prescale, "prescale"), _scale(postscale, "postscale")
    signature = signature_of(kind, part, part.shape, op=part.op_code(op, size), prescale=before, postscale=after)
    if before is not None or after is not None:
        _check_scales(signature, as_op(op), size)
    return signature


def _check_scales(signature: Signature, op: int, size: int) -> None:
    if op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise ValueError(
            f"prescale, postscale: sums and averages are scaled, not {ReduceOp(op).name.lower()}: scale the array"
        )
    if "float" not in signature.dtype and "complex" not in signature.dtype:
        raise ValueError(
            f"prescale, postscale: {signature.dtype} is not a floating-point or complex type: convert the array, or "
            "scale it yourself"
        )
    factor = (1.0 if signature.prescale is None else signature.prescale) * (
        1.0 if signature.postscale is None else signature.postscale
    )
    vanishes = factor == 0 and 0 not in (signature.prescale, signature.postscale)
    # An average divides by the number of ranks that have not joined, which is at least one.
    divisors = (1,) if op == ReduceOp.SUM else (1, size)
    if vanishes or not all(holds(factor / divisor, signature.datatype) for divisor in divisors):
        raise ValueError(
            f"prescale, postscale: inputs would be multiplied by {factor:g}"
            + (f", and that divided by up to {size} ranks" if op != ReduceOp.SUM else "")
            + f", which {signature.dtype} does not hold: it would be {'zero' if abs(factor) < 1 else 'infinite'}"
        )


def reduction(signature: Signature, size: int, absent: int) -> tuple[int, float | None]:
    """Return NCCL's operator, and the factor that multiplies each input before the reduction; None for no factor.

    `absent` of the `size` ranks have joined.

    Raises
    ------
    ValueError
        For the average of integers if some ranks have joined: NCCL's average divides by the number of all ranks, and
        integers cannot be multiplied by a fraction first.
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
