"""New processes join a running group, when its ranks call `admit`."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from group_ranks import DEADLINE, run_groups
from warm_ranks import run_ranks

import ncclpy
import testing
from ncclpy.bootstrap import FileStore, LocalStore, TCPStore
from ncclpy.bootstrap.rank_rendezvous import RankRendezvous
from ncclpy.process_group import membership
from ncclpy.process_group.group_status import GroupStatus
from ncclpy.process_group.joining import Admitter, Joiner

SHORT = 0.5


def total(group, arrays):
    """Return the sum of the ranks' numbers, each plus one."""
    array = arrays.make(np.full(2, group.rank + 1.0), group.device)
    group.all_reduce(arrays.argument(array)).wait(DEADLINE)
    return arrays.read(array)[0]


def joins(store, device, arrays, results, **options):
    def program():
        try:
            with ncclpy.ProcessGroup.join(store, device=device, timeout=DEADLINE / 2, **options) as group:
                results.append((group.rank, group.size, group.name, total(group, arrays)))
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=program, daemon=True)
    thread.start()
    return thread


def asks(store, name="default"):
    return len(store.keys(f"ncclpy/joining/{name}/asks/"))


def test_one_joins_one(arrays):
    """A group of one rank, as after a failure, grows to two."""
    testing.need_devices(2)
    store, results = LocalStore(), []
    with ncclpy.ProcessGroup(store, 0, 1, device=0, timeout=DEADLINE / 2) as group:
        assert group.admit() == ()
        assert total(group, arrays) == 1
        thread = joins(store, 1, arrays, results)
        testing.wait_for(lambda: asks(store), "the other one")
        assert group.admit() == (1,)
        assert (group.rank, group.size, group.seq) == (0, 2, 0)
        assert total(group, arrays) == 3
        thread.join(DEADLINE)
    assert results == [(1, 2, "default", 3)]


@pytest.mark.parametrize("check", ["off", "always"])
def test_two_join_three(host_engine, check):
    store, results, arrays = LocalStore(), [], testing.arrays()

    def joined(device):
        with ncclpy.ProcessGroup.join(store, device=device, timeout=DEADLINE / 2, check=check) as group:
            results.append(together(group))

    def together(group):
        """Run the checks of all five ranks, old and new."""
        found = total(group, arrays)
        group.barrier().wait(DEADLINE)
        assert group.admit() == ()
        return group.size, found, total(group, arrays)

    def body(group):
        for _ in range(3):
            assert total(group, arrays) == 6
        if group.rank == 0:
            threads.extend(threading.Thread(target=joined, args=(device,), daemon=True) for device in (3, 4))
            for thread in threads:
                thread.start()
            testing.wait_for(lambda: asks(store) == 2, "both")
        group.store.barrier("both", group.rank, 3, DEADLINE)
        before = group.rank
        assert group.admit() == (3, 4)
        assert group.rank == before
        return together(group)

    threads = []
    assert run_groups(3, body, store=store, check=check) == [(5, 15, 15)] * 3
    for thread in threads:
        thread.join(DEADLINE)
    assert results == [(5, 15, 15)] * 2
    assert not store.keys("ncclpy/joining/default/asks")


def test_rank_that_hears_of_end_before_meeting_continues_with_others(host_engine, monkeypatch):
    """A rank that has moved on ends the old group; a rank that reads the store slowly has still met it."""
    awaits, slow = RankRendezvous._await, []

    def await_slowly(self, keys, deadline, number, wanted, *others, **named):
        if self.rank == 1 and "admit/0" in keys[0] and not slow:
            slow.append(testing.wait_for(lambda: not wanted(), "the news that the group has ended"))
        return awaits(self, keys, deadline, number, wanted, *others, **named)

    def body(group):
        if group.rank == 0:
            threads.append(joins(store, 2, testing.arrays(), results))
            testing.wait_for(lambda: asks(store), "the third one")
        group.store.barrier("all are there", group.rank, 2, DEADLINE)
        assert group.admit() == (2,)
        return group.rank, group.size, total(group, testing.arrays())

    monkeypatch.setattr(RankRendezvous, "_await", await_slowly)
    store, results, threads = LocalStore(), [], []
    assert run_groups(2, body, store=store) == [(0, 3, 6), (1, 3, 6)]
    threads[0].join(DEADLINE)
    assert results == [(2, 3, "default", 6)] and slow


