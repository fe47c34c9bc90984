"""No wrong result from a Communicator, although an abort of one rank completes others' operations with wrong data."""

from __future__ import annotations

import ctypes
import logging
import threading
import time

import numpy as np
import pytest
from test_launcher_peers import PROGRAM
from warm_ranks import run_ranks

import ncclpy
import testing

#: Three ranks; the last one never makes the second call. Prints the end of that call.
CALLS = (
    PROGRAM
    + """
make(timeout=60)
begin()

def call(**options):
    begun, memory = time.monotonic(), lib.make(np.ones(8, np.float32), device)
    try:
        comm.all_reduce(lib.argument(memory), **options)
        comm.barrier()  # on GPUs the first call only begins
    except ncclpy.NcclError as error:
        seconds = round(time.monotonic() - begun, 1)
        print('rank', rank, 'raised', type(error).__name__, '|', error, '|', seconds, flush=True)
    else:
        print('rank', rank, 'got', lib.read(memory)[0], flush=True)
"""
)


#: The same for a thread that reads after a wait on its stream, as frameworks do.
READS = """
def call(**options):
    memory, stream = lib.make(np.ones(8, np.float32), device), ncclpy.Stream(device)
    begun = time.monotonic()
    try:
        comm.all_reduce(lib.argument(memory), stream=stream, **options)
        while not stream.is_done():
            time.sleep(0.001)
        value = lib.read(memory)[0]
        print('rank', rank, 'got', value, flush=True)
    except ncclpy.NcclError as error:
        seconds = round(time.monotonic() - begun, 1)
        print('rank', rank, 'raised', type(error).__name__, '|', error, '|', seconds, flush=True)
"""


def lines_of(tmp_path, program, only=(0, 1), ranks=3):
    testing.need_processes(ranks)
    output = run_ranks(tmp_path, ranks, CALLS + program, only=list(only))[1]
    lines = [line for line in output.splitlines() if " raised " in line or " got " in line]
    assert len(lines) == len(only), output
    assert not [line for line in lines if " got " in line], output
    return lines


def test_deadline_of_one_rank_is_an_error_on_all(tmp_path):
    """The other rank has a timeout of a minute; it hears of rank 0's deadline before rank 0 aborts."""
    program = """
if rank == 2:
    time.sleep(40)
call(timeout=1.0 if rank == 0 else 60)
"""
    for line in lines_of(tmp_path, program):
        assert "raised NcclTimeout" in line and "rank 2 has finished" in line, line
        assert float(line.rpartition("|")[2]) < 5, line


def test_threads_reading_by_stream_get_error_on_all_ranks(tmp_path):
    program = (
        READS
        + """
if rank == 2:
    time.sleep(40)
call(timeout=1.0 if rank == 0 else 60)
"""
    )
    for line in lines_of(tmp_path, program):
        assert "raised NcclTimeout" in line, line


def test_threads_reading_by_stream_get_error_of_a_mismatched_call(host_engine, tmp_path):
    """The call hangs on its stream until the deadline, as no rank can complete it."""
    program = READS.replace("np.ones(8, ", "np.ones(8 + (rank == 2), ") + "call(timeout=1.0)"
    for line in lines_of(tmp_path, program, (0, 1, 2)):
        assert "raised NcclTimeout" in line, line


@pytest.mark.parametrize("made", ["split(0, key=-rank)", "shrink(exclude=[3])"])
def test_deadline_on_a_part_of_a_communicator_is_an_error_on_all_of_its_ranks(tmp_path, made):
    """The other ranks of the part hear of the deadline as in a whole communicator."""
    program = f"""
whole = comm
if rank < 3:
    comm = whole.{made}
elif {made.startswith("split")}:
    whole.split(None)
last = 2 if comm.rank == rank else 0
if rank in (last, 3):
    time.sleep(40)
call(timeout=1.0 if comm.rank == 0 else 60)
"""
    # `split` numbers the ranks in reverse.
    only = (1, 2) if made.startswith("split") else (0, 1)
    for line in lines_of(tmp_path, program, only, 4):
        assert "raised NcclTimeout" in line and float(line.rpartition("|")[2]) < 5, line
        assert "rank 2 has begun no operation yet" in line, line


def test_rank_that_calls_after_an_abort_is_refused(tmp_path):
    program = """
if rank == 2:
    store.get('rank 0 has failed')
    time.sleep(0.3)
call(timeout=1.0 if rank == 0 else 60)
if rank == 0:
    store.set('rank 0 has failed', b'')
"""
    lines = lines_of(tmp_path, program, only=(0, 1, 2))
    assert all("raised NcclTimeout" in line for line in lines), lines


def test_death_is_known_before_the_deadline(tmp_path):
    program = """
if rank == 2:
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)
call(timeout=60)
"""
    for line in lines_of(tmp_path, program):
        assert "raised NcclRemoteError" in line, line
        assert "rank 2" in line and float(line.rpartition("|")[2]) < 10, line


def test_stopped_rank_asks_before_it_returns(tmp_path):
    """The others do not wait for a rank stopped in its operation, which has completed when the rank continues."""
    program = """
if rank == 2:
    store.get('rank 1 may go on')
    os._exit(0)
if rank == 1:
    pid = os.getpid()
    threading.Thread(target=lambda: (time.sleep(0.3), os.kill(pid, signal.SIGSTOP)), daemon=True).start()
    store.set('process 1', str(pid).encode())
else:
    pid = int(store.get('process 1'))
call(timeout=1.0 if rank == 0 else 60)
if rank == 0:
    time.sleep(1.0)
    os.kill(pid, signal.SIGCONT)
    time.sleep(1.0)
    store.set('rank 1 may go on', b'')
"""
    for line in lines_of(tmp_path, program.replace("threading.", "__import__('threading').")):
        assert "raised NcclTimeout" in line, line


