"""One side of the comparison with MPI: times collectives as one rank, or as all ranks of a process.

Runs as a program of its own, without the package: MPI's ranks have a Python of their own. Arguments: the kind of side
(``mpi``, ``processes`` or ``threads``), then a JSON object. Rank 0 prints a JSON list of seconds for each operation:
its own, or those of the slowest rank if the object of an MPI says ``"slowest"``.
"""

import json
import sys
import threading
import time

import numpy as np


def plan(collective: str, nbytes: int, nranks: int, itemsize: int = 8) -> tuple[int, int]:
    """Return (elements sent, elements received) of a rank.

    The larger of a rank's two buffers has `nbytes`; at least one element goes to or comes from each rank.
    """
    whole = max(nbytes // itemsize, 1)
    part = max(nbytes // itemsize // nranks, 1)
    if collective in ("all_gather", "gather"):
        return part, part * nranks
    if collective in ("reduce_scatter", "scatter"):
        return part * nranks, part
    if collective == "all_to_all":
        return part * nranks, part * nranks
    return whole, whole


def warm_ups(iterations: int) -> int:
    """Return the number of calls before those that are timed, the same for every rival on CPUs.

    Two processes that were asleep may be woken on one core, and take a millisecond to have one each.
    """
    return 2 if iterations < 100 else 1000


def measure(call, barrier, iterations: int) -> float:
    """Return the seconds of one of `iterations` calls in a row."""
    for _ in range(warm_ups(iterations)):
        call()
    barrier()
    begin = time.perf_counter()
    for _ in range(iterations):
        call()
    return (time.perf_counter() - begin) / iterations


def check(collective, receive, nranks, rank) -> None:
    """Check the result: every rank has sent ones."""
    if collective in ("reduce", "gather") and rank != 0:
        return
    wanted = nranks if collective in ("all_reduce", "reduce_scatter", "reduce") else 1
    if not (receive == wanted).all():
        raise SystemExit(f"{collective}: rank {rank} received something wrong")


def run_rank(operations, nranks, rank, calls_of, barrier) -> list:
    """Time every ``(collective, bytes, iterations)``."""
    seconds = []
    for collective, nbytes, iterations in operations:
        sent, received = plan(collective, nbytes, nranks)
        send, receive = np.ones(sent), np.zeros(received)
        call = calls_of(collective, send, receive)
        seconds.append(measure(call, barrier, iterations))
        check(collective, receive, nranks, rank)
    return seconds


def mpi(options) -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if options.get("version"):
        print(json.dumps([MPI.Get_library_version().split("\n")[0].strip("\x00 "), MPI.Get_version()]))
        return

    def calls_of(collective, send, receive):
        source, target = [send, MPI.DOUBLE], [receive, MPI.DOUBLE]
        if collective == "all_reduce":
            return lambda: world.Allreduce(source, target)
        if collective == "broadcast":
            receive[:] = send
            return lambda: world.Bcast(target, 0)
        if collective == "all_gather":
            return lambda: world.Allgather(source, target)
        if collective == "reduce_scatter":
            return lambda: world.Reduce_scatter_block(source, target)
        if collective == "reduce":
            return lambda: world.Reduce(source, target if world.rank == 0 else None, root=0)
        if collective == "gather":
            return lambda: world.Gather(source, target if world.rank == 0 else None, root=0)
        if collective == "scatter":
            return lambda: world.Scatter(source if world.rank == 0 else None, target, root=0)
        if collective == "sendrecv":
            following, previous = (world.rank + 1) % world.size, (world.rank - 1) % world.size
            return lambda: world.Sendrecv(source, following, recvbuf=target, source=previous)
        return lambda: world.Alltoall(source, target)

    seconds = run_rank(options["operations"], world.size, world.rank, calls_of, world.Barrier)
    if options.get("slowest"):
        seconds = [max(ranks) for ranks in zip(*world.allgather(seconds), strict=True)]
    if world.rank == 0:
        print(json.dumps(seconds), flush=True)


def ncclpy_rank(options, rank, unique_id) -> list:
    import ncclpy

    comm = ncclpy.Communicator.init(options["nranks"], rank, unique_id, device=rank)

    def calls_of(collective, send, receive):
        source, target = ncclpy.Buffer.of(send), ncclpy.Buffer.of(receive)
        if collective == "broadcast":
            receive[:] = send
            return lambda: comm.broadcast(target)
        function = getattr(comm, collective)
        return lambda: function(source, target)

    seconds = run_rank(options["operations"], options["nranks"], rank, calls_of, comm.barrier)
    comm.close()
    return seconds


def processes(options) -> None:
    import ncclpy

    rank, path = options["rank"], options["id"]
    if rank == 0:
        uid = ncclpy.get_unique_id()
        with open(path + ".new", "wb") as file:
            file.write(bytes(uid))
        import os

        os.rename(path + ".new", path)
    else:
        end = time.monotonic() + 30
        while True:
            try:
                with open(path, "rb") as file:
                    uid = ncclpy.UniqueId.from_bytes(file.read())
                break
            except FileNotFoundError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.005)
    seconds = ncclpy_rank(options, rank, uid)
    if rank == 0:
        print(json.dumps(seconds), flush=True)


def threads(options) -> None:
    import ncclpy

    uid, answers = ncclpy.get_unique_id(), {}

    def body(rank):
        answers[rank] = ncclpy_rank(options, rank, uid)

    ranks = [threading.Thread(target=body, args=(rank,)) for rank in range(options["nranks"])]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    print(json.dumps(answers[0]), flush=True)


def bandwidth(options) -> None:
    """Copy arrays that no cache holds, with as many threads as ranks; print the seconds of one copy each by all."""
    n, nbytes = options["threads"], options["bytes"]
    pairs = [(np.ones(nbytes // 8), np.ones(nbytes // 8)) for _ in range(n)]
    rounds = 5

    def body(pair):
        for _ in range(rounds):
            np.copyto(*pair)

    workers = [threading.Thread(target=body, args=(pair,)) for pair in pairs]
    begin = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(json.dumps([(time.perf_counter() - begin) / rounds]), flush=True)


if __name__ == "__main__":
    {"mpi": mpi, "processes": processes, "threads": threads, "bandwidth": bandwidth}[sys.argv[1]](
        json.loads(sys.argv[2])
    )
