"""Which groups of one name meet after failed attempts, with duplicate ranks or other sizes; keys left in the store."""

from __future__ import annotations

import contextlib
import os
import threading

import numpy as np
import pytest
from group_ranks import DEADLINE, run_groups
from warm_ranks import run_ranks

import ncclpy
import testing
from ncclpy.bootstrap import LocalStore
from ncclpy.peers import reports
from ncclpy.peers.numbering import FIRST, Numbering

#: Starts processes as ranks of a group; each writes its result or its error to a pipe.
RANKS = """
import os, signal, sys, tempfile
import numpy as np, ncclpy, testing
from ncclpy.bootstrap import FileStore, TCPStore

served = TCPStore("127.0.0.1", 0, serve=True, linger=0) if STORE == "tcp" else FileStore(tempfile.mkdtemp())
there = served.keys

def connect():
    return TCPStore("127.0.0.1", served.port) if STORE == "tcp" else FileStore(served.path)

def work(group):
    array = np.ones(2)
    group.all_reduce(array).wait()
    return f"fine {array[0]:.0f}"

def start(rank, size=2, timeout=600.0, body=work, device=None):
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            store, group = connect(), None
            group = ncclpy.ProcessGroup(store, rank, size, device=rank if device is None else device, timeout=timeout)
            said = body(group)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writes, said.encode())
        os.close(writes)
        if group is not None:
            group.close()
        os._exit(0)
    os.close(writes)
    return pid, reads

def end(started):
    pid, reads = started
    with open(reads, "rb") as file:
        said = file.read().decode()
    os.waitpid(pid, 0)
    return said

def has_made(rank, number=1):
    testing.wait_for(lambda: served.check([f"ncclpy/group/default/{number}/alive/{rank}"]), f"rank {rank}")

def dies(group):
    os.kill(os.getpid(), signal.SIGKILL)

def stays(group):
    while group.error is None:
        testing.time.sleep(0.01)
    raise group.error
"""


def run_processes(store, program):
    code = f"STORE = {store!r}\n" + RANKS + program + "\nserved.close()\n"
    testing.run_python(code, warm=True)


stores = pytest.mark.parametrize("store", ["tcp", "file"])


# Attempts to make a group.


@stores
@pytest.mark.parametrize("first", [0, 1])
def test_failed_attempt_does_not_block_later_ones(host_engine, store, first):
    run_processes(
        store,
        f"""
said = end(start({first}, timeout=0.2))
assert said.startswith("NcclTimeout: "), said
for attempt in (2, 3):
    other = start({1 - first})  # a rank that was not in the failed attempt
    has_made({1 - first}, attempt)
    both = start({first}), other
    assert [end(each) for each in both] == ["fine 2", "fine 2"]
    assert there() == ["ncclpy/group/default/base"], there()
""",
    )


@stores
def test_attempt_with_killed_rank_does_not_block_next_one(host_engine, store):
    run_processes(
        store,
        """
end(start(0, body=dies))
other = start(1)
has_made(1, 2)
both = start(0), other
assert [end(each) for each in both] == ["fine 2", "fine 2"]
assert there() == ["ncclpy/group/default/base"], there()
""",
    )


@stores
def test_rank_restarted_alone_meets_next_group_of_others(host_engine, store):
    run_processes(
        store,
        """
def again(group):
    try:
        group.all_reduce(np.ones(2)).wait()
    except ncclpy.NcclRemoteError as error:
        assert "rank 1" in str(error), error
    group.close()
    with ncclpy.ProcessGroup(group.store, 0, 2, device=0) as group:
        return work(group)

waits = start(0, body=again)
has_made(0)
end(start(1, body=dies))
both = waits, start(1)
assert [end(each) for each in both] == ["fine 2", "fine 2"]
""",
    )


def test_next_program_meets_its_own_ranks(host_engine):
    """Rank 0 has closed the first program's group and is in the second one's, while rank 1 still has the first."""
    run_processes(
        "tcp",
        """
def late(group):
    said = work(group)
    group.store.get("go on")
    return said

first = start(0), start(1, body=late)
assert end(first[0]) == "fine 2"
second = start(0)
has_made(0, 2)
served.set("go on", b"")
assert end(first[1]) == "fine 2"
both = second, start(1)
assert [end(each) for each in both] == ["fine 2", "fine 2"]
assert there() == ["go on", "ncclpy/group/default/base"], there()
""",
    )