@pytest.mark.parametrize("who", [0, 1])
def test_rank_interrupted_in_admit_does_not_continue_alone(host_engine, monkeypatch, who):
    """The others have moved on with the new rank and wait for the interrupted one: it must not form a second group."""
    gathers, others_moved = GroupStatus.gather, threading.Event()

    def gather_and_leave(self, name, *arguments):
        met = gathers(self, name, *arguments)
        if name == "admit/0" and self.size == 2 and self.rank == who:
            assert others_moved.wait(DEADLINE)
            raise KeyboardInterrupt
        return met

    def body(group):
        if group.rank == 0:
            threads.append(joins(store, 2, testing.arrays(), results))
            testing.wait_for(lambda: asks(store), "the third one")
        group.store.barrier("all are there", group.rank, 2, DEADLINE)
        if group.rank == who:
            with pytest.raises((KeyboardInterrupt, ncclpy.NcclError)):
                group.admit()
            with pytest.raises(ncclpy.NcclError, match=f"continued with new ranks, without rank {who}"):
                group.recover(SHORT)
            return None
        with pytest.raises(ncclpy.NcclTimeout):  # the interrupted rank has met the others, and does not continue
            group.admit(timeout=1)
        return None

    def decide(*arguments):
        decides(*arguments)
        others_moved.set()

    decides = membership.decide_to_move
    monkeypatch.setattr(membership, "decide_to_move", decide)
    monkeypatch.setattr(GroupStatus, "gather", gather_and_leave)
    store, results, threads = LocalStore(), [], []
    run_groups(2, body, store=store)
    threads[0].join(DEADLINE)
    assert len(results) == 1 and isinstance(results[0], ncclpy.NcclError), results


def left_of_meetings(store):
    """Return the number of keys of rendezvous in `admit`."""
    return sum("/admit/" in key for key in store.keys())


def test_admit_without_joiners_leaves_nothing_in_store(host_engine):
    def body(group):
        for _ in range(3):
            group.admit()
        group.store.barrier("thrice", group.rank, 2, DEADLINE)
        before = left_of_meetings(group.store)
        group.store.barrier("counted", group.rank, 2, DEADLINE)
        for _ in range(20):
            assert group.admit() == ()
        group.store.barrier("more", group.rank, 2, DEADLINE)
        assert left_of_meetings(group.store) <= before

    run_groups(2, body)


def test_joiner_that_missed_its_invitation_asks_again(host_engine):
    """The joiner was stopped, for instance, when it was invited, and the group has forgotten it."""
    store, results, arrays = LocalStore(), [], testing.arrays()
    with ncclpy.ProcessGroup(store, 0, 1, device=0, timeout=DEADLINE / 2) as group:
        thread = joins(store, 1, arrays, results)
        testing.wait_for(lambda: asks(store), "it")
        for key in store.keys("ncclpy/joining/default/asks/"):
            store.delete(key)
        while not group.admit():
            time.sleep(0.05)
        assert total(group, arrays) == 3
        thread.join(DEADLINE)
    assert results == [(1, 2, "default", 3)]


def test_admit_waits_for_begun_operations(host_engine):
    store, results, arrays = LocalStore(), [], testing.arrays()

    def body(group):
        if group.rank == 0:
            joins(store, 2, arrays, results)
            testing.wait_for(lambda: asks(store), "it")
        group.store.barrier("it asks", group.rank, 2, DEADLINE)
        works = [group.all_reduce(np.ones(1 << 16)) for _ in range(5)]
        group.admit()
        assert all(work.result()[0] == 2 for work in works)
        assert total(group, arrays) == 6

    run_groups(2, body, store=store)


