"""Ranks of several machines over a store without leases: heartbeats make the death of a rank known soon."""

from __future__ import annotations

import re
import textwrap

import pytest
from warm_ranks import run_ranks

import testing
from ncclpy.bootstrap import LocalStore, StoreError
from ncclpy.peers import heartbeats
from ncclpy.peers.heartbeats import Heartbeats

pytestmark = pytest.mark.usefixtures("host_engine")

#: Two ranks on two machines; heartbeats from Python count as silent as soon as native ones.
APART = """
from ncclpy.bootstrap import FileStore
from ncclpy.peers import heartbeats, processes, reports
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
reports.MACHINE = f"machine {rank // RANKS_A_MACHINE}"
processes._PROCESSES = f"processes/{reports.MACHINE}"
heartbeats._PERIOD_OF_PYTHON, heartbeats._SILENCE_OF_PYTHON = 0.2, 1.25
store = FileStore("STORE", timeout=60)
group = ncclpy.ProcessGroup(store, rank, size, device=rank, timeout=100)
"""


def run(tmp_path, program, *, size=2, ranks_a_machine=1, only=None):
    """Run ranks over a FileStore; return their exit codes and output."""
    head = APART.replace("RANKS_A_MACHINE", str(ranks_a_machine)).replace("STORE", str(tmp_path / "store"))
    return run_ranks(tmp_path, size, head + textwrap.dedent(program), only=only)


BEAT = "ncclpy/group/default/1/beat/"
#: SIGSTOP stands for the end of a machine, since the host engine, unlike NCCL, reports a killed process.
#: Under `_thread_lock` no thread holds the store's file lock.
STOPS = "with store._thread_lock: os.kill(os.getpid(), signal.SIGSTOP)"


def test_rank_of_another_machine_that_is_gone_ends_the_wait_for_a_communicator(tmp_path):
    testing.need_processes(2)
    said = run(
        tmp_path,
        f"""
        store.wait(["{BEAT}0", "{BEAT}1"], 60)
        if rank == 1:
            {STOPS}
        try:
            group.connect(timeout=60)
        except ncclpy.NcclError as error:
            print(type(error).__name__, error, flush=True)
        os._exit(0)
        """,
        only=[0],
    )[1]
    assert "NcclRemoteError rank 1 of 2 will not arrive to make communicator 'all' of process group 'default'" in said
    assert "cannot be reached any more" in said, said


@pytest.mark.parametrize("when", ["in an operation", "before the first one"])
def test_rank_of_another_machine_that_is_gone_is_known_long_before_the_deadline(tmp_path, when):
    """Before the first operation the living ranks wait for the communicator."""
    testing.need_processes(2)
    said = run(
        tmp_path,
        f"""
        if {when == "in an operation"}:
            group.all_reduce(np.ones(2)).wait(60)
        store.wait(["{BEAT}0", "{BEAT}1"], 60)
        if rank == 1:
            {STOPS}
        error = group.all_reduce(np.ones(2)).exception(60)
        print(type(error).__name__, error, [each.state for each in error.ranks], flush=True)
        os._exit(0)
        """,
        only=[0],
    )[1]
    gone = "rank 1 of process group 'default' is gone: its heartbeats in the store have stopped"
    assert said.startswith("NcclRemoteError ") and gone in said, said
    assert "rank 1 cannot be reached: the process has ended, or its machine or network is gone" in said
    assert re.search(r"\['running', 'lost'\]", said), said


def test_survivors_recover_without_waiting_for_silent_rank(tmp_path):
    testing.need_processes(3)
    said = run(
        tmp_path,
        f"""
        group.all_reduce(np.ones(2)).wait(60)
        store.wait([f"{BEAT}{{each}}" for each in range(size)], 60)
        if rank == 1:
            {STOPS}
        group.all_reduce(np.ones(2)).exception(60)
        found = group.recover(1e6)
        print(found.survivors, group.all_reduce(np.ones(2)).result(60)[0], flush=True)
        os._exit(0)
        """,
        size=3,
        only=[0, 2],
    )[1]
    assert said.count("(0, 2) 2.0") == 2, said


def test_each_rank_of_a_machine_writes_and_removes_its_heartbeat(tmp_path):
    testing.need_processes(4)
    said = run(
        tmp_path,
        f"""
        part = group.new_group([0, 1])
        for each in (group, part):
            if each is not None:
                each.all_reduce(np.ones(2)).wait(60)
        store.wait([f"{BEAT}{{each}}" for each in range(size)], 60)
        beats = lambda: sorted(key for key in store.keys("") if "/beat/" in key)
        print("heartbeats:", len(beats()), flush=True)
        store.barrier("all have looked", rank, size)
        if part is not None:
            part.close()
        group.close()
        store.barrier("all have closed", rank, size)
        print("after:", beats(), flush=True)
        """,
        size=4,
        ranks_a_machine=2,
    )
    assert said[0] == [0] * 4 and said[1].count("heartbeats: 4") == said[1].count("after: []") == 4, said


class Here:
    """The ranks known to run on this machine."""

    def __init__(self, *ranks):
        self.here = set(ranks)

    def look(self):
        pass


class Moments:
    """A clock that the test advances."""

    now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def moments(monkeypatch):
    found = Moments()
    monkeypatch.setattr(heartbeats, "time", found)
    return found


def listens(beats, moments, seconds, step=0.2):
    """Return the silent ranks that a rank finds while it listens for `seconds`."""
    found = []
    for _ in range(round(seconds / step)):
        moments.now += step
        found += beats.read_others()
    return found


