"""Stores of every kind, for the suite that all must pass (tests/bootstrap/test_stores.py).

A kind is a context manager that gets its own folder and yields a `Made`. A new kind of store registers one here.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ncclpy.bootstrap import FileStore, LocalStore, PrefixStore, Store, TCPStore

Kind = Callable[[Path], contextlib.AbstractContextManager["Made"]]
KINDS: dict[str, Kind] = {}


@dataclass
class Made:
    """A store, and the features of its kind."""

    store: Store
    #: Returns the store for another rank: another client of a server, or the same object if there are no clients.
    another: Callable[[], Store]
    #: Python code that makes `store` in the program of another rank. None: only threads can take part.
    program: str | None = None
    #: The object to close so that waits in `store` end.
    closes: Store | None = None
    watches: bool = False
    ephemeral: bool = False
    #: Whether closing `store` does not affect the store of `another`.
    apart: bool = False


def kind(name: str):
    """Register a kind, and the same kind behind a `PrefixStore`."""

    def register(make):
        manager = contextlib.contextmanager(make)

        @contextlib.contextmanager
        def behind_a_prefix(folder: Path) -> Iterator[Made]:
            with manager(folder) as made:
                yield Made(
                    PrefixStore("a", PrefixStore("b/c", made.store)),
                    lambda: PrefixStore("a", PrefixStore("b/c", made.another())),
                    made.program
                    and f"{made.program}; from ncclpy.bootstrap import PrefixStore; "
                    'store = PrefixStore("a", PrefixStore("b/c", store))',
                    made.store,
                    made.watches,
                    made.ephemeral,
                    made.apart,
                )

        KINDS[name] = manager
        KINDS[f"prefix-{name}"] = behind_a_prefix
        return make

    return register


@kind("local")
def local(folder):
    store = LocalStore(timeout=20)
    with store:
        yield Made(store, lambda: store, closes=store, watches=True, ephemeral=True)


@kind("file")
def file(folder):
    with contextlib.ExitStack() as stack:

        def opened():
            return stack.enter_context(FileStore(folder / "store", timeout=20))

        store = opened()
        program = f"from ncclpy.bootstrap import FileStore; store = FileStore({str(folder / 'store')!r}, timeout=20)"
        yield Made(store, opened, program, store, apart=True)


@kind("tcp")
def tcp(folder):
    with contextlib.ExitStack() as stack:
        served = stack.enter_context(TCPStore("127.0.0.1", 0, serve=True, timeout=20, linger=0, token="of the tests"))

        def client():
            return stack.enter_context(TCPStore("127.0.0.1", served.port, timeout=20, token="of the tests"))

        store = client()
        yield Made(
            store,
            client,
            "from ncclpy.bootstrap import TCPStore; "
            f"store = TCPStore('127.0.0.1', {served.port}, timeout=20, token='of the tests')",
            store,
            watches=True,
            ephemeral=True,
            apart=True,
        )
