"""NCCL's host functions through ctypes, for tests of the host engine; every result but success raises."""

import ctypes
import re
from pathlib import Path

from driver_calls import Driver, argument_types

import ncclpy.abi

SUCCESS, UNHANDLED_CUDA, SYSTEM, INTERNAL, INVALID_ARGUMENT, INVALID_USAGE, REMOTE, IN_PROGRESS = range(8)
SUM, PROD, MAX, MIN, AVG = range(5)
SCALAR_DEVICE, SCALAR_HOST = 0, 1
NO_COLOR = -1
UNDEFINED = -(2**31)
MAGIC = 0xCAFEBEEF
VERSION = 23203

HEADER = Path(ncclpy.abi.__file__).with_name("nccl_abi.h").read_text().replace("\\\n", "")
NAMES = re.findall(r"  X\(\d+, [\w ]+\*?, (\w+),", HEADER)


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_ubyte * 128)]


class Config(ctypes.Structure):
    """The newest ncclConfig_t, with the values of NCCL's initialiser."""

    _fields_ = [("size", ctypes.c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint)] + [
        (name, ctypes.c_char_p if name in ("netName", "commName") else ctypes.c_int)
        for name in re.findall(
            r"^  (?:int|const char\*) (\w+); +/\* 2\.", HEADER[: HEADER.index("} ncclConfig_t;")], re.MULTILINE
        )
    ]

    def __init__(self, **values):
        super().__init__()
        self.size, self.magic, self.version = ctypes.sizeof(Config), MAGIC, VERSION
        for name, kind in self._fields_[3:]:
            setattr(self, name, values.pop(name, UNDEFINED if kind is ctypes.c_int else None))
        for name, value in values.items():
            setattr(self, name, value)


class CollConfig(ctypes.Structure):
    """The newest ncclCollConfig_t, with the values of NCCL's initialiser."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("ext", ctypes.c_void_p),
        ("minCTAs", ctypes.c_int),
        ("maxCTAs", ctypes.c_int),
        ("nvlsCTAs", ctypes.c_int),
        ("cgaClusterSize", ctypes.c_int),
        ("algSelection", ctypes.c_char_p),
        ("forceAlgSelection", ctypes.c_int),
        ("CTAPolicy", ctypes.c_int),
        ("userProfilerTag", ctypes.c_uint64),
        ("launchCompletionEvent", ctypes.c_void_p),
    ]

    def __init__(self, **values):
        super().__init__(size=ctypes.sizeof(CollConfig), magic=MAGIC, version=VERSION, forceAlgSelection=1)
        self.minCTAs = self.maxCTAs = self.nvlsCTAs = self.cgaClusterSize = self.CTAPolicy = UNDEFINED
        for name, value in values.items():
            setattr(self, name, value)


class SimInfo(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("estimatedTime", ctypes.c_float),
    ]

    def __init__(self, magic=0x74685283):
        super().__init__(ctypes.sizeof(SimInfo), magic, VERSION, -1.0)


_VALUES = {
    "size_t": ctypes.c_size_t,
    "int": ctypes.c_int,
    "unsigned int": ctypes.c_uint,
    "ncclDataType_t": ctypes.c_int,
    "ncclRedOp_t": ctypes.c_int,
    "ncclScalarResidence_t": ctypes.c_int,
    "ncclResult_t": ctypes.c_int,
    "ncclUniqueId": UniqueId,
}


def _parameters(name):
    return re.search(rf"X\(\d+, [\w ]+\*?, {name}, +\((.*?)\)\)", HEADER).group(1)


class NcclError(Exception):
    def __init__(self, name, code, text):
        super().__init__(f"{name} returned {code}: {text}")
        self.code = code
        self.text = text


class Nccl:
    """Every exported function as a method that raises `NcclError`, and the driver calls as `driver`."""

    def __init__(self, path):
        self.driver = Driver(path)
        self.driver.cuInit(0)
        self.library = self.driver.library
        self.names = [name for name in NAMES if hasattr(self.library, name)]
        for name in self.names:
            getattr(self.library, name).argtypes = argument_types(_parameters(name), _VALUES)
        for name in ("ncclGetErrorString", "ncclGetLastError"):
            getattr(self.library, name).restype = ctypes.c_char_p

    def __getattr__(self, name):
        function = getattr(self.library, name)

        def call(*arguments):
            code = function(*arguments)
            if code not in (SUCCESS, IN_PROGRESS):
                raise NcclError(name, code, self.library.ncclGetLastError(None).decode())
            return code

        return call

    def unique_id(self):
        value = UniqueId()
        self.ncclGetUniqueId(ctypes.byref(value))
        return bytes(value)

    def init(self, nranks, uid, rank, config=None):
        """Return the communicator of `rank` on the current device."""
        comm = ctypes.c_void_p()
        self.init_into(comm, nranks, uid, rank, config)
        return comm.value

    def init_into(self, comm, nranks, uid, rank, config=None):
        """As `init`, but write into the caller's c_void_p, which another thread may read."""
        pointer = None if config is None else ctypes.byref(config)
        uid = UniqueId.from_buffer_copy(uid)
        return self.ncclCommInitRankConfig(ctypes.byref(comm), nranks, uid, rank, pointer)

    def init_all(self, nranks):
        comms = (ctypes.c_void_p * nranks)()
        self.ncclCommInitAll(comms, nranks, None)
        return list(comms)

    def split(self, comm, color, key, config=None):
        child = ctypes.c_void_p()
        self.ncclCommSplit(comm, color, key, ctypes.byref(child), None if config is None else ctypes.byref(config))
        return child.value

    def get(self, name, comm):
        """Call ncclCommCount or a similar function and return the result."""
        value = ctypes.c_int()
        getattr(self, name)(comm, ctypes.byref(value))
        return value.value

    def async_error(self, comm):
        return self.get("ncclCommGetAsyncError", comm)

    def last_error(self, comm=None):
        return self.library.ncclGetLastError(comm).decode()
