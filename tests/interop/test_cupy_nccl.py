"""The interface of cupy.cuda.nccl, on the host engine with addresses of numpy's arrays; a stand-in replaces CuPy."""

from __future__ import annotations

import gc
import inspect
import logging
import pickle
import re
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
from foreign_stores import free_port

import ncclpy
import testing
from ncclpy.interop import cupy_nccl as nccl
from ncclpy.interop import dropped

pytestmark = pytest.mark.usefixtures("host_engine")

#: Functions of cupy_backends/cuda/libs/nccl.pyx and .pxd of CuPy 14.2, with the names of their parameters.
FUNCTIONS = {
    "check_status": "status",
    "get_build_version": "",
    "get_unique_id": "",
    "get_version": "",
    "groupEnd": "",
    "groupStart": "",
    "NcclConfig": "split_share=0",
    "NcclCommunicator": "ndev, commId, rank, config=None",
    "NcclCommunicator.initAll": "devices",
    "NcclCommunicator._initAll": "comms, ndev, devlist=None",
    "NcclCommunicator.abort": "self",
    "NcclCommunicator.allGather": "self, sendbuf, recvbuf, count, datatype, stream",
    "NcclCommunicator.allReduce": "self, sendbuf, recvbuf, count, datatype, op, stream",
    "NcclCommunicator.bcast": "self, buff, count, datatype, root, stream",
    "NcclCommunicator.broadcast": "self, sendbuff, recvbuff, count, datatype, root, stream",
    "NcclCommunicator.check_async_error": "self",
    "NcclCommunicator.commSplit": "self, color, key, config=None",
    "NcclCommunicator.destroy": "self",
    "NcclCommunicator.device_id": "self",
    "NcclCommunicator.rank_id": "self",
    "NcclCommunicator.recv": "self, recvbuf, count, datatype, peer, stream",
    "NcclCommunicator.reduce": "self, sendbuf, recvbuf, count, datatype, op, root, stream",
    "NcclCommunicator.reduceScatter": "self, sendbuf, recvbuf, recvcount, datatype, op, stream",
    "NcclCommunicator.send": "self, sendbuf, count, datatype, peer, stream",
    "NcclCommunicator.size": "self",
}
CONSTANTS = {
    "NCCL_SUM": 0, "NCCL_PROD": 1, "NCCL_MAX": 2, "NCCL_MIN": 3, "NCCL_AVG": 4,
    "NCCL_INT8": 0, "NCCL_CHAR": 0, "NCCL_UINT8": 1, "NCCL_INT32": 2, "NCCL_INT": 2, "NCCL_UINT32": 3,
    "NCCL_INT64": 4, "NCCL_UINT64": 5, "NCCL_FLOAT16": 6, "NCCL_HALF": 6, "NCCL_FLOAT32": 7, "NCCL_FLOAT": 7,
    "NCCL_FLOAT64": 8, "NCCL_DOUBLE": 8, "NCCL_BFLOAT16": 9,
}  # fmt: skip
STATUSES = {
    1: "NCCL_ERROR_UNHANDLED_CUDA_ERROR",
    2: "NCCL_ERROR_SYSTEM_ERROR",
    3: "NCCL_ERROR_INTERNAL_ERROR",
    4: "NCCL_ERROR_INVALID_ARGUMENT",
    5: "NCCL_ERROR_INVALID_USAGE",
    6: "NCCL_ERROR_REMOTE_ERROR",
}


def named(path):
    value = nccl
    for part in path.split("."):
        value = inspect.getattr_static(value, part)
    return getattr(value, "__func__", value)


@pytest.mark.parametrize("path", FUNCTIONS)
def test_names_and_parameters_are_cupys(path):
    parameters = inspect.signature(named(path)).parameters.values()
    written = [each.name + ("" if each.default is each.empty else f"={each.default!r}") for each in parameters]
    assert ", ".join(written) == FUNCTIONS[path]
    assert all(each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters)


