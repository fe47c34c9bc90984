"""Helpers of tests: ranks as threads or processes with one deadline, and the arrays of the run (`array_libs`).

Only functions that need pytest import it: its import takes as long as all others here, and many test programs import
this module.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import process_ranks
import thread_ranks
import warm_ranks
from array_libs import DTYPES as DTYPES
from array_libs import CupyArrays as CupyArrays
from array_libs import NumpyArrays as NumpyArrays
from array_libs import RawArrays as RawArrays
from array_libs import TorchArrays as TorchArrays
from array_libs import arrays as arrays
from array_libs import ncclpy_dtype as ncclpy_dtype
from paths import with_support as with_support

import ncclpy
from ncclpy.core.runtime import device as device_module


def device_of(rank: int) -> int:
    """Return the device of a rank of this run: its own, unless ranks are processes that share GPUs."""
    return rank % ncclpy.device_count() if _may_share_devices() else rank


def _may_share_devices() -> bool:
    # NCCL allows it from 2.30 on, if the environment asks for it. Only for processes: a rank in a thread could wait
    # for the device while the kernel of the other rank waits for the thread.
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and ncclpy.library().engine == "cuda"


#: Seconds for one process of a long campaign, which takes minutes on a busy machine.
LONG = 280
#: The share of campaigns that runs: `.ci/run full` sets a tenth to be quick.
SHARE = float(os.environ.get("NCCLPY_TEST_SHARE", "1"))


def share(amount: int) -> int:
    """Return the share of `amount` runs or seconds of a campaign, at least one."""
    return max(1, round(amount * SHARE))


def need_processes(count: int) -> None:
    """Skip the test unless `count` processes can have a device each, or may share the devices."""
    # Only one of the processes that share a GPU runs at a time: more than two would wait too long for each other.
    need_devices((count + 1) // 2 if _may_share_devices() else count)


def need_devices(count: int) -> None:
    """Skip the test if the machine has fewer devices."""
    have = ncclpy.device_count()
    if have < count:
        import pytest

        pytest.skip(f"needs {count} devices, {ncclpy.library().engine} engine shows {have}")


@contextlib.contextmanager
def device_memory(device, nbytes):
    """Yield the address of device memory that is freed afterwards."""
    need_devices(device + 1)
    pointer = device_module.allocate(nbytes, device)
    try:
        yield pointer
    finally:
        device_module.free(pointer)


def write(pointer, values, device=0):
    """Copy a numpy array to device memory."""
    with ncclpy.Stream(device) as stream:  # a new stream: waiting work on other streams does not matter
        device_module.copy(pointer, values.ctypes.data, values.nbytes, stream=stream)
        stream.synchronize()


def read(pointer, count, dtype, device=0):
    """Return device memory as a numpy array, after everything queued on the device."""
    values = np.empty(count, dtype)
    with device_module.using(device):
        ncclpy.synchronize(device)
        device_module.copy(values.ctypes.data, pointer, values.nbytes)
        ncclpy.synchronize(device)
    return values


def connect(comms) -> None:
    """Exchange a message between every two communicators of one thread, and make a sum of all.

    NCCL connects ranks in their first operation, and a blocking call waits for that. Tests in which a call must return
    while its peer is missing begin with this.
    """
    streams = [ncclpy.Stream(comm.device) for comm in comms]
    memory = [ncclpy.core.runtime.device.allocate(4 * comm.nranks, comm.device) for comm in comms]
    with ncclpy.group():
        for comm, stream, pointer in zip(comms, streams, memory, strict=True):
            for peer in range(comm.nranks):
                if peer != comm.rank:
                    comm.send((pointer + 4 * comm.rank, 1, "int32"), peer, stream=stream)
                    comm.recv((pointer + 4 * peer, 1, "int32"), peer, stream=stream)
    with ncclpy.group():
        for comm, stream, pointer in zip(comms, streams, memory, strict=True):
            comm.all_reduce((pointer, 1, "int32"), stream=stream)
    for stream in streams:
        stream.synchronize()
        stream.close()
    for pointer in memory:
        ncclpy.core.runtime.device.free(pointer)


def communicators(nranks: int, **options):
    """Yield the communicators of `nranks` devices, for fixtures; then close the open ones."""
    need_devices(nranks)
    comms = ncclpy.Communicator.init_all(range(nranks), **options)
    yield comms
    close_all(comms)


def close_all(comms) -> None:
    """Close communicators of one process, each in its own thread, as ranks would."""
    left = [comm for comm in comms if not comm.closed]
    thread_ranks.run_ranks(len(left), lambda rank: left[rank].close(), 30.0, lambda reason: abort_all(left))


def abort_all(comms) -> None:
    """Abort every communicator, each in its own thread, which may be left behind."""
    threads = thread_ranks.start([functools.partial(_abort, comm) for comm in comms if not comm.closed], "abort ")
    thread_ranks.join(threads, time.monotonic() + 10)


def _abort(comm):
    try:
        comm.abort()
    except ncclpy.NcclError:
        pass  # report the failure that caused the abort instead


class Rank:
    """The argument of a rank's function: its place, and the means to meet the other ranks.

    Attributes
    ----------
    rank, nranks, device : int
        Its rank, the number of ranks, its own device.
    """

    def __init__(self, rank: int, nranks: int, share):
        self.rank, self.nranks, self.device = rank, nranks, device_of(rank)
        self._share = share
        self.comms: list = []

    def unique_id(self):
        """Return the same id on every rank; rank 0 makes it."""
        return ncclpy.UniqueId.from_bytes(self._share(bytes(ncclpy.get_unique_id()) if self.rank == 0 else None))

    def init(self, **options):
        """Return this rank's communicator; it is closed after the function, or aborted if any rank fails."""
        options.setdefault("device", self.device)
        comm = ncclpy.Communicator.init(self.nranks, self.rank, self.unique_id(), **options)
        self.comms.append(comm)
        return comm