def test_admit_times_out_on_unfinished_operations(host_engine):
    def body(group):
        group.barrier().wait(DEADLINE)
        if group.rank == 0:
            work = group.all_reduce(np.ones(1))
            with pytest.raises(ncclpy.NcclTimeout, match=r"1 operations are not done .* nothing has changed"):
                group.admit(0.2)
            return work.result(DEADLINE)[0]
        time.sleep(0.5)
        return group.all_reduce(np.ones(1)).result(DEADLINE)[0]

    assert run_groups(2, body) == [2, 2]


def test_failed_admit_counts_on_all_ranks(host_engine):
    """Rank 0 has missed the rendezvous at which rank 1 waited; the next call of both meets."""

    def body(group):
        group.barrier().wait(DEADLINE)
        work = group.send(np.ones(1), 1) if group.rank == 0 else None
        with pytest.raises(ncclpy.NcclTimeout, match=r"are not done|rank 0 of 2 did not arrive"):
            group.admit(0.2)
        if group.rank == 1:
            work = group.recv(np.ones(1), 0)
        work.wait(DEADLINE)
        return group.admit(DEADLINE / 2)

    assert run_groups(2, body) == [(), ()]


def test_rank_missing_from_admit_is_named(host_engine):
    """The joiner gets an error, and the group is unchanged."""
    store, results, arrays = LocalStore(), [], testing.arrays()

    def body(group):
        group.barrier().wait(DEADLINE)
        if group.rank == 0:
            thread = joins(store, 2, arrays, results)
            testing.wait_for(lambda: asks(store), "it")
            with pytest.raises(ncclpy.NcclTimeout, match=r"rank 1 of 2 did not arrive at admit/0 of process group"):
                group.admit(0.5)
            thread.join(DEADLINE)
        group.store.barrier("tried", group.rank, 2, DEADLINE)
        return total(group, arrays)

    assert run_groups(2, body, store=store) == [3, 3]
    assert "has not admitted this process: rank 1 of 2 did not arrive" in str(results[0])


@pytest.mark.parametrize("kind", ["local", "file", "tcp"])
def test_join_times_out_without_admit(host_engine, tmp_path, kind):
    served = TCPStore("127.0.0.1", 0, serve=True, linger=0) if kind == "tcp" else None
    store = served or (LocalStore() if kind == "local" else FileStore(tmp_path / "store"))
    with pytest.raises(ncclpy.NcclTimeout, match=r"process group 'x y' has not admitted this process within 500 ms"):
        ncclpy.ProcessGroup.join(store, "x y", timeout=SHORT, device=0)
    assert not store.keys("ncclpy/joining/x%20y/asks")
    store.close()


def test_joiner_that_died_before_admit_is_not_waited_for(host_engine):
    served = TCPStore("127.0.0.1", 0, serve=True, linger=0)
    theirs = TCPStore("127.0.0.1", served.port)
    with ncclpy.ProcessGroup(served, 0, 1, device=0) as group:
        joiner = Joiner(theirs, "default", "ncclpy:0:00:other:Store/")
        joiner._put("asks", b"ncclpy:0:00:other:Store/")
        assert Admitter(served, "default").invite(SHORT, lambda: True) == {}  # it does not answer the invitation
        theirs.close()
        testing.wait_for(lambda: asks(served) == 0, "its end")
        assert group.admit() == ()
        assert group.all_reduce(np.ones(1)).result()[0] == 1
    served.close()


