"""Names of operations, which may be any text, and their keys in the control plane."""

from __future__ import annotations

import struct
from collections.abc import Sequence

__all__ = ["BEGINNING", "LEAVING", "SET_END", "as_name", "key_of", "names_of", "shown"]

#: The keys of internal operations. In `BEGINNING` the ranks compare their options, in `LEAVING` they wait for each
#: other at the ends of their blocks, and with `SET_END` the members of a process set end the set.
BEGINNING, LEAVING, SET_END = b"\x02", b"\x03", b"\x04"
#: The names of the internal operations in messages.
_OWN_NAMES = {BEGINNING: "the coordinator's beginning", LEAVING: "the coordinator's end", SET_END: "the set's end"}

_ONE, _SEVERAL = b"\x00", b"\x01"
_LENGTH = struct.Struct("=I")
#: Most bytes of a name.
_MAX_BYTES = 1 << 20
#: Most characters of a name that are shown.
_SHOWN_CHARS = 120
#: Most names that are shown.
_SHOWN_NAMES = 4


def key_of(names: Sequence[str]) -> bytes:
    """Return the key of an operation, or of several that are brought together."""
    packed = [_bytes_of(name) for name in names]
    if max(map(len, packed), default=0) > _MAX_BYTES:
        raise ValueError(f"name: {max(map(len, packed)):,} bytes; a name may have {_MAX_BYTES:,}")
    if len(packed) == 1:
        return _ONE + packed[0]
    return _SEVERAL + b"".join(_LENGTH.pack(len(each)) + each for each in packed)


def as_name(name: str) -> str:
    """Return a name as a plain `str`; raise `TypeError` if it is no text."""
    if type(name) is str:
        return name
    if not isinstance(name, str):
        raise TypeError(f"name: expected a text, got {type(name).__name__}")
    return str.__str__(name)


def _bytes_of(name: str) -> bytes:
    return as_name(name).encode("utf-8", "surrogatepass")


def names_of(key: bytes) -> tuple[str, ...]:
    """Return the names that a key stands for."""
    if key[:1] == _ONE:
        return (key[1:].decode("utf-8", "surrogatepass"),)
    if key[:1] != _SEVERAL:
        return (_OWN_NAMES[key],)
    found, offset = [], 1
    while offset < len(key):
        (length,) = _LENGTH.unpack_from(key, offset)
        offset += _LENGTH.size
        found.append(key[offset : offset + length].decode("utf-8", "surrogatepass"))
        offset += length
    return tuple(found)


def shown(names: Sequence[str]) -> str:
    """Return names as text for messages; long names, and long lists, are cut."""
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(map(_shown, names[:_SHOWN_NAMES])) + more


def _shown(name: str) -> str:
    return repr(name) if len(name) <= _SHOWN_CHARS else f"{name[:_SHOWN_CHARS]!r}... ({len(name)} characters)"
