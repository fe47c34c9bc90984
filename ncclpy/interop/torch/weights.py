"""Weights sent from a trainer to inference engines over a process group: named tensors, in buckets, by version.

One rank of the group has the weights, the others receive them. A transfer has four steps:

1. The group admits the processes that wait in `ProcessGroup.join`.
2. The ranks exchange their roles and the digests of the layout (names, types, shapes) that they have. If a digest
   differs from the sender's, the sender broadcasts the layout.
3. The ranks exchange whether they can take these weights. If one of them cannot, all raise the same `ValueError`.
4. The weights are one sequence of bytes, which is broadcast in buckets. Two buffers are used in turn: while one is
   broadcast, the other is filled or emptied. A barrier ends the transfer.

An error on one rank after step 3 aborts the group, so that the other ranks do not wait for this one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ncclpy.errors import NcclError, NcclTimeout
from ncclpy.process_group.group import ProcessGroup

if TYPE_CHECKING:
    from ncclpy.engine.work import Work

__all__ = ["WeightReceiver", "WeightSender", "Weights"]

#: Bytes at which each tensor begins in the sequence: a multiple of every type's size.
_ALIGNMENT = 256
#: Seconds between two checks for a sender.
_PAUSE = 0.05
_BUFFERS = 2
_BUCKET_BYTES = 256 << 20


class Weights(NamedTuple):
    """Weights of one version."""

    version: int
    tensors: Mapping[str, Any]


class _Entry(NamedTuple):
    """A tensor's place in the sequence of bytes."""

    name: str
    dtype: Any
    shape: tuple[int, ...]
    start: int
    end: int


class _Deadline:
    """The time that is left for a transfer."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds

    def left(self) -> float | None:
        """Return the seconds that are left for a step, None if the group's timeout applies."""
        return None if self._end is None else max(self._end - time.monotonic(), 1e-3)

    def patience(self) -> int:
        """Return the milliseconds that are left, 0 if none, -1 if there is no limit."""
        return -1 if self._end is None else max(0, int(1e3 * (self._end - time.monotonic())))


