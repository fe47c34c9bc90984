"""Failures before a group's first operation, and at its rendezvous: errors tell the state of every other rank."""

from __future__ import annotations

import re
import threading
import time

import numpy as np
import pytest
from group_ranks import DEADLINE, run_groups
from warm_ranks import run_ranks

import ncclpy
import testing
from ncclpy.bootstrap import LocalStore, rank_rendezvous
from ncclpy.bootstrap.rank_rendezvous import RankRendezvous
from ncclpy.peers import status
from ncclpy.process_group import lifecycle
from ncclpy.process_group.group_status import GroupStatus

#: A timeout that no test waits for.
LONG = 20 * DEADLINE


def states_of(error):
    return [each.state for each in error.ranks]


# A rank that has closed the group, or that has exited, is not waited for.

WAITS = {
    "all_reduce": lambda group: group.all_reduce(np.ones(2)).wait(DEADLINE),
    "connect": lambda group: group.connect(),
    "split": lambda group: group.split(0),
    "admit": lambda group: group.admit(),
    "send": lambda group: group.send(np.ones(2), 1).wait(DEADLINE),
    "new_group": lambda group: group.new_group([2, 1, 0]).all_reduce(np.ones(2)).wait(DEADLINE),
}


@pytest.mark.parametrize("check", ["off", "always"])
@pytest.mark.parametrize("what", WAITS)
def test_closed_rank_is_not_waited_for(host_engine, what, check, monkeypatch):
    monkeypatch.setattr(rank_rendezvous, "_SLICE", 0.05)  # a missing rank is checked in several slices

    def body(group):
        together.wait(DEADLINE)
        if group.rank == 1:
            group.close()
            return None
        if group.rank == 2 and what == "send":
            return None
        begun = time.monotonic()
        try:
            WAITS[what](group)
        except ncclpy.NcclError as error:
            return error, time.monotonic() - begun
        finally:
            left.wait(DEADLINE)
        return None

    together, left = threading.Barrier(3), threading.Barrier(1 if what == "send" else 2)
    found = [each for each in run_groups(3, body, timeout=LONG, check=check) if each]
    assert len(found) == (1 if what == "send" else 2)
    for error, seconds in found:
        assert seconds < 5, error
        assert "rank 1 of 3 will not arrive " in str(error) and ": closed " in str(error), error
        assert error.ranks is not None and len(error.ranks) == 3
        if what != "new_group":
            assert states_of(error)[1] == "closed", error


def test_several_closed_ranks_are_named_together(host_engine, monkeypatch):
    monkeypatch.setattr(rank_rendezvous, "_SLICE", 0.05)
    closed = threading.Barrier(4)

    def body(group):
        if group.rank in (1, 3):
            group.close()
        closed.wait(DEADLINE)
        if group.rank not in (1, 3):
            with pytest.raises(
                ncclpy.NcclRemoteError, match=r"ranks? .* will not arrive .*: closed the group"
            ) as error:
                group.all_reduce(np.ones(2)).wait(DEADLINE)
            assert "it has closed" not in str(error.value)
            return True
        return None

    assert run_groups(4, body, timeout=LONG) == [True, None, True, None]


@pytest.mark.parametrize("what", ["all_reduce", "send", "recv", "sendrecv"])
def test_operation_not_begun_by_closed_rank_fails_before_its_deadline(host_engine, what, monkeypatch):
    """The communicators exist already, so that no rank waits at a rendezvous."""
    monkeypatch.setattr(status, "_PUBLISH_INTERVAL", 0.05)

    def body(group):
        group.connect(peers=[1 - group.rank] if group.rank < 2 else [])
        if what == "sendrecv" and group.rank:  # rank 1 has exchanged more than rank 0, but not with it
            for _ in range(2):
                group.sendrecv(np.ones(1), 3 - group.rank, np.zeros(1), 3 - group.rank).wait(DEADLINE)
        if group.rank == 1:
            group.close()
            return None
        if group.rank == 0:
            array = np.ones(1 << 20)  # larger than a send that completes without its receive
            more = {"all_reduce": [], "sendrecv": [1, np.zeros(1 << 20), 1]}.get(what, [1])
            error = getattr(group, what)(array, *more).exception(DEADLINE)
            together.wait(DEADLINE)
            return error
        together.wait(DEADLINE)
        return None

    together = threading.Barrier(2)
    error = run_groups(3, body, timeout=LONG)[0]
    assert isinstance(error, ncclpy.NcclRemoteError) and states_of(error)[1] == "closed"
    assert "rank 1 of process group 'default' is gone: it has closed the group" in str(error)


