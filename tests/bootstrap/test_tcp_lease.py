"""TCPStore: what each end learns when the other is gone, and when it is not."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest
import store_wire as wire

import ncclpy
import testing
from ncclpy.bootstrap import LeaseEnded, StoreError, StoreLost, TCPStore
from ncclpy.bootstrap import wire as native

LONG = 20.0  # seconds that only a hang takes


@pytest.fixture
def programs():
    """Return a function that starts a Python program, killed after the test."""
    started = []

    def start(code, **options):
        program = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/", **options,
        )  # fmt: skip
        started.append(program)
        return program

    yield start
    for program in started:
        program.kill()
        program.wait()
        program.stdin.close()
        program.stdout.close()


def line(program):
    return testing.run_with_deadline(program.stdout.readline, timeout=60).strip()


SERVER = """
    import sys, time
    from ncclpy.bootstrap import TCPStore
    store = TCPStore("127.0.0.1", 0, serve=True, linger=float(sys.stdin.readline()))
    print(store.port, flush=True)
    sys.stdin.readline()
"""


def served_elsewhere(programs, linger=0.0):
    server = programs(SERVER)
    server.stdin.write(f"{linger}\n")
    server.stdin.flush()
    return server, int(line(server))


def test_killed_server_fails_waiting_and_later_calls(programs, pool):
    server, port = served_elsewhere(programs)
    client, other = TCPStore("127.0.0.1", port, timeout=60), TCPStore("127.0.0.1", port, timeout=60)
    calls = [lambda: client.get("a"), lambda: client.wait(["b"]), lambda: client.barrier("c", 0, 2)]
    waiting = [pool.submit(call) for call in calls]
    watch = client.watch("")
    time.sleep(0.2)
    server.kill()
    killed = time.monotonic()
    for each in waiting:
        with pytest.raises(StoreLost, match=rf"127\.0\.0\.1', {port}.*server is gone"):
            each.result(LONG)
    with pytest.raises(StoreLost):
        watch.next(LONG)
    with pytest.raises(StoreLost):
        other.set("a", b"")
    assert time.monotonic() - killed < LONG / 4
    with pytest.raises(ConnectionError):  # the class that programs without ncclpy catch
        client.get("a")
    client.close()
    other.close()


def test_stopped_server_is_lost_after_heartbeat(programs):
    server, port = served_elsewhere(programs)
    with TCPStore("127.0.0.1", port, timeout=60, heartbeat=0.7) as client:
        client.set("a", b"1")
        os.kill(server.pid, signal.SIGSTOP)
        with pytest.raises(StoreLost, match="nothing was heard of it"):
            client.get("never", LONG)


def test_closed_server_says_farewell(serve):
    store = serve()
    client = TCPStore("127.0.0.1", store.port, timeout=LONG)
    store.close()
    with pytest.raises(StoreLost, match="the server was closed"):
        client.get("a")
    client.close()


def test_server_lingers_at_exit_for_remaining_clients(programs):
    server, port = served_elsewhere(programs, linger=LONG * 2)
    client = TCPStore("127.0.0.1", port, timeout=LONG)
    server.stdin.close()
    time.sleep(0.2)
    client.set("a", b"the server's program has ended, and still serves")
    assert server.poll() is None
    client.close()
    assert server.wait(LONG) == 0


def test_exiting_client_says_goodbye(serve, caplog):
    store = serve(heartbeat=1)
    program = f"""
        import ctypes
        from ncclpy.bootstrap import TCPStore
        store = TCPStore("127.0.0.1", {store.port})
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))  # it is leaked, as by a thread or a cycle
        store.set("mine", b"1", ephemeral=True)
        assert store.get("mine") == b"1"
        store.watch("mine", print)
        """
    done = testing.run_python(program, warm=True)
    assert (done.stderr, done.stdout) == ("", "")
    testing.wait_for(lambda: not store.check(["mine"]))
    with wire.connect(store.port) as it:  # its log line follows a line about the lost client, if there is one
        it.sendall(b"GET")
        testing.wait_for(lambda: "'GET'" in caplog.text)
    assert "lost client" not in caplog.text


RANK = """
    import os, signal, sys, time
    from ncclpy.bootstrap import TCPStore
    store = TCPStore("127.0.0.1", {port}, heartbeat={heartbeat})
    store.set("alive", b"1", ephemeral=True)
    {more}
    print("ready", flush=True)
    {end}
