"""Rendezvous of ranks: key-value stores.

Keys and values are plain bytes: this package depends neither on NCCL nor on arrays. The module of an exported name is
imported when the name is first used.
"""

from __future__ import annotations

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
    from ncclpy.bootstrap.file import FileStore as FileStore
    from ncclpy.bootstrap.launched import rendezvous as rendezvous
    from ncclpy.bootstrap.local import LocalStore as LocalStore
    from ncclpy.bootstrap.place import Place as Place
    from ncclpy.bootstrap.place import environment as environment
    from ncclpy.bootstrap.prefix import PrefixStore as PrefixStore
    from ncclpy.bootstrap.store import LeaseEnded as LeaseEnded
    from ncclpy.bootstrap.store import Store as Store
    from ncclpy.bootstrap.store import StoreDamaged as StoreDamaged
    from ncclpy.bootstrap.store import StoreError as StoreError
    from ncclpy.bootstrap.store import StoreLost as StoreLost
    from ncclpy.bootstrap.store import as_store as as_store
    from ncclpy.bootstrap.tcp import TCPStore as TCPStore
    from ncclpy.bootstrap.watch import Change as Change
    from ncclpy.bootstrap.watch import Watch as Watch

_MODULES = {
    "Change": "watch",
    "FileStore": "file",
    "LeaseEnded": "store",
    "LocalStore": "local",
    "Place": "place",
    "PrefixStore": "prefix",
    "Store": "store",
    "StoreDamaged": "store",
    "StoreError": "store",
    "StoreLost": "store",
    "TCPStore": "tcp",
    "Watch": "watch",
    "as_store": "store",
    "environment": "place",
    "rendezvous": "launched",
}

__all__ = [
    "Change",
    "FileStore",
    "LeaseEnded",
    "LocalStore",
    "Place",
    "PrefixStore",
    "Store",
    "StoreDamaged",
    "StoreError",
    "StoreLost",
    "TCPStore",
    "Watch",
    "as_store",
    "environment",
    "rendezvous",
]


def __getattr__(name: str):
    if name in _MODULES:
        return getattr(_importlib.import_module(f"ncclpy.bootstrap.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'ncclpy.bootstrap' has no attribute {name!r}")
