"""The gradients of a torch model, averaged over the ranks of a coordinator during the backward pass."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ncclpy.errors import NcclUnsupported

if TYPE_CHECKING:
    from typing_extensions import Self

    from ncclpy.engine.work import Work

__all__ = ["GradientAverage", "average_gradients"]


class Coordinator(Protocol):
    """What is used of a coordinator, or of a process set of one: named sums over all ranks."""

    size: int

    def all_reduce(self, name: str, array: Any, op: str) -> Work[Any]:
        """Bring an array that is reduced in place."""

    def all_reduce_sparse(self, name: str, indices: Any, values: Any) -> Work[Any]:
        """Bring entries of a sparse array that is summed."""


_TYPES = {"fp16": "float16", "bf16": "bfloat16"}


def average_gradients(
    model: Any,
    coordinator: Coordinator,
    *,
    optimizer: Any = None,
    backward_passes: int = 1,
    compression: str | None = None,
    name: str = "gradients",
) -> GradientAverage:
    """Average a model's gradients over all ranks while the backward pass runs, in whatever order each rank makes them.

    A hook passes each gradient to the coordinator when it is accumulated; small ones are fused there. Before the
    optimiser uses them, `GradientAverage.synchronize` waits for all; with `optimizer` each step calls it.

    Parameters
    ----------
    model : torch.nn.Module
        The model; the parameters that need gradients are the same on all ranks.
    coordinator : Coordinator
        The coordinator of the ranks, or a process set of it.
    optimizer : torch.optim.Optimizer, optional
        Its steps first wait for the averages.
    backward_passes : int
        How many backward passes add up to one step: the sums are sent with the last one.
    compression : str, optional
        ``"fp16"`` or ``"bf16"``: dense floating-point gradients are sent as that type, and keep their own.
    name : str
        The prefix of the operations' names, for several models on one coordinator.

    Returns
    -------
    GradientAverage

    Raises
    ------
    NcclUnsupported
        If torch is older than 2.1, which has no hooks after the accumulation.
    ValueError
        If an argument does not fit, or no parameter needs a gradient.
    """
    if compression is not None and compression not in _TYPES:
        raise ValueError(f"compression: expected 'fp16', 'bf16' or None, got {compression!r}")
    if backward_passes < 1:
        raise ValueError(f"backward_passes: expected at least 1, got {backward_passes}")
    return GradientAverage(model, coordinator, optimizer, backward_passes, compression, name)


class _Sent(NamedTuple):
    """A gradient that is being averaged: its work, and what was sent if that is not the gradient itself."""

    work: Work[Any]
    copy: Any


class GradientAverage:
    """The gradients of one model while they are averaged; made by `average_gradients`."""

    def __init__(
        self, model: Any, coordinator: Coordinator, optimizer: Any, passes: int, compression: str | None, name: str
    ) -> None:
        import torch

        self._torch, self._coordinator, self._name = torch, coordinator, name
        self._passes = passes
        self._type = None if compression is None else getattr(torch, _TYPES[compression])
        self._parameters = {
            f"{name}/{each}": parameter for each, parameter in model.named_parameters() if parameter.requires_grad
        }
        if not self._parameters:
            raise ValueError(f"model: no parameter of this {type(model).__name__} needs a gradient")
        if not hasattr(next(iter(self._parameters.values())), "register_post_accumulate_grad_hook"):
            raise NcclUnsupported(
                f"torch {torch.__version__} has no hooks behind the accumulation of gradients; 2.1 has"
            )
        self._lock = threading.Lock()  # gradients on a GPU are accumulated by a thread of torch
        self._seen: dict[str, int] = {}
        self._sent: dict[str, _Sent] = {}
        self._failure: Exception | None = None
        self._is_done = False  # synchronize() was called for this step
        self._sparse = {key for key, parameter in self._parameters.items() if _is_sparse(model, parameter)}
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(key))
            for key, parameter in self._parameters.items()
        ]
        if optimizer is not None:
            self._hooks.append(optimizer.register_step_pre_hook(lambda *_: self._before_step()))

    def _before_step(self) -> None:
        if not self._is_done:  # else the program has called synchronize(), to clip the gradients, say
            self.synchronize()
        self._is_done = False

    def _hook(self, key: str) -> Any:
        def accumulated(parameter: Any) -> None:
            with self._lock:
                self._is_done = False  # also if no step has followed the last synchronize()
                seen = self._seen[key] = self._seen.get(key, 0) + 1
            if seen == self._passes:
                self._bring(key, parameter)
            elif seen > self._passes:
                raise RuntimeError(
                    f"the gradient {key!r} was accumulated {seen} times before synchronize(), and backward_passes is "
                    f"{self._passes}: it is on its way to the other ranks. Call synchronize() after each step's last "
                    "backward pass, or raise backward_passes"
                )

        return accumulated

    def _bring(self, key: str, parameter: Any) -> None:
        gradient = parameter.grad
        try:
            if gradient.is_sparse:
                gradient = gradient.coalesce()
                work = self._coordinator.all_reduce_sparse(key, gradient.indices(), gradient.values())
                sent = _Sent(work, None)
            else:
                copy = None
                if self._type is not None and gradient.dtype != self._type and gradient.is_floating_point():
                    copy = gradient.detach().to(self._type)
                elif not gradient.is_contiguous():
                    copy = gradient.detach().contiguous()
                sent = _Sent(
                    self._coordinator.all_reduce(key, gradient.detach() if copy is None else copy, "avg"), copy
                )
        except Exception as error:
            # Torch's engine would turn it into another error, perhaps in another thread: synchronize() raises it.
            with self._lock:
                self._failure = self._failure or error
            return
        with self._lock:
            self._sent[key] = sent

    def synchronize(self) -> None:
        """Wait until every parameter's ``grad`` is the average, and begin the next step.

        All ranks call it equally often. With an optimiser, each step calls it, unless the program has called it since
        the last step. A parameter that got no gradient in this step counts as zeros: other ranks may have used it.

        Raises
        ------
        NcclError
            If the ranks disagree about a gradient, one is lost, or the coordinator has ended.
        RuntimeError
            If gradients were accumulated, and each of them in fewer than `backward_passes` backward passes.
        """
        with self._lock:
            incomplete = [key for key, seen in self._seen.items() if seen < self._passes]
            unused = [key for key in self._parameters if key not in self._seen]
            failure, self._failure = self._failure, None
        if incomplete and len(self._seen) == len(incomplete):
            raise RuntimeError(
                f"synchronize() after {max(self._seen[key] for key in incomplete)} of {self._passes} backward passes: "
                "the gradients are sent with the last one"
            )
        for key in [*incomplete, *unused]:  # also if one has failed: other ranks wait for them
            parameter = self._parameters[key]
            if parameter.grad is None:
                parameter.grad = self._zeros(key, parameter)
            self._bring(key, parameter)
        with self._lock:
            failure, self._failure = failure or self._failure, None
            sent, self._sent = self._sent, {}
            self._seen.clear()
        for key, each in sent.items():  # all of them, also if one fails: arrays are in use until then
            try:
                self._take(self._parameters[key], each)
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure
        self._is_done = True

    def _take(self, parameter: Any, sent: _Sent) -> None:
        """Wait for an average, and make it the parameter's gradient."""
        result = sent.work.result()
        if parameter.grad is not None and parameter.grad.is_sparse:
            indices, values = result
            parameter.grad = self._sparse_of(indices, values / self._coordinator.size, parameter)
        elif sent.copy is not None:
            parameter.grad.copy_(sent.copy)

    def _zeros(self, key: str, parameter: Any) -> Any:
        torch = self._torch
        if key in self._sparse:
            indices = torch.zeros((1, 0), dtype=torch.int64, device=parameter.device)
            return self._sparse_of(indices, parameter.detach().new_zeros((0, *parameter.shape[1:])), parameter)
        return torch.zeros_like(parameter)

    def _sparse_of(self, indices: Any, values: Any, parameter: Any) -> Any:
        return self._torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=True)

    def close(self) -> None:
        """Remove the hooks; wait for gradients that were sent, if there are any, as `synchronize` does."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._sent:
            self.synchronize()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for hook in self._hooks:  # gradients that were sent are waited for if nothing went wrong
            hook.remove()
        self._hooks = []
        if kind is None:
            self.close()


def _is_sparse(model: Any, parameter: Any) -> bool:
    """Return whether a parameter's gradients are sparse, as those of an embedding may be."""
    return any(
        getattr(each, "sparse", False) and getattr(each, "weight", None) is parameter for each in model.modules()
    )
