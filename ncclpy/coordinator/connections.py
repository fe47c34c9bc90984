"""The connections of a control plane: the tree that the ranks form, how they find each other in a store and connect.

Each rank listens for its children: at a name that only its machine knows, and, if there are other machines, at an
address that they can reach. Both ends prove that they have read the secret which the listening rank has put into the
store.
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

#: Most children of a rank on its machine, and most child machines of a machine.
_FAN = 8
#: Seconds that a connection has for the handshake; and seconds between checks whether the wait is still wanted.
_HANDSHAKE, _SLICE = 5.0, 0.1
_NONCE, _PROOF = 16, 32
#: Most connections with an unfinished handshake, besides the expected ones: the oldest is closed for a newer one.
_STRANGERS = 32
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
                    self.parents[rank] = members[(position - 1) // _FAN]
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
        ears = _Ears(store, size)
        stack.callback(ears.close)
        mine = json.dumps({"machine": machine(), **ears.told}).encode()
        rendezvous = RankRendezvous(store, f"coordinator {name!r}", rank, size)
        combine = rendezvous.combined("meet", _read_place)
        met = rendezvous.meet("meet", range(size), f"to connect coordinator {name!r}", mine, combine, patience, wanted)
        places = rendezvous.parts("meet", met, _read_place)
        tree = Tree([place["machine"] for place in places])
        above = None
        parent = tree.parents[rank]
        if parent is not None:
            line = _call(places[parent], places[rank], rank, parent, deadline, wanted)
            stack.callback(line.close)
            above = (parent, line)
        heard = ears.hear(tree.children[rank], deadline, wanted)
        children = [(child, tree.below(child), heard[child].detach()) for child in tree.children[rank]]
        return Control(
            rank,
            size,
            None if above is None else (above[0], above[1].detach()),
            children,
            cache=cache,
            timeout=timeout or 0.0,
            stall_after=stall_after,
            silence=silence,
        )


def _read_place(packed: bytes) -> dict[str, Any]:
    """Return the addresses at which a rank listens, and its machine."""
    told = json.loads(packed)
    bytes.fromhex(told["token"]), bytes.fromhex(told.get("local", ""))
    addresses = [(str(host), int(port)) for host, port in told.get("addresses", [])]
    return {**told, "machine": str(told["machine"]), "addresses": addresses}


def _own_addresses(store: Store) -> list[str]:
    """Return addresses at which other machines reach this one: on the route to the store, or of the host name."""
    host = getattr(store, "host", None) or getattr(getattr(store, "store", None), "host", None)
    if isinstance(host, str):
        for family, address in resolve(host, 9, time.monotonic() + _HANDSHAKE):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                return [probe.getsockname()[0]]
    known = look_up(socket.gethostname(), 0, time.monotonic() + _HANDSHAKE)
    found = [str(address[0]) for _, address in known] if isinstance(known, list) else []
    return list(dict.fromkeys(found)) or ["127.0.0.1"]


def _proof(token: bytes, who: bytes, nonce: bytes) -> bytes:
    return hmac.new(token, who + nonce, hashlib.sha256).digest()


def _receive(line: socket.socket, length: int) -> bytes:
    """Return `length` bytes; each piece must arrive within the connection's timeout."""
    got = b""
    while len(got) < length:
        more = line.recv(length - len(got))
        if not more:
            raise OSError("the other end has closed the connection")
        got += more
    return got


def _check_user(line: socket.socket) -> None:
    """Raise OSError if another user's process is at the other end of a socket of this machine."""
    if line.family == socket.AF_UNIX:
        size = struct.calcsize("3i")
        _, user, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        if user != os.geteuid():
            raise OSError(f"the other end is a process of user {user}, this one of user {os.geteuid()}")


class _Caller:
    """A connection that has not yet proved that it is from a rank of this coordinator.

    Raises
    ------
    OSError
        From its methods, if the connection is not from such a rank; the caller then closes it.
    """

    def __init__(self, line: socket.socket) -> None:
        self.line = line
        self.until = time.monotonic() + _HANDSHAKE
        self._nonce, self._said = secrets.token_bytes(_NONCE), b""

    def begin(self) -> None:
        self.line.setblocking(False)
        _check_user(self.line)
        self.line.send(self._nonce)

    def step(self, token: bytes, children: list[int]) -> int | None:
        """Read what has arrived; return the child that has proved itself, or None while more must arrive."""
        length = 4 + _NONCE + _PROOF
        more = self.line.recv(length - len(self._said))
        if not more:
            raise OSError("the other end has closed the connection")
        self._said += more
        if len(self._said) < length:
            return None
        number, theirs, proof = self._said[:4], self._said[4 : 4 + _NONCE], self._said[4 + _NONCE :]
        rank = int.from_bytes(number, "little")
        if rank not in children or not hmac.compare_digest(proof, _proof(token, number, self._nonce)):
            raise OSError("it does not belong here")
        self.line.send(_proof(token, b"parent", theirs))
        _sharpen(self.line)
        return rank


