"""The confirmation of other ranks that a rank waits for before it aborts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from ncclpy.bootstrap import LocalStore
from ncclpy.peers import confirmation
from ncclpy.peers.confirmation import Confirmation, Patience
from ncclpy.peers.reports import voluntary_switches


@pytest.fixture
def exits(monkeypatch):
    made = threading.Event()
    monkeypatch.setattr(confirmation, "_python_ends", made)
    return made


@pytest.mark.parametrize("ends", [False, True])
def test_rank_without_store_aborts_unless_its_process_ends(exits, monkeypatch, ends):
    """Python closes its stores at exit, when the others cannot be told, and the exit ends the process's kernels."""
    monkeypatch.setattr(confirmation, "_STOPPED_PATIENCE", 0.05)
    store = LocalStore()
    mine = Confirmation(store, [0], 2, lambda rank: "lives")
    store.close()
    if ends:
        exits.set()
    assert mine.wait() is not ends


def test_rank_of_exiting_process_does_not_abort(exits):
    store = LocalStore()
    mine = Confirmation(store, [0], 2, lambda rank: "lives")
    store.close()
    threading.Timer(0.1, exits.set).start()
    assert mine.wait() is False


def given_up_after(condition_at, stop_at, looks=0.1):
    """Return the seconds after which a rank is not waited for any more; None if it is still after two minutes."""
    patience, moment = Patience(0.0), 0.0
    while moment < 120:
        moment += looks
        if not patience.is_waited_for(1, condition_at(moment), moment, stop_at(moment)):
            return moment
    return None


def test_rank_is_given_up_after_one_stop_of_a_second():
    assert 1.0 <= given_up_after(lambda moment: "stopped", lambda moment: 7) < 1.3


def test_series_of_short_stops_is_not_one_long_stop():
    """After each stop of 0.4 s, which the rank does not notice, it runs for less than the time between two looks."""
    assert given_up_after(lambda moment: "stopped", lambda moment: int(moment / 0.4)) is None


def test_rank_with_stops_is_given_up_when_it_has_run_for_five_seconds():
    """It is stopped in every second half second."""
    found = given_up_after(lambda moment: "stopped" if moment % 1 < 0.5 else "silent", int)
    assert 5 / 0.5 - 1 < found < 15


def test_rank_that_runs_is_given_up_after_five_seconds():
    assert 5.0 <= given_up_after(lambda moment: "silent", lambda moment: 0) < 5.3


def test_each_stop_of_a_process_has_its_own_number():
    """Even if the process hardly runs between two stops."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        seen = []
        for _ in range(20):
            child.send_signal(signal.SIGSTOP)
            os.waitpid(child.pid, os.WUNTRACED)
            seen += [voluntary_switches(child.pid), voluntary_switches(child.pid)]
            child.send_signal(signal.SIGCONT)
        child.kill()
    assert len(set(seen)) == 20 and seen[::2] == seen[1::2]
    assert voluntary_switches(child.pid) == 0
