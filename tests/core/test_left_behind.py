"""Communicators with a thread inside a call, on an engine where an abort does not end that call, as in NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest

import ncclpy
import testing

PRELUDE = """
import os, signal, sys, threading, warnings
import numpy as np
import ncclpy, testing

class Enough(Exception):
    pass

def enough(*_):
    raise Enough

signal.signal(signal.SIGALRM, enough)
comms = ncclpy.Communicator.init_all([0, 1])
warnings.simplefilter("always")
"""


@pytest.fixture
def library(host_engine, tmp_path):
    """Return a host engine in which the symbol that announces such aborts is renamed, so that it is not found."""
    image, exported = Path(ncclpy.library().path).read_bytes(), b"\0ncclpyHostAbortPreempts\0"
    assert image.count(exported) >= 1
    path = tmp_path / "libncclpy_host.so"
    path.write_bytes(image.replace(exported, b"\0ncclpyNoneAbortPreempts\0"))
    return str(path)


def said_by(library, program):
    """Return the output of a program that ends in the middle of a call."""
    program = f"{PRELUDE}{program}\nsys.stdout.flush()\nos._exit(0)"
    return testing.run_python(program, env={"NCCLPY_LIBRARY": library}, warm=True).stdout


INTERRUPTED = """
with ncclpy.faults("call=CommSplit do=hang"), warnings.catch_warnings(record=True) as caught:
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        comms[0].split(0)
    except Enough:
        print("left")
[warning] = [each for each in caught if issubclass(each.category, RuntimeWarning)]
print(warning.message)
try:
    comms[0].all_reduce(np.ones(2))
except ncclpy.NcclAborted:
    print("refused", comms[0].closed, comms[1].closed)
"""


def test_interrupted_call_that_cannot_be_ended_is_left_behind_with_its_communicator(library):
    """The handler's exception is raised, and the communicator takes no further calls."""
    left, warning, refused = said_by(library, INTERRUPTED).splitlines()
    assert (left, refused) == ("left", "refused True False")
    assert (
        warning.startswith("a thread is inside a call of NCCL on [") and "<ncclpy.Communicator rank 0 of 2" in warning
    )
    said = "cannot be interrupted (a call was left early: Enough): the thread and the communicators are left behind."
    assert said in warning


def test_warning_of_what_is_left_behind_names_each_communicator_once(library):
    assert said_by(library, INTERRUPTED).count("<ncclpy.Communicator rank 0 of 2") == 1


@pytest.mark.slow  # an abort waits 5 s for a call that has a communicator's lock
def test_abort_of_a_communicator_that_a_thread_is_inside_of_leaves_both_behind(library):
    program = """
def inside():
    comms[0].all_reduce(np.ones(2), stream=ncclpy.Stream(0))

thread = threading.Thread(target=inside, daemon=True)
with ncclpy.faults("call=AllReduce do=hang rank=0") as faults:
    thread.start()
    testing.wait_for(lambda: faults.fired, "the call")
    with warnings.catch_warnings(record=True) as caught:
        comms[0].abort()
[warning] = [each for each in caught if issubclass(each.category, RuntimeWarning)]
print(warning.message)
print(comms[0].closed, thread.is_alive())
"""
    warning, state = said_by(library, program).splitlines()
    assert warning.startswith(
        "a thread is inside a call of NCCL on [<ncclpy.Communicator rank 0 of 2 on device 0 (aborted)>]"
    )
    said = "cannot be interrupted (abort): the thread and the communicators are left behind."
    assert said in warning and state == "True True"
