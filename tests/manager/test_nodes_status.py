"""Which rank is at fault: where processes of a Manager have a store, an error says what all their ranks are doing."""

from __future__ import annotations

import gc
import re
import textwrap
import threading
import time

import numpy as np
import pytest
from group_fixtures import IN_A_STORE
from warm_ranks import run_ranks

import ncclpy
import testing
from ncclpy.bootstrap import LocalStore, StoreError
from ncclpy.manager import gathering
from ncclpy.peers import communicator_status, inquiry

#: Three processes, each with a rank; the last one does something else instead of the second collective.
PROGRAM = (
    IN_A_STORE
    + """
if rank == 0:
    store.set('key', ncclpy.Manager.generate_communicator_key())
key = store.get('key')
manager = ncclpy.Manager(timeout=60, store=store)

def reduce(name, count, **options):
    array = lib.argument(lib.make(np.ones(count, np.float32), device))
    numbers = {'num_local': 1, 'num_global': size, 'global_rank': rank, 'communicator_key': key}
    work = manager.all_reduce(name, array, device=device, **numbers, **options)
    manager.signal_multi_node_ready(name)
    return work

reduce('first', 2).wait(60)

def begins():  # what rank 2 does instead, before the others' short deadlines
    store.set('it has begun', b'')
"""
)
TOLD = "have_told('ncclpy/manager/')\n"

#: What the other two ranks do then.
TROUBLE = """
store.get('it has begun')
work = reduce('second', 1024, timeout=0.5 + 0.3 * rank)
store.set(f'rank {rank} waits', b'')
error = work.exception(30)
states = [each.state for each in error.ranks]
print('rank', rank, 'has', type(error).__name__, states, '|', error, '|', flush=True)
store.barrier('both have failed', rank, 2)
manager.close()
"""

WHAT = {
    "late": (
        "def sleeps():\n    begins()\n    time.sleep(40)\nsleeps()",
        "idle",
        "rank 2 has finished all_reduce #0 and is in no operation since ",
    ),
    "holds the GIL": (
        "import ctypes\nsleep = ctypes.PyDLL(None).sleep\nbegins()\nsleep(40)",
        "unresponsive",
        "rank 2 does not answer, and the process lives: "
        "its Python does not run (the GIL is held), last heard of after all_reduce #0",
    ),
    "stopped": (
        "begins()\nos.kill(os.getpid(), signal.SIGSTOP)",
        "stopped",
        "rank 2's process is stopped (by SIGSTOP or a debugger), last heard of after all_reduce #0",
    ),
    "closed": (
        "manager.close()\nbegins()\ntime.sleep(40)",
        "closed",
        "rank 2 has closed the communicator after all_reduce #0",
    ),
    "killed": (
        # Its end is noticed at once, before any deadline.
        "begins()\nstore.get('rank 0 waits')\nstore.get('rank 1 waits')\nos.kill(os.getpid(), signal.SIGKILL)",
        "ended",
        "rank 2's process has ended, last heard of after all_reduce #0",
    ),
    "another operation": (
        "array = lib.argument(lib.make(np.ones(4, np.float32), device))\n"
        "work = manager.broadcast_send('cast', array, device=device,\n"
        "    num_local=1, num_global=3, global_rank=2, root=2, communicator_key=key)\n"
        "manager.signal_multi_node_ready('cast')\n"
        "work.wait(60)  # a root does not wait for the other ranks\n"
        "begins()\ntime.sleep(40)",
        "idle",
        "rank 2 has finished broadcast #1 and is in no operation since ",
    ),
    "gathers": (
        "manager.all_reduce('second', lib.argument(lib.make(np.ones(1024, np.float32), device)), device=device,\n"
        "    num_local=1, num_global=3, global_rank=2, communicator_key=key)\n"
        "begins()\ntime.sleep(40)  # and no signal",
        "running",
        "ranks 0-2 wait in all_reduce #1 since ",
    ),
}


