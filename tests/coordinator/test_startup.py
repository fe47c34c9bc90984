"""A coordinator that cannot begin leaves no thread, no descriptor, and no group."""

from __future__ import annotations

import gc
import operator
import os
import threading
import time

import pytest
import thread_ranks
from coordinator_ranks import run_coordinators
from leak_check import LASTING_MANAGER, descriptors, python_threads, settle, threads

import ncclpy
import testing
from ncclpy.bootstrap import LocalStore
from ncclpy.coordinator import Coordinator, backends, connections, session


def groups():
    """Return the number of process groups that are neither closed nor collected."""
    found = [each for each in gc.get_objects() if type(each) is ncclpy.ProcessGroup]
    return sum(not repr(each).endswith(" closed>") for each in found)


def look():
    """Return the numbers of threads, groups and descriptors.

    A raised error is in a cycle with the frames of its traceback. What these frames hold, and what an ending thread
    still holds, is only released by a collection after the end of the thread.
    """
    gc.collect()
    native = [name for name in threads(LASTING_MANAGER) if name.startswith(("ncclpy-coord", "ncclpy-timel"))]
    own = [name for name in python_threads() if name.startswith("ncclpy")]
    return len(native + own), groups(), descriptors()


@pytest.fixture
def nothing_left(host_engine):
    """Fail the test if something is left, except for what stays from a process's first coordinator on."""
    gc.collect()
    gc.freeze()  # so that each collection sees only newer objects
    try:
        run_coordinators(2, lambda coordinator: None)
        testing.wait_for(lambda: look() == (time.sleep(0.1), look())[1], "what has ended to be gone")
        before = look()
        yield
        left = settle(look, lambda seen: all(map(operator.le, seen, before)))
    finally:
        gc.unfreeze()
    assert all(map(operator.le, left, before)), f"{left} threads, groups and descriptors, and {before} before"


def refused(size, wrong, error, **options):
    """Have all ranks fail to make a coordinator, each with its own options; return their error texts."""
    store = LocalStore()

    def rank(number):
        with pytest.raises(error) as raised:
            Coordinator((store, number, size), device=number, **options | wrong(number))
        return str(raised.value)

    return thread_ranks.run_ranks(size, rank, 60)


def test_different_options_are_an_error_on_all(nothing_left, tmp_path):
    said = refused(
        2, lambda rank: {"cache": rank, "timeline": tmp_path / f"{rank} {{rank}}"}, ValueError, fusion_bytes=5
    )
    assert said[0] == said[1] and "cache 0 on rank 0, 1 on rank 1" in said[0]


def test_missing_ranks_are_named(nothing_left, tmp_path):
    with pytest.raises(ncclpy.NcclTimeout):
        Coordinator((LocalStore(), 0, 2), timeout=0.2, timeline=tmp_path / "trace")


def silent(mine):
    raise KeyError("nobody has come")


def test_connected_rank_that_says_nothing(nothing_left, tmp_path, monkeypatch):
    """The ranks are connected, and no record reports the end."""
    monkeypatch.setattr(session, "_REASON_TIMEOUT", 0.5)
    monkeypatch.setattr(session.Session, "begin", silent)
    monkeypatch.setattr(session.Session, "shut_down", lambda mine, drain, reason: None)
    said = refused(2, lambda rank: {}, KeyError, timeline=tmp_path / "trace {rank}")
    assert said == ["'nobody has come'"] * 2


@pytest.mark.parametrize("cache", [2**60, 2**70])
def test_control_plane_that_cannot_be_made(nothing_left, tmp_path, monkeypatch, cache):
    """For instance for lack of memory, after the connections were made, which nothing else would close."""
    real = connections.open_control
    monkeypatch.setattr(
        connections, "open_control", lambda *meet, **options: real(*meet, **options | {"cache": cache})
    )
    refused(3, lambda rank: {}, (MemoryError, OverflowError, RuntimeError), timeline=tmp_path / "trace {rank}")


