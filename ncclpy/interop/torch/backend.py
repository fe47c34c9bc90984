"""The backend "ncclpy" of torch.distributed: c10d's operations on a process group of ncclpy.

Torch calls a `TorchBackend` through its own class for backends, see `extension`. The process group carries out each
operation, with its checks and waits. This module only translates torch's conventions: arguments as lists, as parts of
one tensor, by rows, in place; and tensors that stand in for others, see `tensors`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ncclpy.errors import NcclAborted, NcclError, NcclUnsupported
from ncclpy.interop.torch import memory as torch_memory
from ncclpy.interop.torch.tensors import OPERATORS, Places, Staging, are_even, bring, operator_of, times
from ncclpy.interop.torch.work import CoalescedWork, PartWork, PendingCopies, TorchWork, backend_error
from ncclpy.types import ReduceOp

if TYPE_CHECKING:
    from ncclpy.engine.work import Work
    from ncclpy.interop.torch.shutdown import StoreShutdown
    from ncclpy.process_group.group import ProcessGroup

__all__ = ["TorchBackend"]

T = TypeVar("T", bound=Callable[..., Any])
#: c10d's ErrorType.
_SUCCESS, _TIMEOUT, _COMM_ERROR = 0, 1, 2


def _operation(method: T) -> T:
    """Have an operation raise torch's errors."""

    @functools.wraps(method)
    def begin(self: Any, *arguments: Any) -> Any:
        try:
            return method(self, *arguments)
        except NcclError as error:
            raise backend_error(error) from error

    return begin  # type: ignore[return-value]


