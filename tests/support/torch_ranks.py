"""Ranks of torch.distributed: processes that import torch once and run programs, each with a new process group."""

from __future__ import annotations

import datetime
import functools
import itertools
import multiprocessing
import multiprocessing.connection
import os
import tempfile
import time
import traceback

import ncclpy

#: Seconds that a program may take; reached only by a hang.
DEADLINE = 60


def _serve(rank, size, pipe, folder):
    """Run the programs that arrive on the pipe, one after the other."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), OMP_NUM_THREADS="1")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    pipe.send(None)
    while True:
        try:
            number, backend, options, program, arguments = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            torch.manual_seed(0)
            store = dist.FileStore(os.path.join(folder, str(number)), size)
            options = {"timeout": datetime.timedelta(seconds=DEADLINE / 2), **options}
            if backend is not None:
                dist.init_process_group(backend, store=store, rank=rank, world_size=size, **options)
            try:
                found = program(rank, size, *arguments)
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()
            pipe.send((found, None))
        except BaseException:
            pipe.send((None, traceback.format_exc()))


class Ranks:
    """`size` processes on one machine."""

    def __init__(self, size):
        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="torch-ranks-")
        self._numbers = itertools.count()
        self._start()

    def _start(self):
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.size, theirs, self._folder.name), name=f"rank {rank}", daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._answers(100)

    def _answers(self, deadline):
        """Return the answer of each rank; None for a rank that has ended."""
        end, answers = time.monotonic() + deadline, [None] * self.size
        waiting = dict(zip(self._pipes, range(self.size), strict=True))
        while waiting:
            ready = multiprocessing.connection.wait(waiting, max(0.0, end - time.monotonic()))
            if not ready:
                self.close()
                raise AssertionError(f"ranks {sorted(waiting.values())} have not answered within {deadline} s")
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    answers[rank] = (None, "its process has ended")
        return answers

    def run(self, program, *arguments, backend="ncclpy", deadline=DEADLINE, **options):
        """Run ``program(rank, size, *arguments)``, a function of a module, in each rank; return the results.

        Failing groups raise here; by default they would end their processes.
        """
        given = options.get("pg_options")
        if backend is not None and "ncclpy" in backend.lower() and (given is None or isinstance(given, dict)):
            options["pg_options"] = {"on_error": "abort", **(given or {})}
        if not self._processes:
            self._start()
        number = next(self._numbers)
        for pipe in self._pipes:
            pipe.send((number, backend, options, program, arguments))
        answers = self._answers(deadline)
        failed = {rank: text for rank, (_, text) in enumerate(answers) if text}
        if failed:
            raise AssertionError("\n".join(f"rank {rank}:\n{text}" for rank, text in failed.items()))
        return [found for found, _ in answers]

    def close(self):
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._pipes, self._processes = [], []

    def clear(self):
        self.close()
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
