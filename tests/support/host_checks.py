"""Helpers for tests of the host engine: expected refusals, polling, threads that may be stuck."""

import os
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
import rank_programs as bodies
from nccl_calls import IN_PROGRESS, INVALID_USAGE, SUM, NcclError
from paths import SUPPORT

from testing import wait_for


def refused(code, words, call, *arguments):
    with pytest.raises(NcclError) as error:
        call(*arguments)
    assert error.value.code == code, error.value
    assert words in error.value.text, error.value


def wait_ready(nccl, comm):
    """Poll a nonblocking communicator; return its state when it is no longer in progress."""
    wait_for(lambda: nccl.async_error(comm) != IN_PROGRESS)
    return nccl.async_error(comm)


def in_thread(function, *arguments):
    """Start a thread, to be joined with `join`."""

    def run():
        try:
            thread.result, thread.error = function(*arguments), None
        except Exception as error:
            thread.error = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def join(thread, seconds=10):
    """Return what the thread's function returned, or raise what it raised."""
    thread.join(seconds)
    assert not thread.is_alive(), f"still blocked after {seconds} s"
    if thread.error is not None:
        raise thread.error
    return thread.result


def start(program, *arguments):
    """Start a Python program with the library as `nccl`; it reads and writes lines."""
    source = textwrap.dedent(
        """
        import ctypes, os, sys, time, threading
        import numpy as np
        from nccl_calls import Nccl, NcclError
        from ncclpy.core.runtime.search import host_engine_path
        nccl = Nccl(host_engine_path())
        def say(*words): os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # in one piece, also by threads
        def init(nranks, rank, uid):
            nccl.driver.use(rank)
            return nccl.init(nranks, bytes.fromhex(uid), rank)
        """
    ) + textwrap.dedent(program)
    return subprocess.Popen(
        [sys.executable, "-c", source, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(SUPPORT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
    )


def blocked(thread):
    """Return whether the thread is still busy after a while."""
    thread.join(0.2)
    return thread.is_alive()


def hangs_by_mismatch(nccl, comm, stream):
    """Assert that the stream hangs at an operation on which the ranks do not agree, and return its waiting thread."""
    wait_for(lambda: nccl.async_error(comm) == INVALID_USAGE)
    waiting = in_thread(nccl.driver.cuStreamSynchronize, stream)
    assert blocked(waiting), "the stream passed a failed operation"
    return waiting


def sum_ones(nccl, comms, streams):
    """All-reduce over all ranks from this thread and return the result of rank 0."""
    values = [np.ones(5000, np.float32) for _ in comms]
    nccl.ncclGroupStart()
    for comm, stream, value in zip(comms, streams, values, strict=False):
        nccl.ncclAllReduce(bodies.pointer(value), bodies.pointer(value), 5000, 7, SUM, comm, stream)
    nccl.ncclGroupEnd()
    for stream in streams:
        nccl.driver.cuStreamSynchronize(stream)
    assert all((value == value[0]).all() and value[0] == values[0][0] for value in values)
    return values[0][0]
