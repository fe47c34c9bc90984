"""`ncclpy.testing.run_ranks`: which error it raises, and that nothing hangs or is left behind."""

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from paths import SUPPORT

import ncclpy
import testing
from ncclpy.testing import run_ranks

pytestmark = pytest.mark.usefixtures("host_engine")
KINDS = pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])


@pytest.fixture
def short_grace(monkeypatch):
    """Wait less for what does not end anyway."""
    monkeypatch.setattr(ncclpy.testing, "_GRACE", 0.5)


def notes(error):
    return "\n".join(error.__notes__)


def mean(comm, offset):
    array = np.full(3, comm.rank + offset)
    comm.all_reduce(array, op="avg")
    return comm.rank, array.tolist()


@KINDS
def test_results_come_in_the_order_of_the_ranks(processes):
    assert run_ranks(3, mean, 10.0, processes=processes) == [(rank, [11.0] * 3) for rank in range(3)]


def fails_on(comm, rank):
    if comm.rank == rank:
        raise KeyError("the real one")
    comm.barrier()


@KINDS
def test_the_real_error_is_raised_and_frees_the_others(processes):
    begin = time.monotonic()
    with pytest.raises(KeyError, match="the real one") as caught:
        run_ranks(3, fails_on, 1, processes=processes)
    assert time.monotonic() - begin < 30  # of 60: the others were aborted
    assert "raised by rank 1" in notes(caught.value)
    assert "rank 0: Nccl" in notes(caught.value) and "rank 2: Nccl" in notes(caught.value)


def fails_late(comm):
    comm.barrier()  # all have come here
    if comm.rank == 1:
        time.sleep(1.0)
        raise KeyError("the real one")
    comm.barrier(timeout=0.2)


@KINDS
def test_the_real_error_is_raised_also_behind_the_timeout_of_another(processes):
    with pytest.raises(KeyError, match="the real one") as caught:
        run_ranks(2, fails_late, processes=processes)
    assert "rank 0: NcclTimeout" in notes(caught.value)


def test_the_traceback_in_the_process_is_shown():
    with pytest.raises(KeyError) as caught:
        run_ranks(2, fails_on, 1, processes=True)
    assert "in fails_on" in str(caught.value.__cause__)


def sleeps_on(comm, rank, folder=None):
    if folder is not None:
        (folder / f"{comm.rank}").write_text(str(os.getpid()))
    comm.barrier()  # all have come here
    if comm.rank == rank:
        time.sleep(100)
    comm.barrier(timeout=0.5)


@KINDS
def test_a_rank_that_does_not_end_is_shown_with_its_place(processes, short_grace):
    with pytest.raises(TimeoutError, match=r"rank 1 not done .* after rank 0 had failed") as caught:
        run_ranks(2, sleeps_on, 1, processes=processes)
    assert "in sleeps_on" in str(caught.value) and "ncclpy/testing.py" not in str(caught.value)
    assert "rank 0: NcclTimeout" in notes(caught.value)


def all_sleep(comm):
    time.sleep(100)


@KINDS
def test_the_deadline_ends_what_waits_for_nobody(processes, short_grace):
    seconds = 8 if processes else 1  # a busy machine takes some to start a process, and that is not what is tested
    with pytest.raises(TimeoutError, match=f"ranks 0, 1 not done in {seconds} s"):
        run_ranks(2, all_sleep, processes=processes, timeout=seconds)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def pids_in(folder, count):
    testing.wait_for(
        lambda: sum(bool(path.read_text()) for path in folder.iterdir()) == count, "the start of all ranks"
    )
    return [int(path.read_text()) for path in folder.iterdir()]


def test_no_process_is_left_behind(tmp_path, short_grace):
    with pytest.raises(TimeoutError):
        run_ranks(2, sleeps_on, 1, tmp_path, processes=True)
    assert [pid for pid in pids_in(tmp_path, 2) if alive(pid)] == []