class TorchBackend:
    """One rank of a torch process group: its operations, begun on a process group of ncclpy.

    The names are those of c10d's ``Backend``. Reductions are numbers, see `operator_of`; a timeout is in seconds, and
    None means the group's.

    Parameters
    ----------
    rank, size : int
        This rank, and the number of ranks. They are given here since asking the group for them would make the group.
    make : callable
        Called with a torch.device, or None for a default; returns the `ProcessGroup`. On GPUs the first operation
        calls it, as only the operation's tensors determine this rank's device.
    on_gpu : bool
        Whether the engine works on GPUs: then tensors in CPU memory are staged on one.
    timeout : float
        The timeout of the group, in seconds.
    split : callable
        Called with a store, ranks, a timeout and a name; makes a backend of these ranks, or returns None if this rank
        is not among them.
    store : torch.distributed.Store
        The store of the ranks' rendezvous.
    options : mapping
        The options that were given as ``pg_options``.
    """

    supports_splitting = True

    def __init__(
        self,
        rank: int,
        size: int,
        make: Callable[[Any], ProcessGroup],
        on_gpu: bool,
        timeout: float,
        split: Callable[..., Any],
        store: Any,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        self._make, self._on_gpu = make, on_gpu
        self._make_lock = threading.Lock()
        self._made_group: ProcessGroup | None = None if on_gpu else make(None)
        self._timeout = timeout
        self.changed_timeout: float | None = None  # of new operations, if it was changed
        self._device: Any = None
        self._blocks: dict[int, CoalescedWork] = {}  # open blocks, by thread; mostly there is none
        self._copies = PendingCopies()
        self._preferred_device: Any = None  # the device for a group if no tensor has named one
        self._has_ended = False  # whether the torch group has ended before its `ProcessGroup` was made
        self.split, self.store, self.options = split, store, dict(options or {})
        self.store_shutdown: StoreShutdown | None = None  # of the world's store

    # The beginning and the end of an operation.

    @property
    def group(self) -> ProcessGroup:
        """The process group; the first use makes it."""
        return self._made_group or self._begin_with(None)

    def _begin_with(self, device: Any) -> ProcessGroup:
        """Return the process group; if there is none, make it on `device`; for None or a CPU, on the preferred GPU."""
        with self._make_lock:
            if self._has_ended:
                raise NcclAborted("this torch process group has ended: it was aborted or shut down before any use")
            if self._made_group is None:
                import torch

                if device is None or device.type == "cpu":
                    device = self._preferred_device
                group = self._make(device)
                self._device = device or torch.device("cuda", group.device)
                self._made_group = group  # last: other threads read it without the lock
            return self._made_group

    def prefer(self, device: Any) -> None:
        """Set the GPU that the group takes if no tensor determines one: the group's bound device, or a barrier's."""
        self._preferred_device = device

    def _end(self) -> ProcessGroup | None:
        """Return the group, which the caller ends; if there is none, no later call makes one."""
        with self._make_lock:
            self._has_ended = self._made_group is None
            return self._made_group

    def _staging(self, tensor: Any) -> Staging:
        """Return the `Staging` of an operation that has this tensor; first make the group, and open the block."""
        if self._made_group is None:
            self._begin_with(tensor.device)
        if self._blocks:
            self._open_block()
        return Staging(self._device)

    def _open_block(self) -> CoalescedWork | None:
        """Return the block that this thread is in, and open it if it is not open; None if it is in none."""
        coalesced = self._block()
        if coalesced is not None:
            coalesced.open(self.group)
        return coalesced

    def _limit(self, timeout: float | None) -> float | None:
        """Return the timeout for an operation."""
        if self._blocks and self._block() is not None:
            return None  # the block's timeout applies to all of its operations
        return self.changed_timeout if timeout is None else timeout

    def _work(
        self, begun: Work[Any], outputs: Sequence[Any], staging: Staging, like: Any, source: int = -1
    ) -> TorchWork:
        """Return the work for torch of a begun operation; a wait depends on the device of the tensor `like`."""
        blocks_cpu = not self._on_gpu or like.is_cpu
        coalesced = self._block() if self._blocks else None
        if coalesced is None:
            work = TorchWork(begun, outputs, staging.after, blocks_cpu, self.group, source)
            if staging.after:
                self._copies.add(work, staging.after)
            return work
        coalesced.outputs += outputs
        coalesced.after += staging.after
        coalesced.note(blocks_cpu)
        return PartWork(coalesced, begun, outputs, blocks_cpu, self.group, source)

    # Operations that C++ begins on the group itself, as they need nothing of this layer.

    def direct(self) -> tuple[Any, ...] | None:
        """Return the objects that C++ needs to begin operations itself, None until there is a group.

        Returns
        -------
        tuple
            The group, the open blocks, the operators by torch's number, a function that returns the number of a
            device's current stream (None on CPUs), and the class of ncclpy's errors.
        """
        if self._made_group is None:
            return None
        stream_of = None
        if self._on_gpu:
            import torch

            stream_of = torch._C._cuda_getCurrentRawStream
        return self._made_group, self._blocks, OPERATORS, stream_of, NcclError

    def stand_for(self, begun: Work[Any], outputs: Sequence[Any], source: int, sequence: int) -> TorchWork:
        """Return the work that torch gets for an operation that C++ has begun."""
        return TorchWork(begun, outputs, (), not self._on_gpu, self.group, source, sequence)

    def fail(self, error: NcclError) -> None:
        """Raise an error of the group, or of one of its works, as torch's class of errors."""
        raise backend_error(error) from error

    # Memory that is registered with NCCL, under torch's names.

    @property
    def mem_allocator(self) -> Any:
        """Torch's allocator for a ``torch.cuda.MemPool``: its memory is registered on every communicator here."""
        import torch

        if not self._on_gpu:
            raise NcclUnsupported(
                "mem_allocator: torch's memory pools are of GPUs, and this group is on the host engine"
            )
        return torch_memory.allocator(torch)

    def register_mem_pool(self, pool: Any, symmetric: bool = False) -> None:
        """Check that a pool's memory is registered already, as the memory of pools over `mem_allocator` is."""
        if symmetric:
            raise NcclUnsupported(
                "register_mem_pool: symm=True needs all ranks' lists of segments compared, which "
                "`ncclpy.memory.pool('torch', backend_of(group).group, symmetric=True)` does"
            )
        if not torch_memory.holds(pool):
            raise NcclUnsupported(
                "register_mem_pool: pools over this backend's mem_allocator are registered when they allocate memory; "
                "`ncclpy.memory.attach('torch', hooks=True)` registers the memory of torch's other pools"
            )

    def deregister_mem_pool(self, pool: Any) -> None:
        """Do nothing: memory is deregistered when it is freed, and not before."""

    # Coalescing.

    def _block(self) -> CoalescedWork | None:
        """Return the block that this thread is in."""
        return self._blocks.get(threading.get_ident())

    @_operation
    def start_coalescing(self, timeout: float | None = None) -> None:
        """Begin a block: the operations that this thread begins until `end_coalescing` are one launch."""
        self.drop_coalescing()  # torch does not end a block that an exception has left
        limit = self.changed_timeout if timeout is None else timeout
        self._blocks[threading.get_ident()] = CoalescedWork(limit)

    def drop_coalescing(self) -> None:
        """End the block that this thread is in, if any, without a launch: its works fail."""
        coalesced = self._blocks.pop(threading.get_ident(), None)
        if coalesced is not None:
            coalesced.leave(NcclAborted("its coalescing block was left by an exception, or begun anew"))

    @_operation
    def end_coalescing(self) -> TorchWork:
        """Launch what was begun in the block."""
        coalesced = self._blocks.pop(threading.get_ident(), None)
        if coalesced is None:
            raise RuntimeError("end_coalescing: this thread is in no block")
        coalesced.open(self.group).__exit__(None, None, None)
        work = TorchWork(coalesced.ncclpy_work, coalesced.outputs, coalesced.after, coalesced.blocks_cpu, self.group)
        coalesced.work = work
        if coalesced.after:
            self._copies.add(work, coalesced.after)
        for each in coalesced.deferred_callbacks:
            each(work)
        return work

    @contextlib.contextmanager
    def _one_launch(self, timeout: float | None) -> Iterator[list[TorchWork]]:
        """Make the operations within one launch, that of an open block if there is one.

        Yield a list, to which the work of the launch is added at the end.
        """
        works: list[TorchWork] = []
        coalesced = self._block()
        if coalesced is not None:
            yield works
            coalesced.open(self.group)
            works.append(PartWork(coalesced, coalesced.ncclpy_work, [], coalesced.blocks_cpu, self.group))
            return
        self.start_coalescing(timeout)
        try:
            yield works
        except BaseException as error:
            self._blocks.pop(threading.get_ident()).leave(error)
            raise
        works.append(self.end_coalescing())

    # Collectives.

    @_operation
    def broadcast(self, tensors: list[Any], root: int, timeout: float | None) -> TorchWork:
        """Send the root's tensor to all ranks."""
        tensor = _only(tensors, "tensors")
        staging = self._staging(tensor)
        held = staging.sent(tensor) if root == self.rank else staging.received(tensor)
        begun = self.group.broadcast(held, root=root, timeout=self._limit(timeout))
        return self._work(begun, tensors, staging, tensor)

    @_operation
    def allreduce(self, tensors: list[Any], op: Any, timeout: float | None) -> TorchWork:
        """Reduce a tensor in place, dense or sparse."""
        tensor = _only(tensors, "tensors")
        if tensor.is_sparse:
            return self._sparse(tensor, op, timeout)
        return self._all_reduce(tensor, op, timeout)

    def _all_reduce(self, tensor: Any, op: Any, timeout: float | None, copies: bool = False) -> TorchWork:
        staging = self._staging(tensor)
        reduction, factor = operator_of(op)
        held = staging.both(tensor, copies) if factor is None else staging.scaled(tensor, factor, tensor)
        begun = self.group.all_reduce(held, None, reduction, timeout=self._limit(timeout))
        return self._work(begun, [tensor], staging, tensor)

    def _sparse(self, tensor: Any, op: Any, timeout: float | None) -> TorchWork:
        import torch

        reduction, factor = operator_of(op)
        if reduction is not ReduceOp.SUM:
            raise NcclUnsupported(f"op: sparse tensors can only be summed, got {reduction.name}")
        staging = self._staging(tensor)
        entries = tensor.coalesce()
        indices, values = entries.indices(), entries.values()
        if factor is not None:
            values = times(values, factor)
        shape = tuple(tensor.shape)
        begun = self.group.all_reduce_sparse(
            staging.sent(indices), staging.sent(values), shape=shape, timeout=self._limit(timeout)
        )

        def take() -> None:
            indices, values = (part.to(tensor.device) for part in begun.result())
            # The indices are from other ranks, so they are checked here: torch does not check them later, and would
            # write outside the tensor.
            made = torch.sparse_coo_tensor(indices, values, shape, is_coalesced=True, check_invariants=True)
            bring(made, tensor)

        staging.after.append(take)
        return self._work(begun, [tensor], staging, tensor)

    def allreduce_coalesced(self, tensors: list[Any], op: Any, timeout: float | None) -> TorchWork:
        """Reduce several tensors in place, in one launch; memory that two of them share is reduced once."""
        places = Places()
        with self._one_launch(timeout) as works:
            for tensor in tensors:
                self._reduce_one(tensor, op, len(tensors) > 1 and not tensor.is_sparse and places.has(tensor))
        return works[0]

    @_operation
    def _reduce_one(self, tensor: Any, op: Any, copies: bool) -> TorchWork:
        return self._sparse(tensor, op, None) if tensor.is_sparse else self._all_reduce(tensor, op, None, copies)

    @_operation
    def reduce(self, tensors: list[Any], op: Any, root: int, timeout: float | None) -> TorchWork:
        """Reduce a tensor, in place on the root."""
        tensor = _only(tensors, "tensors")
        staging = self._staging(tensor)
        reduction, factor = operator_of(op)
        is_root = root == self.rank
        if factor is not None:
            held = staging.scaled(tensor, factor, tensor if is_root else None)
        else:
            held = staging.both(tensor) if is_root else staging.sent(tensor)
        begun = self.group.reduce(held, None, reduction, root, timeout=self._limit(timeout))
        return self._work(begun, tensors, staging, tensor)

    @_operation
    def allgather(self, outputs: list[list[Any]], inputs: list[Any], timeout: float | None) -> TorchWork:
        """Gather a part of each rank, as a tensor for each; the parts may differ in size."""
        sent, parts = _only(inputs, "inputs"), _only(outputs, "outputs")
        _count(parts, self.size, "outputs")
        staging = self._staging(sent)
        # Parts of one size are gathered as one tensor: other ranks may pass one, and the launches have to match.
        held = staging.flat_received(parts) if are_even(sent, parts) else staging.all_received(parts)
        begun = self.group.all_gather(staging.sent(sent), held, timeout=self._limit(timeout))
        return self._work(begun, parts, staging, sent)

    @_operation
    def all_gather_single(self, output: Any, sent: Any, timeout: float | None) -> TorchWork:
        """Gather parts of one size in one tensor."""
        staging = self._staging(sent)
        begun = self.group.all_gather(staging.sent(sent), staging.received(output), timeout=self._limit(timeout))
        return self._work(begun, [output], staging, sent)

    def allgather_coalesced(self, outputs: list[list[Any]], inputs: list[Any], timeout: float | None) -> TorchWork:
        """Gather several parts of each rank; ``outputs[rank][i]`` is the i-th of a rank."""
        _count(outputs, self.size, "outputs")
        with self._one_launch(timeout) as works:
            for i, sent in enumerate(inputs):
                self.allgather([[each[i] for each in outputs]], [sent], None)
        return works[0]

    def all_gather_single_coalesced(self, outputs: list[Any], inputs: list[Any], timeout: float | None) -> TorchWork:
        """Run `all_gather_single` for several tensors, in one launch."""
        with self._one_launch(timeout) as works:
            for output, sent in zip(outputs, inputs, strict=True):
                self.all_gather_single(output, sent, None)
        return works[0]

    @_operation
    def gather(self, outputs: list[list[Any]], inputs: list[Any], root: int, timeout: float | None) -> TorchWork:
        """Gather a part of each rank on the root, as a tensor for each."""
        sent = _only(inputs, "inputs")
        parts = _only(outputs, "outputs") if root == self.rank else []
        staging = self._staging(sent)
        begun = self.group.gather(staging.sent(sent), staging.all_received(parts), root, timeout=self._limit(timeout))
        return self._work(begun, parts, staging, sent)

    @_operation
    def scatter(self, outputs: list[Any], inputs: list[list[Any]], root: int, timeout: float | None) -> TorchWork:
        """Send each rank its part of the root's list."""
        output = _only(outputs, "outputs")
        parts = _only(inputs, "inputs") if root == self.rank else []
        staging = self._staging(output)
        begun = self.group.scatter(
            staging.all_sent(parts), staging.received(output), root, timeout=self._limit(timeout)
        )
        return self._work(begun, outputs, staging, output)

    @_operation
    def reduce_scatter(self, outputs: list[Any], inputs: list[list[Any]], op: Any, timeout: float | None) -> TorchWork:
        """Reduce a list of parts, which may differ in size; each rank gets its own."""
        output, parts = _only(outputs, "outputs"), _only(inputs, "inputs")
        _count(parts, self.size, "inputs")
        staging = self._staging(output)
        reduction, factor = operator_of(op)
        if factor is not None:
            parts = [times(part, factor) for part in parts]
        sent = staging.flat_sent(parts) if are_even(output, parts) else staging.all_sent(parts)  # as in `allgather`
        begun = self.group.reduce_scatter(sent, staging.received(output), reduction, timeout=self._limit(timeout))
        return self._work(begun, outputs, staging, output)

    @_operation
    def reduce_scatter_single(self, output: Any, sent: Any, op: Any, timeout: float | None) -> TorchWork:
        """Reduce one tensor of parts of one size; each rank gets its own."""
        staging = self._staging(output)
        reduction, factor = operator_of(op)
        held = staging.sent(sent) if factor is None else staging.scaled(sent, factor, None)
        begun = self.group.reduce_scatter(held, staging.received(output), reduction, timeout=self._limit(timeout))
        return self._work(begun, [output], staging, output)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Any], inputs: list[Any], op: Any, timeout: float | None
    ) -> TorchWork:
        """Run `reduce_scatter_single` for several tensors, in one launch."""
        with self._one_launch(timeout) as works:
            for output, sent in zip(outputs, inputs, strict=True):
                self.reduce_scatter_single(output, sent, op, None)
        return works[0]

    @_operation
    def all_to_all_single(
        self, output: Any, sent: Any, output_rows: list[int], sent_rows: list[int], timeout: float | None
    ) -> TorchWork:
        """Send a part of one tensor to each rank, by rows if numbers of rows are given."""
        staging = self._staging(sent)
        size = self.size
        if output_rows or sent_rows:
            counts = _elements(sent, sent_rows, size, "input"), _elements(output, output_rows, size, "output")
        else:  # equal counts: other ranks may pass numbers of rows, and the launches have to match
            counts = _equal_parts(sent, output, size)
        begun = self.group.all_to_all(
            staging.sent(sent), staging.received(output), *counts, timeout=self._limit(timeout)
        )
        return self._work(begun, [output], staging, sent)

    @_operation
    def alltoall(self, outputs: list[Any], inputs: list[Any], timeout: float | None) -> TorchWork:
        """Send a tensor to each rank."""
        _count(outputs, self.size, "outputs")
        _count(inputs, self.size, "inputs")
        staging = self._staging(inputs[0])
        begun = self.group.all_to_all(
            staging.all_sent(inputs), staging.all_received(outputs), timeout=self._limit(timeout)
        )
        return self._work(begun, outputs, staging, inputs[0])

    @_operation
    def barrier(self, timeout: float | None) -> TorchWork:
        """Begin a barrier; on a GPU this rank takes part once what was enqueued on the current stream is done."""
        producer = None
        if self._on_gpu:
            import torch

            self._begin_with(None)
            producer = torch.cuda.current_stream(self._device)
        coalesced = self._open_block()
        begun = self.group.barrier(stream=producer, timeout=self._limit(timeout))
        after = [self._copies.finish] if self._copies else []
        if coalesced is None:
            return TorchWork(begun, [], after, True, self.group)
        coalesced.after += after
        coalesced.note(True)
        return PartWork(coalesced, begun, [], True, self.group)

    @_operation
    def monitored_barrier(self, timeout: float | None, wait_all_ranks: bool) -> None:
        """Run a barrier and wait for it; the error names all missing ranks, also without `wait_all_ranks`."""
        self.group.barrier(timeout=self._limit(timeout)).wait()

    # Point to point.

    @_operation
    def send(self, tensors: list[Any], peer: int, tag: int) -> TorchWork:
        """Send a tensor to a rank."""
        tensor = _only(tensors, "tensors")
        staging = self._staging(tensor)
        begun = self.group.send(staging.sent(tensor), peer, tag, timeout=self._limit(None))
        return self._work(begun, tensors, staging, tensor)

    @_operation
    def recv(self, tensors: list[Any], peer: int, tag: int) -> TorchWork:
        """Receive a tensor from a rank."""
        tensor = _only(tensors, "tensors")
        staging = self._staging(tensor)
        begun = self.group.recv(staging.received(tensor), peer, tag, timeout=self._limit(None))
        return self._work(begun, tensors, staging, tensor, peer)

    @_operation
    def recv_anysource(self, tensors: list[Any], tag: int) -> TorchWork:
        """Refuse: the group's own error says what to do."""
        return self.recv(tensors, -1, tag)

    # The group.

    def sequence_number(self) -> int:
        """Return how many collectives were begun; this makes no group."""
        return 0 if self._made_group is None else self._made_group.seq

    def set_timeout(self, seconds: float) -> None:
        """Set another timeout for operations that begin from now on."""
        self._timeout = self.changed_timeout = seconds

    def timeout_ms(self) -> int:
        """Return the group's timeout in milliseconds."""
        return int(self._timeout * 1e3)

    @_operation
    def connect(self, device: Any) -> None:
        """Make the communicator now, for a device."""
        self._begin_with(device)
        self.group.connect()

    @_operation
    def wait_for_pending_works(self) -> None:
        """Wait until all operations that were begun are done."""
        if self._made_group is not None:
            self._made_group.wait_for_pending_works()
            self._copies.finish()

    def error_type(self) -> int:
        """Return c10d's number for the error that has ended the group, 0 if there is none."""
        error = None if self._made_group is None else self._made_group.error
        if error is None:
            return _SUCCESS
        return _TIMEOUT if isinstance(error, TimeoutError) else _COMM_ERROR

    @_operation
    def abort(self) -> None:
        """End the group on all ranks, and release everything."""
        group = self._end()
        if group is not None:
            group.abort("its torch process group was aborted")
            group.close()

    @_operation
    def shutdown(self) -> None:
        """Wait for all operations, and release everything."""
        group = self._end()
        try:
            if group is not None:
                group.close()
                self._copies.finish()
        finally:
            if self.store_shutdown is not None:  # torch drops the store next, and with it a server in this process
                self.store_shutdown.end()


