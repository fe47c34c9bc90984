"""A store that one process serves and all ranks reach by its address."""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import time
import weakref
from typing import Any

from ncclpy.bootstrap import wire
from ncclpy.bootstrap.address import is_loopback, listen, resolve, shown
from ncclpy.bootstrap.handshake import connect
from ncclpy.bootstrap.store import (
    MAX_VALUE,
    TIMEOUT,
    LeaseEnded,
    Store,
    StoreError,
    StoreLost,
    absent_ranks,
    as_count,
    as_seconds,
    names,
)
from ncclpy.bootstrap.watch import Change, Watch
from ncclpy.errors import NcclTimeout

__all__ = ["TCPStore"]

log = logging.getLogger("ncclpy")

# Op and Status of native/frame.hpp.
SET, GET, ADD, COMPARE_SET, APPEND, WAIT, CHECK, DELETE, KEYS, GATHER, WATCH = range(1, 12)
MULTI_GET, MULTI_SET = 16, 17
LONG = 1  # in the answer to a MULTI_GET, in place of a value that does not fit
OK, LATE, REFUSED = range(3)

MAX_ANSWER = 1 << 30
#: Most bytes (unless a single value has more) and most keys of a request with many keys: such a request must not delay
#: the other clients for long.
REQUEST_BYTES, REQUEST_KEYS = 1 << 20, 1 << 16
#: The server watches the deadline of a wait. Its answer must arrive within so many seconds after the deadline.
GRACE = 1.0

_open_stores: weakref.WeakSet[TCPStore] = weakref.WeakSet()