# Duplicate ranks, and other sizes.


@stores
def test_duplicate_rank_is_an_error_on_all_ranks_with_both_processes(host_engine, store):
    run_processes(
        store,
        """
first = start(0, body=stays)
has_made(0)
second = start(0)
said = end(second), end(first)
assert said[0].startswith("ValueError: rank 0 of process group 'default' was made twice, by process "), said
assert said[1].startswith("NcclRemoteError: process group 'default' was ended by rank 0 of 2: "), said
for each in said:
    assert f"process {first[0]} on " in each and f"process {second[0]} on " in each, said
""",
    )


@stores
def test_different_sizes_are_an_error_on_all_ranks_with_both_processes(host_engine, store):
    run_processes(
        store,
        """
first = start(0, 2, body=stays)
has_made(0)
second = start(1, 3)
said = end(second), end(first)
assert said[0].startswith("ValueError: process group 'default' is made with different sizes: by rank 0 of 2, "), said
assert said[1].startswith("NcclRemoteError: process group 'default' was ended by rank 1 of 3: "), said
for each in said:
    assert f"process {first[0]} on " in each and f"process {second[0]} on " in each, said
""",
    )


@stores
@pytest.mark.parametrize("begins", ["dies", "is told"])
@pytest.mark.parametrize("first", [(0, 2), (0, 3), (1, 2), (1, 3)])
def test_attempt_with_different_sizes_does_not_block_later_ones(host_engine, store, first, begins):
    """Fresh processes meet after one whose size was wrong, whichever rank came first and whether it closed."""
    rank, size = first
    run_processes(
        store,
        f"""
first = start({rank}, {size}, body={"dies" if begins == "dies" else "stays"})
if {begins == "dies"}:
    end(first)
else:
    has_made({rank})
    assert end(start({1 - rank}, {5 - size})).startswith("ValueError: ")
    assert end(first).startswith("NcclRemoteError: ")
for attempt in range(2):
    both = start(0), start(1)
    assert [end(each) for each in both] == ["fine 2", "fine 2"]
""",
    )


def test_ranks_that_made_other_sizes_meet_with_the_right_one(host_engine):
    """The processes stay the same, so that the one that began the group lives."""
    store = LocalStore()
    first = ncclpy.ProcessGroup(store, 1, 3, device=1)
    with pytest.raises(ValueError, match="with different sizes"):
        ncclpy.ProcessGroup(store, 0, 2, device=0)
    with pytest.raises(ncclpy.NcclRemoteError, match="with different sizes"):
        first.all_reduce(np.ones(2)).wait(DEADLINE)
    with pytest.raises(ValueError, match="with different sizes"):  # rank 1 has not closed it
        ncclpy.ProcessGroup(store, 0, 2, device=0)
    first.close()
    assert run_groups(2, lambda group: group.all_reduce(np.ones(2)).result(DEADLINE)[0], store=store) == [2, 2]


def test_surplus_process_does_not_end_complete_group(host_engine):
    run_processes(
        "tcp",
        """
def program(group):
    work(group)
    group.store.get("go on")
    return work(group)

both = start(0, body=program), start(1, body=program)
has_made(0), has_made(1)
for rank, size in ((0, 2), (2, 3)):
    assert end(start(rank, size)).startswith("ValueError: ")
served.set("go on", b"")
assert [end(each) for each in both] == ["fine 2", "fine 2"]
""",
    )


# A rank that fails while it makes its group.

FAILS = {"device": {"device": 99}, "timeout": {"timeout": "soon"}, "check": {"check": "sometimes"}}


@pytest.mark.parametrize("what", FAILS)
@pytest.mark.parametrize("fails_first", [True, False])
def test_rank_that_cannot_make_the_group_tells_others_why(host_engine, what, fails_first):
    store, groups = LocalStore(), []

    def fail():
        with pytest.raises((TypeError, ValueError)) as caught:
            ncclpy.ProcessGroup(store, 1, 3, **{"device": 1, **FAILS[what]})
        return str(caught.value)

    def make():
        groups.extend(ncclpy.ProcessGroup(store, rank, 3, device=rank) for rank in (0, 2))

    order = [fail, make] if fails_first else [make, fail]
    [why] = [said for each in order if (said := each())]
    for group in groups:
        with pytest.raises(ncclpy.NcclRemoteError) as caught:
            group.all_reduce(np.ones(2)).wait(DEADLINE)
        assert "rank 1 of 3, which could not make it: " in str(caught.value) and why in str(caught.value)
    for group in groups:
        group.close()
    # Later groups of the name are not affected.
    assert run_groups(3, lambda group: group.seq, store=store) == [0, 0, 0]