def test_processes_end_when_whoever_started_them_is_killed(tmp_path):
    code = (
        "import pathlib, sys, ncclpy.testing, test_run_ranks\n"
        "ncclpy.testing.run_ranks(2, test_run_ranks.sleeps_on, 1, pathlib.Path(sys.argv[1]), processes=True)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), str(SUPPORT)])}
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=environment, cwd="/") as parent:
        pids = pids_in(tmp_path, 2)
        parent.kill()
        parent.wait()
    testing.wait_for(lambda: not any(map(alive, pids)), "the end of all ranks")


def survives(comm):
    try:
        comm.all_reduce(np.ones(3))  # whoever is in it has a communicator
        comm.all_reduce(np.ones(3))
    except ncclpy.NcclRemoteError as error:
        return "rank 1 of 3 is dead" in str(error)


KILL = {"NCCLPY_FAULTS": "rank=1 call=AllReduce do=kill"}


def test_a_rank_may_be_killed_on_purpose():
    # In the second: a rank that dies behind its own init may do so before others have seen the end of theirs.
    second = {"NCCLPY_FAULTS": "rank=1 call=AllReduce nth=2 do=kill"}
    assert run_ranks(3, survives, processes=True, env=second, killed=[1]) == [True, None, True]
    with pytest.raises(RuntimeError, match="rank 1 was to be killed, and has returned"):
        run_ranks(2, mean, 1.0, processes=True, killed=[1])


def test_a_rank_that_dies_is_the_real_error():
    with pytest.raises(RuntimeError, match="the process of rank 1 was killed by SIGKILL") as caught:
        run_ranks(2, mean, 1.0, processes=True, env=KILL)
    assert "rank 0: Nccl" in notes(caught.value)  # it has noticed the death, or was aborted for it
    with pytest.raises(RuntimeError, match="ended with exit code 3 before it had returned"):
        run_ranks(1, leaves, processes=True)


def leaves(comm):
    os._exit(3)


class Stubborn(Exception):
    """Cannot be made again from its arguments."""

    def __init__(self, one, two):
        super().__init__(one)


def raises_stubborn(comm):
    raise Stubborn("what it says", 2)


def returns_a_lock(comm):
    return threading.Lock()


def test_what_cannot_be_pickled_is_said():
    with pytest.raises(RuntimeError, match=r"rank 0 raised what cannot be pickled: .*Stubborn: what it says"):
        run_ranks(1, raises_stubborn, processes=True)
    with pytest.raises(TypeError, match="lock"):
        run_ranks(1, returns_a_lock, processes=True)
    with pytest.raises(TypeError, match="go to processes of their own, and cannot be pickled"):
        run_ranks(1, lambda comm: None, processes=True)


def environment(comm):
    return os.environ["NCCLPY_LIBRARY"], os.environ.get("FOR_RANKS"), ncclpy.library().engine


def test_processes_use_the_same_library_and_get_the_environment(monkeypatch):
    monkeypatch.delenv("NCCLPY_LIBRARY", raising=False)  # as if it was chosen with ncclpy.use
    assert run_ranks(1, environment, processes=True, env={"FOR_RANKS": "1"}) == [("host", "1", "host")]
    assert "FOR_RANKS" not in os.environ


def test_ctrl_c_ends_the_ranks():
    ended = []

    def body(comm):
        if comm.rank == 0:
            os.kill(os.getpid(), signal.SIGINT)
        else:
            try:
                comm.barrier()
            finally:
                ended.append(comm.rank)
        if comm.rank == 0:
            testing.wait_for(lambda: ended, "the end of rank 1")

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_ranks(2, body)
            time.sleep(10)
    finally:
        signal.signal(signal.SIGINT, handler)
    testing.wait_for(lambda: ended == [1], "the end of rank 1")


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="pass processes=True"):
        run_ranks(2, mean, 1.0, killed=[1])
    with pytest.raises(ValueError, match="killed names rank 2, and the ranks are 0 to 1"):
        run_ranks(2, mean, 1.0, processes=True, killed=[2])
    with pytest.raises(ValueError, match="NCCLPY_HOST_DEVICES=1000 shows more"):
        run_ranks(1000, mean, 1.0)
