"""Injected faults: the plan's language, each fault, and random ones."""

import ctypes
import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from driver_calls import Gate
from host_checks import blocked, in_thread, join, refused, start, wait_for, wait_ready
from nccl_calls import (
    HEADER,
    IN_PROGRESS,
    INTERNAL,
    INVALID_ARGUMENT,
    NAMES,
    REMOTE,
    SUCCESS,
    SUM,
    SYSTEM,
    Config,
    NcclError,
    UniqueId,
)
from paths import SUPPORT

import ncclpy
import testing

HERE = Path(__file__).resolve().parent
FLOAT32 = 7
kept = []


@pytest.fixture
def plan(nccl):
    """Return a function that sets a plan, which ends with the test."""
    nccl.library.ncclpyHostSetFaults.argtypes = [ctypes.c_char_p]

    def put(text):
        code = nccl.library.ncclpyHostSetFaults(text.encode())
        if code:
            raise NcclError("ncclpyHostSetFaults", code, nccl.last_error())

    yield put
    put("")


@pytest.fixture
def fired(nccl):
    nccl.library.ncclpyHostFaultsFired.restype = ctypes.c_char_p
    return lambda: nccl.library.ncclpyHostFaultsFired().decode().splitlines()


def reduce_all(nccl, comms, streams, count=1000, skip=()):
    """All-reduce ones from this thread, for all ranks but some; return their results without waiting."""
    values = [np.ones(count, np.float32) for _ in comms]
    kept.append(values)  # the streams may use them after the caller has returned
    for rank, (comm, stream, value) in enumerate(zip(comms, streams, values, strict=False)):
        if rank not in skip:
            nccl.ncclAllReduce(value.ctypes.data, value.ctypes.data, count, FLOAT32, SUM, comm, stream)
    return values


def synchronize(nccl, streams):
    for stream in streams:
        nccl.driver.cuStreamSynchronize(stream)


def test_an_error_at_the_nth_call_of_one_rank(nccl, comms, streams, plan, fired):
    plan("rank=2 call=AllReduce nth=2 do=error:ncclSystemError")
    reduce_all(nccl, comms, streams)
    value = np.ones(1, np.float32)
    p = value.ctypes.data
    late = (p, p, 1, FLOAT32, SUM, comms[2], streams[2])
    refused(SYSTEM, "injected fault: rank 2 AllReduce nth=2 call: error ncclSystemError", nccl.ncclAllReduce, *late)
    synchronize(nccl, streams)
    assert fired() == ["rank 2 AllReduce nth=2 call: error ncclSystemError"]
    nccl.ncclAllReduce(*late)  # the third call succeeds again, as do the other ranks' calls
    reduce_all(nccl, comms, streams, 1, skip=[2])
    synchronize(nccl, streams)


@pytest.mark.parametrize(
    ("nth", "failing"),
    [("1", {1}), ("2", {2}), ("2+", {2, 3, 4}), ("*", {1, 2, 3, 4})],
)
def test_nth_selects_occurrences(nccl, comms, plan, nth, failing):
    plan(f"call=ncclCommCount nth={nth} rank=1 do=error")
    failed = set()
    for number in range(1, 5):
        nccl.get("ncclCommCount", comms[0])
        try:
            nccl.get("ncclCommCount", comms[1])
        except NcclError:
            failed.add(number)
    assert failed == failing


def test_rule_selects_a_communicator_by_name(nccl, plan):
    comms = []
    for name in (b"red", b"blue"):
        comm = ctypes.c_void_p()
        nccl.init_into(comm, 1, nccl.unique_id(), 0, Config(commName=name))
        comms.append(comm)
    plan("comm=blue call=CommUserRank do=error")
    assert nccl.get("ncclCommUserRank", comms[0]) == 0
    refused(SYSTEM, "injected", nccl.get, "ncclCommUserRank", comms[1])
    for comm in comms:
        nccl.ncclCommDestroy(comm)


def test_a_split_without_a_configuration_keeps_the_name(nccl, plan):
    """As in NCCL the child copies the parent's configuration; a configuration of its own has its own name, or none."""
    parent = ctypes.c_void_p()
    nccl.init_into(parent, 1, nccl.unique_id(), 0, Config(commName=b"red"))
    same, none = nccl.split(parent, 0, 0), nccl.split(parent, 0, 0, Config())
    plan("comm=red call=CommUserRank do=error")
    refused(SYSTEM, "injected", nccl.get, "ncclCommUserRank", same)
    assert nccl.get("ncclCommUserRank", none) == 0
    for comm in (same, none, parent):
        nccl.ncclCommDestroy(comm)


