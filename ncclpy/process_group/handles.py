"""Handles: texts by which groups take part in a reconfiguration, and the place of its rendezvous in a store.

A handle stays with its group. It has the rank that the group had at first, for an order that all ranks agree on, a
token that no other group has, and the address of the store that the group was made with.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from urllib.parse import quote, unquote

from ncclpy.bootstrap import FileStore, LocalStore, PrefixStore, Store, TCPStore
from ncclpy.bootstrap.store_arguments import decode
from ncclpy.errors import ranks, spans

__all__ = ["claim", "close_opened_store", "names_of_members", "new_handle", "ordered", "place_of", "store_of"]

_KIND = "ncclpy"


@dataclass(frozen=True)
class _Handle:
    rank: int
    token: str
    address: str


def new_handle(rank: int, store: Store) -> str:
    """Return a handle for a new group."""
    return f"{_KIND}:{rank}:{secrets.token_hex(8)}:{_address(store)}"


def _read(handle: object) -> _Handle:
    if not isinstance(handle, str):
        raise TypeError(f"handles: expected texts of reconfigure_handle(), got {type(handle).__name__} {handle!r:.80}")
    kind, _, rest = handle.partition(":")
    rank, _, rest = rest.partition(":")
    token, colon, address = rest.partition(":")
    if kind != _KIND or not rank.isdecimal() or not token or not colon:
        raise ValueError(f"handles: {handle!r:.80} is not a text of reconfigure_handle()")
    return _Handle(int(rank), token, address)


def ordered(handles: Iterable[str], own_handle: str) -> list[str]:
    """Return handles by rank: a set sorted by the rank that each handle's group was made with, a list as it is.

    Raises
    ------
    TypeError, ValueError
        If an item is not a handle, or occurs twice, or this rank's handle is not among them.
    """
    if isinstance(handles, str):
        raise TypeError("handles: expected several texts of reconfigure_handle(), got one")
    found = list(handles)
    read = {handle: _read(handle) for handle in found}
    if isinstance(handles, AbstractSet):
        found.sort(key=lambda handle: (read[handle].rank, handle))
    if len(read) != len(found):
        twice = sorted({handle for handle in found if found.count(handle) > 1})
        raise ValueError(f"handles: {twice[0]!r} is there twice")
    if own_handle not in read:
        raise ValueError(f"handles: {own_handle!r}, the handle of this group, is not among these {len(found)}")
    return found


def names_of_members(order: Sequence[str]) -> Callable[[Sequence[int]], str]:
    """Return a callable that names some ranks of the new group, also by the ranks that their groups were made with."""

    def names_of(members: Sequence[int]) -> str:
        made = [_read(order[member]).rank for member in members]
        become = f"{ranks(spans(members))} of {len(order)}"
        if made == list(members):
            return become
        return (
            f"those that become {become} (made as {'rank' if len(made) == 1 else 'ranks'} {', '.join(map(str, made))})"
        )

    return names_of


def place_of(uuid: str) -> str:
    """Return the place in a store where a reconfiguration has its rendezvous; each uuid is used once."""
    return f"ncclpy/reconfigure/{quote(uuid, safe='')}"


def claim(store: Store, uuid: str, handles: Sequence[str], own_handle: str, refuse: Callable[[], object]) -> None:
    """Reserve a uuid for these handles, before the group leaves its present state.

    `refuse` is called if other ranks have reserved the uuid for a different list that has this group's handle.

    Raises
    ------
    ValueError
        If the uuid was used before, by this group, or for other handles or another order of them.
    """
    packed = json.dumps(list(handles)).encode()
    recorded = store.compare_set(f"{place_of(uuid)}/handles", None, packed)[1]
    if recorded != packed:
        if own_handle in decode(_handles, recorded or b"[]", store, f"{place_of(uuid)}/handles"):
            refuse()
        raise ValueError(
            f"uuid: {uuid!r} was used for other handles, or in another order; each reconfigure() takes a new one, "
            "which is the same on all of its ranks"
        )
    if not store.compare_set(f"{place_of(uuid)}/came/{_read(own_handle).token}", None, b"")[0]:
        raise ValueError(f"uuid: this group has used {uuid!r} before; each reconfigure() takes a new one")


def _handles(packed: bytes) -> list[str]:
    found = json.loads(packed)
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise TypeError("it is not a list of texts")
    return found


def store_of(handle: str, store: Store, seconds: float) -> Store:
    """Return the store that a handle's group was made with: `store` if it is the same, else a new connection.

    ``seconds`` limit connecting, and later the operations of the new connection.

    Raises
    ------
    ValueError
        If the store is another one, and has no address.
    """
    address = _read(handle).address
    if address == _address(store):
        return store
    kind, _, rest = address.partition(":")
    place, _, prefix = rest.partition("/")
    opened: Store
    if kind == "tcp":
        host, port = place.split(":")
        opened = TCPStore(unquote(host), int(port), timeout=seconds)
    elif kind == "file":
        opened = FileStore(unquote(place), timeout=seconds)
    else:
        raise ValueError(
            f"handles: the group of {handle!r:.80}, which becomes rank 0, was made with another store than this one, "
            "and that store has no address; make all groups with one store, or with TCPStores or FileStores"
        )
    return PrefixStore(unquote(prefix), opened) if prefix else opened


def close_opened_store(store: Store) -> None:
    """Close a store that `store_of` has made."""
    while isinstance(store, PrefixStore):
        store = store.store
    store.close()


def _address(store: Store) -> str:
    """Return the address by which other processes reach a store.

    A store without an address gets a text that no process can connect to: a LocalStore its process and identity, any
    other store only the name of its type.
    """
    prefixes: list[str] = []
    while isinstance(store, PrefixStore):
        prefixes.insert(0, store.prefix)
        store = store.store
    if isinstance(store, TCPStore):
        address = f"tcp:{quote(store.host, safe='')}:{store.port}"
    elif isinstance(store, FileStore):
        address = f"file:{quote(store.path, safe='')}"
    elif isinstance(store, LocalStore):
        address = f"local:{os.getpid()}.{id(store)}"
    else:
        address = f"other:{type(store).__name__}"
    return f"{address}/{quote('/'.join(prefixes), safe='')}"
