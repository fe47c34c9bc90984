"""Early ends of waits: operations write to no memory but their own, and leave nothing behind."""

import threading
import time

import numpy as np
import pytest

import in_flight
import ncclpy
import testing

pytestmark = pytest.mark.usefixtures("host_engine")


def run(code, timeout=None):
    """Run a program with communicators that have this `timeout`."""
    program = f"import sys\nsys.argv = ['', {str(timeout)!r}]\n{in_flight.PRELUDE}\n{code}"
    return testing.run_python(program, timeout=60, env={"NCCLPY_LIBRARY": "host"}, warm=True)


def with_and_without_a_deadline(names, quick):
    """Return parameters (name, timeout), marked slow except names listed in `quick` with this timeout."""
    return [
        pytest.param(name, timeout, marks=[] if quick.get(name, ()) in (timeout, "both") else [pytest.mark.slow])
        for name in names
        for timeout in (None, 20)
    ]


EARLY = {"interrupt": "both", "raising handler": 20, "group": 20, "plan": None, "large, in progress": None}


@pytest.mark.parametrize(("name", "timeout"), with_and_without_a_deadline(in_flight.EARLY_ENDS, EARLY))
def test_wait_that_ends_early_leaves_nothing(name, timeout):
    run(in_flight.EARLY_ENDS[name], timeout)


# Every end of a group of two worlds has a program; only the one with a deadline is quick.
SLOW_ENDS = (
    "a group of two worlds, ranks that disagree",
    "a group of send and recv",
    "a dead peer in one world of a group",
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW_ENDS else []) for name in in_flight.OTHER_ENDS],
)
def test_errors_deadlines_and_close(name):
    run(in_flight.OTHER_ENDS[name])


# The first program has a deadline of its own and the last has none: both ignore `timeout`.
BORN = {
    "the births of a group end together": None,
    "an interrupted init leaves nobody that peers count on": "both",
    "a child's cell is not freed while it may be written": 20,
    "several threads poll one child": None,
}


@pytest.mark.parametrize(("name", "timeout"), with_and_without_a_deadline(in_flight.BIRTHS, BORN))
def test_births(name, timeout):
    run(in_flight.BIRTHS[name], timeout)


WAITS = {"births": 20, "calls": None, "waits": 20, "turns": "both"}


@pytest.mark.parametrize(("kind", "timeout"), with_and_without_a_deadline(in_flight.BLOCKING, WAITS))
def test_interrupts_and_handlers_in_every_wait(kind, timeout):
    """A handler runs while the call waits; a handler that raises ends the call."""
    calls = "".join(f"{name!r}: lambda: {call},\n" for name, call in in_flight.BLOCKING[kind].items())
    done = run(f"CALLS = {{{calls}}}\n{in_flight.INTERRUPTED}", timeout)
    assert done.stdout.splitlines() == list(in_flight.BLOCKING[kind])


@pytest.mark.parametrize("way", ["register", "window"])
@pytest.mark.parametrize("closes", ["the communicator", "what it has made"])
def test_registered_memory_stays_while_an_abort_is_under_way(way, closes):
    class Watched(np.ndarray):
        def __del__(self):
            gone.append(time.monotonic())

    lasts = 0.03
    for _ in range(10):  # in some rounds the second close comes before the abort has begun
        gone = []
        comm = ncclpy.Communicator.init_all([0])[0]
        array = np.zeros(1024, np.float32).view(Watched)
        kept = getattr(comm, way)(array)
        with ncclpy.faults(f"call=CommAbort do=delay:{lasts}s"):
            begun = time.monotonic()
            aborting = threading.Thread(target=comm.abort)
            aborting.start()
            while "aborted" not in repr(comm):
                time.sleep(0)
            (comm if closes == "the communicator" else kept).close()
            del array, kept
            aborting.join()
        del comm
        deadline = time.monotonic() + 10
        while not gone and time.monotonic() < deadline:
            time.sleep(0.001)
        assert gone[0] - begun >= lasts


def test_registered_memory_stays_after_its_handle_is_dropped(comm1):
    gone = []

    class Watched(np.ndarray):
        def __del__(self):
            gone.append(True)

    for register in (comm1.register, comm1.window):
        array = np.zeros(1024, np.float32).view(Watched)
        register(array)
        del array
        assert not gone
    comm1.close()
    assert len(gone) == 2


def test_abort_in_a_group_happens_even_if_the_group_fails():
    a = ncclpy.Communicator.init_all([0])[0]
    with pytest.raises(KeyError), ncclpy.group():
        a.abort()
        raise KeyError
    assert a.closed
    b, c = ncclpy.Communicator.init_all([0, 1])
    with ncclpy.faults("call=AllReduce nth=1 do=error"), pytest.raises(ncclpy.NcclError), ncclpy.group():
        b.abort()
        c.all_reduce(np.ones(3))
    assert b.closed
    c.abort()


def test_deadline_of_one_operation():
    comms = ncclpy.Communicator.init_all([0, 1], abortable=True)
    with pytest.raises(ncclpy.NcclTimeout, match="ncclAllReduce"):
        comms[0].all_reduce(np.ones(3), timeout=0.2)
    assert comms[0].closed and not comms[1].closed
    with pytest.raises(ncclpy.NcclAborted, match="passed its deadline"):
        comms[0].barrier()
    testing.abort_all(comms)


def test_deadline_of_a_group_of_calls():
    comms = ncclpy.Communicator.init_all([0, 1], abortable=True)
    with pytest.raises(ncclpy.NcclTimeout), ncclpy.group(timeout=0.2):
        comms[1].all_reduce(np.ones(3))
    assert comms[1].closed and not comms[0].closed
    testing.abort_all(comms)


