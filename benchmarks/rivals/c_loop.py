"""The C loop: what a call of NCCL costs without any Python."""

import ctypes
import tempfile
import time
from pathlib import Path

from benchmarks import compiler
from benchmarks.road import GROUP, Road
from benchmarks.setting import COUNT, Setting

NAME = "C loop"


def open(setting: Setting) -> list[Road]:
    """Compile the loop and point it at the setting's library."""
    with tempfile.TemporaryDirectory() as folder:
        loop = ctypes.CDLL(str(compiler.build(Path(__file__).with_name("c_loop.c"), Path(folder))))
    nccl = ctypes.CDLL(setting.library)
    driver = ctypes.CDLL("libcuda.so.1") if setting.gpu else nccl
    functions = [nccl.ncclAllReduce, nccl.ncclGroupStart, nccl.ncclGroupEnd, driver.cuStreamSynchronize]
    loop.c_loop_arguments.restype = ctypes.c_void_p
    arguments = ctypes.c_void_p(
        loop.c_loop_arguments(
            *(ctypes.cast(function, ctypes.c_void_p) for function in functions),
            ctypes.c_void_p(setting.send),
            ctypes.c_void_p(setting.recv),
            ctypes.c_size_t(COUNT),
            ctypes.c_void_p(setting.comm),
            ctypes.c_void_p(setting.stream),
            ctypes.c_int(time.CLOCK_THREAD_CPUTIME_ID if setting.clock is time.thread_time else time.CLOCK_MONOTONIC),
        )
    )
    setting.keep += [loop, nccl, driver]

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
