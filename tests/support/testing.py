"""Helpers of the tests: ranks as threads or processes under one deadline, and the arrays of the run (`array_libs`).

pytest is imported by who needs it alone: it takes as long as all else here, and many programs of tests import this.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from multiprocessing import forkserver

import numpy as np
import warm_ranks
from array_libs import DTYPES as DTYPES
from array_libs import CupyArrays as CupyArrays
from array_libs import NumpyArrays as NumpyArrays
from array_libs import RawArrays as RawArrays
from array_libs import TorchArrays as TorchArrays
from array_libs import arrays as arrays
from array_libs import ncclpy_dtype as ncclpy_dtype
from paths import SUPPORT

import ncclpy
from ncclpy.core.runtime import device as device_module


def device_of(rank: int) -> int:
    """Return the device of a rank of this run: its own, unless the ranks are processes that share GPUs."""
    return rank % ncclpy.device_count() if _may_share_devices() else rank


def _may_share_devices() -> bool:
    # NCCL allows it from 2.30, where the environment asks for it. Of one process's ranks one may wait for the device
    # while the other's kernel waits for it, so that is for processes alone.
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and ncclpy.library().engine == "cuda"


#: Seconds for one process of a long campaign: minutes on a machine that has much else to do.
LONG = 280
#: What part of a campaign runs: `.ci/run full`, which is to be quick, says a tenth.
SHARE = float(os.environ.get("NCCLPY_TEST_SHARE", "1"))


def share(amount: int) -> int:
    """Return how many of so many runs, or seconds, of a campaign are to be."""
    return max(1, round(amount * SHARE))


def need_processes(count: int) -> None:
    """Skip the test unless so many processes can have a device each, or may share those there are."""
    # Of processes that share a GPU only one runs at a time: more than two take too long to wait for each other.
    need_devices((count + 1) // 2 if _may_share_devices() else count)


def need_devices(count: int) -> None:
    """Skip the test if the machine shows fewer devices."""
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
    with ncclpy.Stream(device) as stream:  # of its own: what waits on other streams may wait on
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
    """Pass a message between every two of one thread's communicators, and a sum among all.

    NCCL connects ranks at their first operation, and a blocking call waits until that is done. Tests that want a call
    to return while its peer is missing begin with this.
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
    """Yield the communicators of `nranks` devices, once, for fixtures; then close what is still open."""
    need_devices(nranks)
    comms = ncclpy.Communicator.init_all(range(nranks), **options)
    yield comms
    close_all(comms)


def close_all(comms) -> None:
    """Close communicators of one process, each from its own thread, as their ranks would."""
    threads = [threading.Thread(target=comm.close, daemon=True) for comm in comms if not comm.closed]
    for thread in threads:
        thread.start()
    _join(threads, time.monotonic() + 30)
    stuck = sum(thread.is_alive() for thread in threads)
    if stuck:
        abort_all(comms)
        raise AssertionError(f"{stuck} of {len(comms)} communicators did not close within 30 s")


def abort_all(comms) -> None:
    """Abort every communicator, each from its own thread that may be left behind."""
    threads = [threading.Thread(target=_abort, args=(comm,), daemon=True) for comm in comms if not comm.closed]
    for thread in threads:
        thread.start()
    _join(threads, time.monotonic() + 10)


def _abort(comm):
    try:
        comm.abort()
    except ncclpy.NcclError:
        pass  # the failure that made us abort is the one to report


def _join(threads, deadline):
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


class Rank:
    """What the function of one rank gets: who it is, and how it meets the others.

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
        """Return one id on every rank; rank 0 makes it."""
        return ncclpy.UniqueId.from_bytes(self._share(bytes(ncclpy.get_unique_id()) if self.rank == 0 else None))

    def init(self, **options):
        """Return this rank's communicator; it is closed after the function, or aborted if any rank fails."""
        options.setdefault("device", self.device)
        comm = ncclpy.Communicator.init(self.nranks, self.rank, self.unique_id(), **options)
        self.comms.append(comm)
        return comm


