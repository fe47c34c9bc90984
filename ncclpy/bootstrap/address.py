"""Addresses: names to numbers under a deadline, and sockets that listen on what is asked for and nothing else."""

from __future__ import annotations

import _thread
import errno
import ipaddress
import logging
import socket
import threading
import time

from ncclpy.bootstrap.asked import StoreError
from ncclpy.bootstrap.watch import SLICE
from ncclpy.core.errors import NcclTimeout

__all__ = ["Address", "listen", "loopback", "resolve", "shown"]

log = logging.getLogger("ncclpy")

#: A family and the address as `socket` has it.
Address = tuple[socket.AddressFamily, tuple]


def shown(host: str, port: int) -> str:
    """Return an address as people write it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def resolve(host: str, port: int, deadline: float) -> list[Address]:
    """Return the addresses of a host, v4 and v6, without looking back from a number to a name.

    The system's resolver can take minutes and hears no signal, so a name is looked up in a thread that is left behind
    where it must be. A name that is not known yet is asked for again: in a cluster it may come up with its host.
    """
    host = host.removeprefix("[").removesuffix("]") if ":" in host else host
    try:
        return _addresses(host, port, socket.AI_NUMERICHOST)
    except socket.gaierror:
        pass
    told = False
    while True:
        found = _look_up(host, port, deadline)
        if isinstance(found, list):
            return found
        if time.monotonic() >= deadline:
            error = NcclTimeout(f"the host {host!r} of a store is not known: {found}")
            raise error from (found if isinstance(found, BaseException) else None)
        if not told:
            log.warning("the host %r of a store is not known yet (%s); looking again", host, found)
            told = True
        time.sleep(min(0.5, max(0.0, deadline - time.monotonic())))


def _addresses(host: str, port: int, flags: int) -> list[Address]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return list(dict.fromkeys((family, tuple(address)) for family, _, _, _, address in found))


def _look_up(host: str, port: int, deadline: float) -> list[Address] | BaseException | str:
    done = threading.Lock()
    done.acquire()
    result: list[list[Address] | BaseException] = []

    def ask() -> None:
        try:
            result.append(_addresses(host, port, 0))
        except OSError as error:
            result.append(error)
        except UnicodeError as error:  # no name at all
            result.append(error)
        done.release()

    _thread.start_new_thread(ask, ())
    while not done.acquire(timeout=max(0.0, min(SLICE, deadline - time.monotonic()))):
        if time.monotonic() >= deadline:
            return "the system's resolver has not answered"
    if isinstance(result[0], UnicodeError):
        raise ValueError(f"host: {host!r} is no name of a host") from result[0]
    return result[0]


def loopback(address: Address) -> bool:
    """Return whether only this machine can reach an address."""
    number = ipaddress.ip_address(address[1][0].partition("%")[0])
    number = getattr(number, "ipv4_mapped", None) or number
    return number.is_loopback


def listen(host: str, addresses: list[Address]) -> list[socket.socket]:
    """Return sockets that listen on each of these addresses, all on one port.

    Of a name's addresses some may not be this machine's or not be of a family that it has; those are left out.
    """
    for last in (*[False] * 20, True):
        sockets: list[socket.socket] = []
        port = addresses[0][1][1]
        absent: OSError | None = None
        try:
            for family, address in addresses:
                try:
                    sockets.append(_listen(family, (address[0], port or address[1], *address[2:])))
                except OSError as error:
                    if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                        raise
                    absent = error
                    continue
                port = sockets[0].getsockname()[1]
            if sockets:
                return sockets
            raise absent or OSError(errno.EADDRNOTAVAIL, "no address")
        except OSError as error:
            for each in sockets:
                each.close()
            if addresses[0][1][1] == 0 and error.errno == errno.EADDRINUSE and not last:
                continue  # the port that was free for one address is taken for another
            where = shown(host, port)
            if error.errno == errno.EADDRINUSE:
                raise OSError(
                    error.errno,
                    f"a store cannot serve at {where}: the port is taken, by another program or a store of another "
                    "job; port 0 takes one that is free, which `port` then tells",
                ) from error
            if error.errno == errno.EADDRNOTAVAIL:
                raise OSError(
                    error.errno, f"a store cannot serve at {where}: that is no address of this machine"
                ) from error
            raise OSError(error.errno, f"a store cannot serve at {where}: {error.strerror}") from error
    raise StoreError("unreachable")


def _listen(family: int, address: tuple) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was served just before
        if family == socket.AF_INET6 and not address[0].startswith("::ffff:"):  # which is one of v4, for v6 sockets
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # this address and no other
        made.bind(address)
        made.setblocking(False)
        made.listen(4096)
    except BaseException:
        made.close()
        raise
    return made