class _Ears:
    """The sockets at which a rank listens for its children."""

    def __init__(self, store: Store, size: int) -> None:
        self._sockets: list[socket.socket] = []
        self._token = secrets.token_bytes(_PROOF)
        self._why = ""  # what kept connections from being accepted
        self.told: dict[str, object] = {"token": self._token.hex()}
        if size == 1:
            return
        local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sockets.append(local)
        local.bind("")  # a name that the kernel chooses
        local.listen(256)
        self.told["local"] = bytes(local.getsockname()).hex()
        for host in _own_addresses(store):
            with contextlib.suppress(OSError):
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                address = (host, 0, 0, 0) if family == socket.AF_INET6 else (host, 0)
                self._sockets += listen(host, [(family, address)])
                addresses = self.told.setdefault("addresses", [])
                assert isinstance(addresses, list)
                addresses.append([host, self._sockets[-1].getsockname()[1]])

    def hear(self, children: list[int], deadline: float, wanted: Callable[[], bool]) -> dict[int, socket.socket]:
        """Return a connection to each child, once all have connected.

        The handshakes are served side by side, so a connection that sends nothing delays no other.
        """
        heard: dict[int, socket.socket] = {}
        callers: dict[int, _Caller] = {}  # by descriptor, the oldest first
        for each in self._sockets:
            each.setblocking(False)
        try:
            while len(heard) < len(children):
                missing = [child for child in children if child not in heard]
                _look(deadline, wanted, missing, self._why)
                for late in [each for each in callers.values() if time.monotonic() >= each.until]:
                    _hang_up(callers, late)
                listeners = {each.fileno(): each for each in self._sockets}
                ready = await_readable([*listeners, *callers], _SLICE)
                for caller in [callers[each] for each in ready if each in callers]:
                    self._serve(caller, callers, heard, children)
                for listener in [listeners[each] for each in ready if each in listeners]:
                    self._accept(listener, callers, len(missing) + _STRANGERS)
        except BaseException:
            for line in heard.values():
                line.close()
            raise
        finally:
            for caller in callers.values():
                caller.line.close()
        return heard

    def _serve(
        self, caller: _Caller, callers: dict[int, _Caller], heard: dict[int, socket.socket], children: list[int]
    ) -> None:
        """Read from a connection, which becomes a child's or is closed."""
        try:
            rank = caller.step(self._token, [child for child in children if child not in heard])
        except BlockingIOError:
            return
        except OSError:
            _hang_up(callers, caller)
            return
        if rank is not None:
            heard[rank] = callers.pop(caller.line.fileno()).line

    def _accept(self, listener: socket.socket, callers: dict[int, _Caller], most: int) -> None:
        """Accept the connections that wait at a socket; keep at most `most` with an unfinished handshake."""
        for _ in range(most):
            try:
                line, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    continue  # the connection has ended before it was accepted
                if not callers:
                    self._why = f": connections cannot be accepted: {error.strerror}"
                    time.sleep(_SLICE)
                    return
                _hang_up(callers, next(iter(callers.values())))
                continue
            self._why = ""
            caller = callers[line.fileno()] = _Caller(line)
            try:
                caller.begin()
            except OSError:
                _hang_up(callers, caller)
            if len(callers) > most:
                _hang_up(callers, next(iter(callers.values())))

    def close(self) -> None:
        for each in self._sockets:
            each.close()


def _hang_up(callers: dict[int, _Caller], caller: _Caller) -> None:
    del callers[caller.line.fileno()]
    caller.line.close()


def _sharpen(line: socket.socket) -> None:
    """Make a connection nonblocking; over TCP, send small frames at once and notice a lost machine."""
    line.setblocking(False)
    if line.family != socket.AF_UNIX:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _look(deadline: float, wanted: Callable[[], bool], missing: list[int], why: str = "") -> None:
    if not wanted():
        raise NcclAborted("the coordinator has ended while its ranks connected")
    if time.monotonic() >= deadline:
        late = NcclTimeout(f"{ranks(spans(missing))} came to the coordinator's store and did not connect in time{why}")
        late.missing = missing
        raise late


def _call(
    place: dict, mine: dict, rank: int, parent: int, deadline: float, wanted: Callable[[], bool]
) -> socket.socket:
    """Return a connection to the parent, by the first address at which it proves to be that rank."""
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
            line = socket.socket(family, socket.SOCK_STREAM)
            try:
                line.settimeout(max(0.01, min(_HANDSHAKE, deadline - time.monotonic())))
                line.connect(address)
                _check_user(line)
                line.settimeout(max(0.01, deadline - time.monotonic()))  # the parent connects to its own parent first
                nonce, number = secrets.token_bytes(_NONCE), rank.to_bytes(4, "little")
                line.sendall(number + nonce + _proof(token, number, _receive(line, _NONCE)))
                if not hmac.compare_digest(_receive(line, _PROOF), _proof(token, b"parent", nonce)):
                    raise OSError("another program listens there")
                _sharpen(line)
                return line
            except OSError as error:
                line.close()
                why["this machine" if family == socket.AF_UNIX else str(address)] = str(error)
        if time.monotonic() >= deadline:
            late = NcclTimeout(
                f"rank {rank} could not connect to rank {parent} of its coordinator within "
                f"{seconds(time.monotonic() - begun)}: " + "; ".join(f"{way}: {error}" for way, error in why.items())
            )
            late.missing = [parent]
            raise late
        _look(deadline, wanted, [parent])
        time.sleep(0.02)
