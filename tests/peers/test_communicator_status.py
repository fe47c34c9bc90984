"""The state of a communicator's ranks, as a process reads it from the store."""

from __future__ import annotations

import gc
import logging
import textwrap
import weakref

import pytest
from warm_ranks import run_ranks

import ncclpy
import testing
from ncclpy.bootstrap import LeaseEnded, LocalStore, StoreError, StoreLost
from ncclpy.bootstrap.rank_rendezvous import RankRendezvous
from ncclpy.peers import processes, status
from ncclpy.peers.communicator_status import CommunicatorStatus
from ncclpy.peers.processes import PeerProcesses
from ncclpy.peers.reports import ASKED
from ncclpy.peers.status import ENDED, End, tell_end


class Owner:
    """An owner of a communicator, which records the end of the communicator."""

    def __init__(self):
        self.ended = []


def status_of(owner, store):
    return CommunicatorStatus(
        store, "all", {0: 0}, 2, weakref.ref(owner), lambda owner, rank: {"current": None, "finished": None}, {},
        RankRendezvous(store, "a test", 0, 2), lambda owner, text, kind: owner.ended.append((text, kind)),
    )  # fmt: skip


def refuses(*arguments):
    raise StoreError("it cannot be watched")


def test_process_without_lease_takes_its_communicator_for_ended(monkeypatch):
    """The process was stopped too long: the others continue without it, and it cannot ask whether they aborted."""
    with LocalStore() as store:
        owner = Owner()
        peer_status = status_of(owner, store)
        assert not peer_status.look_for_end()

        def gone(*arguments):
            raise LeaseEnded("this process was stopped")

        monkeypatch.setattr(store, "compare_set", gone)
        assert peer_status.look_for_end()
        told = ": the other ranks take this process for lost: this process was stopped"
        assert owner.ended == [(told, ncclpy.NcclRemoteError.__name__)]


@pytest.mark.parametrize(("error", "told"), [(StoreLost("the server is gone"), 1), (StoreError("it is closed"), 0)])
def test_failed_beat_is_logged_unless_store_was_closed(monkeypatch, caplog, error, told):
    with LocalStore() as store:
        owner = Owner()
        peer_status = status_of(owner, store)

        def fails(*arguments):
            raise error

        monkeypatch.setattr(store, "set", fails)
        peer_status.listen()
        words = "rank 0 of communicator 'all' no longer publishes what it does: the server is gone"
        found = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
        assert found == [words] * told
        peer_status.close()


def test_beat_that_ends_after_leaving_is_not_logged(monkeypatch, caplog):
    with LocalStore() as store:
        owner = Owner()
        peer_status = status_of(owner, store)

        def leaves(*arguments):
            peer_status.close()
            raise StoreLost("the server is gone")

        monkeypatch.setattr(store, "set", leaves)
        peer_status.listen()
        assert peer_status.is_over and not caplog.records


def test_communicator_status_of_dropped_owner_leaves(monkeypatch):
    """A destructor cannot tell the others, so the next beat does; then no timer, watch or thread holds the status."""
    monkeypatch.setattr(status, "_PUBLISH_INTERVAL", 0.01)
    with LocalStore() as store:
        owner = Owner()
        peer_status = weakref.ref(status_of(owner, store))
        peer_status().listen()
        assert b'"closed"' not in store.get("status/0")
        del owner
        testing.wait_for(lambda: b'"closed":true' in store.get("status/0"), "it to leave")
        testing.wait_for(lambda: gc.collect() >= 0 and peer_status() is None, "it to go")


@pytest.mark.parametrize("watched", [True, False])
def test_end_that_another_rank_tells_is_taken_once(monkeypatch, watched):
    monkeypatch.setattr(status, "_POLL_INTERVAL", 0.01)
    with LocalStore() as store:
        if not watched:
            monkeypatch.setattr(store, "watch", refuses)
        owner = Owner()
        peer_status = status_of(owner, store)
        peer_status.listen()
        tell_end(store, End("only for ranks that ask", 1, only_if_asked=True))
        tell_end(store, End("enough", 1, kind="NcclTimeout"))
        tell_end(store, End("too late", 1))
        testing.wait_for(lambda: owner.ended, "the end")
        store.add(ASKED)
        testing.wait_for(lambda: store.check(["answer/1/0"]), "an answer behind it")
        peer_status.close()
        assert owner.ended == [(" by rank 1 of 2: enough", "NcclTimeout")]


def test_end_told_before_watch_is_taken_when_stuck_store_answers(monkeypatch):
    monkeypatch.setattr(status, "_PUBLISH_INTERVAL", 0.01)
    with LocalStore() as store:
        owner, answers = Owner(), store.compare_set
        tell_end(store, End("enough", 1, kind="NcclTimeout"))
        peer_status = status_of(owner, store)

        def late(*arguments):
            raise ncclpy.NcclTimeout("it is stuck")

        monkeypatch.setattr(store, "compare_set", late)
        peer_status.listen()
        assert not owner.ended
        monkeypatch.setattr(store, "compare_set", answers)
        testing.wait_for(lambda: owner.ended, "the end")
        peer_status.close()
        assert owner.ended == [(" by rank 1 of 2: enough", "NcclTimeout")]


def test_unreadable_end_is_an_end_and_says_so():
    with LocalStore() as store:
        owner = Owner()
        peer_status = status_of(owner, store)
        store.set(ENDED, b"[]")
        assert peer_status.look_for_end()
        [(text, kind)] = owner.ended
        assert kind == "StoreDamaged" and "what a rank has put under 'told/ended' cannot be read" in text


def test_last_rank_deletes_keys_of_all_machines(monkeypatch):
    store = LocalStore()
    for rank in range(2):
        monkeypatch.setattr(processes, "_PROCESSES", f"processes/machine {rank}")
        told = PeerProcesses(store, [rank], lambda rank, why: None)
        told.tell()
    assert len(store.keys("")) == 2
    told.forget()
    assert store.keys("") == []


def test_rank_of_another_machine_that_is_gone_ends_a_communicator_long_before_its_deadline(host_engine, tmp_path):
    """The store has no leases; a stopped process looks to the others like a machine without power."""
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
            with store._thread_lock:  # no thread has the lock of the store meanwhile
                os.kill(os.getpid(), signal.SIGSTOP)
        try:
            comm.all_reduce(np.ones(2))
        except ncclpy.NcclError as error:
            print(type(error).__name__, error, [each.state for each in error.ranks], flush=True)
        os._exit(0)
    """
    said = run_ranks(tmp_path, 2, textwrap.dedent(program), only=[0])[1]
    assert "NcclRemoteError" in said and "rank 1 of 2 is gone: its heartbeats in the store have stopped" in said, said
    assert "['running', 'lost']" in said, said
