"""Early ends of waits keep what is promised: the caller's exception, the memory, the communicator."""

import _thread
import contextlib
import threading
import time

import leak_check
import numpy as np
import pytest

import in_flight
import ncclpy
import testing
from ncclpy.core.handles.abort import abort_for

pytestmark = pytest.mark.usefixtures("host_engine")

ENDS = {
    # Ctrl-C twice, the second time while the abort is waited for: memory that may be touched is held all the same.
    "a second interrupt in a split": """
C = ncclpy.Communicator.init_all([0, 1])
alarm(0.3)
alarm(0.8)
with ncclpy.faults("call=CommAbort do=delay:2s nth=1"):
    try:
        C[0].split(0)
        raise AssertionError
    except KeyboardInterrupt:
        pass
    assert in_flight(), "nothing is held although the call is still under way"
""",
    # The calls begin so late that the first abort finds nothing; the second interrupt prevents a second look.
    "a second interrupt before the calls of a group have begun": """
import leak_check
uid = ncclpy.get_unique_id()
alarm(0.2)
alarm(0.4)
with ncclpy.faults("call=CommInitRank do=delay:700ms at=call"):
    try:
        with ncclpy.group():
            for rank in range(2):
                ncclpy.Communicator.init(3, rank, uid, device=rank)
        raise AssertionError
    except KeyboardInterrupt:
        pass
    names = leak_check.settle(leak_check.threads, lambda seen: "ncclpy-call" not in seen, 10.0)
    assert "ncclpy-call" not in names, "the call waits for rank 2 for ever"
""",
    "a handler that aborts": """
C = ncclpy.Communicator.init_all([0, 1], timeout=30)
arrays = [np.ones(3), np.ones(3)]
for _ in range(20):  # then the host engine runs operations in the thread that waits for them
    with ncclpy.group():
        for comm, array in zip(C, arrays):
            comm.all_reduce(array, op="max")
took = []
def end(*_):
    began = time.monotonic()
    C[0].abort()
    took.append(time.monotonic() - began)
signal.signal(signal.SIGALRM, end)
signal.setitimer(signal.ITIMER_REAL, 0.3)
assert isinstance(quietly(C[0].all_reduce, np.ones(4)), ncclpy.NcclAborted)
assert took[0] < 5, took  # 0.1 s
""",
    "a handler that closes": """
C = ncclpy.Communicator.init_all([0, 1])
for _ in range(20):
    with ncclpy.group():
        for comm, array in zip(C, (np.ones(3), np.ones(3))):
            comm.all_reduce(array)
said = []
def end(*_):
    for wait in (C[0].close, C[0].barrier):  # either would wait for the very code that it has interrupted
        try:
            wait()
        except RuntimeError as error:
            said.append(str(error))
signal.signal(signal.SIGALRM, end)
signal.setitimer(signal.ITIMER_REAL, 0.3)
threading.Timer(15, os._exit, (9,)).start()
array, others = np.ones(4), [np.ones(4), np.ones(1, np.uint8)]
def peer():
    time.sleep(0.8)
    C[1].all_reduce(others[0])  # and no barrier: that of the handler was not made
other = threading.Thread(target=peer)
other.start()
C[0].all_reduce(array)  # goes on as if nothing had been
other.join()
assert (array == 2).all() and (others[0] == 2).all(), array
assert len(said) == 2 and "signal handler" in said[0] and "abort()" in said[0], said
for comm in C:
    comm.close()
os._exit(0)
""",
    "Ctrl-C in a stuck call of an abortable communicator": """
C = ncclpy.Communicator.init_all([0, 1], abortable=True)
alarm(0.3)
threading.Timer(20, os._exit, (9,)).start()
with ncclpy.faults("call=AllReduce do=hang nth=1"):
    try:
        C[0].all_reduce(np.ones(3), stream=ncclpy.Stream(0))
        raise AssertionError
    except KeyboardInterrupt:
        pass
os._exit(0)
""",
    # As if the signal arrived just before the wait began: Python notes it, and no thread is woken.
    "an interrupt that wakes nobody": """
import _thread
C = ncclpy.Communicator.init_all([0, 1])
threading.Timer(20, os._exit, (9,)).start()
for wait in (
    lambda: ncclpy.Communicator.init(2, 0, ncclpy.get_unique_id(), device=0),
    lambda: C[0].split(0),
):
    threading.Timer(0.3, _thread.interrupt_main).start()
    try:
        wait()
        raise AssertionError
    except KeyboardInterrupt:
        pass
os._exit(0)
""",
    # The second call has not begun when both are aborted.
    "an interrupt of births of which one has not begun": """
threading.Timer(20, os._exit, (9,)).start()
threads = len(os.listdir("/proc/self/task"))
alarm(0.2)
with ncclpy.faults("call=CommInitRankConfig do=delay:500ms nth=1"):
    began = time.monotonic()
    try:
        with ncclpy.group():
            for i in range(2):
                ncclpy.Communicator.init(2, 0, ncclpy.get_unique_id(), device=i)
        raise AssertionError
    except KeyboardInterrupt:
        assert time.monotonic() - began < 8
until = time.monotonic() + 5
while len(os.listdir("/proc/self/task")) > threads:  # of the aborts, which are over
    assert time.monotonic() < until, "a thread stays behind"
    time.sleep(0.01)
os._exit(0)
""",
    "handlers that lead to ours": """
import ctypes
C = ncclpy.Communicator.init_all([0, 1], timeout=30)
time.sleep(0.6)  # the watcher stands before Python's handler
libc = ctypes.CDLL(None)
kind = ctypes.CFUNCTYPE(None, ctypes.c_int)
libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
seen = []
def other(number):
    seen.append(number)
    if len(seen) < 50:
        kind(before)(number)
handler = kind(other)
before = libc.signal(signal.SIGINT, ctypes.cast(handler, ctypes.c_void_p))
time.sleep(0.6)
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.5)
except KeyboardInterrupt:
    pass
assert len(seen) == 1, f"went round {len(seen)} times"
""",
}