@pytest.mark.parametrize("step", ["tell", "confirm", "wait_until_heard"])
def test_abort_that_cannot_tell_others_ends_communicator_and_raises(tmp_path, step):
    """The stuck operation ends, and the steps that still work tell the other rank."""
    testing.need_processes(2)
    program = f"""
from ncclpy.peers import confirmation
from ncclpy.peers.launcher_peers import LauncherPeers

confirmation._LIVE_PATIENCE = 0.3  # seconds for which a rank is waited for that was not told

def failing(self, *arguments):
    raise MemoryError('no space to {step}')

make(timeout=60)
begin()
if rank == 0:
    LauncherPeers.{step} = failing
    stream = ncclpy.Stream(device)
    comm.all_reduce((ncclpy.core.runtime.device.allocate(32, device), 8, 'float32'), stream=stream)
    try:
        comm.abort()
    except MemoryError as error:
        print('rank 0 raised', error, flush=True)
    testing.wait_for(stream.is_done, 'the operation', 20)
    try:
        comm.all_reduce(array(2))
    except ncclpy.NcclAborted as error:
        print('rank 0 is refused', comm.closed, flush=True)
    store.set('rank 0 has aborted', b'')
else:
    store.get('rank 0 has aborted')
    if {step != "tell"}:
        testing.wait_for(lambda: comm.closed, 'the news', 20)
        print('rank 1 was told', flush=True)
"""
    said = run_ranks(tmp_path, 2, PROGRAM + program, only=[0, 1])[1]
    assert f"rank 0 raised no space to {step}" in said and "rank 0 is refused True" in said, said
    assert ("rank 1 was told" in said) == (step != "tell"), said


def run_beside(function):
    """Run a function in a thread; return a function that joins the thread and returns its exception."""
    ended = []

    def body():
        try:
            function()
        except ncclpy.NcclError as error:
            ended.append(error)

    thread = threading.Thread(target=body)
    thread.start()

    def join():
        thread.join(20)
        assert not thread.is_alive()
        return ended[0] if ended else None

    return join


@pytest.fixture
def comms3(host_engine):
    comms = ncclpy.Communicator.init_all([0, 1, 2], timeout=30)
    yield comms
    testing.abort_all(comms)


def test_ranks_of_one_process_hear_of_an_abort_without_a_store(comms3):
    values = np.ones(4)
    waits = run_beside(lambda: comms3[1].all_reduce(values))
    with pytest.raises(ncclpy.NcclTimeout):
        comms3[0].all_reduce(np.ones(4), timeout=0.5)
    assert type(waits()) is ncclpy.NcclTimeout
    with pytest.raises(ncclpy.NcclTimeout, match="rank 0 of the same communicator was aborted"):
        comms3[2].all_reduce(np.ones(4))
    assert comms3[1].async_error() == ncclpy.Result.REMOTE_ERROR


def test_explicit_abort_is_an_abort_on_the_ranks_of_the_process(comms3):
    waits = [run_beside(lambda rank=rank: comms3[rank].all_reduce(np.ones(4))) for rank in (0, 1)]
    time.sleep(0.2)  # ranks 0 and 1 wait for rank 2
    comms3[0].abort()
    assert [type(wait()) for wait in waits] == [ncclpy.NcclAborted] * 2
    with pytest.raises(ncclpy.NcclAborted, match="rank 0 of the same communicator was aborted"):
        comms3[1].all_reduce(np.ones(4))


def test_operation_complete_before_abort_is_a_result(host_engine):
    """It is a result however late the waiting thread looks; here it gets the GIL back only after the abort."""
    sleep_with_gil = ctypes.PyDLL(None).usleep
    for _ in range(5):
        comms = ncclpy.Communicator.init_all([0, 1])
        values = np.ones(4)
        waits = run_beside(lambda values=values, comms=comms: comms[1].all_reduce(values))
        comms[0].all_reduce(np.ones(4))
        sleep_with_gil(100_000)  # rank 1's operation completes meanwhile
        comms[0].abort()
        assert waits() is None and (values == 2).all()
        comms[1].abort()


def abort_after_failure(rank, fails):
    """Rank 0's communicator fails, as it is made or in its first operation; return what is logged in rank 0."""
    records, handler = [], logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("ncclpy").addHandler(handler)
    options = {"device": rank.device, "timeout": 60.0}
    if fails == "as it is made":
        options["timeout"] = 0.3
        if rank.rank == 1:
            rank.unique_id()
            return []
    unique_id = rank.unique_id()
    try:
        comm = ncclpy.Communicator.init(2, rank.rank, unique_id, **options)
        if rank.rank == 0:
            comm.all_reduce(np.ones(2), timeout=0.3)
    except ncclpy.NcclTimeout:
        pass
    else:
        comm.abort()
    return [text for text in records if "are not told" in text] if rank.rank == 0 else []


@pytest.mark.parametrize(("fails", "warnings"), [("in its operation", 1), ("as it is made", 0)])
def test_abort_of_which_no_store_can_tell_is_warned_of(host_engine, fails, warnings):
    told = testing.run_processes(2, abort_after_failure, fails)
    assert [len(each) for each in told] == [warnings, 0], told
