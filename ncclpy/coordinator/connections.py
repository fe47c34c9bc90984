"""How the ranks of a control plane find each other in a store and connect.

Each rank listens for those below it: at a name that only its machine knows, and, where there are other machines, at an
address that they can reach. Both ends prove that they have read the secret which the listening one has put into the
store.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import math
import os
import secrets
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ncclpy.bootstrap.address import listen, resolve
from ncclpy.bootstrap.arrivals import Arrivals
from ncclpy.coordinator.control import Control
from ncclpy.coordinator.tree import Tree
from ncclpy.core.errors import NcclAborted, NcclTimeout, ranks, seconds, spans
from ncclpy.peers.reports import BOOT_ID

if TYPE_CHECKING:
    from ncclpy.bootstrap.store import Store

__all__ = ["machine", "open_control"]

#: Seconds after which who has connected and says nothing is left; and between two looks whether anybody still waits.
_HANDSHAKE, _SLICE = 5.0, 0.1
_NONCE, _PROOF = 16, 32


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
        Which of how many ranks this is.
    name
        The coordinator's, for messages.
    cache, timeout, stall_after, silence
        As for `Control`; `timeout` None is never.
    patience
        Seconds in which all ranks have to be there and connected.
    wanted
        Asked every now and then; False ends the wait.

    Raises
    ------
    NcclTimeout
        If ranks do not come in time; the message says which.
    NcclAborted
        If nobody wants it any more, here or on another rank.
    """
    deadline = time.monotonic() + patience
    with contextlib.ExitStack() as stack:
        ears = _Ears(store, size)
        stack.callback(ears.close)
        mine = json.dumps({"machine": machine(), **ears.told}).encode()
        arrivals = Arrivals(store, f"coordinator {name!r}", rank, size)
        met = arrivals.meet("meet", range(size), f"to connect coordinator {name!r}", mine, _combine, patience, wanted)
        places = json.loads(met)
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


def _combine(brought: list[bytes]) -> bytes:
    return b"[" + b",".join(brought) + b"]"


def machine() -> str:
    """Return what tells this machine from others; as for NCCL, a variable may divide one."""
    return f"{BOOT_ID or socket.gethostname()} {os.environ.get('NCCL_HOSTID', '')}".strip()


def _own_addresses(store: Store) -> list[str]:
    """Return the addresses at which other machines reach this one: that on the way to the store, or its name's."""
    host = getattr(store, "host", None) or getattr(getattr(store, "store", None), "host", None)
    if isinstance(host, str):
        for family, address in resolve(host, 9, time.monotonic() + _HANDSHAKE):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                return [probe.getsockname()[0]]
    found = []
    with contextlib.suppress(OSError):
        for _, _, _, _, address in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            found.append(str(address[0]))
    return list(dict.fromkeys(found)) or ["127.0.0.1"]


def _proof(token: bytes, who: bytes, nonce: bytes) -> bytes:
    return hmac.new(token, who + nonce, hashlib.sha256).digest()


def _receive(line: socket.socket, length: int, deadline: float = math.inf) -> bytes:
    """Return so many bytes, each piece of which comes within the connection's timeout, and all by a deadline."""
    got = b""
    while len(got) < length:
        if time.monotonic() >= deadline:
            raise OSError("the other end takes too long")
        more = line.recv(length - len(got))
        if not more:
            raise OSError("the other end has closed the connection")
        got += more
    return got


class _Ears:
    """Where a rank listens for those below it."""

    def __init__(self, store: Store, size: int) -> None:
        self._sockets: list[socket.socket] = []
        self._token = secrets.token_bytes(_PROOF)
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
        """Return a connection to each child, once all have called."""
        heard: dict[int, socket.socket] = {}
        for each in self._sockets:
            each.setblocking(False)
        try:
            while len(heard) < len(children):
                missing = [child for child in children if child not in heard]
                _look(deadline, wanted, missing)
                for each in self._sockets:
                    with contextlib.suppress(OSError):
                        line, _ = each.accept()
                        rank = self._welcome(line, missing)
                        if rank is not None:
                            heard[rank] = line
                if len(heard) < len(children):
                    _sleep_on(self._sockets)
        except BaseException:
            for line in heard.values():
                line.close()
            raise
        return heard

    def _welcome(self, line: socket.socket, children: list[int]) -> int | None:
        """Return the rank of who has called, None and hang up if it is not one of these."""
        try:
            line.settimeout(_HANDSHAKE)
            nonce = secrets.token_bytes(_NONCE)
            line.sendall(nonce)
            told = _receive(line, 4 + _NONCE + _PROOF, time.monotonic() + _HANDSHAKE)
            rank, theirs, proof = int.from_bytes(told[:4], "little"), told[4 : 4 + _NONCE], told[4 + _NONCE :]
            if rank not in children or not hmac.compare_digest(proof, _proof(self._token, told[:4], nonce)):
                raise OSError("it does not belong here")
            line.sendall(_proof(self._token, b"parent", theirs))
            _sharpen(line)
            return rank
        except OSError:
            line.close()
            return None

    def close(self) -> None:
        for each in self._sockets:
            each.close()


def _sharpen(line: socket.socket) -> None:
    """Send small frames at once, and hear of a machine that is gone."""
    line.setblocking(False)
    if line.family != socket.AF_UNIX:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _sleep_on(sockets: list[socket.socket]) -> None:
    import select

    select.select(sockets, [], [], _SLICE)


def _look(deadline: float, wanted: Callable[[], bool], missing: list[int]) -> None:
    if not wanted():
        raise NcclAborted("the coordinator has ended while its ranks connected")
    if time.monotonic() >= deadline:
        late = NcclTimeout(f"{ranks(spans(missing))} came to the coordinator's store and did not connect in time")
        late.missing = missing
        raise late


def _call(
    place: dict, mine: dict, rank: int, parent: int, deadline: float, wanted: Callable[[], bool]
) -> socket.socket:
    """Return a connection to the rank above, by the first way on which it proves to be that."""
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
                line.settimeout(max(0.01, deadline - time.monotonic()))  # it may have its own parent to call first
                nonce, number = secrets.token_bytes(_NONCE), rank.to_bytes(4, "little")
                line.sendall(number + nonce + _proof(token, number, _receive(line, _NONCE)))
                if not hmac.compare_digest(_receive(line, _PROOF), _proof(token, b"parent", nonce)):
                    raise OSError("somebody else listens there")
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
