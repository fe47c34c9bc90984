"""Operations that are compared across ranks: mismatches are errors on all ranks, matching calls run."""

from __future__ import annotations

import functools
import gc
import os
import re
import signal
import threading
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import test_group_operations as operations
from group_ranks import DEADLINE, run_groups
from warm_ranks import run_ranks

import ncclpy
import testing
from ncclpy.bootstrap import FileStore, LocalStore, TCPStore
from ncclpy.peers.inquiry import Inquiries
from ncclpy.process_group.check import shared_memory

pytestmark = pytest.mark.usefixtures("host_engine")

F4 = np.float32


@pytest.fixture(params=["shared", "stored"])
def board(request, monkeypatch):
    """Have the ranks compare in shared memory, or in the store because one rank cannot open the shared memory."""
    if request.param == "stored":
        refuse_memory(monkeypatch)
    return request.param


def refuse_memory(monkeypatch):
    attach, attach_rings = shared_memory.attach_exchange, shared_memory.attach_rings

    def refused(pid, fd, token, rank, size):
        if rank == size - 1:
            raise OSError("another machine")
        return attach(pid, fd, token, rank, size)

    def refused_mailbox(mine, rank, peer, *offered):
        if rank > peer:  # one rank of each pair
            raise OSError("another machine")
        return attach_rings(mine, rank, peer, *offered)

    monkeypatch.setattr(shared_memory, "attach_exchange", refused)
    monkeypatch.setattr(shared_memory, "attach_rings", refused_mailbox)


def errors_of(size, body, *, store=None, **options):
    """Return the error text of each rank's program, without the line of its call; the group is then closed."""

    def each(rank):
        with_store = options | {"timeout": options.get("timeout", DEADLINE / 2)}
        group = ncclpy.ProcessGroup(found, rank.rank, size, device=rank.device, **with_store)
        try:
            body(group)
        except ncclpy.NcclError as error:
            return testing.without_line(f"{type(error).__name__} {error.result}: {error}")
        finally:
            group.close(DEADLINE / 4)
        return None

    found = LocalStore() if store is None else store
    return testing.run_threads(size, each, DEADLINE)


def disagreement(number, text, rank, name="default"):
    return (
        f"NcclError 5: process group '{name}': the ranks disagree on collective {number}: {text}. Rank {rank} has "
        "not called NCCL"
    )


