"""The names of nccl4py's nccl.core, where they are other names for functions and types of ncclpy."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

import ncclpy
import testing
from ncclpy.interop import nccl4py as nccl

pytestmark = pytest.mark.usefixtures("host_engine")

#: The methods of nccl4py 0.6.0 that ncclpy has, with the names of their parameters.
METHODS = {
    "init": "cls, nranks, rank, unique_id, config=None",
    "init_all": "cls, devices=None",
    "split": "self, color=None, key=0, config=None",
    "shrink": "self, exclude_ranks=None, config=None, flag=<CommShrinkFlag.DEFAULT: 0>",
    "get_unique_id": "self",
    "destroy": "self",
    "abort": "self",
    "finalize": "self",
    "revoke": "self, flags=0",
    "suspend": "self, flags=<CommSuspendFlag.MEM: 1>",
    "resume": "self",
    "send": "self, sendbuf, peer, *, stream=None",
    "recv": "self, recvbuf, peer, *, stream=None",
    "allreduce": "self, sendbuf, recvbuf, op, *, stream=None, config=None",
    "broadcast": "self, sendbuf, recvbuf, root, *, stream=None, config=None",
    "reduce": "self, sendbuf, recvbuf, op, root=None, *, stream=None, config=None",
    "allgather": "self, sendbuf, recvbuf, *, stream=None, config=None",
    "reduce_scatter": "self, sendbuf, recvbuf, op, *, stream=None, config=None",
    "alltoall": "self, sendbuf, recvbuf, *, stream=None, config=None",
    "gather": "self, sendbuf, recvbuf, root=None, *, stream=None, config=None",
    "scatter": "self, sendbuf, recvbuf, root, *, stream=None, config=None",
    "register_buffer": "self, buffer",
    "register_window": "self, buffer, flags=None",
    "create_pre_mul_sum": "self, scalar, datatype=None",
    "get_last_error": "self",
    "get_async_error": "self",
    "get_mem_stat": "self, stat",
}
PROPERTIES = ("ptr", "is_valid", "nranks", "rank", "device")
#: Parameters that are ncclpy's own.
OURS = {"device", "timeout", "abortable"}


def written(method):
    words, star = [], False
    for each in inspect.signature(getattr(method, "__func__", method)).parameters.values():
        if each.kind is each.KEYWORD_ONLY:
            if each.name in OURS:
                continue
            if not star:
                words.append("*")
                star = True
        words.append(each.name + ("" if each.default is each.empty else f"={each.default!r}"))
    return ", ".join(words)


OVERRIDDEN = [name for name in METHODS if name in vars(nccl.Communicator)]


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_names_and_parameters_are_nccl4pys(name):
    assert written(inspect.getattr_static(nccl.Communicator, name)) == METHODS[name]


def test_all_names_exist():
    assert [name for name in (*METHODS, *PROPERTIES) if not hasattr(nccl.Communicator, name)] == []
    assert [name for name in nccl.__all__ if not hasattr(nccl, name)] == []
    assert set(METHODS) - set(OVERRIDDEN) == {"abort", "finalize", "resume"}, "ncclpy's own"
    own = {name for name in vars(nccl.Communicator) if not name.startswith("_")}
    assert own <= set(METHODS) | set(PROPERTIES)


def test_names_and_values_are_those_of_nccl4py():
    theirs = pytest.importorskip("nccl.core", exc_type=ImportError)
    assert set(nccl.__all__) <= set(theirs.__all__)
    for name in OVERRIDDEN:
        method = inspect.getattr_static(theirs.Communicator, name)
        names = list(inspect.signature(getattr(method, "__func__", method)).parameters)
        assert names == [each.partition("=")[0] for each in METHODS[name].split(", ") if each != "*"], name
    for name in nccl.__all__:
        value = getattr(nccl, name)
        if isinstance(value, int):
            assert value == getattr(theirs, name), name
    for name in ("CommShrinkFlag", "CommSuspendFlag", "WindowFlag", "NcclCommMemStat"):
        for member in getattr(nccl, name):
            assert getattr(theirs, name)[member.name] == member


@pytest.fixture
def comms():
    made = nccl.Communicator.init_all(3, timeout=30)
    yield made
    for comm in made:
        comm.destroy()


def in_group(comms, call):
    nccl.group_start()
    for comm in comms:
        call(comm)
    nccl.group_end()


def test_collectives(comms):
    assert all(type(comm) is nccl.Communicator and comm.is_valid and comm.ptr for comm in comms)
    given = [np.arange(3.0) + 10 * comm.rank for comm in comms]
    taken = [np.zeros(3) for _ in comms]
    in_group(comms, lambda comm: comm.allreduce(given[comm.rank], taken[comm.rank], nccl.SUM))
    assert all((each == sum(given)).all() for each in taken)
    in_group(comms, lambda comm: comm.reduce(given[comm.rank], taken[comm.rank], nccl.MAX))
    assert all((each == given[2]).all() for each in taken)
    in_group(comms, lambda comm: comm.reduce(given[comm.rank], taken[1] if comm.rank == 1 else None, nccl.MIN, root=1))
    assert (taken[1] == given[0]).all() and (taken[0] == given[2]).all()
    in_group(comms, lambda comm: comm.broadcast(given[1] if comm.rank == 1 else None, taken[comm.rank], 1))
    assert all((each == given[1]).all() for each in taken)
    every = [np.zeros(9) for _ in comms]
    in_group(comms, lambda comm: comm.allgather(sendbuf=given[comm.rank], recvbuf=every[comm.rank]))
    assert all((each == np.concatenate(given)).all() for each in every)
    part = [np.zeros(3) for _ in comms]
    in_group(comms, lambda comm: comm.reduce_scatter(every[comm.rank], part[comm.rank], nccl.AVG))
    assert all((each == mine).all() for each, mine in zip(part, given, strict=True))
    moved = [np.zeros(9) for _ in comms]
    in_group(comms, lambda comm: comm.alltoall(every[comm.rank], moved[comm.rank]))
    assert all((each == np.tile(mine, 3)).all() for each, mine in zip(moved, given, strict=True))
    in_group(comms, lambda comm: comm.gather(given[comm.rank], every[comm.rank]))
    assert all((each == np.concatenate(given)).all() for each in every)
    every[2][:] = 0
    in_group(comms, lambda comm: comm.gather(given[comm.rank], every[2] if comm.rank == 2 else None, root=2))
    assert (every[2] == np.concatenate(given)).all()
    in_group(comms, lambda comm: comm.scatter(every[0] if comm.rank == 0 else None, taken[comm.rank], 0))
    assert all((each == mine).all() for each, mine in zip(taken, given, strict=True))

    def ring(comm):
        comm.send(sendbuf=given[comm.rank], peer=(comm.rank + 1) % 3)
        comm.recv(recvbuf=taken[comm.rank], peer=(comm.rank - 1) % 3)

    with nccl.group():
        for comm in comms:
            ring(comm)
    assert [each[0] for each in taken] == [20, 0, 10]
    with pytest.raises(TypeError, match="config: ncclpy's Communicator takes none for one call"):
        comms[0].allreduce(given[0], taken[0], nccl.SUM, config=ncclpy.CollConfig())


def test_operators_and_registrations(comms):
    arrays = [np.ones(2) for _ in comms]
    operators = [
        comm.create_pre_mul_sum(scalar) for comm, scalar in zip(comms, (2.0, 3.0, np.array([4.0])), strict=True)
    ]

    def scaled(comm):
        comm.allreduce(arrays[comm.rank], arrays[comm.rank], operators[comm.rank])

    in_group(comms, scaled)
    assert all((each == 9).all() for each in arrays)
    with comms[0].create_pre_mul_sum(1, nccl.FLOAT32), comms[0].register_buffer(arrays[0]) as registration:
        assert registration.handle
    windows = []
    with nccl.group():
        for comm in comms:
            windows.append(comm.register_window(arrays[comm.rank], nccl.WindowFlag.COLL_SYMMETRIC))
    with nccl.group():
        for window in windows:
            window.close()
    for operator in operators:
        operator.close()


def test_split_shrink_suspend_and_destroy():
    def body(rank):
        comm = nccl.Communicator.init(3, rank.rank, unique_id, nccl.NCCLConfig(split_share=True), device=rank.rank)
        assert comm.get_async_error() == 0 and isinstance(comm.get_last_error(), str)
        assert comm.get_mem_stat(nccl.NcclCommMemStat.GPU_MEM_SUSPENDED) == 0
        comm.suspend()
        assert comm.get_mem_stat(nccl.NcclCommMemStat.GPU_MEM_SUSPENDED) == 1
        comm.resume()
        part = comm.split(None if rank.rank == 2 else 0, key=-rank.rank)
        found = None if part is None else (type(part), part.rank, part.nranks)
        smaller = None
        if rank.rank != 1:
            smaller = comm.shrink([1], flag=nccl.CommShrinkFlag.ABORT)
            assert (smaller.rank, smaller.nranks) == (rank.rank // 2, 2)
        for each in (part, smaller, comm):
            if each is not None:
                each.destroy()
        assert not comm.is_valid and comm.ptr == 0
        with pytest.raises(ValueError, match="flags"):
            comm.revoke(1)
        with pytest.raises(ValueError, match="flags"):
            comm.suspend(2)
        return found

    unique_id = nccl.get_unique_id()
    kind = nccl.Communicator
    assert testing.run_threads(3, body) == [(kind, 1, 2), (kind, 0, 2), None]


def test_shrink_with_abort_ends_running_operations():
    """An all-reduce that rank 1 does not call is running."""

    def body(rank):
        comm = nccl.Communicator.init(3, rank.rank, unique_id, device=rank.rank, abortable=True)
        array = np.ones(1000)
        with ncclpy.Stream(rank.rank) as stream:
            if rank.rank != 1:
                comm.allreduce(array, array, nccl.SUM, stream=stream)
                smaller = comm.shrink([1], flag=nccl.CommShrinkFlag.ABORT)
                stream.synchronize(20)
                mine = np.ones(2)
                smaller.allreduce(mine, mine, nccl.SUM)
                smaller.destroy()
                assert mine.tolist() == [2, 2]
        comm.abort()

    unique_id = nccl.get_unique_id()
    testing.run_threads(3, body, 30)


def test_functions():
    assert nccl.get_error_string(4) == ncclpy.bindings.get_error_string(4)
    assert isinstance(nccl.UniqueId.from_bytes(bytes(nccl.get_unique_id())), ncclpy.UniqueId)
    memory = nccl.mem_alloc(64, 1)
    assert memory.nbytes == 64 and memory.device == 1
    nccl.mem_free(memory)
    assert memory.closed
    comm = nccl.Communicator.init_all([0])[0]
    try:
        comm.broadcast(np.ones(3), np.ones((3, 3)).T, 0)
    except nccl.NcclInvalid as error:
        assert "not contiguous" in str(error)
    comm.destroy()
