"""The sum of sparse arrays over all ranks. Each rank gathers all parts, and adds them when its result is asked for.

NCCL has no such operation, and the ranks bring different numbers of entries. So the ranks first exchange these
numbers, and the properties that have to agree; then each rank gathers the indices and the values of all ranks, in one
launch of uneven parts.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import struct
import sys
from typing import Any

from ncclpy.core.arguments.buffers import Buffer
from ncclpy.core.arguments.validation import type_of_array
from ncclpy.process_group.nan import by_package
from ncclpy.types import DataType

#: A rank's first message has `_WORDS` numbers of 64 bits: the count of entries, the dimensions of an index, the number
#: of values in an entry, `_SIZES` numbers for the shape, and `_TEXT` for the shape and type of an entry as text.
_SIZES = 8
_TEXT = struct.Struct("=24q")
_WORDS = 3 + _SIZES + _TEXT.size // 8


class SparseSum:
    """One rank's part of a sum of sparse arrays, the parts of all ranks, and the sum.

    Parameters
    ----------
    indices, values : array
        As for `ProcessGroup.all_reduce_sparse`.
    size : int
        How many ranks there are.
    shape : sequence of int, optional
        The shape of the whole array, the same on all ranks.

    Raises
    ------
    TypeError, ValueError
        If an array has a wrong package, type or shape, or the arrays do not fit together; nothing is begun then.
    """

    def __init__(self, indices, values, size: int, shape=None):
        self._arrays = _arrays_of(indices, values)
        self._size = size
        self._sent: Any = None
        self._gathered: list | None = None
        self._made: dict[str, tuple] = {}
        if indices.ndim not in (1, 2):
            raise ValueError(f"indices: expected shape (n,) or (dimensions, n), got {tuple(indices.shape)}")
        if Buffer.of(indices).dtype is not DataType.INT64:
            raise TypeError(f"indices: expected int64, got {indices.dtype}")
        self._rows = None if indices.ndim == 1 else int(indices.shape[0])
        self._count = int(indices.shape[-1])
        if values.ndim < 1 or values.shape[0] != self._count:
            raise ValueError(
                f"values: expected {self._count} along the first dimension, as there are indices, got shape "
                f"{tuple(values.shape)}"
            )
        self._entry = tuple(map(int, values.shape[1:]))
        rows = -1 if self._rows is None else self._rows
        self._sent = indices.reshape(-1), values.reshape(-1)
        entry = f"{'x'.join(map(str, self._entry)) or 1} {type_of_array(values)}".encode()
        self._words = [
            self._count, rows, math.prod(self._entry), *_sizes(shape, abs(rows), self._entry),
            *_TEXT.unpack(entry[: _TEXT.size].ljust(_TEXT.size, b"\0")),
        ]  # fmt: skip

    def words(self):
        """Return what this rank sends to the others, and memory for what all send, in arrays of the same package."""
        like = self._sent[0]
        self._received = self._arrays.space(_WORDS * self._size, like)
        return self._arrays.numbers(self._words, like), self._received

    def disagreement(self):
        """Return what does not agree between the ranks, the same text on each, or None; called once all have sent."""
        words = self._received.tolist()
        ranks = [words[_WORDS * rank : _WORDS * rank + _WORDS] for rank in range(self._size)]
        self.expect([each[0] for each in ranks])
        for rank, each in enumerate(ranks):
            if each[1:] != ranks[0][1:]:
                return f"rank {rank} passes {_shown(each)}, rank 0 passes {_shown(ranks[0])}"
        return None

    def expect(self, counts):
        """Set how many entries each rank brings."""
        self._counts = counts

    def parts(self):
        """Return two pairs, for the indices and the values: what this rank sends, and memory for each rank's part."""
        sent = self._sent
        return [(each, _pieces(whole, counts)) for each, (counts, whole) in zip(sent, self.spaces(), strict=True)]

    def spaces(self):
        """Return pairs, for the indices and the values: how many numbers each rank sends, and memory for all."""
        made, widths = [], (1 if self._rows is None else self._rows, math.prod(self._entry))
        for each, like in zip(widths, self._sent, strict=True):
            counts = [each * count for count in self._counts]
            made.append((counts, self._arrays.space(sum(counts), like)))
        self._gathered = [_pieces(whole, counts) for counts, whole in made]
        self._sent = None
        return made

    def __call__(self):
        """Return the unique indices and the sums of their values; called when everything is gathered."""
        gathered = self._gathered
        if gathered is not None:  # if two threads add up at once, both return the sum of one of them
            rows = 1 if self._rows is None else self._rows
            indices = [part.reshape(rows, n) for part, n in zip(gathered[0], self._counts, strict=True)]
            values = [part.reshape(n, *self._entry) for part, n in zip(gathered[1], self._counts, strict=True)]
            indices, values = self._arrays.sum(indices, values, sum(self._counts))
            self._made.setdefault("sum", (indices.reshape(-1) if self._rows is None else indices, values))
            self._gathered = None
        return self._made["sum"]


