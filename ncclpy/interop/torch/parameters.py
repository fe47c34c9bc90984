"""A torch model's parameters and an optimiser's state, made equal on all ranks of a coordinator."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ncclpy.engine.work import Work

__all__ = ["broadcast_parameters"]

_TENSOR = "tensor"


class Coordinator(Protocol):
    """What is used of a coordinator, or of a process set of one: named broadcasts."""

    rank: int

    def broadcast(self, name: str, array: Any, root: int) -> Work[Any]:
        """Bring an array: the root's values are sent, the other ranks' arrays receive them."""


def broadcast_parameters(what: Any, coordinator: Coordinator, *, root: int = 0, name: str = "parameters") -> None:
    """Give all ranks the root's values of a model, an optimiser or a dictionary of tensors.

    A model's parameters and buffers, and a dictionary's tensors, are overwritten in place. An optimiser's state may
    not exist yet on other ranks: it is made like the root's, and all ranks take the root's steps, rates and other
    settings.

    Parameters
    ----------
    what : torch.nn.Module, torch.optim.Optimizer or dict of str to torch.Tensor
        The same on all ranks; tensors of one name have one shape and type everywhere.
    coordinator : Coordinator
        The coordinator of the ranks.
    root : int
        The rank that sends its values.
    name : str
        The prefix of the operations' names, the same on all ranks.

    Raises
    ------
    NcclError
        If ranks disagree about a tensor; the error names what each has.
    TypeError
        If `what` is none of these, or an optimiser's state has something that is neither a tensor nor a plain value.
    """
    import torch

    if isinstance(what, torch.optim.Optimizer):
        _broadcast_state(torch, what, coordinator, root, name)
        return
    if isinstance(what, torch.nn.Module):
        what = what.state_dict(keep_vars=True)
    if not isinstance(what, dict):
        raise TypeError(f"expected a torch module, an optimiser or a dict of tensors, got {type(what).__name__}")
    _broadcast({f"{name}/{key}": value for key, value in what.items() if torch.is_tensor(value)}, coordinator, root)


def _broadcast(tensors: dict[str, Any], coordinator: Coordinator, root: int) -> None:
    begun = []
    seen = set()
    for key, tensor in tensors.items():
        plain = tensor.detach()
        # Tied weights are listed under each of their names, and are one tensor: it is sent once, on all ranks.
        place = (plain.data_ptr(), plain.device, plain.dtype, plain.shape, plain.stride())
        if plain.numel() and place in seen:
            continue
        seen.add(place)
        sent = plain if plain.is_contiguous() else plain.contiguous()
        begun.append((coordinator.broadcast(key, sent, root), plain, sent))
    for work, plain, sent in begun:
        work.wait()
        if sent is not plain:
            plain.copy_(sent)


def _broadcast_state(torch: Any, optimizer: Any, coordinator: Coordinator, root: int, name: str) -> None:
    tensors: list[Any] = []
    state = optimizer.state_dict()
    text, wrong = b"", None
    if coordinator.rank == root:
        try:
            text = json.dumps(_packed(torch, state, tensors)).encode()
        except TypeError as error:
            wrong = error
    length = torch.tensor([-1 if wrong else len(text)], dtype=torch.int64)
    coordinator.broadcast(f"{name}/length", length, root).wait()
    if wrong is not None:
        raise wrong
    if length[0] < 0:
        raise TypeError(f"rank {root}, the root, cannot send its optimiser's state, as its error says")
    packed = torch.zeros(int(length[0]), dtype=torch.uint8)
    if coordinator.rank == root:
        packed[:] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    coordinator.broadcast(f"{name}/state", packed, root).wait()
    if coordinator.rank != root:
        tensors.clear()
        state = _unpacked(torch, json.loads(bytes(packed.tolist())), tensors)
    _broadcast({f"{name}/{number}": tensor for number, tensor in enumerate(tensors)}, coordinator, root)
    if coordinator.rank != root:
        optimizer.load_state_dict(state)


def _packed(torch: Any, value: Any, tensors: list[Any]) -> Any:
    """Return a value as JSON, with each tensor's shape and type in its place; the tensors are added to `tensors`."""
    if torch.is_tensor(value):
        tensors.append(value)
        return [_TENSOR, list(value.shape), str(value.dtype).removeprefix("torch."), value.device.type]
    if isinstance(value, dict):
        return ["dict", [[_packed(torch, key, tensors), _packed(torch, each, tensors)] for key, each in value.items()]]
    if isinstance(value, (list, tuple)):
        return ["list" if isinstance(value, list) else "tuple", [_packed(torch, each, tensors) for each in value]]
    if value is None or isinstance(value, (bool, int, float, str)):
        return ["plain", value]
    raise TypeError(
        f"the optimiser's state has a {type(value).__name__} in it, which is neither a tensor nor a plain value"
    )


def _unpacked(torch: Any, packed: Any, tensors: list[Any]) -> Any:
    """Return what `_packed` has packed, with empty tensors, which are added to `tensors`."""
    kind, *rest = packed
    if kind == _TENSOR:
        shape, dtype, device = rest
        tensors.append(torch.empty(shape, dtype=getattr(torch, dtype), device=device))
        return tensors[-1]
    if kind == "dict":
        return {_unpacked(torch, key, tensors): _unpacked(torch, each, tensors) for key, each in rest[0]}
    if kind in ("list", "tuple"):
        made = [_unpacked(torch, each, tensors) for each in rest[0]]
        return made if kind == "list" else tuple(made)
    return rest[0]