def test_delay_at_run_delays_the_operation(nccl, comms, streams, plan, fired):
    plan("rank=3 call=AllReduce at=run do=delay:400ms")
    begin = time.monotonic()
    values = reduce_all(nccl, comms, streams)
    assert not nccl.driver.ready("cuStreamQuery", streams[3]), "the call itself returns at once"
    synchronize(nccl, streams)
    assert time.monotonic() - begin >= 0.4
    assert all((value == 4).all() for value in values)
    assert fired() == ["rank 3 AllReduce nth=1 run: delay"]


def test_delay_at_call_delays_the_call(nccl, comms, plan):
    plan("rank=0 call=CommCount do=delay:100ms")
    begin = time.monotonic()
    nccl.get("ncclCommCount", comms[0])
    assert time.monotonic() - begin >= 0.1


def test_hang_at_run_lasts_until_abort(nccl, streams, plan):
    comms = nccl.init_all(2)
    plan("rank=1 call=AllReduce at=run do=hang")
    reduce_all(nccl, comms, streams)
    waiting = in_thread(nccl.driver.cuStreamSynchronize, streams[1])
    assert blocked(waiting)
    for comm in comms:
        nccl.ncclCommAbort(comm)
    join(waiting)
    synchronize(nccl, streams)


def test_hang_at_call_lasts_until_abort(nccl, streams, plan):
    comms = nccl.init_all(2)
    plan("rank=1 call=AllReduce do=hang")
    value = np.ones(1, np.float32)
    p = value.ctypes.data
    call = in_thread(nccl.ncclAllReduce, p, p, 1, FLOAT32, SUM, comms[1], streams[1])
    assert blocked(call)
    nccl.ncclCommAbort(comms[1])
    with pytest.raises(NcclError, match="aborted while it waited for the end of an injected hang") as caught:
        join(call)
    assert caught.value.code == INTERNAL
    nccl.ncclCommAbort(comms[0])


@pytest.mark.parametrize("function", ["CommAbort", "CommDestroy", "CommFinalize", "CommDeregister"])
def test_ending_calls_can_hang_for_a_time(nccl, plan, function):
    (comm,) = nccl.init_all(1)
    handle = ctypes.c_void_p()
    memory = np.ones(10)
    nccl.ncclCommRegister(comm, memory.ctypes.data, memory.nbytes, ctypes.byref(handle))
    plan(f"call={function} do=hang:300ms")
    arguments = (comm, handle) if function == "CommDeregister" else (comm,)
    began = time.monotonic()
    join(in_thread(getattr(nccl, "nccl" + function), *arguments))
    assert time.monotonic() - began >= 0.3
    if function in ("CommDeregister", "CommFinalize"):
        nccl.ncclCommAbort(comm)


def test_an_abort_can_hang_without_end(plan):
    program = start(
        """
        (comm,) = nccl.init_all(1)
        nccl.library.ncclpyHostSetFaults(b"call=CommAbort do=hang")
        say("aborting")
        nccl.ncclCommAbort(comm)
        say("not reached")
        """
    )
    assert program.stdout.readline() == "aborting\n"
    time.sleep(0.3)
    assert program.poll() is None
    program.kill()
    assert program.communicate()[0] == ""


def test_a_group_end_that_fails_launches_nothing(nccl, comms, streams, plan):
    plan("call=GroupEnd do=error:ncclInternalError")
    nccl.ncclGroupStart()
    values = reduce_all(nccl, comms, streams)
    refused(INTERNAL, "injected fault: rank 0 GroupEnd nth=1", nccl.ncclGroupEnd)
    synchronize(nccl, streams)
    assert all((value == 1).all() for value in values)
    values = reduce_all(nccl, comms, streams)
    synchronize(nccl, streams)
    assert all((value == 4).all() for value in values)