class _Exchange:
    """Rank 0's words for everyone, between threads: the n-th call of every rank gets the n-th word."""

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
    """Call ``fn(rank)`` once a rank, each in a thread with its own device, and return the results in rank order.

    All ranks share the deadline. The first exception of a rank is raised here with its traceback, after every
    communicator made with `Rank.init`, and each of `comms`, was aborted so that no other rank stays stuck.
    """
    need_devices(nranks)
    deadline = time.monotonic() + timeout
    exchange = _Exchange(nranks, deadline)
    ranks = [Rank(r, nranks, lambda word, r=r: exchange.share(r, word)) for r in range(nranks)]
    results: list = [None] * nranks
    errors: list = []
    failed = threading.Event()

    def body(rank):
        try:
            results[rank.rank] = fn(rank)
            for comm in rank.comms:
                comm.close()
        except BaseException as error:
            errors.append(error)
            failed.set()

    threads = [threading.Thread(target=body, args=(rank,), name=f"rank {rank.rank}", daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) and not failed.is_set() and time.monotonic() < deadline:
        # The thread may end between the two looks; joining one that has ended returns at once.
        next((thread for thread in threads if thread.is_alive()), threads[0]).join(0.02)
    stuck = [thread for thread in threads if thread.is_alive()]
    if stuck and not failed.is_set():
        frames = sys._current_frames()
        where = "\n".join(
            f"{thread.name}:\n" + "".join(traceback.format_stack(frames[thread.ident]))
            for thread in stuck
            if thread.ident in frames
        )
        abort_all([*comms, *(comm for rank in ranks for comm in rank.comms)])
        raise AssertionError(f"{len(stuck)} of {nranks} ranks not done after {timeout} s:\n{where}")
    if errors:
        deadline = time.monotonic() + 10
        # Again and again: a rank may have been inside init, and have its communicator only now.
        while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
            abort_all([*comms, *(comm for rank in ranks for comm in rank.comms)])
            _join(threads, time.monotonic() + 0.1)
        left = [thread.name for thread in threads if thread.is_alive()]
        if left:
            raise AssertionError(f"a rank failed, and abort did not free {', '.join(left)}") from errors[0]
        raise errors[0]
    return results


def process_context():
    """Return the context of multiprocessing in which processes of tests begin.

    They are forks of a server that has imported numpy, pytest and this, and begun nothing: in each of them that would
    take a third of a second of processor time. Its environment is that of when it began, see `with_environment`.
    """
    # Without PYTHONSAFEPATH it would take sources in the current folder for the package. LD_PRELOAD is for new ones.
    if ncclpy.library().engine == "cuda" or sys.version_info < (3, 11) or "LD_PRELOAD" in os.environ:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["numpy", "pytest", "testing"])
    began = {"PYTHONPATH": with_support(), "PYTHONSAFEPATH": "1"}
    before = {name: os.environ.get(name) for name in began}
    os.environ.update(began)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return context


def with_environment(environment: dict, fn, *args):
    """Call a function in a process of `process_context`, with the environment of the process that has begun it."""
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)
    return fn(*args)


