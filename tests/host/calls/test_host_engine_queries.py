"""Queries of communicators and of the engine: properties, teams, parameters; the missing device side."""

import ctypes
import subprocess
import sys

import pytest
from host_checks import refused
from nccl_calls import INVALID_ARGUMENT, INVALID_USAGE, MAGIC, VERSION

from ncclpy.core.runtime.search import host_engine_path


class Properties(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("rank", ctypes.c_int),
        ("nRanks", ctypes.c_int),
        ("cudaDev", ctypes.c_int),
        ("nvmlDev", ctypes.c_int),
        ("deviceApiSupport", ctypes.c_bool),
        ("multimemSupport", ctypes.c_bool),
        ("ginType", ctypes.c_int),
        ("nLsaTeams", ctypes.c_int),
        ("hostRmaSupport", ctypes.c_bool),
        ("railedGinType", ctypes.c_int),
        ("commHash", ctypes.c_uint64),
        ("rest", ctypes.c_ubyte * 96),
    ]


class Team(ctypes.Structure):
    _fields_ = [("nRanks", ctypes.c_int), ("rank", ctypes.c_int), ("stride", ctypes.c_int)]

    def values(self):
        return self.nRanks, self.rank, self.stride


def test_properties(nccl, comms):
    hashes = set()
    for rank, comm in enumerate(comms):
        properties = Properties(ctypes.sizeof(Properties), MAGIC, VERSION)
        nccl.ncclCommQueryProperties(comm, ctypes.byref(properties))
        assert (properties.rank, properties.nRanks, properties.cudaDev) == (rank, 4, rank)
        assert (properties.deviceApiSupport, properties.multimemSupport) == (False, False)
        assert (properties.nLsaTeams, properties.hostRmaSupport) == (1, True)
        hashes.add(properties.commHash)
    assert len(hashes) == 1 and hashes != {0}


def test_properties_of_an_older_caller_are_not_written_beyond(nccl, comms):
    properties = Properties(Properties.ginType.offset, MAGIC, 22902)
    properties.ginType = 77
    nccl.ncclCommQueryProperties(comms[2], ctypes.byref(properties))
    assert (properties.rank, properties.ginType) == (2, 77)


def test_properties_with_invalid_arguments_are_refused(nccl, comms):
    refused(INVALID_USAGE, "INITIALIZER", nccl.ncclCommQueryProperties, comms[0], ctypes.byref(Properties()))
    refused(INVALID_ARGUMENT, "props", nccl.ncclCommQueryProperties, comms[0], None)
    refused(INVALID_ARGUMENT, "comm", nccl.ncclCommQueryProperties, None, None)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ncclTeamWorld", (4, 2, 1)),
        ("ncclTeamLsa", (4, 2, 1)),
        ("ncclTeamRail", (1, 0, 4)),
        ("ncclTeamCftMultimem", (1, 0, 1)),
    ],
)
def test_teams(nccl, comms, name, expected):
    function = getattr(nccl.library, name)
    function.restype = Team
    assert function(ctypes.c_void_p(comms[2])).values() == expected
    assert function(None).values() == (0, 0, 0)
    assert name in nccl.last_error()


def test_team_ranks_map_to_world_ranks(nccl, comms):
    library = nccl.library
    for name in ("ncclTeamRankToWorld", "ncclTeamRankToLsa"):
        function = getattr(library, name)
        function.argtypes = [ctypes.c_void_p, Team, ctypes.c_int]
        assert [function(comms[2], Team(4, 2, 1), rank) for rank in range(4)] == [0, 1, 2, 3]
        assert function(comms[2], Team(2, 1, 2), 0) == 0  # every second rank: 0 and 2
        assert function(None, Team(4, 2, 1), 0) == -1


def bind(nccl, key):
    handle = ctypes.c_void_p()
    nccl.ncclParamBind(ctypes.byref(handle), key)
    return handle