def test_constants_are_cupys_and_nothing_else_is_public():
    ours = {name: value for name, value in vars(nccl).items() if name.startswith("NCCL_")}
    assert ours == CONSTANTS and all(type(value) is int for value in ours.values())
    assert nccl.available is True
    own = {"InPlace", "use"}
    tops = {path for path in FUNCTIONS if "." not in path}
    assert set(nccl.__all__) == own | tops | set(CONSTANTS) | {"NcclError", "available"}
    methods = {name for name in vars(nccl.NcclCommunicator) if not name.startswith("_")}
    assert methods == {path.partition(".")[2] for path in FUNCTIONS if "." in path and "._" not in path} | {"comm"}


def test_cupys_own_extension_has_these_names():
    theirs = pytest.importorskip("cupy.cuda.nccl")
    if not theirs.available:
        pytest.skip("CuPy has found no NCCL")
    assert {name: getattr(theirs, name) for name in CONSTANTS} == CONSTANTS
    for path, expected in FUNCTIONS.items():
        value = theirs
        for part in path.split("."):
            value = getattr(value, part)
        written = re.search(r"\((.*?)\)", (value.__doc__ or "").partition("\n")[0])
        if written:  # Cython's signature line, with types
            names = [re.split("[:=]", each.strip())[0].split()[-1] for each in written[1].split(",") if each.strip()]
            wanted = [each.partition("=")[0] for each in expected.split(", ") if each]
            assert [name for name in names if name != "self"] == [name for name in wanted if name != "self"], path


def test_versions():
    assert nccl.get_version() == nccl.get_build_version() == 23203


@pytest.fixture
def comms():
    made = nccl.NcclCommunicator.initAll(3)
    yield made
    for comm in made:
        comm.destroy()


def in_group(comms, call):
    nccl.groupStart()
    for comm in comms:
        call(comm)
    nccl.groupEnd()
    for comm in comms:
        ncclpy.synchronize(comm.device_id(), 20)


def pointers(arrays):
    return [array.ctypes.data for array in arrays]


def test_rank_size_device_and_handle_of_a_communicator(comms):
    assert [comm.rank_id() for comm in comms] == [comm.device_id() for comm in comms] == [0, 1, 2]
    assert [comm.size() for comm in comms] == [3] * 3
    assert all(comm.comm for comm in comms) and len({comm.comm for comm in comms}) == 3
    for comm in comms:
        comm.check_async_error()


def test_reductions(comms):
    given = [np.arange(6, dtype=np.int64) + 10 * rank for rank in range(3)]
    sent, taken = pointers(given), [np.zeros(6, np.int64) for _ in comms]
    received = pointers(taken)

    def all_reduce(comm):
        rank = comm.rank_id()
        comm.allReduce(sent[rank], received[rank], 6, nccl.NCCL_INT64, nccl.NCCL_SUM, 0)

    in_group(comms, all_reduce)
    assert all((each == sum(given)).all() for each in taken)

    def reduce(comm):
        rank = comm.rank_id()
        comm.reduce(sent[rank], received[1] if rank == 1 else 0, 6, nccl.NCCL_INT64, nccl.NCCL_MAX, 1, 0)

    in_group(comms, reduce)
    assert (taken[1] == given[2]).all() and (taken[0] == sum(given)).all()

    def reduce_scatter(comm):
        rank = comm.rank_id()
        comm.reduceScatter(sent[rank], received[rank], 2, nccl.NCCL_INT64, nccl.NCCL_PROD, 0)

    in_group(comms, reduce_scatter)
    product = given[0] * given[1] * given[2]
    assert [each[:2].tolist() for each in taken] == product.reshape(3, 2).tolist()