# Number of ranks, what each rank calls, and the text of the error on all ranks.
MISMATCHES = {
    "another call": (
        3,
        lambda g: g.all_reduce(np.ones(1024, F4)) if g.rank < 2 else g.broadcast(np.ones(4), root=1),
        "ranks 0-1 call all_reduce of 1,024 float32 (sum), rank 2 broadcast of 4 float64 from root 1",
    ),
    "count": (
        3,
        lambda g: g.all_reduce(np.ones(3 + (g.rank == 1))),
        "ranks 0, 2 call all_reduce of 3 float64 (sum), rank 1 all_reduce of 4 float64 (sum)",
    ),
    "type": (
        2,
        lambda g: g.all_gather(np.ones(2, [F4, np.int32][g.rank]), np.ones(4, [F4, np.int32][g.rank])),
        "rank 0 calls all_gather of 2 float32, rank 1 all_gather of 2 int32",
    ),
    "op": (
        4,
        lambda g: g.reduce(np.ones(2), np.ones(2), op="max" if g.rank == 3 else "sum", root=2),
        "ranks 0-2 call reduce of 2 float64 (sum) to root 2, rank 3 reduce of 2 float64 (max) to root 2",
    ),
    "root": (
        2,
        lambda g: g.broadcast(np.ones(2), root=g.rank),
        "rank 0 calls broadcast of 2 float64 from root 0, rank 1 broadcast of 2 float64 from root 1",
    ),
    "order": (
        2,
        lambda g: [call(np.ones(1)) for call in (g.all_reduce, g.broadcast)[:: 1 - 2 * g.rank]],
        "rank 0 calls all_reduce of 1 float64 (sum), rank 1 broadcast of 1 float64 from root 0",
    ),
    "all different": (
        3,
        lambda g: g.all_reduce(np.ones(g.rank + 1)),
        "rank 0 calls all_reduce of 1 float64 (sum), rank 1 all_reduce of 2 float64 (sum), rank 2 all_reduce of 3 "
        "float64 (sum)",
    ),
    "size of a block": (
        2,
        lambda g: g.all_reduce_coalesced([np.ones(1) for _ in range(2 + g.rank)]),
        "rank 0 calls a block of 2 collectives, rank 1 a block of 3 collectives, of which number 3 is all_reduce of "
        "1 float64 (sum)",
    ),
    "a step of a block": (
        2,
        lambda g: g.all_reduce_coalesced([*np.ones((300, 1)), np.ones(2 + g.rank), np.ones(1)]),  # truncated
        "rank 0 calls a block of 302 collectives, of which number 301 is all_reduce of 2 float64 (sum), rank 1 a "
        "block of 302 collectives, of which number 301 is all_reduce of 3 float64 (sum)",
    ),
    "parts": (
        2,
        lambda g: g.all_gather(np.ones(1 + g.rank), [np.ones(1), np.ones(2)] if g.rank else [np.ones(1), np.ones(3)]),
        "rank 0 calls all_gather of parts of 1, 3 float64, rank 1 all_gather of parts of 1, 2 float64",
    ),
    "parts of one rank": (
        2,
        lambda g: g.all_gather(np.ones(1), [np.ones(1), np.ones(1)] if g.rank else np.ones(2)),
        "rank 0 calls all_gather of 1 float64, rank 1 all_gather of parts of 1, 1 float64",
    ),
    "parts that go to others": (
        2,
        lambda g: g.all_to_all(np.ones(5), np.ones(5 - g.rank), [2, 3], [2, 3 - g.rank]),
        "rank 0 calls send of 3 float64 to rank 1, rank 1 calls recv of 2 float64 from rank 0",
    ),
    "parts of a gather": (
        3,
        lambda g: g.gather(np.ones(1 + (g.rank == 2)), None if g.rank else [np.ones(1) for _ in range(3)]),
        "rank 0 calls recv of 1 float64 from rank 2, rank 2 calls send of 2 float64 to rank 0",
    ),
    "a gather into one buffer": (
        3,
        lambda g: g.gather(np.ones(1 + (g.rank == 2)), None if g.rank else np.ones(3)),
        "rank 0 calls recv of 1 float64 from rank 2, rank 2 calls send of 2 float64 to rank 0",
    ),
    "a scatter of one buffer": (
        2,
        lambda g: g.scatter(None if g.rank else np.ones(4), np.ones(2 + g.rank)),
        "rank 0 calls send of 2 float64 to rank 1, rank 1 calls recv of 3 float64 from rank 0",
    ),
    "gathers to two roots": (
        2,
        lambda g: g.gather(np.ones(1), np.ones(2), g.rank),
        "rank 0 calls gather of parts that may differ, of float64 to root 0, rank 1 gather of parts that may differ, "
        "of float64 to root 1",
    ),
    "messages of a mixed block": (
        2,
        lambda g: mixed(g, 1 + g.rank),
        "rank 0 calls send of 2 float64 to rank 1 with tag 1, rank 1 calls recv of 2 float64 from rank 0 with tag 2",
    ),
}  # fmt: skip


# Types that are one type for NCCL: the two types, their names in the error, and how many elements of the second are as
# long as two of the first.
CARRIED_ALIKE = {
    "signs": ("i2", "u2", "int16", "uint16", 2),
    "units of dates": ("M8[s]", "M8[D]", "datetime64[s]", "datetime64[D]", 2),
    "dates and spans": ("M8[s]", "m8[s]", "datetime64[s]", "timedelta64[s]", 2),
    "bool": ("?", "u1", "bool", "uint8", 2),
    "complex": ("c8", "f4", "complex64", "float32", 4),
    "longdouble": ("g", "i2", "float128", "int16", 16),
    "texts": ("S2", "i2", "bytes16", "int16", 2),
    "kinds of float8": (
        ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e4m3b11fnuz, "float8_e4m3fnuz", "float8_e4m3b11fnuz", 2,
    ),
    "order of fields": (
        [("a", "i4"), ("b", "f4")], [("b", "f4"), ("a", "i4")],
        "[('a', '<i4'), ('b', '<f4')]", "[('b', '<f4'), ('a', '<i4')]", 2,
    ),
    "places of fields": (
        {"names": ["a"], "formats": ["i2"], "itemsize": 4},
        {"names": ["a"], "formats": ["i2"], "offsets": [2], "itemsize": 4},
        "[('a', '<i2')] of 4 bytes", "[('a', '<i2') at 2]", 2,
    ),
    "byte order of a field": ([("a", ">i4")], [("a", "i4")], "[('a', '>i4')]", "[('a', '<i4')]", 2),
}  # fmt: skip


