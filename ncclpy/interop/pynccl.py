"""The interface of vLLM's ``PyNcclCommunicator`` over ncclpy: a communicator for tensors, made by a CPU group's ranks.

A program changes ``from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator`` into
``from ncclpy.interop.pynccl import PyNcclCommunicator``. vLLM is not needed, and torch is imported when the first
communicator is made. On the host engine it is for tensors of the CPU. `NCCLLibrary` and the names beside it are those
that vLLM's module imports from its ``pynccl_wrapper``.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any

from ncclpy.bootstrap.store import as_store
from ncclpy.bootstrap.store_arguments import TIMEOUT
from ncclpy.core.communicator import Communicator
from ncclpy.core.lifecycle import get_unique_id
from ncclpy.core.runtime.device import current, device_count
from ncclpy.core.runtime.library import library
from ncclpy.core.runtime.library import use as use_library
from ncclpy.core.window import Window
from ncclpy.errors import LibraryNotFound, NcclUnsupported
from ncclpy.interop import c_calls
from ncclpy.interop.pynccl_wrapper import (
    NCCLLibrary,
    as_operator,
    buffer_type,
    cudaStream_t,
    ncclComm_t,
    ncclDataTypeEnum,
    ncclRedOpTypeEnum,
    ncclUniqueId,
)
from ncclpy.types import UniqueId, as_integer

__all__ = [
    "NCCLLibrary",
    "PyNcclCommunicator",
    "buffer_type",
    "cudaStream_t",
    "ncclComm_t",
    "ncclDataTypeEnum",
    "ncclRedOpTypeEnum",
    "ncclUniqueId",
]

_log = logging.getLogger("ncclpy")

#: Seconds for an abort, as in vLLM; then the call returns, and the abort may continue.
_ABORT_TIMEOUT = 5.0
#: The name of the ranks' rendezvous in a store.
_RENDEZVOUS = "ncclpy/pynccl"


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise ModuleNotFoundError(
            f"PyNcclCommunicator is for tensors of torch, which cannot be imported: {error}. Install it (pip install "
            "torch), or use ncclpy.Communicator, which needs no framework",
            name="torch",
        ) from error
    return torch


class PyNcclCommunicator:
    """One rank's communicator for tensors, like vLLM's class of that name.

    It is disabled in a world of one rank, if VLLM_DISABLE_PYNCCL is "1" or "true", and if no NCCL is found, which a
    warning of the log ``ncclpy`` explains. On a disabled one collectives, sends and receives do nothing and return
    None, as in vLLM.

    Parameters
    ----------
    group
        How the ranks find each other: a ``torch.distributed`` group that is not of NCCL's backend, None for the
        default one; an object with ``rank``, ``world_size`` and ``broadcast_obj(obj, src)``, as vLLM's
        ``StatelessProcessGroup``; or ``(store, rank, world_size)`` with a store of ncclpy or one that
        `ncclpy.bootstrap.as_store` takes.
    device
        Where the tensors are: a ``torch.device``, its name, or the ordinal of a GPU; None is the current GPU. On the
        host engine tensors are on the CPU, and an ordinal chooses the engine's device, by default the rank modulo the
        number of devices.
    library_path
        The library to use, as `ncclpy.use` takes it; by default the one that is loaded, or that ncclpy finds.
    timeout
        Seconds that any wait may take, from the rendezvous on, as for `ncclpy.Communicator.init`; given on all ranks
        or on none. Without it a rendezvous in a store has 300 s. A rendezvous by a torch group or a stateless one
        always has that group's own deadline.

    Attributes
    ----------
    rank, world_size : int
        This rank and the number of ranks.
    group
        As given.
    available : bool
        Whether there is a communicator.
    disabled : bool
        Whether calls do nothing; it may be set, and `change_state` does.
    device : torch.device
        Where its tensors are; None if it was disabled from the beginning.
    stream
        The stream of calls that name none; None is torch's current one.
    comm : Communicator
        The communicator, of ncclpy. This attribute and the next two are missing if it was disabled from the beginning.
    unique_id : UniqueId
        The id that all ranks have got in the rendezvous.
    nccl_version : int
        The version of NCCL as a number: 23203 is 2.32.3.

    Raises
    ------
    ModuleNotFoundError
        If there is no torch.
    ValueError
        If a torch group is of NCCL's backend; if there is no such device, or the engine does not reach its memory.
    TypeError
        If `group` is none of these.
    RuntimeError
        If `group` is None or a torch group, and torch.distributed is not initialised; if another library than
        `library_path` is loaded already.
    NcclTimeout
        If some ranks are missing after `timeout`.
    """

    def __init__(
        self, group: Any, device: Any, library_path: str | None = None, *, timeout: float | None = None
    ) -> None:
        torch = _torch()
        self.group = group
        self.rank, self.world_size = _place_in(group)
        if not self._begin(library_path):
            return
        mine = bytes(get_unique_id()) if self.rank == 0 else b""
        self._connect(torch, _exchanged(torch, group, self.rank, self.world_size, mine, timeout), device, timeout)

    @classmethod
    def from_unique_id_bytes(
        cls,
        unique_id_bytes: bytes,
        rank: int,
        world_size: int,
        device: Any,
        library_path: str | None = None,
        *,
        timeout: float | None = None,
    ) -> PyNcclCommunicator:
        """Make a communicator without a group, from an id that the program has sent to all ranks.

        Parameters
        ----------
        unique_id_bytes
            The 128 bytes of `ncclpy.get_unique_id`, called on one of the ranks.
        rank, world_size
            This rank and the number of ranks.
        device, library_path, timeout
            As for the class.
        """
        torch = _torch()
        made = cls.__new__(cls)
        made.group = None
        made.rank, made.world_size = as_integer(rank, "rank"), as_integer(world_size, "world_size")
        if made._begin(library_path):
            made._connect(torch, unique_id_bytes, device, timeout)
        return made

    def _begin(self, library_path: str | None) -> bool:
        """Begin as disabled, and load the library; return whether a communicator has to be made."""
        self.available, self.disabled = False, True
        self.stream: Any = None
        self.device: Any = None
        self._windows: list[Window] = []
        self._suspended = False
        if self.world_size == 1 or os.environ.get("VLLM_DISABLE_PYNCCL", "").strip().lower() in ("1", "true"):
            return False
        if library_path is not None:
            use_library(library_path)
        try:
            major, minor, patch = library().version
        except LibraryNotFound as error:
            _log.warning("PyNcclCommunicator of rank %s is disabled: %s", self.rank, error)
            return False
        self.nccl_version = major * 10000 + minor * 100 + patch
        return True

    def _connect(self, torch: Any, unique_id: bytes, device: Any, timeout: float | None) -> None:
        self.unique_id = UniqueId.from_bytes(unique_id)
        self.device, ordinal = _device_of(torch, device, self.rank)
        self.comm = Communicator.init(self.world_size, self.rank, self.unique_id, device=ordinal, timeout=timeout)
        self.available, self.disabled = True, False
        try:
            # If the ranks cannot communicate, the error is raised here, and not in the middle of the program.
            self.all_reduce(torch.zeros(1, device=self.device))
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
        except BaseException:
            self.destroy()
            raise

    def __repr__(self) -> str:
        state = "disabled" if self.disabled else f"on {self.device}"
        return f"<PyNcclCommunicator rank {self.rank} of {self.world_size}, {state}>"

    def destroy(self) -> None:
        """Abort it at once, whatever runs on it, and disable it; a second call does nothing.

        The call returns after 5 s at most; then the abort may continue in its own thread.
        """
        if self.available:
            self.available, self.disabled = False, True
            self._windows.clear()
            self.comm.abort(timeout=_ABORT_TIMEOUT)

    def _on_own_device(self, tensor: Any, argument: str) -> Any:
        """Return a tensor; raise `ValueError` if it is on another device than this communicator's."""
        if tensor.device != self.device:
            raise ValueError(
                f"{argument}: the tensor is on {tensor.device}, and this communicator works on {self.device}"
            )
        return tensor

    def _or_own_stream(self, stream: Any) -> Any:
        return self.stream if stream is None else stream

    def all_reduce(self, in_tensor: Any, out_tensor: Any = None, op: Any = None, stream: Any = None) -> Any:
        """Reduce what all ranks send; return the tensor that has received the result.

        Parameters
        ----------
        in_tensor
            What this rank sends.
        out_tensor
            The tensor for the result; a new one by default.
        op
            A ``torch.distributed.ReduceOp``, or another name of an operator; a sum by default.
        stream
            The stream; by default the attribute `stream`.
        """
        if self.disabled:
            return None
        self._on_own_device(in_tensor, "in_tensor")
        if out_tensor is None:
            out_tensor = _torch().empty_like(in_tensor)
        self.comm.all_reduce(
            in_tensor,
            self._on_own_device(out_tensor, "out_tensor"),
            as_operator(op),
            stream=self._or_own_stream(stream),
        )
        return out_tensor

    def all_gather(self, output_tensor: Any, input_tensor: Any, stream: Any = None) -> None:
        """Receive on each rank what all send, concatenated by rank.

        Parameters
        ----------
        output_tensor
            The receiving tensor.
        input_tensor
            What this rank sends.
        stream
            The stream; by default the attribute `stream`.
        """
        if self.disabled:
            return
        self._on_own_device(output_tensor, "output_tensor")
        self.comm.all_gather(
            self._on_own_device(input_tensor, "input_tensor"), output_tensor, stream=self._or_own_stream(stream)
        )

    def all_gatherv(self, output_tensor: Any, input_tensor: Any, sizes: list[int], stream: Any = None) -> None:
        """Receive on each rank what all send, as many rows of each rank as `sizes` says.

        Parameters
        ----------
        output_tensor
            The receiving tensor, ``sum(sizes)`` rows.
        input_tensor
            What this rank sends, ``sizes[rank]`` rows.
        sizes
            The number of rows of each rank.
        stream
            The stream; by default the attribute `stream`.
        """
        if self.disabled:
            return
        counts = self._counts(self._on_own_device(output_tensor, "output_tensor"), "output_tensor", sizes)
        self.comm.all_gather(
            self._on_own_device(input_tensor, "input_tensor"),
            output_tensor,
            counts,
            stream=self._or_own_stream(stream),
        )

    def reduce_scatter(self, output_tensor: Any, input_tensor: Any, op: Any = None, stream: Any = None) -> None:
        """Reduce what all ranks send; each receives its part.

        Parameters
        ----------
        output_tensor
            The tensor for this rank's part.
        input_tensor
            What this rank sends.
        op
            As for `all_reduce`.
        stream
            The stream; by default the attribute `stream`.
        """
        if self.disabled:
            return
        self._on_own_device(output_tensor, "output_tensor")
        send = self._on_own_device(input_tensor, "input_tensor")
        self.comm.reduce_scatter(send, output_tensor, as_operator(op), stream=self._or_own_stream(stream))

    def reduce_scatterv(
        self, output_tensor: Any, input_tensor: Any, sizes: list[int], op: Any = None, stream: Any = None
    ) -> None:
        """Reduce what all ranks send; each receives as many rows as `sizes` says.

        Parameters
        ----------
        output_tensor
            The tensor for this rank's part, ``sizes[rank]`` rows.
        input_tensor
            What this rank sends, ``sum(sizes)`` rows.
        sizes
            The number of rows of each rank.
        op
            As for `all_reduce`.
        stream
            The stream; by default the attribute `stream`.
        """
        if self.disabled:
            return
        counts = self._counts(self._on_own_device(input_tensor, "input_tensor"), "input_tensor", sizes)
        self._on_own_device(output_tensor, "output_tensor")
        self.comm.reduce_scatter(
            input_tensor, output_tensor, as_operator(op), counts, stream=self._or_own_stream(stream)
        )

    def reduce(self, output_tensor: Any, input_tensor: Any, root: int, op: Any = None, stream: Any = None) -> None:
        """Reduce what all ranks send; the root receives it.

        Parameters
        ----------
        output_tensor
            The receiving tensor on the root; not used elsewhere.
        input_tensor
            What this rank sends.
        root
            The rank that receives.
        op
            As for `all_reduce`.
        stream
            The stream; by default the attribute `stream`.
        """
        if self.disabled:
            return
        receives = self._on_own_device(output_tensor, "output_tensor") if root == self.rank else None
        send = self._on_own_device(input_tensor, "input_tensor")
        self.comm.reduce(send, receives, as_operator(op), root, stream=self._or_own_stream(stream))

    def scatter(self, output_tensor: Any, input_tensor: Any, sizes: list[int], root: int, stream: Any = None) -> None:
        """Send each rank its rows of the root's tensor, as many as `sizes` says.

        Parameters
        ----------
        output_tensor
            The receiving tensor, ``sizes[rank]`` rows.
        input_tensor
            What the root sends, ``sum(sizes)`` rows; not used elsewhere.
        sizes
            The number of rows of each rank.
        root
            The rank that sends.
        stream
            The stream; by default the attribute `stream`.
        """
        if self.disabled:
            return
        self._on_own_device(output_tensor, "output_tensor")
        if root != self.rank:
            self.comm.scatter(None, output_tensor, root, stream=self._or_own_stream(stream))
            return
        self._counts(self._on_own_device(input_tensor, "input_tensor"), "input_tensor", sizes)
        self.comm.scatter(
            list(input_tensor.split(list(sizes))), output_tensor, root, stream=self._or_own_stream(stream)
        )

    def _counts(self, whole: Any, argument: str, sizes: list[int]) -> list[int]:
        """Return how many elements each rank's rows have in the tensor `whole`."""
        if len(sizes) != self.world_size:
            raise ValueError(f"sizes: {len(sizes)} numbers for {self.world_size} ranks: {list(sizes)}")
        rows = whole.shape[0]
        if sum(sizes) != rows:
            raise ValueError(f"sizes: {list(sizes)} are {sum(sizes)} rows, and {argument} has {rows}")
        row = whole.numel() // rows if rows else 0
        return [size * row for size in sizes]

    def send(self, tensor: Any, dst: int, stream: Any = None) -> None:
        """Send a tensor to a rank.

        Parameters
        ----------
        tensor
            What is sent.
        dst
            The rank.
        stream
            The stream; by default the attribute `stream`.
        """
        if not self.disabled:
            self.comm.send(self._on_own_device(tensor, "tensor"), dst, stream=self._or_own_stream(stream))

    def recv(self, tensor: Any, src: int, stream: Any = None) -> None:
        """Receive a tensor from a rank.

        Parameters
        ----------
        tensor
            The receiving tensor.
        src
            The rank.
        stream
            The stream; by default the attribute `stream`.
        """
        if not self.disabled:
            self.comm.recv(self._on_own_device(tensor, "tensor"), src, stream=self._or_own_stream(stream))

    def broadcast(self, tensor: Any, src: int, stream: Any = None) -> None:
        """Send one rank's tensor to all.

        Parameters
        ----------
        tensor
            The tensor that is sent, or that receives.
        src
            The rank that sends.
        stream
            The stream; by default the attribute `stream`.
        """
        if not self.disabled:
            self.comm.broadcast(self._on_own_device(tensor, "tensor"), root=src, stream=self._or_own_stream(stream))

    def group_start(self) -> None:
        """Begin a group of this thread: `group_end` launches its calls together. Groups nest."""
        c_calls.group_start()

    def group_end(self) -> None:
        """End the group that this thread has begun last; the end of the outermost one launches the calls of all."""
        c_calls.group_end("group_end")

    def batch_isend_irecv(self, p2p_ops: list[Any], stream: Any = None) -> None:
        """Launch sends and receives together.

        Parameters
        ----------
        p2p_ops
            Objects of ``torch.distributed.P2POp``, or objects with its ``op``, ``tensor`` and ``group_peer``.
        stream
            The stream; by default the attribute `stream`.
        """
        if self.disabled:
            return
        ways = {"isend": self.send, "send": self.send, "irecv": self.recv, "recv": self.recv}
        calls = [ways.get(getattr(each.op, "__name__", "")) for each in p2p_ops]
        if None in calls:
            wrong = p2p_ops[calls.index(None)].op
            raise ValueError(f"p2p_ops: expected torch.distributed.isend and irecv, got {wrong!r}")
        from ncclpy.core.calls.group import Group

        with Group():
            for call, each in zip(calls, p2p_ops, strict=True):
                assert call is not None
                call(each.tensor, each.group_peer, stream)

    def register_comm_window(self, tensor: Any) -> Window:
        """Register a tensor's memory as a window; all ranks do so.

        Parameters
        ----------
        tensor
            A tensor; on GPUs in memory that NCCL has allocated: `ncclpy.memory`.

        Returns
        -------
        Window
            The window, for `deregister_comm_window`; until then this object keeps it.
        """
        return self._window(tensor)

    def register_comm_window_raw(self, ptr: int, size: int) -> Window:
        """Register memory as a window; all ranks do so.

        Parameters
        ----------
        ptr
            The address of the memory.
        size
            The bytes of the memory.
        """
        return self._window((ptr, size, "uint8"))

    def _window(self, buffer: Any) -> Window:
        if not self.available:
            raise RuntimeError(f"{self!r} has no communicator to register memory with; look at `available` first")
        window = self.comm.window(buffer)
        self._windows.append(window)
        return window

    def deregister_comm_window(self, window: Window | None) -> None:
        """Deregister a window; all ranks do so.

        Parameters
        ----------
        window
            The window that was returned; None does nothing.
        """
        if window is not None:
            window.close()
            self._windows = [each for each in self._windows if each is not window]

    def suspend(self) -> None:
        """Release the device memory of an idle communicator, until `resume`; all ranks do so.

        Nothing happens without a communicator, or if NCCL is older than 2.29.7. If the communicator was made with a
        `timeout`, this raises `ValueError`: its memory is shared with its abort handle, so NCCL cannot release it.
        """
        if self.available and not self._suspended:
            with contextlib.suppress(NcclUnsupported):
                self.comm.suspend()
                self._suspended = True

    def resume(self) -> None:
        """Undo `suspend`; all ranks do so. A communicator that is not suspended stays as it is."""
        if self.available and self._suspended:
            self.comm.resume()
            self._suspended = False

    @contextlib.contextmanager
    def change_state(self, enable: bool | None = None, stream: Any = None) -> Iterator[None]:
        """Enable or disable it, and choose its stream, in a ``with`` block.

        Parameters
        ----------
        enable
            Whether it is enabled; by default it is, if there is a communicator.
        stream
            The stream of calls that name none; by default as before.
        """
        before = self.disabled, self.stream
        self.disabled = not (self.available if enable is None else enable and self.available)
        self.stream = self._or_own_stream(stream)
        try:
            yield
        finally:
            self.disabled, self.stream = before


