"""Reports of the ends of other processes on this machine, to the callbacks registered for each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

from ncclpy.bootstrap import LocalStore
from ncclpy.peers import inquiry
from ncclpy.peers.processes import PeerProcesses, tell_of_end


def test_process_end_is_reported_after_failed_report_of_another(caplog):
    first, second = (subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2))
    failing, told = threading.Event(), threading.Event()

    def fail():
        failing.set()
        raise RuntimeError("no thread can be begun")

    tell_of_end(first.pid, lambda: True, fail)
    tell_of_end(second.pid, lambda: True, told.set)
    for process, event in ((first, failing), (second, told)):
        with process:
            process.stdin.close()
        assert event.wait(60)
    assert "no thread can be begun" in caplog.text


def test_stopped_process_is_known_without_the_store():
    program = "from ncclpy.peers.reports import process; print(process()['start'], flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/"
    )
    with child:
        store = LocalStore()
        there = PeerProcesses(store, [0], lambda rank, why: None)
        theirs = PeerProcesses(store, [1], lambda rank, why: None)
        theirs.tell()
        [key] = store.keys("processes/")
        store.set(key, f"1 {child.pid} {child.stdout.readline().strip()}\n".encode())
        there.look()
        store.close()
        assert there.stopped() == {}
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert there.stopped() == {1: child.pid}
        child.kill()
        there.close()
        theirs.close()


def test_text_without_answer_of_the_store_names_stopped_processes(monkeypatch):
    monkeypatch.setattr(inquiry, "_ANSWER_TIMEOUT", 0.05)
    answers, stopped = threading.Event(), "; rank 0's process, 7, is stopped"

    def inquire(subject, alone):
        answers.wait(60)
        return None, None

    inquiries = inquiry.Inquiries(inquire, True, "rank 1", lambda: stopped)
    said, states = inquiries.ask(lambda: {"current": None})
    answers.set()
    assert said.endswith(f"the store has not answered within 0.05 s{stopped}") and states is None
