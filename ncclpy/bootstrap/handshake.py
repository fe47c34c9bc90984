"""The client's part of the handshake: it tries all addresses together, until one answers and the token is proved.

The messages are in native/handshake.hpp. The client waits for a server that does not answer yet. A server that is no
store, or has another token, is an error as soon as no other address of the host is being tried.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import struct
import time
from typing import NamedTuple

from ncclpy.bootstrap.address import Address, resolve, shown
from ncclpy.bootstrap.store_arguments import StoreError
from ncclpy.bootstrap.watch import SLICE
from ncclpy.bootstrap.wire import hmac
from ncclpy.errors import NcclTimeout
from ncclpy.errors import seconds as as_text

__all__ = ["Connection", "connect"]

MAGIC = b"NCCLPYST"
VERSION = 1
GREETING = struct.Struct("<8sHHI32s")
VERDICT = struct.Struct("<I32sQ")
#: Seconds of one try to connect and get an answer, before the address is tried again.
PATIENCE = 10.0


class Connection(NamedTuple):
    """A connection with a completed handshake."""

    socket: socket.socket
    heartbeat: float
    lease: int


def connect(host: str, port: int, token: bytes, heartbeat: float, deadline: float, timeout: float) -> Connection:
    """Return a connection to the server at an address, once there is one."""
    where = shown(host, port)
    attempts = [_Attempt(address, token, heartbeat) for address in resolve(host, port, deadline)]
    selector = selectors.DefaultSelector()
    try:
        while True:
            time_ = time.monotonic()
            for each in attempts:
                each.begin(selector, time_)
            wake = min(min(each.due for each in attempts), deadline, time_ + SLICE)
            for key, _ in selector.select(max(0.0, wake - time_)):
                connection: Connection | None = key.data.step(selector)
                if connection is not None:
                    key.data.leave(selector, close=False)
                    return connection
            refusal = next((each.refusal for each in attempts if each.refusal), None)
            if refusal and all(each.refusal or each.socket is None for each in attempts):
                raise StoreError(f"the server at {where} {refusal}")
            if time.monotonic() >= deadline:
                tried = "; ".join(f"{shown(*each.address[1][:2])}: {each.why}" for each in attempts)
                raise NcclTimeout(f"no store answers at {where} within {as_text(timeout)} ({tried})")
    finally:
        for each in attempts:
            each.leave(selector)
        selector.close()


class _Attempt:
    """One address, which is tried until it answers."""

    def __init__(self, address: Address, token: bytes, heartbeat: float) -> None:
        self.address = address
        self.socket: socket.socket | None = None
        self.due = 0.0  # when to try again, or to give up this try
        self.why = "not tried"
        self.refusal = ""
        self._token = token
        self._heartbeat = heartbeat
        self._pause = 0.01

    def begin(self, selector: selectors.BaseSelector, now: float) -> None:
        if self.refusal or now < self.due:
            return
        if self.socket is not None:
            self._fail(selector, self.why)
            return
        try:
            self.socket = socket.socket(self.address[0], socket.SOCK_STREAM)
        except OSError as error:
            if error.errno != errno.EAFNOSUPPORT:
                raise
            self._fail(selector, os.strerror(error.errno))  # an IPv6 address, on a machine without IPv6
            return
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(self._heartbeat * 1e3)))
        self.due = now + PATIENCE
        self.why = "it has not answered"
        self._greeting, self._proved, self._received = b"", False, b""
        code = self.socket.connect_ex(self.address[1])
        selector.register(self.socket, selectors.EVENT_WRITE, self)
        if code not in (0, errno.EINPROGRESS):
            self._fail(selector, os.strerror(code))

    def step(self, selector: selectors.BaseSelector) -> Connection | None:
        """Continue the handshake as far as possible without waiting."""
        sock = self.socket
        assert sock is not None
        try:
            if not self._greeting:
                error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if error:
                    self._fail(selector, os.strerror(error))
                    return None
                if sock.getsockname() == sock.getpeername():
                    # No server listens there, and the system has given this socket the very port that it connects to.
                    self._fail(selector, "connection refused")
                    return None
                self._greeting = GREETING.pack(MAGIC, VERSION, 0, int(self._heartbeat * 1e3), os.urandom(32))
                sock.send(self._greeting)
                selector.modify(sock, selectors.EVENT_READ, self)
                return None
            wanted = VERDICT.size if self._proved else GREETING.size
            got = sock.recv(wanted - len(self._received))
        except BlockingIOError:
            return None
        except OSError as error:
            self._fail(selector, error.strerror or str(error))
            return None
        if not got:
            self._fail(selector, "it ended the connection")
            return None
        self._received += got
        if self._proved:
            return self._judge(sock) if len(self._received) == wanted else None
        if not MAGIC.startswith(self._received[:8]):
            self._refuse(selector, f"is not a store of ncclpy: it answered {self._received[:24]!r}")
        elif len(self._received) == wanted:
            self._prove(selector, sock)
        return None

    def _prove(self, selector: selectors.BaseSelector, sock: socket.socket) -> None:
        _, version, has_token, heartbeat, _ = GREETING.unpack(self._received)
        if version != VERSION:
            self._refuse(selector, f"speaks version {version} of the protocol, this client version {VERSION}")
        elif has_token and not self._token:
            self._refuse(selector, "asks for a token, and there is none here: pass `token` or set NCCLPY_STORE_TOKEN")
        elif self._token and not has_token:
            self._refuse(selector, "does not know the token, as it uses none: it may be another program's store")
        else:
            self._greetings = self._greeting + self._received
            self._agreed_heartbeat = heartbeat / 1e3
            try:
                sock.send(hmac(self._token, b"client" + self._greetings))
            except OSError as error:
                self._fail(selector, error.strerror or str(error))
                return
            self._proved, self._received = True, b""

    def _judge(self, sock: socket.socket) -> Connection | None:
        verdict, proof, lease = VERDICT.unpack(self._received)
        if verdict:
            self.refusal = "has another token (`token`, NCCLPY_STORE_TOKEN) than this client"
        elif proof != hmac(self._token, b"server" + self._greetings):
            self.refusal = "claims to know the token and does not: it is not the server that was meant"
        else:
            return Connection(sock, self._agreed_heartbeat, lease)
        return None

    def _refuse(self, selector: selectors.BaseSelector, why: str) -> None:
        self.refusal = why
        self.leave(selector)

    def _fail(self, selector: selectors.BaseSelector, why: str) -> None:
        """End this try; the next one begins a little later."""
        self.leave(selector)
        self.why = why
        # Randomised, so that clients that connected too early do not all try again at the same time.
        self._pause = min(self._pause * 2, 0.4)
        self.due = time.monotonic() + self._pause * (0.75 + os.urandom(1)[0] / 512)

    def leave(self, selector: selectors.BaseSelector, close: bool = True) -> None:
        """Take the socket out of the selector and forget it; `close` is False for a socket that is handed over."""
        if self.socket is not None:
            try:
                selector.unregister(self.socket)
            except (KeyError, ValueError):
                pass
            if close:
                self.socket.close()
            self.socket = None