class _Exchange:
    """Values of rank 0 for all ranks, between threads: the n-th call of every rank gets the n-th value."""

    def __init__(self, nranks: int, deadline: float):
        self._deadline = deadline
        self._said = threading.Condition()
        self._words: list = []
        self._heard = [0] * nranks

    def share(self, rank: int, word):
        with self._said:
            index = self._heard[rank]
            self._heard[rank] += 1
            if word is not None:
                self._words.append(word)
                self._said.notify_all()
            if not self._said.wait_for(lambda: len(self._words) > index, self._deadline - time.monotonic()):
                raise TimeoutError(f"rank {rank} waited for rank 0's unique id until the deadline")
            return self._words[index]


def run_threads(nranks: int, fn, timeout: float = 60.0, comms=()) -> list:
    """Call ``fn(rank)`` for each rank, in a thread with its own device, and return the results in rank order.

    All ranks share the deadline. The first exception of a rank is raised here with its traceback, after every
    communicator made with `Rank.init`, and each of `comms`, was aborted, so that no other rank stays stuck.
    """
    need_devices(nranks)
    exchange = _Exchange(nranks, time.monotonic() + timeout)
    ranks = [Rank(r, nranks, lambda word, r=r: exchange.share(r, word)) for r in range(nranks)]

    def abort(reason):
        abort_all([*comms, *(comm for rank in ranks for comm in rank.comms)])

    return thread_ranks.run_ranks(nranks, lambda number: _call(ranks[number], fn), timeout, abort)


def _call(rank, fn, *args):
    """Return ``fn(rank, *args)``, after the communicators that it has made with `Rank.init` are closed."""
    result = fn(rank, *args)
    for comm in rank.comms:
        comm.close()
    return result


def run_processes(nranks: int, fn, *args, timeout: float = 100.0) -> list:
    """Call ``fn(rank, *args)`` for each rank, in a separate process, and return the results in rank order.

    `fn` is a function of a module. A child's failure is reported with its traceback; at the deadline every child is
    killed.
    """
    need_processes(nranks)
    processes = process_ranks.RankProcesses(_begin, nranks, reused=False)
    try:
        return processes.run([(fn, args)] * nranks, timeout)
    finally:
        processes.close(5.0)


def _begin(number, nranks):
    rank = Rank(number, nranks, process_ranks.share)
    return lambda fn, args: _call(rank, fn, *args)