def test_close_does_not_wait_for_operation_not_begun_by_closed_rank(host_engine, monkeypatch):
    monkeypatch.setattr(status, "_PUBLISH_INTERVAL", 0.05)
    array = np.ones(2)

    def body(group):
        group.connect()
        if group.rank == 1:
            group.close()
            return
        group.all_reduce(array)
        with pytest.raises(ncclpy.NcclRemoteError, match="rank 1 of process group 'default' is gone"):
            group.close(LONG)

    run_groups(2, body, timeout=LONG)


def test_operation_of_other_ranks_completes_after_one_closed(host_engine, monkeypatch):
    found, closed_ranks = [], GroupStatus.closed_ranks

    def look(self):
        found.append(closed_ranks(self))
        return found[-1]

    monkeypatch.setattr(status, "_PUBLISH_INTERVAL", 0.02)
    monkeypatch.setattr(lifecycle, "_GRACE", 0.0)
    monkeypatch.setattr(GroupStatus, "closed_ranks", look)

    def body(group):
        array = np.full(4, group.rank + 1.0)
        group.all_reduce(array).wait(DEADLINE)
        if group.rank == 1:
            group.close()
        elif group.rank == 0:
            work = group.recv(array, 2)
            testing.wait_for(lambda: sum(1 in each for each in found) > 3, "looks that find rank 1")
            together.wait(DEADLINE)
            work.wait(DEADLINE)
            return array[0]
        else:
            together.wait(DEADLINE)
            group.send(np.full(4, 7.0), 0).wait(DEADLINE)
        return None

    together = threading.Barrier(2)
    assert run_groups(3, body, timeout=LONG)[0] == 7


def test_later_calls_report_closed_rank_too(host_engine):
    def body(group):
        together.wait(DEADLINE)
        if group.rank == 1:
            group.close()
            return
        with pytest.raises(ncclpy.NcclError):
            group.all_reduce(np.ones(2)).wait(DEADLINE)
        for call in (lambda: group.all_reduce(np.ones(2)), group.connect, group.admit, lambda: group.split(0)):
            with pytest.raises(ncclpy.NcclAborted, match="process group 'default' has ended: ") as caught:
                call()
            assert states_of(caught.value)[1] == "closed"
            assert caught.value.ranks is group.error.ranks and caught.value.__cause__ is group.error
            assert str(caught.value).count("process group 'default'") <= 3, caught.value
        left.wait(DEADLINE)

    together, left = threading.Barrier(3), threading.Barrier(2)
    run_groups(3, body, timeout=LONG)


def test_closed_rank_is_not_waited_for_with_on_error_report(host_engine):
    def body(group):
        together.wait(DEADLINE)
        if group.rank == 1:
            group.close()
            return None
        return group.all_reduce(np.ones(2)).exception(DEADLINE)

    together = threading.Barrier(2)
    error = run_groups(2, body, timeout=LONG, on_error="report")[0]
    assert isinstance(error, ncclpy.NcclRemoteError) and states_of(error) == ["running", "closed"]


# A late rank is waited for until the deadline, and the error tells it apart from a closed one.


@pytest.mark.parametrize("what", ["all_reduce", "split", "admit", "connect"])
def test_late_rank_is_named_with_its_state(host_engine, what):
    def body(group):
        group.store.barrier("all have made it", group.rank, 3, DEADLINE)
        error = None
        if group.rank != 1:
            with pytest.raises(ncclpy.NcclError) as caught:
                WAITS[what](group)
            error = caught.value
        together.wait(DEADLINE)
        return error

    together = threading.Barrier(3)
    first, second, third = run_groups(3, body, timeout=0.5)
    assert second is None
    for error in (first, third):
        assert "rank 1" in str(error) and "arrive" in str(error), error
        assert states_of(error)[1] == "idle" and len(error.ranks) == 3, error
        assert "rank" in str(error) and "no operation" in str(error), error


def test_connect_with_shorter_timeout_names_missing_rank(host_engine):
    def body(group):
        group.store.barrier("all have made it", group.rank, 2, DEADLINE)
        if group.rank == 0:
            with pytest.raises(
                ncclpy.NcclTimeout, match=r"is not made after 0\.2 s. rank 1 has not arrived\. "
            ) as caught:
                group.connect(timeout=0.2)
            assert states_of(caught.value) == ["idle", "idle"] and group.error is None
        together.wait(DEADLINE)
        group.connect()  # the timeout did not harm the group

    together = threading.Barrier(2)
    run_groups(2, body)


