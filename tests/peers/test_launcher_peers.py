"""Errors of a Communicator that a launcher's processes have made: they tell the state of all its ranks."""

from __future__ import annotations

import re
import textwrap
import types

import pytest
from group_fixtures import IN_A_STORE
from warm_ranks import run_ranks

import ncclpy
import testing
from ncclpy.peers import launcher_peers

#: Processes that have done one collective; then the last one does something else.
PROGRAM = (
    IN_A_STORE
    + """
comm = None

def make(**options):
    global comm
    comm = ncclpy.Communicator.from_env(device=device, **options)

def array(count):
    return lib.argument(lib.make(np.ones(count, np.float32), device))

def begin():
    comm.all_reduce(array(2), timeout=30)
    ncclpy.synchronize(device)
    have_told('ncclpy/communicator-1/', ask=False)

def say(error):
    states = None if error.ranks is None else [each.state for each in error.ranks]
    print('rank', rank, 'has', type(error).__name__, states, '|', error, '|', flush=True)

def look(**options):
    until = time.monotonic() + 30
    while time.monotonic() < until:  # of what was left on the device the next call tells
        ncclpy.synchronize(device)
        time.sleep(0.05)
        comm.all_reduce(array(3), **options)

def begins():  # what this rank does instead, before the others' short deadlines
    store.set('it has begun', b'')
"""
)


def made_with_short_timeout():
    """Return code with which both ranks make a communicator with a short timeout for its making and its operations."""
    seconds = 1.0 if ncclpy.library().engine == "host" else 6.0  # NCCL may take seconds to make it
    return f"store.barrier('all are there', rank, size)\nmake(timeout={seconds})"


#: Program of the ranks that wait for the last one. Arrays may be on a GPU, where a call does not wait.
TROUBLE = """
def wait(**options):
    comm.all_reduce(array(1024), **options)
    look(**options)
try:
    store.get('it has begun')
    store.set(f'rank {rank} waits', b'')
    wait(timeout=patience)
except ncclpy.NcclError as error:
    failure = error
if size > 2:
    store.barrier('all who wait have failed', rank, size - 1)
say(failure)
comm.close()
"""

SLEEPS = "def sleeps():\n    begins()\n    time.sleep(40)\nsleeps()"
LATE = "rank {last} has finished all_reduce #0 and is in no operation since "
AFTER = " after all_reduce #0"
CLOSED = "rank {last} has closed the communicator" + AFTER
WHAT = {
    "late": (SLEEPS, "idle", LATE),
    "holds the GIL": (
        "import ctypes\nsleep = ctypes.PyDLL(None).sleep\nbegins()\nsleep(40)",
        "unresponsive",
        "rank {last} does not answer, and the process lives: "
        "its Python does not run (the GIL is held), last heard of" + AFTER,
    ),
    "stopped": (
        "begins()\nos.kill(os.getpid(), signal.SIGSTOP)",
        "stopped",
        "rank {last}'s process is stopped (by SIGSTOP or a debugger), last heard of" + AFTER,
    ),
    "closed": ("comm.close()\n" + SLEEPS, "closed", CLOSED),
    "killed": (
        "begins()\nstore.get('rank 0 waits')\ntime.sleep(0.1)\nos.kill(os.getpid(), signal.SIGKILL)",
        "ended",
        "rank {last}'s process has ended, last heard of" + AFTER,
    ),
    "another operation": (
        "comm.broadcast(array(4), root=1, timeout=30)\n" + SLEEPS,  # a root does not wait for the other ranks
        "idle",
        "rank {last} has finished broadcast #1 and is in no operation since ",
    ),
}


def lines_of(tmp_path, ranks, does, trouble=TROUBLE, made="make(timeout=60)", before="", patience=0.4):
    """Return for each rank that waits for the last one: the error's class, the states, and the text."""
    testing.need_processes(ranks)
    program = f"{PROGRAM}\npatience = {patience}\n{made}\nbegin()\n{before}\nif rank == size - 1:\n"
    program += textwrap.indent(does, "    ") + "\n    os._exit(0)\n" + trouble
    output = run_ranks(tmp_path, ranks, program, only=range(ranks - 1))[1]
    lines = [line.partition(" has ")[2].split(" | ")[:2] for line in output.splitlines() if " has Nccl" in line]
    assert len(lines) == ranks - 1, output
    return [(*head.partition(" ")[::2], text) for head, text in lines]


