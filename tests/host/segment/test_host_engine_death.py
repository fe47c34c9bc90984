"""Ranks that die, what they leave behind, and the cost of waiting."""

import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import leak_check
import numpy as np
import pytest
from host_checks import blocked, in_thread, join, start, wait_for
from nccl_calls import INVALID_ARGUMENT, REMOTE, SUM, SYSTEM, NcclError
from paths import SUPPORT

import testing

HERE = Path(__file__).resolve().parent
FLOAT32 = 7


@pytest.mark.parametrize(
    "kills",
    [
        2,
        pytest.param(10, marks=pytest.mark.slow),
        pytest.param(testing.share(100), id="campaign", marks=pytest.mark.campaign),
    ],
)
def test_ranks_killed_at_random_moments_are_noticed(kills):
    seed = int(os.environ.get("NCCLPY_TEST_SEED", random.SystemRandom().randrange(10**6)))
    shared = leak_check.shared_memory()
    done = subprocess.run(
        [sys.executable, HERE / "kill_runs.py", str(seed), str(kills)],
        env=os.environ | {"PYTHONPATH": str(SUPPORT)},
        capture_output=True,
        text=True,
        timeout=100 if kills <= 10 else testing.LONG,
        cwd="/",
    )
    runs = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and len(runs) == kills, done.stderr
    failed = [run for run in runs if run["problems"]]
    assert not failed, f"repeat with `python kill_runs.py {failed[0]['seed']} 1`: {failed}\n{done.stderr}"
    assert max(run["noticed_ms"] for run in runs) < 5000  # not by a deadline, which is 10 s
    assert leak_check.shared_memory() == shared


@pytest.mark.parametrize("end", ["kill", "exit", "crash"])
def test_rank_that_ends_during_init_is_reported(nccl, end):
    uid = nccl.unique_id()
    comm = ctypes.c_void_p()
    waiting = in_thread(nccl.init_into, comm, 3, uid, 0)
    other = start(
        """
        thread = threading.Thread(target=init, args=(3, 1, sys.argv[1]), daemon=True)
        thread.start()
        time.sleep(0.2)
        say("there")
        sys.stdin.readline()
        os._exit(0) if sys.argv[2] == "exit" else os.abort()
        """,
        uid.hex(),
        end,
    )
    assert other.stdout.readline() == "there\n"
    if end == "kill":
        other.kill()
    other.communicate("go\n")
    with pytest.raises(NcclError, match=f"rank 1 of 3 is dead: process {other.pid}") as caught:
        join(waiting)
    assert caught.value.code == REMOTE
    assert not comm.value


def test_process_that_destroyed_its_communicator_may_end(nccl):
    uid = nccl.unique_id()
    other = start("nccl.ncclCommDestroy(init(2, 1, sys.argv[1]))", uid.hex())
    comm = nccl.init(2, uid, 0)
    other.communicate(timeout=10)
    assert other.returncode == 0
    time.sleep(0.05)
    assert nccl.async_error(comm) == 0
    nccl.ncclCommDestroy(comm)


def test_death_breaks_only_communicators_of_the_dead_rank(nccl, comms, streams):
    uid = nccl.unique_id()
    other = start("comm = init(2, 1, sys.argv[1])\nsay('in')\ntime.sleep(60)", uid.hex())
    comm = nccl.init(2, uid, 0)
    assert other.stdout.readline() == "in\n"
    values = np.ones(10, np.float32)
    nccl.ncclAllReduce(values.ctypes.data, values.ctypes.data, 10, FLOAT32, SUM, comm, streams[0])
    other.send_signal(signal.SIGSTOP)  # a stopped process is not dead
    time.sleep(0.3)
    assert nccl.async_error(comm) == 0
    other.kill()
    wait_for(lambda: nccl.async_error(comm) == REMOTE)
    synchronizing = in_thread(nccl.driver.cuStreamSynchronize, streams[0])
    assert blocked(synchronizing)  # it hangs until the abort, as a kernel of NCCL does
    for refused in (nccl.ncclCommDestroy, nccl.ncclCommFinalize):
        with pytest.raises(NcclError, match="rank 1 of 2 is dead") as caught:
            refused(comm)
        assert caught.value.code == REMOTE
    assert "rank 1 of 2 is dead" in nccl.last_error(comm)
    nccl.ncclCommAbort(comm)
    join(synchronizing)
    other.communicate()
    # The four ranks of this process still work.
    nccl.ncclGroupStart()
    results = np.zeros(4, np.float32)
    for rank in range(4):
        nccl.ncclAllReduce(values.ctypes.data, results[rank:].ctypes.data, 1, FLOAT32, SUM, comms[rank], streams[rank])
    nccl.ncclGroupEnd()
    for stream in streams:
        nccl.driver.cuStreamSynchronize(stream)
    assert results.tolist() == [4.0] * 4


