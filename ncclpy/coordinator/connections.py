"""The connections of a control plane: the tree that the ranks form, how they find each other in a store and connect.

Each rank listens for its children: on a Unix socket for the ranks of its machine, and on TCP at an address that other
machines can reach. Parent and child prove to each other that they have read the secret which the parent has put into
the store.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ncclpy.bootstrap.address import listen, look_up, resolve
from ncclpy.bootstrap.place import machine
from ncclpy.bootstrap.rank_rendezvous import RankRendezvous
from ncclpy.coordinator.control import Control, await_readable
from ncclpy.errors import NcclAborted, NcclTimeout, ranks, seconds, spans

if TYPE_CHECKING:
    from ncclpy.bootstrap.store import Store

__all__ = ["Tree", "open_control"]

#: Seconds that stand for a timeout of 0, as 0 means no timeout to the control plane.
_AT_ONCE = 1e-9
#: Most children of a rank in the tree of its machine, and in the tree of the machines' leaders.
_FAN_OUT = 8
#: Seconds that a connection has for the handshake; and seconds between checks whether the wait is still wanted.
_HANDSHAKE, _SLICE = 5.0, 0.1
#: Bytes of a nonce; and of a proof, which is an HMAC-SHA256, and of its key.
_NONCE, _PROOF = 16, 32
#: Most connections with an unfinished handshake, besides the expected ones: the oldest is closed for a newer one.
_MAX_UNPROVEN = 32
#: Errors of accept() for lack of a resource that closing a connection releases.
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Tree:
    """Find the parents and children of all ranks; rank 0 is the root.

    The lowest rank of each machine is its leader. The leaders form one tree, and the ranks of each machine form
    another one under their leader. The depth of each tree is the logarithm of its size.

    Parameters
    ----------
    machines
        The name of each rank's machine, by rank.
    """

    def __init__(self, machines: Sequence[str]) -> None:
        places: dict[str, list[int]] = {}
        for rank, name in enumerate(machines):
            places.setdefault(name, []).append(rank)
        leaders = [members[0] for members in places.values()]
        self.parents: list[int | None] = [None] * len(machines)
        for members in (leaders, *places.values()):
            for position, rank in enumerate(members):
                if position:
                    self.parents[rank] = members[(position - 1) // _FAN_OUT]
        self.children: list[list[int]] = [[] for _ in machines]
        for rank, parent in enumerate(self.parents):
            if parent is not None:
                self.children[parent].append(rank)

    def below(self, rank: int) -> tuple[int, ...]:
        """Return a rank and all ranks below it."""
        found = [rank]
        for each in found:
            found += self.children[each]
        return tuple(sorted(found))

    def depth(self) -> int:
        """Return how many steps the farthest rank is from the root."""
        deepest = 0
        for rank in range(len(self.parents)):
            steps, at = 0, self.parents[rank]
            while at is not None:
                steps, at = steps + 1, self.parents[at]
            deepest = max(deepest, steps)
        return deepest


def open_control(
    store: Store,
    rank: int,
    size: int,
    name: str,
    *,
    cache: int,
    timeout: float | None,
    stall_after: float,
    patience: float,
    wanted: Callable[[], bool] = lambda: True,
    silence: float = 30.0,
) -> Control:
    """Meet the other ranks in a store, connect, and return this rank's end of the control plane.

    Parameters
    ----------
    store
        The part of a store that belongs to this control plane alone.
    rank, size
        This rank's number, and the number of ranks.
    name
        The coordinator's name, for messages.
    cache, timeout, stall_after, silence
        As for `Control`; `timeout` may be None for never.
    patience
        Seconds within which all ranks must have arrived and connected.
    wanted
        Called at intervals; False ends the wait.

    Raises
    ------
    NcclTimeout
        If ranks do not arrive in time; the message names them.
    NcclAborted
        If the control plane is no longer wanted, on this rank or on another one.
    """
    deadline = time.monotonic() + patience
    with contextlib.ExitStack() as stack:
        listener = _Listener(store, size)
        stack.callback(listener.close)
        mine = json.dumps({"machine": machine(), **listener.published}).encode()
        rendezvous = RankRendezvous(store, f"coordinator {name!r}", rank, size)
        combine = rendezvous.combined("meet", _read_place)
        met = rendezvous.meet("meet", range(size), f"to connect coordinator {name!r}", mine, combine, patience, wanted)
        places = rendezvous.parts("meet", met, _read_place)
        tree = Tree([place["machine"] for place in places])
        above = None
        parent = tree.parents[rank]
        if parent is not None:
            sock = _connect_to_parent(places[parent], places[rank], rank, parent, deadline, wanted)
            stack.callback(sock.close)
            above = (parent, sock)
        connected = listener.accept_children(tree.children[rank], deadline, wanted)
        children = [(child, tree.below(child), connected[child].detach()) for child in tree.children[rank]]
        return Control(
            rank,
            size,
            None if above is None else (above[0], above[1].detach()),
            children,
            cache=cache,
            timeout=0.0 if timeout is None else max(timeout, _AT_ONCE),
            stall_after=stall_after,
            silence=silence,
        )


def _read_place(packed: bytes) -> dict[str, Any]:
    """Return what a rank has published: its machine, its addresses and its token; raise if that is malformed."""
    published = json.loads(packed)
    bytes.fromhex(published["token"]), bytes.fromhex(published.get("local", ""))
    addresses = [(str(host), int(port)) for host, port in published.get("addresses", [])]
    return {**published, "machine": str(published["machine"]), "addresses": addresses}


def _own_addresses(store: Store) -> list[str]:
    """Return addresses at which other machines reach this one.

    The result is the address on the route to the store. If that is not known, the result has the addresses of the host
    name, or the loopback address if the name has none.
    """
    host = getattr(store, "host", None) or getattr(getattr(store, "store", None), "host", None)
    if isinstance(host, str):
        for family, address in resolve(host, 9, time.monotonic() + _HANDSHAKE):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                return [probe.getsockname()[0]]
    known = look_up(socket.gethostname(), 0, time.monotonic() + _HANDSHAKE)
    found = [str(address[0]) for _, address in known] if isinstance(known, list) else []
    return list(dict.fromkeys(found)) or ["127.0.0.1"]


def _proof(token: bytes, prover: bytes, nonce: bytes) -> bytes:
    return hmac.new(token, prover + nonce, hashlib.sha256).digest()


def _receive(sock: socket.socket, length: int) -> bytes:
    """Return `length` bytes; each piece must arrive within the connection's timeout."""
    got = b""
    while len(got) < length:
        more = sock.recv(length - len(got))
        if not more:
            raise OSError("the other end has closed the connection")
        got += more
    return got