def test_moves(comms):
    given = [np.full(4, rank + 1.0, np.float32) for rank in range(3)]
    taken = [np.zeros(12, np.float32) for _ in comms]
    sent, received = pointers(given), pointers(taken)
    in_group(comms, lambda comm: comm.allGather(sent[comm.rank_id()], received[comm.rank_id()], 4, nccl.NCCL_FLOAT, 0))
    assert all(each.tolist() == [1] * 4 + [2] * 4 + [3] * 4 for each in taken)

    def broadcast(comm):
        rank = comm.rank_id()
        comm.broadcast(sent[2] if rank == 2 else 0, received[rank], 4, nccl.NCCL_FLOAT32, 2, 0)

    in_group(comms, broadcast)
    assert all(each[:5].tolist() == [3, 3, 3, 3, 2] for each in taken)
    in_group(comms, lambda comm: comm.bcast(sent[comm.rank_id()], 4, nccl.NCCL_FLOAT32, 1, 0))
    assert all(each.tolist() == [2] * 4 for each in given)

    def ring(comm):
        rank = comm.rank_id()
        comm.send(sent[rank], 4, nccl.NCCL_FLOAT32, (rank + 1) % 3, 0)
        comm.recv(received[rank], 4, nccl.NCCL_FLOAT32, (rank - 1) % 3, 0)

    given[0][:], given[1][:], given[2][:] = 7, 8, 9
    in_group(comms, ring)
    assert [each[0] for each in taken] == [9, 7, 8]


def test_stream_is_used(comms):
    """The stream is an address, which CuPy's streams have in `ptr`."""
    arrays = [np.ones(3) for _ in comms]
    streams = [ncclpy.Stream(comm.device_id()) for comm in comms]
    nccl.groupStart()
    for comm, array, stream in zip(comms, arrays, streams, strict=True):
        address = array.ctypes.data
        comm.allReduce(address, address, 3, nccl.NCCL_FLOAT64, nccl.NCCL_SUM, stream.handle)
    nccl.groupEnd()
    for stream in streams:
        stream.synchronize(20)
        stream.close()
    assert all((array == 3).all() for array in arrays)
    with pytest.raises(TypeError):
        comms[0].bcast(arrays[0].ctypes.data, 3, nccl.NCCL_FLOAT64, 0, None)


def test_ranks_in_threads_and_split():
    unique_id = nccl.get_unique_id()
    assert type(unique_id) is bytes and len(unique_id) == 128

    def body(rank):
        with ncclpy.core.runtime.device.using(rank.rank):
            comm = nccl.NcclCommunicator(3, unique_id, rank.rank, nccl.NcclConfig(split_share=1))
            part = comm.commSplit(color=rank.rank % 2, key=-rank.rank)
            array = np.array([10 + rank.rank], np.int8)
            part.allReduce(array.ctypes.data, array.ctypes.data, 1, nccl.NCCL_INT8, nccl.NCCL_SUM, 0)
            ncclpy.synchronize(rank.rank, 20)
            found = part.size(), part.rank_id(), int(array[0]), comm.device_id()
            assert comm.commSplit(-1, 0, None) is None
            part.destroy()
            comm.destroy()
            return found

    assert testing.run_threads(3, body) == [(2, 1, 22, 0), (1, 0, 11, 1), (2, 0, 22, 2)]


def test_calls_after_the_end_of_a_communicator():
    for way in "destroy", "abort":
        comm = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
        getattr(comm, way)()
        assert comm.comm == 0
        getattr(comm, way)()
        comm.destroy()
        comm.abort()
        assert comm.comm == 0
        with pytest.raises(nccl.NcclError, match=r"NCCL_ERROR_INVALID_ARGUMENT.*destroyed or aborted"):
            comm.rank_id()


def all_reduce(comm, array):
    address = array.ctypes.data
    comm.allReduce(address, address, array.size, nccl.NCCL_DOUBLE, nccl.NCCL_SUM, 0)