def _place_in(group: Any) -> tuple[int, int]:
    """Return this rank and the number of ranks."""
    if isinstance(group, tuple):
        if len(group) != 3:
            raise TypeError(f"group: a tuple stands for (store, rank, world_size), got {len(group)} items")
        return as_integer(group[1], "rank"), as_integer(group[2], "world_size")
    if hasattr(group, "broadcast_obj"):
        return as_integer(group.rank, "group.rank"), as_integer(group.world_size, "group.world_size")
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "group: torch.distributed has no process group yet; call torch.distributed.init_process_group('gloo') "
            "first, or pass (store, rank, world_size)"
        )
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            "group: expected a torch.distributed group, an object with rank, world_size and broadcast_obj, or (store, "
            f"rank, world_size), got {type(group).__module__}.{type(group).__qualname__}"
        )
    if str(dist.get_backend(group)) == "nccl":
        raise ValueError(
            "group: this one is of torch's NCCL backend; pass one of the CPU's, "
            "torch.distributed.new_group(backend='gloo') say"
        )
    return dist.get_rank(group), dist.get_world_size(group)


def _exchanged(torch: Any, group: Any, rank: int, size: int, mine: bytes, timeout: float | None) -> bytes:
    """Return what rank 0 passes as `mine`, the bytes of its unique id."""
    if isinstance(group, tuple):
        # The name of a completed rendezvous may be used again, so there may be several communicators.
        return as_store(group[0]).gather(_RENDEZVOUS, rank, size, mine, TIMEOUT if timeout is None else timeout)[0]
    if hasattr(group, "broadcast_obj"):
        return bytes(group.broadcast_obj(mine if rank == 0 else None, src=0))
    import torch.distributed as dist

    tensor = torch.zeros(UniqueId.SIZE, dtype=torch.uint8)
    if rank == 0:
        tensor.copy_(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
    dist.broadcast(tensor, src=dist.get_process_group_ranks(group)[0], group=group)
    return bytes(tensor.tolist())


def _device_of(torch: Any, device: Any, rank: int) -> tuple[Any, int]:
    """Return where the tensors are, and the ordinal of the device for NCCL."""
    host = library().engine == "host"
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        if device.type != ("cpu" if host else "cuda"):
            raise ValueError(
                f"device: tensors on {device} cannot be communicated by the {library().engine} engine; it takes those "
                f"on {'the CPU' if host else 'GPUs'}"
            )
        ordinal = device.index
    else:
        ordinal = None if device is None else as_integer(device, "device")
    if host:
        return torch.device("cpu"), rank % device_count() if ordinal is None else ordinal
    ordinal = current() if ordinal is None else ordinal
    return torch.device("cuda", ordinal), ordinal