@pytest.mark.parametrize("how", ["broadcast", "send", "block"])
@pytest.mark.parametrize("kind", CARRIED_ALIKE)
def test_types_with_same_nccl_type_are_told_apart(board, kind, how):
    first, second, name, other, count = CARRIED_ALIKE[kind]

    def body(group):
        array = np.zeros(count if group.rank else 2, second if group.rank else first)
        if how == "broadcast":
            group.broadcast(array).wait(DEADLINE)
        elif how == "send":
            way(group)(array, 1 - group.rank).wait(DEADLINE)
        else:
            with group.coalescing() as work:
                way(group)(array, 1 - group.rank)
            work.wait(DEADLINE)

    told = (
        f"rank 0 calls broadcast of 2 {name} from root 0, rank 1 broadcast of {count} {other} from root 0"
        if how == "broadcast"
        else f"rank 0 calls send of 2 {name} to rank 1 with tag 0, rank 1 calls recv of {count} {other} from rank 0"
    )
    for found in errors_of(2, body, check="first"):
        assert told in found


def test_dtype_of_many_fields_is_compared_whole(board):
    """The name of the type is truncated; a difference behind the cut is still found."""

    def body(group):
        fields = [(f"field {i}", "f8") for i in range(299)] + [("last", ["i8", "u8"][group.rank])]
        way(group)(np.zeros(2, fields), 1 - group.rank).wait(DEADLINE)

    for found in errors_of(2, body, check="first"):
        names = re.findall(r"of 2 (\[\('field 0', .*?\.\.\. \(300 fields, 2400 bytes, #[0-9a-f]{16}\))", found)
        assert len(names) == len(set(names)) == 2, found


def test_send_to_self_with_other_type_is_refused(board):
    def body(group):
        group.send(np.zeros(2, "i2"), group.rank)
        with pytest.raises(ValueError, match=r"sends to itself has 2 .* int16, what it receives 2 .* uint16"):
            group.recv(np.zeros(2, "u2"), group.rank)
        group.recv(np.zeros(2, "i2"), group.rank).wait(DEADLINE)

    run_groups(1, body)


def test_barrier_does_not_match_reduction_of_one_byte(board):
    def body(group):
        (group.all_reduce(np.zeros(1, np.uint8), op="max") if group.rank else group.barrier()).wait(DEADLINE)

    found = errors_of(2, body, check="first")
    told = "rank 0 calls barrier, rank 1 all_reduce of 1 uint8 (max)"
    assert found == [disagreement(0, told, rank) for rank in range(2)]


def mixed(group, tag):
    with group.coalescing() as work:
        group.all_reduce(np.ones(1))
        (group.recv if group.rank else group.send)(np.ones(2), 1 - group.rank, tag)
    return work


@pytest.mark.parametrize("check", ["first", "always"])
@pytest.mark.parametrize("kind", MISMATCHES)
def test_mismatch_is_an_error_on_all_ranks(board, kind, check):
    size, call, told = MISMATCHES[kind]

    def body(group):
        group.all_reduce(np.ones(7)).wait(DEADLINE)
        work = call(group)
        (work[0] if isinstance(work, list) else work).wait(DEADLINE)

    found = errors_of(size, body, check=check)
    assert found == [disagreement(1, told, rank) for rank in range(size)]


def test_call_known_on_one_rank_and_new_on_other_ends_the_group(board):
    """A rank with a known call does not wait; the other rank finds the note of that call."""

    def body(group):
        for _ in range(3):
            group.all_reduce(np.ones(1)).wait(DEADLINE)
        group.broadcast(np.ones(2)) if group.rank else group.all_reduce(np.ones(1)).wait(DEADLINE)

    begun = time.monotonic()
    found = errors_of(2, body, check="first", on_error="report")  # ends the group all the same
    text = "rank 0 calls all_reduce of 1 float64 (sum), rank 1 broadcast of 2 float64 from root 0"
    assert found[1] == disagreement(3, text, 1)
    assert text in found[0]
    assert time.monotonic() - begun < DEADLINE / 4