@pytest.mark.parametrize("count", [1, 1000, 200_001])
def test_one_element_is_corrupted_on_one_rank(nccl, comms, streams, plan, fired, count):
    plan("rank=1 call=AllReduce do=corrupt")
    values = reduce_all(nccl, comms, streams, count)
    synchronize(nccl, streams)
    for rank, value in enumerate(values):
        wrong = np.flatnonzero(value != 4)
        assert wrong.tolist() == ([count // 2] if rank == 1 else [])
    bits = values[1][count // 2 : count // 2 + 1].view(np.uint32)[0]
    assert bits == np.float32(4).view(np.uint32) ^ 1
    assert fired() == ["rank 1 AllReduce nth=1 run: corrupt"]


def test_a_received_message_is_corrupted(nccl, comms, streams, plan):
    plan("rank=1 call=Recv do=corrupt")
    sent, got = np.arange(9.0, dtype=np.float32), np.zeros(9, np.float32)
    nccl.ncclSend(sent.ctypes.data, 9, FLOAT32, 1, comms[0], streams[0])
    nccl.ncclRecv(got.ctypes.data, 9, FLOAT32, 0, comms[1], streams[1])
    synchronize(nccl, streams)
    assert np.flatnonzero(sent != got).tolist() == [4]


@pytest.mark.parametrize("function", ["Reduce", "Gather"])
def test_nothing_is_corrupted_where_nothing_is_received(nccl, comms, streams, plan, fired, function):
    """The receive buffer of a rank that is not the root is not accessed, and may be any pointer."""
    plan(f"rank=1 call={function} do=corrupt")
    sent, got = np.ones(4, np.float32), np.zeros(16, np.float32)
    elsewhere = np.zeros(16, np.float32)
    nccl.ncclGroupStart()
    for rank, (comm, stream) in enumerate(zip(comms, streams, strict=True)):
        target = (got if rank == 0 else elsewhere).ctypes.data
        operator = (SUM,) if function == "Reduce" else ()
        getattr(nccl, f"nccl{function}")(sent.ctypes.data, target, 4, FLOAT32, *operator, 0, comm, stream)
    nccl.ncclGroupEnd()
    synchronize(nccl, streams)
    assert got[0] == (4 if function == "Reduce" else 1)
    assert not elsewhere.any()
    assert fired() == []


def test_an_operation_that_fails_is_an_async_error(nccl, streams, plan):
    comms = nccl.init_all(2)
    plan("rank=0 call=AllReduce at=run do=error:ncclRemoteError")
    values = reduce_all(nccl, comms, streams)
    wait_for(lambda: nccl.async_error(comms[0]) == REMOTE)
    assert nccl.async_error(comms[1]) == SUCCESS
    assert (values[0] == 1).all(), "what has failed has not run"
    time.sleep(0.05)
    assert not any(nccl.driver.ready("cuStreamQuery", stream) for stream in streams[:2]), "only an abort ends them"
    assert nccl.last_error(comms[0]) == "injected fault: rank 0 AllReduce nth=1 run: error ncclRemoteError"
    for comm in comms:
        nccl.ncclCommAbort(comm)
    synchronize(nccl, streams)


def test_error_is_not_cleared_by_the_end_of_a_call_in_progress(nccl, streams, plan):
    """A split that began before the error and succeeds after it does not clear it."""
    uid = nccl.unique_id()
    comms = [ctypes.c_void_p(), ctypes.c_void_p()]
    for rank, comm in enumerate(comms):
        nccl.driver.use(rank)
        nccl.init_into(comm, 2, uid, rank, Config(blocking=0))
    assert [wait_ready(nccl, comm) for comm in comms] == [SUCCESS, SUCCESS]
    plan("rank=0 call=AllReduce at=run do=error:ncclSystemError")
    with Gate(nccl.driver, streams[0]):
        reduce_all(nccl, comms, streams)
        assert [wait_ready(nccl, comm) for comm in comms] == [SUCCESS, SUCCESS]
        children = [ctypes.c_void_p(), ctypes.c_void_p()]
        assert nccl.ncclCommSplit(comms[0], 0, 0, ctypes.byref(children[0]), None) == IN_PROGRESS
    wait_for(lambda: nccl.async_error(comms[0]) == SYSTEM)
    nccl.ncclCommSplit(comms[1], 0, 1, ctypes.byref(children[1]), None)
    assert wait_ready(nccl, comms[1]) == SUCCESS
    wait_for(lambda: children[0].value)
    time.sleep(0.01)
    assert nccl.async_error(comms[0]) == SYSTEM
    for comm in children + comms:
        nccl.ncclCommAbort(comm)


@pytest.mark.parametrize("busy", ["3", "60ms"])
def test_busy_lasts_for_some_polls_or_a_time(nccl, streams, plan, busy):
    comm = ctypes.c_void_p()
    nccl.init_into(comm, 1, nccl.unique_id(), 0, Config(blocking=0))
    assert wait_ready(nccl, comm) == SUCCESS
    plan(f"call=AllReduce do=busy:{busy}")
    value = np.ones(1, np.float32)
    p = value.ctypes.data
    begin = time.monotonic()
    assert nccl.ncclAllReduce(p, p, 1, FLOAT32, SUM, comm, streams[0]) == IN_PROGRESS
    refused(INVALID_ARGUMENT, "before the previous operation", nccl.get, "ncclCommCount", comm)
    polls = 0
    while nccl.async_error(comm) == IN_PROGRESS:
        polls += 1
    if busy == "3":
        assert polls >= 3
    else:
        assert time.monotonic() - begin >= 0.06
    nccl.driver.cuStreamSynchronize(streams[0])
    nccl.ncclCommAbort(comm)


def test_a_process_kills_itself_and_its_peer_notices(nccl):
    uid = nccl.unique_id()
    other = start(
        """
        comm = init(2, 1, sys.argv[1])
        nccl.library.ncclpyHostSetFaults(b"call=AllReduce nth=2 at=run do=kill")
        x = np.ones(4, np.float32)
        for i in range(2):
            nccl.ncclAllReduce(x.ctypes.data, x.ctypes.data, 4, 7, 0, comm, None)
        time.sleep(60)
        """,
        uid.hex(),
    )
    comm = nccl.init(2, uid, 0)
    stream = nccl.driver.stream(1)
    x = np.ones(4, np.float32)
    for _ in range(2):
        nccl.ncclAllReduce(x.ctypes.data, x.ctypes.data, 4, FLOAT32, SUM, comm, stream)
    other.communicate(timeout=10)
    assert other.returncode == -9
    wait_for(lambda: nccl.async_error(comm) == REMOTE)
    nccl.ncclCommAbort(comm)
    nccl.driver.cuStreamSynchronize(stream)


@pytest.mark.parametrize("function", ["CommInitRank", "CommInitRankConfig", "CommInitAll", "CommInitRankScalable"])
def test_initialisations_can_fail(nccl, plan, function):
    plan(f"call={function} do=error:ncclRemoteError")
    comm = ctypes.c_void_p(1)
    uid = UniqueId.from_buffer_copy(nccl.unique_id())
    arguments = {
        "CommInitRank": (1, uid, 0),
        "CommInitRankConfig": (1, uid, 0, None),
        "CommInitAll": (1, None),
        "CommInitRankScalable": (1, 0, 1, ctypes.byref(uid), None),
    }[function]
    refused(
        REMOTE, "injected fault: rank 0 " + function, getattr(nccl, "nccl" + function), ctypes.byref(comm), *arguments
    )
    assert not comm.value


# Functions without a communicator, and those that only read its state.
WITHOUT_FAULTS = {"ncclGroupStart", "ncclGetLastError", "ncclGetErrorString", "ncclGetVersion", "ncclSetEncryption"}


def test_every_function_of_a_communicator_is_a_site(nccl, plan, fired):
    """Called with arguments that are invalid except for the communicator, each function runs into its fault first."""
    comms = nccl.init_all(1)
    missed = []
    for name in nccl.names:
        parameters = getattr(nccl.library, name).argtypes
        position = communicator_position(name)
        if name in WITHOUT_FAULTS or position is None or name.startswith("ncclTeam") or "DevComm" in name:
            continue
        plan(f"call={name} do=error:ncclTimeout")
        # 99 is no built-in operator; a built-in one would be refused before anything else.
        arguments = [ctypes.c_int(99) if kind is ctypes.c_int else kind() for kind in parameters]
        arguments[position] = parameters[position](comms[0])
        getattr(nccl.library, name)(*arguments)
        if not fired():
            missed.append(name)
    plan("")
    nccl.ncclCommAbort(comms[0])
    assert missed == []


def communicator_position(name):
    parameters = re.search(rf"X\(\d+, [\w ]+\*?, {name}, +\((.*?)\)\)", HEADER).group(1).split(",")
    for i, parameter in enumerate(parameters):
        if re.match(r"\s*(const )?ncclComm_t \w+$", parameter):
            return i
    return None


def test_call_names_are_those_of_the_header(nccl):
    assert set(nccl.names) <= set(NAMES)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("call=AllReduce", '"call=AllReduce" is not understood; a rule needs do='),
        ("call=AllRed do=hang", '"call=AllRed" is not understood; call is the name of a function of nccl.h'),
        ("rank=x do=hang", '"rank=x" is not understood; rank is a number or *'),
        ("rank=-1 do=hang", "rank is a number"),
        ("nth=0 do=hang", "nth is 1, 2, ..., or 3+"),
        ("do=explode", '"do=explode" is not understood; a fault is error, busy, delay, hang, kill or corrupt'),
        ("do=error:ncclSucces", "an error is ncclUnhandledCudaError"),
        ("do=delay", "delay takes a time, as in delay:20ms"),
        ("do=delay:5", "delay takes a time"),
        ("do=delay:-5ms", "delay takes a time"),
        ("do=busy", "busy takes a number of polls or a time"),
        ("do=busy:3 at=run", "busy happens in a call"),
        ("do=kill:9", "this fault takes no argument"),
        ("do=hang,kill", "only random takes several faults"),
        ("random do=hang", "random needs p="),
        ("random p=2 do=hang", "p is a probability from 0 to 1"),
        ("at=night do=hang", "at is call or run"),
        ("comm= do=hang", "comm is the name"),
        ("when=now do=hang", "the words are rank=, call=, nth=, comm=, at=, do=, and random, seed=, p="),
        ("call=AllReduce do=hang; call=X do=hang", '"call=X"'),
    ],
)
def test_invalid_plan_is_refused(nccl, plan, text, words):
    with pytest.raises(NcclError) as caught:
        plan(text)
    assert caught.value.code == INVALID_ARGUMENT and words in caught.value.text


def test_invalid_plan_in_the_environment_fails_every_call():
    program = "import ctypes, sys; e = ctypes.CDLL(sys.argv[1]); e.ncclGetLastError.restype = ctypes.c_char_p; "
    program += "print(e.ncclGetUniqueId(ctypes.create_string_buffer(128)), e.ncclGetLastError(None).decode())"
    done = subprocess.run(
        [sys.executable, "-c", program, ncclpy.core.runtime.search.host_engine_path()],
        env=os.environ | {"NCCLPY_FAULTS": "do=what"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(f'{INVALID_ARGUMENT} NCCLPY_FAULTS: fault plan: "do=what" is not understood')


def test_a_random_plan_replays(nccl, comms, plan, fired, capfd):
    def calls():
        plan("random seed=7 p=0.2 do=error,delay:1us")
        for _ in range(30):
            for comm in comms:
                nccl.library.ncclCommCount(comm, ctypes.byref(ctypes.c_int()))
        return fired()

    first = calls()
    assert 10 < len(first) < 50 and len({line.split(": ")[1] for line in first}) == 2
    assert calls() == first
    plan("random seed=8 p=0.2 do=error,delay:1us")
    assert fired() == []
    announced = capfd.readouterr().err
    assert "NCCLPY_FAULTS='random seed=7 p=0.2 do=error,delay:1us' repeats them" in announced


class TestFace:
    """`ncclpy.faults`."""

    def test_plan_ends_with_its_block(self):
        comm = ncclpy.Communicator.init_all([0])[0]
        values = np.ones(3)
        with ncclpy.faults("call=AllReduce do=error:ncclRemoteError") as faults:
            assert faults.fired == []
            with pytest.raises(ncclpy.NcclRemoteError, match="injected fault: rank 0 AllReduce nth=1"):
                comm.all_reduce(values)
            assert faults.fired == ["rank 0 AllReduce nth=1 call: error ncclRemoteError"]
        assert faults.fired == ["rank 0 AllReduce nth=1 call: error ncclRemoteError"]
        comm.close()
        comm = ncclpy.Communicator.init_all([0])[0]
        comm.all_reduce(values)
        comm.close()

    def test_inner_block_restores_the_outer_plan(self):
        comm = ncclpy.Communicator.init_all([0])[0]
        with ncclpy.faults("call=CommCount do=error"):
            with ncclpy.faults("call=CommUserRank do=error") as inner:
                ncclpy.bindings.comm_count(comm.handle)
                with pytest.raises(ncclpy.NcclError):
                    ncclpy.bindings.comm_user_rank(comm.handle)
            assert len(inner.fired) == 1
            with pytest.raises(ncclpy.NcclError):
                ncclpy.bindings.comm_count(comm.handle)
        ncclpy.bindings.comm_count(comm.handle)
        comm.close()

    @pytest.mark.parametrize(
        ("call", "users"),
        [
            ("CommInitRank", "init"),
            ("CommInitRankConfig", "init"),
            ("CommInitRankScalable", "init"),
            ("CommInitAll", "init_all"),
            ("CommInitRank", "init_all"),
            ("Bcast", "broadcast"),
            ("BroadcastConfig", "broadcast"),
            ("AllReduceConfig", "all_reduce"),
        ],
    )
    def test_rule_names_the_function_that_users_call(self, call, users):
        """The rule applies to whichever of NCCL's functions ncclpy calls."""
        comm = ncclpy.Communicator.init_all([1])[0]
        calls = {
            "init": lambda: ncclpy.Communicator.init(1, 0, ncclpy.get_unique_id(), device=0),
            "init_all": lambda: ncclpy.Communicator.init_all([0]),
            "broadcast": lambda: comm.broadcast(np.ones(2)),
            "all_reduce": lambda: comm.all_reduce(np.ones(2)),
        }
        with ncclpy.faults(f"call={call} do=error") as faults, pytest.raises(ncclpy.NcclError, match="injected fault"):
            calls[users]()
        assert len(faults.fired) == 1
        comm.close()

    def test_rule_that_never_fired_warns(self):
        comm = ncclpy.Communicator.init_all([0])[0]
        rule = "rank=3 call=AllGather do=error"
        with (
            pytest.warns(RuntimeWarning, match=rf'the fault "{rule}" has not happened') as warned,
            ncclpy.faults(f"call=CommCount  do=delay:1us;{rule};random p=0.000001 do=error"),
        ):
            ncclpy.bindings.comm_count(comm.handle)
        assert len(warned) == 1 and warned[0].filename == __file__
        comm.close()

    def test_inner_block_does_not_reset_fired_rules(self):
        comm = ncclpy.Communicator.init_all([0])[0]
        with ncclpy.faults("call=CommCount do=delay:1us"):
            ncclpy.bindings.comm_count(comm.handle)
            with ncclpy.faults("call=CommUserRank do=delay:1us"):
                ncclpy.bindings.comm_user_rank(comm.handle)
        comm.close()

    def test_invalid_plan_raises(self):
        with pytest.raises(ValueError, match=r'"do=what" is not understood'), ncclpy.faults("do=what"):
            pass
        with pytest.raises(TypeError, match="plan must be a str, not int"):
            ncclpy.faults(3)

    def test_faults_on_another_engine_are_refused(self, monkeypatch):
        from ncclpy.core.runtime import faults, library

        class Loaded:
            engine, path = "cuda", "/usr/lib/libnccl.so.2"

        monkeypatch.setattr(library, "library", lambda: Loaded)
        with pytest.raises(RuntimeError, match=r"/usr/lib/libnccl\.so\.2 is loaded"), faults.Faults("do=hang"):
            pass


@pytest.mark.parametrize(
    "count",
    [
        12,
        pytest.param(50, marks=pytest.mark.slow),
        pytest.param(2 * testing.share(250), id="campaign", marks=pytest.mark.campaign),
    ],
)
def test_random_faults_end_in_a_result_or_an_error(count):
    seed = int(os.environ.get("NCCLPY_TEST_SEED", random.SystemRandom().randrange(10**6)))
    halves = [
        subprocess.Popen(
            [sys.executable, HERE / "fault_runs.py", str(first), str(count // 2)],
            env=os.environ | {"PYTHONPATH": str(SUPPORT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd="/",
        )
        for first in (seed, seed + count // 2)
    ]
    runs = []
    answers = []
    try:
        for half in halves:
            answers.append(half.communicate(timeout=110 if count <= 50 else testing.LONG))
    finally:
        for half in halves[len(answers) :]:
            half.kill()
            half.communicate()
    for half, (said, errors) in zip(halves, answers, strict=True):
        *mine, left = [json.loads(line) for line in said.splitlines()]
        assert half.returncode == 0 and len(mine) == count // 2, errors
        runs += mine
        failed = [run for run in mine if run["problems"]]
        assert not failed, f"repeat with `python fault_runs.py {failed[0]['seed']} 1`: {failed}"
        assert left["after"]["descriptors"] <= left["before"]["descriptors"], "also of ids that nobody came with"
        assert {key: left["after"][key] for key in ("threads", "shm")} == {
            key: left["before"][key] for key in ("threads", "shm")
        }
    kinds = {line.split(": ")[1].split()[0] for run in runs for line in run["fired"]}
    if count == 500:  # in a few runs one of them may not occur
        assert kinds == {"error", "busy", "delay", "hang", "corrupt"}, "every fault has been at work"
    enough = count / 5 if count >= 50 else 0  # in a few runs one may not occur
    assert sum(bool(run["fired"]) for run in runs) > enough
    assert sum(set(run["outcomes"]) == {"right"} for run in runs) > enough
