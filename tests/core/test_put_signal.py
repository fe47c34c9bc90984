"""Puts, signals and waits of a communicator: alone, in groups and plans, refused, and ended early."""

from __future__ import annotations

import os
import random
import signal
import threading

import numpy as np
import pytest
from buffer_checks import rejects
from windows import World

import ncclpy
import testing
from ncclpy import bindings
from ncclpy.core.runtime import device as device_module

COUNT = 64


@pytest.fixture(autouse=True)
def one_sided():
    testing.need_function("ncclPutSignal")


@pytest.fixture
def world(host_engine):
    with World(2, timeout=20) as two:
        yield two


@pytest.mark.parametrize("way", ["plain", "group", "plan", "stream", "graph"])
def test_ring_on_any_engine(comms4, way):
    """Each rank puts to its right neighbour, in every way to make calls."""
    count = 1000

    def rank(rank):
        comm, n = comms4[rank.rank], 4
        with device_module.using(comm.device), ncclpy.Stream(comm.device) as stream:
            pointer = bindings.mem_alloc(8 * count)
            memory = ncclpy.Buffer(pointer, 2 * count, "float32", device=comm.device)
            mine = ncclpy.Buffer(pointer, count, "float32", device=comm.device)
            window = comm.window(memory)

            def calls():
                comm.put_signal(mine, window, (comm.rank + 1) % n, 4 * count, stream=stream)
                comm.wait_signal((comm.rank - 1) % n, stream=stream)

            plan = ncclpy.Plan()
            if way in ("plan", "graph"):
                with plan.record():
                    calls()
            launch = plan.capture() if way == "graph" else plan
            for round_ in range(3):
                testing.write(pointer, np.full(count, 10 * round_ + comm.rank, np.float32), comm.device)
                comm.barrier(stream=stream)
                if way == "group":
                    with ncclpy.group():
                        calls()
                elif way in ("plan", "graph"):
                    launch.launch()
                else:
                    calls()
                comm.barrier(stream=stream)
                stream.synchronize()
                got = testing.read(pointer, 2 * count, np.float32, comm.device)[count:]
                assert (got == 10 * round_ + (comm.rank - 1) % n).all()
            if way == "graph":
                launch.close()
            del plan
            window.close()
            bindings.mem_free(pointer)

    testing.run_threads(4, rank, comms=comms4)


def test_signals_count(world):
    """Each signal is waited for once, from one rank or several, some or all at a time."""
    first, second = world.comms
    for _ in range(5):
        second.signal(0)
    first.wait_signal(1, count=2)
    first.wait_signal([1], count=3)
    first.signal(0)  # to itself
    first.wait_signal((0,))
    with pytest.raises(ncclpy.NcclTimeout, match="WaitSignal"):
        first.wait_signal([1], timeout=0.1)


def test_wait_for_several_ranks_and_signal_indices(host_engine):
    with World(3, config=ncclpy.Config(num_rma_sig=3), timeout=20) as world:
        for comm in world.comms[1:]:
            comm.signal(0, signal=2)
            comm.signal(0)
        world.comms[0].wait_signal([2, 1], signal=2)
        world.comms[0].wait_signal(np.array([1, 2]), count=1)
        with pytest.raises(ncclpy.NcclTimeout, match=r"missing: 1 .*2 \("):
            world.comms[0].wait_signal([1, 2], signal=1, timeout=0.1)


def test_empty_put_is_a_signal(world):
    first, second = world.comms
    first.put_signal(np.empty(0, np.float32), world.windows[0], 1, offset=4 * COUNT)
    second.wait_signal(0)
    assert not world.arrays[1].any()