def _check_user(sock: socket.socket) -> None:
    """Raise OSError if another user's process is at the other end of a Unix socket; other sockets are not checked."""
    if sock.family == socket.AF_UNIX:
        size = struct.calcsize("3i")
        _, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        if user != os.geteuid():
            raise OSError(f"the other end is a process of user {user}, this one of user {os.geteuid()}")


class _UnprovenConnection:
    """A connection that has not yet proved that it is from a rank of this coordinator.

    Raises
    ------
    OSError
        From its methods, if the connection is not from such a rank; the caller then closes it.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.until = time.monotonic() + _HANDSHAKE
        self._nonce, self._received = secrets.token_bytes(_NONCE), b""

    def begin(self) -> None:
        self.sock.setblocking(False)
        _check_user(self.sock)
        self.sock.send(self._nonce)

    def step(self, token: bytes, children: list[int]) -> int | None:
        """Read what has arrived; return the child that has proved itself, or None while more must arrive."""
        length = 4 + _NONCE + _PROOF
        more = self.sock.recv(length - len(self._received))
        if not more:
            raise OSError("the other end has closed the connection")
        self._received += more
        if len(self._received) < length:
            return None
        number, theirs, proof = self._received[:4], self._received[4 : 4 + _NONCE], self._received[4 + _NONCE :]
        rank = int.from_bytes(number, "little")
        if rank not in children or not hmac.compare_digest(proof, _proof(token, number, self._nonce)):
            raise OSError("the connection is not from a child of this rank")
        self.sock.send(_proof(token, b"parent", theirs))
        _set_options(self.sock)
        return rank


class _Listener:
    """The sockets at which a rank listens for its children."""

    def __init__(self, store: Store, size: int) -> None:
        self._sockets: list[socket.socket] = []
        self._token = secrets.token_bytes(_PROOF)
        self._accept_error = ""  # what kept connections from being accepted
        self.published: dict[str, object] = {"token": self._token.hex()}
        if size == 1:
            return
        local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sockets.append(local)
        local.bind("")  # a name that the kernel chooses
        local.listen(256)
        self.published["local"] = bytes(local.getsockname()).hex()
        for host in _own_addresses(store):
            with contextlib.suppress(OSError):
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                address = (host, 0, 0, 0) if family == socket.AF_INET6 else (host, 0)
                self._sockets += listen(host, [(family, address)])
                addresses = self.published.setdefault("addresses", [])
                assert isinstance(addresses, list)
                addresses.append([host, self._sockets[-1].getsockname()[1]])

    def accept_children(
        self, children: list[int], deadline: float, wanted: Callable[[], bool]
    ) -> dict[int, socket.socket]:
        """Return a connection to each child, once all have connected.

        The handshakes are served side by side, so a connection that sends nothing delays no other.
        """
        connected: dict[int, socket.socket] = {}
        unproven: dict[int, _UnprovenConnection] = {}  # by descriptor, the oldest first
        for each in self._sockets:
            each.setblocking(False)
        try:
            while len(connected) < len(children):
                missing = [child for child in children if child not in connected]
                _check_wait(deadline, wanted, missing, self._accept_error)
                for late in [each for each in unproven.values() if time.monotonic() >= each.until]:
                    _drop(unproven, late)
                listeners = {each.fileno(): each for each in self._sockets}
                ready = await_readable([*listeners, *unproven], _SLICE)
                for connection in [unproven[each] for each in ready if each in unproven]:
                    self._serve(connection, unproven, connected, children)
                for listener in [listeners[each] for each in ready if each in listeners]:
                    self._accept(listener, unproven, len(missing) + _MAX_UNPROVEN)
        except BaseException:
            for sock in connected.values():
                sock.close()
            raise
        finally:
            for connection in unproven.values():
                connection.sock.close()
        return connected

    def _serve(
        self,
        connection: _UnprovenConnection,
        unproven: dict[int, _UnprovenConnection],
        connected: dict[int, socket.socket],
        children: list[int],
    ) -> None:
        """Continue a connection's handshake; at its end the connection is a child's, or is closed."""
        try:
            rank = connection.step(self._token, [child for child in children if child not in connected])
        except BlockingIOError:
            return
        except OSError:
            _drop(unproven, connection)
            return
        if rank is not None:
            connected[rank] = unproven.pop(connection.sock.fileno()).sock

    def _accept(self, listener: socket.socket, unproven: dict[int, _UnprovenConnection], most: int) -> None:
        """Accept the connections that wait at a socket; keep at most `most` with an unfinished handshake."""
        for _ in range(most):
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    continue  # the connection ended before it could be accepted
                if not unproven:
                    self._accept_error = f": connections cannot be accepted: {error.strerror}"
                    time.sleep(_SLICE)
                    return
                _drop(unproven, next(iter(unproven.values())))
                continue
            self._accept_error = ""
            connection = unproven[sock.fileno()] = _UnprovenConnection(sock)
            try:
                connection.begin()
            except OSError:
                _drop(unproven, connection)
            if len(unproven) > most:
                _drop(unproven, next(iter(unproven.values())))

    def close(self) -> None:
        for each in self._sockets:
            each.close()


def _drop(unproven: dict[int, _UnprovenConnection], connection: _UnprovenConnection) -> None:
    del unproven[connection.sock.fileno()]
    connection.sock.close()


def _set_options(sock: socket.socket) -> None:
    """Make a connection nonblocking; over TCP, send small frames at once and notice a lost machine."""
    sock.setblocking(False)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _check_wait(deadline: float, wanted: Callable[[], bool], missing: list[int], why: str = "") -> None:
    if not wanted():
        raise NcclAborted("the coordinator has ended while its ranks connected")
    if time.monotonic() >= deadline:
        late = NcclTimeout(f"{ranks(spans(missing))} met in the coordinator's store but did not connect in time{why}")
        late.missing = missing
        raise late


def _connect_to_parent(
    place: dict, mine: dict, rank: int, parent: int, deadline: float, wanted: Callable[[], bool]
) -> socket.socket:
    """Return a connection to the parent, at the first address where the answer proves that the parent listens."""
    ways: list[tuple[socket.AddressFamily, Any]] = []
    if place["machine"] == mine["machine"]:
        ways.append((socket.AF_UNIX, bytes.fromhex(place["local"])))
    for host, port in place.get("addresses", []):
        ways.append((socket.AF_INET6, (host, port, 0, 0)) if ":" in host else (socket.AF_INET, (host, port)))
    token = bytes.fromhex(place["token"])
    why: dict[str, str] = {}
    begun = time.monotonic()
    while True:
        for family, address in ways:
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.settimeout(max(0.01, min(_HANDSHAKE, deadline - time.monotonic())))
                sock.connect(address)
                _check_user(sock)
                sock.settimeout(max(0.01, deadline - time.monotonic()))  # the parent first connects to its own parent
                nonce, number = secrets.token_bytes(_NONCE), rank.to_bytes(4, "little")
                sock.sendall(number + nonce + _proof(token, number, _receive(sock, _NONCE)))
                if not hmac.compare_digest(_receive(sock, _PROOF), _proof(token, b"parent", nonce)):
                    raise OSError("another program listens there")
                _set_options(sock)
                return sock
            except OSError as error:
                sock.close()
                why["this machine" if family == socket.AF_UNIX else str(address)] = str(error)
        if time.monotonic() >= deadline:
            late = NcclTimeout(
                f"rank {rank} could not connect to rank {parent} of its coordinator within "
                f"{seconds(time.monotonic() - begun)}: " + "; ".join(f"{way}: {error}" for way, error in why.items())
            )
            late.missing = [parent]
            raise late
        _check_wait(deadline, wanted, [parent])
        time.sleep(0.02)
