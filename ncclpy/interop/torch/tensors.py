"""Torch's tensors and operators as the group's operations take them.

A tensor becomes contiguous memory that the engine reaches, with the tensor's values. An operator of torch becomes one
of NCCL.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ncclpy.errors import NcclUnsupported
from ncclpy.types import ReduceOp

__all__ = ["OPERATORS", "Places", "Staging", "are_even", "bring", "operator_of", "times"]

#: Operators by the number that c10d gives them (Types.hpp).
OPERATORS = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PROD, ReduceOp.MIN, ReduceOp.MAX)
_BITWISE = {5: "BAND", 6: "BOR", 7: "BXOR"}


@contextlib.contextmanager
def _writable(tensor: Any) -> Iterator[Any]:
    """Yield a tensor in a form that can be written, also for a parameter or a tensor made under inference mode."""
    import torch

    with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
        # `copy_` gives a sparse tensor new parts: through a detached alias the tensor itself would keep the old ones.
        yield tensor if tensor.is_sparse else tensor.detach()


def bring(made: Any, tensor: Any) -> None:
    """Copy what was received to its place, on the current stream."""
    if made.is_cuda and not made.is_sparse:
        import torch

        for each in (made, tensor):  # the current stream may not be the one on which they were allocated
            if each.is_cuda:
                each.record_stream(torch.cuda.current_stream(made.device))
    with _writable(tensor) as place:
        if place.device != made.device and _is_lazy(place):
            made = made.to(place.device)
        place.copy_(made)


def _is_lazy(tensor: Any) -> bool:
    """Return whether a tensor has other values than its memory: lazy negation or conjugation.

    Torch's copies of a strided lazy tensor between CPU and GPU can lose the negation (torch 2.11); its copies within
    one memory do not.
    """
    return bool(tensor.is_neg() or tensor.is_conj())


def _values(tensor: Any) -> Any:
    """Return a tensor that has its values in its memory: `tensor` itself, or a copy if it is lazy."""
    return tensor.resolve_conj().resolve_neg() if _is_lazy(tensor) else tensor


def times(tensor: Any, factor: Any) -> Any:
    """Return a new contiguous tensor of the same type: `tensor` times a factor."""
    import torch

    made = tensor.new_empty(tensor.shape)
    with _writable(made) as place:
        torch.mul(tensor, _number(factor), out=place)
    return made


def _number(factor: Any) -> Any:
    """Return a number as it is, a tensor reshaped to 0 dimensions, which promotes no type and may be on a CPU."""
    return factor.reshape(()) if hasattr(factor, "reshape") else factor


def are_even(tensor: Any, parts: Sequence[Any]) -> bool:
    """Return whether each part has the number of elements and the type of `tensor`."""
    count, dtype = tensor.numel(), tensor.dtype
    return all(part.numel() == count and part.dtype == dtype for part in parts)


class Places:
    """The memory of contiguous tensors that one launch writes."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def has(self, tensor: Any) -> bool:
        """Return whether a tensor shares memory with a tensor of an earlier call; if not, note its memory."""
        start = tensor.data_ptr()
        end = start + tensor.numel() * tensor.element_size()
        i = bisect_right(self._starts, start)
        if start == end:
            return False
        if (i > 0 and self._ends[i - 1] > start) or (i < len(self._starts) and self._starts[i] < end):
            return True
        self._starts.insert(i, start)
        self._ends.insert(i, end)
        return False


