"""The works that operations of the torch backend return; torch's own Work wraps them."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ncclpy.errors import NcclError, NcclTimeout

if TYPE_CHECKING:
    from ncclpy.engine.work import Work
    from ncclpy.process_group.blocks import Block
    from ncclpy.process_group.group import ProcessGroup

__all__ = ["CoalescedWork", "PartWork", "PendingCopies", "TorchWork", "backend_error"]

#: Seconds between two checks whether another thread's block has ended.
_POLL_INTERVAL = 1e-3


def backend_error(error: BaseException) -> BaseException:
    """Return an error of ncclpy as torch's users know it: a ``DistBackendError`` with its text, caused by it."""
    if not isinstance(error, NcclError):
        return error
    from torch.distributed import DistBackendError

    made: BaseException = DistBackendError(str(error))
    made.__cause__ = error
    return made


@functools.lru_cache(64)
def _stream_of(device: int, group: str, source: int) -> Any:
    """Return the stream on which futures of a group, or of receives from one of its ranks, are completed.

    A future that waits on one stream must not hold up futures of other groups and ranks. Torch has 32 streams, of
    which each new combination of the arguments gets the next.
    """
    import torch

    return torch.cuda.Stream(device)


class TorchWork:
    """An operation that was begun, with the tensors that receive its result.

    Parameters
    ----------
    ncclpy_work : ncclpy.Work
        The operation.
    outputs : sequence of torch.Tensor
        The tensors that torch's `Work.result` and its future return.
    after : list of callable
        Functions that have to be called once it has succeeded, before its result is used.
    blocks_cpu : bool
        Whether a wait for it blocks the CPU: its data are in CPU memory, or it has none (a barrier). Otherwise a wait
        has the current stream wait.
    group : ncclpy.ProcessGroup
        Its group.
    source : int
        The rank that it receives from, -1 if there is none.
    sequence : int, optional
        How many collectives the group had begun when it was begun; by default the number now.
    """

    __slots__ = (
        "_after", "_after_done", "_blocks_cpu", "_explained", "_failure", "_group", "_lock", "_ncclpy_work",
        "_outputs", "_sequence", "_source",
    )  # fmt: skip

    def __init__(
        self,
        ncclpy_work: Work[Any],
        outputs: Sequence[Any],
        after: Sequence[Callable[[], object]],
        blocks_cpu: bool,
        group: ProcessGroup,
        source: int = -1,
        sequence: int | None = None,
    ) -> None:
        self._ncclpy_work, self._outputs, self._blocks_cpu = ncclpy_work, outputs, blocks_cpu
        self._group, self._source = group, source
        self._sequence = group.seq if sequence is None else sequence
        self._after = after
        self._lock = threading.Lock() if after else None
        self._explained = False
        self._failure: Exception | None = None  # the error of `after`
        self._after_done: Any = None  # an event, if `after` was enqueued on a stream

    def wait(self, seconds: float = 0.0) -> None:
        """Wait for it as torch's works do: on the CPU with `blocks_cpu` or a number of seconds, else on the stream.

        Raises
        ------
        DistBackendError
            If it has failed, or is not done in so many seconds. In the latter case it continues, and the error's text
            says what all ranks do.
        """
        try:
            if self._blocks_cpu or seconds > 0:
                self._wait_here(seconds)
                if self._lock is not None:
                    self._finish()
            else:
                self.synchronize()
        except NcclError as error:
            raise backend_error(error) from error

    def _wait_here(self, seconds: float) -> None:
        try:
            self._ncclpy_work.wait(seconds if seconds > 0 else None)
        except NcclTimeout as error:
            if self._ncclpy_work.is_completed():  # it has just ended; if it has failed, this raises its own error
                self._ncclpy_work.wait()
                return
            if not self._explained:  # once: a caller that polls must not ask all ranks each time
                self._explained = True
                self._explain(error)
            raise

    def _explain(self, error: NcclError) -> None:
        self._group.explain(error)

    def synchronize(self) -> None:
        """Have the current stream wait for it, and for `after`."""
        if self._blocks_cpu:
            self.wait()
            return
        import torch

        try:
            # No stream object is made: every collective runs this.
            self._ncclpy_work.synchronize(torch._C._cuda_getCurrentRawStream(self._ncclpy_work.device))
        except NcclError as error:
            raise backend_error(error) from error
        if self._lock is not None:
            self._finish()

    def _finish(self) -> None:
        """Run `after` once, in the first thread that calls this; other threads wait for the first and raise its error.

        On a GPU the current stream of each caller waits for the work that `after` has enqueued.
        """
        assert self._lock is not None
        with self._lock:
            if self._failure is not None:
                raise self._failure.with_traceback(None)  # its traceback would grow with every caller
            try:
                for each in self._after:
                    each()
                if self._after and self._is_on_gpu():
                    self._note_done()
            except Exception as error:
                self._after, self._failure = (), error
                raise
            self._after = ()  # last: if a signal handler raises before this line, the next caller begins again
        if self._after_done is not None:
            import torch

            torch.cuda.current_stream(self._ncclpy_work.device).wait_event(self._after_done)

    def _is_on_gpu(self) -> bool:
        return not self._blocks_cpu or any(each.is_cuda for each in self._outputs)

    def _note_done(self) -> None:
        """Record an event on the current stream, behind the work of `after`; with `blocks_cpu` wait for the event."""
        import torch

        self._after_done = torch.cuda.current_stream(self._ncclpy_work.device).record_event()
        if self._blocks_cpu:
            self._after_done.synchronize()

    def is_completed(self) -> bool:
        """Return whether it has ended, with or without an error; `after` is done by then."""
        if not self._ncclpy_work.is_completed():
            return False
        if self._lock is not None and self._ncclpy_work.state == "completed":
            try:
                self._finish()
            except Exception:
                return True  # `_failure` is the work's error now
            return self._after_done is None or bool(self._after_done.query())
        return True

    def is_success(self) -> bool:
        """Return whether it has succeeded."""
        return self.is_completed() and self._ncclpy_work.state == "completed" and self._failure is None

    def failure(self) -> str | None:
        """Return the text of its error, None if it has none or has not ended."""
        error = (self._ncclpy_work.exception() or self._failure) if self.is_completed() else None
        return None if error is None else str(error)

    def result(self) -> Sequence[Any]:
        """Return the tensors that have received the result."""
        return self._outputs

    def abort(self) -> None:
        """Refuse: an operation ends with its group."""
        from torch.distributed import DistBackendError

        raise DistBackendError("one operation cannot be aborted alone: abort its process group")

    def duration(self) -> float:
        """Return the milliseconds that it took, if its group was made with ``timing=True``; else -1."""
        seconds = self._ncclpy_work.duration
        return -1.0 if seconds is None else seconds * 1e3

    def sequence_number(self) -> int:
        """Return how many collectives its group had begun before it."""
        return self._sequence

    def source_rank(self) -> int:
        """Return the rank that it receives from."""
        return self._source

    def future_devices(self) -> list[Any]:
        """Return the devices for a future of this work: the GPU of its data, none for data in CPU memory."""
        if self._blocks_cpu:
            return []
        import torch

        return [torch.device("cuda", self._ncclpy_work.device)]

    def when_done(self, callback: Callable[[Any, str | None], object]) -> None:
        """Have ``callback(tensors, None)``, or ``callback(None, text)`` of an error, called once it has ended.

        For data in CPU memory the call is made in another thread. For data on a GPU it is made at once, under a
        current stream that waits for the operation: the callbacks of torch's future enqueue their work behind it.
        """
        if self._blocks_cpu:
            self._ncclpy_work.add_done_callback(lambda ncclpy_work: self._call_back(callback, ncclpy_work))
            return
        import torch

        with torch.cuda.stream(_stream_of(self._ncclpy_work.device, self._group.name, self._source)):
            try:
                self.synchronize()
            except Exception as error:
                callback(None, str(error))
                return
            callback(list(self._outputs), None)

    def _call_back(self, callback: Callable[[Any, str | None], object], ncclpy_work: Work[Any]) -> None:
        try:
            error = ncclpy_work.exception()
            if error is None and self._lock is not None:
                self._finish()
        except Exception as failure:  # of `after`; without a result or an error, a wait for the future would never end
            error = failure
        if error is not None:
            callback(None, str(error))
        else:
            callback(list(self._outputs), None)


