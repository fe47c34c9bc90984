"""ncclpy.Communicator: arrays, prepared buffers and groups."""

import copy

from benchmarks.overhead.road import Road, python_group, python_road, timed
from benchmarks.rivals import Missing, arrays, native_tensors
from benchmarks.work.setting import COUNT, FLOAT32, GROUP, Setting

NAME = "ncclpy.Communicator"
OUT_OF_PLACE = "all_reduce(send, recv, stream=stream)"
TENSOR, NATIVE = "torch tensor", "torch tensor, read natively"


def open(setting: Setting) -> list[Road]:
    """Make a communicator, or take the setting's, and a pair of buffers of every kind that it accepts."""
    import ncclpy

    if setting.communicator is None:
        ncclpy.use(setting.library)
    if not hasattr(ncclpy, "Communicator"):
        raise Missing("this ncclpy has no Communicator")
    communicator = setting.communicator or ncclpy.Communicator.init(1, 0, ncclpy.get_unique_id(), device=0)
    setting.keep.append(communicator)
    return roads(ncclpy, communicator, setting)


def roads(ncclpy, communicator, setting: Setting) -> list[Road]:
    """Return the roads through `communicator`, for every kind of buffer and stream."""
    pairs = _pairs(ncclpy, setting)
    natively = native_tensors.reading(setting) if TENSOR in pairs else None
    if natively is not None:
        pairs[NATIVE] = pairs[TENSOR]
    all_reduce = communicator.all_reduce
    found = []
    for kind, (send, recv, pointer) in pairs.items():
        names = {"all_reduce": all_reduce, "send": send, "recv": recv, "stream": setting.stream}
        roads = [python_road(setting, f"all_reduce({kind})", OUT_OF_PLACE, result=pointer, **names)]
        if kind != "int tuple":
            name = f"all_reduce({kind}), in place"
            roads.append(python_road(setting, name, "all_reduce(recv, stream=stream)", **names))
        if kind != "int tuple" and (setting.sync is None or kind != "prepared buffer"):
            # With a real engine, a prepared buffer would use the default stream, which no wait here covers.
            name = f"all_reduce({kind}), stream=None"
            roads.append(python_road(setting, name, "all_reduce(send, recv)", result=pointer, **names))
        found += map(natively, roads) if kind == NATIVE else roads
    stream = ncclpy.Stream(setting.device)
    send, recv, _ = pairs["prepared buffer"]
    found.append(
        python_road(
            setting,
            "all_reduce(prepared buffer), stream=ncclpy.Stream",
            OUT_OF_PLACE,
            sync=stream.synchronize if setting.sync else None,
            all_reduce=all_reduce,
            send=send,
            recv=recv,
            stream=stream,
        )
    )
    for kind in ("prepared buffer", TENSOR, NATIVE, "numpy array"):
        if kind in pairs:
            send, _, pointer = pairs[kind]
            road = python_group(
                setting,
                f"all_reduce({kind}) in group()",
                OUT_OF_PLACE,
                result=pointer,
                group=ncclpy.group,
                all_reduce=all_reduce,
                send=send,
                recvs=_outputs(ncclpy, setting, pairs, kind),
                stream=setting.stream,
            )
            found.append(natively(road) if kind == NATIVE else road)
    setting.notes.append(f"{NAME}: a group is sent to NCCL when it ends; an empty one makes no call of the library.")
    empty = timed(setting, "with group(): pass", group=ncclpy.group)
    found.append(Road("with group(): pass", "empty group", empty, reduces=0, groups=0))
    return found


def _outputs(ncclpy, setting: Setting, pairs: dict, kind: str) -> list:
    """Return `GROUP` receive buffers, the pair's first: no two calls of a group write the same memory."""
    if kind == "prepared buffer":
        dtype = ncclpy.DataType(FLOAT32)
        return [ncclpy.Buffer(setting.recv + 4 * COUNT * i, COUNT, dtype, device=setting.device) for i in range(GROUP)]
    recv = pairs[kind][1]
    return [recv, *(copy.deepcopy(recv) for _ in range(GROUP - 1))]


def _pairs(ncclpy, setting: Setting) -> dict:
    """Return ``{kind: (send, recv, pointer of recv)}``."""
    dtype = ncclpy.DataType(FLOAT32)
    pairs = {
        "prepared buffer": (
            ncclpy.Buffer(setting.send, COUNT, dtype, device=setting.device),
            ncclpy.Buffer(setting.recv, COUNT, dtype, device=setting.device),
            setting.recv,
        ),
        "int tuple": ((setting.send, COUNT, dtype), (setting.recv, COUNT, dtype), setting.recv),
    }
    torch = arrays.torch_pair(setting)
    if torch is not None:
        pairs[TENSOR] = (*torch, torch[1].data_ptr())
    cupy = arrays.cupy_pair(setting)
    if cupy is not None:
        pairs["cupy array"] = (*cupy, cupy[1].data.ptr)
    if not setting.gpu:
        import numpy

        numpy_pair = numpy.ones(COUNT, numpy.float32), numpy.zeros(COUNT, numpy.float32)
        pairs["numpy array"] = (*numpy_pair, numpy_pair[1].ctypes.data)
    return pairs