def test_dropped_communicator_is_closed_after_its_operations():
    """The destructor does not wait, and the operation receives its data all the same."""
    comms = nccl.NcclCommunicator.initAll(2)
    ours, arrays = [comm._ours for comm in comms], [np.ones(3), np.ones(3)]
    all_reduce(comms[0], arrays[0])
    comms[0] = None  # rank 1 calls later: a destructor that waited for it would not return
    assert not ours[0].closed
    all_reduce(comms[1], arrays[1])
    comms.clear()
    testing.wait_for(lambda: all(each.closed for each in ours), "the end of both")
    assert [array.tolist() for array in arrays] == [[2, 2, 2]] * 2


def test_communicator_dropped_in_a_cycle_is_closed_without_a_warning(recwarn):
    comm = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    comm.itself, ours = comm, weakref.ref(comm._ours)
    del comm
    gc.collect()
    testing.wait_for(lambda: ours() is None, "the end")
    assert not [each for each in recwarn if each.category is ResourceWarning]


def test_communicator_dropped_with_work_that_never_ends_is_aborted_at_its_deadline(monkeypatch, caplog):
    monkeypatch.setattr(nccl, "_timeout", 0.3)
    unique_id, array = nccl.get_unique_id(), np.ones(3)

    def body(rank):
        with ncclpy.core.runtime.device.using(rank.rank):
            return nccl.NcclCommunicator(2, unique_id, rank.rank)

    comms = testing.run_threads(2, body)
    ours = comms[0]._ours
    all_reduce(comms[0], array)
    with caplog.at_level(logging.WARNING, "ncclpy"):
        # This thread has begun the operation, and the error of its deadline, or of the close, is raised here.
        with pytest.raises(ncclpy.NcclTimeout, match=r"was not done after 300 ms|what was issued did not end"):
            comms[0] = None
            testing.wait_for(lambda: False, "the error")
        testing.wait_for(lambda: "was dropped without destroy() or abort(), and closing it failed" in caplog.text)
    assert ours.closed
    comms[1].abort()


def test_many_dropped_communicators_share_a_few_threads():
    """Each close waits for the other rank; a communicator without a thread is closed once a thread is free."""
    comms = [nccl.NcclCommunicator.initAll(2) for _ in range(3 * dropped._MAX_THREADS)]
    ours, others = [pair[0]._ours for pair in comms], [pair[1] for pair in comms]
    arrays = np.ones((len(comms), 2, 3))
    for pair, array in zip(comms, arrays, strict=True):
        all_reduce(pair[0], array[0])
        pair[0] = None
    assert len(dropped._threads) == dropped._MAX_THREADS and not any(each.closed for each in ours)
    for comm, array in zip(others, arrays, strict=True):
        all_reduce(comm, array[1])
    testing.wait_for(lambda: all(each.closed for each in ours) and not dropped._threads, "the end of all")
    for device in range(2):  # operations of the other ranks may be behind
        ncclpy.synchronize(device, 20)
    assert (arrays == 2).all()
    for comm in others:
        comm.destroy()


def test_part_of_a_dropped_communicator_stays_usable():
    whole = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    ours, part = whole._ours, whole.commSplit(0, 0)
    del whole
    gc.collect()
    array = np.ones(3)
    all_reduce(part, array)
    ncclpy.synchronize(0, 20)
    assert array.tolist() == [1, 1, 1] and not ours.closed and not dropped._threads
    del part
    testing.wait_for(lambda: ours.closed, "the end of the whole")


def test_communicator_dropped_at_exit_delays_nothing():
    done = testing.run_python(
        """
        import os, warnings
        import numpy as np
        from ncclpy.interop import cupy_nccl as nccl, dropped
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
        dropped._PATIENCE = 0.2
        stuck, left = nccl.NcclCommunicator.initAll(2)
        array = np.ones(3)
        stuck.allReduce(array.ctypes.data, array.ctypes.data, 3, nccl.NCCL_DOUBLE, nccl.NCCL_SUM, 0)
        alone = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
        child = os.fork()
        if child == 0:
            del alone, stuck  # nothing to close here: they are the parent's
            os._exit(len(dropped._threads))
        assert os.waitpid(child, 0)[1] == 0
        assert alone.size() == 1
        del alone, stuck
        print("done")
        """,
        warm=True,
    )
    assert (done.stdout, done.stderr) == ("done\n", "")


