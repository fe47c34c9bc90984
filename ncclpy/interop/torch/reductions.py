"""Torch's reduction operators as NCCL's."""

from __future__ import annotations

from typing import Any

from ncclpy.errors import NcclUnsupported
from ncclpy.types import ReduceOp

__all__ = ["OPERATORS", "operator_of"]

#: By the number that c10d gives them (Types.hpp).
OPERATORS = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PROD, ReduceOp.MIN, ReduceOp.MAX)
_BITWISE = {5: "BAND", 6: "BOR", 7: "BXOR"}


def operator_of(theirs: Any) -> tuple[ReduceOp, Any]:
    """Return the operator for one of torch's, and what inputs have to be multiplied by first, or None.

    Parameters
    ----------
    theirs : int or tuple
        The number of c10d's operator; for a pre-multiplied sum, the number and the factor, a number or a tensor of one
        element.

    Raises
    ------
    NcclUnsupported
        If NCCL has no such operator.
    """
    if type(theirs) is tuple:
        return ReduceOp.SUM, theirs[1]
    if theirs < len(OPERATORS):
        return OPERATORS[theirs], None
    raise NcclUnsupported(
        f"op: NCCL has no reduction by {_BITWISE.get(theirs, theirs)}; of bits there is none at all: send them as "
        "bool tensors, for which SUM is 'any' and MIN is 'all', or all_gather them and reduce here"
    )
