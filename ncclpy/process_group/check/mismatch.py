"""What the ranks bring to one launch, as bytes and as text, and whether it agrees."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from ncclpy.engine.recorder import method_name
from ncclpy.errors import ranks, spans
from ncclpy.types import ReduceOp

__all__ = [
    "Message",
    "difference_of_messages",
    "disagreement",
    "message_text",
    "pack",
    "pack_message",
    "unpack",
    "unpack_message",
]

#: kind, operator, root, whether parts may differ, number of part counts that follow, length of the type's name, count.
CALL = struct.Struct("=iiiIIIQ")
_LENGTH = struct.Struct("=I")
#: peer, kind, tag, length of the type's name, count.
_MESSAGE = struct.Struct("=iiiIQ")
#: The number of part counts that a text shows.
_SHOWN = 8

#: (peer, kind, name of the type, count, tag)
Message = tuple[int, int, str, int, int]


def pack(calls: bytes, messages: Sequence[Message]) -> bytes:
    """Return a note: the calls and the messages that one rank brings to one launch, as bytes."""
    head = _LENGTH.pack(len(calls)) + calls
    return head + b"".join(map(pack_message, messages)) if messages else head


def pack_message(message: Message) -> bytes:
    """Return one message as bytes."""
    peer, kind, dtype, count, tag = message
    name = dtype.encode()
    return _MESSAGE.pack(peer, kind, tag, len(name), count) + name


def unpack_message(packed: bytes, offset: int = 0) -> Message:
    """Return what `pack_message` has packed."""
    peer, kind, tag, length, count = _MESSAGE.unpack_from(packed, offset)
    offset += _MESSAGE.size
    return peer, kind, _name(packed, offset, length), count, tag


def _name(packed: bytes, offset: int, length: int) -> str:
    if offset + length > len(packed):
        raise ValueError(f"a name of {length} bytes at {offset} of {len(packed)}")
    return packed[offset : offset + length].decode("ascii")


def unpack(note: bytes) -> tuple[list[_Call], list[Message]]:
    """Return the calls and the messages of a note; raise ValueError or struct.error if it is not a note."""
    calls = _calls(note)
    for call in calls:
        if call.op >= 0:
            ReduceOp(call.op)
    return calls, _messages(note)


def _messages(note: bytes) -> list[Message]:
    found, offset = [], _LENGTH.size + _LENGTH.unpack_from(note)[0]
    while offset < len(note):
        message = unpack_message(note, offset)
        offset += _MESSAGE.size + len(message[2])
        found.append(message)
    return found


class _Call(NamedTuple):
    """One call of a note."""

    kind: int
    dtype: str
    op: int
    root: int
    elements: int
    uneven: int
    parts: tuple[int, ...]


def _calls(note: bytes) -> list[_Call]:
    """Return the calls of a note."""
    found, offset = [], _LENGTH.size
    end = offset + _LENGTH.unpack_from(note)[0]
    while offset < end:
        kind, op, root, uneven, nparts, nname, count = CALL.unpack_from(note, offset)
        offset += CALL.size
        dtype = _name(note, offset, nname)
        offset += nname
        parts = struct.unpack_from(f"={nparts}Q", note, offset)
        found.append(_Call(kind, dtype, op, root, count, uneven, parts))
        offset += 8 * nparts
    return found


def _call_text(call: _Call) -> str:
    kind, dtype, op, root, count, uneven, parts = call
    if not dtype:
        return "barrier"
    text = f"{method_name(kind)} of "
    if parts:
        shown = ", ".join(f"{part:,}" for part in parts[:_SHOWN])
        more = f" and {len(parts) - _SHOWN} more counts of" if len(parts) > _SHOWN else ""
        text += f"parts of {shown}{more} {dtype}"
    elif uneven:
        text += f"parts that may differ, of {dtype}"
    else:
        text += f"{count:,} {dtype}"
    if op >= 0:
        text += f" ({ReduceOp(op).name.lower()})"
    if root >= 0:
        text += f" {'to' if method_name(kind) in ('reduce', 'gather') else 'from'} root {root}"
    return text


def _text(calls: list[_Call], place: int, single: bool) -> str:
    """Describe the calls of one rank; `place` is the first call on which the ranks differ."""
    if single:
        return _call_text(calls[0])
    several = f"a block of {len(calls)} collective{'s' * (len(calls) != 1)}"
    if place >= len(calls):
        return several
    return f"{several}, of which number {place + 1} is {_call_text(calls[place])}"


def _grouped(texts: Sequence[str]) -> str:
    """Describe which ranks make which calls."""
    ranks_with: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks_with.setdefault(text, []).append(rank)
    parts = []
    for i, (text, members) in enumerate(ranks_with.items()):
        verb = "" if i else " calls" if len(members) == 1 else " call"
        parts.append(f"{ranks(spans(members))}{verb} {text}")
    return ", ".join(parts)


def message_text(message: Message | None, peer: int) -> str:
    """Describe a message, from the view of the rank that calls it."""
    if message is None:
        return "nothing"
    _, kind, dtype, count, tag = message
    named = method_name(kind)
    way = "to" if named == "send" else "from"
    return f"{named} of {count:,} {dtype} {way} rank {peer}{f' with tag {tag}' if tag >= 0 else ''}"


def difference_of_messages(mine: Message, theirs: Message, rank: int, peer: int) -> str | None:
    """Return how two matching messages differ, in the same words on both ranks; None if they agree."""
    if mine[1] != theirs[1] and mine[2:] == theirs[2:]:
        return None
    return _pair(mine, theirs, rank, peer)


def _pair(mine: Message | None, theirs: Message | None, rank: int, peer: int) -> str:
    both = sorted([(rank, mine, peer), (peer, theirs, rank)], key=lambda each: each[0])
    first, second = (f"rank {each} calls {message_text(message, other)}" for each, message, other in both)
    return f"{first}, {second}"


def disagreement(notes: Sequence[bytes | None]) -> str | None:
    """Return how the ranks' parts of one launch differ; None if they agree.

    Parameters
    ----------
    notes
        What each rank has packed. None if its note is not available: the rank is far ahead, and its slot has a later
        note, or the rank did not wait, and left only the digest of calls that this rank has never compared.
    """
    by_rank = [None if note is None else _calls(note) for note in notes]
    known = [calls for calls in by_rank if calls is not None]
    if None in by_rank or any(calls != known[0] for calls in known):
        longest = max(map(len, known))
        place = 0
        while place < longest and all(calls[place : place + 1] == known[0][place : place + 1] for calls in known):
            place += 1
        single = all(len(calls) == 1 for calls in known)
        return _grouped([
            "an earlier operation again" if calls is None else _text(calls, place, single) for calls in by_rank
        ])  # fmt: skip
    between: dict[tuple[int, int, int], list[Message]] = {}
    for rank, note in enumerate(notes):
        for message in _messages(note or b""):
            between.setdefault((rank, message[0], message[1]), []).append(message)
    for (rank, peer, kind), mine in sorted(between.items()):
        others = [found for (by, to, other), found in between.items() if (by, to) == (peer, rank) and other != kind]
        theirs = others[0] if others else []
        for i in range(max(len(mine), len(theirs))):
            one = mine[i] if i < len(mine) else None
            other = theirs[i] if i < len(theirs) else None
            if one is None or other is None or one[2:] != other[2:]:
                return _pair(one, other, rank, peer)
    return None