def test_put_writes_only_its_range(world):
    first, second = world.comms
    world.arrays[0][:] = np.arange(COUNT)
    first.put_signal(world.arrays[0][3:5], world.windows[0], 1, offset=4 * (COUNT - 2))
    second.wait_signal(0)
    assert world.arrays[1].tolist() == [0.0] * (COUNT - 2) + [3.0, 4.0]
    other = np.full(COUNT, 9, np.uint8)  # a source in another window, of another type
    with ncclpy.group():
        second_windows = [first.window(other), second.window(np.zeros(COUNT, np.uint8))]
    first.put_signal(other[:8], world.windows[0], 1)
    second.wait_signal(0)
    assert world.arrays[1][:3].tobytes() == b"\x09" * 8 + b"\0" * 4
    for window in second_windows:
        window.close()
    with rejects("send", "symmetric window"):
        first.put_signal(other[:8], world.windows[0], 1)


def test_dropped_window_is_still_registered(world):
    array = np.full(4, 5, np.float32)
    with ncclpy.group():
        for comm in world.comms:
            comm.window(array if comm.rank == 0 else np.zeros(4, np.float32))
    world.comms[0].put_signal(array, world.windows[0], 1)
    world.comms[1].wait_signal(0)
    assert world.arrays[1][:5].tolist() == [5, 5, 5, 5, 0]


def test_puts_that_are_refused(world):
    comm, (array, _), (window, other) = world.comms[0], world.arrays, world.windows
    put = comm.put_signal
    with rejects("send", "symmetric window"):
        put(np.zeros(4, np.float32), window, 1)
    with rejects("send", "not contiguous"):
        put(array[::2], window, 1)
    with rejects("send", "device 1"):
        put(ncclpy.Buffer(array.ctypes.data, 4, "float32", device=1), window, 1)
    with rejects("send", "cannot take memory"):
        put("text", window, 1)
    for offset in (4, 4 * COUNT, 2**62, 2**63 - 1):
        with rejects("send", f"256 bytes at offset {offset} reach beyond the 256 bytes"):
            put(array, window, 1, offset)
    for offset in (-1, 2**63):
        with rejects("offset", "expected an int from 0"):
            put(array[:1], window, 1, offset)
    with rejects("offset", "expected an int", kind=TypeError):
        put(array[:1], window, 1, 1.5)
    for rank in (-1, 2, 2**40):
        with rejects("peer", "does not exist"):
            put(array, window, rank)
    with rejects("peer", kind=TypeError):
        put(array, window, "1")
    with rejects("signal", "from 0"):
        put(array, window, 1, 0, -1)
    for wrong in (None, window.handle, array, comm):
        with rejects("window", "expected a Window", kind=TypeError):
            put(array, wrong, 1)
    with rejects("window", "another communicator"):
        put(array, other, 1)
    with rejects("timeout"):
        put(array, window, 1, timeout=-1)
    with rejects("stream"):
        put(array, window, 1, stream="none")
    window.close()
    with rejects("window", "closed"):
        put(array, window, 1)
    assert comm.async_error() == ncclpy.Result.SUCCESS


def test_window_without_symmetry_takes_puts_and_gives_none(world):
    arrays = [np.zeros(4, np.float32) for _ in range(2)]
    with ncclpy.group():
        plain = [comm.window(array, symmetric=False) for comm, array in zip(world.comms, arrays, strict=True)]
    with rejects("send", "symmetric window"):
        world.comms[0].put_signal(arrays[0], plain[0], 1)
    world.arrays[0][:4] = 6
    world.comms[0].put_signal(world.arrays[0][:4], plain[0], 1)
    world.comms[1].wait_signal(0)
    assert (arrays[1] == 6).all()


