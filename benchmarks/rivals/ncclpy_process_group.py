"""ncclpy.ProcessGroup: each operation is a work on a stream of the group, behind the stream that produces its input."""

from benchmarks.overhead.road import Road, python_road
from benchmarks.rivals import arrays
from benchmarks.work.setting import COUNT, FLOAT32, Setting

NAME = "ncclpy.ProcessGroup"


def open(setting: Setting) -> list[Road]:
    """Make a group of all ranks, which meet in a file; of this one alone on the no-op library."""
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
    # A prepared buffer names no framework whose current stream could be asked for.
    call = "all_reduce(send, recv, producer=stream)"
    roads = [python_road(setting, "all_reduce(prepared buffer)", call, result=setting.recv, **names)]
    pair = arrays.torch_pair(setting)
    if pair is not None:
        names["recv"] = pair[1]
        roads.append(python_road(setting, "all_reduce(torch tensor), in place", "all_reduce(recv)", **names))
        if setting.sync is not None:
            name = "all_reduce(torch tensor), in place, and the stream waits"
            roads.append(python_road(setting, name, "all_reduce(recv).synchronize(stream)", **names))
    return roads
