"""The control plane between processes: how they connect, and what others hear of a lost one."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from group_fixtures import in_threads
from leak_check import descriptors, threads

import testing
from ncclpy.bootstrap import LocalStore, PrefixStore, TCPStore
from ncclpy.coordinator import connections
from ncclpy.errors import NcclAborted, NcclTimeout

DEADLINE = 30


def control_of(store, rank, size, **options):
    options = {"cache": 16, "timeout": None, "stall_after": 60.0, "patience": DEADLINE} | options
    return connections.open_control(PrefixStore("control", store), rank, size, "test", **options)


def all_of(size, body, **options):
    """Call ``body(control)`` for each rank in a thread; return what they return."""

    store = LocalStore()

    def rank(number):
        control = control_of(store, number, size, **options)
        try:
            return body(control)
        finally:
            store.barrier("done", number, size, DEADLINE)
            control.close()

    with ThreadPoolExecutor(size) as pool:  # may exceed the number of devices: none is used here
        return list(pool.map(rank, range(size)))


@pytest.mark.parametrize("size", [1, 2, 3, 12])
def test_ranks_agree(size):
    def body(control):
        heard = []
        for turn in range(20):
            control.bring(0, b"x", b"fixed", b"%d" % control.rank, True)
            heard += control.next(DEADLINE)
            control.launched(0)
            assert heard[turn][:4] == ("run", 0, b"x", b"fixed")
        return heard

    told = all_of(size, body)
    assert all(each == told[0] for each in told)
    assert told[0][0][4] == tuple(b"%d" % rank for rank in range(size))


def test_answer_in_burst_needs_no_heartbeat():
    """An operation brought soon after another is reported a little later, without any further event."""

    def body(control):
        began = time.monotonic()
        for _ in range(100):
            control.bring(0, b"x", b"fixed", b"", True)
            assert control.next(DEADLINE)[0][0] == "run"
            control.launched(0)
        return time.monotonic() - began

    assert all_of(1, body, silence=1000.0)[0] < DEADLINE / 2


def test_machines_speak_by_addresses(monkeypatch):
    """Ranks that count as on several machines connect without names known to one machine only."""
    families = []
    real = connections._set_options
    monkeypatch.setattr(connections, "_set_options", lambda line: (families.append(line.family), real(line)))
    machines = iter(["a", "b", "a", "b"])
    lock = threading.Lock()
    monkeypatch.setattr(connections, "machine", lambda: next(machines))
    with lock:
        told = all_of(4, lambda control: (control.bring(0, b"x", b"A", b"", True), control.next(DEADLINE))[1])
    assert all(each[0][0] == "run" for each in told)
    assert families.count(socket.AF_UNIX) == 4 and len(families) == 6, "two ends each of two and one"


def test_missing_rank_is_named():
    def rank(world):
        if world.rank == 2:
            return None
        with pytest.raises(NcclTimeout, match="rank 2 of 4 did not arrive to connect coordinator 'test'") as late:
            control_of(world.store, world.rank, 4, patience=1.0)
        return late.value.missing

    assert in_threads(4, rank) == [[2], [2], None, [2]]


def test_unwanted_wait_ends():
    began = time.monotonic()

    def rank(world):
        wanted = (lambda: time.monotonic() < began + 0.3) if world.rank == 0 else (lambda: True)
        with pytest.raises(NcclAborted):
            control_of(world.store, world.rank, 3, wanted=wanted)

    in_threads(2, rank)
    assert time.monotonic() - began < 10


def bring_and_hear(control):
    control.bring(0, b"x", b"A", b"", True)
    return control.next(DEADLINE)


def strangers_first(monkeypatch, meet):
    """Have `meet` called with a rank's listening sockets, before the rank accepts."""
    real = connections._Listener.accept_children

    def hear(ears, children, deadline, wanted):
        if children:
            meet(ears._sockets)
        return real(ears, children, deadline, wanted)

    monkeypatch.setattr(connections._Listener, "accept_children", hear)


def call(listener, says=b""):
    stranger = socket.socket(listener.family, socket.SOCK_STREAM)
    stranger.settimeout(DEADLINE)
    stranger.connect(listener.getsockname())
    with contextlib.suppress(BrokenPipeError):  # the other end may have closed the connection already
        stranger.sendall(says)
    return stranger


def read_to_end(stranger):
    """Return all bytes received on a connection until the other end closes it."""
    text = b""
    with stranger, contextlib.suppress(ConnectionResetError):
        while more := stranger.recv(100):
            text += more
    return text