def test_rank_far_ahead_still_gets_disagreement(board):
    """The note of the fast rank is overwritten in shared memory; the mismatch is still found."""

    def body(group):
        group.all_reduce(np.ones(1)).wait(DEADLINE)
        if group.rank == 0:
            for _ in range(1500):
                group.all_reduce(np.ones(1))
            ahead.set()
            group.all_reduce(np.ones(1)).wait(DEADLINE)
        else:
            ahead.wait(DEADLINE)
            group.broadcast(np.ones(2))

    ahead = threading.Event()
    found = errors_of(2, body, check="first")
    brought = "an earlier operation again" if board == "shared" else "all_reduce of 1 float64 (sum)"
    assert f"rank 0 calls {brought}, rank 1 broadcast of 2 float64 from root 0" in found[1]


def test_mismatch_with_on_error_report_keeps_the_group(board, caplog):
    def body(group):
        with pytest.raises(ncclpy.NcclError, match="disagree on collective 0"):
            group.all_reduce(np.ones(1 + group.rank))
        total = np.full(2, group.rank + 1.0)
        group.all_reduce(total).wait(DEADLINE)
        work = (group.send if group.rank == 0 else group.recv)(np.ones(1), 1 - group.rank, group.rank)
        with pytest.raises(ncclpy.NcclError, match="disagree on number 0 of pair '0:1'"):
            work.wait(DEADLINE)
        got = np.full(1, 5.0)
        (group.recv if group.rank else group.send)(got, 1 - group.rank).wait(DEADLINE)
        return total[0], group.seq

    assert run_groups(2, body, check="always", on_error="report") == [(3, 2)] * 2
    testing.wait_for(lambda: caplog.text.count("disagree") >= 4)


# Sends and receives.

SENT = {
    "tag": (lambda g: way(g)(np.ones(2), 1 - g.rank, 3 + g.rank), "send of 2 float64 to rank 1 with tag 3",
            "recv of 2 float64 from rank 0 with tag 4"),
    "count": (lambda g: way(g)(np.ones(2 + g.rank), 1 - g.rank), "send of 2 float64 to rank 1 with tag 0",
              "recv of 3 float64 from rank 0 with tag 0"),
    "type": (lambda g: way(g)(np.ones(2, [F4, "i4"][g.rank]), 1 - g.rank), "send of 2 float32 to rank 1 with tag 0",
             "recv of 2 int32 from rank 0 with tag 0"),
}  # fmt: skip


def way(group):
    return group.recv if group.rank else group.send


@pytest.mark.parametrize("in_a_block", [False, True])
@pytest.mark.parametrize("kind", SENT)
def test_messages_that_do_not_fit(board, kind, in_a_block):
    call, first, second = SENT[kind]

    def body(group):
        if in_a_block:
            with group.coalescing() as work:
                call(group)
        else:
            work = call(group)
        work.wait(DEADLINE)

    where = "blocks from 0 to 1" if in_a_block else "pair '0:1'"
    for told in errors_of(2, body, check="first"):
        assert (
            f"ranks 0 and 1 disagree on number 0 of {where}: rank 0 calls {first}, rank 1 calls {second}. NCCL was "
            "not called for it"
        ) in told


def test_two_ranks_that_both_send_are_a_mismatch(board):
    def body(group):
        group.send(np.ones(1), 1 - group.rank).wait(DEADLINE)

    for told in errors_of(2, body, check="always"):
        assert "rank 0 calls send of 1 float64 to rank 1 with tag 0, rank 1 calls send of 1 float64 to rank 0" in told


def test_message_without_its_other_half_times_out(board):
    def body(group):
        group.all_reduce(np.ones(1)).wait(DEADLINE)
        if group.rank == 0:
            group.connect([1])
            group.send(np.ones(1), 1, timeout=0.3).wait(DEADLINE)
        else:
            group.connect([0])
            testing.wait_for(lambda: group.error is not None)
            group.barrier()

    found = errors_of(2, body, check="first")
    assert all("rank 1 has not begun the matching message within 300 ms" in told for told in found), found