def run_python(code: str, *, timeout: float = 60.0, env: dict | None = None, check: bool = True, warm: bool = False):
    """Run a snippet in a fresh interpreter outside the source tree and return the `CompletedProcess`.

    If `warm`, run in a fork of a process that has imported numpy and ncclpy and made no other calls, which takes a
    fifth of the processor time: for snippets that do not depend on the order of imports, nor on variables read at the
    start or at an import, such as PYTHONWARNINGS, LD_PRELOAD and NCCLPY_DUMP_DIR.
    """
    assert not (warm and [name for name in env or () if name.startswith(("PYTHON", "LD_", "NCCLPY_DUMP"))]), env
    environment = {**os.environ, "PYTHONPATH": with_support(), **(env or {})}  # None removes a variable
    if warm and ncclpy.library().engine == "host":
        left = {name: value for name, value in environment.items() if value is not None}
        done = subprocess.CompletedProcess("warm", *warm_ranks.run_snippet(textwrap.dedent(code), left, timeout))
        if check and done.returncode != 0:
            raise AssertionError(f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd="/",
        env={name: value for name, value in environment.items() if value is not None},
    )
    if check and done.returncode != 0:
        raise AssertionError(f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done


def summed(lib, comms, values=None) -> list[float]:
    """All-reduce a value per rank, by default its rank plus one, from one thread; return every rank's sum."""
    values = [1 + comm.rank for comm in comms] if values is None else values
    parts = [lib.make(np.full(3, value, np.float32), comm.device) for value, comm in zip(values, comms, strict=True)]

    def call():
        with ncclpy.group():
            for comm, part in zip(comms, parts, strict=True):
                comm.all_reduce(lib.argument(part))

    run_with_deadline(call)
    results = [lib.read(part) for part in parts]
    assert all(np.all(result == result[0]) for result in results), results
    return [float(result[0]) for result in results]


def all_ones(lib, comms, expected=None):
    """All-reduce ones over communicators of one thread, and check that every rank gets their number."""
    wanted = len(comms) if expected is None else expected
    assert summed(lib, comms, [1] * len(comms)) == [wanted] * len(comms)


def own_sum(lib, comm, value):
    """All-reduce `value` in the thread of one rank and return the sum."""
    part = lib.make(np.array([value], np.float32), comm.device)
    comm.all_reduce(lib.argument(part))
    return float(lib.read(part)[0])


def refuse_threads(name, patch=setattr):
    """Make threads of this name fail to start, as on a system without free threads; `patch` may be monkeypatch's."""
    start = threading.Thread.start

    def started(thread):
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    patch(threading.Thread, "start", started)


def wait_for(condition, what: str = "it", timeout: float = 30.0) -> None:
    """Call `condition` until it is true; fail at the timeout."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen within {timeout} s"
        time.sleep(0.001)


def need_function(name: str) -> None:
    """Skip the test if the loaded NCCL lacks a function."""
    if not ncclpy.library().has(name):
        import pytest

        pytest.skip(f"needs {name}, which the loaded NCCL lacks")


def check_takes_its_turn(comms, all_reduce, call) -> None:
    """Check that `call` waits behind an all-reduce of rank 1 that hangs; an abort then ends it.

    NCCL needs sequential calls on one communicator. Only the host engine can be made to hang.
    """
    import pytest

    ended: list = []

    def fail(function):
        with pytest.raises(ncclpy.NcclAborted if function is call else ncclpy.NcclError):
            function()
        ended.append(function)

    with ncclpy.faults("rank=1 call=AllReduce nth=1 do=hang") as faults:
        threads = [threading.Thread(target=fail, args=(function,), daemon=True) for function in (all_reduce, call)]
        threads[0].start()
        wait_for(lambda: faults.fired)
        threads[1].start()
        threads[1].join(0.3)
        assert not ended, "it did not wait"
        abort_all(comms)
        thread_ranks.join(threads, time.monotonic() + 30)
    assert sorted(map(id, ended)) == sorted(map(id, (all_reduce, call)))


def without_line(text: str) -> str:
    """Return the text of an error without the lines of this rank's call."""
    return re.sub(r"(\. This rank called \S+(?: #\d+)? at \S+:\d+)+$", "", text)


def run_with_deadline(fn, timeout: float = 30.0):
    """Return ``fn()``, called in a thread; fail at the timeout. For calls that might block for ever."""
    return thread_ranks.run_ranks(1, lambda rank: fn(), timeout)[0]