def test_signals_that_are_refused(world):
    comm = world.comms[0]
    for peer in (-1, 2):
        with rejects("peer", "does not exist"):
            comm.signal(peer)
        with rejects("peers", "does not exist"):
            comm.wait_signal(peer)
        with rejects("peers", "does not exist"):
            comm.wait_signal([0, peer])
    with rejects("peers", "no rank"):
        comm.wait_signal([])
    with rejects("peers", "rank 1 is listed twice"):
        comm.wait_signal([0, 1, 1])
    for peers in (None, 1.5, "1", ["1"], [None]):
        with rejects("peers", kind=TypeError):
            comm.wait_signal(peers)
    for count in (0, -1, 2**31):
        with rejects("count", "from 1"):
            comm.wait_signal(1, count=count)
    for call in (comm.signal, comm.wait_signal):
        with rejects("signal", "from 0"):
            call(1, -1)
        with rejects("signal", kind=TypeError):
            call(1, "0")
    for call in (comm.signal, comm.wait_signal):
        with pytest.raises(ncclpy.NcclError, match="signal index 1"):  # only NCCL knows how many there are
            call(1, 1)
    comm.close()
    for call in (lambda: comm.signal(1), lambda: comm.wait_signal(1)):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_argument_that_closes_window_or_communicator_is_noticed(world):
    """The argument's own code closes the window, or the communicator, while the call reads the argument."""
    comm, array, window = world.comms[0], world.arrays[0], world.windows[0]

    class Closing:
        def __init__(self, what):
            self.what = what

        def __index__(self):
            self.what()
            return 1

    with rejects("window", "closed"):
        comm.put_signal(array[:1], window, Closing(window.close))
    with pytest.raises((ValueError, ncclpy.NcclAborted)):
        comm.wait_signal(Closing(comm.abort))


def test_timeout_needs_a_communicator_that_can_be_ended(host_engine):
    with World(2) as world, rejects("timeout", "cannot be ended"):
        world.comms[0].wait_signal(1, timeout=1)


def test_groups(world):
    """Puts and waits of all ranks in one group, with collectives and messages."""
    sums = [np.ones(3) for _ in range(2)]
    sent, came = np.full(2, 4.0), np.zeros(2)
    for rank in range(2):
        world.arrays[rank][:2] = rank + 1
    with ncclpy.group():
        for rank, comm in enumerate(world.comms):
            comm.put_signal(world.arrays[rank][:2], world.windows[rank], 1 - rank, 8)
            comm.signal(1 - rank)
            comm.wait_signal(1 - rank, count=2)
            comm.all_reduce(sums[rank])
        world.comms[0].send(sent, 1)
        world.comms[1].recv(came, 0)
        assert not world.arrays[0][2:].any()
    assert world.arrays[0][:4].tolist() == [1, 1, 2, 2] and world.arrays[1][:4].tolist() == [2, 2, 1, 1]
    assert (sums[0] == 2).all() and (sums[1] == 2).all() and (came == 4).all()


def test_exception_in_a_group_puts_nothing(world):
    world.arrays[0][:] = 1
    with pytest.raises(KeyError), ncclpy.group():
        world.comms[0].put_signal(world.arrays[0], world.windows[0], 1)
        raise KeyError
    world.comms[0].signal(1)
    world.comms[1].wait_signal(0)
    assert not world.arrays[1].any()
    with pytest.raises(ncclpy.NcclTimeout):
        world.comms[1].wait_signal(0, timeout=0.1)


def test_window_that_its_group_has_not_made_yet_is_refused(world):
    arrays = [np.ones(4, np.float32) for _ in range(2)]
    with ncclpy.group():
        made = [comm.window(array) for comm, array in zip(world.comms, arrays, strict=True)]
        with rejects("window", "when its group ends"):
            world.comms[0].put_signal(arrays[0], made[0], 1)
        with rejects("window", "when its group ends"):
            made[0].peer(0)
    world.comms[0].put_signal(arrays[0], made[0], 1)


def test_window_is_not_closed_while_an_open_group_uses_it(world):
    with ncclpy.group():
        world.comms[0].put_signal(world.arrays[0], world.windows[0], 1)
        with pytest.raises(ValueError, match="open group has recorded"):
            world.windows[0].close()
    world.comms[1].wait_signal(0)
    world.windows[0].close()