@pytest.fixture
def pair(moments):
    """Return the heartbeats of two ranks on two machines, and their store."""
    store = LocalStore()
    both = [Heartbeats(store, (rank,), 2, Here(rank)) for rank in range(2)]
    for each in both:
        each.tell()
    for each in both:
        each.beat()
    return (*both, store)


def test_heartbeats_begin_with_first_rank_of_other_machine(moments):
    store = LocalStore()
    first, second = (Heartbeats(store, (rank,), 2, Here(rank)) for rank in range(2))
    first.tell()
    first.beat()
    assert store.keys("beat/") == []
    second.tell()
    moments.now += 1
    first.beat()
    assert store.keys("beat/") == ["beat/0"]


def test_heartbeats_are_not_written_where_all_ranks_share_one_machine(moments):
    store = LocalStore()
    both = [Heartbeats(store, (rank,), 2, Here(0, 1)) for rank in range(2)]
    for each in both:
        each.tell()
    for each in both:
        each.beat()
        moments.now += 100
        each.beat()
    assert store.keys("") == ["processes/come"]


def test_heartbeats_are_not_written_if_a_wait_of_the_program_delays_them(moments):
    class HeldUp(LocalStore):
        def _beat(self, key, before, period):
            raise StoreError("held up")

    store = HeldUp()
    both = [Heartbeats(store, (rank,), 2, Here(rank)) for rank in range(2)]
    for each in both:
        each.tell()
    for each in both:
        each.beat()
        moments.now += 100
        assert each.look(lambda: "one") == []
    assert store.keys("beat/") == []


def test_rank_is_silent_after_its_announced_time_without_heartbeat(pair, moments):
    first, _, store = pair
    assert listens(first, moments, 5.8) == []  # Python may be held up for that long
    [(rank, why)] = listens(first, moments, 0.6)
    assert rank == 1 and re.fullmatch(r"its heartbeats in the store have stopped 6 s ago", why), why
    assert first.is_silent(1) and listens(first, moments, 10) == []  # reported once
    first.look(lambda: None)
    assert first.is_silent(1) and len(listens(first, moments, 6.4)) == 1  # and once more for the next wait
    store.set("beat/1", b"1.25 7")
    assert not first.is_silent(1)
    assert listens(first, moments, 1.4) == [] and len(listens(first, moments, 0.4)) == 1


def test_rank_that_beats_is_never_silent(pair, moments):
    first, second, _ = pair
    for _ in range(20):
        second.beat()
        assert listens(first, moments, 1.0) == []


def test_stall_of_reader_or_store_is_no_silence(pair, moments):
    first, _, store = pair
    store.set("beat/1", b"1.25 1")
    listens(first, moments, 0.2)
    assert listens(first, moments, 200, step=100) == []  # two reads
    first.look(lambda: None)
    assert listens(first, moments, 1.2) == []  # the count begins anew


def test_rank_that_has_closed_the_group_is_not_silent(pair, moments):
    first, second, store = pair
    listens(first, moments, 5)
    second.close()
    assert store.keys("beat/") == ["beat/0"] and listens(first, moments, 20) == []
    second.beat()  # a beat of a thread that had begun it before the close
    assert store.keys("beat/") == ["beat/0"]


@pytest.mark.parametrize("value", [b"", b"\xff", b"nan 1", b"-1 1", b"0 1", b"soon"])
def test_invalid_heartbeat_takes_no_rank_for_gone(pair, moments, value):
    first, _, store = pair
    store.set("beat/1", value)
    assert listens(first, moments, 100) == []


def test_lost_store_is_no_silence(pair, moments):
    first, _, store = pair
    listens(first, moments, 1)
    store.close()
    with pytest.raises(StoreError):
        first.read_others()
    first.close()


def test_process_listens_only_while_it_waits_for_one_thing(pair, moments, monkeypatch):
    first, _, _ = pair
    reads = []
    monkeypatch.setattr(first, "read_others", lambda: reads.append(moments.now) or [])
    for waits_for in (None, None, "one", "two", "two", "two", None):
        moments.now += 0.2
        first.look(lambda waits_for=waits_for: waits_for)
    assert len(reads) == 2


def test_first_rank_of_a_process_beats_for_all(moments):
    store = LocalStore()
    nodes = [Heartbeats(store, own, 4, Here(*own)) for own in ((0, 1), (2, 3))]
    for each in nodes:
        each.tell()
    for each in nodes:
        each.beat()
    assert store.keys("beat/") == ["beat/0", "beat/2"]
    assert [rank for rank, _ in listens(nodes[1], moments, 7)] == [0]


def test_allowed_silence_is_set_by_environment(moments, monkeypatch):
    monkeypatch.setenv("NCCLPY_HEARTBEAT_TIMEOUT", "30")
    store = LocalStore()
    both = [Heartbeats(store, (rank,), 2, Here(rank)) for rank in range(2)]
    for each in both:
        each.tell()
    for each in both:
        each.beat()
    assert listens(both[0], moments, 29) == [] and len(listens(both[0], moments, 2)) == 1
    monkeypatch.setenv("NCCLPY_HEARTBEAT_TIMEOUT", "never")
    with pytest.raises(ValueError, match="NCCLPY_HEARTBEAT_TIMEOUT must be a number of seconds, not 'never'"):
        Heartbeats(store, (0,), 2, Here(0))
