"""ncclpy.Communicator with Config(blocking=False): the library polls until the operation is issued."""

from benchmarks.overhead.road import Road, python_road
from benchmarks.rivals import Missing, arrays
from benchmarks.work.setting import COUNT, FLOAT32, Setting

NAME = "ncclpy.Communicator, nonblocking"
CALL = "all_reduce(send, recv, stream=stream)"


def open(setting: Setting) -> list[Road]:
    """Make a nonblocking communicator of its own and wait until it is ready."""
    import ncclpy

    return roads(setting, config=ncclpy.Config(blocking=False))


def roads(setting: Setting, **options) -> list[Road]:
    """Make a communicator of its own with these options, and return its roads once it is ready."""
    import ncclpy

    if setting.communicator is None:
        ncclpy.use(setting.library)
    if not hasattr(ncclpy, "Communicator"):
        raise Missing("this ncclpy has no Communicator")
    unique_id = ncclpy.UniqueId.from_bytes(setting.ids.pop(0)) if setting.ids else ncclpy.get_unique_id()
    communicator = ncclpy.Communicator.init(
        setting.nranks, setting.rank, unique_id, device=setting.device, **options
    ).wait_ready(60)
    setting.keep.append(communicator)
    dtype = ncclpy.DataType(FLOAT32)
    names = {"all_reduce": communicator.all_reduce, "stream": setting.stream}
    found = [
        python_road(
            setting,
            "all_reduce(prepared buffer)",
            CALL,
            result=setting.recv,
            send=ncclpy.Buffer(setting.send, COUNT, dtype, device=setting.device),
            recv=ncclpy.Buffer(setting.recv, COUNT, dtype, device=setting.device),
            **names,
        )
    ]
    pair = arrays.torch_pair(setting)
    if pair is not None:
        send, recv = pair
        found.append(
            python_road(
                setting,
                "all_reduce(torch tensor)",
                CALL,
                result=recv.data_ptr(),
                send=send,
                recv=recv,
                **names,
            )
        )
    return found
