"""TCPStore: where it serves, how clients find it, and what they learn when the other end is gone."""

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import store_wire as wire

import ncclpy
import testing
from ncclpy.bootstrap import StoreError, StoreLost, TCPStore, address

LONG = 20.0  # that only a hang meets


@pytest.fixture
def pool():
    with ThreadPoolExecutor(24) as pool:
        yield pool


@pytest.fixture
def serve():
    """Return a function that makes a serving store, closed in the end."""
    made = []

    def make(host="127.0.0.1", port=0, **options):
        made.append(TCPStore(host, port, serve=True, **{"linger": 0, "timeout": LONG, **options}))
        return made[-1]

    yield make
    for store in made:
        store.close()


@pytest.fixture
def programs():
    """Return a function that starts a Python program, and kills it in the end."""
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


def has_v6():
    try:
        with socket.socket(socket.AF_INET6) as it:
            it.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_v6 = pytest.mark.skipif(not has_v6(), reason="needs an address ::1 on this machine")


# Where it serves.


def test_it_binds_the_address_that_it_is_given_and_no_other(serve):
    store = serve()
    assert store.port > 0 and store.host == "127.0.0.1"
    assert wire.listening(store.port) == {"0100007F"}
    with pytest.raises(ncclpy.NcclTimeout, match=r"127\.0\.0\.2.*refused"):
        TCPStore("127.0.0.2", store.port, timeout=0.3)


@needs_v6
def test_v6_only(serve):
    store = serve("::1")
    assert wire.listening(store.port) == {"00000000000000000000000001000000"}
    with TCPStore("[::1]", store.port, timeout=LONG) as client:
        client.set("a", b"1")
    with pytest.raises(ncclpy.NcclTimeout, match="refused"):
        TCPStore("127.0.0.1", store.port, timeout=0.3)


@needs_v6
def test_all_of_v6_is_not_all_of_v4(serve):
    store = serve("::", token="t")
    TCPStore("::1", store.port, token="t", timeout=LONG).close()
    with pytest.raises(ncclpy.NcclTimeout, match="refused"):
        TCPStore("127.0.0.1", store.port, token="t", timeout=0.3)


