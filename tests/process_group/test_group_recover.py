"""recover: a group continues without lost ranks: its survivors, their knowledge, and that only one group continues."""

from __future__ import annotations

import re
import threading
import time

import numpy as np
import pytest
from group_ranks import DEADLINE
from warm_ranks import run_ranks

import ncclpy
import testing
from ncclpy.bootstrap import FileStore, LocalStore, StoreError, TCPStore
from ncclpy.bootstrap.rank_rendezvous import RankRendezvous
from ncclpy.process_group.group_status import GroupStatus
from ncclpy.process_group.recovery import PreviousMembership, decide

#: Seconds that survivors wait for ranks that may still come.
SHORT = 0.5


class Ranks:
    """Groups in one process, each with its own client of one store: closing the client ends the rank's lease."""

    def __init__(self, size, **options):
        testing.need_devices(size)
        self.served = TCPStore("127.0.0.1", 0, serve=True, linger=0)
        self.stores = [TCPStore("127.0.0.1", self.served.port) for _ in range(size)]
        options.setdefault("timeout", DEADLINE / 2)
        self.groups = [
            ncclpy.ProcessGroup(store, rank, size, device=rank, **options) for rank, store in enumerate(self.stores)
        ]

    def each(self, call, ranks=None):
        """Return the result or the exception of a call on each of some ranks, each in a thread."""
        ranks = range(len(self.groups)) if ranks is None else ranks

        def run(which):
            try:
                return call(self.groups[ranks[which.rank]])
            except Exception as error:
                return error

        return testing.run_threads(len(ranks), run, DEADLINE)

    def sums(self, ranks=None):
        return self.each(lambda group: group.all_reduce(np.full(1, group.rank + 1.0)).result(DEADLINE)[0], ranks)

    def kill(self, rank):
        """End a rank like the end of its process: its lease, and its part in running operations."""
        self.stores[rank].close()
        if self.groups[rank].communicator is not None:
            self.groups[rank].communicator.abort()

    def close(self):
        for group in self.groups:
            if group.error is None:
                group.abort("the test is over")
            group.close()
        for store in [*self.stores, self.served]:
            store.close()


