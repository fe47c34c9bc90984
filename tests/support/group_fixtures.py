"""Programs of ranks that run in threads, in processes, or under `ncclpy run`."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import textwrap

from group_ranks import DEADLINE
from process_ranks import RankProcesses

import ncclpy
import testing
from ncclpy.bootstrap import LocalStore, PrefixStore, TCPStore


class World:
    """The argument of a rank's program: its place, and the means to meet the other ranks.

    Attributes
    ----------
    rank, size, device
        Its rank, their number, its own device.
    store
        Where the ranks meet.
    how
        The kind of the ranks, ``"threads"`` or ``"processes"``.
    lib
        The arrays of this run.
    """

    def __init__(self, rank, size, store, how):
        self.rank, self.size, self.store, self.how = rank, size, store, how
        self.device = testing.device_of(rank)
        self.lib = testing.arrays()
        self._meetings = itertools.count()

    def group(self, **options):
        options.setdefault("timeout", DEADLINE / 2)
        return ncclpy.ProcessGroup(self.store, self.rank, self.size, device=self.device, **options)

    def array(self, values):
        return self.lib.make(values, self.device)

    def call(self, method, array, *arguments, **options):
        """Call a method with an array of the run."""
        return method(self.lib.argument(array), *arguments, **options)

    def sum(self, group, values):
        """All-reduce the values, wait, and return the result."""
        array = self.array(values)
        self.call(group.all_reduce, array).wait(DEADLINE)
        return self.lib.read(array)

    def meet(self):
        """Wait for the other ranks, without NCCL."""
        self.store.barrier(f"meeting {next(self._meetings)}", self.rank, self.size, DEADLINE)


def in_threads(size, program, *arguments):
    """Call ``program(world, *arguments)`` for each rank in its own thread; return the results."""
    store = LocalStore()

    def rank(each):
        return program(World(each.rank, size, store, "threads"), *arguments)

    return testing.run_threads(size, rank, DEADLINE)


#: The beginning of programs for `launched` with ranks that report their states in the launcher's store.
IN_A_STORE = """
import contextlib
import json
import testing
from ncclpy.bootstrap import rendezvous
from ncclpy.peers import reports, status

reports.PATIENCE = 1.5  # on a machine that is busy an answer may take its time
status._PUBLISH_INTERVAL = 0.02

lib = testing.arrays()
place, store = rendezvous()
rank, size = place.rank, place.size
device = testing.device_of(rank)

def have_told(prefix, ask=True):
    # What all have finished is in the store: at once where one asks, else within a second, or with a beat.
    store.barrier('all have finished', rank, size)
    def told():
        names = [name for name in store.keys(prefix) if '/status/' in name]
        return [name for name in names if json.loads(store.get(name))['finished']]
    if ask and rank == 0:
        [place] = {name.partition('status/')[0] for name in store.keys(prefix) if '/status/' in name}
        store.add(place + reports.ASKED)
    testing.wait_for(lambda: len(told()) == size, 'what they have finished')
    store.set(f'process {rank}', str(os.getpid()).encode())
    store.barrier('all have told', rank, size)
"""


def launched(tmp_path, nranks, program, *options):
    """Run a program on `nranks` ranks by `ncclpy run`; return the exit code and the lines of output."""
    path = tmp_path / "program.py"
    path.write_text("import os, signal, time\nimport numpy as np, ncclpy\n" + textwrap.dedent(program))
    done = subprocess.run(
        [sys.executable, "-m", "ncclpy", "run", "-n", str(nranks), *options, "--", sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=100,
        cwd="/",
        env=os.environ | {"PYTHONPATH": testing.with_support()},
    )
    return done.returncode, done.stdout + done.stderr


#: Arrays in device memory on GPUs, else of numpy.
_ARRAYS = (
    "if ncclpy.library().engine == 'cuda':\n"
    "    import torch\n"
    "    two, many = torch.ones(2, device=group.device), torch.ones(1024, device=group.device)\n"
    "else:\n"
    "    two, many = np.ones(2), np.ones(1024, np.float32)\n"
)
#: Both ranks have reported a finished collective, at once since one asks for it, and their processes.
TOLD = (
    "import json, testing\n"
    "group = ncclpy.init_process_group(timeout=60)\n"
    + _ARRAYS
    + "group.all_reduce(two).wait(60)\n"
    + "group.store.barrier('all have finished', group.rank, 2)\n"
    + "if group.rank == 0:\n"
    + "    group.state()\n"
    + "def told():\n"
    + "    names = [name for name in group.store.keys('ncclpy/group/') if '/status/' in name]\n"
    + "    return [name for name in names if json.loads(group.store.get(name))['finished']]\n"
    + "testing.wait_for(lambda: len(told()) == 2, 'what they have finished')\n"
    + "group.store.barrier('all have told', group.rank, 2)\n"
)


class Processes:
    """Processes that are started once and run one program after the other."""

    def __init__(self, size):
        self.size = size
        self._programs = itertools.count()
        self._store = self._ranks = None

    def run(self, program, *arguments, ends=()):
        """Call ``program(world, *arguments)``, a function of a module, in each process; return the results.

        The result is None for the ranks in `ends`, as their processes may end in the program.
        """
        testing.need_processes(self.size)
        if self._store is None:
            self._store = TCPStore("127.0.0.1", 0, serve=True, linger=0)
            self._ranks = RankProcesses(_begin, self.size, self._store.port)
        return self._ranks.run([(next(self._programs), program, arguments)] * self.size, DEADLINE, ends)

    def close(self):
        """Kill the processes."""
        if self._store is not None:
            self._ranks.close()
            self._store.close()
            self._store = None


def _begin(rank, size, port):
    store = TCPStore("127.0.0.1", port)

    def run(number, program, arguments):
        return program(World(rank, size, PrefixStore(f"program {number}", store), "processes"), *arguments)

    return run