def test_invalid_arguments_are_refused():
    with pytest.raises(TypeError, match="commId"):
        nccl.NcclCommunicator(1, None, 0)
    with pytest.raises(TypeError, match="commId"):
        nccl.NcclCommunicator(1, (1, 2, 3), 0)
    with pytest.raises(ValueError, match="commId length 10 != 128"):
        nccl.NcclCommunicator(1, b"1234567890", 0)
    with pytest.raises(TypeError, match="expected an NcclConfig, got Config"):
        nccl.NcclCommunicator(1, nccl.get_unique_id(), 0, ncclpy.Config())
    for devices in (None, "1", (0, 1), True):
        with pytest.raises(ValueError, match="should be an int or a list of int"):
            nccl.NcclCommunicator.initAll(devices)
    assert nccl.NcclConfig().split_share == 0 and nccl.NcclConfig(split_share=1).split_share == 1
    comms = nccl.NcclCommunicator.initAll([1, 0])
    assert [comm.device_id() for comm in comms] == [1, 0]
    for comm in comms:
        comm.destroy()


def test_subclasses_are_filled_in_by_init_all():
    class Mine(nccl.NcclCommunicator):
        pass

    comms = [Mine.__new__(Mine) for _ in range(2)]
    nccl.NcclCommunicator._initAll(comms, 2)
    assert [comm.rank_id() for comm in comms] == [0, 1]
    for comm in comms:
        comm.destroy()


def test_groups_nest_and_belong_to_their_thread(comms):
    arrays = [np.ones(3) for _ in comms]
    nccl.groupStart()
    for comm, array in zip(comms, arrays, strict=True):
        nccl.groupStart()
        comm.bcast(array.ctypes.data, 3, nccl.NCCL_DOUBLE, 0, 0)
        nccl.groupEnd()
    raised = []

    def elsewhere():
        try:
            nccl.groupEnd()
        except RuntimeError as error:
            raised.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(20)
    assert raised and "groupEnd: no group is open in this thread" in raised[0]
    nccl.groupEnd()
    for comm in comms:
        ncclpy.synchronize(comm.device_id(), 20)
    with pytest.raises(RuntimeError, match="no group is open"):
        nccl.groupEnd()


@pytest.mark.parametrize("status", STATUSES)
def test_errors(status):
    error = nccl.NcclError(status)
    assert error.status == error.result == status and isinstance(error, ncclpy.NcclError)
    assert str(error) == f"{STATUSES[status]}: {ncclpy.bindings.get_error_string(status)}"
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is nccl.NcclError and again.args == error.args and again.status == status
    with pytest.raises(nccl.NcclError, match=STATUSES[status]):
        nccl.check_status(status)
    nccl.check_status(0)
    assert nccl.NcclError(77).args[0].startswith("NCCL_ERROR_77: ")


def test_error_of_nccl_is_cupys_error(comms):
    array = np.ones(3)
    address = array.ctypes.data
    with ncclpy.faults("rank=0 call=AllReduce do=error:ncclSystemError"):
        with pytest.raises(nccl.NcclError, match="NCCL_ERROR_SYSTEM_ERROR: ncclAllReduce") as raised:
            in_group(comms, lambda comm: comm.allReduce(address, address, 0, nccl.NCCL_DOUBLE, nccl.NCCL_SUM, 0))
    assert raised.value.status == 2 and raised.value.function == "ncclAllReduce"
    assert isinstance(raised.value.__cause__, ncclpy.NcclError)