class _Layout:
    """The names, types and shapes of the tensors, in the sender's order."""

    def __init__(self, tensors: Iterable[tuple[str, Any, tuple[int, ...]]]) -> None:
        self.entries: list[_Entry] = []
        start = 0
        for name, dtype, shape in tensors:
            nbytes = dtype.itemsize
            for length in shape:
                nbytes *= length
            self.entries.append(_Entry(name, dtype, tuple(shape), start, start + nbytes))
            start += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self.nbytes = start
        names = [each.name for each in self.entries]
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"tensors: the name {twice[0]!r} is given twice")
        listed = [[each.name, str(each.dtype).removeprefix("torch."), list(each.shape)] for each in self.entries]
        self.data = json.dumps(listed).encode()
        self.digest = int.from_bytes(hashlib.sha256(self.data).digest()[:7], "big") + 1  # 0: no layout

    @classmethod
    def from_data(cls, data: bytes) -> _Layout:
        """Return the layout of a sender."""
        import torch

        return cls((name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in json.loads(data))

    def within(self, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield what a bucket has: an entry's number, the interval of its bytes, and its place in the bucket."""
        for number, each in enumerate(self.entries):
            first, last = max(start, each.start), min(end, each.end)
            if first < last:
                yield number, first - each.start, last - each.start, first - start


class _Member:
    """One rank's part in transfers: exchanges with the other ranks, and the two buffers."""

    def __init__(self, group: ProcessGroup, admits: bool) -> None:
        import torch

        from ncclpy.core.runtime.library import library

        self.group, self._admits = group, admits
        self.has_joined = False  # by `ProcessGroup.join`, since the last transfer
        on_gpu = library().engine != "host"
        self.device = torch.device("cuda", group.device) if on_gpu else torch.device("cpu")
        self._buffers: list[Any] = []
        self.layout: _Layout | None = None
        self.bucket_bytes = 0

    def begin(self, deadline: _Deadline, sends: _Layout | None = None, version: int = 0) -> tuple[int, int]:
        """Find the sender, and have its layout on this rank; return its rank and version.

        The sender passes its layout as `sends`, and the version of its weights; receivers pass neither. Receivers look
        for a sender until the deadline of one of them, when all raise `NcclTimeout`.
        """
        while True:
            if self.has_joined:
                self.has_joined = False  # the others are in the `admit` that has let this rank in
            elif self._admits:
                self.group.admit(deadline.left())
            if sends is not None:
                self.layout = sends
            layout = self.layout
            own = {
                "sends": int(sends is not None),
                "version": version,
                "digest": layout.digest if layout else 0,
                "layout_bytes": 0 if sends is None else len(sends.data),
                "bucket_bytes": self.bucket_bytes,
                "patience": deadline.patience(),  # milliseconds that it still waits for a sender
            }
            found = [dict(zip(own, row, strict=True)) for row in self._exchange(list(own.values()), deadline)]
            senders = [rank for rank, each in enumerate(found) if each["sends"]]
            if len(senders) > 1:
                raise ValueError(
                    f"ranks {', '.join(map(str, senders))} of process group {self.group.name!r} all send weights; one "
                    "rank of a group can, the others receive"
                )
            if senders:
                break
            if any(each["patience"] == 0 for each in found):
                raise NcclTimeout(
                    f"no rank of process group {self.group.name!r} has sent weights within the timeout of a rank: all "
                    f"{self.group.size} ranks receive. The sender joins the group by WeightSender.join"
                )
            time.sleep(_PAUSE)
        (sender,) = senders
        told = found[sender]
        if any(each["digest"] != told["digest"] for each in found):
            data = self._broadcast_bytes(b"" if sends is None else sends.data, told["layout_bytes"], sender, deadline)
            if sends is None:
                self.layout = _Layout.from_data(data)
        self.bucket_bytes = told["bucket_bytes"]
        return sender, told["version"]

    def agree(self, problem: str | None, deadline: _Deadline) -> None:
        """Raise the `ValueError` of the first rank that has a problem, on all ranks."""
        text = (problem or "").encode()
        lengths = [row[0] for row in self._exchange([len(text)], deadline)]
        for rank, length in enumerate(lengths):
            if length:
                raise ValueError(f"rank {rank}: {self._broadcast_bytes(text, length, rank, deadline).decode()}")

    def broadcast_buckets(
        self, sender: int, deadline: _Deadline, fill: Callable | None, empty: Callable | None
    ) -> None:
        """Broadcast all buckets.

        `fill` and `empty` are called with a buffer and the interval of bytes that it has: before the broadcast on the
        sender, after it on the others.
        """
        import torch

        layout = self.layout
        assert layout is not None
        size = min(self.bucket_bytes, layout.nbytes)
        if self._buffers and self._buffers[0].numel() != size:
            self._buffers.clear()
        intervals = [(start, min(start + size, layout.nbytes)) for start in range(0, layout.nbytes, size or 1)]
        while len(self._buffers) < min(_BUFFERS, len(intervals)):
            self._buffers.append(torch.empty(size, dtype=torch.uint8, device=self.device))
        works: list[Work[Any]] = []
        for number in range(len(intervals) + _BUFFERS):
            before = number - _BUFFERS  # this bucket was in the buffer that is used next
            if before >= 0:
                self._wait_on_stream(works[before])
                if empty is not None:
                    empty(self._buffers[before % _BUFFERS], *intervals[before])
            if number < len(intervals):
                start, end = intervals[number]
                buffer = self._buffers[number % _BUFFERS]
                if fill is not None:
                    fill(buffer, start, end)
                works.append(self.group.broadcast(buffer[: end - start], root=sender, timeout=deadline.left()))
        # On a GPU the barrier begins behind the copies that are on the current stream.
        stream = self._stream()
        self.group.barrier(stream=stream, timeout=deadline.left()).wait()

    def _wait_on_stream(self, work: Work[Any]) -> None:
        stream = self._stream()
        if stream is None:
            work.wait()
        else:
            work.synchronize(stream)

    def _stream(self) -> Any:
        import torch

        return torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

    def _exchange(self, numbers: list[int], deadline: _Deadline) -> list[list[int]]:
        """Return the numbers of all ranks."""
        import torch

        own = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        of_all = torch.empty((self.group.size, len(numbers)), dtype=torch.int64, device=self.device)
        self.group.all_gather(own, of_all, timeout=deadline.left()).wait()
        rows: list[list[int]] = of_all.tolist()
        return rows

    def _broadcast_bytes(self, data: bytes, nbytes: int, root: int, deadline: _Deadline) -> bytes:
        """Return the root's data."""
        import torch

        if self.group.rank == root:
            held = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)
        else:
            held = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self.group.broadcast(held, root=root, timeout=deadline.left()).wait()
        return bytes(held.tolist())


def _bytes_of(tensor: Any) -> Any:
    """Return a contiguous tensor's memory as bytes."""
    import torch

    return tensor.reshape(-1).view(torch.uint8)


@contextlib.contextmanager
def _abort_on_error(group: ProcessGroup, what: str) -> Iterator[None]:
    """Abort the group if the block raises: the other ranks would wait for this one."""
    try:
        yield
    except NcclError:  # such an error has ended the group already
        raise
    except BaseException as error:
        group.abort(f"rank {group.rank} {what}: {type(error).__name__}: {error}")
        raise


class WeightSender:
    """The rank of a process group that sends weights to all other ranks, which have a `WeightReceiver`.

    Parameters
    ----------
    group : ProcessGroup
        The group of the sender and the receivers, for nothing else. Its timeout applies to each step of a transfer.
    bucket_bytes : int, optional
        Bytes of a bucket; two are allocated on each rank.
    quantize : callable, optional
        Called with the name and the tensor of each weight before it is sent; returns the tensor to send, or a mapping
        of several by name, such as the quantised tensor and its scales. Types and shapes of its results depend on
        those of its argument only.
    admits : bool, optional
        Whether each transfer first admits the processes that wait in `ProcessGroup.join`, which takes some
        milliseconds. Equal on all ranks.
    """

    def __init__(
        self,
        group: ProcessGroup,
        *,
        bucket_bytes: int = _BUCKET_BYTES,
        quantize: Callable[[str, Any], Any] | None = None,
        admits: bool = True,
    ) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes: expected at least 1, got {bucket_bytes}")
        self.group, self._quantize = group, quantize
        self._member = _Member(group, admits)
        self._bucket_bytes = -(-bucket_bytes // _ALIGNMENT) * _ALIGNMENT
        self._results: dict[tuple[str, Any, tuple[int, ...]], list[tuple[str, Any, tuple[int, ...]]]] = {}

    @classmethod
    def join(
        cls,
        store: Any,
        name: str = "default",
        *,
        bucket_bytes: int = _BUCKET_BYTES,
        quantize: Callable[[str, Any], Any] | None = None,
        admits: bool = True,
        **options: Any,
    ) -> WeightSender:
        """Join a running group as its sender, in place of one that has died.

        Parameters
        ----------
        store, name, options
            As for `ProcessGroup.join`.
        bucket_bytes, quantize, admits
            As for `WeightSender`.

        Returns
        -------
        WeightSender
        """
        group = ProcessGroup.join(store, name, **options)
        made = cls(group, bucket_bytes=bucket_bytes, quantize=quantize, admits=admits)
        made._member.has_joined = True
        return made

    def send(self, tensors: Mapping[str, Any], version: int, *, timeout: float | None = None) -> tuple[int, ...]:
        """Send weights to all other ranks, and return once each of them has all.

        Parameters
        ----------
        tensors : mapping of str to torch.Tensor
            The weights. Any type and device; those of the group's GPU cost the least.
        version : int
            Their version, at least 1.
        timeout : float, optional
            Seconds for the whole transfer; by default the group's timeout applies to each of its steps.

        Returns
        -------
        tuple of int
            The ranks that have received them.

        Raises
        ------
        NcclError
            If a rank has died or is not done in time; its `ranks` says which. The group has ended: `recover`, and send
            again.
        ValueError
            If a receiver cannot take these tensors, or another rank sends as well: all ranks raise it, and the group
            can be used further. On this rank only, if `version` is less than 1 or two tensors get one name. Also if
            `quantize` returns other names, types or shapes than before: then the group is aborted.
        """
        if version < 1:
            raise ValueError(f"version: expected at least 1, got {version}")
        deadline, member = _Deadline(timeout), self._member
        listed = list(self._layout_of(tensors))
        layout = _Layout(each for _, results in listed for each in results)
        member.bucket_bytes = self._bucket_bytes
        sender, _ = member.begin(deadline, layout, version)
        member.agree(None, deadline)
        with _abort_on_error(self.group, "could not send weights"):
            member.broadcast_buckets(sender, deadline, _Filling(tensors, listed, self._quantize, layout), None)
        return tuple(rank for rank in range(self.group.size) if rank != sender)

    def _layout_of(self, tensors: Mapping[str, Any]) -> Iterator[tuple[str, list[tuple[str, Any, tuple[int, ...]]]]]:
        """Yield for each weight its name, and names, types and shapes of what is sent for it."""
        for name, tensor in tensors.items():
            key = (name, tensor.dtype, tuple(tensor.shape))
            if self._quantize is None:
                yield name, [key]
                continue
            if key not in self._results:
                made = _named(name, self._quantize(name, tensor))
                self._results[key] = [(each, value.dtype, tuple(value.shape)) for each, value in made.items()]
            yield name, self._results[key]


def _named(name: str, result: Any) -> Mapping[str, Any]:
    return result if isinstance(result, Mapping) else {name: result}


class _Filling:
    """Fills buckets with tensors in their order; each tensor is quantised when the first bucket with it is filled."""

    def __init__(
        self, tensors: Mapping[str, Any], listed: list, quantize: Callable[[str, Any], Any] | None, layout: _Layout
    ) -> None:
        self._tensors, self._quantize, self._layout = tensors, quantize, layout
        #: By the number of an entry: the weight that it is made of, and the numbers of all entries of that weight.
        self._sources: list[tuple[str, range]] = []
        for name, results in listed:
            numbers = range(len(self._sources), len(self._sources) + len(results))
            self._sources += [(name, numbers)] * len(results)
        self._ready: dict[int, Any] = {}  # bytes of the entries of one weight

    def __call__(self, buffer: Any, start: int, end: int) -> None:
        for number, first, last, place in self._layout.within(start, end):
            if number not in self._ready:
                self._prepare(number)
            buffer[place : place + last - first].copy_(self._ready[number][first:last], non_blocking=True)

    def _prepare(self, number: int) -> None:
        name, numbers = self._sources[number]
        tensor = self._tensors[name]
        made = {name: tensor} if self._quantize is None else _named(name, self._quantize(name, tensor))
        found = [(each, value.dtype, tuple(value.shape)) for each, value in made.items()]
        if found != [self._layout.entries[each][:3] for each in numbers]:
            raise ValueError(f"quantize: for {name!r} it returned other names, types or shapes than before")
        values = [_bytes_of(value.detach().contiguous()) for value in made.values()]
        self._ready = dict(zip(numbers, values, strict=True))


class WeightReceiver:
    """A rank of a process group that receives weights from the one that has a `WeightSender`.

    Parameters
    ----------
    group : ProcessGroup
        The group of the sender and the receivers, for nothing else.
    admits : bool, optional
        As for `WeightSender`.

    Attributes
    ----------
    version : int or None
        The version of the last weights that were received whole. None before the first, and after a transfer `into`
        tensors that has failed in the middle: these may have values of two versions.
    """

    def __init__(self, group: ProcessGroup, *, admits: bool = True) -> None:
        self.group = group
        self._member = _Member(group, admits)
        self.version: int | None = None

    @classmethod
    def join(cls, store: Any, name: str = "default", *, admits: bool = True, **options: Any) -> WeightReceiver:
        """Join a running group as a receiver: it takes part from the next transfer on.

        Parameters
        ----------
        store, name, options
            As for `ProcessGroup.join`.
        admits : bool, optional
            As for `WeightSender`.

        Returns
        -------
        WeightReceiver
        """
        made = cls(ProcessGroup.join(store, name, **options), admits=admits)
        made._member.has_joined = True
        return made

    def receive(self, into: Mapping[str, Any] | None = None, *, timeout: float | None = None) -> Weights:
        """Receive the next weights; wait for a sender if the group has none.

        Parameters
        ----------
        into : mapping of str to torch.Tensor, optional
            Tensors that receive the weights, of the same names, types and shapes; by default new ones are made, and
            those of an earlier call keep their values whatever happens.
        timeout : float, optional
            Seconds for the whole transfer, the wait for a sender included; by default the group's timeout applies to
            each step, and the wait for a sender is not limited.

        Returns
        -------
        Weights
            The version, and the tensors by name.

        Raises
        ------
        NcclError
            If a rank has died or is not done in time; its `ranks` says which. The group has ended: `recover`, and
            receive again.
        NcclTimeout
            If there is no sender in time. All ranks raise it; the group can be used further.
        ValueError
            If a receiver cannot take these tensors, or several ranks send. All ranks raise it; the group can be used
            further.
        """
        deadline, member = _Deadline(timeout), self._member
        sender, version = member.begin(deadline)
        layout = member.layout
        assert layout is not None
        member.agree(None if into is None else _difference(layout, into), deadline)
        with _abort_on_error(self.group, "could not receive weights"):
            tensors: Mapping[str, Any] = _new(layout, member.device) if into is None else into
            if into is not None:
                self.version = None
            emptying = _Emptying(layout, [tensors[each.name] for each in layout.entries])
            member.broadcast_buckets(sender, deadline, None, emptying)
        self.version = version
        return Weights(version, tensors)


class _Emptying:
    """Copies buckets to the tensors of an engine."""

    def __init__(self, layout: _Layout, tensors: list[Any]) -> None:
        self._layout, self._tensors = layout, [each.detach() for each in tensors]
        self._parts: dict[int, Any] = {}  # bytes of entries that are not whole yet

    def __call__(self, buffer: Any, start: int, end: int) -> None:
        import torch

        for number, first, last, place in self._layout.within(start, end):
            tensor, entry = self._tensors[number], self._layout.entries[number]
            received = buffer[place : place + last - first]
            if tensor.is_contiguous():
                _bytes_of(tensor)[first:last].copy_(received)
                continue
            nbytes = entry.end - entry.start
            if number not in self._parts:
                self._parts[number] = torch.empty(nbytes, dtype=torch.uint8, device=buffer.device)
            self._parts[number][first:last].copy_(received)
            if last == nbytes:
                tensor.copy_(self._parts.pop(number).view(tensor.dtype).view(tensor.shape))


def _new(layout: _Layout, device: Any) -> dict[str, Any]:
    import torch

    return {each.name: torch.empty(each.shape, dtype=each.dtype, device=device) for each in layout.entries}


def _difference(layout: _Layout, into: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the tensors that are to receive weights, None if nothing is."""
    sent = {each.name for each in layout.entries}
    if missing := [name for name in sent if name not in into]:
        return f"into: the sender has {min(missing)!r}, this rank has not"
    if more := [name for name in into if name not in sent]:
        return f"into: this rank has {min(more)!r}, the sender has not"
    for each in layout.entries:
        tensor = into[each.name]
        if (tensor.dtype, tuple(tensor.shape)) != (each.dtype, each.shape):
            return (
                f"into: {each.name!r} is {tensor.dtype} of shape {tuple(tensor.shape)}, the sender's is {each.dtype} "
                f"of shape {each.shape}"
            )
    return None
