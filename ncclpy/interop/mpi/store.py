"""A store for the ranks of an mpi4py communicator."""

from __future__ import annotations

import secrets
import socket
import time
from typing import Any

from ncclpy.bootstrap.address import look_up
from ncclpy.bootstrap.store import Store
from ncclpy.bootstrap.tcp import TCPStore

# Bytes of the message that rank 0 broadcasts: address, port, token. All ranks know this size, so nothing has to be
# pickled.
_SIZE = 256
#: Seconds for the system's resolver to give the address of this machine.
_RESOLVE_TIMEOUT = 5.0


def adapt(obj: object) -> Store | None:
    """Return a store for the ranks of an mpi4py communicator, which all call this; None if `obj` is something else."""
    from mpi4py import MPI

    return _serve(obj, MPI) if isinstance(obj, MPI.Intracomm) else None


def _serve(comm: Any, mpi: Any) -> Store:
    node = comm.Split_type(mpi.COMM_TYPE_SHARED)
    one_machine = comm.allreduce(node.size, op=mpi.MIN) == comm.size
    node.Free()
    message = bytearray(_SIZE)
    store: Store | None = None
    error: BaseException | None = None
    if comm.rank == 0:
        host, token = "127.0.0.1" if one_machine else _address(), secrets.token_hex(32)
        try:
            store = TCPStore(host, 0, serve=True, token=token)
            text = f"{host} {store.port} {token}".encode()
            message[: len(text)] = text
        except BaseException as failed:  # raised once the others know that there is no store
            error = failed
    comm.Bcast([message, mpi.BYTE], root=0)
    if error is not None:
        raise error
    if store is not None:
        return store
    words = bytes(message).rstrip(b"\0").decode().split()
    if not words:
        raise RuntimeError("rank 0 of the communicator could not serve a store; it has raised the cause")
    return TCPStore(words[0], int(words[1]), token=words[2])


def _address() -> str:
    """Return the address by which other machines reach this one: that of its default route.

    Without such a route it is what the system's resolver gives for the name of this machine.
    """
    for family, beyond in (socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"):
        with socket.socket(family, socket.SOCK_DGRAM) as way:
            try:
                way.connect((beyond, 9))  # on a datagram socket, which looks up the route and sends nothing
            except OSError:
                continue
            return str(way.getsockname()[0])
    name = socket.gethostname()
    known = look_up(name, 0, time.monotonic() + _RESOLVE_TIMEOUT)
    if not isinstance(known, list):
        why = "the system's resolver does not answer" if known is None else str(known.strerror)
        raise OSError(
            "this machine has no address that other machines reach: it has no route to other networks, and "
            f"{name!r}: {why}"
        )
    first = next((address for family, address in known if family == socket.AF_INET), known[0][1])
    return str(first[0])