def test_deadline_is_an_error_of_cupy_and_of_ncclpy(monkeypatch):
    monkeypatch.setattr(nccl, "_timeout", 0.3)
    with pytest.raises(nccl.NcclError, match="NCCL_ERROR_TIMEOUT") as raised:
        nccl.NcclCommunicator(2, nccl.get_unique_id(), 0)
    assert isinstance(raised.value, ncclpy.NcclTimeout) and isinstance(raised.value, TimeoutError)
    again = pickle.loads(pickle.dumps(raised.value))
    assert isinstance(again, ncclpy.NcclTimeout) and str(again) == str(raised.value)


def test_without_cupy_use_says_what_to_do():
    done = testing.run_python(
        """
        import sys
        sys.modules["cupy"] = None
        from ncclpy.interop import cupy_nccl
        try:
            cupy_nccl.use()
        except ModuleNotFoundError as error:
            print(error)
        """,
        warm=True,
    )
    assert "CuPy cannot be imported" in done.stdout and "pip install cupy-cuda12x" in done.stdout


#: Modules that use CuPy in the ways that cupyx does.
STAND_IN = {
    "cupy/__init__.py": "from cupy import cuda",
    "cupy/cuda/__init__.py": "from cupy.cuda import nccl",
    "cupy/cuda/nccl.py": "available = {available}\nclass NcclCommunicator: ...\nNCCL_SUM, NCCL_FLOAT32 = 0, 7",
    "cupyx/__init__.py": "",
    "cupyx/distributed/__init__.py": "from cupyx.distributed._nccl_comm import Backend",
    "cupyx/distributed/_nccl_comm.py": """
from cupy.cuda import nccl

if nccl.available:
    _nccl_dtypes = {{"f": nccl.NCCL_FLOAT32}}
    _nccl_ops = {{"sum": nccl.NCCL_SUM}}
else:
    _nccl_dtypes, _nccl_ops = {{}}, {{}}

class Backend:
    def __init__(self):
        self.comm = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)

    def all_reduce(self, array):
        address, kind = array.ctypes.data, _nccl_dtypes[array.dtype.char]
        self.comm.allReduce(address, address, array.size, kind, _nccl_ops["sum"], 0)
""",
    "cupyx/distributed/array/__init__.py": "",
    "cupyx/distributed/array/_data_transfer.py": """
from cupy.cuda import nccl
if nccl.available:
    from cupy.cuda.nccl import NcclCommunicator as _Communicator
else:
    class _Communicator: ...
""",
}
PROGRAM = """
    import sys
    sys.path.insert(0, {folder!r})
    import numpy as np, ncclpy
    from ncclpy.interop import cupy_nccl
    if {before}:
        import cupyx.distributed, cupyx.distributed.array._data_transfer
    place = cupy_nccl.use(timeout=30)
    import cupy, cupyx.distributed, cupyx.distributed.array._data_transfer as transfer
    import cupy.cuda.nccl
    assert cupy.cuda.nccl is cupy_nccl is sys.modules["cupy.cuda.nccl"]
    assert transfer._Communicator is cupy_nccl.NcclCommunicator and transfer.nccl is cupy_nccl
    backend = cupyx.distributed.Backend()
    array = np.ones(3, np.float32)
    backend.all_reduce(array)
    ncclpy.synchronize(0, 20)
    assert backend.comm._ours.timeout == 30
    backend.comm.destroy()
    place.close()
    place.close()
    from cupy.cuda import nccl
    assert nccl is not cupy_nccl and nccl is cupy.cuda.nccl
    comm = cupyx.distributed._nccl_comm
    if {before}:
        assert comm.nccl is nccl and transfer.nccl is nccl
        assert transfer._Communicator is not cupy_nccl.NcclCommunicator
        assert bool(comm._nccl_ops) is nccl.available
    assert cupy_nccl._timeout is None
"""


@pytest.mark.parametrize("available", [True, False])
@pytest.mark.parametrize("before", [True, False])
def test_module_replaces_cupys(tmp_path, available, before):
    """Before or after cupyx is imported, and whether or not CuPy has found NCCL."""
    for name, text in STAND_IN.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.format(available=available))
    testing.run_python(PROGRAM.format(folder=str(tmp_path), before=before), warm=True)


