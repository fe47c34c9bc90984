"""TCPStore's protocol by hand, for tests that break it."""

import contextlib
import hashlib
import hmac
import os
import re
import socket
import struct

MAGIC = b"NCCLPYST"
GREETING = struct.Struct("<8sHHI32s")
VERDICT = struct.Struct("<I32sQ")
HEADER = struct.Struct("<QQBB6s")
SET, GET, ADD, COMPARE_SET, APPEND, WAIT, CHECK, DELETE, KEYS, GATHER, WATCH, UNWATCH = range(1, 13)
CANCEL, PING, GOODBYE, MULTI_GET, MULTI_SET, CHANGE, FAREWELL = range(13, 20)


def greeting(version=1, heartbeat=0, magic=MAGIC):
    return GREETING.pack(magic, version, 0, heartbeat, os.urandom(32))


def proof(token, ours, theirs, who=b"client"):
    return hmac.digest(token, who + ours + theirs, hashlib.sha256)


def connect(port):
    made = socket.create_connection(("127.0.0.1", port), timeout=20)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def receive(it, count):
    data = b""
    while len(data) < count:
        more = it.recv(count - len(data))
        if not more:
            raise EOFError(f"the connection ended after {data!r}")
        data += more
    return data


def let_in(port, token=b"", heartbeat=0):
    """Return a connection after the handshake."""
    it = connect(port)
    ours = greeting(heartbeat=heartbeat)
    it.sendall(ours)
    theirs = receive(it, GREETING.size)
    it.sendall(proof(token, ours, theirs))
    verdict, answer, _ = VERDICT.unpack(receive(it, VERDICT.size))
    assert verdict == 0 and answer == proof(token, ours, theirs, b"server")
    return it


def fields(*values):
    return b"".join(
        b"i" + struct.pack("<q", value) if isinstance(value, int) else b"b" + struct.pack("<I", len(value)) + value
        for value in values
    )


def frame(op, number, body=b"", length=None, status=0, reserved=bytes(6)):
    return HEADER.pack(len(body) if length is None else length, number, op, status, reserved) + body


def answer(it):
    """Return (op, status, id, body) of the next frame."""
    length, number, op, status, _ = HEADER.unpack(receive(it, HEADER.size))
    return op, status, number, receive(it, length)


def ended(it):
    """Return whether the other end closes the connection, ignoring what it sends before."""
    with contextlib.suppress(ConnectionError):
        while it.recv(1 << 16):
            pass
    return True


def listening(port):
    """Return this machine's addresses with a listener at a port, in the format of /proc."""
    found = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/net/{table}") as lines:
            for line in lines:
                match = re.match(r"\s*\d+: ([0-9A-F]+):([0-9A-F]{4}) \S+ 0A ", line)
                if match and int(match[2], 16) == port:
                    found.add(match[1])
    return found