def both_families(monkeypatch, name, addresses):
    """Have a name mean several addresses."""
    real = socket.getaddrinfo

    def look_up(host, port, *args, **kwargs):
        if host != name:
            return real(host, port, *args, **kwargs)
        if kwargs.get("flags"):
            raise socket.gaierror(socket.EAI_NONAME, "no number")
        return [entry for each in addresses for entry in real(each, port, *args, **kwargs)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


@needs_v6
@pytest.mark.parametrize("served", ["127.0.0.1", "::1"])
def test_a_name_of_both_families_finds_a_server_of_one(serve, monkeypatch, served):
    store = serve(served)
    both_families(monkeypatch, "both.test", ["::1", "127.0.0.1"])
    with TCPStore("both.test", store.port, timeout=LONG) as client:
        client.set("a", b"1")
    assert store.get("a") == b"1"


@needs_v6
def test_a_name_of_both_families_is_served_at_both(serve, monkeypatch):
    both_families(monkeypatch, "both.test", ["::1", "127.0.0.1"])
    store = serve("both.test")
    for host in ("::1", "127.0.0.1", "both.test"):
        with TCPStore(host, store.port, timeout=LONG) as client:
            client.add("n", 1)
    assert store.get("n") == b"3"


def test_addresses_are_tried_together(serve, monkeypatch):
    """One that takes the connection and says nothing holds up no other."""
    store = serve()
    with socket.create_server(("127.0.0.2", store.port)):
        both_families(monkeypatch, "two.test", ["127.0.0.2", "127.0.0.1"])
        started = time.monotonic()
        with TCPStore("two.test", store.port, timeout=LONG):
            assert time.monotonic() - started < LONG / 4


def test_nobody_is_looked_up_by_number(serve, monkeypatch):
    def never(*args):
        raise AssertionError("a reverse look-up")

    for name in ("gethostbyaddr", "getnameinfo", "getfqdn", "gethostname"):
        monkeypatch.setattr(socket, name, never)
    store = serve()
    TCPStore("127.0.0.1", store.port, timeout=LONG).close()


def test_a_port_that_is_taken_is_told(serve):
    store = serve()
    with pytest.raises(OSError, match=rf"127\.0\.0\.1:{store.port}: the port is taken.*port 0"):
        serve(port=store.port)
    store.set("a", b"1")


def test_a_port_can_be_served_again_at_once(serve):
    for _ in range(3):
        store = serve()
        TCPStore("127.0.0.1", store.port, timeout=LONG)
        store.close()
        again = serve(port=store.port)
        again.close()


def test_an_address_of_another_machine_is_told(serve):
    with pytest.raises(OSError, match=r"192\.0\.2\.1.*no address of this machine"):
        serve("192.0.2.1", token="t")


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_where_others_can_reach_it_a_token_is_needed(serve, monkeypatch, host):
    monkeypatch.delenv("NCCLPY_STORE_TOKEN", raising=False)
    with pytest.raises(ValueError, match=r"NCCLPY_STORE_TOKEN.*allow_unauthenticated=True"):
        serve(host)
    addresses = address.resolve(host, 0, time.monotonic() + 1)
    assert not any(address.loopback(each) for each in addresses)
    assert all(address.loopback(each) for each in address.resolve("127.3.4.5", 0, time.monotonic() + 1))
    assert all(address.loopback(each) for each in address.resolve("::1", 0, time.monotonic() + 1))


def test_who_asks_for_it_by_name_serves_others_without_a_token(serve, monkeypatch):
    monkeypatch.delenv("NCCLPY_STORE_TOKEN", raising=False)
    store = serve("0.0.0.0", allow_unauthenticated=True)
    TCPStore("127.0.0.1", store.port, timeout=LONG).close()
    with_token = serve("0.0.0.0", token="t")
    TCPStore("127.0.0.1", with_token.port, token="t", timeout=LONG).close()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("127.0.0.1", 0), ValueError), (("127.0.0.1", 70000), ValueError), (("127.0.0.1", "1"), TypeError),
        ((b"127.0.0.1", 1), TypeError), (("127.0.0.1", True), TypeError), (("a" * 70 + ".test", 1), ValueError),
    ],
)  # fmt: skip
def test_what_is_no_address_is_told(arguments, error):
    with pytest.raises(error):
        TCPStore(*arguments, timeout=1)


# Clients find their server.


def test_early_clients_wait_for_their_server(serve, pool):
    port = serve()
    port.close()
    early = [pool.submit(TCPStore, "127.0.0.1", port.port, timeout=LONG) for _ in range(5)]
    time.sleep(0.3)
    assert not any(each.done() for each in early)
    serve(port=port.port)
    for each in early:
        each.result(LONG).close()


def test_a_server_that_does_not_come_is_told(serve):
    store = serve()
    store.close()
    started = time.monotonic()
    with pytest.raises(
        ncclpy.NcclTimeout, match=rf"no store answers at 127\.0\.0\.1:{store.port} within 300 ms.*refused"
    ):
        TCPStore("127.0.0.1", store.port, timeout=0.3)
    assert 0.3 <= time.monotonic() - started < LONG / 2


def test_a_name_that_nobody_knows_is_told(caplog):
    with pytest.raises(ncclpy.NcclTimeout, match=r"'nowhere\.invalid'.*not known"):
        TCPStore("nowhere.invalid", 1, timeout=0.5)


