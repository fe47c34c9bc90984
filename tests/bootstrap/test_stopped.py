"""Processes that are stopped, by a debugger or with the whole machine, are not taken for dead."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import runs

import testing

HEARTBEAT = 3.0

SERVER = f"""
    import sys
    from ncclpy.bootstrap import TCPStore
    store = TCPStore("127.0.0.1", 0, serve=True, heartbeat={HEARTBEAT}, linger=0)
    print(store.port, flush=True)
    sys.stdin.readline()
"""
CLIENT = """
    import sys, threading
    from ncclpy.bootstrap import TCPStore
    store = TCPStore("127.0.0.1", {port}, timeout=60)
    store.set("alive/{number}", b"", ephemeral=True)
    threading.Thread(target=store.get, args=("end",), daemon=True).start()
    print("in", flush=True)
    sys.stdin.readline()
    print(store.check(["alive/0", "alive/1"]), flush=True)
    sys.stdin.readline()  # until all have looked
"""


# Stops itself, perhaps before the thread that watches the server has begun.
HASTY = """
    import os, signal, sys
    from ncclpy.bootstrap import TCPStore
    print("ready", flush=True)
    sys.stdin.readline()
    store = TCPStore("127.0.0.1", {port}, timeout=60)
    os.kill(os.getpid(), signal.SIGSTOP)
    sys.stdin.readline()
    print(store.add("lives", 1) > 0, flush=True)
"""


@contextlib.contextmanager
def started(code):
    program = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
    )
    with program:
        try:
            yield program
        finally:
            program.kill()


# Takes more than twice the heartbeat, which is as long as a loaded machine may stop a single process.
@pytest.mark.slow
def test_processes_stopped_together_are_not_taken_for_dead():
    """Two sets at once: in one the server is stopped and continued first, in the other last."""

    def told(program):
        return testing.run_with_deadline(program.stdout.readline, timeout=60).strip()

    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(started(SERVER)) for _ in range(2)]
        ports = [told(server) for server in servers]
        clients = [
            [stack.enter_context(started(CLIENT.format(port=port, number=number))) for number in range(2)]
            for port in ports
        ]
        assert [[told(each) for each in one] for one in clients] == [["in"] * 2] * 2
        everybody = [servers[0], *clients[0], *clients[1], servers[1]]
        for each in everybody:
            os.kill(each.pid, signal.SIGSTOP)
        time.sleep(2 * HEARTBEAT)
        for each in everybody:
            os.kill(each.pid, signal.SIGCONT)
        time.sleep(HEARTBEAT)  # time in which a lost process would be noticed
        for each in itertools.chain(*clients):
            each.stdin.write("go on\n")
            each.stdin.flush()
            assert told(each) == "True"


# Twice the heartbeat here too: on a loaded machine the second client may connect so long after the first has stopped.
@pytest.mark.parametrize(("heartbeat", "count"), [(1.0, 1), pytest.param(3.0, 2, marks=pytest.mark.slow)])
def test_process_stopped_right_after_connect_is_not_taken_for_dead(heartbeat, count):

    def told(program):
        return testing.run_with_deadline(program.stdout.readline, timeout=60).strip()

    with contextlib.ExitStack() as stack:
        server = stack.enter_context(started(SERVER.replace(str(HEARTBEAT), str(heartbeat))))
        port = told(server)
        clients = [stack.enter_context(started(HASTY.format(port=port))) for _ in range(count)]
        assert [told(each) for each in clients] == ["ready"] * count
        for each in clients:
            each.stdin.write("come\n")
            each.stdin.flush()
        testing.wait_for(lambda: all(runs.state(each.pid) == "T" for each in clients))
        os.kill(server.pid, signal.SIGSTOP)
        time.sleep(2 * heartbeat)
        for each in [server, *clients]:
            os.kill(each.pid, signal.SIGCONT)
        time.sleep(0.2)  # time in which a client would take the server for gone
        for each in clients:
            each.stdin.write("go on\n")
            each.stdin.flush()
        assert [told(each) for each in clients] == ["True"] * count