@pytest.mark.parametrize("on_error", ["abort", "report"])
def test_rank_without_unique_id_tells_others_why(host_engine, on_error):
    def body(group):
        with pytest.raises(ncclpy.NcclError) as caught:  # in the call, where the other rank was faster
            group.all_reduce(np.ones(2)).wait(DEADLINE)
        together.barrier("all have heard", group.rank, 2, DEADLINE)
        return caught.value

    together = LocalStore()
    with ncclpy.faults("call=GetUniqueId do=error:ncclSystemError"):
        errors = run_groups(2, body, on_error=on_error)
    # If the other rank ends the group first, this rank hears of its own failure by that end.
    assert type(errors[0]) in (ncclpy.NcclError, ncclpy.NcclAborted, ncclpy.NcclRemoteError), errors
    # The other rank's call raises NcclRemoteError, or, if it comes later, an error with that cause.
    assert ncclpy.NcclRemoteError in (type(errors[1]), type(errors[1].__cause__)), errors
    assert "rank 0 of 2" in str(errors[1]) and "ncclGetUniqueId: unhandled system error" in str(errors[1])


@pytest.mark.parametrize("which", [0, 1])
def test_failed_communicator_init_is_remote_error_on_others(host_engine, which):
    def body(group):
        with pytest.raises(ncclpy.NcclError) as caught:  # in the call, where the other rank was faster
            group.all_reduce(np.ones(2)).wait(DEADLINE)
        together.barrier("all have heard", group.rank, 2, DEADLINE)
        return caught.value

    together = LocalStore()
    with ncclpy.faults(f"rank={which} call=CommInitRankConfig do=error:ncclSystemError"):
        errors = run_groups(2, body)
    # The error of a call after the group's end has the group's error as its cause.
    own = (ncclpy.NcclError, ncclpy.NcclAborted, ncclpy.NcclRemoteError)
    assert type(errors[which]) in own and type(errors[1 - which]) is ncclpy.NcclRemoteError, errors
    assert f"rank {which} of 2: ncclCommInitRankConfig" in str(errors[1 - which])


def test_failure_of_ended_launched_rank_reaches_later_ranks(host_engine, tmp_path):
    codes, said = run_ranks(
        tmp_path,
        2,
        """
        import testing
        from ncclpy.bootstrap import rendezvous

        place, store = rendezvous()
        if place.rank == 0:
            ncclpy.init_process_group(device=99)  # which ends this process
        testing.wait_for(lambda: store.check(["ncclpy/group/default/1/told/ended"]), "rank 0 to fail")
        testing.wait_for(lambda: not store.check(["ncclpy/ranks/alive/0"]), "rank 0 to end")
        group = ncclpy.init_process_group()
        try:
            group.barrier().wait()
        except ncclpy.NcclRemoteError as error:
            assert "rank 0 of 2, which could not make it: ValueError: device 99 does not exist" in str(error), error
            group.close()
            os._exit(7)
        """,
    )
    assert codes == [1, 7], said


# Keys left in the store.


def test_group_closed_by_all_ranks_leaves_only_its_number(host_engine):
    def body(group):
        group.all_reduce(np.ones(2)).wait(DEADLINE)
        if group.rank < 2:
            with group.new_group([0, 1]) as part:
                part.all_reduce(np.ones(2)).wait(DEADLINE)
        else:
            group.new_group([0, 1])
        with group.split(group.rank % 2) as part:
            part.all_reduce(np.ones(2)).wait(DEADLINE)

    store = LocalStore()
    for check in ("off", "always"):
        run_groups(3, body, store=store, check=check)
    assert store.keys() == ["ncclpy/group/default/base"] and store.get("ncclpy/group/default/base") == b"2"


