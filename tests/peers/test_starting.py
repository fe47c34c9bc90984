"""How a launcher's processes make a communicator: what the others hear of a failed rank, and later attempts."""

from __future__ import annotations

import re

import pytest
from warm_ranks import run_ranks

#: Prints the result of a rank's attempt; no rank waits for a deadline.
ATTEMPT = """
from ncclpy.bootstrap import environment

rank, size = environment().rank, environment().size

def attempt(**options):
    try:
        comm = ncclpy.Communicator.from_env(**{"device": rank, "timeout": 600, **options})
    except Exception as error:
        print(f"rank {rank}: {type(error).__name__}: {error}", flush=True)
        return
    array = np.ones(2)
    comm.all_reduce(array)
    comm.synchronize() if hasattr(comm, "synchronize") else ncclpy.synchronize(rank)
    print(f"rank {rank}: sum {array[0]:.0f}", flush=True)
    comm.close()
"""

#: By kind of failure: the failing rank, and its error.
FAILS = {
    "device": (1, "ValueError: device 99 does not exist"),
    "id": (0, "NcclError: ncclGetUniqueId: unhandled system error"),
    "config": (1, "TypeError: config: expected an ncclpy.Config, got int"),
    "init": (1, "NcclError: ncclCommInitRankConfig: unhandled system error"),
}


def said_by(output, rank):
    return re.findall(rf"^rank {rank}: (.*)$", output, re.MULTILINE)


@pytest.mark.parametrize("timeout", [600, None])
@pytest.mark.parametrize("what", FAILS)
def test_failed_rank_tells_others_why(host_engine, tmp_path, what, timeout):
    which, words = FAILS[what]
    code, output = run_ranks(
        tmp_path,
        3,
        ATTEMPT
        + f"""
import contextlib
options, faults = {{}}, contextlib.nullcontext()
if rank == {which}:
    options = {{"device": {{"device": 99}}, "config": {{"config": 3}}}}.get({what!r}, {{}})
    call = {{"id": "GetUniqueId", "init": "CommInitRankConfig"}}.get({what!r})
    if call:
        faults = ncclpy.faults(f"call={{call}} nth=1 do=error:ncclSystemError")
with faults:
    attempt(timeout={timeout}, **options)
attempt()
""",
    )
    assert code == [0, 0, 0], output
    for rank in range(3):
        first, second = said_by(output, rank)
        assert words in first and second == "sum 3", output
        assert first.startswith(words if rank == which else "NcclRemoteError: "), output
        assert rank == which or f"rank {which} of 3" in first, output
    assert "are not told" not in output, output  # of an abort of what was never made


def test_failed_attempt_does_not_block_next_processes(host_engine, tmp_path):
    code, output = run_ranks(
        tmp_path,
        2,
        ATTEMPT
        + """
import testing, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of the fork

def program(*arguments, **options):
    pid = os.fork()
    if pid == 0:
        attempt(*arguments, **options)
        os._exit(0)
    os.waitpid(pid, 0)

folder = os.path.dirname(__file__)

def tell(what):
    open(os.path.join(folder, what), "w").close()

def wait_for(what):
    testing.wait_for(lambda: os.path.exists(os.path.join(folder, what)), what)

if rank == 1:
    wait_for("failed")
program(timeout=0.3 if rank == 0 else 600)
tell("failed" if rank == 0 else "heard")
wait_for("heard")
program()
program()
""",
    )
    assert code == [0, 0], output
    for rank in range(2):
        first, *later = said_by(output, rank)
        assert first.startswith("NcclTimeout: rank 1 of 2 did not arrive") and later == ["sum 2", "sum 2"], output


def test_duplicate_rank_is_an_error_in_both_processes(host_engine, tmp_path):
    code, output = run_ranks(
        tmp_path,
        2,
        "os.environ['RANK'] = os.environ['LOCAL_RANK'] = '0'\n"
        + ATTEMPT
        + """
attempt()
print(f"rank 1: {os.getpid()}", flush=True)
time.sleep(3)  # one that has ended would have been followed, not met
""",
    )
    assert code == [0, 0], output
    errors = sorted(said_by(output, 0))
    assert errors[0].startswith("NcclRemoteError: ") and errors[1].startswith("ValueError: "), output
    for pid in said_by(output, 1):
        assert all(f"process {pid} on " in each for each in errors), output