@pytest.mark.parametrize("said", [b"", b"NCCL", "greeting", "proof"], ids=["nothing", "NCCL", "greeting", "proof"])
def test_a_server_that_ends_at_any_step_is_tried_again(serve, pool, said):
    """What is torn at first, by a server that is killed and started again say, is not the end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        client = pool.submit(TCPStore, "127.0.0.1", port, timeout=LONG)
        listener.settimeout(LONG)
        for _ in range(2):
            it, _ = listener.accept()
            with it:
                ours = wire.greeting()
                if said == "greeting":
                    it.sendall(ours)
                elif said == "proof":
                    theirs = wire.receive(it, wire.GREETING.size)
                    it.sendall(ours)
                    wire.receive(it, 32)
                    it.sendall(wire.VERDICT.pack(0, wire.proof(b"", theirs, ours, b"server"), 1)[:20])
                else:
                    it.sendall(said)
    serve(port=port)
    client.result(LONG).close()


@pytest.mark.parametrize(
    "words",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.2\r\n", b"\x15\x03\x01"],
    ids=["HTTP", "SSH", "TLS"],
)
def test_what_is_no_store_is_told_at_once(words, pool):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = pool.submit(TCPStore, "127.0.0.1", listener.getsockname()[1], timeout=60)
        it, _ = listener.accept()
        with it:
            it.sendall(words)
            with pytest.raises(
                StoreError, match=r"is no store of ncclpy: it answered b'" + re.escape(repr(words[:3])[2:-1])
            ):
                client.result(LONG)


def test_a_server_of_another_version_is_told(pool):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = pool.submit(TCPStore, "127.0.0.1", listener.getsockname()[1], timeout=60)
        it, _ = listener.accept()
        with it:
            it.sendall(wire.greeting(version=7))
            with pytest.raises(StoreError, match="speaks version 7 of the protocol, this client version 1"):
                client.result(LONG)


# Tokens.


def test_tokens(serve, monkeypatch, caplog):
    store = serve(token="the secret")
    TCPStore("127.0.0.1", store.port, token=b"the secret", timeout=LONG).close()
    for token, words in (("another", "has another token"), ("", "asks for a token.*NCCLPY_STORE_TOKEN")):
        with pytest.raises(StoreError, match=words):
            TCPStore("127.0.0.1", store.port, token=token, timeout=60)
    monkeypatch.setenv("NCCLPY_STORE_TOKEN", "the secret")
    with TCPStore("127.0.0.1", store.port, timeout=LONG) as client:
        client.set("a", b"1")
    testing.wait_for(lambda: "it does not know the token" in caplog.text)
    assert "the secret" not in caplog.text and "another" not in caplog.text.replace("another token", "")


def test_a_token_for_a_server_that_has_none_is_an_error(serve):
    store = serve(token="")
    with pytest.raises(StoreError, match="does not know the token"):
        TCPStore("127.0.0.1", store.port, token="t", timeout=60)


def test_a_server_that_only_claims_to_know_the_token_is_found_out(pool):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = pool.submit(TCPStore, "127.0.0.1", listener.getsockname()[1], token="t", timeout=60)
        it, _ = listener.accept()
        with it:
            theirs = wire.receive(it, wire.GREETING.size)
            ours = wire.GREETING.pack(wire.MAGIC, 1, 1, 10000, os.urandom(32))
            it.sendall(ours)
            said = wire.receive(it, 32)
            assert said == wire.proof(b"t", theirs, ours)
            it.sendall(wire.VERDICT.pack(0, said, 1))  # a proof, but the client's own
            with pytest.raises(StoreError, match="claims to know the token"):
                client.result(LONG)


def test_a_proof_that_was_overheard_is_worth_nothing(serve):
    store = serve(token="t")
    it = wire.connect(store.port)
    ours = wire.greeting()
    it.sendall(ours)
    overheard = wire.proof(b"t", ours, wire.receive(it, wire.GREETING.size))
    it.sendall(overheard)
    assert wire.VERDICT.unpack(wire.receive(it, wire.VERDICT.size))[0] == 0
    it.close()
    with wire.connect(store.port) as it:
        it.sendall(ours + overheard)
        wire.receive(it, wire.GREETING.size)
        verdict, answer, _ = wire.VERDICT.unpack(wire.receive(it, wire.VERDICT.size))
        assert verdict == 1 and answer == bytes(32) and wire.ended(it)


# The other end is gone.

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


def test_a_killed_server_is_known_to_those_who_wait_and_to_those_who_ask_later(programs, pool):
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
    with pytest.raises(ConnectionError):  # what programs that know nothing of us catch
        client.get("a")
    client.close()
    other.close()


def test_a_stopped_server_is_lost_after_the_heartbeat(programs):
    server, port = served_elsewhere(programs)
    with TCPStore("127.0.0.1", port, timeout=60, heartbeat=1.0) as client:
        client.set("a", b"1")
        os.kill(server.pid, signal.SIGSTOP)
        with pytest.raises(StoreLost, match="nothing was heard of it"):
            client.get("never", LONG)


def test_a_server_that_is_closed_says_farewell(serve):
    store = serve()
    client = TCPStore("127.0.0.1", store.port, timeout=LONG)
    store.close()
    with pytest.raises(StoreLost, match="the server was closed"):
        client.get("a")
    client.close()


def test_who_serves_waits_at_its_end_for_those_who_have_not_left(programs):
    server, port = served_elsewhere(programs, linger=LONG * 2)
    client = TCPStore("127.0.0.1", port, timeout=LONG)
    server.stdin.close()
    time.sleep(0.5)
    client.set("a", b"the server's program has ended, and still serves")
    assert server.poll() is None
    client.close()
    assert server.wait(LONG) == 0


def test_who_leaves_says_goodbye_and_breaks_nobody(serve, caplog):
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
    done = testing.run_python(program)
    assert (done.stderr, done.stdout) == ("", "")
    testing.wait_for(lambda: not store.check(["mine"]))
    with wire.connect(store.port) as it:  # which has a line behind one that there may be
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


def test_a_killed_process_is_known_at_once(serve, programs, pool, caplog):
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


def test_a_fork_does_not_keep_its_killed_parent_alive(serve, programs):
    store = serve()
    more = 'child = os.fork(); child or time.sleep(60); store.set("child", b"%d" % child)'
    program = rank(programs, store.port, more=more)
    watch = store.watch("alive")
    program.kill()
    try:
        assert watch.next(10) == ("alive", None)
    finally:
        os.kill(int(store.get("child")), signal.SIGKILL)


def test_the_others_of_a_barrier_are_told_who_was_killed(serve, programs, pool):
    store = serve()
    program = programs(f"""
        from ncclpy.bootstrap import TCPStore
        store = TCPStore("127.0.0.1", {store.port})
        print("ready", flush=True)
        store.barrier("name", 2, 4)
        """)
    waiting = pool.submit(store.barrier, "name", 0, 4, 60)
    assert line(program) == "ready"
    time.sleep(0.5)
    program.kill()
    with pytest.raises(StoreError, match="rank 2 had come, and its process has ended"):
        waiting.result(LONG)


def test_a_host_that_is_lost_is_known_after_the_heartbeat(serve, programs):
    """A stopped process looks like a host whose cable was pulled: its connection stands and nothing comes."""
    store = serve(heartbeat=1.0)
    program = rank(programs, store.port)
    watch = store.watch("alive")
    time.sleep(2.2)
    assert store.check(["alive"]), "the keeper has sent signs of life"
    os.kill(program.pid, signal.SIGSTOP)
    assert watch.next(LONG) == ("alive", None)


#: One call of 3 s, on a machine of whatever speed, in which no other thread gets the GIL.
BUSY = "; ".join(
    [
        "import math, re",
        'busy = lambda letters: (time.time(), re.match("(a+)+$", "a" * letters + "b"), time.time())',
        "began, _, ended = busy(20)",
        "began, _, ended = busy(20 + math.ceil(math.log2(3 / (ended - began))))",
        'print("busy", ended - began, flush=True)',
    ]
)


def test_a_client_that_never_gives_the_gil_up_is_not_taken_for_dead(serve, programs):
    store = serve(heartbeat=1.0)
    watch = store.watch("alive")
    program = rank(programs, store.port, end=BUSY + '; store.set("after", b"1"); time.sleep(100)')
    assert watch.next(LONG) == ("alive", b"1")
    assert float(line(program).removeprefix("busy ")) > 1.5, "not busy for long enough to show anything"
    assert store.get("after", LONG) == b"1"
    with pytest.raises(ncclpy.NcclTimeout):
        watch.next(0.1)


def test_a_server_whose_process_never_gives_the_gil_up_serves(programs):
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
        for _ in range(100):
            client.add("n", 1)
        taken = time.monotonic() - started
        assert taken < float(line(server).removeprefix("busy ")) / 2


def test_many_threads_on_one_client(serve, pool):
    """Each thread's answers are its own, also while others wait, leave early, and send large values."""
    store = serve()
    client = TCPStore("127.0.0.1", store.port, timeout=60)
    waiting = [pool.submit(client.get, f"late {i}", 60) for i in range(4)]

    def body(i):
        for turn in range(60):
            value = b"%d-%d" % (i, turn) * (1 if turn % 10 else 20000)
            client.set(f"key {i}", value)
            assert client.get(f"key {i}") == value
            assert client.add(f"sum {i}", 1) == turn + 1
            if turn % 7 == 0:
                with pytest.raises(ncclpy.NcclTimeout):
                    client.get(f"never {i}", 0.001 * (i % 3))
            assert client.multi_get([f"key {i}"] * 3) == [value] * 3
        return True

    assert all(pool.map(body, range(12)))
    client.multi_set({f"late {i}": b"%d" % i for i in range(4)})
    assert [each.result(LONG) for each in waiting] == [b"0", b"1", b"2", b"3"]
    client.close()


