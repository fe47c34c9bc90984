"""ctypes in the style of inference engines' pure-Python wrappers: argtypes declared, pointers from data_ptr()."""

import ctypes
import types

from benchmarks.overhead.road import Road, python_road
from benchmarks.rivals import Missing, arrays
from benchmarks.work.setting import FLOAT32, SUM, Setting

NAME = "ctypes (pynccl style)"


class Wrapper:
    """Call ncclAllReduce through ctypes, from tensors."""

    def __init__(self, library: str, comm: int, dtypes: dict):
        self.function = ctypes.CDLL(library).ncclAllReduce
        self.function.restype = ctypes.c_int
        self.function.argtypes = [
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_void_p,
        ]
        self.comm = ctypes.c_void_p(comm)
        self.dtypes = dtypes

    def check(self, result: int) -> None:
        """Raise for anything but success."""
        if result != 0:
            raise RuntimeError(f"NCCL error {result}")

    def all_reduce(self, send, recv, op: int, stream) -> None:
        """Reduce the tensor `send` into the tensor `recv`."""
        self.check(
            self.function(
                ctypes.c_void_p(send.data_ptr()),
                ctypes.c_void_p(recv.data_ptr()),
                send.numel(),
                self.dtypes[send.dtype],
                op,
                self.comm,
                ctypes.c_void_p(stream.cuda_stream),
            )
        )


def open(setting: Setting) -> list[Road]:
    """Wrap the setting's library and communicator."""
    pair = arrays.torch_pair(setting)
    if pair is None:
        raise Missing("it reduces torch tensors, and there is no torch for this device")
    import torch

    send, recv = pair
    wrapper = Wrapper(setting.library, setting.comm, {torch.float32: FLOAT32})
    stream = torch.cuda.current_stream() if setting.gpu else types.SimpleNamespace(cuda_stream=setting.stream)
    return [
        python_road(
            setting,
            "all_reduce(torch tensor)",
            "all_reduce(send, recv, op, stream)",
            result=recv.data_ptr(),
            all_reduce=wrapper.all_reduce,
            send=send,
            recv=recv,
            op=SUM,
            stream=stream,
        )
    ]
