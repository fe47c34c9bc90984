"""Use an installed ncclpy: all-reduce of two ranks in threads, and in two processes, on the host engine."""

import multiprocessing
import threading

import numpy as np

import ncclpy

ncclpy.use("host")
RANKS = 2


def rank_main(rank, unique_id, report):
    """Take part as one rank and report the sum."""
    with ncclpy.Communicator.init(RANKS, rank, ncclpy.UniqueId.from_bytes(unique_id), device=rank, timeout=60) as comm:
        array = np.full(1000, rank + 1.0, np.float32)
        comm.all_reduce(array)
        report((rank, float(array.min()), float(array.max())))


def threads():
    """Return what two threads report."""
    unique_id, reports = bytes(ncclpy.get_unique_id()), []
    ranks = [threading.Thread(target=rank_main, args=(rank, unique_id, reports.append)) for rank in range(RANKS)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    return sorted(reports)


def processes():
    """Return what two processes report."""
    context = multiprocessing.get_context("spawn")
    queue, unique_id = context.Queue(), bytes(ncclpy.get_unique_id())
    ranks = [context.Process(target=rank_main, args=(rank, unique_id, queue.put)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    reports = sorted(queue.get(timeout=90) for _ in ranks)
    for process in ranks:
        process.join()
    return reports


if __name__ == "__main__":
    for way in (threads, processes):
        reports = way()
        assert reports == [(0, 3.0, 3.0), (1, 3.0, 3.0)], f"{way.__name__}: {reports}"
        print(f"ncclpy {ncclpy.__version__} from {ncclpy.__file__}: all_reduce in {RANKS} {way.__name__} is right")
