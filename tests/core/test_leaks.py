"""The same calls in a loop: descriptors, threads, mappings and memory do not grow."""

from __future__ import annotations

import pytest

import testing

pytestmark = pytest.mark.usefixtures("host_engine")

PRELUDE = """
import gc, signal, sys, threading, time
import numpy as np, ncclpy
import leak_check

class Late(Exception):
    pass

def late(*_):
    raise Late

signal.signal(signal.SIGALRM, late)
ncclpy.get_unique_id()  # the table of ids stays; on a busy machine no init may come to it for a while

def state():
    return leak_check.descriptors(), len(leak_check.threads()), leak_check.mappings()

spare = 12 << 20

def loop(times, one):
    for _ in range(max(10, times // 20)):
        one()
    settled = leak_check.settle(state, lambda seen: False, 0.5)
    memory = leak_check.rss()
    for _ in range(times):
        one()
    after = leak_check.settle(state, lambda seen: all(b <= a for a, b in zip(settled, seen)), 3.0)
    assert all(b <= a for a, b in zip(settled, after)), (settled, after)
    gc.collect()
    grown = leak_check.rss() - memory
    assert grown < spare, f"{grown / 2**20:.1f} MiB more after {times} times"
"""

LOOPS = {
    "init and close": (
        5000,
        60,
        """
def one():
    comms = ncclpy.Communicator.init_all([0, 1])
    closing = threading.Thread(target=comms[1].close)
    closing.start(); comms[0].close(); closing.join()
""",
    ),
    "init and abort, with a deadline": (
        1000,
        20,
        """
def one():
    for comm in ncclpy.Communicator.init_all([0, 1], timeout=30):
        comm.abort()
""",
    ),
    "operations": (
        30_000,
        3000,
        """
spare = 3 << 20
comms = ncclpy.Communicator.init_all([0, 1], timeout=30)
def one():
    with ncclpy.group():
        for comm in comms:
            comm.all_reduce(np.ones(300))
""",
    ),
    "identifiers that nobody uses": (3000, 300, "one = ncclpy.get_unique_id"),
    "interrupted inits": (
        300,
        10,
        """
def one():
    try:
        # Again, should it come where Python drops exceptions, as in a callback of a weak reference.
        signal.setitimer(signal.ITIMER_REAL, 0.01, 1)
        ncclpy.Communicator.init(2, 0, ncclpy.get_unique_id(), device=0, **OPTIONS)
    except Late:
        signal.setitimer(signal.ITIMER_REAL, 0)
""",
    ),
}


def check(name, times, options="{}", timeout=115):
    body = LOOPS[name][2].replace("OPTIONS", options)
    testing.run_python(
        f"{PRELUDE}\n{body}\nloop({times}, one)", timeout=timeout, env={"NCCLPY_LIBRARY": "host"}, warm=True
    )


@pytest.mark.parametrize("name", LOOPS)
def test_few_rounds_grow_nothing(name):
    check(name, LOOPS[name][1])


# 30,000 operations take 1 s, but each wakes threads: on a busy machine that takes minutes.
@pytest.mark.campaign
@pytest.mark.timeout(420)
@pytest.mark.parametrize("name", LOOPS)
def test_many_rounds_grow_nothing(name):
    check(name, LOOPS[name][0], timeout=400)


@pytest.mark.campaign
def test_interrupted_inits_with_a_deadline():
    check("interrupted inits", 300, "{'timeout': 30}", timeout=testing.LONG)


ONCE = {
    # NCCL has made a child that its parent does not list yet. `raise_in` raises there, as a signal handler could.
    "an interrupt while a child is taken over": """
cut_short(lambda comms, made: made.append(comms[0].split(0)))
""",
    "an interrupt while one of two children is taken over": """
def split(comms, made):
    with ncclpy.group():
        made += [comm.split(0) for comm in comms]
cut_short(split)
""",
    # The guards are ready within 0.3 s; after that rank 0's communicator is reported as in progress.
    "the others of a clique of which one is late": """
def make():
    try:
        ncclpy.Communicator.init_all([0, 1], timeout=2.0)
        raise AssertionError
    except ncclpy.NcclTimeout:
        pass
thread = threading.Thread(target=make)
with ncclpy.faults("call=CommSplit do=delay:600ms"):
    thread.start()
    time.sleep(0.3)
with ncclpy.faults("rank=0 call=CommGetAsyncError nth=1 do=busy:60s"):
    thread.join()
""",
    "a child that is made in a group that fails later": """
one, = ncclpy.Communicator.init_all([0])
two = ncclpy.Communicator.init_all([0, 1])
threading.Timer(0.5, two[0].abort).start()
try:
    with ncclpy.group():
        made = one.split(0)
        two[0].split(0)
    raise AssertionError
except ncclpy.NcclAborted:
    pass
one.close()
two[1].abort()
""",
    # With a guard: the communicator that users see is finalized and destroyed first, then the guard.
    **{
        f"a call that fails, {call}": f"""
comm, = ncclpy.Communicator.init_all([0], timeout=60)
with ncclpy.faults("call={call} do=error"):
    try:
        comm.close()
        raise AssertionError
    except ncclpy.NcclError:
        pass
"""
        for call in ("CommFinalize nth=1", "CommFinalize nth=2", "CommDestroy nth=1", "CommDestroy nth=2")
    },
}

CUT_SHORT = """
import contextlib

def raise_in(name, file):
    def profile(frame, event, _):
        if event == "call" and frame.f_code.co_name == name and file in frame.f_code.co_filename:
            sys.setprofile(None)
            raise Late
    sys.setprofile(profile)

def cut_short(split):
    cliques = [ncclpy.Communicator.init_all([0, 1], timeout=60) for _ in range(2)]
    mine, others = zip(*cliques)
    def other():
        made = []
        with contextlib.suppress(ncclpy.NcclError):
            split(others, made)
        for child in made:
            child.abort()
    thread = threading.Thread(target=other)
    thread.start()
    raise_in("add", "_weakrefset")
    try:
        split(mine, [])
        raise AssertionError
    except Late:
        pass
    for comm in (*mine, *others):
        comm.abort()
    thread.join()

ncclpy.Communicator.init_all([0])[0].close()
seen = leak_check.settle(leak_check.mappings, lambda seen: seen == 0, 3.0)
assert seen == 0, seen
"""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if "clique" in name else []) for name in ONCE]
)
def test_calls_that_end_early_leave_no_mapping(name):
    end = "\nseen = leak_check.settle(leak_check.mappings, lambda seen: seen == 0, 5.0)\nassert seen == 0, seen"
    testing.run_python(PRELUDE + CUT_SHORT + ONCE[name] + end, timeout=30, env={"NCCLPY_LIBRARY": "host"}, warm=True)