@pytest.mark.parametrize("what", WHAT)
def test_error_says_what_the_other_process_does(tmp_path, what):
    """The first rank in trouble asks; the other one, with a later deadline, reports the same."""
    testing.need_processes(3)
    does, state, said = WHAT[what]
    program = PROGRAM + TOLD + "if rank == 2:\n" + textwrap.indent(does, "    ") + "\n    os._exit(0)\n" + TROUBLE
    if what == "killed":  # its end is noticed long before any deadline
        program = program.replace("timeout=0.5", "timeout=30")
    if state == "unresponsive":  # such a rank is waited for as long as it takes to be sure
        program = program.replace("reports.PATIENCE = 1.5", "reports.PATIENCE = 0.3")
    output = run_ranks(tmp_path, 3, program, only=[0, 1])[1]
    lines = sorted(line for line in output.splitlines() if " has Nccl" in line)
    assert len(lines) == 2, output
    for line in lines:
        kind, text = line.partition(" has ")[2].split(" | ")[:2]
        assert kind.endswith(f"['running', 'running', '{state}']"), line
        assert said in text, line
        head, found, tail = text.partition(" of communicator '")
        subjects = "all_reduce #1 (float32 x 1,024, sum)", "broadcast #1 (float32 x 4, root 2)"
        assert found and head.endswith(subjects[: 2 if what == "another operation" else 1]), line
        if what != "gathers":
            waits = r"ranks 0-1 (wait|are) in all_reduce #1 .*since [0-9.]+ m?s"  # the asking rank comes last
            assert re.match(rf"[0-9a-f]{{8}}': (rank 2.*; {waits}|{waits}; rank 2)", tail), line
        called = r"\. Python of rank 2: \S+:\d+ in sleeps, called by \S+:\d+ in "
        assert ("Python of" in text) == (state == "idle") and (what != "late" or re.search(called, text)), line
        assert "ncclpy.recorder.dump()" not in text, "advice to find out what is said here"
    assert len({line.partition(" of communicator '")[2] for line in lines}) == 1, "both say the same"


def test_idle_rank_raises_the_failure_in_its_next_call(tmp_path):
    """Rank 2 is killed; rank 0, which was in no operation then, does not wait for ranks that have failed."""
    testing.need_processes(3)
    program = (
        PROGRAM
        + TOLD
        + """
if rank == 2:
    store.get('rank 1 waits')
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 1:
    work = reduce('second', 4)
    store.set('rank 1 waits', b'')
    work.exception(30)
    store.set('rank 1 has failed', b'')
else:
    store.get('rank 1 has failed', 60)
    testing.wait_for(lambda: manager.stats()['communicators'] == 0, 'rank 0 to be told')
begun = time.monotonic()
works = [work] if rank == 1 else [reduce('second', 4), reduce('third', 4)]
for work in works:
    error = work.exception(40)
    print('rank', rank, 'has', type(error).__name__, time.monotonic() - begun < 20, '|', error, '|', flush=True)
store.barrier('both have failed', rank, 2)
manager.close()
"""
    )
    output = run_ranks(tmp_path, 3, program, only=[0, 1])[1]
    lines = [line for line in output.splitlines() if " has Nccl" in line]
    assert [line.partition(" |")[0] for line in sorted(lines)] == [
        *["rank 0 has NcclRemoteError True"] * 2,
        "rank 1 has NcclRemoteError True",
    ], output
    assert all("rank 2's process has ended" in line for line in lines), output


