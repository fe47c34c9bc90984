"""The ranks of one communicator, as one of their processes sees them by the store."""

from __future__ import annotations

import logging
import textwrap

import pytest
from warm_ranks import run_ranks

import ncclpy
import testing
from ncclpy.bootstrap import LeaseEnded, LocalStore, StoreError, StoreLost
from ncclpy.bootstrap.arrivals import Arrivals
from ncclpy.peers import processes
from ncclpy.peers.circle import Circle
from ncclpy.peers.processes import PeerProcesses


def test_process_whose_lease_has_ended_takes_its_communicator_for_ended(monkeypatch):
    """It was stopped for too long: the others go on without it, and it cannot ask whether they have aborted."""
    with LocalStore() as store:
        ended = []
        arrivals = Arrivals(store, "a test", 0, 2)
        circle = Circle(
            store, "all", {0: 0}, 2, lambda rank: {}, {}, arrivals, lambda text, kind: ended.append((text, kind))
        )
        assert not circle.look_for_end()

        def gone(*arguments):
            raise LeaseEnded("this process was stopped")

        monkeypatch.setattr(store, "compare_set", gone)
        assert circle.look_for_end()
        told = ": the other ranks take this process for lost: this process was stopped"
        assert ended == [(told, ncclpy.NcclRemoteError.__name__)]


@pytest.mark.parametrize(("error", "told"), [(StoreLost("the server is gone"), 1), (StoreError("it is closed"), 0)])
def test_beat_that_ends_is_told_unless_the_store_was_closed(monkeypatch, caplog, error, told):
    with LocalStore() as store:
        circle = Circle(
            store, "all", {0: 0}, 2, lambda rank: {}, {}, Arrivals(store, "a test", 0, 2), lambda text, kind: None
        )

        def fails(*arguments):
            raise error

        monkeypatch.setattr(store, "set", fails)
        circle._beat()
        words = "rank 0 of communicator 'all' tells the others no more what it does: the server is gone"
        found = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
        assert found == [words] * told
        caplog.clear()
        circle._over = True
        circle._beat()
        assert not caplog.records


def test_last_rank_clears_away_what_the_processes_of_all_machines_have_told(monkeypatch):
    store = LocalStore()
    for rank in range(2):
        monkeypatch.setattr(processes, "_PROCESSES", f"processes/machine {rank}")
        told = PeerProcesses(store, [rank], lambda rank, why: None)
        told.tell()
    assert len(store.keys("")) == 2
    told.forget()
    assert store.keys("") == []


def test_rank_of_another_machine_that_is_gone_ends_a_communicator_long_before_its_deadline(host_engine, tmp_path):
    """Its store has no leases; a process that stands still is to the others what a machine without power is."""
    testing.need_processes(2)
    program = f"""
        from ncclpy.bootstrap import FileStore, launched
        from ncclpy.peers import heartbeats, processes, reports

        rank = int(os.environ["RANK"])
        reports.MACHINE = f"machine {{rank}}"
        processes._PROCESSES = f"processes/{{reports.MACHINE}}"
        heartbeats._PERIOD_OF_PYTHON, heartbeats._SILENCE_OF_PYTHON = 0.2, 1.25
        store = FileStore({str(tmp_path / "store")!r}, timeout=60)
        launched._connect = lambda *_: store
        comm = ncclpy.Communicator.from_env(timeout=100)
        comm.all_reduce(np.ones(2))

        def beats():
            return [key for key in store.keys("") if "/beat/" in key]

        while len(beats()) < 2:
            time.sleep(0.01)
        store.barrier("all beat", rank, 2)
        if rank == 1:
            with store._turn:  # no thread has the lock of the store meanwhile
                os.kill(os.getpid(), signal.SIGSTOP)
        try:
            comm.all_reduce(np.ones(2))
        except ncclpy.NcclError as error:
            print(type(error).__name__, error, [each.state for each in error.ranks], flush=True)
        os._exit(0)
    """
    said = run_ranks(tmp_path, 2, textwrap.dedent(program), only=[0])[1]
    assert "NcclRemoteError" in said and "rank 1 of 2 is gone: its heartbeats in the store have stopped" in said, said
    assert "['waits', 'gone']" in said, said
