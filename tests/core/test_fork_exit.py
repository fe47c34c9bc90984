"""Processes that fork, that exit with open communicators, or that exit in the middle of a call."""

from __future__ import annotations

import signal
import time

import pytest

import ncclpy
import testing

FORK = """
    import os, warnings
    warnings.simplefilter("ignore")  # newer Pythons warn of a fork with threads
    import forks, ncclpy
    from ncclpy import bindings
    comm = ncclpy.Communicator.init(1, 0, ncclpy.get_unique_id(), device=0)
    stream = ncclpy.Stream(0)
    pid = os.fork()
    if pid == 0:
        calls = [
            lambda: comm.all_reduce((4096, 1, "int8")),
            lambda: comm.barrier(),
            lambda: comm.split(0, 0),
            lambda: comm.async_error(),
            lambda: comm.close(),
            lambda: ncclpy.get_unique_id(),
            lambda: ncclpy.Communicator.init(1, 0, bytes(128), device=0),
            lambda: ncclpy.Communicator.init_all(range(1)),
            lambda: ncclpy.Stream(0),
            lambda: stream.synchronize(),
            lambda: ncclpy.synchronize(0),
            lambda: bindings.get_version(),
            lambda: bindings.all_reduce(4096, 4096, 1, 0, 0, 4096, 0),
            lambda: bindings.group_start(),
        ]
        code = forks.refused(calls)
        del comm, stream  # no call of NCCL, no warning: the child lets go of what was never its own
        os._exit(code)
    forks.join(pid)
    comm.barrier()  # the parent goes on
    comm.close()
    stream.close()
"""


def test_every_call_of_a_forked_child_raises():
    done = testing.run_python(FORK, timeout=30, warm=True)
    assert done.stderr == ""


def test_fork_before_first_use_is_fine():
    done = testing.run_python(
        """
        import os, forks, ncclpy
        pid = os.fork()
        with ncclpy.Communicator.init(1, 0, ncclpy.get_unique_id(), device=0) as comm:
            comm.barrier()
        if pid == 0:
            os._exit(0)
        forks.join(pid)
        """,
        timeout=30,
        warm=True,
    )
    assert done.stderr == ""


def test_grandchild_is_refused_too():
    testing.run_python(
        """
        import os, warnings
        warnings.simplefilter("ignore")
        import forks, ncclpy
        ncclpy.get_unique_id()
        child = os.fork()
        if child == 0:
            grandchild = os.fork()
            if grandchild == 0:
                os._exit(forks.refused([ncclpy.get_unique_id]))
            os._exit(os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]))
        forks.join(child)
        """,
        timeout=30,
        warm=True,
    )


LEAK = """
    import ncclpy
    def create():
        return ncclpy.Communicator.init(1, 0, ncclpy.get_unique_id(), device=0)
    comm = create()
    print("made")
"""


def test_drop_without_close_exits_silently():
    done = testing.run_python(LEAK, timeout=30, warm=True)
    assert (done.stdout, done.stderr) == ("made\n", "")


def test_drop_without_close_gives_one_warning_with_the_creation_site():
    done = testing.run_python(LEAK + "    del comm\n", timeout=30, env={"PYTHONWARNINGS": "always"})
    assert done.stderr.count(": ResourceWarning: ") == 1, done.stderr
    assert "<string>:4" in done.stderr, "create() calls init on line 4"


@pytest.mark.parametrize(
    "drop",
    ["del comm", "cycle = [comm]; cycle.append(cycle); del comm, cycle; import gc; gc.collect()"],
    ids=["counted out", "collected"],
)
def test_drop_in_the_middle_exits_silently(drop):
    done = testing.run_python(LEAK + f"    {drop}\n    print('dropped')\n", timeout=30, warm=True)
    assert (done.stdout, done.stderr) == ("made\ndropped\n", "")


def test_exit_with_missing_peers_is_silent():
    done = testing.run_python(
        """
        import threading, time, ncclpy
        def init():
            ncclpy.Communicator.init(2, 0, ncclpy.get_unique_id(), device=0)
        threading.Thread(target=init, daemon=True).start()
        time.sleep(0.5)
        print("leaving")
        """,
        timeout=30,
        env={"NCCLPY_HOST_DEVICES": "2"},
        warm=True,
    )
    assert (done.stdout, done.stderr) == ("leaving\n", "")