class PendingCopies:
    """The works of a group that have still to copy what they received to the program's tensors.

    A wait for the work makes the copy. Other backends of torch receive into the program's tensors themselves: with
    them, results are there after a barrier or the group's end, even if the work was never waited for. This class
    makes the copies then, for the same effect.
    """

    def __init__(self) -> None:
        self._works: dict[int, TorchWork] = {}

    def __bool__(self) -> bool:
        return bool(self._works)

    def add(self, work: TorchWork, after: list[Callable[[], object]]) -> None:
        """Add a work, and to its `after` a function that removes the work again."""
        self.finish()  # else the list would grow in a program that never calls a barrier
        after.append(functools.partial(self._works.pop, id(work), None))
        self._works[id(work)] = work

    def finish(self) -> None:
        """Make the copies of all works that have succeeded."""
        for key, work in list(self._works.items()):
            if work.is_completed():  # this makes the copies
                self._works.pop(key, None)


class CoalescedWork:
    """Operations of one thread that are one launch: a block of the process group, with the results for torch.

    The block is opened with the first tensor, which determines the GPU of the group.
    """

    def __init__(self, limit: float | None) -> None:
        self._limit = limit
        self.block: Block | None = None
        self.ncclpy_work: Work[Any]
        self.outputs: list[Any] = []
        self.after: list[Callable[[], object]] = []
        self.work: TorchWork | None = None  # of all operations, once the block has ended
        self.thread = threading.get_ident()
        self.deferred_callbacks: list[Callable[[TorchWork], object]] = []  # set before there was a `work`
        self._wait_kinds: set[bool] = set()

    def open(self, group: ProcessGroup) -> Block:
        """Open the block, if it is not."""
        if self.block is None:
            block = group.coalescing(self._limit)
            self.ncclpy_work = block.__enter__()
            self.block = block
        return self.block

    def leave(self, error: BaseException) -> None:
        """Leave the block without a launch: its works fail."""
        if self.block is not None:
            self.block.__exit__(type(error), error, None)

    def note(self, blocks_cpu: bool) -> None:
        """Note whether a wait for an operation blocks the CPU."""
        self._wait_kinds.add(blocks_cpu)

    @property
    def blocks_cpu(self) -> bool:
        """Whether a wait for all operations of the block blocks the CPU."""
        return self._wait_kinds != {False}