@pytest.fixture
def ranks(host_engine, caplog):
    made = []

    def make(size, **options):
        made.append(Ranks(size, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def recover(seconds=DEADLINE / 4, least=1):
    return lambda group: group.recover(seconds, least)


# Survivors.


@pytest.mark.parametrize("gone", [(3,), (0,), (1, 2), (0, 1, 2)], ids=str)
def test_survivors_continue(ranks, gone):
    four = ranks(4)
    assert four.sums() == [10] * 4
    for rank in gone:
        four.kill(rank)
    left = [rank for rank in range(4) if rank not in gone]
    begun = time.monotonic()
    found = four.each(recover(), left)
    assert time.monotonic() - begun < DEADLINE / 4  # dead ranks are not waited for
    assert [(each.survivors, each.lost, each.last_finished) for each in found] == [(tuple(left), gone, 0)] * len(left)
    assert [four.groups[rank].rank for rank in left] == list(range(len(left)))
    assert four.sums(left) == [sum(range(1, len(left) + 1))] * len(left)
    assert {four.groups[rank].seq for rank in left} == {1}


def test_pending_operation_ends_and_survivors_continue(ranks):
    three = ranks(3)
    three.sums()
    works = three.each(lambda group: group.all_reduce(np.ones(4)), [0, 2])
    three.kill(1)
    for work in works:
        assert isinstance(work.exception(DEADLINE), ncclpy.NcclError)
    three.each(recover(), [0, 2])
    assert three.sums([0, 2]) == [3, 3]


@pytest.mark.parametrize("what", ["admit", "split"])
def test_meeting_with_dead_rank_ends(ranks, what):
    """Without operations in flight no communicator reports the death; the group's timeout would take half a minute."""
    three = ranks(3)
    assert three.sums() == [6] * 3
    threading.Timer(0.2, three.kill, [1]).start()
    errors = three.each(lambda group: group.admit() if what == "admit" else group.split(0), [0, 2])
    for error in errors:
        assert isinstance(error, ncclpy.NcclRemoteError), error
        assert re.search("rank 1 (of process group 'default' )?is gone", str(error)), error
    assert three.each(lambda group: group.recover(SHORT).survivors, [0, 2]) == [(0, 2)] * 2
    assert three.sums([0, 2]) == [3] * 2


def test_healthy_group_recovers_to_same_ranks(ranks):
    three = ranks(3)
    assert three.sums() == [6] * 3
    found = three.each(recover())
    assert [(each.survivors, each.lost) for each in found] == [((0, 1, 2), ())] * 3
    assert three.sums() == [6] * 3


def test_repeated_recovery(ranks):
    four = ranks(4)
    for gone in range(3):
        four.kill(gone)
        left = list(range(gone + 1, 4))
        found = four.each(recover(), left)
        assert [each.survivors for each in found] == [tuple(range(1, len(left) + 1))] * len(left)
        assert four.sums(left) == [sum(range(1, len(left) + 1))] * len(left)


def test_missing_rank_is_lost_and_hears_it_when_late(ranks):
    three = ranks(3)
    three.sums()
    found = three.each(recover(SHORT), [0, 2])
    assert [(each.survivors, each.lost) for each in found] == [((0, 2), (1,))] * 2
    with pytest.raises(
        ncclpy.NcclError, match=r"process group 'default' continues without rank 1: ranks 0, 2 of 3 decided so"
    ) as caught:
        three.groups[1].recover(DEADLINE)
    assert three.groups[1].error is caught.value
    with pytest.raises(ncclpy.NcclAborted, match="continues without rank 1"):
        three.groups[1].barrier()
    assert three.sums([0, 2]) == [3, 3]


def test_too_few_survivors_do_not_continue(ranks):
    four = ranks(4)
    four.sums()
    for gone in (1, 2):
        four.kill(gone)
    for error in four.each(recover(SHORT, 3), [0, 3]):
        assert "process group 'default' is not recovered: 2 of its 4 ranks arrived" in str(error)
        assert "(ranks 0, 3), and min_size=3 requires more" in str(error)
    assert four.groups[0].error is not None
    found = four.each(recover(SHORT, 2), [0, 3])  # the next call decides anew
    assert [each.survivors for each in found] == [(0, 3)] * 2
    assert four.sums([0, 3]) == [3, 3]


def test_rank_that_dies_after_decision_is_lost_too(ranks, monkeypatch):
    """Rank 2 takes part in the decision, and dies before the rendezvous of the new group."""
    four = ranks(4)
    four.sums()
    four.kill(1)
    died = []

    def torn(store, name, rank, size, device, look, place=None):
        if rank == 1 and not died:
            died.append(rank)
            four.kill(2)
            raise SystemError("it is gone")
        return GroupStatus(store, name, rank, size, device, look, place)

    monkeypatch.setattr("ncclpy.process_group.lifecycle.GroupStatus", torn)
    found = four.each(recover(), [0, 2, 3])
    assert died and isinstance(found[1], SystemError)
    assert [each.survivors for each in (found[0], found[2])] == [(0, 3)] * 2
    assert four.sums([0, 3]) == [3, 3]


def test_recovery_reports_last_operation_finished_by_all(ranks):
    """Rank 0 has begun two more operations than rank 1, and finished neither."""
    three = ranks(3)
    three.sums()
    three.sums()
    three.each(lambda group: group.send(np.ones(1), 1) if group.rank == 0 else group.recv(np.ones(1), 0), [0, 1])
    pending = [three.groups[0].all_reduce(np.ones(1)) for _ in range(2)]
    assert [each.last_finished for each in three.each(recover(SHORT), [0, 1])] == [1, 1]
    assert all(isinstance(work.exception(DEADLINE), ncclpy.NcclAborted) for work in pending)
    assert [each.last_finished for each in three.each(recover(SHORT), [0, 1])] == [None, None]  # nothing since


def test_group_with_on_error_report_recovers(ranks):
    three = ranks(3, on_error="report")
    three.sums()
    assert isinstance(three.groups[0].all_reduce(np.ones(1), timeout=0.2).exception(DEADLINE), ncclpy.NcclTimeout)
    three.each(recover(SHORT), [0, 2])
    assert three.sums([0, 2]) == [3, 3]


def test_survivors_continue_in_one_group_only(ranks):
    """All ranks come at once, each with less patience than the others need; all that continue are in one group."""
    for seconds in (0.0, 0.01, 0.05):
        four = ranks(4)
        four.sums()

        def come(group, seconds=seconds):
            time.sleep(0.02 * group.rank)
            return group.recover(seconds)

        found = four.each(come)
        gone_on = [each for each in found if not isinstance(each, Exception)]
        assert len({each.survivors for each in gone_on}) <= 1
        if not gone_on:  # on a busy machine no rank may have met the others in so short a time
            continue
        survivors = gone_on[0].survivors
        assert survivors == tuple(rank for rank, each in enumerate(found) if not isinstance(each, Exception))
        for rank, each in enumerate(found):
            if rank not in survivors:
                assert f"continues without rank {rank}" in str(each)
        assert four.sums(list(survivors)) == [sum(range(1, len(survivors) + 1))] * len(survivors)


# Ends of recover().


def test_lost_store_is_named_in_error(ranks):
    two = ranks(2)
    two.sums()
    two.served.close()
    for error in two.each(recover(SHORT)):
        assert re.search(r"rank \d of process group 'default' cannot recover it: the store is gone", str(error))
        assert "Use a store that outlives each rank" in str(error)
        assert isinstance(error.__cause__, StoreError)


def test_close_ends_recover(ranks):
    two = ranks(2)
    two.sums()
    timer = threading.Timer(0.2, lambda: two.groups[0].close())
    timer.start()
    with pytest.raises((ncclpy.NcclAborted, ValueError)):
        two.groups[0].recover(DEADLINE)
    timer.join()


@pytest.mark.parametrize("meets", [False, True], ids=["while they decide", "where they meet"])
def test_abort_during_recover_is_final(ranks, monkeypatch, meets):
    """Ranks do not repeat the decision for ever because of a rank that another thread has aborted."""
    three = ranks(3)
    three.sums()
    some = [0, 1, 2] if meets else [0, 1]  # rank 2 is waited for
    gather, aborted, come = GroupStatus.gather, threading.Event(), threading.Event()

    def late(self, *arguments):
        if self.rank == 1:
            come.set()
        if self.rank == 0:
            assert aborted.wait(DEADLINE)
        return gather(self, *arguments)

    def abort():
        assert not meets or come.wait(DEADLINE)  # an earlier abort would be what rank 1 recovers from
        three.groups[1].abort("enough")
        aborted.set()

    monkeypatch.setattr("ncclpy.process_group.group_status.GroupStatus.gather", late)
    timer = threading.Timer(SHORT / 4, abort)
    timer.start()
    found = three.each(recover(SHORT), some)
    timer.join()
    assert isinstance(found[1], ncclpy.NcclAborted)
    if meets:
        assert all("enough" in str(each) for each in found)
        assert "was aborted by rank 1: enough" in str(three.groups[1].error)
    else:
        assert found[0].survivors == (0,)


def test_end_told_during_reconfigure_is_not_lost(ranks, monkeypatch):
    """Rank 0 has moved on and ended the new group before rank 1 returns from reconfigure()."""
    two = ranks(2)
    two.sums()
    listen = GroupStatus.listen

    def slow(self, *arguments):
        listen(self, *arguments)
        if self.rank == 1:
            testing.wait_for(lambda: two.groups[0].error is not None, "the abort", DEADLINE)
            time.sleep(SHORT / 4)

    everyone = [group.reconfigure_handle() for group in two.groups]
    monkeypatch.setattr("ncclpy.process_group.group_status.GroupStatus.listen", slow)

    def on(group):
        group.reconfigure(everyone, uuid="on")
        if group.rank == 0:
            group.abort("gone wrong")

    assert two.each(on) == [None, None]
    assert "was ended by rank 0 of 2: gone wrong" in str(two.groups[1].error)


def test_repeated_recovery_without_operations(ranks):
    three = ranks(3, check="always")

    def often(group):
        return [group.recover(DEADLINE / 4).survivors for _ in range(30)]

    assert three.each(often) == [[(0, 1, 2)] * 30] * 3


class Interrupted(BaseException):
    """The exception of a signal handler."""


def interrupted(group, call):
    try:
        return call(group)
    except Interrupted as error:
        return error


def test_rank_interrupted_before_meeting_retries(ranks, monkeypatch):
    """The interrupted rank calls again, comes to the decided rendezvous, and does not continue alone."""
    three = ranks(3)
    three.sums()
    left, put = [], RankRendezvous._put

    def torn(self, key, value):
        if self.rank == 1 and not left:
            left.append(key)
            raise Interrupted
        return put(self, key, value)

    monkeypatch.setattr("ncclpy.bootstrap.rank_rendezvous.RankRendezvous._put", torn)

    def come(group):
        if group.rank != 1:
            return group.recover(DEADLINE / 4)
        assert isinstance(interrupted(group, recover()), Interrupted)
        return group.recover(DEADLINE / 4)

    assert [each.survivors for each in three.each(come)] == [(0, 1, 2)] * 3
    assert left and three.sums() == [6] * 3


@pytest.mark.parametrize("where", ["close", "listen"])
def test_rank_interrupted_after_meeting_ends_group_on_all(ranks, monkeypatch, where):
    three = ranks(3)
    three.sums()
    everyone = [group.reconfigure_handle() for group in three.groups]
    before, left = getattr(GroupStatus, where), []

    def torn(self, *arguments, **options):
        before(self, *arguments, **options)
        if self.rank == 1 and not left:
            left.append(where)
            raise Interrupted

    monkeypatch.setattr(f"ncclpy.process_group.group_status.GroupStatus.{where}", torn)
    found = three.each(lambda group: interrupted(group, lambda one: one.reconfigure(everyone, uuid="on")))
    assert isinstance(found[1], Interrupted)
    for group in three.groups:
        testing.wait_for(lambda group=group: group.error is not None, "its end", DEADLINE)
        assert "was being reconfigured when Interrupted was raised" in str(group.error)
    assert [each.survivors for each in three.each(recover())] == [(0, 1, 2)] * 3
    assert three.sums() == [6] * 3


def test_bad_arguments_change_nothing(host_engine):
    group = ncclpy.ProcessGroup(LocalStore(), 0, 1, device=0)
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="min_size: expected at least 1"):
            group.recover(1.0, wrong)
    with pytest.raises(TypeError):
        group.recover()
    with pytest.raises(TypeError):
        group.recover(1.0, "2")
    with group.coalescing(), pytest.raises(ValueError, match="leave the block first"):
        group.recover(1.0)
    assert group.error is None
    assert group.recover(1.0).survivors == (0,)
    group.close()
    with pytest.raises(ValueError, match="is closed"):
        group.recover(1.0)


@pytest.mark.parametrize("kind", ["local", "file"])
def test_recover_in_store_without_leases(host_engine, tmp_path, kind):
    store = LocalStore() if kind == "local" else FileStore(tmp_path / "store")
    groups = [ncclpy.ProcessGroup(store, rank, 3, device=rank, timeout=DEADLINE) for rank in range(3)]
    testing.run_threads(3, lambda each: groups[each.rank].barrier().wait(DEADLINE), DEADLINE)
    groups[1].close()  # announces the end in the store
    found = testing.run_threads(2, lambda each: groups[2 * each.rank].recover(DEADLINE / 2), DEADLINE)
    assert [each.survivors for each in found] == [(0, 2)] * 2
    for group in groups:
        group.close()
    store.close()


# The decision alone.


def test_decision_is_unique_for_any_patience():
    """Ranks come at random times with random patience, and some are gone: at most one set of ranks continues."""
    for seed in range(15):
        random = np.random.default_rng(seed)
        size = int(random.integers(2, 8))
        gone = set(np.flatnonzero(random.random(size) < 0.3).tolist())
        delays, patience = random.random(size) * 0.06, random.random(size) * 0.06
        store = LocalStore()

        def come(each, gone=gone, delays=delays, patience=patience, store=store, size=size):
            rank = each.rank
            if rank in gone:
                return None
            time.sleep(delays[rank])
            return decide(store, "x", rank, size, gone.__contains__, 1, patience[rank], lambda: True)

        found = [each for each in testing.run_threads(size, come, DEADLINE) if each is not None]
        assert len({(tuple(members), uuid) for members, uuid in found}) <= 1, seed
        for members, _ in found[:1]:
            assert not gone & set(members), seed


def test_past_is_kept_over_several_recoveries():
    past = PreviousMembership(bool, [0, 1, 2, 3], 4, 7).among([0, 2, 3]).among([1, 2])
    assert past.origin == [2, 3]
    assert past.recovery([7, 5]) == ncclpy.Recovery((2, 3), (0, 1), 5)
    assert past.recovery([7, None]).last_finished is None


# Ranks that are processes.

PROGRAM = """
import testing
lib = testing.arrays()
group = ncclpy.init_process_group(timeout=60)
rank, size = group.rank, group.size
def total():
    array = lib.make(np.full(4, group.rank + 1.0), group.device)
    group.all_reduce(lib.argument(array)).wait(60)
    return float(lib.read(array)[0])
total()
group.store.barrier("all are done", rank, size)
begun = time.monotonic()
if rank == {victim}:
    {dies}
try:
    if rank != {victim}:
        total()
        print("rank", rank, "heard of nothing", flush=True)
except ncclpy.NcclError as error:
    print("rank", rank, "heard:", error, flush=True)
found = group.recover({patience})
print("rank", rank, "goes on:", found.survivors, found.lost, found.last_finished, total(), flush=True)
group.close()
"""


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("victim", [0, 1])
def test_recover_after_kill(tmp_path, size, victim):
    testing.need_processes(size)
    program = PROGRAM.format(victim=victim, dies="os.kill(os.getpid(), signal.SIGKILL)", patience=30)
    codes, said = run_ranks(tmp_path, size, program)
    assert codes == [-9 if rank == victim else 0 for rank in range(size)], said
    left = [rank for rank in range(size) if rank != victim]
    for rank in left:
        assert f"rank {rank} heard: " in said, said
        assert f"rank {rank} goes on: {tuple(left)} ({victim},) 0 {float(sum(range(1, size)))}" in said, said


def test_recover_after_stop(tmp_path):
    """A stopped process is lost after the patience of the others, and gets that error when it continues."""
    size = 2
    testing.need_processes(size)
    stops = "group.store.set('stops', b'%d' % os.getpid()); os.kill(os.getpid(), signal.SIGSTOP)"
    program = PROGRAM.format(victim=1, dies=stops, patience=0.5).replace(
        "group.close()",
        "os.kill(int(group.store.get('stops')), signal.SIGCONT) if rank == 0 else None\n"
        "group.store.get('told', 60) if rank == 0 else None\n"
        "group.close()",
    )
    program = program.replace("found = group.recover(0.5)", "found = recovered(group)").replace(
        "rank, size = group.rank",
        "def recovered(group):\n"
        "    try:\n"
        "        return group.recover(0.5)\n"
        "    except ncclpy.NcclError as error:\n"
        "        print('rank', rank, 'is left behind:', error, flush=True)\n"
        "        group.store.set('told', b'')\n"
        "        raise SystemExit(0)\n"
        "rank, size = group.rank",
        1,
    )
    program = program.replace(
        "total()\n        print",
        "mine = lib.make(np.ones(4), group.device)\n"
        "        group.all_reduce(lib.argument(mine), timeout=0.5).wait(60)\n        print",
    )
    codes, said = run_ranks(tmp_path, size, program)
    assert codes == [0, 0], said
    assert "rank 0 goes on: (0,) (1,) 0 1.0" in said, said
    assert "rank 1 is left behind: process group 'default' continues without rank 1" in said, said
