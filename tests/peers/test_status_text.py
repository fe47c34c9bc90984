"""The sentence on the states of a group's ranks, word by word."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ncclpy.peers.rank_state import OperationInfo, RankState, as_data, from_data, pack, unpack
from ncclpy.peers.status_text import keep_stacks, sentence

REDUCE = OperationInfo("all_reduce", 17, "float32", 1024, "sum", None)
LAST = OperationInfo("all_reduce", 16, "float32", 1024, "sum", None)
CAST = OperationInfo("broadcast", 17, "float64", 4, None, 1)
NAME = "all_reduce #17 (float32 x 1,024, sum) of process group 'default': "

SAID = {
    "all wait": ([RankState(0, "running", REDUCE, LAST, 31.0)], "rank 0 waits in all_reduce #17 since 31 s"),
    "another call": (
        [RankState(0, "running", REDUCE, LAST, 30.0), RankState(3, "running", CAST, LAST, 31.0)],
        "rank 3 is in broadcast #17 (float64 x 4, root 1) since 31 s; rank 0 waits in all_reduce #17 since 30 s",
    ),
    "another count": (
        [RankState(3, "running", OperationInfo("all_reduce", 17, "float32", 2048, "sum", None), LAST, 1.0)],
        "rank 3 is in all_reduce #17 (float32 x 2,048, sum) since 1 s",
    ),
    "no call": (
        [RankState(5, "idle", None, LAST, 12.0)],
        "rank 5 has finished all_reduce #16 and is in no operation since 12 s",
    ),
    "several": (
        [RankState(rank, "running", REDUCE, LAST, float(rank)) for rank in (0, 1, 2, 4)]
        + [RankState(rank, "idle", None, LAST, 3.0) for rank in (3, 5)],
        "ranks 3, 5 have finished all_reduce #16 and are in no operation since 3 s; ranks 0-2, 4 wait in all_reduce "
        "#17 since 4 s",
    ),
    "none yet": ([RankState(1, "idle"), RankState(2, "idle")], "ranks 1-2 have begun no operation yet"),
    "blocked_on_input": (
        [RankState(4, "blocked_on_input", REDUCE, LAST, 3.0), RankState(5, "blocked_on_input", CAST, LAST, 3.0)],
        "rank 4 has begun all_reduce #17, which waits for its stream since 3 s (a kernel, or a copy, before it has "
        "not ended); rank 5 has begun broadcast #17 (float64 x 4, root 1), which waits for its stream since 3 s (a "
        "kernel, or a copy, before it has not ended)",
    ),
    "in_other_group": (
        [
            RankState(4, "in_other_group", CAST, LAST, 3.0, where="tp"),
            RankState(5, "in_other_group", CAST, None, 3.0, where="{tp}", kind="communicator"),
        ],
        "rank 4 has finished all_reduce #16 and is blocked in broadcast #17 (float64 x 4, root 1) of process group "
        "'tp' since 3 s; rank 5 has begun no operation yet and is blocked in broadcast #17 (float64 x 4, root 1) of "
        "communicator '{tp}' since 3 s",
    ),
    "in_rendezvous": (
        [RankState(rank, "in_rendezvous", None, LAST, 3.0, where="split()") for rank in (4, 5)],
        "ranks 4-5 have finished all_reduce #16 and are in split(), which waits for others to arrive since 3 s",
    ),
    "by guilt": (
        [
            RankState(0, "running", REDUCE, LAST),
            RankState(1, "running", CAST, LAST),
            RankState(2, "idle", None, LAST),
            RankState(3, "closed"),
            RankState(4, "not_joined"),
            RankState(5, "lost"),
            RankState(6, "unresponsive"),
            RankState(7, "stopped"),
            RankState(8, "ended"),
        ],
        "rank 8's process has ended; rank 7's process is stopped (by SIGSTOP or a debugger); rank 6 does not answer, "
        "and the process lives: its Python does not run (the GIL is held); rank 5 cannot be reached: the process has "
        "ended, or its machine or network is gone; rank 4 has not made this group; rank 3 has closed the group; "
        "rank 2 has finished all_reduce #16 and is in no operation; rank 1 is in broadcast #17 (float64 x 4, root 1); "
        "rank 0 waits in all_reduce #17",
    ),
    "closed": ([RankState(2, "closed", None, LAST, 3.0)], "rank 2 has closed the group after all_reduce #16"),
    "killed": ([RankState(6, "ended")], "rank 6's process has ended"),
    "two killed": (
        [RankState(6, "ended", None, LAST), RankState(7, "ended", None, LAST)],
        "the processes of ranks 6-7 have ended, last heard of after all_reduce #16",
    ),
    "stopped": (
        [RankState(6, "stopped", CAST, LAST, 9.0)],
        "rank 6's process is stopped (by SIGSTOP or a debugger), last heard of in broadcast #17 (float64 x 4, root 1)",
    ),
    "unresponsive": (
        [RankState(6, "unresponsive", None, LAST, 9.0)],
        "rank 6 does not answer, and the process lives: "
        "its Python does not run (the GIL is held), last heard of after all_reduce #16",
    ),
    "lost": (
        [RankState(6, "lost")],
        "rank 6 cannot be reached: the process has ended, or its machine or network is gone",
    ),
    "not_joined": ([RankState(7, "not_joined")], "rank 7 has not made this group"),
    "unknown": ([RankState(7, "unknown")], "what rank 7 does is not known"),
    "to a peer": (
        [RankState(1, "running", OperationInfo("recv", 0, "float32", 4, None, 2), None, 2.0)],
        "rank 1 is in recv #0 from rank 2 (float32 x 4) since 2 s",
    ),
    "a block of messages": (
        [
            RankState(rank, "running", OperationInfo("send", 0, "float32", 4, None, None), None, 2.0)
            for rank in (1, 2, 4)
        ],
        "ranks 1-2, 4 are in send #0 (float32 x 4) since 2 s",
    ),
    "parts that differ": (
        [RankState(1, "running", OperationInfo("all_to_all", 3, "float64", 0, None, None), None, 2.0)],
        "rank 1 is in all_to_all #3 (float64) since 2 s",
    ),
    "a barrier": (
        [RankState(1, "running", OperationInfo("barrier", 3, "uint8", 1, "max", None))],
        "rank 1 is in barrier #3",
    ),
}


@pytest.mark.parametrize("what", SAID)
def test_sentence_for_each_case(what):
    states, said = SAID[what]
    assert sentence("default", states, len(states), REDUCE) == NAME + said
    assert from_data(json.loads(json.dumps(as_data(states)))) == tuple(states)


LOAD, MAIN = ("/job/train.py:41 in load", "/job/train.py:88 in main"), ("/job/train.py:88 in main",)


def test_sentence_ends_with_python_stack_of_awaited_ranks():
    states = [
        RankState(0, "running", REDUCE, stack=MAIN),
        *(RankState(rank, "idle", None, LAST, stack=LOAD) for rank in (1, 2)),
        RankState(3, "running", CAST, stack=MAIN),
        RankState(4, "unresponsive"),
    ]
    kept = keep_stacks(states, REDUCE)
    assert [each.stack for each in kept] == [(), LOAD, LOAD, MAIN, ()]
    assert sentence("default", kept, 5, REDUCE).endswith(
        "; rank 0 waits in all_reduce #17. Python of ranks 1-2: job/train.py:41 in load, called by job/train.py:88 in "
        "main. Python of rank 3: job/train.py:88 in main"
    )
    again = from_data(json.loads(json.dumps(as_data(kept))))
    assert [each.stack for each in again] == [each.stack for each in kept]


def test_stacks_of_many_ranks_do_not_make_an_error_long():
    states = [RankState(rank, "idle", None, LAST, stack=(f"a.py:{rank} in f",)) for rank in range(1000)]
    kept = keep_stacks(states, REDUCE)
    assert [each.rank for each in kept if each.stack] == list(range(8))
    assert sentence("g", kept, 1000, REDUCE).count("Python of") == 2


def test_stack_told_by_other_process_is_validated():
    told = pack({"current": None, "finished": None, "stack": ["a.py:1 in f", 3]})
    assert unpack(0, told, "") == RankState(0, "idle") and unpack(0, told, "").stack == ()
    told = pack({"current": None, "finished": None, "stack": list(LOAD)})
    assert unpack(0, told, "").stack == LOAD and unpack(0, told, "unresponsive").stack == ()


def receives(rank, seq=0, step=-1):
    return RankState(rank, "running", OperationInfo("recv", seq, "uint8", 1, None, rank + step))


def test_sentence_of_many_ranks_is_short():
    states = [receives(rank, seq=rank) for rank in range(1, 1000)]
    said = sentence("a {b}", states, 1002, None)
    assert said.startswith("process group 'a {b}': rank 1 is in recv #1 from rank 0 (uint8 x 1); rank 2 is in ")
    assert said.endswith("; 991 more ranks are in other operations (recv); of 3 more nothing is known")


def test_sentence_names_all_ranks_that_keep_others_waiting():
    states = [receives(rank, seq=rank) for rank in range(1, 1000)]
    for rank in range(7, 1000, 100):
        states[rank - 1] = RankState(rank, "ended", states[rank - 1].current)
    states[98] = RankState(99, "stopped")
    states[499] = RankState(500, "blocked_on_input", LAST)
    states[600:603] = [RankState(rank, "idle", None, replace(LAST, seq=rank)) for rank in (601, 602, 603)]
    states[700] = RankState(701, "running", REDUCE)
    said = sentence("g", states, 1000, REDUCE)
    # The last operation of each ended rank would take ten clauses.
    assert (
        f"the processes of ranks {', '.join(str(7 + 100 * each) for each in range(10))} have ended; rank 99's" in said
    )
    assert "; rank 500 has begun all_reduce #16 (float32 x 1,024, sum), which waits for its stream (" in said
    assert said.index("ended") < said.index("stopped") < said.index("rank 500")
    assert "; rank 601 has finished" in said
    assert said.endswith(
        "(uint8 x 1); rank 701 waits in all_reduce #17; 982 more ranks are in other operations (recv); of 1 more "
        "nothing is known"
    )


def test_sentence_counts_omitted_ranks_by_state():
    states = [RankState(rank, "idle", None, replace(LAST, seq=rank)) for rank in range(9)]
    states += [RankState(9, "in_other_group", LAST, where="tp"), RankState(10, "in_rendezvous", where="split()")]
    states += [RankState(11, "running", CAST), RankState(12, "launched", LAST), RankState(13, "launched", CAST)]
    assert sentence("g", states, 14, None).endswith(
        "; 1 more rank is in no operation; 1 more rank is blocked in another group or communicator; 1 more rank waits "
        "for others to arrive; 1 more rank is in another operation (broadcast); 2 more ranks have launched others, "
        "which may be done"
    )


def test_sentence_merges_states_that_differ_by_peer_only():
    states = [RankState(0, "running", REDUCE), *(receives(rank) for rank in range(1, 13)), RankState(13, "ended")]
    states += [receives(14), receives(15)]
    assert sentence("g", states, 16, states[14].current) == (
        "recv #0 from rank 13 (uint8 x 1) of process group 'g': rank 13's process has ended; rank 0 is in all_reduce "
        "#17 (float32 x 1,024, sum); ranks 1-12, 15 are in recv #0, each from the rank before it (uint8 x 1); rank 14 "
        "waits in recv #0 from rank 13"
    )
    star = [RankState(rank, "running", OperationInfo("send", 0, "uint8", 1, None, 9 - 2 * rank)) for rank in range(4)]
    assert sentence("g", star, 4, None).endswith("ranks 0-3 are in send #0 to ranks 3, 5, 7, 9 (uint8 x 1)")
    assert sentence("g", star[:2], 2, None).endswith(
        "rank 0 is in send #0 to rank 9 (uint8 x 1); rank 1 is in send #0 to rank 7 (uint8 x 1)"
    ), "of two people see whom each waits for"


def test_sentence_names_each_rank_that_keeps_others_waiting():
    does = [("ended", None), ("idle", None), ("running", REDUCE)]
    states = [RankState(rank, *does[rank % 3], LAST) for rank in range(30)]
    assert sentence("g", states, 30, REDUCE).partition("'g': ")[2] == (
        "the processes of ranks 0, 3, 6, 9, 12, 15, 18, 21, 24, 27 have ended, last heard of after all_reduce #16; "
        "ranks 1, 4, 7, 10, 13, 16, 19, 22, 25, 28 have finished all_reduce #16 and are in no operation; ranks 2, 5, "
        "8, 11, 14, 17 and 4 more wait in all_reduce #17"
    )


def test_status_of_other_version_is_unknown():
    assert from_data([{"rank": 1, "later": 2}]) is None and from_data(7) is None