def test_parameters_by_handle(nccl):
    number = ctypes.c_int32()
    devices = bind(nccl, b"NCCLPY_HOST_DEVICES")
    nccl.ncclParamGetI32(devices, ctypes.byref(number))
    assert number.value == nccl.driver.get("cuDeviceGetCount", ctypes.c_int)
    raw, length = ctypes.c_int32(), ctypes.c_int()
    nccl.ncclParamGet(devices, ctypes.byref(raw), 4, ctypes.byref(length))
    assert (raw.value, length.value) == (number.value, 4)
    refused(
        INVALID_ARGUMENT, "takes 4 bytes, there is space for 3", nccl.ncclParamGet, devices, ctypes.byref(raw), 3, None
    )
    refused(
        INVALID_ARGUMENT, "signed integer of 32 bits", nccl.ncclParamGetU64, devices, ctypes.byref(ctypes.c_uint64())
    )
    refused(INVALID_ARGUMENT, "is a text", nccl.ncclParamGetI32, bind(nccl, b"NCCLPY_FAULTS"), ctypes.byref(number))
    refused(INVALID_ARGUMENT, 'no parameter "NCCL_ALGO"', bind, nccl, b"NCCL_ALGO")
    refused(INVALID_ARGUMENT, "is not a handle", nccl.ncclParamGetI32, ctypes.c_void_p(64), ctypes.byref(number))
    text = ctypes.c_char_p()
    nccl.ncclParamGetStr(bind(nccl, b"NCCLPY_FAULTS"), ctypes.byref(text))
    assert text.value == b""


def test_parameters_by_key(nccl):
    table, length = ctypes.POINTER(ctypes.c_char_p)(), ctypes.c_int()
    nccl.ncclParamGetAllParameterKeys(ctypes.byref(table), ctypes.byref(length))
    keys = [table[i] for i in range(length.value)]
    engines = ("ABORT_CORRUPTS", "CHECKS", "DEVICES", "ENCRYPTION", "READ_PEERS", "STRICT_ENDS")
    assert keys == [b"NCCLPY_FAULTS", *(f"NCCLPY_HOST_{name}".encode() for name in engines)]
    value = ctypes.c_char_p()
    for key in keys:
        nccl.ncclParamGetParameter(key, ctypes.byref(value), ctypes.byref(length))
        assert len(value.value) == length.value
    refused(INVALID_ARGUMENT, '"x"', nccl.ncclParamGetParameter, b"x", ctypes.byref(value), ctypes.byref(length))
    assert (value.value, length.value) == (None, 0)


def test_parameters_are_dumped():
    program = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).ncclParamDumpAll()"
    done = subprocess.run(
        [sys.executable, "-c", program, host_engine_path()], capture_output=True, text=True, check=True
    )
    assert "NCCLPY_HOST_ENCRYPTION=0\n" in done.stdout


class Encryption(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("mode", ctypes.c_int),
        ("psk", ctypes.c_char_p),
    ]


def test_encryption_is_checked_and_reported(nccl):
    def request(mode, psk=None, magic=MAGIC):
        nccl.ncclSetEncryption(ctypes.byref(Encryption(ctypes.sizeof(Encryption), magic, VERSION, mode, psk)))

    def reported():
        value, length = ctypes.c_char_p(), ctypes.c_int()
        nccl.ncclParamGetParameter(b"NCCLPY_HOST_ENCRYPTION", ctypes.byref(value), ctypes.byref(length))
        return value.value

    refused(INVALID_ARGUMENT, "config", nccl.ncclSetEncryption, None)
    refused(INVALID_ARGUMENT, "INITIALIZER", request, 0, None, 1)
    refused(INVALID_ARGUMENT, "unknown mode 2", request, 2)
    refused(INVALID_ARGUMENT, "needs a key", request, 1)
    request(1, b"secret")
    assert reported() == b"1"
    request(0)
    assert reported() == b"0"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("ncclDevCommCreate", 3),
        ("ncclDevCommDestroy", 2),
        ("ncclGetLsaMultimemDevicePointer", 3),
        ("ncclGetMultimemDeviceLeInfo", 4),
        ("ncclGetPeerDeviceLeInfo", 5),
    ],
)
def test_device_side_calls_are_refused(nccl, name, arguments):
    function = getattr(nccl.library, name)
    function.argtypes = None
    assert function(*[None] * arguments) == INVALID_USAGE
    assert name in nccl.last_error() and "runs on a GPU" in nccl.last_error()