@pytest.mark.parametrize("what", WHAT)
def test_error_tells_what_other_rank_does(tmp_path, what):
    does, state, said = WHAT[what]
    # The end of a process is noticed long before the deadline; the other cases begin before the deadline does.
    patience = 30 if what == "killed" else 0.4
    # The asking rank waits for the answer of an unresponsive one for that long.
    before = "reports.PATIENCE = 0.3" if state == "unresponsive" else ""
    [(_, states, text)] = lines_of(tmp_path, 2, does, patience=patience, before=before)
    assert states == f"['running', '{state}']", text
    assert said.format(last=1) in text
    # The stack may still be inside the store's call.
    called = r"\. Python of rank 1: .*\S+:\d+ in sleeps\b"
    assert ("Python of" in text) == (state == "idle") == bool(re.search(called, text)), text
    # The error is about the operation of the rank that is seen to differ first.
    subject = r"(broadcast #1 \(float32 x 4, root 1\)|all_reduce #1 \(float32 x 1,024, sum\))"
    where, waits = (
        rf"\. {subject} of communicator '[0-9a-f]{{8}}': ",
        r"rank 0 (waits|is) in all_reduce #1 .*since [0-9.]+ m?s",
    )
    assert re.search(rf"{where}(rank 1.*; {waits}|{waits}; rank 1)", text), text
    assert text.count("broadcast") == 0 or what == "another operation", text
    assert "see which of the other ranks" not in text, "advice to find out what is said here"


def test_errors_of_all_ranks_say_the_same(tmp_path):
    """The first failing rank asks all others, and leaves the answers to the ranks that fail later."""
    lines = lines_of(tmp_path, 3, *WHAT["late"][:1])
    texts = {text.partition(". all_reduce #1 (")[2] for _, _, text in lines}
    assert len(texts) == 1 and "ranks 0-1 wait in all_reduce #1 since" in texts.pop(), lines
    assert {states for _, states, _ in lines} == {"['running', 'running', 'idle']"}


GROUP = TROUBLE.replace(
    "    comm.all_reduce(array(1024), **options)\n",
    "    with ncclpy.group(**options):\n        comm.all_reduce(array(1024))\n        comm.all_reduce(array(1024))\n",
)


def test_error_in_group_of_calls(tmp_path):
    [(_, states, text)] = lines_of(tmp_path, 2, SLEEPS, GROUP)
    assert states == "['running', 'idle']" and LATE.format(last=1) in text, text
    assert re.search(r"rank 0 waits in all_reduce #[12] since", text), text


PAIR = TROUBLE.replace(
    "    comm.all_reduce(array(1024), **options)\n",
    "    comm.sendrecv(array(1024), 1, array(512), 1, **options)\n",
)


def test_call_ended_by_abort_is_not_finished(host_engine, tmp_path):
    """NCCL hangs in the call, as in the first send of two ranks on GPUs, which connects them."""
    made = "make(timeout=60)\nhangs = ncclpy.faults('rank=0 call=GroupEnd do=hang')"
    trouble = TROUBLE.replace(
        "    comm.all_reduce(array(1024), **options)\n",
        "    with hangs, ncclpy.group(**options):\n        comm.send(array(4), 1)\n        comm.recv(array(4), 1)\n",
    )
    [(_, states, text)] = lines_of(tmp_path, 2, SLEEPS, trouble, made)
    assert states == "['running', 'idle']" and "rank 0 waits in recv #2 from rank 1 since" in text, text


def test_error_in_send_and_receive(tmp_path):
    """A send and a receive count as two calls, also in sendrecv(), which has its own name and the receive's number."""
    does = "with ncclpy.group():\n    comm.send(array(512), 0)\n    comm.recv(array(1024), 0)\n" + SLEEPS
    [(_, states, text)] = lines_of(tmp_path, 2, SLEEPS, PAIR)
    assert states == "['running', 'idle']" and LATE.format(last=1) in text, text
    assert "sendrecv #2 from rank 1 (float32 x 512) of communicator" in text, text
    assert "rank 0 waits in sendrecv #2 from rank 1 since" in text, text
    done = PAIR.replace("    store.get('it has begun')\n", "").replace(
        "1, **options)\n", "1, timeout=30)\n    store.get('it has begun')\n"
    )
    [(_, states, text)] = lines_of(tmp_path, 2, does, done)
    assert states == "['running', 'idle']", text
    assert "rank 1 has finished recv #2 from rank 0 and is in no" in text and "waits in all_reduce #3 since" in text