def test_closed_managers_leave_nothing_behind(tmp_path):
    """The thread and the watch of each communicator end with it; its entries in the store end with its last rank."""
    testing.need_processes(2)
    output = run_ranks(
        tmp_path,
        2,
        PROGRAM
        + """
import threading
assert any(each.name == 'ncclpy-watch' for each in threading.enumerate())
assert any('status/' in name for name in store.keys('ncclpy/manager/'))
store.barrier('all have seen', rank, size)
manager.close()
store.barrier('all have closed', rank, size)
testing.wait_for(lambda: not any('status/' in name for name in store.keys('ncclpy/manager/')), 'the last to go')
left = {name.rpartition('/')[0].rpartition('/')[2] for name in store.keys('ncclpy/manager/')}
assert left <= {'been', 'alive'}, left
ours = 'ncclpy-watch', 'ncclpy-leave'
testing.wait_for(lambda: not [each.name for each in threading.enumerate() if each.name in ours], 'threads')
print('rank', rank, 'has left nothing', flush=True)
store.barrier('all are done', rank, size)
""",
    )[1]
    assert output.count("has left nothing") == 2, output


# Managers as of several processes, in threads of one process: stores that fail.


class Stuck(LocalStore):
    """A store in which no operation ends once it is stuck, or which cannot be watched."""

    stuck = False
    watched = True

    def _compare_set(self, key, expected, desired, deadline):
        while self.stuck and time.monotonic() < deadline:
            time.sleep(0.01)
        return super()._compare_set(key, expected, desired, deadline)

    def _watch(self, prefix):
        if not self.watched:
            raise StoreError("this store cannot be watched")
        return super()._watch(prefix)


def one_of(manager, rank, key, name, *, count=4, size=2, **options):
    lib = testing.arrays()
    array = lib.argument(lib.make(np.ones(count, np.float32), rank))
    numbers = {"num_local": 1, "num_global": size, "global_rank": rank, "communicator_key": key}
    work = manager.all_reduce(name, array, device=rank, **numbers, **options)
    manager.signal_multi_node_ready(name)
    return work


def one_stays_away(store, meanwhile=lambda: None):
    """Return the error of a Manager when the other one does not join the second collective; and both Managers."""
    managers, key = two_managers(store)
    meanwhile()
    return one_of(managers[0], 0, key, "second", timeout=0.3).exception(30), managers


def close(managers):
    for manager in managers:
        manager.close()


def test_store_that_cannot_be_watched_still_answers():
    store = Stuck()
    store.watched = False
    error, managers = one_stays_away(store)
    close(managers)
    assert [each.state for each in error.ranks] == ["running", "idle"], error
    assert "rank 1 has finished all_reduce #0 and is in no operation since" in str(error)


def test_idle_rank_can_use_a_new_key_after_the_failure():
    managers, key = two_managers(LocalStore())
    assert isinstance(one_of(managers[0], 0, key, "second", timeout=0.3).exception(30), ncclpy.NcclTimeout)
    testing.wait_for(lambda: managers[1].stats()["communicators"] == 0, "rank 1 to be told")
    for name in ("second", "third"):
        error = one_of(managers[1], 1, key, name).exception(20)
        assert type(error) is ncclpy.NcclTimeout and "was ended by rank 0 of 2: " in str(error), error
    new = ncclpy.Manager.generate_communicator_key()
    for work in [one_of(manager, rank, new, "fourth") for rank, manager in enumerate(managers)]:
        work.wait(30)
    close(managers)


def test_lost_store_is_reported():
    store = LocalStore()
    error, managers = one_stays_away(store, store.close)
    close(managers)
    assert isinstance(error, ncclpy.NcclTimeout) and error.ranks is None
    assert "its communicator is aborted. What the other ranks do is not known: " in str(error)


@pytest.mark.parametrize("case", ["ranks disagree", "a rank stays away"])
def test_closed_managers_leave_nothing_in_the_store_after_a_failure(host_engine, case):
    store = LocalStore()
    if case == "ranks disagree":
        managers, key = two_managers(store)
        works = [one_of(manager, rank, key, "second", count=4 + rank) for rank, manager in enumerate(managers)]
        assert all(isinstance(work.exception(30), ncclpy.NcclError) for work in works)
    else:
        error, managers = one_stays_away(store)
        assert isinstance(error, ncclpy.NcclTimeout)
    close(managers)
    assert store.keys("ncclpy/manager/") == []


