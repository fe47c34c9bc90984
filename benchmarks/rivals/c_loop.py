"""The C loop: what a call of NCCL costs without any Python."""

import ctypes
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.overhead.road import GROUP, Road
from benchmarks.work import compiler
from benchmarks.work.setting import COUNT, Setting

NAME = "C loop"


def open(setting: Setting) -> list[Road]:
    """Compile the loop and point it at the setting's library."""
    loop, arguments, keep = _loop(
        setting.library,
        setting.gpu,
        setting.clock is time.thread_time,
        setting.send,
        setting.recv,
        setting.comm,
        setting.stream,
    )
    setting.keep += keep

    def seconds(name, *more):
        function = getattr(loop, name)
        function.restype = ctypes.c_double

        def run(n: int) -> float:
            taken = function(arguments, ctypes.c_long(n), *more)
            if taken < 0:
                raise RuntimeError(f"{name}: NCCL or the driver returned {-taken:.0f}")
            return taken

        return run

    return [
        Road("ncclAllReduce", "all_reduce", seconds("c_loop_host"), seconds("c_loop_latency"), setting.recv),
        Road(
            f"{GROUP} x ncclAllReduce in a group",
            f"group of {GROUP}",
            seconds("c_loop_group", ctypes.c_long(GROUP)),
            result=setting.recv,
            groups=1 / GROUP,
        ),
        Road("ncclGroupStart, ncclGroupEnd", "empty group", seconds("c_loop_empty_group"), reduces=0, groups=1),
    ]


def devices(
    library: str, gpu: bool, comms: list[int], streams: list[int], send: list[int], recv: list[int]
) -> Callable[[int], float]:
    """Return a function that issues n groups of one all-reduce per device, without a wait, and returns the seconds."""
    loop, arguments, keep = _loop(library, gpu, False)
    lists = [(ctypes.c_void_p * len(comms))(*values) for values in (comms, streams, send, recv)]
    loop.c_loop_devices.restype = ctypes.c_double

    def run(n: int, keep: list = keep) -> float:
        taken = loop.c_loop_devices(arguments, ctypes.c_long(n), len(comms), *lists)
        if taken < 0:
            raise RuntimeError(f"c_loop_devices: NCCL returned {-taken:.0f}")
        return taken

    return run


def _loop(library: str, gpu: bool, cpu_time: bool, send=0, recv=0, comm=0, stream=0) -> tuple:
    """Compile the loop for a library; return it, its arguments, and what must live as long."""
    with tempfile.TemporaryDirectory() as folder:
        loop = ctypes.CDLL(str(compiler.build(Path(__file__).with_name("c_loop.c"), Path(folder))))
    nccl = ctypes.CDLL(library)
    driver = ctypes.CDLL("libcuda.so.1") if gpu else nccl
    functions = [nccl.ncclAllReduce, nccl.ncclGroupStart, nccl.ncclGroupEnd, driver.cuStreamSynchronize]
    loop.c_loop_arguments.restype = ctypes.c_void_p
    arguments = ctypes.c_void_p(
        loop.c_loop_arguments(
            *(ctypes.cast(function, ctypes.c_void_p) for function in functions),
            ctypes.c_void_p(send),
            ctypes.c_void_p(recv),
            ctypes.c_size_t(COUNT),
            ctypes.c_void_p(comm),
            ctypes.c_void_p(stream),
            ctypes.c_int(time.CLOCK_THREAD_CPUTIME_ID if cpu_time else time.CLOCK_MONOTONIC),
        )
    )
    return loop, arguments, [loop, nccl, driver]