def _only(tensors: Sequence[Any], argument: str) -> Any:
    """Return the only element of a list; torch's lists with several were for processes with several devices."""
    if len(tensors) != 1:
        raise ValueError(f"{argument}: expected one, as a rank has one device, got {len(tensors)}")
    return tensors[0]


def _count(parts: Sequence[Any], size: int, argument: str) -> None:
    if len(parts) != size:
        raise ValueError(f"{argument}: expected {size} tensors, one for each rank, got {len(parts)}")


def _equal_parts(sent: Any, output: Any, size: int) -> tuple[list[int], list[int]]:
    """Return how many elements are sent to, and received from, each rank, if no numbers of rows are given."""
    total = sent.numel()
    if total != output.numel():
        raise ValueError(f"input has {total} elements, and output {output.numel()}; pass split sizes")
    if total % size:
        raise ValueError(f"input: {total} elements cannot be divided by {size} ranks; pass split sizes")
    return [total // size] * size, [total // size] * size


def _elements(tensor: Any, rows: Sequence[int], size: int, which: str) -> list[int]:
    """Return how many elements each rank's part has, from numbers of rows; without these all parts are equal."""
    total = tensor.shape[0] if tensor.dim() else 1
    if not rows:
        if total % size:
            raise ValueError(f"{which}: {total} rows cannot be divided by {size} ranks; pass split sizes")
        rows = [total // size] * size
    _count(rows, size, f"{which} split sizes")
    if sum(rows) != total:
        raise ValueError(f"{which} split sizes: {list(rows)} are {sum(rows)} rows, and the tensor has {total}")
    row = tensor.numel() // total if total else 0
    return [each * row for each in rows]