def test_stuck_store_delays_no_abort(monkeypatch):
    monkeypatch.setattr(inquiry, "_ANSWER_TIMEOUT", 0.25)
    store = Stuck(60.0)

    def stick():
        store.stuck = True

    error, managers = one_stays_away(store, stick)
    assert isinstance(error, ncclpy.NcclTimeout) and error.ranks is None
    assert testing.without_line(str(error)).endswith(
        "its communicator is aborted. What the other ranks do is not known: the store has not answered within 0.25 s"
    )
    assert managers[0].stats()["communicators"] == 0
    done = threading.Event()
    closing = threading.Thread(target=lambda: (close(managers), done.set()), daemon=True)
    closing.start()
    assert done.wait(30), "to close does not wait for the store"
    store.stuck = False
    closing.join()


def test_defect_in_asking_does_not_prevent_the_end(monkeypatch, caplog):
    from ncclpy.peers.communicator_status import CommunicatorStatus

    def torn(*_):
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr(CommunicatorStatus, "inquire", torn)
    error, managers = one_stays_away(LocalStore())
    close(managers)
    assert isinstance(error, ncclpy.NcclTimeout) and error.ranks is None
    assert "rank 0 of communicator" in caplog.text and "could not ask what the others do" in caplog.text


def two_managers(store):
    """Return two Managers, as of two processes, that have done a collective, and the key for further ones."""
    return some_managers(store, 2)


def some_managers(store, size):
    """Return `size` such Managers, and the key."""
    testing.need_devices(size)
    key = ncclpy.Manager.generate_communicator_key()
    managers = [ncclpy.Manager(timeout=30, store=store) for _ in range(size)]
    for work in [one_of(manager, rank, key, "first", size=size) for rank, manager in enumerate(managers)]:
        work.wait(30)
    return managers, key


def test_end_without_a_thread_to_tell_the_others(monkeypatch):
    testing.refuse_threads("ncclpy-leave", monkeypatch.setattr)
    error, managers = one_stays_away(LocalStore())
    assert isinstance(error, ncclpy.NcclTimeout) and managers[0].stats()["communicators"] == 0
    close(managers)
    managers, key = two_managers(LocalStore())
    work = one_of(managers[0], 0, key, "second")
    managers[0].abort("enough")
    assert "enough" in str(work.exception(30))
    close(managers)


def test_work_completed_before_the_others_answer_has_not_failed(monkeypatch):
    """The other rank joins while a stuck store is asked: the communicators stay usable."""
    monkeypatch.setattr(inquiry, "_ANSWER_TIMEOUT", 1.2)
    store = Stuck(60.0)
    managers, key = two_managers(store)
    store.stuck = True
    late = one_of(managers[0], 0, key, "second", timeout=0.3)
    testing.wait_for(lambda: any(each.name == "ncclpy-ask" for each in threading.enumerate()), "it to ask")
    works = [late, one_of(managers[1], 1, key, "second")]
    works += [one_of(manager, rank, key, "third") for rank, manager in enumerate(managers)]
    assert [work.exception(30) for work in works] == [None] * 4
    time.sleep(1.3)  # the question has timed out
    store.stuck = False
    for work in [one_of(manager, rank, key, "fourth") for rank, manager in enumerate(managers)]:
        work.wait(30)
    assert [each.stats()["communicators"] for each in managers] == [1, 1]
    close(managers)


def test_old_answer_is_reported_with_its_age(monkeypatch):
    from ncclpy.peers import status

    managers, key = some_managers(LocalStore(), 3)
    monkeypatch.setattr(status, "_OLD_ANSWER", 0.0)
    works = [one_of(managers[rank], rank, key, "second", size=3, timeout=0.3 + 30 * rank) for rank in range(2)]
    errors = [work.exception(30) for work in works]
    assert [type(error) for error in errors] == [ncclpy.NcclTimeout] * 2, "also of the one whose deadline is far"
    assert " (rank 0 learned this " not in str(errors[0])
    said = testing.without_line(str(errors[1]))
    assert re.search(
        r"rank 2 has finished all_reduce #0 .* \(rank 0 learned this (less than )?[0-9.]+ m?s ago\)$", said
    )
    close(managers)