@contextlib.contextmanager
def ears_that_hear(size=2):
    """Have a rank wait for ranks below it that do not come; yield its listening sockets."""
    ears, over = connections._Listener(LocalStore(), size), threading.Event()

    def hear():
        with pytest.raises(NcclAborted):
            ears.accept_children(list(range(1, size)), time.monotonic() + DEADLINE, lambda: not over.is_set())

    with ThreadPoolExecutor(1) as pool:
        heard = pool.submit(hear)
        try:
            yield ears._sockets
        finally:
            over.set()
            heard.result(DEADLINE)
            ears.close()


def test_silent_or_wrong_callers_delay_no_other(monkeypatch):
    """No handshake times out within the test, so that one that waited for another's end would never finish."""
    monkeypatch.setattr(connections, "_HANDSHAKE", 1000.0)
    strangers = []
    strangers_first(
        monkeypatch,
        lambda sockets: strangers.extend(call(each, says) for each in sockets for says in (b"", b"x", b"x" * 200)),
    )
    told = all_of(2, bring_and_hear)
    assert told[0] == told[1] and len(strangers) >= 6
    for stranger in strangers:
        read_to_end(stranger)  # closed when the ranks had met


def test_slow_caller_is_closed(monkeypatch):
    """The limit is for the whole handshake: a caller that sends a byte now and then is closed too."""
    monkeypatch.setattr(connections, "_HANDSHAKE", 0.3)

    def drip(stranger):
        with contextlib.suppress(OSError):
            while True:
                stranger.sendall(b"x")
                time.sleep(0.1)  # 52 bytes would take 5 s

    with ears_that_hear() as sockets, ThreadPoolExecutor(1) as pool:
        silent, dripping = call(sockets[0]), call(sockets[-1])
        pool.submit(drip, dripping)
        assert len(read_to_end(silent)) == len(read_to_end(dripping)) == connections._NONCE


def test_caller_beyond_limit_replaces_the_oldest(monkeypatch):
    monkeypatch.setattr(connections, "_HANDSHAKE", 1000.0)
    most = connections._MAX_UNPROVEN + 1  # and the expected rank
    with ears_that_hear() as sockets:
        callers = [call(sockets[0]) for _ in range(most + 5)]
        for oldest in callers[:5]:
            assert len(read_to_end(oldest)) == connections._NONCE
        for caller in callers[5:]:
            assert len(caller.recv(100)) == connections._NONCE
            caller.setblocking(False)
            with pytest.raises(BlockingIOError):
                caller.recv(100)
    for caller in callers[5:]:
        read_to_end(caller)


def test_local_socket_of_another_user_is_closed_unread(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: -1)
    with ears_that_hear() as sockets:
        assert sockets[0].family == socket.AF_UNIX
        assert read_to_end(call(sockets[0], b"x")) == b""
        with call(sockets[-1]) as by_address:
            assert len(by_address.recv(100)) == connections._NONCE, "an address has no user"


def test_ranks_of_several_users_speak_by_addresses(monkeypatch):
    """The machine's local sockets are for one user only."""
    monkeypatch.setattr(os, "geteuid", lambda: -1)
    families = []
    real = connections._set_options
    monkeypatch.setattr(connections, "_set_options", lambda line: (families.append(line.family), real(line)))
    told = all_of(2, bring_and_hear)
    assert told[0] == told[1]
    assert len(families) == 2 and socket.AF_UNIX not in families


def test_descriptors_above_1023_connect():
    testing.run_python(
        """
        import os, resource, threading, time
        from ncclpy.bootstrap import LocalStore
        from ncclpy.coordinator.connections import _Listener, open_control
        from ncclpy.errors import NcclTimeout

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 2048) if hard > 0 else 2048, hard))
        held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
        try:
            _Listener(LocalStore(), 2).accept_children([1], time.monotonic() + 0.2, lambda: True)
        except NcclTimeout as late:
            assert late.missing == [1]
        store, told = LocalStore(), {}

        def be(rank):
            control = open_control(store, rank, 2, "test", cache=16, timeout=None, stall_after=60.0, patience=10)
            control.bring(0, b"x", b"A", b"", True)
            told[rank] = control.next(30)[0][0]
            store.barrier("done", rank, 2)
            control.close()

        threads = [threading.Thread(target=be, args=(rank,)) for rank in range(2)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert told == {0: "run", 1: "run"}, told
    """,
        warm=True,
    )