def test_failed_message_whose_wait_has_raised_is_not_raised_by_close(board, monkeypatch):
    """Slow inquiries delay the end of the group, which has to come before the error of the work."""
    ask = Inquiries.ask

    def ask_slowly(*args):
        answer = ask(*args)
        time.sleep(0.2)
        return answer

    def body(group):
        group.connect([1 - group.rank])
        if group.rank == 0:
            group.send(np.ones(1), 1, timeout=0.3).wait(DEADLINE)
        else:
            testing.wait_for(lambda: group.error is not None)
            group.barrier()

    monkeypatch.setattr(Inquiries, "ask", ask_slowly)
    found = errors_of(2, body, check="first")
    assert all("rank 1 has not begun the matching message within 300 ms" in told for told in found), found


# Matching calls.

PROGRAMS = {
    "all_reduce": lambda arrays: operations.test_all_reduce(arrays, 4, "avg", False),
    "all_gather": lambda arrays: operations.test_all_gather_and_reduce_scatter(arrays, 4, False),
    "lists": lambda arrays: operations.test_all_gather_and_reduce_scatter(arrays, 4, True),
    "uneven parts": lambda arrays: operations.test_uneven_parts(arrays, 4),
    "roots": lambda arrays: operations.test_operations_with_root(arrays, 4, 1),
    "all_to_all": lambda arrays: operations.test_all_to_all(arrays, 4),
    "blocks": lambda arrays: operations.test_coalesced_operations_are_one_launch_with_one_number(arrays, 4),
}


