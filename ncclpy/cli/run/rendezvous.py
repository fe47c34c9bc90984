"""The store of a run, which its launcher serves, and what the launchers of several machines exchange there."""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable

from ncclpy.bootstrap import PrefixStore, TCPStore
from ncclpy.bootstrap.address import resolve, shown
from ncclpy.cli.run.others import OtherLaunchers

log = logging.getLogger("ncclpy")

_LOOPBACK = "127.0.0.1"
_TOKEN = "NCCLPY_STORE_TOKEN"


class LauncherRendezvous:
    """One launcher's part in the rendezvous of all launchers.

    Parameters
    ----------
    address
        Host and port of the store, which machine 0 serves; None on a single machine, where any port is used.
    node, nodes
        The number of this launcher, and how many there are.
    nproc
        How many processes this launcher starts.
    timeout
        Seconds for the launchers to meet.

    Attributes
    ----------
    first, size : int
        The rank of this launcher's first process, and the number of all processes.
    variables : dict
        Environment variables for each process: the store, and an address that the program may use.
    """

    def __init__(self, address: tuple[str, int] | None, node: int, nodes: int, nproc: int, timeout: float) -> None:
        host, port = address or (_LOOPBACK, 0)
        self._node, self._nodes = node, nodes
        token = os.environ.get(_TOKEN) or None
        if token is None and nodes == 1:
            token = secrets.token_hex(32)  # other users can reach the port, but do not know the token
        self._store = TCPStore(host, port, serve=node == 0, token=token, timeout=timeout, linger=0)
        self._own = PrefixStore("ncclpy/run", self._store)
        self._held: socket.socket | None = None
        log.addFilter(_is_no_lost_client)
        try:
            if node == 0:
                self._held = _reserve(host, timeout)
            if nodes > 1:
                OtherLaunchers.announce(self._own, node)
            mine = {"nproc": nproc, "host": socket.gethostname(), "port": self._held and self._held.getsockname()[1]}
            packed = self._own.gather("launchers", node, nodes, json.dumps(mine).encode(), timeout)
        except BaseException:
            self.close()
            raise
        launchers = [json.loads(each) for each in packed]
        self._hosts = [each["host"] for each in launchers]
        self.first = sum(each["nproc"] for each in launchers[:node])
        self.size = sum(each["nproc"] for each in launchers)
        self.variables = {
            "NCCLPY_STORE": shown(host, self._store.port),
            # For the program's own use, such as torch's process group: this port is reserved.
            "MASTER_ADDR": host,
            "MASTER_PORT": str(launchers[0]["port"]),
        }
        if token is not None:
            self.variables[_TOKEN] = token
        if nodes > 1:
            self._others = OtherLaunchers(self._own, node, self._hosts)

    def watch(self, failed: Callable[[int, str], object]) -> None:
        """Have `failed` called, in another thread, with exit code and text of the first failure of all launchers."""
        if self._nodes > 1:
            self._others.watch(failed)

    def failed(self, code: int, text: str) -> None:
        """Tell the other launchers that a process of this launcher has failed or cannot be started."""
        if self._nodes > 1:
            self._others.tell(code, f"{text} on {self._hosts[self._node]} (machine {self._node})")

    def end(self, code: int) -> int:
        """Wait for the other launchers, since their processes may need the store, and return the exit code of all."""
        return code if self._nodes == 1 else self._others.end(code)

    def close(self) -> None:
        """Close the store, and free the reserved port."""
        self._store.close()
        log.removeFilter(_is_no_lost_client)
        if self._held is not None:
            self._held.close()

    def __enter__(self) -> LauncherRendezvous:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _reserve(host: str, timeout: float) -> socket.socket:
    """Return a socket that holds a free port without listening; `timeout` is for the look-up of the host.

    Only a process that binds this very port with SO_REUSEADDR, as servers do, gets the port.
    """
    failed: OSError | None = None
    for family, address in resolve(host, 0, time.monotonic() + timeout):
        try:
            held = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            failed = error  # a name may have IPv6 addresses, and this machine no IPv6
            continue
        try:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(address)
            return held
        except OSError as error:
            held.close()
            failed = error
    raise failed or OSError(f"{host} has no address")


def _is_no_lost_client(record: logging.LogRecord) -> bool:
    """Keep all log messages but those of lost clients of the store: the launcher reports how its ranks have ended."""
    return "lost client" not in record.getMessage()