# Each tests a moment between those of two others, which have quick programs.
SLOW = (
    "a second interrupt before the calls of a group have begun",
    "an interrupt of births of which one has not begun",
    "handlers that lead to ours",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in ENDS]
)
def test_signals(name):
    prelude = in_flight.PRELUDE + "from ncclpy.core.runtime.stream import in_flight\n"
    testing.run_python(
        f"import sys\nsys.argv = ['']\n{prelude}\n{ENDS[name]}", env={"NCCLPY_LIBRARY": "host"}, warm=True
    )


@pytest.mark.parametrize("what", ["operation", "birth"])
def test_failing_abort_does_not_hide_the_deadline(what):
    # In a process of its own, because a communicator that could not be aborted stays.
    testing.run_python(
        f"""
        import numpy as np, pytest
        import ncclpy

        comms = ncclpy.Communicator.init_all([0, 1], timeout=30)
        with (
            ncclpy.faults("call=CommAbort do=error"),
            pytest.raises(ncclpy.NcclTimeout, match="was not done after") as caught,
        ):
            if {what == "operation"}:
                comms[0].all_reduce(np.ones(3), timeout=0.3)
            else:
                ncclpy.Communicator.init(2, 0, ncclpy.get_unique_id(), device=0, timeout=0.3)
        assert "CommAbort" in caught.value.__notes__[0]
        for comm in comms:
            comm.abort()
    """,
        env={"NCCLPY_LIBRARY": "host"},
        warm=True,
    )


@pytest.mark.parametrize("options", [{}, {"config": ncclpy.Config(blocking=False)}, {"timeout": 60}])
@pytest.mark.parametrize("call", ["CommDestroy", "CommFinalize", "GroupEnd"])
def test_stuck_close_is_ended_by_an_abort(call, options):
    comms = [comm.wait_ready() for comm in ncclpy.Communicator.init_all([0, 1], **options)]

    def close():
        with contextlib.suppress(ncclpy.NcclError):
            comms[0].close()

    thread = threading.Thread(target=close, daemon=True)
    with ncclpy.faults(f"call={call} nth=1 do=hang") as faults:
        thread.start()
        testing.wait_for(lambda: faults.fired)
        comms[0].abort(timeout=5)
        thread.join(5)
        assert not thread.is_alive()
    comms[1].abort()
    assert comms[0].closed