@pytest.mark.parametrize("check", ["first", "always"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_of_all_operations_go_through(arrays, monkeypatch, board, program, check):
    monkeypatch.setattr(operations, "run_groups", functools.partial(run_groups, check=check))
    PROGRAMS[program](arrays)


def everything(world, check):
    with world.group(check=check) as group:
        other, results = 1 - world.rank, []
        for _ in range(3):
            results.append(world.sum(group, np.full(3, world.rank + 1.0)).tolist())
            got = np.zeros(2)
            calls = [lambda: group.recv(got, other), lambda: group.send(np.full(2, float(world.rank)), other)]  # noqa: B023
            works = [call() for call in calls[:: 1 - 2 * world.rank]]
            for work in works:
                work.wait(DEADLINE)
            with group.coalescing() as work:  # messages only: no collective of all ranks
                group.send(np.full(2, float(world.rank)), other, 7)
                group.recv(got, other, 7)
            work.wait(DEADLINE)
            results.append(got.tolist())
            sizes = [[2, 1], [1, 0]]  # rank 1 sends nothing to itself
            sent, came = [np.ones(n) for n in sizes[world.rank]], [np.zeros(n) for n in sizes[world.rank]]
            group.all_to_all(sent, came).wait(DEADLINE)
            rows, sums = group.all_reduce_sparse(np.arange(world.rank + 1), np.ones(world.rank + 1)).result(DEADLINE)
            results.append((rows.tolist(), sums.tolist()))
            with group.split(0) as part:
                results.append(world.sum(part, np.ones(1)).tolist())
            part = group.new_group([1, 0])
            with pytest.raises(ncclpy.NcclError, match="disagree on collective 0"):  # the part compares calls too
                part.all_reduce(np.ones(1 + world.rank))
            part.close()
            group.barrier().wait(DEADLINE)
        group.disconnect()
        return results


@pytest.mark.parametrize("check", ["first", "always"])
def test_all_calls_of_groups_work_with_check(run, check):
    one = lambda rank: [[3.0] * 3, [1.0 - rank] * 2, ([0, 1], [2.0, 1.0]), [2.0]]  # noqa: E731
    assert run(everything, check) == [one(rank) * 3 for rank in range(2)]


@pytest.mark.parametrize("check", ["first", "always"])
@pytest.mark.parametrize("first", ["send", "recv"])
def test_rings(board, check, first):
    def body(group):
        before, behind = (group.rank - 1) % 3, (group.rank + 1) % 3
        got = [np.zeros(1) for _ in range(20)]
        works = []
        for i, each in enumerate(got):
            calls = [
                functools.partial(group.send, np.full(1, 10.0 * i + group.rank), behind, i),
                functools.partial(group.recv, each, before, i),
            ]
            works += [call() for call in (calls if first == "send" else calls[::-1])]
        for work in works:
            work.wait(DEADLINE)
        return [each[0] for each in got] == [10.0 * i + before for i in range(20)]

    assert run_groups(3, body, check=check) == [True] * 3


def test_only_two_ranks_of_three_send(board):
    """The third rank is not waited for."""

    def body(group):
        if group.rank < 2:
            got = np.zeros(1)
            way(group)(np.ones(1) if group.rank == 0 else got, 1 - group.rank).wait(DEADLINE)
            with group.coalescing() as work:
                way(group)(np.full(1, 4.0) if group.rank == 0 else got, 1 - group.rank)
            if group.rank == 2:
                return None
        meeting.wait(DEADLINE)
        if group.rank < 2:
            work.wait(DEADLINE)
            return got[0] if group.rank else 4
        group.connect()  # the block uses the communicator of all ranks
        return 4

    meeting = threading.Barrier(3)
    assert run_groups(3, body, check="always") == [4, 4, 4]


@pytest.mark.parametrize("kind", ["LocalStore", "TCPStore", "FileStore"])
def test_check_works_with_each_store(monkeypatch, tmp_path, kind):
    refuse_memory(monkeypatch)
    stores = {
        "LocalStore": LocalStore,
        "TCPStore": lambda: TCPStore("127.0.0.1", 0, serve=True, linger=0),
        "FileStore": lambda: FileStore(tmp_path / "store"),
    }

    def body(group):
        for _ in range(5):
            group.all_reduce(np.ones(1)).wait(DEADLINE)
        if group.rank == 0:
            group.all_reduce(np.ones(1)).wait(DEADLINE)  # a known call: the store must be asked
        else:
            group.all_reduce(np.ones(2)).wait(DEADLINE)

    with stores[kind]() as store:
        found = errors_of(2, body, check="first", store=store)
    assert found[1] == disagreement(
        5, "rank 0 calls all_reduce of 1 float64 (sum), rank 1 all_reduce of 2 float64 (sum)", 1
    )


# Waits that end early.


@pytest.mark.parametrize("met", [True, False])
def test_missing_rank_is_named(board, met):
    def body(group):
        if met:
            group.all_reduce(np.ones(1)).wait(DEADLINE)
        if group.rank != 1:
            group.all_reduce(np.ones(2), timeout=0.3)
        else:
            testing.wait_for(lambda: group.error is not None)
            group.barrier()

    found = errors_of(3, body, check="always", timeout=DEADLINE / 2 if met else 0.5)
    what = "to compare collective 1 " if met else "to "  # to compare, or to make the communicator
    assert all(f"rank 1 of 3 did not arrive {what}" in told for told in found), found


def test_late_rank_fails_after_other_rank_gave_up(board):
    """The group continues without its collectives, and no rank waits alone in NCCL."""

    def body(group):
        group.all_reduce(np.ones(1)).wait(DEADLINE)
        if group.rank == 0:
            with pytest.raises(ncclpy.NcclTimeout, match="rank 1 of 2 did not arrive"):
                group.all_reduce(np.ones(2), timeout=0.2)
            left.set()
        else:
            left.wait(DEADLINE)
            with pytest.raises(ncclpy.NcclTimeout, match=r"rank 0 of 2 arrived .* and left"):
                group.all_reduce(np.ones(2))
        with pytest.raises(ncclpy.NcclAborted, match="communicator 'all' was not made, and what was begun on it"):
            group.all_reduce(np.ones(2))
        got = np.zeros(1)
        way(group)(got + group.rank, 1 - group.rank).wait(DEADLINE)

    left = threading.Event()
    run_groups(2, body, check="always", on_error="report")


def test_message_deadline_begins_at_launch(board):
    """The timeout of a message begins at its launch, as without check=."""

    def body(group):
        got = np.full(1, 3.0)
        if group.rank:
            time.sleep(0.6)
            group.recv(got, 0).wait(DEADLINE)
        else:
            group.send(got + 1, 1, timeout=0.3).wait(DEADLINE)
        return got[0]

    assert run_groups(2, body, check="always") == [3, 4]


def test_abort_of_other_rank_ends_the_wait(board):
    def body(group):
        group.all_reduce(np.ones(1)).wait(DEADLINE)
        if group.rank:
            time.sleep(0.1)
            group.abort("enough")
        group.all_reduce(np.ones(2))

    begun = time.monotonic()
    found = errors_of(2, body, check="always")
    assert all(told.startswith("NcclAborted") and "enough" in told for told in found), found
    assert time.monotonic() - begun < DEADLINE / 4


def test_close_from_other_thread_ends_the_wait(board):
    def body(group):
        group.all_reduce(np.ones(1)).wait(DEADLINE)
        if group.rank == 0:
            threading.Timer(0.1, group.close).start()
            with pytest.raises((ncclpy.NcclAborted, ValueError), match="closed"):
                group.all_reduce(np.ones(2))
            left.set()
        left.wait(DEADLINE)

    left = threading.Event()
    run_groups(2, body, check="always")


def test_ctrl_c_ends_the_wait_and_the_group():
    testing.run_python(
        """
        import os, signal, threading, time, numpy as np, ncclpy
        from ncclpy.bootstrap import LocalStore

        store, told = LocalStore(), []

        def other():
            group = ncclpy.ProcessGroup(store, 1, 2, device=1, check="always", timeout=50)
            group.all_reduce(np.ones(1)).wait(50)
            while group.error is None:
                time.sleep(0.01)
            told.append(str(group.error))
            group.close()

        thread = threading.Thread(target=other)
        thread.start()
        group = ncclpy.ProcessGroup(store, 0, 2, device=0, check="always", timeout=50)
        group.all_reduce(np.ones(1)).wait(50)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        begun = time.monotonic()
        try:
            group.all_reduce(np.ones(1))
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError("it was not left")
        assert time.monotonic() - begun < 20
        group.close()
        thread.join()
        assert "KeyboardInterrupt" in told[0], told
        """,
        warm=True,
    )


def test_killed_rank_ends_wait_of_others(tmp_path):
    """The other ranks hear of the kill long before their deadline; no shared memory stays."""
    before = set(os.listdir("/dev/shm"))
    codes, said = run_ranks(
        tmp_path,
        3,
        """
        group = ncclpy.init_process_group(timeout=60, check="always")
        group.all_reduce(np.ones(1)).wait(60)
        group.store.barrier("done", group.rank, 3)
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            group.all_reduce(np.ones(1), timeout=60)
        except ncclpy.NcclError as error:
            print("rank", group.rank, "says", error, flush=True)
        group.close()
        """,
    )
    assert codes == [0, -signal.SIGKILL, 0], said
    says = r"rank [02] says .*rank 1 (of process group 'default' )?is gone.*rank 1's process has ended"
    assert len(re.findall(says, said)) == 2, said
    assert {each for each in set(os.listdir("/dev/shm")) - before if "check" in each} == set()


def test_groups_with_check_leave_nothing_behind():
    def body(group):
        kept.append(group)  # so that close(), not the garbage collector, ends the group
        group.all_reduce(np.ones(1)).wait(DEADLINE)
        way(group)(np.ones(1), 1 - group.rank).wait(DEADLINE)

    kept = []
    gc.collect()  # closes groups that other tests have left
    run_groups(2, body, check="always")
    maps = lambda: Path("/proc/self/maps").read_text().count("ncclpy-check")  # noqa: E731
    fds = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        run_groups(2, body, check="first")
    testing.wait_for(lambda: maps() == 0, "the memory to go")
    assert len(os.listdir("/proc/self/fd")) <= fds + 2
    names = lambda: {each.name for each in threading.enumerate()}  # noqa: E731
    testing.wait_for(lambda: not names() & {"ncclpy-group-check", "ncclpy-group-notes"}, "their threads")


@pytest.mark.parametrize("check", ["on", None, 1])
def test_invalid_check_option_is_refused(check):
    with pytest.raises(ValueError, match="check: expected one of 'off', 'first', 'always'"):
        ncclpy.ProcessGroup(LocalStore(), 0, 1, device=0, check=check)
