"""The entries of one dump as columns, since objects for all entries of thousands of dumps would take minutes.

Entries as a recorder writes them are checked column by column. For any others the module `dump` checks value by value
and says where an error is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

FIELDS = (
    "id", "launch", "key", "operation", "op", "dtype", "count", "nbytes", "root", "communicator", "sequence", "rank",
    "nranks", "device", "thread", "site", "state", "created", "launched", "completed", "error",
)  # fmt: skip
STATES = ("pending", "launched", "completed", "failed", "called", "captured")
#: For a point-to-point operation, the operation that the rank in its `root` has to be in; a "sendrecv" waits for the
#: rank that sends.
ANSWER = {"send": "recv", "recv": "send", "sendrecv": "send"}

# Bounds far beyond what a recorder writes, which keep computed values finite: 64 bits, and the year 5138.
MOST = 2**64
LAST_SECOND = 1e11

# A rank cannot complete one of these before every rank has launched it.
_SYNCHRONIZING = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"}

# States of a numbered entry that has not ended well. A pending plain call is inside NCCL; a Manager's pending entry
# has no number.
_OPEN = {"pending", "launched", "failed"}

_TIMES = ("created", "launched", "completed")
_COUNTS = ("id", "launch", "sequence")
# There are few different combinations of these fields.
_KIND = tuple(name for name in FIELDS if name not in (*_TIMES, *_COUNTS))
_TEXTS = {"key", "operation", "op", "dtype", "communicator", "site", "state", "error"}
_NONE = -(2**63)

# In the text of an entry as a recorder writes it: the fields that differ from entry to entry, and the fields of the
# parts that many entries share; see `table_of_text`.
_IN_TEXT = ("id", "launch", "sequence", "created", "launched", "completed", "error")
_IN_KIND = {*_KIND, "tag"} - {"error"}

Row = tuple[Any, ...]
Signature = tuple[str, str | None, str | None, int | None, int | None]


def printable(text: str) -> str:
    """Escape characters that cannot be printed, or would control a terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class Table:
    """Entries in the order of the dump.

    Parameters
    ----------
    rows
        The values of each entry in the order of `FIELDS`, already checked.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        columns = dict(zip(FIELDS, zip(*rows, strict=True), strict=True)) if rows else {name: () for name in FIELDS}
        self._fill(columns)

    def _fill(self, columns: Mapping[str, Sequence[Any]]) -> None:
        numbers: dict[tuple[Any, ...], int] = {}
        kinds = zip(*(columns[name] for name in _KIND), strict=True)
        which = [numbers.setdefault(kind, len(numbers)) for kind in kinds]
        self._take([dict(zip(_KIND, kind, strict=True)) for kind in numbers], which, columns)

    def _take(self, kinds: list[dict[str, Any]], which: list[int], columns: Mapping[str, Sequence[Any]]) -> None:
        self._length = len(which)
        self.kinds = kinds
        self._kind = np.array(which, np.int32)
        self._times = {name: np.array(columns[name], np.float64) for name in _TIMES}  # None becomes NaN
        self._counts: dict[str, Any] = {name: _integers(columns[name]) for name in _COUNTS}

    def __len__(self) -> int:
        return self._length

    def row(self, index: int) -> Row:
        """Return the values of an entry."""
        values = dict(self.kinds[self._kind[index]])
        for name, times in self._times.items():
            value = float(times[index])
            values[name] = None if value != value else value
        for name, counts in self._counts.items():
            count = counts[index]
            values[name] = None if count == _NONE else int(count)
        return tuple(values[name] for name in FIELDS)

    def where(self, **wanted: object) -> list[int]:
        """Return the indices of the entries with these values, in order."""
        chosen = [all(kind[name] == value for name, value in wanted.items()) for kind in self.kinds]
        if not any(chosen):
            return []
        return [int(index) for index in np.flatnonzero(np.array(chosen)[self._kind])]

    def communicators(self) -> set[str]:
        """Return the names of all communicators."""
        return {kind["communicator"] for kind in self.kinds if kind["communicator"] is not None}

    def first_time(self) -> float | None:
        """Return the earliest of all times, None if there is none."""
        known = [float(np.nanmin(times)) for times in self._times.values() if not np.isnan(times).all()]
        return min(known, default=None)

    def traces(self) -> list[RankTrace]:
        """Return what each rank has done in each communicator."""
        places: dict[tuple[str, int], list[int]] = {}
        for number, kind in enumerate(self.kinds):
            if kind["communicator"] is not None and kind["rank"] is not None:
                places.setdefault((kind["communicator"], kind["rank"]), []).append(number)
        traces = []
        for (communicator, rank), kinds in places.items():
            ours = np.zeros(len(self.kinds), bool)
            ours[kinds] = True
            traces.append(RankTrace(self, communicator, rank, kinds, np.flatnonzero(ours[self._kind])))
        return traces


class RankTrace:
    """One rank of one communicator: its numbered entries, by ascending sequence number.

    `sequences`, `indices` (in the table), `signatures` and `launched` are parallel arrays. `last` is the index of the
    rank's last entry, numbered or not. `open` has the numbers of operations that are pending, launched or failed, and
    `first_failed` is the lowest number of a failed one, or None. `reached` is the highest number of a completed
    operation that completes only after every rank has launched it; -1 if there is none.
    """

    def __init__(
        self, table: Table, communicator: str, rank: int, kinds: list[int], indices: NDArray[np.int64]
    ) -> None:
        self.communicator, self.rank = communicator, rank
        self.last = int(indices[-1])
        here = [table.kinds[number] for number in kinds]
        self.nranks = max((kind["nranks"] for kind in here if kind["nranks"] is not None), default=None)
        self.is_point_to_point = any(kind["operation"] in ANSWER for kind in here)
        sequences = table._counts["sequence"][indices]
        known = sequences != _NONE
        sequences, indices = sequences[known], indices[known]
        order = np.argsort(sequences, kind="stable")
        sequences, indices = sequences[order], indices[order]
        newest = np.append(sequences[1:] != sequences[:-1], True)[: len(sequences)]  # the last entry of each number
        self.sequences, self.indices = sequences[newest], indices[newest]
        kind_of = table._kind[self.indices]
        is_open, has_failed, completes = (np.zeros(len(table.kinds), bool) for _ in range(3))
        hashes = np.zeros(len(table.kinds), np.uint64)
        self.signature_of: dict[int, Signature] = {}
        hashes_of: dict[Signature, int] = {}
        for number, kind in zip(kinds, here, strict=True):
            is_open[number] = kind["state"] in _OPEN
            has_failed[number] = kind["state"] == "failed"
            completes[number] = kind["state"] == "completed" and kind["operation"] in _SYNCHRONIZING
            signature = signature_of(kind)
            hashed = hashes_of.get(signature)
            if hashed is None:
                hashed = hashes_of[signature] = _hash(signature)
            hashes[number] = hashed
            self.signature_of[hashed] = signature
        self.signatures = hashes[kind_of]
        self.open = self.sequences[is_open[kind_of]]
        failed = self.sequences[has_failed[kind_of]]
        self.first_failed = int(failed[0]) if len(failed) else None
        done = self.sequences[completes[kind_of]]
        self.reached = int(done[-1]) if len(done) else -1
        self.launched = table._times["launched"][self.indices]

    def find(self, sequence: int) -> int | None:
        """Return the index in the table of the entry with a sequence number, None if there is none."""
        place = int(np.searchsorted(self.sequences, sequence))
        if place < len(self.sequences) and self.sequences[place] == sequence:
            return int(self.indices[place])
        return None


def signature_of(kind: dict[str, Any]) -> Signature:
    """Return the properties of a call that must be the same on all ranks; None matches anything."""
    operation = kind["operation"]
    if operation not in ANSWER:  # a Manager has one name for the root and one for receivers
        operation = operation.removesuffix("_send").removesuffix("_recv")
    count = None if kind["operation"].endswith("_v") else kind["count"]  # each rank has a count of its own there
    return operation, kind["op"], kind["dtype"], kind["root"], count


def differing(signatures: Iterable[Signature]) -> bool:
    """Return whether the calls of ranks at one number cannot be one collective."""
    return any(len({*values} - {None}) > 1 for values in zip(*signatures, strict=True))


def table_of(entries: list[Any]) -> Table | None:
    """Return the table of entries read from JSON; None if an entry may not be as a recorder writes it."""
    if not entries:
        return Table([])
    try:
        rows = [*map(itemgetter(*FIELDS), entries)]
    except (KeyError, TypeError, IndexError):
        return None
    columns = dict(zip(FIELDS, zip(*rows, strict=True), strict=True))
    if not _is_right(columns):
        return None
    table = Table.__new__(Table)
    table._fill(columns)
    return table


def divide(data: bytes) -> tuple[bytes, bytes] | None:
    """Return the text of a dump without its entries, and the text of the entries; None for another form.

    The marks that this function searches for cannot be inside a JSON string, where a backslash precedes each quote.
    """
    begin = data.find(b'"entries": [\n{"id": ')
    end = data.find(b'}], "gathering": ', begin)
    if begin < 0 or end < 0:
        return None
    return data[:begin] + b'"entries": []' + data[end + 2 :], data[begin + len(b'"entries": [\n{"id": ') : end]


def table_of_text(text: bytes) -> Table | None:
    """Return the table of the entries' text from `divide`; None if an entry is not as a recorder writes it.

    No JSON object is made for an entry: most of its text is the same as in other entries, and is parsed once.
    """
    numbers: dict[tuple[bytes, bytes], int] = {}
    which: list[int] = []
    head, *rest = text.split(b', "key": ')
    pieces = [head]
    for piece in rest:
        first, _, piece = piece.partition(b', "sequence": ')
        sequence, _, piece = piece.partition(b', "rank": ')
        second, _, piece = piece.partition(b', "created": ')
        which.append(numbers.setdefault((first, second), len(numbers)))
        pieces.append(b"%b, %b" % (sequence, piece))
    plain = b",".join(pieces)
    for word in (b', "launched": ', b', "completed": ', b', "error": ', b'},\n{"id": ', b', "launch": '):
        plain = plain.replace(word, b",")
    try:
        values = json.loads(b"[%b]" % plain)
        kinds = json.loads(b"[%b]" % b",".join(b'{"key": %b, "rank": %b}' % number for number in numbers))
    except (ValueError, RecursionError):
        return None
    length = len(which)
    if len(values) != len(_IN_TEXT) * length or len(kinds) != len(numbers):
        return None
    if any(type(kind) is not dict or kind.keys() != _IN_KIND for kind in kinds):
        return None
    columns = {name: values[place :: len(_IN_TEXT)] for place, name in enumerate(_IN_TEXT)}
    kinds = [{**kind, "error": None} for kind in kinds]
    by_error: dict[tuple[int, str], int] = {}
    for index, error in enumerate(columns.pop("error")):
        if error is not None:
            place = by_error.setdefault((which[index], error), len(kinds)) if isinstance(error, str) else -1
            if place < 0:
                return None
            if place == len(kinds):
                kinds.append({**kinds[which[index]], "error": error})
            which[index] = place
    if not _is_right({name: [kind[name] for kind in kinds] for name in _KIND} | columns):
        return None
    table = Table.__new__(Table)
    table._take(kinds, which, columns)
    return table


def _is_right(columns: Mapping[str, Sequence[Any]]) -> bool:
    """Return whether all values have the types, and are within the bounds, that a recorder writes."""
    for name, column in columns.items():
        types = {*map(type, column)} - {type(None)}
        if name in _TEXTS:
            if not types <= {str} or not all(text is None or text.isprintable() for text in {*column}):
                return False
        elif name in _TIMES:
            if not types <= {float, int}:
                return False
            known = [value for value in column if value is not None] if None in column else column
            total = sum(known)
            if total != total or (known and not (0 <= min(known) and max(known) <= LAST_SECOND)):
                return False
        elif not types <= {int}:
            return False
        else:
            known = [value for value in column if value is not None] if None in column else column
            if known and not (-MOST <= min(known) and max(known) <= MOST):
                return False
    if None in columns["operation"] or not {*columns["state"]} <= {*STATES}:
        return False
    return all(text is None or text == " ".join(text.split()) for text in {*columns["error"]})


def _integers(values: Sequence[int | None]) -> Any:
    """Return an integer array; of objects if a number has more than 63 bits."""
    plain = [_NONE if value is None else value for value in values] if None in values else values
    try:
        return np.array(plain, np.int64)
    except OverflowError:
        return np.array(plain, object)


def _hash(signature: Signature) -> int:
    return int.from_bytes(hashlib.blake2b(repr(signature).encode(errors="replace"), digest_size=8).digest(), "little")