class TCPStore(Store):
    """Keep keys in a server that all ranks reach by its address.

    The server is one thread of the serving process. Neither the server nor the clients' heartbeats need the GIL, so a
    process that is busy in Python is never taken for dead. The connection carries a lease: when a process ends, in
    whatever way, its ephemeral keys are deleted at once; when its host is lost, after `heartbeat` seconds.

    Parameters
    ----------
    host
        The server's address or name, IPv4 or IPv6. All addresses of a name are tried together. The serving process
        binds what is given here and no other address.
    port
        The server's port; 0, when serving, takes a free one, which the attribute `port` then has.
    serve
        Whether this process serves. The other processes may start before it; they wait for it.
    token
        A secret that all processes share; None takes ``NCCLPY_STORE_TOKEN``. Each end proves to the other that it
        knows the token, without sending it. The data that follow are not encrypted.
    timeout
        Default seconds that an operation may take, and seconds within which the constructor must reach the server.
    heartbeat
        Seconds of silence after which the other end counts as lost. Both ends use the smaller of their two values.
    allow_unauthenticated
        Whether to serve without a token at an address that other machines can reach.
    capacity
        Bytes that the server may keep: all keys and values, 200 more for each key, and what ranks have brought to
        rendezvous at which not all have arrived. An operation that would exceed this limit raises `StoreError`, and
        nothing that the server keeps is dropped.
    linger
        Seconds that the serving process waits, in `close` and at exit, for clients that have not left yet.

    Raises
    ------
    NcclTimeout
        If the host's name is not known in time, or no server answers; the message says what each address did.
    StoreError
        If what answers is no store, speaks another version of the protocol or knows another token.
    OSError
        If the process cannot serve at this address: the port is taken, or the address is not this machine's. Also if
        no thread or descriptor is left for the store.
    ValueError
        If an argument is out of range or `host` can be no name or address, or if the process would serve without a
        token at an address that other machines can reach.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        serve: bool = False,
        token: str | bytes | None = None,
        timeout: float = TIMEOUT,
        heartbeat: float = 10.0,
        allow_unauthenticated: bool = False,
        capacity: int = 4 << 30,
        linger: float = 5.0,
    ) -> None:
        self._closed = True  # until the constructor has succeeded
        if not isinstance(host, str):
            raise TypeError(f"host: expected a str, got {host!r}")
        if isinstance(port, bool) or not isinstance(port, int):
            raise TypeError(f"port: expected an int, got {port!r}")
        if not (0 if serve else 1) <= port < 1 << 16:
            raise ValueError(f"port: expected {0 if serve else 1} to 65535, got {port}")
        heartbeat = as_seconds(heartbeat, 10.0)
        if not 0.05 <= heartbeat <= 86400:
            raise ValueError(f"heartbeat: expected 0.05 to 86400 seconds, got {heartbeat:g}")
        super().__init__(timeout)
        self._closed = True
        self.host = host
        self.port = port
        self.heartbeat = heartbeat
        self._linger = as_seconds(linger, 5.0)
        self._capacity = as_count(capacity, "capacity")
        if not 0 < self._capacity < 1 << 63:
            raise ValueError(f"capacity: expected a number of bytes above 0, got {capacity}")
        secret = _secret(token)
        deadline = time.monotonic() + self.timeout
        self._server = self._serve(secret, allow_unauthenticated, deadline) if serve else None
        try:
            connection = connect(self.host, self.port, secret, heartbeat, deadline, self.timeout)
            self._client = wire.Client(connection.socket.detach(), connection.heartbeat, MAX_ANSWER + (1 << 20))
        except BaseException:
            if self._server is not None:
                self._server.stop()
            raise
        self.lease = connection.lease
        self._closed = False
        _open_stores.add(self)

    def _serve(self, secret: bytes, allow_unauthenticated: bool, deadline: float) -> wire.Server:
        addresses = resolve(self.host, self.port, deadline)
        outside = [address for address in addresses if not is_loopback(address)]
        if outside and not secret and not allow_unauthenticated:
            raise ValueError(
                f"token: other machines can reach {shown(self.host, self.port)}, and could then change the store: "
                "pass `token`, or set NCCLPY_STORE_TOKEN, to the same secret in all processes; on a private network, "
                "allow_unauthenticated=True serves without one"
            )
        sockets = listen(self.host, addresses)
        self.port = sockets[0].getsockname()[1]
        server = wire.Server(
            sockets,
            token=secret,
            heartbeat=self.heartbeat,
            max_value=MAX_VALUE,
            max_answer=MAX_ANSWER,
            capacity=self._capacity,
            max_backlog=2 * MAX_ANSWER,
        )
        name = f"the store at {shown(self.host, self.port)}"
        threading.Thread(target=_write_log, args=(server, name), name="ncclpy-store-log", daemon=True).start()
        return server

    def __repr__(self) -> str:
        return f"TCPStore({self.host!r}, {self.port})"

    # Keys.

    def _set(self, key: str, value: bytes, deadline: float) -> None:
        self._ask("set", SET, (_utf8(key), value, 0), deadline)

    def _set_ephemeral(self, key: str, value: bytes, deadline: float) -> None:
        self._ask("set", SET, (_utf8(key), value, 1), deadline)

    def _get(self, key: str, deadline: float) -> bytes | None:
        found = self._wait_for("get", GET, (_utf8(key), _microseconds(deadline)), deadline)
        return None if found[0] == LATE else found[1][0]

    def _add(self, key: str, number: int, deadline: float) -> int:
        total: int = self._ask(f"add to {names([key])}", ADD, (_utf8(key), number), deadline)[0]
        return total

    def _compare_set(
        self, key: str, expected: bytes | None, desired: bytes | None, deadline: float
    ) -> tuple[bool, bytes | None]:
        fields = (_utf8(key), int(expected is not None), expected or b"", int(desired is not None), desired or b"")
        swapped, there, value = self._ask("compare_set", COMPARE_SET, fields, deadline)
        return bool(swapped), value if there else None

    def _append(self, key: str, value: bytes, deadline: float) -> None:
        self._ask(f"append to {names([key])}", APPEND, (_utf8(key), value), deadline)

    def _wait(self, keys: list[str], deadline: float) -> list[str]:
        fields = (_microseconds(deadline), len(keys), *_in_one_frame(keys))
        status, found = self._wait_for("wait", WAIT, fields, deadline)
        return [_text(key) for key in found[1:]] if status == LATE else []

    def _check(self, keys: list[str], deadline: float) -> bool:
        return bool(self._ask("check", CHECK, (len(keys), *_in_one_frame(keys)), deadline)[0])

    def _delete(self, key: str, deadline: float) -> bool:
        return bool(self._ask("delete", DELETE, (_utf8(key),), deadline)[0])

    def _keys(self, prefix: str, deadline: float) -> list[str]:
        return [_text(key) for key in self._ask("keys", KEYS, (_utf8(prefix),), deadline)[1:]]

    def _multi_get(self, keys: list[str], deadline: float) -> list[bytes | None]:
        wanted = [_utf8(key) for key in keys]
        values, long = self._get_together(wanted, deadline)
        while long:  # some values did not fit into the answer
            again = [wanted[index] for index in long]
            found, still = self._get_together(again, deadline)
            if len(still) == len(found):  # each is too long for the answer to a MULTI_GET
                found, still = self._get_each(again, deadline), []
            for index, value in zip(long, found, strict=True):
                values[index] = value
            long = [long[index] for index in still]
        return values

    def _get_together(self, keys: list[bytes], deadline: float) -> tuple[list[bytes | None], list[int]]:
        """Return the values of keys, and the indices of the values that did not fit into an answer with others."""
        parts = wire.parts(keys, 1, REQUEST_BYTES, REQUEST_KEYS)
        asked = [(_microseconds(deadline), len(part), *part) for part in parts]
        answers = [found for _, found in self._calls("get", MULTI_GET, asked, deadline, GRACE)]
        values = [value for found in answers for value in found[1:]]
        if not any(found[0] for found in answers):
            return values, []
        long = [index for index, value in enumerate(values) if not isinstance(value, bytes) and value == LONG]
        return [value if isinstance(value, bytes) else None for value in values], long

    def _get_each(self, keys: list[bytes], deadline: float) -> list[bytes | None]:
        asked = [(key, _microseconds(deadline)) for key in keys]
        answers = self._calls("get", GET, asked, deadline, GRACE)
        return [None if status == LATE else found[0] for status, found in answers]

    def _multi_set(self, items: list[tuple[str, bytes]], deadline: float) -> None:
        fields = [field for key, value in items for field in (_utf8(key), value)]
        asked = [(len(part) // 2, *part) for part in wire.parts(fields, 2, REQUEST_BYTES, 2 * REQUEST_KEYS)]
        self._calls("set", MULTI_SET, asked, deadline)

    def _gather(self, name: str, rank: int, size: int, value: bytes, timeout: float) -> list[bytes]:
        deadline = time.monotonic() + timeout
        fields = (_utf8(name), rank, size, _microseconds(deadline), value)
        status, found = self._wait_for(names([name]), GATHER, fields, deadline)
        if status == LATE:
            count, listed, *ranks = found
            raise absent_ranks(self, name, ranks[:listed], size, timeout, left=ranks[listed:], count=count)
        return found[1:] or [b""] * size

    def _watch(self, prefix: str) -> Watch:
        watch = _Watch(self, prefix)  # ends when it is no longer referenced, also if the next line raises
        if watch._take(self._deadline(None)) is None:
            raise self._no_answer_error("watch", time.monotonic())
        return watch

    def _publish_status(self, key: str, rest: bytes, asked: str, source: Any) -> wire.StatusPublication:
        try:
            return wire.StatusPublication(self._client, _utf8(key), rest, _utf8(asked), source)
        except ConnectionError as error:
            raise self._lost_error(error) from None

    # Requests.

    def _ask(self, what: str, op: int, fields: tuple, deadline: float) -> list[Any]:
        """Return the fields of an answer that the server sends at once."""
        return self._answer(what, op, fields, deadline, deadline)[1]

    def _wait_for(self, what: str, op: int, fields: tuple, deadline: float) -> tuple[int, list[Any]]:
        """Return the answer to a request that waits in the server; it may say that the deadline has passed."""
        return self._answer(what, op, fields, deadline, deadline + GRACE)

    def _answer(self, what: str, op: int, fields: tuple, deadline: float, latest: float) -> tuple[int, list[Any]]:
        try:
            answer = self._client.call(op, fields, latest)
        except ConnectionError as error:
            raise self._lost_error(error) from None
        return self._checked(what, answer, deadline)

    def _calls(
        self, what: str, op: int, asked: list[tuple], deadline: float, grace: float = 0.0
    ) -> list[tuple[int, list[Any]]]:
        """Send several requests at once; return all answers."""
        try:
            answers = self._client.calls(op, asked, deadline + grace)
        except ConnectionError as error:
            raise self._lost_error(error) from None
        return [self._checked(what, answer, deadline) for answer in answers]

    def _checked(self, what: str, answer: tuple[int, list[Any]] | None, deadline: float) -> tuple[int, list[Any]]:
        if answer is None:
            raise self._no_answer_error(what, deadline)
        if answer[0] == REFUSED:
            raise StoreError(f"{self}: {what}: {answer[1][0].decode(errors='replace')}")
        return answer

    def _lost_error(self, error: ConnectionError) -> StoreError:
        if self._closed:  # meanwhile, by another thread
            return StoreError(f"{self} was closed")
        kind = LeaseEnded if isinstance(error, ConnectionAbortedError) else StoreLost
        return kind(f"{self}: {error}")

    def _no_answer_error(self, what: str, deadline: float) -> NcclTimeout:
        return NcclTimeout(f"{self}: {what}: the server has not answered in time; it may be stopped or overloaded")

    # Closing.

    def _close(self) -> None:
        _open_stores.discard(self)
        if self._server is not None:
            self._server.refuse_new()
        self._client.close("the store was closed", 1.0)
        if self._server is None:
            return
        try:
            until = time.monotonic() + self._linger
            while self._server.clients and time.monotonic() < until:
                time.sleep(0.005)
        finally:
            self._server.stop()

    def __del__(self) -> None:
        if not self._closed:
            self._linger = 0.0
            self.close()


class _Watch(Watch):
    """Report the changes that the server sends."""

    def __init__(self, store: TCPStore, prefix: str) -> None:
        self.prefix = prefix
        self._store = store
        self._closed = False
        self._number = store._client.submit(WATCH, (_utf8(prefix),))

    def _take(self, deadline: float) -> tuple[int, list[Any]] | None:
        try:
            answer: tuple[int, list[Any]] | None = self._store._client.wait(self._number, deadline)
        except ConnectionError as error:
            raise self._store._lost_error(error) from None
        return answer

    def _next(self, deadline: float) -> Change | tuple[()] | None:
        if self._ended():
            return ()
        try:
            answer = self._take(deadline)
        except StoreError:
            if self._ended():
                return ()
            raise
        if answer is None:
            return None
        key, there, value = answer[1]
        return Change(_text(key), value if there else None)

    def _ended(self) -> bool:
        return self._closed or self._store.closed

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._store._client.forget(self._number)

    def __del__(self) -> None:
        if hasattr(self, "_number"):
            self.close()


def _secret(token: str | bytes | None) -> bytes:
    if token is None:
        token = os.environ.get("NCCLPY_STORE_TOKEN", "")
    if not isinstance(token, (str, bytes)):
        raise TypeError(f"token: expected a str or bytes, got {type(token).__name__}")
    return token.encode("utf-8", "surrogateescape") if isinstance(token, str) else token


def _utf8(key: str) -> bytes:
    return key.encode("utf-8", "surrogatepass")


def _in_one_frame(keys: list[str]) -> list[bytes]:
    named = [_utf8(key) for key in keys]
    if (size := sum(map(len, named)) + 5 * len(named)) > MAX_VALUE:
        raise ValueError(f"keys: {len(keys)} keys of {size} bytes are more than {MAX_VALUE >> 20} MiB at a time")
    return named


def _text(key: bytes) -> str:
    return key.decode("utf-8", "surrogatepass")


def _microseconds(deadline: float) -> int:
    return -1 if math.isinf(deadline) else max(0, int((deadline - time.monotonic()) * 1e6))


def _write_log(server: wire.Server, name: str) -> None:
    while (line := server.next_line(3600.0)) or not server.stopped:
        if line:
            log.warning("%s: %s", name, line)


@atexit.register
def _say_goodbye() -> None:
    """Close all stores at exit: clients first, so that none of them finds its connection broken by a server here.

    A store that serves waits for the clients in other processes, see `linger`.
    """
    for store in sorted(_open_stores, key=lambda store: store._server is not None):
        store.close()