class PartWork(TorchWork):
    """An operation of a block: it is launched, and ends, with all others of the block."""

    __slots__ = ("_coalesced",)

    def __init__(
        self,
        coalesced: CoalescedWork,
        ncclpy_work: Work[Any],
        outputs: Sequence[Any],
        blocks_cpu: bool,
        group: ProcessGroup,
        source: int = -1,
    ) -> None:
        super().__init__(ncclpy_work, outputs, (), blocks_cpu, group, source)
        self._coalesced = coalesced

    def _whole(self) -> TorchWork | None:
        """Return the work of the whole block; None while the block is open, and if it was left without a launch."""
        return self._coalesced.work

    def wait(self, seconds: float = 0.0) -> None:
        """Wait for the whole block; within the block return at once, as torch's synchronous calls do there."""
        end = time.monotonic() + seconds if seconds > 0 else math.inf
        while self._whole() is None and not self._ncclpy_work.is_completed():
            if threading.get_ident() == self._coalesced.thread:
                return
            if time.monotonic() >= end:
                raise backend_error(NcclTimeout(f"its coalescing block is still open after {seconds:.3g} s"))
            time.sleep(_POLL_INTERVAL)
        whole = self._whole()
        if whole is not None:
            whole.wait(seconds)
        else:  # the block was left, or fails as it ends
            super().wait(seconds)

    def synchronize(self) -> None:
        """Have the current stream wait for the whole block."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the whole block has ended."""
        whole = self._whole()
        return super().is_completed() if whole is None else whole.is_completed()

    def is_success(self) -> bool:
        """Return whether the whole block has succeeded."""
        whole = self._whole()
        return whole is not None and whole.is_success()

    def failure(self) -> str | None:
        """Return the text of the block's error."""
        whole = self._whole()
        return super().failure() if whole is None else whole.failure()

    def when_done(self, callback: Callable[[Any, str | None], object]) -> None:
        """Have `callback` called once the whole block has ended; within the block, keep it for then."""

        def forward(whole: TorchWork) -> None:
            whole.when_done(lambda _, error: callback(None if error else list(self._outputs), error))

        whole = self._whole()
        if whole is not None:
            forward(whole)
        elif self._ncclpy_work.is_completed():  # the block was left
            super().when_done(callback)
        else:
            self._coalesced.deferred_callbacks.append(forward)