PLAN = TROUBLE.replace(
    "    comm.all_reduce(array(1024), **options)\n",
    "    plan, mine = ncclpy.Plan(), array(1024)\n    with plan.record():\n        comm.all_reduce(mine)\n"
    "    plan.launch(**options)\n",
)


def test_error_in_plan(tmp_path):
    [(_, states, text)] = lines_of(tmp_path, 2, SLEEPS, PLAN)
    assert states == "['running', 'idle']" and text.count(LATE.format(last=1)) == 1, text
    assert "rank 0 waits in all_reduce #1 since" in text


def test_error_with_recorded_calls(tmp_path):
    """With a recorder around the call, the error is still explained once."""
    made = "from ncclpy.engine import recorder\nrecorder.record_all()\nmake(timeout=60)"
    [(_, states, text)] = lines_of(tmp_path, 2, SLEEPS, made=made)
    assert states == "['running', 'idle']" and text.count(LATE.format(last=1)) == 1, text


@pytest.mark.parametrize("abort", ["at once", "after a while"])  # as on GPUs
def test_deadline_kept_by_watcher_is_explained(tmp_path, abort):
    """No thread waits for the operation on the stream; the next call reports its end and the states of the others."""
    if abort != "at once" and ncclpy.library().engine != "host":
        pytest.skip("needs the host engine: an abort that is told to take a while")
    slow = (
        "" if abort == "at once" else "slow = ncclpy.faults('call=CommAbort nth=2 do=delay:0.5s')\nslow.__enter__()\n"
    )
    trouble = """
    stream = ncclpy.Stream(device)
    first, second = array(1024), array(3)
    until = time.monotonic() + 30
    try:
        comm.all_reduce(first, stream=stream)
        while time.monotonic() < until:
            time.sleep(0.1)
            comm.all_reduce(second, stream=stream)
    except ncclpy.NcclError as error:
        say(error)
    """
    made = made_with_short_timeout()
    [(kind, states, text)] = lines_of(tmp_path, 2, SLEEPS, slow + textwrap.dedent(trouble), made)
    assert (kind, states) == ("NcclTimeout", "['running', 'idle']"), text
    assert "rank 0 waits in all_reduce #1 since" in text and LATE.format(last=1) in text


def test_operation_without_deadline_has_unknown_end(host_engine, tmp_path):
    """The end of the operation is unknown: no event was recorded behind it, and no thread has waited."""
    program = """
make()
stream = ncclpy.Stream(device)
mine = array(2)
comm.all_reduce(mine, stream=stream)
stream.synchronize()
store.barrier('all are done', rank, size)
if rank == 2:
    store.get('rank 0 waits')
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 1:
    time.sleep(40)
store.set('rank 0 waits', b'')
try:
    comm.all_reduce(array(1024))
except ncclpy.NcclRemoteError as error:
    say(error)
"""
    output = run_ranks(tmp_path, 3, PROGRAM + program, only=[0])[1]
    [line] = [line for line in output.splitlines() if " has Nccl" in line]
    assert "['running', 'launched', 'ended']" in line, line
    assert "rank 1 has launched all_reduce #0 (float32 x 2, sum), which may be done since" in line