@pytest.mark.parametrize("stuck", [True, False])
def test_exit_runs_no_destructors_under_a_thread_inside_nccl(stuck):
    """Destructors of NCCL and CUDA would free memory in use by the thread: a rare SIGSEGV. Status and output stay."""
    until_inside = 0.5 if ncclpy.library().engine == "host" else 5.0  # on a busy machine CUDA starts in seconds
    done = testing.run_python(
        f"""
        import ctypes, sys, threading, time, ncclpy
        libc = ctypes.CDLL(None)
        libc.on_exit(libc.abort, None)  # as a destructor of a library that was loaded before
        def init():
            ncclpy.Communicator.init(2, 0, ncclpy.get_unique_id(), device=0)
        if {stuck}:
            threading.Thread(target=init, daemon=True).start()
            time.sleep({until_inside})
        sys.stdout.write("leaving")
        sys.exit(3)
        """,
        timeout=30,
        env={"NCCLPY_HOST_DEVICES": "2"},
        check=False,
        warm=True,
    )
    assert (done.returncode, done.stdout) == (3 if stuck else -signal.SIGABRT, "leaving"), done.stderr


def test_exit_in_the_middle_of_an_operation():
    testing.need_devices(2)
    done = testing.run_python(
        """
        import threading, time, ncclpy
        comms = ncclpy.Communicator.init_all(range(2))
        threading.Thread(target=comms[0].barrier, daemon=True).start()
        time.sleep(0.5)
        print("leaving")
        """,
        timeout=30,
        warm=True,
    )
    assert (done.stdout, done.stderr) == ("leaving\n", "")


def test_exit_with_a_full_stream():
    testing.need_devices(2)
    done = testing.run_python(
        """
        import ncclpy
        from ncclpy.core.runtime import device
        import testing
        comms = ncclpy.Communicator.init_all(range(2))
        testing.connect(comms)
        stream = ncclpy.Stream(0)
        comms[0].recv((device.allocate(64, 0), 16, "float32"), 1, stream=stream)
        print("leaving", stream.is_done())
        """,
        timeout=30,
        warm=True,
    )
    assert (done.stdout, done.stderr) == ("leaving False\n", "")


def test_exit_with_a_pending_nonblocking_init():
    testing.need_devices(2)
    done = testing.run_python(
        """
        import ncclpy
        comm = ncclpy.Communicator.init(2, 0, ncclpy.get_unique_id(), device=0, config=ncclpy.Config(blocking=False))
        print("leaving")
        """,
        timeout=30,
        warm=True,
    )
    assert (done.stdout, done.stderr) == ("leaving\n", "")


def die_in_the_middle(rank):
    import os

    comm = rank.init()
    comm.barrier()
    if rank.rank == 1:
        os._exit(7)
    return comm.rank


def test_helpers_report_a_process_that_dies():
    with pytest.raises(AssertionError, match="rank 1 died with exit code 7"):
        testing.run_processes(2, die_in_the_middle, timeout=40)


def fail_in_the_middle(rank):
    rank.init().barrier()
    if rank.rank == 1:
        raise KeyError("lost")
    return rank.rank


@pytest.mark.slow
def test_helpers_show_the_traceback_of_a_failed_process():
    with pytest.raises(AssertionError, match=r"(?s)rank 1.*fail_in_the_middle.*KeyError: 'lost'"):
        testing.run_processes(2, fail_in_the_middle, timeout=40)


@pytest.mark.parametrize("late", [False, True], ids=["in a barrier", "coming out of init"])
def test_failing_thread_frees_the_others(late):
    left = []

    def rank(rank):
        comm = rank.init(abortable=True)  # its first call may be stuck inside NCCL
        if rank.rank == 1:
            raise KeyError("lost")
        if late:
            # The other rank has failed and everything was aborted; this communicator becomes known only now.
            rank.comms.clear()
            time.sleep(0.5)
            rank.comms.append(comm)
        try:
            comm.barrier()
        finally:
            left.append(rank.rank)
            comm.abort()

    with pytest.raises(KeyError, match="lost"):
        testing.run_threads(2, rank, timeout=40)
    assert left == [0]


def test_exit_waits_briefly_for_a_launch_in_its_callers_thread(host_engine):
    """As for a launch on the lanes: a process should not end inside a call of NCCL."""
    testing.run_python(
        """
        import atexit, os, threading, time

        @atexit.register  # first, and so called last
        def check():
            for device in range(2):
                ncclpy.synchronize(device)  # what was issued by now
            if not all((array == 2).all() for array in arrays):
                os._exit(7)

        os.sched_getaffinity = lambda pid: {0, 1}  # one lane: of several, each that still starts would make a call
        import numpy as np, ncclpy
        comms = ncclpy.Communicator.init_all([0, 1])
        arrays = [np.ones(4, np.float32) for _ in comms]
        streams = [ncclpy.Stream(comm.device) for comm in comms]
        plan = ncclpy.Plan()
        with plan.record():
            for comm, array, stream in zip(comms, arrays, streams):
                comm.all_reduce(array, stream=stream)
        faults = ncclpy.faults("call=GroupEnd nth=1 do=delay:300ms").__enter__()
        threading.Thread(target=plan.launch, daemon=True).start()
        end = time.monotonic() + 20
        while not faults.fired:
            assert time.monotonic() < end, "the launch has not called ncclGroupEnd"
            time.sleep(0.001)
        """
    )