@pytest.mark.parametrize("attempt", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 5))])
def test_death_of_a_rank_during_reads_of_its_memory_is_reported(nccl, streams, attempt):
    """The rank has arrived at the last barrier, but not all ranks have read from it: a race, so several times."""
    count = 128 << 20
    uid = nccl.unique_id()
    other = start(
        """
        comm = init(2, 1, sys.argv[1])
        values = np.ones(int(sys.argv[2]), np.uint8)
        nccl.ncclBroadcast(values.ctypes.data, values.ctypes.data, values.size, 1, 1, comm, nccl.driver.stream(1))
        time.sleep(60)
        """,
        uid.hex(),
        count,
    )
    comm = nccl.init(2, uid, 0)
    values = np.zeros(count, np.uint8)
    nccl.ncclBroadcast(values.ctypes.data, values.ctypes.data, count, 1, 1, comm, streams[0])
    waiting = in_thread(nccl.driver.cuStreamSynchronize, streams[0])
    wait_for(lambda: values[0] == 1)
    other.kill()
    wait_for(lambda: not waiting.is_alive() or nccl.async_error(comm) == REMOTE)
    is_whole = not waiting.is_alive()
    assert not is_whole or (values == 1).all()
    nccl.ncclCommAbort(comm)
    join(waiting)
    other.communicate()


