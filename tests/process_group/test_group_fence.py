"""Operations that complete while a group ends: a result that may be corrupt is no success."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from group_ranks import run_groups

import ncclpy
import testing
from ncclpy.bootstrap import FileStore, TCPStore
from ncclpy.coordinator.data_plane import DataPlane, store_of
from ncclpy.engine.group_registry import KnownGroup
from ncclpy.peers.status import End
from ncclpy.process_group.group_status import GroupStatus

DEADLINE = 20.0
ENDED = "ncclpy/group/default/1/told/ended"

STOPPED = """
import os, sys
import numpy as np, ncclpy
from ncclpy.bootstrap import FileStore

ncclpy.use("host")
group = ncclpy.ProcessGroup(FileStore(sys.argv[1]), 1, 2, device=1, timeout=20)
array = np.ones(4)
group.all_reduce(array).wait(20)
work = group.all_reduce(array)
while work.state == "pending":
    pass
print("begun", flush=True)
sys.stdin.readline()
error = work.exception(20)
print(type(error).__name__, error, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("ended", ["on all ranks", "for those that ask", None])
def test_stopped_rank_asks_store_before_success(host_engine, tmp_path, ended):
    """While rank 1 is stopped, others may end the group and abort, and then rank 1's operation completes normally."""
    path = tmp_path / "store"
    child = subprocess.Popen(
        [sys.executable, "-c", STOPPED, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/"
    )
    try:
        store = FileStore(path)
        group = ncclpy.ProcessGroup(store, 0, 2, device=0, timeout=DEADLINE)
        group.all_reduce(array := np.ones(4)).wait(DEADLINE)
        comm = group.communicator
        assert child.stdout.readline() == "begun\n"
        with store._locked(time.monotonic() + DEADLINE):  # the child must not be stopped with the lock
            child.send_signal(signal.SIGSTOP)
            os.waitpid(child.pid, os.WUNTRACED)
        if ended:
            told = End("rank 0 of 2: a test", 0, only_if_asked=ended == "for those that ask")
            FileStore(path).compare_set(ENDED, None, told.packed())
        stream = ncclpy.Stream(0)
        comm.all_reduce(array, stream=stream)  # completes the operation of the stopped rank
        time.sleep(0.7)  # shorter than the wait of the others for a stopped rank
        child.stdin.write("go on\n")
        child.stdin.flush()
        child.send_signal(signal.SIGCONT)
        said = child.stdout.readline()
        assert said.startswith("NcclAborted process group 'default' was ended" if ended else "NoneType None"), said
    finally:
        child.kill()
        child.communicate()
    group.abort("the test is over")
    group.close()


RECOVERS = """
try:
    group.recover(20)
except ncclpy.NcclError as error:
    print(type(error).__name__, error, flush=True)
os._exit(0)
"""
LEFT_BEHIND = (
    STOPPED.replace("FileStore(sys.argv[1])", "TCPStore('127.0.0.1', int(sys.argv[1]), heartbeat=0.5)")
    .replace("import FileStore", "import TCPStore")
    .replace("os._exit(0)", RECOVERS)
)


def test_rank_stopped_longer_than_its_lease_gets_no_success(host_engine):
    """The others have continued without the rank, which cannot ask; its error tells of its stop, not a lost store."""
    with TCPStore("127.0.0.1", 0, serve=True, linger=0, timeout=DEADLINE) as store:
        child = subprocess.Popen(
            [sys.executable, "-c", LEFT_BEHIND, str(store.port)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/",
        )  # fmt: skip
        try:
            group = ncclpy.ProcessGroup(store, 0, 2, device=0, timeout=DEADLINE, on_error="report")
            group.all_reduce(array := np.ones(4)).wait(DEADLINE)
            assert child.stdout.readline() == "begun\n"
            child.send_signal(signal.SIGSTOP)
            os.waitpid(child.pid, os.WUNTRACED)
            # Completes the operation of the stopped rank.
            group.communicator.all_reduce(array, stream=ncclpy.Stream(0))
            testing.wait_for(lambda: not store.keys("ncclpy/group/default/1/alive/1"), "the end of its lease")
            child.stdin.write("go on\n")
            child.stdin.flush()
            child.send_signal(signal.SIGCONT)
            said, recovery = child.stdout.readline(), child.stdout.readline()
            assert said.startswith("NcclRemoteError process group 'default' has ended: rank 1 of process"), said
            assert "this process was stopped" in said and "longer than its lease of 0.5 s" in said
            assert "the other ranks take it for lost" in recovery and "ProcessGroup.join" in recovery, recovery
            assert "store is gone" not in said + recovery
        finally:
            child.kill()
            child.communicate()
        group.abort("the test is over")
        group.close()


#: Two ranks stand still; then the store fails where they ask, until it answers.
STOOD_STILL = """
import logging, threading
import numpy as np
import ncclpy, testing
from group_ranks import run_groups
from ncclpy.bootstrap import StoreLost
from ncclpy.process_group.group_status import GroupStatus
from stops import stand_still

answers, asked, said, told = threading.Event(), [], [], GroupStatus.announced_end
together, handler = threading.Barrier(2), logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("ncclpy").addHandler(handler)

def tell(self):
    asked.append(self.rank)
    if not answers.is_set():
        raise failure
    return told(self)

def begun_after_a_stop(group):
    group.all_reduce(np.ones(4)).wait(20)
    together.wait(20)
    if group.rank == 0:
        GroupStatus.announced_end = tell
        stand_still()
    together.wait(20)
    work = group.all_reduce(array := np.ones(4))
    testing.wait_for(lambda: group.rank in asked, "a question", 10)
    return work, array
"""


def test_rank_that_stood_still_asks_again_until_the_store_answers(host_engine):
    """No completed operation counts as a success before that."""
    testing.run_python(
        STOOD_STILL
        + """
failure = ncclpy.NcclTimeout("it is stuck")

def body(group):
    work, array = begun_after_a_stop(group)
    try:
        work.wait(0.2)
    except ncclpy.NcclTimeout:
        assert work.state == "launched", work.state
    else:
        raise AssertionError("the end of an operation was believed")
    together.wait(20)
    answers.set()
    work.wait(10)
    assert asked.count(group.rank) >= 2 and array.tolist() == [2.0] * 4, (asked, array)

run_groups(2, body)
assert not said, said
""",
        warm=True,
    )


def test_rank_that_stood_still_without_store_continues_with_warning(host_engine):
    testing.run_python(
        STOOD_STILL
        + """
failure = StoreLost("the server is gone")

def body(group):
    work, array = begun_after_a_stop(group)
    work.wait(10)
    assert group.error is None and array.tolist() == [2.0] * 4, array

run_groups(2, body)
what = "was stopped, and cannot ask whether the group was ended meanwhile"
what += ": it takes completed operations for successful"
words = [f"rank {rank} of process group 'default' {what} (the server is gone)" for rank in range(2)]
testing.wait_for(lambda: sorted(set(said)) == words, "the warnings", 10)
""",
        warm=True,
    )


def test_end_for_asking_ranks_ends_no_other_rank(host_engine):
    """Ranks of a coordinator hear of its end over the control plane; only a rank that was stopped asks the store."""
    told = threading.Barrier(2)

    def body(group):
        group.all_reduce(np.ones(4)).wait(DEADLINE)
        if group.rank == 0:
            DataPlane(group).fail(ncclpy.NcclRemoteError("a test"))
            testing.wait_for(
                lambda: b"a test" in bytes(store_of(group).compare_set("told/ended", None, None)[1] or b""), "it"
            )
        told.wait(DEADLINE)
        time.sleep(0.3)
        before = group.error
        if group.rank == 1:
            group.ask_after_stop()
        assert type(group.error) is ncclpy.NcclRemoteError
        return before is None

    assert run_groups(2, body) == [False, True]


def test_abort_waits_until_the_other_rank_has_heard(host_engine, monkeypatch):
    hears, confirm = threading.Event(), GroupStatus.confirm

    def late(self):
        if self.rank == 1:
            assert hears.wait(DEADLINE)
        confirm(self)

    monkeypatch.setattr(GroupStatus, "confirm", late)
    ended = threading.Barrier(2)

    def body(group):
        group.all_reduce(np.ones(4)).wait(DEADLINE)
        comm = group.communicator
        ended.wait(DEADLINE)
        if group.rank == 0:
            group.abort("a test")
        testing.wait_for(lambda: group.error is not None, "the news")
        ended.wait(DEADLINE)
        time.sleep(0.3)
        before = comm.closed
        ended.wait(DEADLINE)
        hears.set()
        testing.wait_for(lambda: comm.closed, "the abort")
        return before

    assert run_groups(2, body) == [False, False]


def test_thread_waiting_by_stream_gets_error_before_abort(host_engine):
    """The thread waits in no call of ncclpy: the error is raised wherever the thread is."""

    def body(group):
        group.all_reduce(array := np.ones(4)).wait(DEADLINE)
        if group.rank == 1:
            testing.wait_for(lambda: group.error is not None, "the news")
            return "NcclTimeout"
        work = group.all_reduce(array, timeout=0.3)
        work.synchronize()
        try:
            end = time.monotonic() + DEADLINE
            while time.monotonic() < end:
                time.sleep(0.001)
        except ncclpy.NcclError as error:
            assert error is group.error
            return type(error).__name__
        return "nothing was raised"

    assert run_groups(2, body) == ["NcclTimeout"] * 2


def test_thread_waiting_by_stream_gets_error_of_a_mismatched_call(host_engine):
    def body(group):
        stream = ncclpy.Stream(group.rank)
        group.all_reduce(np.ones(4)).wait(DEADLINE)
        array = np.ones(4 + group.rank)
        try:
            group.all_reduce(array).synchronize(stream)
            testing.wait_for(stream.is_done, "the stream")
        except ncclpy.NcclError as error:
            return "the ranks do not agree" in str(error)
        return f"read {array[0]}"

    assert run_groups(2, body) == [True, True]


def test_thread_that_has_a_stream_wait_during_the_end_gets_error(host_engine, monkeypatch):
    """The threads that read by a stream are noted by then: the call itself raises."""
    noted, failed = threading.Event(), KnownGroup.failed

    def note(self, error):
        failed(self, error)
        noted.set()
        time.sleep(0.3)  # for the call below

    monkeypatch.setattr(KnownGroup, "failed", note)

    def body(group):
        group.all_reduce(array := np.ones(4)).wait(DEADLINE)
        if group.rank == 1:
            testing.wait_for(lambda: group.error is not None, "the news")
            return True
        work = group.all_reduce(array, timeout=0.3)
        assert noted.wait(DEADLINE)
        with pytest.raises(ncclpy.NcclTimeout):
            work.synchronize()
        return True

    assert run_groups(2, body) == [True, True]


def test_waiting_thread_gets_error_once(host_engine):
    def body(group):
        group.all_reduce(array := np.ones(4)).wait(DEADLINE)
        if group.rank == 1:
            testing.wait_for(lambda: group.error is not None, "the news")
            return True
        work = group.all_reduce(array, timeout=0.3)
        work.synchronize()
        with pytest.raises(ncclpy.NcclTimeout):
            work.wait(DEADLINE)
        end = time.monotonic() + 0.5
        while time.monotonic() < end:  # a second error would be raised here
            time.sleep(0.001)
        return True

    assert run_groups(2, body) == [True, True]


def test_thread_that_left_its_wait_gets_error_as_reader(host_engine):
    def body(group):
        group.all_reduce(array := np.ones(4)).wait(DEADLINE)
        if group.rank == 1:
            testing.wait_for(lambda: group.error is not None, "the news")
            return "NcclTimeout"
        work = group.all_reduce(array, timeout=0.5)
        work.synchronize()
        with pytest.raises(ncclpy.NcclTimeout, match=r"after 0\.05 s"):
            work.wait(0.05)
        with pytest.raises(ncclpy.NcclTimeout) as caught:
            end = time.monotonic() + DEADLINE
            while time.monotonic() < end:
                time.sleep(0.001)
        return type(caught.value).__name__

    assert run_groups(2, body) == ["NcclTimeout"] * 2