@contextlib.contextmanager
def _on(device, stream):
    with device, stream:
        yield


def _pieces(whole, counts):
    """Return slices of an array, one a rank."""
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return [whole[end - count : end] for end, count in zip(ends, counts, strict=True)]


def _sizes(shape, rows, entry):
    """Return a shape as `_SIZES` numbers, padded with -1; the last number of a longer shape is a hash of all sizes."""
    if shape is None:
        return [-1] * _SIZES
    sizes = [int(each) for each in shape]
    if len(sizes) != rows + len(entry) or tuple(sizes[rows:]) != entry:
        raise ValueError(
            f"shape: {tuple(sizes)} does not fit indices of {rows} dimensions and values of shape (n, *{entry})"
        )
    if len(sizes) > _SIZES:
        rest = hashlib.blake2b(repr(sizes).encode(), digest_size=7).digest()
        sizes[_SIZES - 1 :] = [int.from_bytes(rest, "little")]
    return sizes + [-1] * (_SIZES - len(sizes))


def _shown(words):
    rows, sizes, text = words[1], words[3 : 3 + _SIZES], words[3 + _SIZES :]
    entry = _TEXT.pack(*text).rstrip(b"\0").decode(errors="replace")
    dimensions = "indices without dimensions" if rows < 0 else f"indices of {rows} dimensions"
    shape = tuple(each for each in sizes if each >= 0)
    return f"{dimensions} with values of {entry} each" + (f", of shape {shape}" if shape else "")


class _NumpyLike:
    """Arrays of numpy, and of packages that have its functions."""

    def __init__(self, package):
        self.package = package

    def here(self, like):
        """Return a context, to be entered once, that allocates memory on the stream that is current at this call."""
        return contextlib.nullcontext()

    def numbers(self, numbers, like):
        return self.package.asarray(numbers, dtype=like.dtype)

    def space(self, count, like):
        return self.package.empty(count, like.dtype)

    def sum(self, indices, values, count):
        xp = self.package
        indices, values = xp.concatenate(indices, axis=1), xp.concatenate(values)
        if count == 0:
            return indices, values
        unique, place = xp.unique(indices, axis=1, return_inverse=True)
        total = xp.zeros((unique.shape[1], *values.shape[1:]), values.dtype)
        xp.add.at(total, place.reshape(-1), values)
        return unique, total


class _CuPy(_NumpyLike):
    def here(self, like):
        cuda = self.package.cuda
        with like.device:
            return _on(like.device, cuda.get_current_stream())

    def sum(self, indices, values, count):
        total = super().sum(indices, values, count)
        # The gathered parts were allocated on the stream of the call, which may differ from this one: this stream must
        # have read them before they are freed.
        self.package.cuda.get_current_stream().synchronize()
        return total


class _Torch:
    def here(self, like):
        if not like.is_cuda:
            return contextlib.nullcontext()
        cuda = sys.modules["torch"].cuda
        return cuda.stream(cuda.current_stream(like.device))

    def numbers(self, numbers, like):
        return like.new_tensor(numbers)

    def space(self, count, like):
        return like.new_empty(count)

    def sum(self, indices, values, count):
        torch = sys.modules["torch"]
        for part in (*indices, *values):  # allocated on the stream that was current when the call was made
            if part.is_cuda:
                part.record_stream(torch.cuda.current_stream(part.device))
        indices, values = torch.cat(indices, 1), torch.cat(values)
        if count == 0:
            return indices, values
        unique, place = torch.unique(indices, dim=1, return_inverse=True)
        # Not index_add: on a GPU it adds in any order, and two ranks' sums would not be the same to the last bit.
        shape = (unique.shape[1], *values.shape[1:])
        entries = torch.sparse_coo_tensor(place.reshape(1, -1), values, shape, check_invariants=False)
        return unique, entries.coalesce().values()


_MAKERS = {
    "numpy": lambda: _NumpyLike(sys.modules["numpy"]),
    "cupy": lambda: _CuPy(sys.modules["cupy"]),
    "torch": _Torch,
}


def maker_of(array):
    """Return what makes and adds arrays of an array's package (numpy, CuPy or torch), None for other packages."""
    make = by_package(type(array), _MAKERS)
    return None if make is None else make()


def _arrays_of(indices, values):
    """Return what makes and adds arrays of the package that both arrays belong to."""
    found = [by_package(type(each), _MAKERS) for each in (indices, values)]
    for name, each, make in zip(("indices", "values"), (indices, values), found, strict=True):
        if make is None:
            kind = type(each)
            raise TypeError(
                f"{name}: expected an array of numpy, CuPy or torch, which can add what was gathered, got "
                f"{kind.__module__}.{kind.__qualname__}"
            )
    if found[0] is not found[1]:
        raise TypeError(f"values: a {type(values).__qualname__} with indices in a {type(indices).__qualname__}")
    return found[0]()
