"""Answers of ranks to questions about their state, also after a foreign value in the question's number."""

from __future__ import annotations

import logging
import threading

import pytest
from group_ranks import DEADLINE, run_groups

import testing
from ncclpy.bootstrap import LocalStore, PrefixStore, StoreError, StoreLost
from ncclpy.peers.reports import Reports, number_of

IDLE = {"current": None, "finished": None}


@pytest.fixture
def store():
    with LocalStore() as made:
        yield made


@pytest.mark.parametrize("written", [b"9" * 15, b"9" * 18, b"1" + b"0" * 16])
@pytest.mark.parametrize("then", ["counted on", "set back"])
def test_question_number_out_of_order_silences_no_rank(store, written, then):
    reports = Reports(store, 1, 2, lambda: dict(IDLE), lambda rank: False, lambda rank: True)
    reports.answer_all(2)
    reports.answer_all(number_of(written))
    following = int(written) + 1 if then == "counted on" else 3
    reports.answer_all(number_of(b"%d" % following))
    assert store.check([f"answer/{each}/1" for each in (1, 2, following)])


def test_question_is_answered_once(store):
    answers = []
    reports = Reports(
        store, 1, 2, lambda: dict(IDLE), lambda rank: False, lambda rank: True, lambda: answers.append(1) or {}
    )
    for number in (0, 1, 1, 3, 3):
        reports.answer_all(number)
    assert len(answers) == 3


@pytest.mark.parametrize("tells", [lambda each: each.publish(), lambda each: each.answer_all(1)])
def test_closed_rank_writes_nothing_more(store, tells):
    """A thread reads the rank's state, and writes it only after the last rank has deleted all keys."""
    looks, goes_on = threading.Event(), threading.Event()

    def look():
        if threading.current_thread() is thread:
            looks.set()
            assert goes_on.wait(DEADLINE)
        return dict(IDLE)

    reports = Reports(store, 0, 2, look, lambda rank: False, lambda rank: True)
    thread = threading.Thread(target=tells, args=(reports,))
    thread.start()
    assert looks.wait(DEADLINE)
    reports.publish(closed=True)
    assert reports.has_closed(0)
    store.delete(reports.key(0))
    goes_on.set()
    thread.join(DEADLINE)
    assert store.keys() == []


def test_question_after_the_close_leaves_nothing_in_the_store(store):
    """The thread that asks may be late: by then the last rank may have cleared the store."""
    reports = Reports(store, 0, 2, lambda: dict(IDLE), lambda rank: False, lambda rank: True)
    reports.publish(closed=True)
    store.delete(reports.key(0))
    with pytest.raises(StoreError, match="rank 0 has closed"):
        reports.collect()
    assert store.keys() == []


def test_ranks_answer_after_question_number_out_of_order(host_engine, store):
    def body(group):
        store.barrier("both are there", group.rank, 2, DEADLINE)
        found = []
        for number in (b"9" * 18, b"7") if group.rank == 0 else ():
            store.set("ncclpy/group/g/1/told/asked", number)
            found.append([each.state for each in group.state(timeout=DEADLINE)])
        store.barrier("both have answered", group.rank, 2, DEADLINE)
        return found

    assert run_groups(2, body, store=store, name="g")[0] == [["idle", "idle"]] * 2


class Failing(PrefixStore):
    """A store that acts as if its server were gone once `lost` is set."""

    lost = False

    def _set(self, key, value, deadline):
        if self.lost:
            raise StoreLost("the server is gone")
        super()._set(key, value, deadline)

    def _watch(self, *arguments):
        raise StoreLost("none")


def test_rank_that_stops_reporting_is_logged(host_engine, store, caplog):
    failing = Failing("failing", store)

    def body(group):
        group.barrier().wait(DEADLINE)
        store.barrier("both are there", group.rank, 2, DEADLINE)
        failing.lost = True
        group.barrier().wait(DEADLINE)  # a change to publish
        words = f"rank {group.rank} of process group 'g' no longer publishes what it does: the server is gone"
        testing.wait_for(lambda: words in caplog.text, "the log")
        store.barrier("both have logged", group.rank, 2, DEADLINE)
        failing.lost = False

    caplog.set_level(logging.WARNING, "ncclpy.peers")
    run_groups(2, body, store=failing, name="g")