def test_recover_after_joiner_died_in_join(host_engine, monkeypatch):
    """The joiner is admitted, and does not come to the rendezvous of the new group."""
    store, arrays, results = LocalStore(), testing.arrays(), []
    wait = Joiner.wait

    def torn(self, timeout):
        wait(self, timeout)
        raise SystemError("it is gone")

    monkeypatch.setattr(Joiner, "wait", torn)

    def body(group):
        if group.rank == 0:
            joins(store, 2, arrays, results)
            testing.wait_for(lambda: asks(store), "it")
        group.store.barrier("it asks", group.rank, 2, DEADLINE)
        with pytest.raises(ncclpy.NcclTimeout, match="rank 2 of 3 did not arrive at the reconfiguration"):
            group.admit(0.5)
        found = group.recover(0.5)
        assert found.survivors == (0, 1)
        return total(group, arrays)

    assert run_groups(2, body, store=store) == [3, 3]
    assert isinstance(results[0], SystemError)


def test_rank_interrupted_in_welcome_remains_member(host_engine, monkeypatch):
    """Rank 0 is interrupted when the others may have moved on: they hear of it, and no rank continues alone."""
    store, arrays, results = LocalStore(), testing.arrays(), []

    def torn(self, joiners, *_):
        if joiners:
            raise KeyboardInterrupt

    def body(group):
        if group.rank == 0:
            joins(store, 2, arrays, results)
            testing.wait_for(lambda: asks(store), "it")
            monkeypatch.setattr(Admitter, "welcome", torn)
        group.store.barrier("it asks", group.rank, 2, DEADLINE)
        with pytest.raises(KeyboardInterrupt if group.rank == 0 else ncclpy.NcclError):
            group.admit(5.0)
        assert group.size == 3
        assert group.recover(0.5).survivors == (0, 1)
        return total(group, arrays)

    assert run_groups(2, body, store=store) == [3, 3]


def test_invalid_join_arguments_are_refused(host_engine):
    for wrong in ("", None, 3):
        with pytest.raises(ValueError, match="name: expected a text"):
            ncclpy.ProcessGroup.join(LocalStore(), wrong)
    for given in ("rank", "size"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{given}'"):
            ncclpy.ProcessGroup.join(LocalStore(), **{given: 1})
    group = ncclpy.ProcessGroup(LocalStore(), 0, 1, device=0)
    group.close()
    with pytest.raises(ValueError, match="is closed"):
        group.admit()


def test_fewer_and_more_again(tmp_path):
    """A rank is killed, the others continue, and a new process takes its place."""
    size = 2
    testing.need_processes(size)
    codes, said = run_ranks(
        tmp_path,
        size,
        """
        import subprocess, sys, testing
        lib = testing.arrays()
        def total():
            array = lib.make(np.full(4, group.rank + 1.0), group.device)
            group.all_reduce(lib.argument(array)).wait(60)
            return float(lib.read(array)[0])

        if "JOINS" in os.environ:
            from ncclpy.bootstrap import rendezvous
            place, store = rendezvous()
            group = ncclpy.ProcessGroup.join(store, timeout=60, device=testing.device_of(place.local_rank))
        else:
            group = ncclpy.init_process_group(timeout=60)
            total()
            group.store.barrier("all are done", group.rank, group.size)
            if group.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                total()
            except ncclpy.NcclError:
                print("recovered:", group.recover(30), total(), flush=True)
            environment = {**os.environ, "JOINS": "1", "RANK": "1", "LOCAL_RANK": "1"}
            child = subprocess.Popen([sys.executable, __file__], env=environment)
            while not group.admit():
                time.sleep(0.05)
        print(f"rank {group.rank} of {group.size} {total()}", flush=True)
        group.close()
        if "JOINS" not in os.environ:
            assert child.wait(60) == 0
        """,
    )
    assert codes == [0, -9], said
    assert "recovered: Recovery(survivors=(0,), lost=(1,), last_finished=0) 1.0" in said, said
    assert "rank 0 of 2 3.0" in said and "rank 1 of 2 3.0" in said, said