def test_descriptors_that_run_out_are_named_in_the_timeout():
    """Descriptors of unauthenticated connections are freed before that."""
    testing.run_python(
        """
        import contextlib, os, resource, socket, time
        from ncclpy.bootstrap import LocalStore
        from ncclpy.coordinator import connections
        from ncclpy.errors import NcclTimeout

        ears = connections._Listener(LocalStore(), 2)
        def call():
            caller = socket.socket(socket.AF_UNIX)
            caller.connect(ears._sockets[0].getsockname())
            return caller
        def hear():
            try:
                ears.accept_children([1], time.monotonic() + 0.5, lambda: True)
            except NcclTimeout as late:
                return str(late)
        first, second = call(), call()
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, hard))
        assert "Too many open" not in hear()
        assert len(first.recv(100)) == len(second.recv(100)) == 16, "one after the other"
        third = call()  # takes the last one
        assert hear().endswith("did not connect in time: connections cannot be accepted: Too many open files")
    """,
        warm=True,
    )


PROGRAM = """
import os, signal, sys, threading, time
from ncclpy.bootstrap import PrefixStore, TCPStore
from ncclpy.coordinator.connections import open_control
from ncclpy.errors import NcclAborted
port, size, who, does, silence = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], float(sys.argv[5])

def be(rank):
    store = TCPStore("127.0.0.1", port)
    control = open_control(PrefixStore("control", store), rank, size, "test", cache=16, timeout=None, stall_after=60.0,
                           patience=30, silence=silence)
    control.bring(0, b"first", b"A", b"", True)
    assert control.next(30)[0][0] == "run"
    store.barrier("ready", rank, size)
    if rank == who:
        store.set("since", repr(time.time()).encode())
        if does == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if does == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if does == "close":
            control.close()
            time.sleep(60)
    try:
        control.bring(0, b"second", b"A", b"", True)
    except NcclAborted:  # that was heard of before
        pass
    told = control.next(30)
    text = f"told {time.time() - float(store.get('since'))} {told} {control.next(1)}\\n"
    os.write(1, text.encode())

threads = [threading.Thread(target=be, args=(int(rank),)) for rank in sys.argv[6:]]
for each in threads:
    each.start()
for each in threads:
    each.join()
"""

SILENT = ("stop", 2.0, "has been silent for 2 s", 30.0)
ENDED = ("kill", 30.0, "has ended, or its machine", 10.0)
CLOSED = ("close", 30.0, "has closed its coordinator", 10.0)
QUICK = {("close", 0), ("kill", 1), ("kill", 9)}


@pytest.mark.parametrize(
    ("does", "silence", "reason", "within", "who"),
    [
        pytest.param(*way, who, id=f"{way[0]}-{who}", marks=[] if (way[0], who) in QUICK else pytest.mark.slow)
        for way in (ENDED, CLOSED, SILENT)
        for who in (0, 1, 9)
    ],
)
def test_all_ranks_name_the_lost_rank(who, does, silence, reason, within):
    """Lose the root, a rank with others below it, or a leaf: its neighbours name it, and then all other ranks.

    All other ranks are threads of one process.
    """
    check_lost_rank_is_named(12, who, does, silence, reason, within)


def test_all_ranks_name_the_silent_rank():
    check_lost_rank_is_named(4, 1, "stop", 1.0, "has been silent for 1 s", 30.0)


def check_lost_rank_is_named(size, who, does, silence, reason, within):
    """Lose one rank, in a separate process, in some way; check that all others name it, and no other rank."""
    others = [rank for rank in range(size) if rank != who]
    with TCPStore("127.0.0.1", 0, serve=True) as store:
        command = [sys.executable, "-c", PROGRAM, *map(str, (store.port, size, who, does, silence))]
        started = [
            subprocess.Popen([*command, *map(str, ranks)], stdout=subprocess.PIPE, text=True, cwd="/")
            for ranks in (others, [who])
        ]
        try:
            said = started[0].communicate(timeout=60)[0].splitlines()
        finally:
            for each in started:
                each.kill()
                each.communicate()
    assert len(said) == len(others), said
    for text in said:
        found = re.search(r"told (\S+) \[\('ended', -1, (\(.*?\)), '(.*?)'\)\] None", text)
        assert found, text
        assert found[2] == f"({who},)" and found[3] == reason
        assert float(found[1]) < within