#: By case: what both ranks do first, rank 0's failing call, rank 1's program, the states, and the texts.
MOMENTS = {
    # The operation is done, and its event was not queried before another call failed.
    "after what ran on a stream": (
        "stream = ncclpy.Stream(device)\nmine = array(2)\n"
        "comm.all_reduce(mine, stream=stream)\nstream.synchronize()\n",
        "store.get('it has begun')\ncomm.all_reduce(array(3), timeout=patience)\nlook(timeout=patience)",
        SLEEPS,
        "['running', 'idle']",
        "rank 0 waits in all_reduce #2 since ",
        "rank 1 has finished all_reduce #1 and is in no operation since ",
    ),
    "dropped": (
        "",
        "store.get('it has begun')\ncomm.all_reduce(array(3), timeout=patience)\nlook(timeout=patience)",
        "del comm\nmine = 'ncclpy/communicator-1/status/1'\n"
        "testing.wait_for(lambda: b'\"closed\":true' in store.get(mine), 'it to be told')\n" + SLEEPS,
        "['running', 'closed']",
        "rank 0 waits in all_reduce #1 since ",
        "rank 1 has closed the communicator",
    ),
    "a graph": (
        "plan, mine = ncclpy.Plan(), array(2)\nwith plan.record():\n    comm.all_reduce(mine)\n"
        "graph = plan.capture()\n"
        "graph.launch()\nncclpy.synchronize(device)\n",
        "graph.launch()\nncclpy.synchronize(device)\n"
        "for _ in range(100):\n    time.sleep(0.1)\n    comm.all_reduce(array(3))",
        SLEEPS,
        "['running', 'idle']",
        "rank 0 waits in all_reduce #3 since ",  # the capture counts as a call
        "rank 1 has finished all_reduce #2 and is in no operation since ",
    ),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_error_tells_states_outside_plain_calls(tmp_path, moment):
    before, does, instead, states, of_this, of_the_other = MOMENTS[moment]
    trouble = f"try:\n{textwrap.indent(does, '    ')}\nexcept ncclpy.NcclError as error:\n    say(error)\n"
    made = made_with_short_timeout() if moment == "a graph" else "make(timeout=60)"
    [(_, found, text)] = lines_of(tmp_path, 2, instead, trouble, made, before=before)
    assert found == states and of_this in text and of_the_other in text, text


#: How rank 1 aborts, and the reason in rank 0's error.
ABORTS = {
    "by itself": ("begins()\ntime.sleep(0.2)\ncomm.abort()\n", "abort"),
    "in a group": ("begins()\ntime.sleep(0.2)\nwith ncclpy.group():\n    comm.abort()\n", "aborted in a group"),
    "by a signal handler": (
        "def late(*_):\n    raise KeyError\n"
        "signal.signal(signal.SIGALRM, late)\nsignal.setitimer(signal.ITIMER_REAL, 0.1)\n"
        "with contextlib.suppress(KeyError):\n    comm.all_reduce(array(5))\n    ncclpy.synchronize(device)\n"
        "comm.abort()\n",
        "",  # on GPUs the handler ended a wait outside of the communicator
    ),
}


@pytest.mark.parametrize("how", ABORTS)
def test_abort_on_one_rank_ends_the_communicator_on_all(tmp_path, how):
    """Rank 0 hears at once, whatever its deadline, and before the abort, which may complete it with wrong data."""
    instead, why = ABORTS[how]
    does = "store.get('it has begun')\ncomm.all_reduce(array(3))\nlook()"
    trouble = f"try:\n{textwrap.indent(does, '    ')}\nexcept ncclpy.NcclError as error:\n    say(error)\n"
    [(kind, _, text)] = lines_of(tmp_path, 2, instead + SLEEPS, trouble, "make(timeout=30)")
    assert kind == "NcclAborted", text
    assert re.search(rf"communicator '[0-9a-f]{{8}}' was aborted by rank 1 of 2: .*{why}", text), text


ELSEWHERE = {
    "communicator": (
        "ncclpy.Communicator.from_env(device=device, timeout=60)",
        "other.all_reduce(array(3))",
        "[0-9a-f]{8}",
    ),
    "process group": ("ncclpy.init_process_group(timeout=60)", "other.all_reduce(array(3)).wait(60)", "default"),
}


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_rank_that_is_blocked_elsewhere_is_not_called_idle(host_engine, tmp_path, kind):
    make, call, name = ELSEWHERE[kind]
    does = f"""
    import threading
    from ncclpy.engine import group_registry
    def tell():
        testing.wait_for(lambda: any(each.look().get('current') for each in group_registry._live_entries()))
        begins()
    threading.Thread(target=tell, daemon=True).start()
    {call}
    """
    made = f"make(timeout=60)\nother = {make}"
    [(_, states, text)] = lines_of(tmp_path, 2, textwrap.dedent(does), made=made)
    assert states == "['running', 'in_other_group']", text
    blocked = rf"all_reduce #0 and is blocked in all_reduce #0 \(float32 x 3, sum\) of {kind} '{name}' since "
    assert re.search(f"rank 1 has finished {blocked}", text), text


def test_plan_over_cpu_memory_is_done_when_it_returns(host_engine, tmp_path):
    before = "plan, mine = ncclpy.Plan(), np.ones(2)\nwith plan.record():\n    comm.all_reduce(mine)\nplan.launch()\n"
    trouble = (
        "try:\n    comm.all_reduce(array(3), timeout=patience)\nexcept ncclpy.NcclError as error:\n    say(error)\n"
    )
    [(_, states, text)] = lines_of(tmp_path, 2, SLEEPS, trouble, "make(abortable=True)", before)
    assert states == "['running', 'idle']" and "rank 1 has finished all_reduce #1 and is in no operation" in text, text


def test_ranks_that_do_not_agree_in_a_plan(host_engine, tmp_path):
    """A failed operation is over for the device, but does not count as finished."""
    trouble = """
    plan, mine = ncclpy.Plan(), array(2)
    with plan.record():
        comm.all_reduce(mine)
    try:
        plan.launch()
    except ncclpy.NcclError as error:
        say(error)
    """
    instead = "with contextlib.suppress(ncclpy.NcclError):\n    comm.broadcast(array(9), root=0)\ntime.sleep(40)"
    [(kind, states, text)] = lines_of(tmp_path, 2, instead, textwrap.dedent(trouble))
    assert "the ranks do not agree: rank 0 calls AllReduce" in text and "rank 1 calls Broadcast" in text, text
    if kind == "NcclAborted":  # rank 1 has found that first, and ended the communicator
        assert "was aborted by rank 1 of 2" in text, text
    else:
        assert states == "['running', 'running']" and "in all_reduce #1 " in text and "in broadcast #1 " in text, text


def test_lost_store_is_named_in_error(tmp_path):
    trouble = "if rank == 0:\n    from ncclpy.bootstrap import launched\n    launched._store.close()\n"
    wait = TROUBLE.replace("    store.set(f'rank {rank} waits', b'')\n", "").replace(
        "    store.get('it has begun')\n", ""
    )
    wait = wait.replace("say(failure)", "print(\n"
        "    'rank', rank, 'has', type(failure).__name__, failure.ranks, '|', failure, '|', flush=True)")  # fmt: skip
    [(kind, states, text)] = lines_of(tmp_path, 2, SLEEPS, trouble + wait)
    assert (kind, states) == ("NcclTimeout", "None"), text
    assert "the communicator was aborted" in text and ". What the other ranks do is not known: " in text


def test_closed_communicators_leave_nothing_behind(tmp_path):
    """A communicator's thread and watch end with it, and its keys in the store with the last of its ranks."""
    testing.need_processes(2)
    program = """
import threading
make(timeout=60)
begin()
ours = 'ncclpy-watch', 'ncclpy-leave'
assert any(each.name == 'ncclpy-watch' for each in threading.enumerate())
assert any('status/' in name for name in store.keys('ncclpy/communicator-1/'))
store.barrier('all have seen', rank, size)
comm.close()
store.barrier('all have closed', rank, size)
testing.wait_for(lambda: not store.keys('ncclpy/communicator-1/'), 'the last to go')
testing.wait_for(lambda: not [each.name for each in threading.enumerate() if each.name in ours], 'threads')
make(timeout=60)
comm.all_reduce(array(2))
ncclpy.synchronize(device)
comm.close()
print('rank', rank, 'has left nothing', flush=True)
store.barrier('all are done', rank, size)
"""
    output = run_ranks(tmp_path, 2, PROGRAM + program)[1]
    assert output.count("has left nothing") == 2, output


def test_error_of_many_missing_ranks_names_those_that_the_store_was_not_asked_about(monkeypatch):
    monkeypatch.setattr(launcher_peers, "environment", lambda: types.SimpleNamespace(size=30))
    monkeypatch.setattr(launcher_peers, "earlier_process_state", lambda rank: "not_joined" if rank < 4 else None)
    late = ncclpy.NcclTimeout("not all ranks arrived")
    late.missing = tuple(range(2, 30))
    launcher_peers.describe_late(late)
    assert str(late) == (
        "not all ranks arrived; ranks 2-3 have not reached the launcher's store either; ranks 4-17 have reached the "
        "launcher's store, and the state of its process is not known; the launcher's store was not asked about "
        "ranks 18-29"
    )
    assert [each.state for each in late.ranks] == ["running"] * 2 + ["not_joined"] * 2 + ["unknown"] * 26