#: For two ranks of `ncclpy run`: all calls of cupyx.distributed to NCCL, with arrays that only look like CuPy's.
CUPYX = """
import sys, types
sys.modules["mpi4py"] = None  # which CuPy imports, and which may find no MPI
import numpy as np
import ncclpy
from ncclpy.interop import cupy_nccl
from ncclpy.bootstrap import environment

class Array:
    def __init__(self, array):
        self.array, self.dtype, self.size, self.shape = array, array.dtype, array.size, array.shape
        self.data = types.SimpleNamespace(ptr=array.ctypes.data)
        self.flags = types.SimpleNamespace(c_contiguous=True, f_contiguous=False)

    def __getitem__(self, index):
        return Array(self.array[index])

if {before}:
    import cupyx.distributed
place = cupy_nccl.use(timeout=30)
import cupyx.distributed
from cupyx.distributed import NCCLBackend

rank, stream = environment().rank, types.SimpleNamespace(ptr=0)
with ncclpy.core.runtime.device.using(rank):
    backend = NCCLBackend(2, rank, port={port})
assert isinstance(backend._comm, cupy_nccl.NcclCommunicator)

def call(name, *arguments, **options):
    getattr(backend, name)(*(Array(each) if isinstance(each, np.ndarray) else each for each in arguments),
                           stream=stream, **options)
    ncclpy.synchronize(rank, 30)

mine, taken = np.arange(4, dtype=np.float32).reshape(2, 2) + 10 * rank, np.zeros((2, 2), np.float32)
call("all_reduce", mine, taken)
assert taken.tolist() == [[10, 12], [14, 16]], taken
call("all_reduce", mine, taken, op="max")
assert taken.tolist() == [[10, 11], [12, 13]], taken
complex_numbers, added = np.full(3, 1 + rank * 1j, np.complex128), np.zeros(3, np.complex128)
call("all_reduce", complex_numbers, added)
assert (added == 2 + 1j).all(), added
call("reduce", mine, taken, root=1, op="min")
assert rank == 0 or taken.tolist() == [[0, 1], [2, 3]], taken
call("broadcast", taken, root=1)
assert taken.tolist() == [[0, 1], [2, 3]], taken
call("reduce_scatter", mine, taken, 2)
assert taken[0].tolist() == [[10, 12], [14, 16]][rank], taken
call("all_gather", mine[1], taken, 2)
assert taken.tolist() == [[2, 3], [12, 13]], taken
call("send" if rank == 0 else "recv", mine if rank == 0 else taken, 1 - rank)
assert rank == 0 or taken.tolist() == [[0, 1], [2, 3]], taken
call("send_recv", mine, taken, 1 - rank)
assert taken.tolist() == (np.arange(4).reshape(2, 2) + 10 * (1 - rank)).tolist(), taken
call("scatter", mine, taken[0], root=0)
assert taken[0].tolist() == [[0, 1], [2, 3]][rank], taken
call("gather", mine[0], taken, root=0)
assert rank == 1 or taken.tolist() == [[0, 1], [10, 11]], taken
call("all_to_all", mine, taken)
assert taken.tolist() == [[2 * rank, 2 * rank + 1], [10 + 2 * rank, 11 + 2 * rank]], taken
backend.barrier()
backend._comm.destroy()
backend.stop()
print("done")
"""


@pytest.mark.parametrize("before", [True, False])
def test_backend_of_cupyx_runs(tmp_path, before):
    """CuPy can be imported without a GPU; its backend needs names of CUDA, but calls none of them: so it runs."""
    pytest.importorskip("cupy", reason="needs CuPy")
    (tmp_path / "program.py").write_text(CUPYX.format(before=before, port=free_port()))
    done = subprocess.run(
        [sys.executable, "-m", "ncclpy", "run", "-n", "2", tmp_path / "program.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0 and done.stdout.count("done") == 2, done.stdout + done.stderr