def test_completion_after_a_slow_abort_has_begun_is_no_success(monkeypatch):
    """Ranks 1 and 2 begin their aborts and stall before they fail their works, which the device ends meanwhile."""
    start = threading.Thread.start

    def start_and_stall(thread):
        start(thread)
        if thread.name == "ncclpy-manager-abort":
            time.sleep(0.6)

    managers, key = some_managers(LocalStore(), 3)
    monkeypatch.setattr(threading.Thread, "start", start_and_stall)
    works = [one_of(managers[rank], rank, key, "second", size=3, timeout=0.3 + 30 * rank) for rank in range(2)]
    errors = [work.exception(30) for work in reversed(works)]
    assert [type(error) for error in errors] == [ncclpy.NcclTimeout] * 2
    close(managers)


def test_two_deadlines_at_once_abort_nothing_before_all_ranks_know(monkeypatch):
    """While rank 0 asks what the ranks do, because its deadline has passed, rank 1 ends the communicator."""
    peer_statuses, asked, asks = [], [], communicator_status.CommunicatorStatus.ask
    abort = gathering._abort_when_confirmed

    def ask(self):
        asked.append(self.rank)
        if asked.count(0) == 1 and self.rank == 0:
            time.sleep(1.5)
        return asks(self)

    def note(peer_status, *arguments):
        peer_statuses.append(peer_status)
        abort(peer_status, *arguments)

    managers, key = some_managers(LocalStore(), 3)
    monkeypatch.setattr(communicator_status.CommunicatorStatus, "ask", ask)
    monkeypatch.setattr(gathering, "_abort_when_confirmed", note)
    works = [one_of(managers[rank], rank, key, "second", size=3, timeout=0.3 + 0.3 * rank) for rank in range(2)]
    assert [type(work.exception(30)) for work in works] == [ncclpy.NcclTimeout] * 2
    close(managers)
    assert None not in peer_statuses


def test_end_that_is_told_during_a_close_aborts_nothing(monkeypatch):
    """Rank 2 asks what the ranks do, as rank 0 has ended the communicator, and its Manager is closed meanwhile."""
    closes, aborted = threading.Event(), []
    asks, leaves = communicator_status.CommunicatorStatus.ask, communicator_status.CommunicatorStatus.leave
    abort = gathering._abort_when_confirmed

    def ask(self):
        said = asks(self)
        if self.rank == 2:
            assert closes.wait(30)
        return said

    def leave(self, *told):
        if self.rank == 2 and not closes.is_set():
            closes.set()
            time.sleep(0.5)
        return leaves(self, *told)

    def note(peer_status, *arguments):
        aborted.append(None if peer_status is None else peer_status.rank)
        abort(peer_status, *arguments)

    managers, key = some_managers(LocalStore(), 3)
    monkeypatch.setattr(communicator_status.CommunicatorStatus, "ask", ask)
    monkeypatch.setattr(communicator_status.CommunicatorStatus, "leave", leave)
    monkeypatch.setattr(gathering, "_abort_when_confirmed", note)
    works = [one_of(managers[rank], rank, key, "second", size=3, timeout=0.3) for rank in range(2)]
    assert [type(work.exception(30)) for work in works] == [ncclpy.NcclTimeout] * 2
    close(reversed(managers))
    assert sorted(aborted) == [0, 1]


class Shy:
    """A key that is shown only when the error is read."""

    shown = 0

    def __repr__(self):
        Shy.shown += 1
        return "a shy key"


