"""`ncclpy.testing.run_ranks`: which error it raises, and that nothing hangs or is left behind."""

import os
import signal
import subprocess
import sys
import time

import pytest
import run_ranks_bodies as bodies
from paths import SUPPORT

import ncclpy
import testing
from ncclpy.testing import run_ranks

pytestmark = pytest.mark.usefixtures("host_engine")
KINDS = pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])
# For behaviour in processes that other tests check too.
THREADS_FIRST = pytest.mark.parametrize(
    "processes", [pytest.param(False, id="threads"), pytest.param(True, id="processes", marks=pytest.mark.slow)]
)


@pytest.fixture
def short_grace(monkeypatch):
    """Wait less for ranks that do not end anyway."""
    monkeypatch.setattr(ncclpy.testing, "_GRACE", 0.5)


def notes(error):
    return "\n".join(error.__notes__)


@KINDS
def test_results_come_in_the_order_of_the_ranks(processes):
    nranks = 2 if processes else 3
    mean = [10 + (nranks - 1) / 2] * 3
    assert run_ranks(nranks, bodies.mean, 10.0, processes=processes) == [(rank, mean) for rank in range(nranks)]


@KINDS
def test_real_error_is_raised_and_frees_the_others(processes, monkeypatch):
    # With corruption on, the first of the two other processes to abort may complete the operation of the second, which
    # then has no error.
    monkeypatch.setenv("NCCLPY_HOST_ABORT_CORRUPTS", "0")
    begin = time.monotonic()
    with pytest.raises(KeyError, match="the real one") as caught:
        run_ranks(3, bodies.fails_on, 1, processes=processes)
    assert time.monotonic() - begin < 30  # of 60: the others were aborted
    assert "raised by rank 1" in notes(caught.value)
    assert "rank 0: Nccl" in notes(caught.value) and "rank 2: Nccl" in notes(caught.value)
    assert not processes or "in fails_on" in str(caught.value.__cause__), "the traceback in the process is shown"


@THREADS_FIRST
def test_real_error_is_raised_even_after_the_timeout_of_another(processes):
    with pytest.raises(KeyError, match="the real one") as caught:
        run_ranks(2, bodies.fails_late, processes=processes)
    assert "rank 0: NcclTimeout" in notes(caught.value)


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


@KINDS
def test_rank_that_does_not_end_is_shown_with_its_place(processes, short_grace, tmp_path):
    with pytest.raises(TimeoutError, match=r"rank 1 not done .* after rank 0 had failed") as caught:
        run_ranks(2, bodies.sleeps_on, 1, tmp_path, processes=processes)
    left = [pid for pid in pids_in(tmp_path, 2) if alive(pid)]
    assert left == ([] if processes else [os.getpid()] * 2), "no process is left behind"
    assert "in sleeps_on" in str(caught.value) and "ncclpy/testing.py" not in str(caught.value)
    assert "rank 0: NcclTimeout" in notes(caught.value)


@THREADS_FIRST
def test_deadline_ends_ranks_that_wait_for_nothing(processes, short_grace):
    seconds = 8 if processes else 1  # a busy machine takes some to start a process, which is not under test
    with pytest.raises(TimeoutError, match=f"ranks 0, 1 not done in {seconds} s"):
        run_ranks(2, bodies.all_sleep, processes=processes, timeout=seconds)


def test_processes_end_when_their_starter_is_killed(tmp_path):
    code = (
        "import pathlib, sys, ncclpy.testing, run_ranks_bodies\n"
        "ncclpy.testing.run_ranks(2, run_ranks_bodies.sleeps_on, 1, pathlib.Path(sys.argv[1]), processes=True)"
    )
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT)}
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=environment, cwd="/") as parent:
        pids = pids_in(tmp_path, 2)
        parent.kill()
        parent.wait()
    testing.wait_for(lambda: not any(map(alive, pids)), "the end of all ranks")


KILL = {"NCCLPY_FAULTS": "rank=1 call=AllReduce do=kill"}


def test_rank_may_be_killed_on_purpose():
    # In the second all-reduce: a rank that dies right after its own init may do so before others have finished theirs.
    second = {"NCCLPY_FAULTS": "rank=1 call=AllReduce nth=2 do=kill"}
    assert run_ranks(2, bodies.survives, processes=True, env=second, killed=[1]) == [True, None]
    with pytest.raises(RuntimeError, match="rank 0 was to be killed, and has returned"):
        run_ranks(1, bodies.mean, 1.0, processes=True, killed=[0])


def test_rank_that_dies_is_the_real_error():
    with pytest.raises(RuntimeError, match="the process of rank 1 was killed by SIGKILL") as caught:
        run_ranks(2, bodies.mean, 1.0, processes=True, env=KILL)
    assert "rank 0: Nccl" in notes(caught.value)  # it has noticed the death, or was aborted because of it
    with pytest.raises(RuntimeError, match="ended with exit code 3 before it had returned"):
        run_ranks(1, bodies.leaves, processes=True)


def test_unpicklable_errors_and_results_are_reported():
    with pytest.raises(RuntimeError, match=r"rank 0 raised what cannot be pickled: .*Stubborn: what it says"):
        run_ranks(1, bodies.raises_stubborn, processes=True)
    with pytest.raises(TypeError, match="lock"):
        run_ranks(1, bodies.returns_a_lock, processes=True)
    with pytest.raises(TypeError, match="go to processes of their own, and cannot be pickled"):
        run_ranks(1, lambda comm: None, processes=True)


def test_processes_use_the_same_library_and_get_the_environment(monkeypatch):
    monkeypatch.delenv("NCCLPY_LIBRARY", raising=False)  # as if it was chosen with ncclpy.use
    assert run_ranks(1, bodies.environment, processes=True, env={"FOR_RANKS": "1"}) == [("host", "1", "host")]
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
        run_ranks(2, bodies.mean, 1.0, killed=[1])
    with pytest.raises(ValueError, match="killed names rank 2, and the ranks are 0 to 1"):
        run_ranks(2, bodies.mean, 1.0, processes=True, killed=[2])
    with pytest.raises(ValueError, match="NCCLPY_HOST_DEVICES=1000 shows more"):
        run_ranks(1000, bodies.mean, 1.0)