def test_stores_that_nobody_closed_end_silently():
    done = testing.run_python("""
        from ncclpy.bootstrap import TCPStore
        served = TCPStore("127.0.0.1", 0, serve=True)
        clients = [TCPStore("127.0.0.1", served.port) for _ in range(3)]
        clients[0].watch("a", print)
        lost = TCPStore("127.0.0.1", served.port)
        lost.set("b", b"1")
        del lost
        """)
    assert (done.stdout, done.stderr) == ("", "")


def test_nothing_is_left_of_a_store(serve):
    """Neither descriptors nor threads."""

    def count():
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def once():
        store = serve()
        with TCPStore("127.0.0.1", store.port, timeout=LONG) as client:
            client.set("a", b"1")
        store.close()

    once()
    testing.wait_for(lambda: not [name for name in threads() if name == "ncclpy-keeper"])
    before = count()
    for _ in range(5):
        once()
    testing.wait_for(lambda: all(now <= then for now, then in zip(count(), before, strict=True)), f"{before} again")


def threads():
    names = []
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/comm") as file:
                names.append(file.read().strip())
        except FileNotFoundError:
            pass
    return names


def test_lines_of_the_log_are_the_package_s(serve, caplog):
    store = serve()
    with caplog.at_level(logging.WARNING, logger="ncclpy"), wire.connect(store.port) as it:
        it.sendall(b"GET / HTTP/1.1\r\n")
        assert wire.ended(it)
        testing.wait_for(lambda: caplog.records)
    (record,) = caplog.records
    assert record.name == "ncclpy" and record.levelname == "WARNING"
    assert re.search(
        rf"the store at 127\.0\.0\.1:{store.port}: refused 127\.0\.0\.1:\d+: .*'GET / HTTP/1\.1\.\.'", record.message
    )