def test_rank_that_never_made_the_group_is_told_apart(host_engine):
    group = ncclpy.ProcessGroup(LocalStore(), 0, 2, device=0, timeout=0.3)
    error = group.all_reduce(np.ones(2)).exception(DEADLINE)
    assert error.missing == [1] and states_of(error) == ["running", "not_joined"]
    assert "rank 1 has not made this group" in str(error)
    group.close()


def test_suspected_end_of_rank_is_checked_again(monkeypatch):
    """A rank that is just making its group has no lease for an instant."""
    monkeypatch.setattr(rank_rendezvous, "_SLICE", 0.02)
    store, looks = LocalStore(), []

    def is_lost(rank):
        looks.append(rank)
        return None if len(looks) == 2 else ("it is not there", 2)

    group = RankRendezvous(store, "a group", 0, 2, is_lost=is_lost)
    with pytest.raises(ncclpy.NcclRemoteError, match="rank 1 of 2 will not arrive to meet: it is not there"):
        group.meet("here", [0, 1], "to meet", b"", lambda come: b"", DEADLINE, lambda: True)
    assert looks == [1] * 4


def test_many_missing_ranks_are_checked_a_few_at_a_time(monkeypatch):
    monkeypatch.setattr(rank_rendezvous, "_SLICE", 0.1)
    store, looks = LocalStore(), []
    group = RankRendezvous(store, "a group", 0, 100, is_lost=lambda rank: looks.append(rank))
    with pytest.raises(ncclpy.NcclTimeout):
        group.meet("here", range(100), "to meet", b"", lambda come: b"", 0.35, lambda: True)
    assert 8 <= len(looks) <= 24 and len(set(looks)) == len(looks)


# Ranks that are processes.

FIRST = """
from ncclpy.bootstrap import rendezvous
if int(os.environ["RANK"]) == 1:
    BEFORE
group = ncclpy.init_process_group(timeout=1)
if MADE:
    group.store.barrier("all have made it", group.rank, 2, 60)
if group.rank == 1:
    group.store.set("has begun", b"")
    DOES
    time.sleep(60)
    os._exit(0)
if MADE:
    group.store.get("has begun", 60)
    time.sleep(0.2)
error = group.all_reduce(np.ones(2)).exception(60)
print("rank 0 has", type(error).__name__, error, [each.state for each in error.ranks], flush=True)
os._exit(0)
"""
TOLD = {
    "stopped": ("pass", "os.kill(os.getpid(), signal.SIGSTOP)", "'stopped'", "is stopped (by SIGSTOP or a debugger)"),
    "holds the GIL": (
        "pass",
        "import ctypes; ctypes.PyDLL(None).sleep(60)",
        "'unresponsive'",
        "its Python does not run",
    ),
    "killed": ("pass", "os.kill(os.getpid(), signal.SIGKILL)", "'ended'", "rank 1's process has ended"),
    "killed before": (
        "rendezvous(); os.kill(os.getpid(), signal.SIGKILL)",
        "",
        "'ended'",
        "rank 1's process has ended",
    ),
    "never there": ("os._exit(0)", "", "'not_joined'", "rank 1 has not made this group"),
}


@pytest.mark.parametrize("what", TOLD)
def test_error_before_first_operation_tells_state_of_other_process(host_engine, tmp_path, what):
    before, does, state, said = TOLD[what]
    program = FIRST.replace("BEFORE", before).replace("DOES", does or "pass").replace("MADE", str(bool(does)))
    output = run_ranks(tmp_path, 2, program, only=[0])[1]
    lines = [line for line in output.splitlines() if "rank 0 has " in line]
    assert len(lines) == 1, output
    assert state in lines[0] and said in lines[0], output


@pytest.mark.parametrize("came", [True, False])
def test_from_env_timeout_tells_state_of_missing_rank(host_engine, tmp_path, came):
    program = f"""
    from ncclpy.bootstrap import rendezvous
    if int(os.environ["RANK"]) == 1:
        if {came}:
            rendezvous()
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(0)
    try:
        ncclpy.Communicator.from_env(timeout=1)
    except ncclpy.NcclTimeout as error:
        print("rank 0 has", error, [each.state for each in error.ranks], error.missing, flush=True)
    os._exit(0)
    """
    output = run_ranks(tmp_path, 2, program, only=[0])[1]
    line = next(line for line in output.splitlines() if "rank 0 has" in line)
    assert f"['running', '{'ended' if came else 'not_joined'}'] [1]" in line, output
    assert ("rank 1's process has ended" in line) == came, output


# Comparison of options and calls.