def run_processes(nranks: int, fn, *args, timeout: float = 100.0) -> list:
    """Call ``fn(rank, *args)`` once a rank, each in a process of its own, and return the results in rank order.

    `fn` is a function of a module. A child's failure is shown with its traceback; past the deadline every child is
    killed.
    """
    need_processes(nranks)
    context = process_context()
    deadline = time.monotonic() + timeout
    pipes, processes = [], []
    for r in range(nranks):
        ours, theirs = context.Pipe()
        arguments = (dict(os.environ), _child, r, nranks, theirs, fn, args)
        process = context.Process(target=with_environment, args=arguments, name=f"rank {r}", daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return _serve(pipes, processes, deadline, timeout)
    finally:
        for process in processes:
            process.join(max(0.0, min(5.0, deadline - time.monotonic())))
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        for pipe in pipes:
            pipe.close()


def _serve(pipes, processes, deadline, timeout):
    """Pass rank 0's words on to all ranks and collect what each returns."""
    results: dict = {}
    lost: dict = {}  # what became of the ranks that returned nothing
    while len(results) + len(lost) < len(pipes):
        waiting = [pipe for r, pipe in enumerate(pipes) if r not in results and r not in lost]
        ready = multiprocessing.connection.wait(waiting, deadline - time.monotonic())
        if not ready:
            break
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                kind, word = pipe.recv()
            except (EOFError, ConnectionResetError):
                processes[rank].join(5)
                lost[rank] = f"the process of rank {rank} died with exit code {processes[rank].exitcode}"
            else:
                if kind == "share":
                    for other in pipes:
                        with contextlib.suppress(BrokenPipeError):  # it has ended, which is seen above
                            other.send(word)
                elif kind == "failed":
                    lost[rank] = f"rank {rank} failed in its process:\n{word}"
                else:
                    results[rank] = word
        if lost:
            # One rank's end is the failure of the others, and theirs may be heard of first: all are told.
            deadline = min(deadline, time.monotonic() + 2)
    if lost:
        raise AssertionError("\n".join(lost.values()))
    if len(results) < len(pipes):
        missing = [r for r in range(len(pipes)) if r not in results]
        raise AssertionError(f"ranks {missing} not done after {timeout} s; their processes were killed")
    return [results[r] for r in range(len(pipes))]


def _child(r, nranks, pipe, fn, args):
    def share(word):
        if word is not None:
            pipe.send(("share", word))
        return pipe.recv()

    rank = Rank(r, nranks, share)
    try:
        result = fn(rank, *args)
        for comm in rank.comms:
            comm.close()
        pipe.send(("done", result))
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
        os._exit(1)  # the others may never come: nothing here is worth waiting for


def with_support() -> str:
    """Return the PYTHONPATH with which a program finds what tests share."""
    return os.pathsep.join(filter(None, [str(SUPPORT), os.environ.get("PYTHONPATH")]))


def run_python(code: str, *, timeout: float = 60.0, env: dict | None = None, check: bool = True, warm: bool = False):
    """Run a snippet in a fresh interpreter outside the source tree and return the `CompletedProcess`.

    Where it is `warm`, in a fork of one that has imported numpy and ncclpy and begun nothing, which takes a fifth of
    the processor time: for what does not depend on what is imported when, nor on what is read of the environment as a
    process starts or imports, such as PYTHONWARNINGS, LD_PRELOAD and NCCLPY_DUMP_DIR.
    """
    assert not (warm and [name for name in env or () if name.startswith(("PYTHON", "LD_", "NCCLPY_DUMP"))]), env
    environment = {**os.environ, "PYTHONPATH": with_support(), **(env or {})}  # None takes a variable away
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
    """All-reduce a value a rank, its rank plus one unless given, from one thread; return every rank's sum."""
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
    """All-reduce ones over communicators of one thread; every rank must get their number."""
    wanted = len(comms) if expected is None else expected
    assert summed(lib, comms, [1] * len(comms)) == [wanted] * len(comms)


def own_sum(lib, comm, value):
    """All-reduce `value` from the thread of one rank and return the sum."""
    part = lib.make(np.array([value], np.float32), comm.device)
    comm.all_reduce(lib.argument(part))
    return float(lib.read(part)[0])


def refuse_threads(name, patch=setattr):
    """Have threads of this name not start, as where the system has none to give; `patch` may be monkeypatch's."""
    start = threading.Thread.start

    def started(thread):
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    patch(threading.Thread, "start", started)


def wait_for(condition, what: str = "it", timeout: float = 30.0) -> None:
    """Ask until the answer is yes; fail if it does not happen in time."""
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

    NCCL wants the calls on one communicator one after the other. Only the host engine hangs when told to.
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
        _join(threads, time.monotonic() + 30)
    assert sorted(map(id, ended)) == sorted(map(id, (all_reduce, call)))


def without_line(text: str) -> str:
    """Return the text of an error without the lines at which this rank has called what has failed."""
    return re.sub(r"(\. This rank called \S+(?: #\d+)? at \S+:\d+)+$", "", text)


def run_with_deadline(fn, timeout: float = 30.0):
    """Return ``fn()``, called in a thread; fail if it takes longer. For calls that might block for ever."""
    box: list = []

    def body():
        try:
            box.append((fn(), None))
        except BaseException as error:
            box.append((None, error))

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join(timeout)
    if not box:
        stack = "".join(traceback.format_stack(sys._current_frames()[thread.ident]))
        raise AssertionError(f"not back after {timeout} s:\n{stack}")
    result, error = box[0]
    if error is not None:
        raise error
    return result