def test_rank_that_holds_gil_is_not_taken_for_lost(tmp_path):
    """Heartbeats need no Python: rank 1 holds the GIL for longer than the longest allowed silence."""
    program = """
        import ctypes, sys, time
        from ncclpy.bootstrap import FileStore
        from ncclpy.coordinator.connections import open_control
        rank, size = int(sys.argv[1]), 2
        store = FileStore(sys.argv[2])
        options = dict(cache=16, timeout=None, stall_after=60.0, patience=30, silence=1.0)
        control = open_control(store, rank, size, "test", **options)
        control.bring(0, b"first", b"A", b"", True)
        assert control.next(30)[0][0] == "run"
        control.launched(0)
        store.barrier("ready", rank, size)
        if rank == 1:
            ctypes.PyDLL(None).sleep(2)
        control.bring(0, b"second", b"A", b"", True)
        told = control.next(30)
        assert told[0][0] == "run", told
        store.barrier("done", rank, size)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    started = [subprocess.Popen([*command, str(rank), str(tmp_path / "store")], cwd="/") for rank in range(2)]
    try:
        assert [each.wait(60) for each in started] == [0, 0]
    finally:
        for each in started:
            each.kill()


IDLE = """
import contextlib, resource, threading, time
import numpy as np
import ncclpy
from ncclpy.bootstrap import LocalStore
from ncclpy.coordinator.connections import open_control
store, meeting, over = LocalStore(), threading.Barrier(3), {over!r}

def rank(number):
    with contextlib.ExitStack() as stack:
        place, options = (store, number, 2), dict(device=number)
        if over == "plane":
            control = open_control(store, number, 2, "test", cache=16, timeout=None, stall_after=60.0, patience=30)
            stack.callback(control.close)
            control.bring(0, b"x", b"A", b"", True)
            control.next(30)
            control.launched(0)
            meeting.wait(30)
            waiting = threading.Thread(target=control.next, args=(60.0,), daemon=True)
            waiting.start()
            meeting.wait(60)
            return
        if over == "group":
            place, options = stack.enter_context(ncclpy.ProcessGroup(store, number, 2, device=number)), {{}}
        coordinator = stack.enter_context(ncclpy.Coordinator(place, **options))
        coordinator.all_reduce("x", np.ones(3)).wait(30)
        meeting.wait(30)
        meeting.wait(60)

threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
for each in threads:
    each.start()
meeting.wait(30)
# What stays awake behind an operation is over after a while, and a machine may be busy: the quietest look counts.
least = 1.0
for _ in range(10):
    before = resource.getrusage(resource.RUSAGE_SELF)
    time.sleep({seconds})
    after = resource.getrusage(resource.RUSAGE_SELF)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    least = min(least, spent / {seconds})
    if least < {enough}:
        break
print(least, flush=True)
meeting.wait(30)
for each in threads:
    each.join()
"""


@pytest.mark.parametrize(
    ("over", "seconds"),
    [
        ("group", 1.0),
        pytest.param("plane", 5.0, marks=pytest.mark.slow),
        pytest.param("store", 4.0, marks=pytest.mark.slow),
        pytest.param("group", 4.0, marks=pytest.mark.slow),
    ],
)
def test_idle_ranks_use_no_processor_time(host_engine, over, seconds):
    """Two idle ranks of a process, heartbeats included: some wake-ups, and no polling.

    For a plane alone, and for coordinators with their readers, groups and the groups' monitors.
    """
    enough = 2 * 0.001  # 0.1% of a core for each rank
    assert float(testing.run_python(IDLE.format(over=over, seconds=seconds, enough=enough), warm=True).stdout) < enough


def test_control_plane_leaves_no_thread_or_descriptor():
    all_of(3, lambda control: None)
    before = descriptors()
    for _ in range(3):
        all_of(3, lambda control: (control.bring(0, b"x", b"A", b"", True), control.next(DEADLINE)))
    testing.wait_for(lambda: descriptors() <= before, "descriptors to be closed")
    testing.wait_for(lambda: "ncclpy-coord" not in threads(), "threads to end")


@pytest.mark.campaign
def test_memory_is_constant_over_100000_steps():
    steps = testing.share(100_000)

    def body(control):
        sizes = []
        for turn in range(steps):
            control.bring(0, b"x" if turn % 10 else b"y%d" % (turn % 1000), b"A", b"", True)
            assert control.next(DEADLINE)[0][0] == "run"
            control.launched(0)
            if (turn + 1) % (steps // 5) == 0:
                with open("/proc/self/statm") as file:
                    sizes.append(int(file.read().split()[1]) * 4096)
        return sizes

    for sizes in all_of(2, body):
        assert sizes[-1] - sizes[0] < 2 << 20
