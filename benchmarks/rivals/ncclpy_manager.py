"""ncclpy.Manager: a participant that is added under a key; its work says when it is done."""

import itertools

from benchmarks.overhead.road import Road, timed
from benchmarks.work.setting import COUNT, FLOAT32, Setting

NAME = "ncclpy.Manager"
ADD = "key = next(keys); keep(add(key, send, recv, device=device, num_local=1))"
#: The same across processes: participants share a communicator key, and each rank signals that it is ready.
ADD_OF_MANY = (
    "key = next(keys); keep(add(key, send, recv, device=device, num_local=1, num_global=nranks, "
    "communicator_key=shared, global_rank=rank)); ready(key)"
)


def open(setting: Setting) -> list[Road]:
    """Make a Manager; across processes its communicator is made by the first operations."""
    import ncclpy

    if setting.communicator is None:
        ncclpy.use(setting.library)
    manager = ncclpy.Manager()
    setting.keep.append(manager)
    dtype = ncclpy.DataType(FLOAT32)
    send, recv = (ncclpy.Buffer(at, COUNT, dtype, device=setting.device) for at in (setting.send, setting.recv))
    works: list = []
    names = {
        "add": manager.all_reduce,
        "device": setting.device,
        "keep": works.append,
        "keys": itertools.count(),
        "recv": recv,
        "send": send,
    }
    statement = ADD
    if setting.nranks > 1:
        statement = ADD_OF_MANY
        names.update(
            nranks=setting.nranks, rank=setting.rank, ready=manager.signal_multi_node_ready, shared=setting.ids.pop(0)
        )
    run = timed(setting, statement, **names)

    def host(n: int) -> float:
        seconds = run(n)
        for work in works:
            work.wait(60)
        works.clear()
        return seconds

    latency = None
    if setting.sync is not None:
        latency = timed(setting, f"{statement}; pop().wait()", pop=works.pop, **names)
    return [Road("all_reduce(prepared buffer)", "all_reduce", host, latency, setting.recv)]