def test_death_is_noticed_by_all_threads_and_processes(nccl):
    uid = nccl.unique_id()
    program = """
        def rank(number):
            comm = init(5, number, sys.argv[1])
            stream = nccl.driver.stream(1)
            data = np.ones(1000000, np.float32)
            if number != 4: say("ready")
            for i in range(10**6):
                nccl.ncclAllReduce(data.ctypes.data, data.ctypes.data, data.size, 7, 2, comm, stream)
                nccl.driver.cuStreamSynchronize(stream)
        threads = [threading.Thread(target=rank, args=(int(number),), daemon=True) for number in sys.argv[2:]]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
    """
    other = start(program, uid.hex(), 2, 3, 4)
    comms = [ctypes.c_void_p(), ctypes.c_void_p()]

    def work(rank):
        nccl.driver.use(rank)
        nccl.init_into(comms[rank], 5, uid, rank)
        stream = nccl.driver.stream(1)
        data = np.ones(1_000_000, np.float32)
        while nccl.async_error(comms[rank]) == 0:
            nccl.ncclAllReduce(data.ctypes.data, data.ctypes.data, data.size, FLOAT32, 2, comms[rank], stream)
            nccl.driver.cuStreamSynchronize(stream)  # hangs after the death until the abort
        nccl.driver.cuStreamDestroy_v2(stream)

    working = [in_thread(work, rank) for rank in range(2)]
    assert [other.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    time.sleep(0.05)
    other.kill()
    for rank in range(2):
        wait_for(lambda rank=rank: nccl.async_error(comms[rank]) == REMOTE)
    for comm in comms:
        nccl.ncclCommAbort(comm)
    for thread in working:
        try:
            join(thread)
        except NcclError as error:  # a call after the death, or the abort
            assert error.code in (REMOTE, INVALID_ARGUMENT)
    other.communicate()


def test_communicators_leave_no_files_behind(nccl):
    for comm in nccl.init_all(8):
        nccl.ncclCommDestroy(comm)
    before = len(os.listdir("/proc/self/fd")), leak_check.shared_memory()
    for i in range(20):
        comms = nccl.init_all(8)
        for comm in comms:
            (nccl.ncclCommAbort if i % 2 else nccl.ncclCommDestroy)(comm)
    assert (len(os.listdir("/proc/self/fd")), leak_check.shared_memory()) == before


def sum_much(rank):
    with rank.communicator() as comm:
        data = np.ones(1_000_000, np.float32)
        rank.nccl.ncclAllReduce(data.ctypes.data, data.ctypes.data, data.size, FLOAT32, SUM, comm, rank.stream)
        rank.synchronize()
        assert (data == rank.nranks).all()


def test_id_maker_that_is_no_rank_keeps_no_memory(nccl, processes):
    processes.run(nccl, 2, sum_much)
    open_files = [entry for entry in Path("/proc/self/fd").iterdir() if entry.exists()]
    assert not [entry for entry in open_files if "ncclpy-communicator" in os.readlink(entry)]


def test_waiting_costs_no_cpu(nccl):
    uid = nccl.unique_id().hex()
    # In separate processes: other threads of this one use processor time too.
    other = start("comm = init(8, 7, sys.argv[1])\nsay('in')\nsys.stdin.readline()\nnccl.ncclCommAbort(comm)", uid)
    waiting = start(
        """
        import resource
        comms = [None] * 7
        def begin(rank):
            comms[rank] = init(8, rank, sys.argv[1])
        threads = [threading.Thread(target=begin, args=(rank,)) for rank in range(7)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        data = np.ones((7, 100_000), np.float32)
        for rank in range(7):  # seven ranks wait on their streams for one that does not come
            nccl.driver.use(rank)
            pointer = data[rank].ctypes.data
            nccl.ncclAllReduce(pointer, pointer, 100_000, 7, 0, comms[rank], nccl.driver.stream(1))
        time.sleep(0.2)
        def used_in(seconds):
            before = resource.getrusage(resource.RUSAGE_SELF)
            time.sleep(seconds)
            after = resource.getrusage(resource.RUSAGE_SELF)
            return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        # What a wake-up takes is the machine's affair, and others keep it busy: the quietest look counts.
        used = 1.0
        for _ in range(12):
            used = min(used, used_in(0.5) / 0.5)
            if used < 0.01: break
        say(used)
        for comm in comms: nccl.ncclCommAbort(comm)
        """,
        uid,
    )
    assert other.stdout.readline() == "in\n"
    used = float(waiting.stdout.readline())
    waiting.communicate()
    other.communicate("go\n")
    assert (waiting.returncode, other.returncode) == (0, 0)
    assert used < 0.01, f"{used:.1%} of a core while waiting"


def test_no_more_threads_is_an_error_not_a_crash():
    program = """
        import resource
        nccl.driver.use(0)
        size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        limits = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (size + 3 * 2**20, limits[1]))
        try:
            nccl.init_all(4)
        except NcclError as error:
            print("init", error.code, error.text)
        x = np.ones(4, np.float32)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        comms = nccl.init_all(4)
        print(len(set(comms)))
    """
    done = start(program)
    said = done.communicate(timeout=30)[0]
    assert done.returncode == 0
    assert said.startswith(f"init {SYSTEM} ncclGroupEnd : ") and said.endswith("4\n"), said


def test_launch_without_a_thread_for_a_stream_releases_the_others():
    program = """
        import resource
        nccl.driver.use(0)
        (comm,) = nccl.init_all(1)
        first, second = nccl.driver.stream(1), nccl.driver.stream(1)
        nccl.driver.later(second, lambda: None)
        nccl.driver.cuStreamSynchronize(second)  # it has its thread
        x = np.ones(4, np.float32)
        size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        limits = resource.getrlimit(resource.RLIMIT_AS)
        nccl.ncclGroupStart()
        for stream in (first, second):
            nccl.ncclAllReduce(x.ctypes.data, x.ctypes.data, 4, 7, 0, comm, stream)
        resource.setrlimit(resource.RLIMIT_AS, (size + 3 * 2**20, limits[1]))
        try:
            nccl.ncclGroupEnd()
        except NcclError as error:
            print(error.code, error.text)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        nccl.driver.cuStreamSynchronize(second)
        print("free")
    """
    done = start(program)
    try:
        said = done.communicate(timeout=20)[0]
    finally:
        done.kill()
    assert said.startswith(f"{SYSTEM} ncclGroupEnd : ") and said.endswith("free\n"), said