def test_abort_does_not_wait_for_the_launch_that_it_ends():
    """The plan's launch is stuck in a call. An abort first destroys graphs, which must not wait for that launch."""
    comms = ncclpy.Communicator.init_all([0, 1], timeout=1)
    streams = [ncclpy.Stream(comm.device) for comm in comms]
    arrays = [np.ones(4) for _ in comms]
    plan = ncclpy.Plan()
    with plan.record():
        for comm, array, stream in zip(comms, arrays, streams, strict=True):
            comm.all_reduce(array, stream=stream)
    graph = plan.capture()
    caught = []

    def launch():
        try:
            plan.launch()
        except ncclpy.NcclError as error:
            caught.append(error)

    with ncclpy.faults("call=AllReduce do=hang nth=1"):
        thread = threading.Thread(target=launch, daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive()
    assert isinstance(caught[0], ncclpy.NcclTimeout), caught
    assert graph.closed
    for comm in comms:
        comm.abort()


@pytest.mark.parametrize("end", ["a deadline", "Ctrl-C"])
def test_launch_that_waits_for_a_stuck_launch_ends_both(end):
    """One thread at a time launches a plan; a thread that waits for its turn can be interrupted, which ends both."""
    testing.run_python(
        f"""
        import os, signal, threading
        import numpy as np, ncclpy

        threading.Timer(30, os._exit, (9,)).start()
        comms = ncclpy.Communicator.init_all([0, 1], abortable=True)
        streams, arrays = [ncclpy.Stream(0), ncclpy.Stream(1)], [np.ones(4), np.ones(4)]
        plan = ncclpy.Plan()
        with plan.record():
            for comm, array, stream in zip(comms, arrays, streams):
                comm.all_reduce(array, stream=stream)
        first = []

        def launch():
            try:
                plan.launch()
            except ncclpy.NcclError as error:
                first.append(error)

        with ncclpy.faults("call=AllReduce do=hang nth=1") as faults:
            thread = threading.Thread(target=launch)
            thread.start()
            while not faults.fired:
                pass
            try:
                if {end == "a deadline"}:
                    plan.launch(timeout=0.5)
                else:
                    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
                    plan.launch()
            except (KeyboardInterrupt, ncclpy.NcclTimeout) as error:
                said = repr(error)
            thread.join()
        expected = "another thread's launch" if {end == "a deadline"} else "KeyboardInterrupt"
        assert expected in said, said
        assert type(first[0]) is ncclpy.NcclAborted, first
        assert all(comm.closed for comm in comms)
        os._exit(0)
    """,
        warm=True,
    )


@pytest.mark.slow
def test_watchdog_ignores_a_graph_when_launches_find_no_mark(comm1_watched):
    """A launch that finds no space for a mark has ended all the same when it returns."""
    comm, stream = comm1_watched
    array = np.ones(3)
    plan = ncclpy.Plan()
    with plan.record():
        comm.all_reduce(array, op="max", stream=stream)
    with plan.capture() as graph, ncclpy.faults("call=AllReduce at=run do=hang:700ms nth=1"):
        comm.all_reduce(array, op="max", stream=stream)
        for _ in range(4200):  # more than there are marks
            graph.launch()
        stream.synchronize(timeout=50)
        time.sleep(1.7)
    assert not comm.closed


@pytest.fixture
def comm1_watched():
    comm = ncclpy.Communicator.init_all([0], timeout=1.5)[0]
    with ncclpy.Stream(0) as stream:
        yield comm, stream
    comm.close()


@pytest.mark.parametrize("timeout", [None, 5])
def test_split_without_a_colour(timeout):
    comms = ncclpy.Communicator.init_all([0, 1], timeout=timeout)
    with ncclpy.group():
        child, nothing = comms[0].split(0), comms[1].split(None)
    assert nothing is None
    assert child.nranks == 1
    testing.close_all(comms)


@pytest.mark.parametrize("timeout", [None, 5])
def test_several_threads_close_one_communicator(timeout):
    failures = []
    for _ in range(10):
        comm = ncclpy.Communicator.init_all([0], timeout=timeout)[0]
        barrier = threading.Barrier(3)

        def close(comm=comm, barrier=barrier):
            barrier.wait()
            try:
                comm.close()
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=close) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert comm.closed
    assert not failures


@pytest.mark.parametrize("together", [False, True], ids=["one by one", "together"])
@pytest.mark.parametrize("fails", [False, True], ids=["made", "one fails"])
@pytest.mark.parametrize("options", [{"abortable": True}, {"timeout": 20}, {"config": ncclpy.Config(blocking=False)}])
def test_abort_during_the_calls_of_a_group_leaves_nothing_behind(options, fails, together):
    made, before, name = [], leak_check.mappings(), ncclpy.get_unique_id()

    def abort():
        testing.wait_for(lambda: plan.fired)  # the first call is under way, the others have not begun
        with ncclpy.group() if together else contextlib.nullcontext():
            for comm in made:
                comm.abort()

    aside = threading.Thread(target=abort)
    rules = "call=CommInitRankConfig rank=0 do=delay:300ms"
    if fails:
        rules += "; call=CommInitRankConfig rank=2 do=error"
    waits = fails or "config" not in options  # otherwise the next call raises
    with ncclpy.faults(rules) as plan, pytest.raises(ncclpy.NcclError) if waits else contextlib.nullcontext():
        aside.start()
        with ncclpy.group():
            for rank in range(3):
                made.append(ncclpy.Communicator.init(3, rank, name, device=rank, **options))
    aside.join()
    for comm in made:  # one that was not aborted yet may report that the others were
        with pytest.raises(ncclpy.NcclError, match=r"aborted|never initialised"):
            comm.barrier()
    assert leak_check.settle(leak_check.mappings, lambda seen: seen <= before) <= before


def test_failed_creation_leaves_nothing_behind():
    before = leak_check.mappings(), leak_check.descriptors()
    for _ in range(5):
        with pytest.raises(ncclpy.NcclError):
            ncclpy.Communicator.init_all([0, 0], timeout=5)
    assert (leak_check.mappings(), leak_check.descriptors()) <= (before[0], before[1] + 2)


