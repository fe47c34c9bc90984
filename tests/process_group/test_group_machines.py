"""The known state of a rank on another machine: only the store tells of its process."""

from __future__ import annotations

import textwrap

import pytest
from group_fixtures import TOLD
from warm_ranks import run_ranks

import testing

#: What rank 1 does, its state, and the text of the error.
AWAY = {
    "killed": (
        "os.kill(os.getpid(), signal.SIGKILL)",
        "lost",
        "rank 1 cannot be reached: the process has ended, or its machine or network is gone, last heard of after "
        "all_reduce #0",
    ),
    "stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", "unresponsive", "rank 1 does not answer"),
}


@pytest.mark.parametrize("what", AWAY)
def test_error_tells_state_of_process_on_other_machine(tmp_path, what):
    """The process id means nothing on another machine: a stop cannot be known, and an end is known by the lease."""
    testing.need_processes(2)
    does, state, said = AWAY[what]
    program = (
        "from ncclpy.peers import reports\nif os.environ['RANK'] == '1':\n    reports.MACHINE = 'another'\n" + TOLD
    )
    does = "group.store.set('has begun', b'')\n" + does
    program += "if group.rank == 1:\n" + textwrap.indent(does, "    ") + "\n    os._exit(0)\n"
    program += (
        "group.store.get('has begun')\n"
        f"error = group.all_reduce(many, timeout={0.5 if state == 'unresponsive' else 30}).exception(60)\n"
        "print('rank', group.rank, 'has', error, error.ranks[1].state, flush=True)\n"
        "group.close()\n"
    )
    output = run_ranks(tmp_path, 2, program, only=[0])[1]
    lines = [line for line in output.splitlines() if "rank 0 has " in line]
    assert len(lines) == 1 and said in lines[0] and lines[0].endswith(state), output
