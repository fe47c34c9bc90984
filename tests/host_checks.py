"""Small helpers of the host engine's tests: expected refusals, polling, threads that may be stuck."""

import threading
import time

import host_bodies as bodies
import numpy as np
import pytest
from host_ranks import DEADLINE
from nccl_calls import IN_PROGRESS, SUM, NcclError


def refused(code, words, call, *arguments):
    with pytest.raises(NcclError) as error:
        call(*arguments)
    assert error.value.code == code, error.value
    assert words in error.value.text, error.value


def wait_ready(nccl, comm, deadline=DEADLINE):
    """Poll a nonblocking communicator; return its state when it is no longer in progress."""
    end = time.monotonic() + deadline
    while (state := nccl.async_error(comm)) == IN_PROGRESS:
        assert time.monotonic() < end, "still in progress"
        time.sleep(0.001)
    return state


def in_thread(function, *arguments):
    """Start a thread; return it, with its result in `.result`."""
    thread = threading.Thread(target=lambda: setattr(thread, "result", function(*arguments)), daemon=True)
    thread.start()
    return thread


def join(thread, seconds=10):
    thread.join(seconds)
    assert not thread.is_alive(), f"still blocked after {seconds} s"
    return thread.result


def blocked(thread):
    """Return whether the thread is still busy after a while."""
    thread.join(0.2)
    return thread.is_alive()


def sum_ones(nccl, comms, streams):
    """All-reduce over all ranks from this thread and return what rank 0 gets."""
    values = [np.ones(5000, np.float32) for _ in comms]
    nccl.ncclGroupStart()
    for comm, stream, value in zip(comms, streams, values, strict=False):
        nccl.ncclAllReduce(bodies.pointer(value), bodies.pointer(value), 5000, 7, SUM, comm, stream)
    nccl.ncclGroupEnd()
    for stream in streams:
        nccl.driver.cuStreamSynchronize(stream)
    assert all((value == value[0]).all() and value[0] == values[0][0] for value in values)
    return values[0][0]
