"""Sends and receives that are compared (`check=`), and how two ranks exchange notes about them."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import thread_ranks
from group_ranks import DEADLINE, run_groups
from warm_ranks import run_ranks

import ncclpy
import testing
from ncclpy.bootstrap import LocalStore, PrefixStore
from ncclpy.process_group.check import shared_memory

pytestmark = pytest.mark.usefixtures("host_engine")

#: More messages than a ring of notes holds.
MANY = 200


class Counted(PrefixStore):
    """A store that counts the requests for comparing messages."""

    def __init__(self, prefix, store):
        super().__init__(prefix, store)
        self.asked = []

    def _note(self, keys):
        self.asked += [key for key in ([keys] if isinstance(keys, str) else keys) if "/check/" in key]

    def _multi_set(self, items, deadline):
        self._note([key for key, _ in items])
        super()._multi_set(items, deadline)


def _counted(name):
    def method(self, keys, *arguments):
        self._note(keys)
        return getattr(PrefixStore, name)(self, keys, *arguments)

    return method


for each in ("_set", "_get", "_compare_set", "_wait", "_check", "_delete", "_multi_get"):
    setattr(Counted, each, _counted(each))


@pytest.fixture
def apart(monkeypatch):
    """Keep two ranks from sharing memory: the higher rank cannot map the rings of the lower."""
    attach = shared_memory.attach_rings

    def refused(mine, rank, peer, *offered):
        if rank > peer:
            raise OSError("another machine")
        return attach(mine, rank, peer, *offered)

    monkeypatch.setattr(shared_memory, "attach_rings", refused)


def exchange(group, number, tag=0):
    """Exchange numbers between two ranks, one direction after the other; return the received one."""
    got = np.zeros(1)
    calls = [
        lambda: group.send(np.full(1, float(number)), 1 - group.rank, tag),
        lambda: group.recv(got, 1 - group.rank, tag),
    ]
    for call in calls[:: 1 - 2 * group.rank]:
        call().wait(DEADLINE)
    return got[0]


def blocks(group, number):
    """Exchange numbers between two ranks in a block; return the received one."""
    got = np.zeros(1)
    with group.coalescing() as work:
        group.send(np.full(1, float(number)), 1 - group.rank)
        group.recv(got, 1 - group.rank)
    work.wait(DEADLINE)
    return got[0]


def counted(world, check):
    """Return how often messages ask the store once two ranks have met, and the received numbers."""
    store = Counted("counted", world.store)
    with ncclpy.ProcessGroup(store, world.rank, 2, device=world.device, check=check, timeout=DEADLINE / 2) as group:
        exchange(group, 0.0)
        blocks(group, 0.0)
        world.meet()
        before = len(store.asked)
        came = [(exchange(group, i + world.rank), blocks(group, i - world.rank)) for i in range(20)]
        group.disconnect()
        came.append((exchange(group, 20 + world.rank), blocks(group, 20 - world.rank)))
        world.meet()
        return before, store.asked[before:], came


@pytest.mark.parametrize("check", ["first", "always"])
def test_ranks_of_one_machine_that_have_met_do_not_ask_the_store(run, check):
    for rank, (before, asked, came) in enumerate(run(counted, check)):
        assert before > 0, "they have met there"
        assert asked == []
        assert came == [(i + 1 - rank, i - 1 + rank) for i in range(21)]


def test_ranks_without_shared_memory_both_use_the_store(apart):
    def body(group):
        return [exchange(group, i + group.rank) for i in range(5)]

    store = Counted("counted", LocalStore())
    for rank, came in enumerate(run_groups(2, body, store=store, check="always")):
        assert came == [i + 1 - rank for i in range(5)]
    assert {key.rpartition("/check/")[2] for key in store.asked} >= {f"pair '0:1'/{i}/0" for i in range(10)}


@pytest.mark.parametrize("in_blocks", [False, True])
def test_messages_beyond_ring_capacity_wait_in_order(in_blocks):
    """Messages that do not fit wait in order while the peer takes none; the calls that begin them do not wait."""

    def body(group):
        exchange(group, 0.0)
        if group.rank:
            begun.wait(DEADLINE)
        got = [np.zeros(1) for _ in range(MANY)]
        works = []
        for i in range(MANY):
            if in_blocks:
                with group.coalescing() as work:
                    group.recv(got[i], 0) if group.rank else group.send(np.full(1, float(i)), 1)
            elif group.rank:
                work = group.recv(got[i], 0, i)
            else:
                work = group.send(np.full(1, float(i)), 1, i)
            works.append(work)
        begun.set()
        for work in works:
            work.wait(DEADLINE)
        return [each[0] for each in got]

    begun = threading.Event()
    came = run_groups(2, body, check="always")[1]
    assert came == [float(i) for i in range(MANY)]


def test_receives_begun_before_all_sends_complete():
    """In a ring of three ranks; a work is launched also if no thread waits for it."""

    def body(group):
        before, behind = (group.rank - 1) % 3, (group.rank + 1) % 3
        got = [np.zeros(1) for _ in range(MANY)]
        works = [group.recv(each, before, i) for i, each in enumerate(got)]
        works += [group.send(np.full(1, float(i)), behind, i) for i in range(MANY)]
        testing.wait_for(lambda: all(work.is_completed() for work in works), "the messages", DEADLINE)
        return [each[0] for each in got] == [float(i) for i in range(MANY)]

    assert run_groups(3, body, check="always") == [True] * 3


def test_operations_behind_held_block_keep_their_order():
    """A collective behind a block on one communicator is launched behind the block by whichever thread launches it."""

    def body(group):
        blocks(group, 0.0)
        came = []
        for i in range(20):
            got, total = np.zeros(1), np.ones(1)
            with group.coalescing() as work:
                group.send(np.full(1, float(i)), 1 - group.rank)
                group.recv(got, 1 - group.rank)
            both = [work, group.all_reduce(total)]
            for each in both[:: 1 - 2 * (i % 2)]:
                each.wait(DEADLINE)
            came.append((got[0], total[0]))
        return came

    assert run_groups(2, body, check="always") == [[(float(i), 2.0) for i in range(20)]] * 2


def test_several_threads_wait_for_messages_of_several_peers():
    """A note for one thread is not lost if another thread reads it."""

    def body(group):
        others = [rank for rank in range(3) if rank != group.rank]
        for peer in others:
            group.connect([peer])

        def talk(peer):
            got = np.zeros(1)
            for i in range(100):
                calls = [lambda: group.send(np.full(1, float(i)), peer), lambda: group.recv(got, peer)]  # noqa: B023
                for call in calls[:: 1 if group.rank < peer else -1]:
                    call().wait(DEADLINE)
            return got[0]

        return thread_ranks.run_ranks(2, lambda number: talk(others[number]), DEADLINE / 2) == [99.0, 99.0]

    assert run_groups(3, body, check="always") == [True] * 3


# Ends of waits.


def test_wait_that_ends_by_deadline_names_the_rank():
    """Also after the two ranks have met, if no note arrives to wake the waiting thread."""

    def body(group):
        exchange(group, 0.0)
        if group.rank == 0:
            work = group.send(np.ones(1), 1, timeout=0.3)
            with pytest.raises(
                ncclpy.NcclTimeout, match="rank 1 has not begun the matching message within 300 ms"
            ) as found:
                work.wait(DEADLINE)
            late.set()
            return list(found.value.missing)
        late.wait(DEADLINE)
        return None

    late = threading.Event()
    assert run_groups(2, body, check="always", on_error="report")[0] == [1]


def test_wait_that_ends_by_deadline_tells_the_states_once():
    """On the rank that ends the group, and on the one that is told."""

    def body(group):
        exchange(group, 0.0)
        if group.rank:
            testing.wait_for(lambda: group.error is not None)
            return str(group.error)
        with pytest.raises(ncclpy.NcclTimeout) as found:
            group.send(np.ones(1), 1, timeout=0.3).wait(DEADLINE)
        return str(found.value)

    for text in run_groups(2, body, check="always"):
        assert text.count("rank 1 has finished ") == 1, text


@pytest.mark.parametrize("met", [False, True])
def test_abort_ends_held_messages(met):
    def body(group):
        if met:
            exchange(group, 0.0)
        work = group.recv(np.ones(1), 0) if group.rank else None
        if work is None:
            held.wait(DEADLINE)
            group.abort("enough")
        held.set()
        if work is not None:
            with pytest.raises(ncclpy.NcclAborted, match="enough"):
                work.wait(DEADLINE)

    held = threading.Event()
    run_groups(2, body, check="always")


def test_killed_peer_ends_the_message(tmp_path):
    """Whether or not the peer has brought its half, the other rank hears of its end long before the deadline."""
    before = set(os.listdir("/dev/shm"))
    codes, said = run_ranks(
        tmp_path,
        2,
        """
        group = ncclpy.init_process_group(timeout=60, check="always")
        works = [(group.recv if group.rank else group.send)(np.ones(1), 1 - group.rank) for _ in range(20)]
        for work in works:
            work.wait(60)
        group.store.barrier("done", group.rank, 2)
        if group.rank == 1:
            works = [group.recv(np.ones(1), 0) for _ in range(3)]
            os.kill(os.getpid(), signal.SIGKILL)
        begun = time.monotonic()
        try:
            for _ in range(200):
                group.send(np.ones(1), 1).wait(60)
        except ncclpy.NcclError as error:
            print("rank 0 says", error, time.monotonic() - begun < 40, flush=True)
        group.close()
        """,
    )
    assert codes == [0, -signal.SIGKILL], said
    assert re.search(r"rank 0 says .* True", said), said
    assert {each for each in set(os.listdir("/dev/shm")) - before if "check" in each} == set()


def test_ctrl_c_ends_wait_but_not_message():
    """Ctrl-C ends the wait only; the message continues."""
    testing.run_python(
        """
        import os, signal, threading, time, numpy as np, ncclpy
        from ncclpy.bootstrap import LocalStore

        store, goes_on, got = LocalStore(), threading.Event(), np.zeros(1)

        def other():
            with ncclpy.ProcessGroup(store, 1, 2, device=1, check="always", timeout=50) as group:
                group.recv(got, 0).wait(50)
                goes_on.wait(50)
                group.recv(got, 0).wait(50)

        thread = threading.Thread(target=other)
        thread.start()
        with ncclpy.ProcessGroup(store, 0, 2, device=0, check="always", timeout=50) as group:
            group.send(np.ones(1), 1).wait(50)
            work = group.send(np.full(1, 7.0), 1)
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            try:
                work.wait(50)
            except KeyboardInterrupt:
                pass
            else:
                raise AssertionError("it was not left")
            goes_on.set()
            work.wait(50)
            thread.join()
        assert got[0] == 7, got
        """,
        warm=True,
    )


def test_way_of_notes_is_found_anew_after_reconfigure(run):
    """A reconfigured group decides anew between shared memory and the store."""
    assert run(goes_on) == [[1.0 - rank, 6.0 - rank] for rank in range(2)]


def goes_on(world):
    group = world.group(check="always")
    came = [exchange(group, float(world.rank))]
    handles = [bytes(each).decode() for each in world.store.gather(
        "handles", world.rank, 2, group.reconfigure_handle().encode())]  # fmt: skip
    group.reconfigure(handles, uuid="again", timeout=DEADLINE / 2)
    came.append(exchange(group, 5.0 + world.rank))
    group.close()
    return came


def test_mailboxes_leave_nothing_behind():
    def body(group):
        kept.append(group)  # so that close(), not the garbage collector, ends the group
        exchange(group, 0.0)

    kept = []
    gc.collect()  # closes groups that other tests have left
    maps = lambda: Path("/proc/self/maps").read_text().count("ncclpy-check-messages")  # noqa: E731
    testing.wait_for(lambda: maps() == 0, "the memory of other tests to go")
    run_groups(2, body, check="always")
    fds = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        run_groups(2, body, check="always")
    testing.wait_for(lambda: maps() == 0, "the memory to go")
    testing.wait_for(lambda: len(os.listdir("/proc/self/fd")) <= fds + 2, "the descriptors to go")


def test_forked_child_does_not_touch_mailbox_of_parent():
    testing.run_python(
        """
        import os, threading, numpy as np, ncclpy
        from ncclpy.bootstrap import LocalStore

        store, forked = LocalStore(), threading.Event()

        def talk(group):
            for i in range(3):
                (group.recv if group.rank else group.send)(np.ones(1), 1 - group.rank).wait(50)

        def other():
            with ncclpy.ProcessGroup(store, 1, 2, device=1, check="always", timeout=50) as group:
                talk(group)
                forked.wait(50)
                talk(group)

        thread = threading.Thread(target=other)
        thread.start()
        group = ncclpy.ProcessGroup(store, 0, 2, device=0, check="always", timeout=50)
        talk(group)
        child = os.fork()
        if child == 0:
            try:
                group.send(np.ones(1), 1)
            except RuntimeError:
                del group
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        forked.set()
        talk(group)
        group.close()
        thread.join()
        """,
        warm=True,
    )
