"""Run one function as every rank, in threads or in separate processes, with a common deadline."""

import contextlib
import functools

import process_ranks
import thread_ranks
from nccl_calls import Nccl

from ncclpy.core.runtime.search import host_engine_path

DEADLINE = 60.0


class Rank:
    """The argument of a body: the library, the rank's place, and a stream."""

    def __init__(self, nccl, rank, nranks, uid):
        self.nccl, self.rank, self.nranks, self.uid = nccl, rank, nranks, uid
        nccl.driver.use(rank)
        self.stream = nccl.driver.stream(1)

    @contextlib.contextmanager
    def communicator(self, config=None):
        comm = self.nccl.init(self.nranks, self.uid, self.rank, config)
        yield comm
        self.synchronize()
        self.nccl.ncclCommDestroy(comm)

    def synchronize(self):
        self.nccl.driver.cuStreamSynchronize(self.stream)


def as_threads(nccl, nranks, body, *arguments, deadline=DEADLINE):
    """Run `body(rank, *arguments)` for each rank in threads and return the results."""
    return _run(nccl, range(nranks), nranks, nccl.unique_id(), deadline, body, arguments)


def _run(nccl, ranks, nranks, uid, deadline, body, arguments):
    """Run a body as some of the ranks, in threads."""
    return thread_ranks.run_ranks(
        len(ranks), lambda number: body(Rank(nccl, ranks[number], nranks, uid), *arguments), deadline
    )


def _begin(number):
    return functools.partial(_run, Nccl(host_engine_path()))


class Processes:
    """Processes that are started once and run bodies on request."""

    def __init__(self):
        self._processes = process_ranks.RankProcesses(_begin, name="process")

    def run(self, nccl, nranks, body, *arguments, deadline=DEADLINE, placement=None):
        """Run `body` as every rank; `placement[rank]` is the process of a rank, by default one per rank."""
        placement = list(placement or range(nranks))
        uid = nccl.unique_id()
        ranks = [[rank for rank in range(nranks) if placement[rank] == each] for each in range(max(placement) + 1)]
        # A process reports the stacks of ranks that are not done before it is killed.
        requests = [(own, nranks, uid, 0.9 * deadline, body, arguments) for own in ranks]
        results = [iter(each) for each in self._processes.run(requests, deadline)]
        return [next(results[process]) for process in placement]

    def close(self):
        self._processes.close()
