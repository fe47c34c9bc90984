"""The server of torch's store ends: other ranks' processes stop calling it, and torch prints nothing."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from foreign_stores import free_port

import testing
from ncclpy.bootstrap import StoreError, StoreLost
from ncclpy.bootstrap.store import StoreEnded
from ncclpy.interop.torch.shutdown import StoreShutdown
from ncclpy.interop.torch.store import TorchStore
from ncclpy.peers.reports import process_state

PROGRAM = """
    import os, sys, torch, torch.distributed as dist

    rank, port, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("ncclpy", rank=rank, world_size=2, pg_options={"on_error": "abort"})
    part = dist.new_group()
    dist.all_reduce(torch.ones(1), group=part)
    if rank == 1:
        sys.stdin.read()  # until rank 0's process has ended
    if how == "destroy":
        dist.destroy_process_group()
    if how == "raise" and rank == 0:
        raise ValueError("rank 0 fails")
"""


def ends(how, folder):
    """End rank 0, which serves the store, in some way; return its result, rank 1's output, and rank 1's exit code."""
    command, port = [sys.executable, "-c", textwrap.dedent(PROGRAM)], str(free_port())
    with subprocess.Popen(
        [*command, "1", port, how], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder
    ) as other:
        try:
            first = subprocess.run([*command, "0", port, how], capture_output=True, text=True, timeout=100, cwd=folder)
            said = other.communicate(timeout=100)[1]
        finally:
            other.kill()
    return first, said, other.returncode


@pytest.mark.parametrize("how", ["destroy", "nothing"])
def test_program_that_ends_normally_prints_nothing(extension, monkeypatch, tmp_path, how):
    monkeypatch.setenv("NCCLPY_LIBRARY", "host")
    first, said, code = ends(how, tmp_path)
    assert (first.returncode, code) == (0, 0) and "c10d" not in first.stderr + said, first.stderr + said
    if how == "destroy":
        assert said == ""


def test_exception_on_the_serving_rank_prints_no_frames_of_torch_on_the_others(extension, monkeypatch, tmp_path):
    monkeypatch.setenv("NCCLPY_LIBRARY", "host")
    first, said, _ = ends("raise", tmp_path)
    assert first.returncode == 1 and "rank 0 fails" in first.stderr and "c10d" not in said, said


SLOW = """
    import os, signal, sys, time, torch, torch.distributed as dist
    from ncclpy.peers.status import StatusService

    rank, port, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, LOCAL_RANK=str(rank))
    dist.init_process_group("ncclpy", rank=rank, world_size=3, pg_options={"on_error": how})
    asks = StatusService.inquire_at

    def asks_late(self, *arguments):
        time.sleep(0.6)
        return asks(self, *arguments)

    if rank == 1:
        StatusService.inquire_at = asks_late
    dist.all_reduce(torch.ones(1))
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))
"""


@pytest.mark.parametrize("how", ["exit", "abort"])
def test_serving_rank_that_fails_waits_until_slower_ranks_know_why(extension, monkeypatch, tmp_path, how):
    """Rank 2 ends; rank 1 asks what the ranks do while rank 0, which serves the store, is about to end itself."""
    monkeypatch.setenv("NCCLPY_LIBRARY", "host")
    command, port = [sys.executable, "-c", textwrap.dedent(SLOW)], str(free_port())
    ranks = [
        subprocess.Popen([*command, str(rank), port, how], stderr=subprocess.PIPE, text=True, cwd=tmp_path)
        for rank in range(3)
    ]
    try:
        said = [each.communicate(timeout=100)[1] for each in ranks]
    finally:
        for each in ranks:
            each.kill()
    assert "rank 2" in said[0] and "rank 2" in said[1] and "is not known" not in said[1], said[1]
    assert [each.returncode for each in ranks[:2]] == [70 if how == "exit" else 1] * 2


@pytest.fixture
def stores():
    """Return a serving TCPStore of torch and a client of it, in a list."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return [server, dist.TCPStore("127.0.0.1", server.port, is_master=False)]


def test_server_that_has_ended_is_an_error_and_torch_prints_nothing(stores, capfd):
    store = TorchStore(stores[1])
    store.set("key", b"value")
    del stores[0]
    gc.collect()
    with pytest.raises(StoreLost, match=r"its server has ended \(at 127\.0\.0\.1:\d+\)"):
        store.get("key")
    assert "c10d" not in capfd.readouterr().err