def test_guard_that_cannot_make_its_communicator_says_why():
    comms = ncclpy.Communicator.init_all([0, 1], timeout=5)
    with ncclpy.faults("call=CommSplit nth=2 do=error"), pytest.raises(ncclpy.NcclError, match="injected fault"):
        with ncclpy.group():
            for comm in comms:
                comm.split(0)
    for comm in comms:
        comm.abort()


def test_deadline_of_a_creation_names_the_time_waited():
    with pytest.raises(ncclpy.NcclTimeout, match=r"was not done after [34]\d\d ms"):
        ncclpy.Communicator.init(2, 0, ncclpy.get_unique_id(), device=0, timeout=0.3)


@pytest.mark.parametrize("timeout", [1e12, 1e300, 10**400, float("inf")])
def test_abort_accepts_a_huge_timeout(timeout):
    comm = ncclpy.Communicator.init_all([0])[0]
    comm.abort(timeout=timeout)
    assert comm.closed


def test_close_and_group_with_late_members_raise_error_of_failed_member(host_engine):
    """The operation of the closed communicator has failed, but the group has yet to ask for its result."""
    first, second = (ncclpy.Communicator.init_all(range(2), timeout=60) for _ in range(2))
    values, caught = [np.ones(100) for _ in range(2)], []

    def call():
        with pytest.raises(ncclpy.NcclError, match="the ranks do not agree"), ncclpy.group():
            first[0].all_reduce(values[0])
            second[0].all_reduce(values[1])
        caught.append(True)

    def close():
        with pytest.raises(ncclpy.NcclError, match="the ranks do not agree"):
            second[0].close()
        caught.append(True)

    threads = [threading.Thread(target=call, daemon=True), threading.Thread(target=close, daemon=True)]
    threads[0].start()
    time.sleep(0.2)
    threads[1].start()
    with pytest.raises(ncclpy.NcclError, match="the ranks do not agree"):
        second[1].all_reduce(np.ones(99))
    first[1].all_reduce(np.ones(100))
    for thread in threads:
        thread.join(30)
    assert caught == [True, True]
    testing.abort_all([*first, second[1]])


def test_operation_ended_by_a_revoke_raises(host_engine):
    comms = ncclpy.Communicator.init_all(range(2), timeout=60)
    caught = []

    def call():
        with pytest.raises(ncclpy.NcclAborted, match="revoked"):
            comms[0].all_reduce(np.ones(100))
        caught.append(True)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    time.sleep(0.2)
    comms[0].revoke()
    thread.join(30)
    assert caught
    comms[0].close()  # as a revoked communicator can be
    comms[1].abort()


def test_abort_during_init_ends_it_once_there_is_a_handle(host_engine):
    """The init waits for a rank that is missing, and has no deadline."""
    made, caught = [], []

    class Seen(ncclpy.Communicator):
        def __new__(cls):
            made.append(super().__new__(cls))
            return made[-1]

    def call():
        with pytest.raises(ncclpy.NcclRemoteError, match="rank 1 has failed"):
            Seen.init(2, 0, ncclpy.get_unique_id(), device=0)
        caught.append(True)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    testing.wait_for(lambda: made, "the call")
    testing.run_with_deadline(lambda: abort_for(made[0], ncclpy.NcclRemoteError("rank 1 has failed")))
    thread.join(30)
    assert caught


def test_abort_of_a_communicator_that_is_never_made_ends_at_its_deadline(host_engine):
    comm = ncclpy.Communicator.__new__(ncclpy.Communicator)
    testing.run_with_deadline(lambda: abort_for(comm, ncclpy.NcclRemoteError("rank 1 has failed"), 0.05))
    assert comm.closed


@pytest.mark.parametrize("timeout", [None, 30])
def test_abort_without_a_new_thread_ends_stuck_work_in_the_calling_thread(monkeypatch, timeout):
    comms, refused = ncclpy.Communicator.init_all([0, 1], timeout=timeout), []

    def refuse(*_):
        refused.append(threading.current_thread())
        raise RuntimeError("can't start new thread")

    with testing.device_memory(0, 16) as pointer, ncclpy.Stream(0) as stream:
        comms[0].all_reduce((pointer, 4, "float32"), stream=stream)  # rank 1 does not call
        assert not stream.is_done()
        monkeypatch.setattr(_thread, "start_new_thread", refuse)
        comms[0].abort()
        monkeypatch.undo()
        testing.wait_for(stream.is_done, "the operation")
    assert refused and comms[0].closed
    with pytest.raises(ncclpy.NcclAborted):
        comms[0].all_reduce(np.ones(2))
    comms[1].abort()