@pytest.mark.parametrize(
    "call",
    [
        lambda comm, **options: comm.all_gather(np.ones(2), np.zeros(4), [2, 2], **options),
        lambda comm, **options: comm.all_gather(np.ones(2), [np.zeros(2), np.zeros(3)], **options),
    ],
    ids=["counts", "list"],
)
def test_deadline_of_one_operation_that_is_a_group(call):
    comms = ncclpy.Communicator.init_all([0, 1], abortable=True)
    with ncclpy.Stream(0) as stream:
        call(comms[0], stream=stream, timeout=0.2)  # no thread waits: the watchdog keeps the deadline
        with pytest.raises(ncclpy.NcclTimeout, match=r"ncclBroadcast of .* was not done after 200 ms"):
            stream.synchronize(20)
    with pytest.raises(ncclpy.NcclTimeout, match=r"ncclBroadcast of .* was not done after 200 ms"):
        comms[0].barrier()
    testing.abort_all(comms)


def test_deadline_of_one_operation_needs_an_abortable_communicator():
    with ncclpy.Communicator.init_all([0])[0] as comm:
        with pytest.raises(ValueError, match="abortable=True"):
            comm.all_reduce(np.ones(3), timeout=1)
        with pytest.raises(ValueError, match="abortable=True"), ncclpy.group(timeout=1):
            comm.all_reduce(np.ones(3))
        with pytest.raises(ValueError, match="timeout: expected seconds"):
            comm.all_reduce(np.ones(3), timeout=-1)


def test_waits_with_a_deadline_end_the_wait_alone():
    comms = ncclpy.Communicator.init_all([0, 1])
    with ncclpy.Stream(0) as stream:
        array = np.ones(3)
        comms[0].all_reduce(array, stream=stream)
        event = stream.record()
        for wait in (stream.synchronize, event.synchronize, lambda timeout: ncclpy.synchronize(0, timeout)):
            with pytest.raises(ncclpy.NcclTimeout, match="only the wait has ended"):
                wait(timeout=0.1)
        comms[1].all_reduce(np.ones(3))
        event.synchronize(timeout=30)
        assert (array == 2).all()
    testing.close_all(comms)


def test_children_have_guards_of_their_own():
    """Aborting a child, by its guard, leaves its parent and the parent's other children alone."""
    comms = ncclpy.Communicator.init_all([0, 1], timeout=5)
    families = []
    for _ in range(2):
        with ncclpy.group():
            families.append([comm.split(0) for comm in comms])
    for child in families[0]:
        child.abort()
    for family in (comms, families[1]):
        arrays = [np.ones(3) for _ in family]
        with ncclpy.group():
            for comm, array in zip(family, arrays, strict=True):
                comm.all_reduce(array)
        assert (arrays[0] == 2).all()
    testing.close_all(comms)


def test_deadline_ends_a_hang_in_work_that_the_caller_runs():
    """A thread that waits for a stream may run the stream's work, and checks the deadline there as well."""
    run(
        """
        threading.Timer(20, os._exit, (9,)).start()
        comm = ncclpy.Communicator.init_all([0], timeout=2)[0]
        for _ in range(1000):  # from then on the caller does the stream's work
            comm.all_reduce(np.ones(3))
        with ncclpy.faults("call=AllReduce at=run do=hang"):
            assert isinstance(quietly(comm.all_reduce, np.ones(3)), ncclpy.NcclTimeout)
        assert comm.closed
        os._exit(0)
        """.replace("\n        ", "\n")
    )


def test_held_arrays_are_listed_until_the_stream_has_passed_them():
    """An aborted communicator's operation is queued on a stream behind one of another, which continues."""
    a, b = (ncclpy.Communicator.init_all([0, other], **options) for other, options in ((1, {"timeout": 0.3}), (2, {})))
    with ncclpy.Stream(0) as stream:
        b[0].all_reduce(np.ones(3), stream=stream)
        with pytest.raises(ncclpy.NcclTimeout), ncclpy.group():
            a[0].all_reduce(np.ones(3), stream=stream)
            a[0].all_reduce(np.ones(4))
        assert [line for line in ncclpy.in_flight() if "arrays of a group" in line]
        b[1].all_reduce(np.ones(3))
        stream.synchronize(timeout=30)
        until = time.monotonic() + 30
        while ncclpy.in_flight() and time.monotonic() < until:
            time.sleep(0.01)
        assert ncclpy.in_flight() == []
    a[1].abort()
    testing.close_all(b)


@pytest.mark.parametrize(
    ("captured", "end"),
    [
        (False, "its deadline"),
        (True, "abort"),
        pytest.param(False, "abort", marks=pytest.mark.slow),
        pytest.param(True, "its deadline", marks=pytest.mark.slow),
    ],
)
def test_plan_stuck_inside_a_call_is_ended(end, captured):
    """An abort waits for graphs, and a graph for its plan's launches: a launch that is stuck must end all the same."""
    run(
        f"""
        threading.Timer(20, os._exit, (9,)).start()
        comms = ncclpy.Communicator.init_all([0, 1], **({{"timeout": 0.5}} if {end == "its deadline"} else {{}}))
        arrays, plan = [np.ones(4), np.ones(4)], ncclpy.Plan()
        with plan.record():
            for comm, array in zip(comms, arrays): comm.all_reduce(array)
        graph = plan.capture() if {captured} else None
        if {end == "abort"}:
            threading.Timer(0.3, lambda: [comm.abort() for comm in comms]).start()
        with ncclpy.faults("rank=0 call=AllReduce do=hang"):
            error = quietly(plan.launch)
        assert type(error) is ncclpy.{"NcclTimeout" if end == "its deadline" else "NcclAborted"}, repr(error)
        os._exit(0)
        """.replace("\n        ", "\n")
    )