def test_announced_end_waits_until_no_call_is_on_its_way(stores, capfd):
    ours, theirs = (StoreShutdown(each, TorchStore(each), rank, 2) for rank, each in enumerate(stores))
    store, raised = TorchStore(stores[1], shutdown=theirs), []
    calls = threading.Event()

    def polls():
        try:
            while True:
                store.check(["never"])
                calls.set()
        except StoreEnded as error:
            raised.append(error)

    thread = threading.Thread(target=polls)
    thread.start()
    assert calls.wait(30)
    ours.end()
    stores.clear()  # the server ends
    gc.collect()
    thread.join(30)
    assert len(raised) == 1 and "rank 0's process" in str(raised[0]) and "c10d" not in capfd.readouterr().err


@pytest.mark.parametrize("end", ["close of the store", "end of the world"])
def test_lock_of_a_key_is_given_back_after_an_end_meanwhile(stores, monkeypatch, end):
    """Another client would wait for the lock until its own deadline."""
    shutdown = StoreShutdown(stores[1], TorchStore(stores[1]), 1, 2)
    store, raised, inside, goes_on = TorchStore(stores[1], shutdown=shutdown), [], threading.Event(), threading.Event()
    read = store._read

    def slow(name):
        inside.set()
        assert goes_on.wait(30)
        return read(name)

    def change():
        try:
            store.compare_set("key", None, b"ours")
        except StoreError as error:
            raised.append(error)

    monkeypatch.setattr(store, "_read", slow)
    changes, ends = threading.Thread(target=change), threading.Thread(target=shutdown.end)
    changes.start()
    assert inside.wait(30)
    if end == "close of the store":
        store.close()
    else:
        ends.start()
        testing.wait_for(lambda: shutdown._has_ended)
    goes_on.set()
    changes.join(30)
    if end == "end of the world":
        ends.join(30)
    assert len(raised) == 1
    assert TorchStore(stores[0], timeout=2).compare_set("key", None, b"theirs") == (True, b"theirs")


def started(pid):
    """Return when a process was started, as the system reports it."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def test_announced_end_does_not_wait_for_a_process_that_has_ended(stores):
    with subprocess.Popen(["true"]) as gone:
        pid = gone.pid
    ours = StoreShutdown(stores[0], TorchStore(stores[0]), 0, 3)  # rank 2 has not joined
    store = TorchStore(stores[0])
    machine = store.get("shutdown/1/process/0").decode().split("\n")[0]
    store.set("shutdown/1/process/1", f"{machine}\n{pid}\n1".encode())
    testing.run_with_deadline(ours.end, 4)


def test_announced_end_does_not_wait_for_a_process_that_stands_still(stores):
    """A rank that recovers destroys its world while the process of another rank is stopped."""
    with subprocess.Popen(["sleep", "60"]) as stopped:
        try:
            stopped.send_signal(signal.SIGSTOP)
            testing.wait_for(lambda: process_state(stopped.pid, started(stopped.pid)) == "stopped")
            ours = StoreShutdown(stores[0], TorchStore(stores[0]), 0, 2)
            store = TorchStore(stores[0])
            machine = store.get("shutdown/1/process/0").decode().split("\n")[0]
            store.set("shutdown/1/process/1", f"{machine}\n{stopped.pid}\n{started(stopped.pid)}".encode())
            testing.run_with_deadline(ours.end, 4)
        finally:
            stopped.kill()


def test_next_world_over_the_store_is_another_one(stores):
    for _ in range(2):
        ours, theirs = (StoreShutdown(each, TorchStore(each), rank, 2) for rank, each in enumerate(stores))
        theirs.begin_call()
        theirs.end_call()
        theirs.end()
        ours.end()
        with pytest.raises(StoreEnded):
            theirs.begin_call()


def test_recovery_that_is_refused_does_not_end_the_one_of_another_thread(stores):
    ours, theirs = (StoreShutdown(each, TorchStore(each), rank, 2) for rank, each in enumerate(stores))
    with theirs.recovering():
        with pytest.raises(RuntimeError), theirs.recovering():  # as of a second thread
            raise RuntimeError("another thread reconfigures the group already")
        thread = threading.Thread(target=ours.end)
        thread.start()
        time.sleep(0.5)
        theirs.begin_call()
        theirs.end_call()
    thread.join(30)
    with pytest.raises(StoreEnded):
        theirs.begin_call()


def part_after_another_world(rank, size, port, folder):
    """Make a group in a world over a file, after a world over a server that rank 0 has left first."""
    dist.init_process_group("ncclpy", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("ncclpy", store=dist.FileStore(str(folder / "store"), size), rank=rank, world_size=size)
    dist.all_reduce(tensor := torch.ones(1), group=dist.new_group())
    return tensor.item()


def test_group_of_a_world_over_a_file_does_not_ask_for_the_last_worlds_server(ranks2, tmp_path):
    assert ranks2.run(part_after_another_world, free_port(), tmp_path, backend=None) == [2.0] * 2
