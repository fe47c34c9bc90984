"""TCPStore: refused connections while the server closes, and limits for unauthenticated connections."""

import contextlib
import os
import re
import socket
import time

import pytest
import store_wire as wire

import ncclpy
import testing
from ncclpy.bootstrap import TCPStore
from ncclpy.bootstrap import wire as native

LONG = 20.0  # seconds that only a hang takes
PLACES = 64  # for unauthenticated connections


@contextlib.contextmanager
def native_server(token=b""):
    """Yield a server without a store, and its port; no thread takes its log lines."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        port = listener.getsockname()[1]
        limits = {"max_value": 1 << 20, "max_answer": 1 << 20, "max_backlog": 8 << 20, "capacity": 1 << 30}
        server = native.Server([listener], token=token, heartbeat=60.0, **limits)
    try:
        yield server, port
    finally:
        server.stop()


# A closing server.


def test_closing_server_refuses_new_clients_at_once(serve, pool):
    """The server waits for a client that has not left; the next job's server takes the port meanwhile."""
    store = serve(linger=2 * LONG)
    staying = TCPStore("127.0.0.1", store.port, timeout=LONG)
    closing = pool.submit(store.close)
    testing.wait_for(lambda: not wire.listening(store.port))
    with pytest.raises(ncclpy.NcclTimeout, match="refused"):
        TCPStore("127.0.0.1", store.port, timeout=0.3)
    again = serve(port=store.port)
    with TCPStore("127.0.0.1", store.port, timeout=LONG) as client:
        client.set("of the next job", b"1")
    staying.set("of this job", b"1")
    assert staying.keys() == ["of this job"] and again.keys() == ["of the next job"]
    assert not closing.done()
    staying.close()
    closing.result(LONG)


@pytest.mark.parametrize("said", ["nothing", "greeting", "proof"])
def test_closing_server_refuses_connections_in_progress(said):
    with native_server() as (server, port), wire.connect(port) as it:
        ours = wire.greeting()
        if said != "nothing":
            it.sendall(ours)
            theirs = wire.receive(it, wire.GREETING.size)
        server.refuse_new()
        if said == "proof":
            with contextlib.suppress(ConnectionError):
                it.sendall(wire.proof(b"", ours, theirs))
        assert wire.ended(it) and server.clients == 0
        assert server.next_line(0.1) == "", "it is no news"


# Unauthenticated connections.


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_silent_connections_beyond_the_limit_wait_and_make_room_for_a_client():
    with native_server(b"secret") as (server, port), contextlib.ExitStack() as stack:
        before = descriptors()
        silent = [stack.enter_context(wire.connect(port)) for _ in range(3 * PLACES)]
        for _ in range(5):
            assert descriptors() - before - len(silent) <= PLACES + 2  # one lists /proc, one may be closing
            time.sleep(0.05)
        stack.enter_context(wire.let_in(port, b"secret"))
        assert server.clients == 1


def test_silent_connections_leave_descriptors_to_a_process_that_has_few():
    done = testing.run_python(
        f"""
        import logging, os, resource, socket, subprocess, sys
        logging.disable()
        from ncclpy.bootstrap import TCPStore
        served = TCPStore("127.0.0.1", 0, serve=True, token="secret")
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        stranger = f'''if True:
            import resource, socket, sys
            resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
            held = [socket.create_connection(("127.0.0.1", {{served.port}})) for _ in range({2 * PLACES})]
            print("held", flush=True)
            sys.stdin.readline()
        '''
        with subprocess.Popen([sys.executable, "-c", stranger], stdin=-1, stdout=-1, text=True) as other:
            assert other.stdout.readline() == "held\\n"
            for _ in range(20):
                files = [open("/dev/null") for _ in range(40)]
                for each in files:
                    each.close()
            TCPStore("127.0.0.1", served.port, token="secret", timeout={LONG}).close()
            other.communicate("\\n")
        print("fine")
        """,
        warm=True,
    )
    assert done.stdout == "fine\n", done.stderr


def test_refusals_are_logged_once_a_second_with_count():
    with native_server() as (server, port):
        began = time.monotonic()
        for _ in range(40):
            with wire.connect(port) as it:
                it.sendall(b"GET / HTTP/1.1\r\n")
                assert wire.ended(it)
        server.stop()
        lines = []
        while line := server.next_line(0.0):
            lines.append(line)
        assert len(lines) <= 2 + time.monotonic() - began
        told = [
            re.fullmatch(r"refused 127\.0\.0\.1:\d+: .*'GET / .*?'(?: \(and (\d+) more .*\))?", each) for each in lines
        ]
        assert sum(1 + int(each[1] or 0) for each in told) == 40