def test_data_plane_that_cannot_be_made(nothing_left, tmp_path, monkeypatch):
    def plane(backend):
        raise MemoryError("no plane")

    monkeypatch.setattr(backends.GroupBackend, "plane", plane)
    # A slower rank may hear of the other rank's error first.
    said = refused(2, lambda rank: {}, (MemoryError, ncclpy.NcclRemoteError), timeline=tmp_path / "trace {rank}")
    assert all("no plane" in each for each in said)


def test_parent_that_cannot_be_called(nothing_left, monkeypatch):
    """The ranks below the failing one have connected already, and close their connections."""
    monkeypatch.setattr(
        connections._Listener, "accept_children", lambda listener, children, deadline, wanted: os.open("/no/such", 0)
    )
    refused(3, lambda rank: {}, (FileNotFoundError, ncclpy.NcclError), timeout=0.7)


# Options of rank 1, or the step that fails there: its listening sockets; its connection to the rank above it, once all
# have met; its data plane, once all are connected.
FAILURES = {
    "argument": ({"cache": -1}, None, "ValueError: cache: expected an int from 0 "),
    "device": ({"device": 99}, None, "ValueError: device 99 does not exist"),
    "listener": ({}, (connections, "_Listener"), "OSError: no socket"),
    "call": ({}, (connections, "_connect_to_parent"), "OSError: no socket"),
    "plane": ({}, (backends.GroupBackend, "plane"), "OSError: no socket"),
}


@pytest.mark.parametrize(
    ("over", "failure"), [*(("store", failure) for failure in FAILURES), ("group", "argument"), ("group", "listener")]
)
def test_rank_that_cannot_begin_is_remote_error_on_others(nothing_left, monkeypatch, over, failure):
    options, function, why = FAILURES[failure]
    store, together = LocalStore(), threading.Barrier(3)
    if function is not None:
        real = getattr(*function)

        def fails(*arguments):
            if threading.current_thread().name == "rank 1":
                raise OSError("no socket")
            return real(*arguments)

        monkeypatch.setattr(*function, fails)

    def rank(number):
        group, device = None, {"device": number}
        if over == "group":
            group, device = ncclpy.ProcessGroup(store, number, 3, device=number, timeout=60), {}
        with pytest.raises((OSError, ValueError, ncclpy.NcclError)) as caught:
            Coordinator(group or (store, number, 3), **device | (options if number == 1 else {}))
        together.wait(60)
        if group is not None:
            group.close()
        return caught.value

    _check_all_know(thread_ranks.run_ranks(3, rank, 60), why)


def test_rank_with_lost_connection_gets_reason_from_store(nothing_left, monkeypatch):
    """Rank 0 reads why rank 1 cannot begin and closes the connection to rank 2, which has not read the reason yet."""
    store = LocalStore()
    rank_2_began, rank_0_left = threading.Event(), threading.Event()
    real_call, real_begin = connections._connect_to_parent, session.Session.begin

    def call(*arguments):
        if threading.current_thread().name == "rank 1":
            assert rank_2_began.wait(60)
            raise OSError("no socket")
        return real_call(*arguments)

    def begin(mine):
        assert mine.rank == 2  # rank 0 still waits for rank 1 to connect
        rank_2_began.set()
        assert rank_0_left.wait(60)
        testing.wait_for(lambda: mine.error is not None, "the control plane's end")
        return real_begin(mine)

    monkeypatch.setattr(connections, "_connect_to_parent", call)
    monkeypatch.setattr(session.Session, "begin", begin)

    def rank(number):
        with pytest.raises((OSError, ncclpy.NcclError)) as caught:
            Coordinator((store, number, 3), device=number)
        if number == 0:
            rank_0_left.set()
        return caught.value

    _check_all_know(thread_ranks.run_ranks(3, rank, 60), "OSError: no socket")


def _check_all_know(raised, why):
    """Assert that rank 1 has raised its own error, and the others one that names it."""
    assert f"{type(raised[1]).__name__}: {raised[1]}".startswith(why)
    for other in (0, 2):
        assert type(raised[other]) is ncclpy.NcclRemoteError
        assert "by rank 1 of 3" in str(raised[other]) and why in str(raised[other])
