"""Torch's store does not know which process has ended: ranks on several machines write heartbeats, without the GIL."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest
import torch.distributed as dist

import testing
from ncclpy.bootstrap import StoreError
from ncclpy.interop.torch import extension as torch_extension
from ncclpy.interop.torch.store import TorchStore

#: Two ranks, each on a machine of its own if requested; rank 0 serves the store.
PROGRAM = """
    import ctypes, os, signal, sys, time
    from ncclpy.peers import processes, reports

    rank, port, apart = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "apart"
    if apart:
        reports.MACHINE = f"machine {rank}"
        processes._PROCESSES = f"processes/{reports.MACHINE}"

    import torch, torch.distributed as dist
    from ncclpy.interop.torch.store import TorchStore

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("ncclpy", rank=rank, world_size=2, pg_options={"on_error": "abort", "timeout": 100})
    store = TorchStore(dist.distributed_c10d._get_default_store())
    one = torch.ones(1)
    dist.all_reduce(one)

    def beats():
        return sorted(key for key in store.keys("") if "/beat/" in key)

    def wait_for(condition):
        while not condition():
            time.sleep(0.01)

    if apart:
        wait_for(lambda: len(beats()) == 2)
    dist.barrier()
"""


@contextlib.contextmanager
def ranks(folder, program, how="apart"):
    """Start both ranks; each prints to a pipe of its own and reads its standard input from the test."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = str(one.getsockname()[1])
    text = textwrap.dedent(PROGRAM) + textwrap.dedent(program)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", text, str(rank), port, how],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            with process:  # closes its pipes
                process.wait()


@pytest.fixture(autouse=True)
def host(extension, monkeypatch):
    monkeypatch.setenv("NCCLPY_LIBRARY", "host")


def test_stopped_rank_of_another_machine_is_known_long_before_the_deadline(tmp_path):
    program = """
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        try:
            dist.all_reduce(one)
            print("a number:", one.item(), flush=True)
        except dist.DistBackendError as error:
            print(type(error.__cause__).__name__, error, flush=True)
        os._exit(0)
    """
    with ranks(tmp_path, program) as (first, _):
        said, errors = first.communicate(timeout=80)
    assert "NcclRemoteError" in said and "rank 1 of process group '0' is gone: its heartbeats" in said, said + errors
    assert "rank 1 cannot be reached" in said, said


REDUCES = """
    print("ready", flush=True)
    if rank == 1:
        sys.stdin.readline()  # until it was stopped, and goes on
    try:
        dist.all_reduce(one)
        print("a number:", one.item(), flush=True)
    except dist.DistBackendError as error:
        print(type(error.__cause__).__name__, error, flush=True)
    if rank == 0:
        sys.stdin.read()  # it serves the store until rank 1 has ended
    os._exit(0)
"""


@pytest.mark.parametrize("seconds", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_rank_that_was_stopped_and_continued_yields_no_wrong_number(tmp_path, seconds):
    """After one second it may continue with the others, by the rules; after three they have ended the group.

    If it has heard of that before, its call is on a group that has already ended.
    """
    with ranks(tmp_path, REDUCES) as both:
        for process in both:
            assert process.stdout.readline() == "ready\n"
        both[1].send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        both[1].send_signal(signal.SIGCONT)
        both[1].stdin.write("go on\n")
        both[1].stdin.flush()
        said = [process.communicate(timeout=80)[0] for process in reversed(both)]
    if seconds > 1 or said != ["a number: 4.0\n"] * 2:
        assert said[1].startswith("NcclRemoteError ") and re.match("NcclRemoteError |NcclAborted ", said[0]), said


def test_rank_with_the_gil_held_for_longer_is_not_taken_for_gone(tmp_path):
    program = """
        [mine] = [key for key in beats() if key.endswith("/beat/1")]
        before = store.get(mine)
        dist.barrier()
        if rank == 1:
            ctypes.PyDLL(None).sleep(3)
        dist.all_reduce(one)
        counted = [int(each.split()[1]) for each in (before, store.get(mine))]
        print("a number:", one.item(), counted[1] - counted[0] > 3, flush=True)
        if rank == 0:
            sys.stdin.read()  # it serves the store until rank 1 has ended
        os._exit(0)
    """
    with ranks(tmp_path, program) as both:
        for process in reversed(both):
            said, errors = process.communicate(timeout=80)
            assert said == "a number: 4.0 True\n", said + errors


def test_ranks_of_one_machine_write_no_heartbeats(tmp_path):
    program = """
        [come] = [key for key in store.keys("") if key.endswith("/processes/come")]
        assert store.get(come) == b"2"
        time.sleep(1.5)  # they look once a second
        print("heartbeats:", beats(), flush=True)
        if rank == 0:
            sys.stdin.read()  # it serves the store until rank 1 has ended
        os._exit(0)
    """
    with ranks(tmp_path, program, "together") as both:
        for process in reversed(both):
            said, errors = process.communicate(timeout=80)
            assert said == "heartbeats: []\n", said + errors


@pytest.mark.parametrize("how", ["destroys", "ends"])
def test_heartbeats_end_with_the_group_and_torch_prints_nothing(tmp_path, how):
    """Rank 0 serves the store, and ends first."""
    program = f"""
        part = dist.new_group()
        dist.all_reduce(one, group=part)
        wait_for(lambda: len(beats()) == 4)
        dist.barrier()
        dist.destroy_process_group(part)
        wait_for(lambda: len(beats()) == 2)
        dist.barrier()
        if rank == 1:
            sys.stdin.read()  # until rank 0's process has ended
        if {how == "destroys"}:
            dist.destroy_process_group()
        print("ended", flush=True)
    """
    with ranks(tmp_path, program) as both:
        for process in both:
            said, errors = process.communicate(timeout=80)
            assert process.returncode == 0 and said == "ended\n" and "c10d" not in errors, said + errors


@pytest.fixture
def stores():
    """Return a serving TCPStore of torch and a client of it, in a list; the extension is loaded."""
    torch_extension._extension()
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return [server, dist.TCPStore("127.0.0.1", server.port, is_master=False)]


def test_heartbeats_of_a_server_that_has_ended_print_nothing(stores, capfd):
    store = TorchStore(stores[1])
    beat = store._beat("beat", b"1.25", 0.01)
    testing.wait_for(lambda: TorchStore(stores[0]).get("beat").split()[1] > b"1", "two heartbeats")
    del stores[0]
    gc.collect()
    time.sleep(0.1)  # several more would have been written
    assert beat.close() and "c10d" not in capfd.readouterr().err


class Old:
    """A store of torch that cannot be cloned, as before torch 2.8."""

    def __init__(self, theirs):
        self._theirs = theirs

    def __getattr__(self, name):
        if name == "clone":
            raise AttributeError(name)
        return getattr(self._theirs, name)


def test_store_with_calls_that_wait_for_each_other_has_no_heartbeats(stores):
    store = TorchStore(Old(stores[1]))
    with pytest.raises(StoreError, match="would hold up heartbeats"):
        store._beat("beat", b"1.25", 0.01)
    assert store.keys("") == []


def test_heartbeats_of_a_forked_child_are_the_parents(stores):
    store = TorchStore(stores[1])
    beat = store._beat("beat", b"1.25", 0.01)
    child = os.fork()
    if child == 0:
        beat.close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    before = store.get("beat")
    testing.wait_for(lambda: store.get("beat") != before, "another heartbeat")
    assert beat.close()
    after = store.get("beat")
    time.sleep(0.05)
    assert store.get("beat") == after
