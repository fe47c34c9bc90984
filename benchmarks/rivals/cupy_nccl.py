"""cupy.cuda.nccl: CuPy's binding, ints only, on a communicator of its own."""

import importlib.util

from benchmarks.overhead.road import Road, python_road
from benchmarks.rivals import Missing, arrays
from benchmarks.work.setting import COUNT, FLOAT32, SUM, Setting

NAME = "cupy.cuda.nccl"


def open(setting: Setting) -> list[Road]:
    """Make a CuPy communicator of the same ranks."""
    if importlib.util.find_spec("cupy") is None:
        raise Missing("CuPy is not installed")
    if not setting.gpu:
        raise Missing("CuPy needs a GPU to make a communicator")
    try:
        import cupy
        from cupy.cuda import nccl
    except ImportError as error:
        raise Missing(f"this CuPy has no NCCL: {error}") from None
    arrays.cupy_pair(setting)  # the device and the stream become CuPy's
    unique_id = setting.ids.pop(0)
    if int(cupy.__version__.partition(".")[0]) < 14:  # older releases take a tuple of signed chars
        unique_id = tuple(byte - 256 if byte > 127 else byte for byte in unique_id)
    communicator = nccl.NcclCommunicator(setting.nranks, unique_id, setting.rank)
    setting.keep.append(communicator)
    return [
        python_road(
            setting,
            "allReduce(ints)",
            "all_reduce(send, recv, count, dtype, op, stream)",
            result=setting.recv,
            all_reduce=communicator.allReduce,
            send=setting.send,
            recv=setting.recv,
            count=COUNT,
            dtype=FLOAT32,
            op=SUM,
            stream=setting.stream,
        )
    ]