def test_other_works_fail_with_the_same_data_and_keys_are_not_shown_before():
    shy = Shy()
    managers, key = two_managers(LocalStore())
    works = [one_of(managers[0], 0, key, shy, timeout=0.3), one_of(managers[0], 0, key, "third")]
    errors = [work.exception(30) for work in works]
    assert Shy.shown == 0
    assert [type(error) for error in errors] == [ncclpy.NcclTimeout] * 2
    assert errors[0].ranks is errors[1].ranks and [each.state for each in errors[0].ranks] == ["running", "idle"]
    said = "key a shy key, was not done within its timeout; its communicator is aborted. all_reduce #1 ("
    assert said in str(errors[0])
    assert "rank 1 has finished all_reduce #0 and is in no operation since" in str(errors[1])
    assert Shy.shown
    close(managers)


def test_rank_that_waits_for_its_siblings_is_not_the_missing_one():
    """One of two ranks of a process has come: the other one is missing."""
    testing.need_devices(3)
    lib, store, key = testing.arrays(), LocalStore(), ncclpy.Manager.generate_communicator_key()
    managers = [ncclpy.Manager(timeout=30, store=store) for _ in range(2)]

    def add(manager, rank, name, **options):
        array = lib.argument(lib.make(np.ones(4, np.float32), rank))
        numbers = {"num_local": 1 if rank == 0 else 2, "num_global": 3, "global_rank": rank, "communicator_key": key}
        return manager.all_reduce(name, array, device=rank, **numbers, **options)

    works = [add(managers[min(rank, 1)], rank, "first") for rank in range(3)]
    for manager in managers:
        manager.signal_multi_node_ready("first")
    for work in works:
        work.wait(30)
    add(managers[1], 1, "second")
    managers[1].signal_multi_node_ready("second")
    late = add(managers[0], 0, "second", timeout=0.3)
    managers[0].signal_multi_node_ready("second")
    error = late.exception(30)
    assert [each.state for each in error.ranks] == ["running", "running", "idle"]
    assert "ranks 0-1 wait in all_reduce #1 since " in str(error), error
    assert ": rank 2 has finished all_reduce #0 and is in no operation since " in str(error), error
    for manager in managers:
        manager.abort("the test ends")
    close(managers)


def test_abort_while_a_manager_asks_ends_its_work():
    """The answer is no longer waited for."""
    gc.collect()  # of managers that other tests have dropped
    others = {each for each in threading.enumerate() if each.name == "ncclpy-watch"}
    store = Stuck(60.0)
    managers, key = two_managers(store)
    before = [each for each in threading.enumerate() if each.name == "ncclpy-watch" and each not in others]
    assert len(before) == 2
    store.stuck = True
    work = one_of(managers[0], 0, key, "second", timeout=0.3)
    testing.wait_for(lambda: any(each.name == "ncclpy-ask" for each in threading.enumerate()), "it to ask")
    managers[0].abort("enough")
    assert "enough" in str(work.exception(30))
    store.stuck = False
    close(managers)
    testing.wait_for(lambda: not any(each.is_alive() for each in before), "the watches to end")


def test_dropped_manager_leaves_no_watch(host_engine):
    testing.run_python(
        """
        import gc, threading, warnings
        import numpy as np, ncclpy, testing
        from ncclpy.bootstrap import LocalStore

        def watches():
            return [each for each in threading.enumerate() if each.name == "ncclpy-watch"]

        warnings.simplefilter("ignore")  # of communicators that were not closed
        store, key = LocalStore(), ncclpy.Manager.generate_communicator_key()
        managers = [ncclpy.Manager(timeout=30, store=store) for _ in range(2)]
        works = []
        for rank, manager in enumerate(managers):
            numbers = {"num_local": 1, "num_global": 2, "global_rank": rank, "communicator_key": key}
            works.append(manager.all_reduce("first", np.ones(4), device=rank, **numbers))
            manager.signal_multi_node_ready("first")
        for work in works:
            work.wait(30)
        assert len(watches()) == 2
        del works, work, managers, manager
        gc.collect()
        testing.wait_for(lambda: not watches(), "the watches to end")
        """,
        warm=True,
    )
