"""ncclpy.ProcessGroup: each operation is a work on a stream of the group, after the one that produces its input."""

from benchmarks.overhead.road import Road, timed
from benchmarks.rivals import arrays
from benchmarks.work.setting import COUNT, FLOAT32, Setting

NAME = "ncclpy.ProcessGroup"


def open(setting: Setting) -> list[Road]:
    """Make a group of all ranks, which meet in a file; on the no-op library, of this rank alone."""
    import ncclpy
    from ncclpy.bootstrap import FileStore, LocalStore

    if setting.communicator is None:
        ncclpy.use(setting.library)
    store = FileStore(f"{setting.store}-group") if setting.store else LocalStore()
    group = ncclpy.ProcessGroup(store, setting.rank, setting.nranks, device=setting.device, timeout=60)
    group.connect()
    setting.keep += [store, group]
    dtype = ncclpy.DataType(FLOAT32)
    send, recv = (ncclpy.Buffer(at, COUNT, dtype, device=setting.device) for at in (setting.send, setting.recv))
    names = {"all_reduce": group.all_reduce, "send": send, "recv": recv, "stream": setting.stream}
    # A prepared buffer has no framework that could be asked for its current stream.
    roads = [
        _road(setting, group, "all_reduce(prepared buffer)", "all_reduce(send, recv, stream=stream)", names),
    ]
    roads[0].result = setting.recv
    pair = arrays.torch_pair(setting)
    if pair is not None:
        names["recv"] = pair[1]
        roads.append(_road(setting, group, "all_reduce(torch tensor), in place", "all_reduce(recv)", names))
        if setting.sync is not None:
            name = "all_reduce(torch tensor), in place, and the stream waits"
            roads.append(_road(setting, group, name, "all_reduce(recv).synchronize(stream)", names))
    return roads


def _road(setting: Setting, group, name: str, call: str, names: dict) -> Road:
    """Return a road that drops its works; what is still running after a sample is not timed."""
    run = timed(setting, call, **names)

    def host(n: int) -> float:
        seconds = run(n)
        group.wait_for_pending_works(60)
        return seconds

    latency = None
    if setting.sync is not None and "synchronize" in call:
        latency = timed(setting, f"{call}; sync()", sync=setting.sync, **names)
    elif setting.sync is not None:
        latency = timed(setting, f"{call}.wait()", **names)
    return Road(name, "all_reduce", host, latency)
