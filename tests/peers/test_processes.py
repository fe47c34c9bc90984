"""Reports of the ends of other processes on this machine, to the callbacks registered for each."""

from __future__ import annotations

import subprocess
import sys
import threading

from ncclpy.peers.processes import tell_of_end


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
