"""Host names resolved under a deadline, and sockets that listen on given addresses and on no others."""

from __future__ import annotations

import _thread
import errno
import ipaddress
import logging
import re
import socket
import threading
import time

from ncclpy.bootstrap.store_arguments import StoreError
from ncclpy.bootstrap.watch import SLICE
from ncclpy.errors import NcclTimeout

__all__ = ["Address", "as_host", "is_loopback", "listen", "look_up", "resolve", "shown"]

log = logging.getLogger("ncclpy")

#: An address family, and the address as the module `socket` has it.
Address = tuple[socket.AddressFamily, tuple]


def shown(host: str, port: int) -> str:
    """Return an address as text, such as "host:1234"."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def as_host(host: str, what: str = "host") -> str:
    """Return `host` unchanged if it can be a host's name or address; raise if it cannot.

    Raises
    ------
    ValueError
        If the text can be neither a name nor an address: a URL, an address with a port, a text with a blank. `what`
        names the argument or the variable that has the text; the message says what to write instead.
    """
    if not host or "\0" in host:
        raise ValueError(f"{what}: expected a name or an address, got {host!r}")
    packed = "".join(host.split())
    bare, slash, _ = (packed.partition("://")[2] or packed).partition("/")
    with_port = re.fullmatch(r"(\[[^\]]*\]|[^:\[\]]*):([0-9]*)", bare)
    if with_port is not None:
        bare = with_port[1]
    if bare != host:
        beside = {
            "a blank": packed != host,
            "a scheme": "://" in packed,
            "a path": slash,
            "a port": with_port is not None,
        }
        port = f" here and {with_port[2]} as the port" if with_port is not None and with_port[2] else ""
        raise ValueError(
            f"{what}: expected the name or the address of a host alone, got {host!r} with "
            f"{' and '.join(part for part, is_there in beside.items() if is_there)}"
            + (f"; write {bare!r}{port}" if bare else "")
        )
    if ":" in host and not _is_v6(host):
        raise ValueError(
            f"{what}: {host!r} has a colon, so it should be an IPv6 address such as '::1', but it is not a valid one"
        )
    if re.fullmatch("[0-9.]+", host) and not _is_v4(host):
        raise ValueError(f"{what}: {host!r} is not an IPv4 address, which has four numbers from 0 to 255")
    try:
        host.encode("idna")
    except UnicodeError as error:
        raise ValueError(f"{what}: {host!r} is not a host name") from error
    return host


def _is_v6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(_unbracketed(host).partition("%")[0])
    except ValueError:
        return False
    return True


def _is_v4(host: str) -> bool:
    try:
        socket.inet_aton(host)
    except OSError:
        return False
    return True


def _unbracketed(host: str) -> str:
    return host.removeprefix("[").removesuffix("]") if ":" in host else host


def resolve(host: str, port: int, deadline: float) -> list[Address]:
    """Return the addresses of a host, IPv4 and IPv6, without a reverse look-up.

    The system's resolver can take minutes and is not interrupted by signals, so a name is looked up in a thread, which
    is left behind if it has not finished by the deadline. A name that the resolver does not know yet is looked up
    again: in a cluster the name may become known only when its host is up. Raises `NcclTimeout` at the deadline.
    """
    host = _unbracketed(as_host(host))
    try:
        return _addresses(host, port, socket.AI_NUMERICHOST)
    except socket.gaierror:
        pass
    resolver_error: OSError | None = None
    while True:
        found = look_up(host, port, deadline)
        if isinstance(found, list):
            return found
        if found is not None and resolver_error is None:
            log.warning("the host %r of a store is not known yet (%s); looking again", host, found.strerror)
        resolver_error = found or resolver_error  # the resolver may not have answered the last look-up in time
        if time.monotonic() >= deadline:
            why = "has not answered" if resolver_error is None else f"says: {resolver_error.strerror}"
            raise NcclTimeout(
                f"the host {host!r} of a store is not known: the system's resolver {why}"
            ) from resolver_error
        time.sleep(min(0.5, max(0.0, deadline - time.monotonic())))


def _addresses(host: str, port: int, flags: int) -> list[Address]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return list(dict.fromkeys((family, tuple(address)) for family, _, _, _, address in found))


def look_up(host: str, port: int, deadline: float) -> list[Address] | OSError | None:
    """Return the addresses of a name, or the resolver's error; None if it has not answered by the deadline."""
    done = threading.Lock()
    done.acquire()
    result: list[list[Address] | OSError] = []

    def ask() -> None:
        try:
            result.append(_addresses(host, port, 0))
        except OSError as error:
            result.append(error)
        done.release()

    _thread.start_new_thread(ask, ())
    while not done.acquire(timeout=max(0.0, min(SLICE, deadline - time.monotonic()))):
        if time.monotonic() >= deadline:
            return None
    return result[0]


def is_loopback(address: Address) -> bool:
    """Return whether only this machine can reach an address."""
    number = ipaddress.ip_address(address[1][0].partition("%")[0])
    number = getattr(number, "ipv4_mapped", None) or number
    return number.is_loopback


def listen(host: str, addresses: list[Address]) -> list[socket.socket]:
    """Return sockets that listen on these addresses, all on one port.

    Addresses that are not this machine's, or of a family that it does not support, are skipped: a host name may have
    such addresses beside usable ones. Raises `OSError` if no address is left.
    """
    for is_last_attempt in (*[False] * 20, True):
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
            if addresses[0][1][1] == 0 and error.errno == errno.EADDRINUSE and not is_last_attempt:
                continue  # the port that the system chose for the first address is in use on another of them
            where = shown(host, port)
            if error.errno == errno.EADDRINUSE:
                raise OSError(
                    error.errno,
                    f"a store cannot serve at {where}: the port is taken, by another program or a store of another "
                    "job; with port 0 the store takes a free port, which its attribute `port` then has",
                ) from error
            if error.errno == errno.EADDRNOTAVAIL:
                raise OSError(
                    error.errno, f"a store cannot serve at {where}: this machine does not have that address"
                ) from error
            raise OSError(error.errno, f"a store cannot serve at {where}: {error.strerror}") from error
    raise StoreError("not reached: the last attempt returns or raises")


def _listen(family: int, address: tuple) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the port may have been in use just before
        if family == socket.AF_INET6 and not address[0].startswith("::ffff:"):  # not an IPv4-mapped address
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # this address and no other
        made.bind(address)
        made.setblocking(False)
        made.listen(4096)
    except BaseException:
        made.close()
        raise
    return made