@stores
@pytest.mark.parametrize("late", [0.0, 0.5])
def test_last_living_rank_leaves_nothing_of_group(host_engine, store, late):
    """Ranks 0 and 2 give up making the communicator and close the group; with 0.5 s they leave it later."""
    run_processes(
        store,
        f"""
LATE = {late}
"""
        """
from ncclpy.bootstrap.rank_rendezvous import RankRendezvous

leaves, exits = RankRendezvous._leave, os._exit

def leaves_late(*args, **kwargs):
    testing.time.sleep(LATE)
    return leaves(*args, **kwargs)

def exits_late(code):
    testing.time.sleep(2 * LATE)
    exits(code)

def hears(group):
    RankRendezvous._leave, os._exit = leaves_late, exits_late
    error = group.barrier().exception(60)
    return type(error).__name__

others = start(0, 3, body=hears), start(2, 3, body=hears)
has_made(0), has_made(2)
end(start(1, 3, body=dies))
assert [end(each) for each in others] == ["NcclRemoteError"] * 2
assert there() == ["ncclpy/group/default/base"], there()
""",
    )


def test_part_outlives_parent_group_and_leaves_nothing(host_engine):
    def body(group):
        part = group.new_group([0, 1])
        part.all_reduce(np.ones(2)).wait(DEADLINE)
        group.close()
        group.store.barrier("the whole is closed", group.rank, 2, DEADLINE)
        part.all_reduce(np.ones(2)).wait(DEADLINE)
        part.close()

    store = LocalStore()
    run_groups(2, body, store=store)
    assert store.keys() == ["ncclpy/group/default/base"]


def test_coordinator_leaves_nothing_behind(host_engine):
    def body(group):
        with ncclpy.Coordinator(group) as coordinator:
            coordinator.all_reduce("x", np.ones(2)).wait(DEADLINE)

    store = LocalStore()
    run_groups(2, body, store=store)
    assert store.keys() == ["ncclpy/group/default/base"]


def test_failed_group_leaves_nothing_once_all_closed(host_engine):
    def body(group):
        group.barrier().wait(DEADLINE)
        together.wait(DEADLINE)
        if group.rank == 0:
            group.abort("enough")
        testing.wait_for(lambda: group.error, "the end")

    together, store = threading.Barrier(3), LocalStore()
    run_groups(3, body, store=store)
    assert store.keys() == ["ncclpy/group/default/base"]


def test_close_waits_for_confirmation_of_failure(host_engine):
    """The group has its error before the thread begins that confirms the end in the store."""

    def body(group):
        def translate(error):
            with contextlib.suppress(ncclpy.NcclTimeout):  # absent until this rank has confirmed
                store.wait(["ncclpy/group/default/1/left/0"], 0.3)
            return error

        together.wait(DEADLINE)  # else the other rank, with a communicator, waits for the confirmation
        aborts = threading.Thread(target=group.abort, args=("enough",))
        if group.rank == 0:
            group.translate = translate
            aborts.start()
        testing.wait_for(lambda: group.error, "the end")
        group.close()
        if group.rank == 0:
            aborts.join()

    together, store = threading.Barrier(2), LocalStore()
    run_groups(2, body, store=store)
    assert store.keys() == ["ncclpy/group/default/base"]


def test_second_process_of_rank_is_refused_at_sight_of_first(host_engine):
    """Also if a group counts as over once rank 0 has deleted FIRST, as in `Communicator.from_env`."""

    def numbering():
        def is_over(number):
            return not made.part(number).check([FIRST])

        made = Numbering(store, "a test", "place", 0, 2, lambda number, text: None, is_over)
        return made

    store = LocalStore()
    first, second = numbering(), numbering()
    parent = os.getppid()
    second._process = second._process | {"pid": parent, "start": reports._stat(parent)[1]}
    put = first._put

    def put_and_meet_the_second(*arguments):
        done = put(*arguments)
        with pytest.raises(ValueError, match="rank 0 of a test was made twice"):
            second.enter()
        return done

    first._put = put_and_meet_the_second
    assert first.enter() == 1


def test_reconfigured_group_leaves_nothing_at_its_old_place(host_engine):
    def body(group):
        group.barrier().wait(DEADLINE)
        together.wait(DEADLINE)
        group.abort("enough")
        group.recover(timeout=DEADLINE)
        group.barrier().wait(DEADLINE)

    together, store = threading.Barrier(3), LocalStore()
    run_groups(3, body, store=store)
    assert store.keys() == ["ncclpy/group/default/base"]