def test_group_fails_where_another_thread_has_closed_a_window(world):
    world.arrays[0][:] = 1
    with pytest.raises(ncclpy.NcclError, match="ncclPutSignal"), ncclpy.group():
        world.comms[0].signal(1)
        world.comms[0].put_signal(world.arrays[0], world.windows[0], 1)
        thread = threading.Thread(target=world.windows[0].close)
        thread.start()
        thread.join()
    assert not world.arrays[1].any()
    with pytest.raises(ncclpy.NcclTimeout):  # nothing of the group was launched
        world.comms[1].wait_signal(0, timeout=0.1)


def test_plans_keep_descriptors_and_know_a_closed_window(world):
    first, second = world.comms
    plan = ncclpy.Plan()
    with plan.record():
        first.put_signal(world.arrays[0][:1], world.windows[0], 1, 4)
        second.wait_signal([0])
    filled = [np.full(4, 2**31 - 1, np.int32) for _ in range(1000)]  # reuse memory of descriptors that are not kept
    for value in range(1, 20):
        world.arrays[0][0] = value
        plan.launch()
        assert world.arrays[1][1] == value
    assert len(filled) == 1000
    world.windows[0].close()
    with pytest.raises(ValueError, match="window that this plan puts into is closed"):
        plan.launch()


@pytest.mark.parametrize("options", [{"timeout": 20}, {"config": ncclpy.Config(blocking=False)}, {}], ids=str)
def test_threads_meet(host_engine, options):
    with World(2, **options) as world:

        def rank(rank):
            comm, array, window = world.comms[rank.rank], world.arrays[rank.rank], world.windows[rank.rank]
            for value in range(50):
                array[0] = value
                comm.put_signal(array[:1], window, 1 - comm.rank, 4)
                comm.wait_signal(1 - comm.rank)
                assert array[1] == value
                comm.barrier()

        testing.run_threads(2, rank, comms=world.comms)


def test_recorder_lists_puts_signals_and_waits(world):
    ncclpy.recorder.record_all()
    try:
        world.comms[0].put_signal(world.arrays[0][:4], world.windows[0], 1)
        with ncclpy.group():
            world.comms[0].signal(1)
            world.comms[1].wait_signal([0], count=2)
        last = ncclpy.recorder.snapshot()["entries"][-3:]
    finally:
        ncclpy.recorder.record_all(False)
    told = [(each["operation"], each["root"], each["count"], each["nbytes"], each["state"]) for each in last]
    assert told == [
        ("put_signal", 1, 4, 16, "completed"),
        ("signal", 1, 0, 0, "completed"),
        ("wait_signal", None, 1, 0, "completed"),
    ]


# Waits that do not end by themselves.


# The timeout also covers making the communicators, which takes over 0.4 s on a busy machine.
BLOCKING = {"timeout": 1.0}
NONBLOCKING = {"config": ncclpy.Config(blocking=False), "timeout": 1.0}


@pytest.mark.parametrize(
    ("options", "way"),
    [(BLOCKING, way) for way in ("plain", "group", "plan", "stream")]
    + [(NONBLOCKING, way) for way in ("plain", "group", "plan")],
    ids=str,
)
def test_wait_for_a_missing_signal_names_the_rank(host_engine, way, options):
    with World(3, **options) as world:
        comm, array = world.comms[0], world.arrays[0]
        plan = ncclpy.Plan()
        if way == "plan":
            with plan.record():
                comm.wait_signal([1, 2])
        world.comms[2].signal(0)
        with pytest.raises(ncclpy.NcclTimeout, match=r"missing: 1 \(") as caught, ncclpy.Stream(0) as stream:
            if way == "plain":
                comm.wait_signal([1, 2])
            elif way == "plan":
                plan.launch()
            elif way == "group":
                with ncclpy.group():
                    comm.put_signal(array, world.windows[0], 2)
                    comm.wait_signal([1, 2])
            else:
                comm.wait_signal([1, 2], stream=stream)
                stream.synchronize(20)  # the watchdog ends it
                comm.barrier()
        assert "2 (process" not in str(caught.value)
        assert comm.closed


