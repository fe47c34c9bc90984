"""Run one function as every rank, in threads or in separate processes, with a common deadline."""

import concurrent.futures
import contextlib
import os
import time
import traceback

import thread_ranks
from nccl_calls import Nccl

import testing
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
    uid = nccl.unique_id()
    return thread_ranks.run_ranks(nranks, lambda rank: body(Rank(nccl, rank, nranks, uid), *arguments), deadline)


def _serve(pipe, cores):
    """Serve as one of the processes: receive bodies, run each for some ranks, send back results or tracebacks."""
    os.sched_setaffinity(0, cores)  # before the engine reads the set of cores
    nccl = Nccl(host_engine_path())
    while True:
        try:
            body, ranks, nranks, uid, arguments = pipe.recv()
        except EOFError:  # the tests have ended
            return

        def run(rank, body=body, nranks=nranks, uid=uid, arguments=arguments):
            try:
                return rank, body(Rank(nccl, rank, nranks, uid), *arguments), None
            except BaseException:
                return rank, None, traceback.format_exc()

        with concurrent.futures.ThreadPoolExecutor(len(ranks)) as threads:
            pipe.send(list(threads.map(run, ranks)))


class Processes:
    """Processes that are started once and run bodies on request; replaced after a failure.

    Each has the environment and the cores of the test process at its start.
    """

    def __init__(self):
        self._context = testing.process_context()
        self._workers = []

    def _grow(self, count):
        while len(self._workers) < count:
            ours, theirs = self._context.Pipe()
            arguments = (dict(os.environ), _serve, theirs, os.sched_getaffinity(0))
            process = self._context.Process(target=testing.with_environment, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def run(self, nccl, nranks, body, *arguments, deadline=DEADLINE, placement=None):
        """Run `body` as every rank; `placement[rank]` is the process of a rank, by default one per rank."""
        placement = list(placement or range(nranks))
        uid = nccl.unique_id()
        used = sorted(set(placement))
        self._grow(max(used) + 1)
        for process in used:
            ranks = [rank for rank in range(nranks) if placement[rank] == process]
            self._workers[process][1].send((body, ranks, nranks, uid, arguments))
        results, errors = {}, []
        end = time.monotonic() + deadline
        for process in used:
            pipe = self._workers[process][1]
            ready = pipe.poll(max(0.0, end - time.monotonic()) if not errors else 2.0)
            if not ready:
                errors.append(f"process {process} is still running after {deadline} s")
                continue
            try:
                answers = pipe.recv()
            except EOFError:
                errors.append(f"process {process} died with exit code {self._workers[process][0].exitcode}")
                continue
            for rank, result, error in answers:
                results[rank] = result
                if error is not None:
                    errors.append(f"rank {rank} in process {process}:\n{error}")
        if errors:
            self.close()
        assert not errors, "\n".join(errors)
        return [results[rank] for rank in range(nranks)]

    def close(self):
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
            process.join()
        self._workers = []