class Staging:
    """Stand-ins for tensors during one operation, and what has to be done when it has ended.

    For most tensors the stand-in is another tensor over the same storage. The operation holds it, and with it the
    memory: the caller may give its own tensor another memory meanwhile (``x.data = y``, ``x.set_(y)``). A copy stands
    in for a tensor that is not contiguous, that has other values than its memory (lazy negation and conjugation), or
    that is in CPU memory while the engine reaches GPUs only.

    Parameters
    ----------
    device : torch.device or None
        Where tensors of CPU memory are copied to; None where the engine works on CPU memory.

    Attributes
    ----------
    after : list of callable
        Called in this order when the operation has succeeded: they copy what was received to its place.
    """

    __slots__ = ("after", "device")

    def __init__(self, device: Any = None) -> None:
        self.device = device
        self.after: list[Callable[[], object]] = []

    def is_plain(self, tensor: Any) -> bool:
        """Return whether a tensor needs no copy."""
        if not tensor.is_contiguous() or _is_lazy(tensor):
            return False
        return self.device is None or not tensor.is_cpu

    def sent(self, tensor: Any) -> Any:
        """Return what to send for a tensor."""
        return tensor.detach() if self.is_plain(tensor) else self._copied(tensor)

    def received(self, tensor: Any) -> Any:
        """Return what to receive into for a tensor."""
        place = tensor.detach()
        if self.is_plain(tensor):
            return place
        made = tensor.new_empty(tensor.shape, device=self.device or tensor.device)
        self.after.append(lambda: bring(made, place))
        return made

    def both(self, tensor: Any, copies: bool = False) -> Any:
        """Return what to send and to receive into for a tensor; a copy in any case if `copies` says so."""
        place = tensor.detach()
        if self.is_plain(tensor) and not copies:
            return place
        made = self._copied(tensor)
        self.after.append(lambda: bring(made, place))
        return made

    def all_sent(self, tensors: Sequence[Any]) -> list[Any]:
        """Return what to send for each of several."""
        return [self.sent(tensor) for tensor in tensors]

    def all_received(self, tensors: Sequence[Any]) -> list[Any]:
        """Return what to receive into for each of several."""
        return [self.received(tensor) for tensor in tensors]

    def flat_sent(self, parts: Sequence[Any]) -> Any:
        """Return one tensor to send for several of one size."""
        made = self._adjacent(parts)
        if made is None:
            made = self._new_flat(parts)
            with _writable(made) as place:
                for each, part in zip(place.chunk(len(parts)), parts, strict=True):
                    each.view(part.shape).copy_(_values(part))
        return made

    def flat_received(self, parts: Sequence[Any]) -> Any:
        """Return one tensor to receive into for several of one size."""
        made = self._adjacent(parts)
        if made is not None:
            return made
        made = self._new_flat(parts)
        places = [part.detach() for part in parts]

        def bring_all() -> None:
            for each, place in zip(made.chunk(len(places)), places, strict=True):
                bring(each.view(place.shape), place)

        self.after.append(bring_all)
        return made

    def _new_flat(self, parts: Sequence[Any]) -> Any:
        first = parts[0]
        return first.new_empty(len(parts) * first.numel(), device=self.device or first.device)

    def _adjacent(self, parts: Sequence[Any]) -> Any:
        """Return one tensor over several that are adjacent in one storage; None if they are not."""
        first = parts[0]
        storage, start, count = first.untyped_storage().data_ptr(), first.storage_offset(), first.numel()
        for i, part in enumerate(parts):
            if not self.is_plain(part) or part.storage_offset() != start + i * count:
                return None
            if part.untyped_storage().data_ptr() != storage:
                return None
        return first.detach().as_strided((len(parts) * count,), (1,), start)

    def scaled(self, tensor: Any, factor: Any, into: Any) -> Any:
        """Return a tensor times a factor, to reduce in place; the result is copied to `into`, if that is given."""
        if self.device is not None and tensor.is_cpu:
            made = self._copied(tensor)
            made.mul_(_number(factor))
        else:
            made = times(tensor, factor)
        if into is not None:
            place = into.detach()
            self.after.append(lambda: bring(made, place))
        return made

    def _copied(self, tensor: Any) -> Any:
        made = tensor.new_empty(tensor.shape, device=self.device or tensor.device)
        with _writable(made) as place:
            place.copy_(_values(tensor))
        return made


def operator_of(torch_op: Any) -> tuple[ReduceOp, Any]:
    """Return the operator for an operator of torch, and the factor that inputs are multiplied by first, or None.

    Parameters
    ----------
    torch_op : int or tuple
        The number of c10d's operator; for a pre-multiplied sum, the number and the factor, a number or a tensor of one
        element.

    Raises
    ------
    NcclUnsupported
        If NCCL has no such operator.
    """
    if type(torch_op) is tuple:
        return ReduceOp.SUM, torch_op[1]
    if torch_op < len(OPERATORS):
        return OPERATORS[torch_op], None
    raise NcclUnsupported(
        f"op: NCCL has no reduction by {_BITWISE.get(torch_op, torch_op)}, nor any other on bits: send the bits as "
        "bool tensors, for which SUM is 'any' and MIN is 'all', or all_gather them and reduce here"
    )