@pytest.mark.parametrize("end", ["abort", "close", "handler", "revoke"])
@pytest.mark.parametrize("way", ["plain", "group", "plan"])
def test_waits_end_early(world, way, end):
    comm = world.comms[0]
    plan = ncclpy.Plan()
    with plan.record():
        comm.wait_signal([1])

    class Late(Exception):
        pass

    def late(*_):
        raise Late

    def wait():
        if way == "plain":
            comm.wait_signal(1)
        elif way == "plan":
            plan.launch()
        else:
            with ncclpy.group():
                comm.signal(1)
                comm.wait_signal(1)

    def finish():
        if end == "handler":
            os.kill(os.getpid(), signal.SIGALRM)
        elif end == "close":
            with pytest.raises(ncclpy.NcclTimeout):
                comm.close(timeout=0.05)
        else:
            getattr(comm, end)()

    before = signal.signal(signal.SIGALRM, late)
    timer = threading.Timer(0.1, finish)
    try:
        with pytest.raises((ncclpy.NcclAborted, ncclpy.NcclTimeout, Late)) as caught:
            timer.start()
            wait()
    finally:
        timer.join()
        signal.signal(signal.SIGALRM, before)
    assert (caught.type is Late) == (end == "handler")
    world.comms[1].abort()


def wait_for_the_dead(comm):
    pointer = bindings.mem_alloc(4096)
    window = comm.window(ncclpy.Buffer(pointer, 1024, "float32"))
    comm.barrier()
    if comm.rank == 1:
        comm.wait_signal([0])  # rank 0 has left the barrier
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        comm.signal(1)
        comm.wait_signal([1])
    except ncclpy.NcclError as error:
        return type(error).__name__, str(error), np.asarray(window.buffer).sum()
    return "it came"


def test_wait_for_a_signal_of_a_killed_process_raises(host_engine):
    from ncclpy.testing import run_ranks

    kind, words, total = run_ranks(2, wait_for_the_dead, processes=True, killed=[1], timeout=60)[0]
    assert kind == "NcclRemoteError" and "rank 1" in words and total == 0


@pytest.mark.parametrize("end", ["abort", "close"])
def test_put_to_an_aborted_rank_or_a_closed_window_raises(world, end):
    """The memory of a rank that has aborted, or has closed its window, is not written."""
    first, second = world.comms
    world.arrays[0][:] = 7
    if end == "abort":
        second.abort()
    else:
        world.windows[1].close()
    if end == "abort":
        with pytest.raises(ncclpy.NcclAborted, match="rank 1 of the same communicator was aborted"):
            first.put_signal(world.arrays[0], world.windows[0], 1)
    else:
        first.signal(0)
        with pytest.raises(ncclpy.NcclError, match="rank 1 has deregistered"):
            first.put_signal(world.arrays[0], world.windows[0], 1)
    assert not world.arrays[1].any()


def test_put_does_not_write_after_an_abort_of_the_target(host_engine):
    """One thread puts megabytes into memory that its owner aborts and reuses: nothing is written after the abort."""
    count = 1 << 19
    for seed in range(12):
        choose = random.Random(seed)
        world = World(2, count, timeout=20)
        world.arrays[0][:] = 7
        stop = threading.Event()

        def put(world=world, stop=stop):
            with pytest.raises((ncclpy.NcclError, ValueError)):
                while not stop.is_set():
                    world.comms[0].put_signal(world.arrays[0], world.windows[0], 1)
                raise ValueError

        thread = threading.Thread(target=put)
        thread.start()
        stop.wait(0.01 * choose.random())
        world.comms[1].abort()
        world.arrays[1][:] = 3
        stop.wait(0.02)
        torn = np.unique(world.arrays[1])
        stop.set()
        thread.join()
        testing.abort_all(world.comms)
        assert torn.tolist() == [3], seed