@pytest.mark.parametrize("check", ["first", "always"])
def test_disagreement_lists_what_each_rank_calls(host_engine, check):
    def body(group):
        group.all_reduce(np.ones(1)).wait(DEADLINE)
        with pytest.raises(ncclpy.NcclError) as caught:
            group.all_reduce(np.ones(2 if group.rank == 1 else 1)).wait(DEADLINE)
            testing.wait_for(lambda: group.error is not None, "the end")
            raise group.error
        testing.wait_for(lambda: group.error is not None, "the end")
        with pytest.raises(ncclpy.NcclAborted) as later:
            group.barrier()
        return caught.value, later.value

    for errors in run_groups(3, body, check=check):
        for error in errors:
            assert "the ranks disagree on collective 1" in str(error)
            assert error.ranks is not None, error
            assert [each.current.count for each in error.ranks if each.rank == 1] == [2], error.ranks
            assert "wait in all_reduce" not in str(error), "what they bring is said once"


def test_different_check_options_are_an_error_on_both_ranks(host_engine):
    store = LocalStore()
    with ncclpy.ProcessGroup(store, 0, 2, device=0, check="always", timeout=LONG) as first:
        with pytest.raises(ValueError, match=r"check: .*rank 1 of 2 has 'off', rank 0 of 2 has 'always'"):
            ncclpy.ProcessGroup(store, 1, 2, device=1, timeout=LONG)
        testing.wait_for(lambda: first.error is not None, "the news")
        assert "rank 1 of 2 has 'off', rank 0 of 2 has 'always'" in str(first.error)


def test_joiner_with_different_check_option_is_refused(host_engine):
    def joiner():
        try:
            ncclpy.ProcessGroup.join(store, device=1, timeout=DEADLINE)
        except ValueError as error:
            told.append(str(error))

    store, told = LocalStore(), []
    with ncclpy.ProcessGroup(store, 0, 1, device=0, check="always", timeout=DEADLINE) as group:
        thread = threading.Thread(target=joiner)
        thread.start()
        while thread.is_alive():
            assert group.admit() == ()
            time.sleep(0.02)
        assert told == [
            "check: this process has passed 'off', the ranks of process group 'default' have passed 'always'; "
            "all must pass the same value"
        ]
        assert group.error is None and group.all_reduce(np.ones(1)).result(DEADLINE)[0] == 1


# Reconfiguration.


def test_reconfigure_with_other_handles_ends_wait_of_other_ranks(host_engine):
    store = LocalStore()
    groups = [ncclpy.ProcessGroup(store, rank, 3, device=rank, timeout=DEADLINE) for rank in range(3)]
    handles = [group.reconfigure_handle() for group in groups]

    def move(rank):
        order = handles[::-1] if rank == 0 else handles
        if rank:
            testing.wait_for(lambda: store.check(["ncclpy/reconfigure/a/handles"]), "the first one")
        try:
            groups[rank].reconfigure(order, uuid="a", timeout=LONG)
        except (ValueError, ncclpy.NcclError) as error:
            return error
        return None

    begun = time.monotonic()
    found = testing.run_threads(3, lambda each: move(each.rank), DEADLINE)
    assert time.monotonic() - begun < DEADLINE / 2
    assert isinstance(found[0], ncclpy.NcclAborted) and [type(each) for each in found[1:]] == [ValueError] * 2
    assert re.search(
        "rank [12] of 3 of process group 'default' has called reconfigure.. with other handles", str(found[0])
    )
    for group in groups:
        assert group.error is None
        group.close()


def test_rank_missing_from_reconfigure_is_named_by_its_old_rank(host_engine):
    store = LocalStore()
    groups = [ncclpy.ProcessGroup(store, rank, 3, device=rank, timeout=DEADLINE) for rank in range(3)]
    handles = [group.reconfigure_handle() for group in groups]
    with pytest.raises(ncclpy.NcclTimeout) as caught:
        groups[0].reconfigure(handles[::-1], uuid="a", timeout=0.5)
    assert "those that become ranks 0-1 of 3 (made as ranks 2, 1) did not arrive" in str(caught.value)
    told = "was ended by rank 0 of 3: it waits in reconfigure() to continue with other ranks"
    testing.wait_for(lambda: groups[1].error is not None, "the news")
    assert told in str(groups[1].error)
    for group in groups:
        group.close()


def test_timeout_error_states_the_timeout(host_engine):
    def body(group):
        group.connect()
        if group.rank == 0:
            error = group.all_reduce(np.ones(1), timeout=0.25).exception(DEADLINE)
            assert "was not done within its timeout of 250 ms; " in str(error)
        testing.wait_for(lambda: group.error is not None, "the end")

    run_groups(2, body)
