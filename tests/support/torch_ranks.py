"""Ranks of torch.distributed: processes that import torch once and run programs, each with a new process group."""

from __future__ import annotations

import datetime
import functools
import itertools
import multiprocessing
import os
import tempfile

from process_ranks import RankProcesses

import ncclpy

#: Seconds that a program may take; reached only by a hang.
DEADLINE = 60


def _begin(rank, size, folder):
    """Import torch; return the function that runs a program."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), OMP_NUM_THREADS="1")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)

    def run(number, backend, options, program, arguments):
        torch.manual_seed(0)
        store = dist.FileStore(os.path.join(folder, str(number)), size)
        options = {"timeout": datetime.timedelta(seconds=DEADLINE / 2), **options}
        if backend is not None:
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, **options)
        try:
            return program(rank, size, *arguments)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    return run


def _nothing(rank, size):
    """Do nothing: the program with which processes import torch."""


class Ranks:
    """`size` processes on one machine."""

    def __init__(self, size):
        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="torch-ranks-")
        self._numbers = itertools.count()
        self._processes = RankProcesses(_begin, size, self._folder.name, context=multiprocessing.get_context("spawn"))

    def run(self, program, *arguments, backend="ncclpy", deadline=DEADLINE, ends=(), **options):
        """Run ``program(rank, size, *arguments)``, a function of a module, in each rank; return the results.

        Failing groups raise here; by default they would end their processes. The result is None for the ranks in
        `ends` whose processes end in the program.
        """
        given = options.get("pg_options")
        if backend is not None and "ncclpy" in backend.lower() and (given is None or isinstance(given, dict)):
            options["pg_options"] = {"on_error": "abort", **(given or {})}
        if not self._processes.started:
            self._run(100, (), None, {}, _nothing, ())
        return self._run(deadline, ends, backend, options, program, arguments)

    def _run(self, deadline, ends, *request):
        return self._processes.run([(next(self._numbers), *request)] * self.size, deadline, ends)

    def close(self):
        self._processes.close(5.0)
        self._folder.cleanup()


def on_own_device(program):
    """Have a program make its tensors on the rank's GPU, where the engine is NCCL."""

    @functools.wraps(program)
    def run(rank, size, *arguments):
        import torch

        if ncclpy.library().engine == "host":
            return program(rank, size, *arguments)
        torch.cuda.set_device(rank)
        with torch.device("cuda", rank):
            return program(rank, size, *arguments)

    return run


def error_of(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


class Group:
    """The part of a process group that works and barriers use."""

    seq, device, name = 3, 0, "group"

    def barrier(self, **_):
        return None

    def close(self):
        pass