"""


def rank(programs, port, more="", end="time.sleep(100)", heartbeat=10.0):
    program = programs(RANK.format(port=port, more=more, end=end, heartbeat=heartbeat))
    assert line(program) == "ready"
    return program


def test_killed_process_is_known_at_once(serve, programs, pool, caplog):
    store = serve()
    program = rank(programs, store.port)
    watch = store.watch("alive")
    assert store.check(["alive"])
    program.kill()
    killed = time.monotonic()
    assert watch.next(LONG) == ("alive", None)
    assert time.monotonic() - killed < 5, "a heartbeat has told it, not the end of the connection"
    testing.wait_for(lambda: "lost client" in caplog.text)
    assert not store.check(["alive"])


def test_fork_does_not_keep_lease_of_killed_parent(serve, programs):
    store = serve()
    more = 'child = os.fork(); child or time.sleep(60); store.set("child", b"%d" % child)'
    program = rank(programs, store.port, more=more)
    watch = store.watch("alive")
    program.kill()
    try:
        assert watch.next(10) == ("alive", None)
    finally:
        os.kill(int(store.get("child")), signal.SIGKILL)


def test_barrier_names_killed_rank(serve, programs, pool):
    store = serve()
    program = programs(f"""
        from ncclpy.bootstrap import TCPStore
        store = TCPStore("127.0.0.1", {store.port})
        print("ready", flush=True)
        store.barrier("name", 2, 4)
        """)
    waiting = pool.submit(store.barrier, "name", 0, 4, 60)
    assert line(program) == "ready"
    time.sleep(0.2)
    program.kill()
    with pytest.raises(StoreError, match="rank 2 had arrived, and its process has ended"):
        waiting.result(LONG)


def test_lost_host_is_known_after_heartbeat(serve, programs):
    """A stopped process looks like a host without a network cable: the connection stays, and nothing arrives."""
    store = serve(heartbeat=1.0)
    program = rank(programs, store.port)
    watch = store.watch("alive")
    time.sleep(1.2)
    assert store.check(["alive"]), "the keeper has sent signs of life"
    os.kill(program.pid, signal.SIGSTOP)
    assert watch.next(LONG) == ("alive", None)


#: Prints the error that a stopped rank gets, in a wait or later.
STOPPED = """sys.stdin.readline()
    try:
        {asks}
    except Exception as error:
        print(type(error).__name__, error, flush=True)
    time.sleep(100)"""
ASKS = {"asks later": "store.check(['alive'])", "waits": "store.get('never', 60)"}


@pytest.mark.parametrize(("server_dies", "asks"), [(False, "asks later"), (False, "waits"), (True, "waits")])
def test_process_stopped_longer_than_its_lease_gets_that_error(programs, server_dies, asks):
    server, port = served_elsewhere(programs)
    with TCPStore("127.0.0.1", port, timeout=LONG) as store:
        program = rank(programs, port, end=STOPPED.format(asks=ASKS[asks]), heartbeat=0.5)
        program.stdin.write("ask\n")
        if asks == "waits":
            program.stdin.flush()
        os.kill(program.pid, signal.SIGSTOP)
        if server_dies:  # before the server can send a farewell
            server.kill()
            time.sleep(0.7)
        else:
            testing.wait_for(lambda: not store.check(["alive"]))
        os.kill(program.pid, signal.SIGCONT)
        program.stdin.flush()
        said = line(program)
    assert said.startswith(f"LeaseEnded TCPStore('127.0.0.1', {port}): this process was stopped"), said
    assert "longer than its lease of 0.5 s" in said and "server is gone" not in said
    assert ("has ended with the connection" if server_dies else "the server serves the others") in said
    assert issubclass(LeaseEnded, StoreLost)


def test_lease_lost_without_stop_is_told_apart():
    ours, theirs = socket.socketpair()
    client = native.Client(ours.detach(), 60.0, 1 << 20)
    with theirs:
        number = client.submit(wire.GET, (b"k", -1))
        theirs.sendall(wire.frame(wire.FAREWELL, 0, wire.fields(b"nothing was heard of it for 61 s"), status=1))
        with pytest.raises(ConnectionAbortedError, match="heard of it for 61 s, and the process was not stopped"):
            client.wait(number, time.monotonic() + LONG)
        client.close("", 0.0)


#: A call of 1.5 s that holds the GIL.
BUSY = 'import ctypes; ctypes.PyDLL(None).usleep(1_500_000); print("over", flush=True)'


def test_client_that_holds_gil_is_not_taken_for_dead(serve, programs):
    store = serve(heartbeat=1.0)
    watch = store.watch("alive")
    program = rank(programs, store.port, end=BUSY + '; store.set("after", b"1"); time.sleep(100)')
    assert watch.next(LONG) == ("alive", b"1")
    assert line(program) == "over"
    assert store.get("after", LONG) == b"1"
    with pytest.raises(ncclpy.NcclTimeout):
        watch.next(0.1)


def test_server_of_process_that_holds_gil_serves(programs):
    server = programs(f"""
        import time
        from ncclpy.bootstrap import TCPStore
        store = TCPStore("127.0.0.1", 0, serve=True, linger=0)
        print(store.port, flush=True)
        store.get("go")
        print("now", flush=True)
        {BUSY}
        """)
    with TCPStore("127.0.0.1", int(line(server)), timeout=LONG) as client:
        client.set("go", b"")
        assert line(server) == "now"
        time.sleep(0.1)
        started = time.monotonic()
        for _ in range(50):
            client.add("n", 1)
        assert time.monotonic() - started < 1.5 / 2
        assert line(server) == "over"
