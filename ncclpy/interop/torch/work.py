"""What an operation of the torch backend returns, before torch's own Work wraps it."""

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

__all__ = ["CoalescedWork", "PartWork", "TorchWork", "backend_error"]

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

    A future that waits must not hold up the others. Torch has 32 streams, which it hands out in turn.
    """
    import torch

    return torch.cuda.Stream(device)


class TorchWork:
    """An operation that was begun, with the tensors that it leaves its result in.

    Parameters
    ----------
    begun : ncclpy.Work
        The operation.
    outputs : sequence of torch.Tensor
        What torch's `Work.result` and its future give.
    after : list of callable
        What has to be done once it has succeeded, before its result is used.
    blocks : bool
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
        "_after", "_begun", "_blocks", "_done", "_explained", "_failure", "_group", "_lock", "_outputs", "_sequence",
        "_source",
    )  # fmt: skip

    def __init__(
        self,
        begun: Work[Any],
        outputs: Sequence[Any],
        after: Sequence[Callable[[], object]],
        blocks: bool,
        group: ProcessGroup,
        source: int = -1,
        sequence: int | None = None,
    ) -> None:
        self._begun, self._outputs, self._blocks = begun, outputs, blocks
        self._group, self._source = group, source
        self._sequence = group.seq if sequence is None else sequence
        self._after = after
        self._lock = threading.Lock() if after else None
        self._explained = False
        self._failure: Exception | None = None  # the error of `after`
        self._done: Any = None  # an event, if `after` was enqueued on a stream

    def wait(self, seconds: float = 0.0) -> None:
        """Wait for it as torch's works do, the CPU only where `blocks` says so or a number of seconds is given.

        Raises
        ------
        DistBackendError
            If it has failed, or is not done in so many seconds; in that case it goes on, and the text says what all
            ranks do.
        """
        try:
            if self._blocks or seconds > 0:
                self._wait_here(seconds)
                if self._lock is not None:
                    self._finish()
            else:
                self.synchronize()
        except NcclError as error:
            raise backend_error(error) from error

    def _wait_here(self, seconds: float) -> None:
        try:
            self._begun.wait(seconds if seconds > 0 else None)
        except NcclTimeout as error:
            if self._begun.is_completed():  # just now; if it has failed, its own error says all
                self._begun.wait()
                return
            if not self._explained:  # once: a caller that polls must not ask all ranks each time
                self._explained = True
                self._explain(error)
            raise

    def _explain(self, error: NcclError) -> None:
        self._group.explain(error)

    def synchronize(self) -> None:
        """Have the current stream wait for it, and for `after`."""
        if self._blocks:
            self.wait()
            return
        import torch

        try:
            # No stream object is made: every collective runs this.
            self._begun.synchronize(torch._C._cuda_getCurrentRawStream(self._begun.device))
        except NcclError as error:
            raise backend_error(error) from error
        if self._lock is not None:
            self._finish()

    def _finish(self) -> None:
        """Run `after` once, in the first thread that calls this; the others wait for that, and see its error.

        On a GPU the current stream of each caller waits for it.
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
            self._after = ()  # not before: a signal handler may raise, and the next caller begins again
        if self._done is not None:
            import torch

            torch.cuda.current_stream(self._begun.device).wait_event(self._done)

    def _is_on_gpu(self) -> bool:
        return not self._blocks or any(each.is_cuda for each in self._outputs)

    def _note_done(self) -> None:
        """Note the position of the current stream; the CPU waits for it if it waits for the operation."""
        import torch

        self._done = torch.cuda.current_stream(self._begun.device).record_event()
        if self._blocks:
            self._done.synchronize()

    def is_completed(self) -> bool:
        """Return whether it has ended, with or without an error; `after` is done by then."""
        if not self._begun.is_completed():
            return False
        if self._lock is not None and self._begun.state == "completed":
            try:
                self._finish()
            except Exception:
                return True  # that is the work's error now
            return self._done is None or bool(self._done.query())
        return True

    def is_success(self) -> bool:
        """Return whether it has succeeded."""
        return self.is_completed() and self._begun.state == "completed" and self._failure is None

    def failure(self) -> str | None:
        """Return the text of its error, None if it has none or has not ended."""
        error = (self._begun.exception() or self._failure) if self.is_completed() else None
        return None if error is None else str(error)

    def result(self) -> Sequence[Any]:
        """Return the tensors that have received."""
        return self._outputs

    def abort(self) -> None:
        """Refuse: an operation ends with its group."""
        from torch.distributed import DistBackendError

        raise DistBackendError("one operation cannot be aborted alone: abort its process group")

    def duration(self) -> float:
        """Return the milliseconds that it took, if its group was made with ``timing=True``; else -1."""
        seconds = self._begun.duration
        return -1.0 if seconds is None else seconds * 1e3

    def sequence_number(self) -> int:
        """Return how many collectives its group had begun before it."""
        return self._sequence

    def source_rank(self) -> int:
        """Return the rank that it receives from."""
        return self._source

    def future_devices(self) -> list[Any]:
        """Return the devices with streams that a future of it uses."""
        if self._blocks:
            return []
        import torch

        return [torch.device("cuda", self._begun.device)]

    def when_done(self, tell: Callable[[Any, str | None], object]) -> None:
        """Call ``tell(tensors, None)``, or ``tell(None, text)`` of an error, once it has ended, in another thread.

        For data on a GPU it is called at once, under a current stream that waits for the operation: what a callback of
        torch's future enqueues follows the operation.
        """
        if self._blocks:
            self._begun.add_done_callback(lambda begun: self._tell(tell, begun))
            return
        import torch

        with torch.cuda.stream(_stream_of(self._begun.device, self._group.name, self._source)):
            try:
                self.synchronize()
            except Exception as error:
                tell(None, str(error))
                return
            tell(list(self._outputs), None)

    def _tell(self, tell: Callable[[Any, str | None], object], begun: Work[Any]) -> None:
        try:
            error = begun.exception()
            if error is None and self._lock is not None:
                self._finish()
        except Exception as failure:  # of a copy; a thread that waits for the future must not wait for ever
            error = failure
        if error is not None:
            tell(None, str(error))
        else:
            tell(list(self._outputs), None)


class CoalescedWork:
    """Operations of one thread that are one launch: a block of the process group, and what torch has to know of it.

    The first tensor opens the block, as it tells on which GPU the group is.
    """

    def __init__(self, limit: float | None) -> None:
        self._limit = limit
        self.block: Block | None = None
        self.begun: Work[Any]
        self.outputs: list[Any] = []
        self.after: list[Callable[[], object]] = []
        self.work: TorchWork | None = None  # of all of them, once the block is over
        self.thread = threading.get_ident()  # the thread of the block
        self.told: list[Callable[[TorchWork], object]] = []  # callbacks that were set before there is `work`
        self._kinds: set[bool] = set()

    def open(self, group: ProcessGroup) -> Block:
        """Open the block, if it is not."""
        if self.block is None:
            block = group.coalescing(self._limit)
            self.begun = block.__enter__()
            self.block = block
        return self.block

    def leave(self, error: BaseException) -> None:
        """Launch nothing: its works fail."""
        if self.block is not None:
            self.block.__exit__(type(error), error, None)

    def note(self, blocks: bool) -> None:
        """Note whether a wait for an operation blocks the CPU."""
        self._kinds.add(blocks)

    @property
    def blocks(self) -> bool:
        """Whether a wait for all of them blocks the CPU."""
        return self._kinds != {False}


class PartWork(TorchWork):
    """An operation of a block: it is launched, and ends, with all others of the block."""

    __slots__ = ("_together",)

    def __init__(
        self,
        together: CoalescedWork,
        begun: Work[Any],
        outputs: Sequence[Any],
        blocks: bool,
        group: ProcessGroup,
        source: int = -1,
    ) -> None:
        super().__init__(begun, outputs, (), blocks, group, source)
        self._together = together

    def _whole(self) -> TorchWork | None:
        """Return the work of all of them; None while the block is open, and if it was left."""
        return self._together.work

    def wait(self, seconds: float = 0.0) -> None:
        """Wait for all of them; within the block return at once, as torch's synchronous calls do there."""
        end = time.monotonic() + seconds if seconds > 0 else math.inf
        while self._whole() is None and not self._begun.is_completed():
            if threading.get_ident() == self._together.thread:
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
        """Have the current stream wait for all of them."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether all of them have ended."""
        whole = self._whole()
        return super().is_completed() if whole is None else whole.is_completed()

    def is_success(self) -> bool:
        """Return whether all of them have ended well."""
        whole = self._whole()
        return whole is not None and whole.is_success()

    def failure(self) -> str | None:
        """Return the text of their error."""
        whole = self._whole()
        return super().failure() if whole is None else whole.failure()

    def when_done(self, tell: Callable[[Any, str | None], object]) -> None:
        """Call `tell` once all of them have ended; within the block, note that."""

        def told(whole: TorchWork) -> None:
            whole.when_done(lambda _, error: tell(None if error else list(self._outputs), error))

        whole = self._whole()
        if whole is not None:
            told(whole)
        elif self._begun.is_completed():  # the block was left
            super().when_done(tell)
        else:
            self._together.told.append(told)
