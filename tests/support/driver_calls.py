"""The CUDA driver calls of ``driver_abi.h`` through ctypes, for tests; every result but success raises.

pytest is imported only where it is needed, as its import takes half of the start-up time of a process that uses this.
"""

import ctypes
import functools
import os
import re
import threading

from paths import ROOT

PATH = os.environ.get("NCCLPY_TEST_DRIVER")
REAL_DRIVER = PATH is not None
if PATH is None:
    from ncclpy.core.runtime.search import host_engine_path

    PATH = host_engine_path()

INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED, NO_DEVICE, INVALID_DEVICE = 1, 2, 3, 100, 101
INVALID_CONTEXT, INVALID_HANDLE, NOT_READY, NOT_PERMITTED = 201, 400, 600, 800

NON_BLOCKING, DISABLE_TIMING = 1, 2
LEGACY, PER_THREAD = 1, 2
HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

_HEADER = (ROOT / "ncclpy/abi/driver_abi.h").read_text()
NAMES = re.findall(r"^  X\(CUresult, (\w+),", _HEADER, re.MULTILINE)

_VALUES = {
    "int": ctypes.c_int,
    "size_t": ctypes.c_size_t,
    "unsigned int": ctypes.c_uint,
    "unsigned char": ctypes.c_ubyte,
    "CUresult": ctypes.c_int,
    "CUdevice": ctypes.c_int,
    "CUdevice_attribute": ctypes.c_int,
    "CUpointer_attribute": ctypes.c_int,
    "CUdeviceptr": ctypes.c_ulonglong,
    "CUhostFn": HostFunction,
}


def argument_types(parameters, values):
    """Return the ctypes types of a C prototype's parameters; types not in `values` are handles or pointers."""
    if parameters == "void":
        return []
    types = [re.match(r"(.*?[* ])\w+$", parameter.strip()).group(1).strip() for parameter in parameters.split(",")]
    return [values.get(kind, ctypes.c_void_p) for kind in types]


def _parameters(name):
    return re.search(rf"X\(CUresult, {name}, \((.*?)\)\)", _HEADER).group(1)


class DriverError(Exception):
    def __init__(self, name, code):
        super().__init__(f"{name} returned {code}")
        self.code = code


class Driver:
    """Every driver call as a method that raises `DriverError`."""

    def __init__(self, path):
        self.library = ctypes.CDLL(path)
        self.kept = []  # callbacks must outlive their streams' work
        for name in NAMES:
            getattr(self.library, name).argtypes = argument_types(_parameters(name), _VALUES)

    def __getattr__(self, name):
        function = getattr(self.library, name)

        def call(*arguments):
            code = function(*arguments)
            if code != 0:
                raise DriverError(name, code)

        return call

    def get(self, name, kind, *arguments):
        """Call a function with the result, of a ctypes type, as its first parameter; return the result."""
        value = kind()
        getattr(self, name)(ctypes.byref(value), *arguments)
        return value.value

    def text(self, name, code):
        """Call cuGetErrorName or cuGetErrorString."""
        value = ctypes.c_char_p()
        getattr(self, name)(code, ctypes.byref(value))
        return value.value.decode()

    def use(self, device):
        self.cuCtxSetCurrent(self.get("cuDevicePrimaryCtxRetain", ctypes.c_void_p, device))

    def stream(self, flags=0):
        return self.get("cuStreamCreateWithPriority", ctypes.c_void_p, flags, 0)

    def event(self, flags=0):
        return self.get("cuEventCreate", ctypes.c_void_p, flags)

    def alloc(self, nbytes):
        return self.get("cuMemAlloc_v2", ctypes.c_ulonglong, nbytes)

    def pinned(self, nbytes):
        return self.get("cuMemHostAlloc", ctypes.c_void_p, nbytes, 0)

    def ready(self, name, handle):
        """Return whether cuStreamQuery or cuEventQuery reports completion."""
        code = getattr(self.library, name)(handle)
        if code not in (0, NOT_READY):
            raise DriverError(name, code)
        return code == 0

    def later(self, stream, function):
        """Have a stream call a Python function."""
        callback = HostFunction(lambda _: function())
        self.kept.append(callback)
        self.cuLaunchHostFunc(stream, callback, None)


class Gate:
    """Hold up a stream until `open` is called."""

    def __init__(self, driver, stream):
        self._reached, self._opened = threading.Event(), threading.Event()
        driver.later(stream, self._wait)

    def _wait(self):
        self._reached.set()
        assert self._opened.wait(60), "the gate was never opened"

    def reached(self):
        assert self._reached.wait(60), "the stream never came to the gate"

    def open(self):
        self._opened.set()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.open()


@functools.cache
def opened():
    """Return the driver under test, initialised."""
    driver = Driver(PATH)
    driver.cuInit(0)
    return driver


def refused(code, call, *arguments):
    import pytest

    with pytest.raises(DriverError) as error:
        call(*arguments)
    assert error.value.code == code, error.value


def in_thread(function, *arguments):
    thread = threading.Thread(target=function, args=arguments)
    thread.start()
    return thread


def joined(thread):
    thread.join(60)
    return not thread.is_alive()
