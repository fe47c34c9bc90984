"""Communicators: every way to make one, and to close or abort it."""

from __future__ import annotations

import gc
import re
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import ncclpy
import testing
from ncclpy.core.runtime import device as device_module

# Creation


@pytest.mark.parametrize("nranks", [1, 2, 4])
def test_init_in_threads(arrays, nranks):
    def rank(rank):
        comm = rank.init()
        assert (comm.rank, comm.nranks, comm.device) == (rank.rank, nranks, rank.device)
        return testing.own_sum(arrays, comm, rank.rank + 1)

    assert testing.run_threads(nranks, rank) == [nranks * (nranks + 1) / 2] * nranks


def sum_in_process(rank):
    return testing.own_sum(testing.arrays(), rank.init(), rank.rank + 1)


def test_init_in_processes():
    assert testing.run_processes(2, sum_in_process) == [3, 3]


def test_init_in_one_group(arrays):
    testing.need_devices(3)
    uid = ncclpy.get_unique_id()

    def make():
        with ncclpy.group():
            return [ncclpy.Communicator.init(3, rank, uid, device=rank) for rank in range(3)]

    comms = testing.run_with_deadline(make)
    assert [(comm.rank, comm.nranks, comm.device) for comm in comms] == [(0, 3, 0), (1, 3, 1), (2, 3, 2)]
    testing.all_ones(arrays, comms)
    testing.close_all(comms)


def test_communicator_of_a_group_is_not_there_before_its_end():
    testing.need_devices(2)
    uid = ncclpy.get_unique_id()

    def make():
        with ncclpy.group():
            comms = [ncclpy.Communicator.init(2, rank, uid, device=rank) for rank in range(2)]
            with pytest.raises(ValueError, match="group"):
                comms[0].handle  # noqa: B018
        assert all(comm.handle for comm in comms)
        return comms

    testing.close_all(testing.run_with_deadline(make))


def test_two_worlds_in_one_group(arrays):
    testing.need_devices(4)
    uids = [ncclpy.get_unique_id() for _ in range(2)]

    def make():
        with ncclpy.group():
            return [ncclpy.Communicator.init(2, r, uids[w], device=2 * w + r) for w in range(2) for r in range(2)]

    comms = testing.run_with_deadline(make)
    testing.all_ones(arrays, comms, expected=2)
    testing.close_all(comms)


@pytest.mark.parametrize("devices", [None, [1, 0], range(3)], ids=str)
def test_init_all(arrays, devices):
    expected = list(range(ncclpy.device_count())) if devices is None else devices
    testing.need_devices(max(expected) + 1)
    comms = ncclpy.Communicator.init_all(devices)
    assert [comm.device for comm in comms] == list(expected)
    assert [comm.rank for comm in comms] == list(range(len(expected)))
    assert {comm.nranks for comm in comms} == {len(expected)}
    testing.all_ones(arrays, comms)
    testing.close_all(comms)


def test_common_mistakes_are_answered_with_the_right_call():
    with pytest.raises(TypeError, match=r"devices: .* range\(4\)"):
        ncclpy.Communicator.init_all(4)
    with pytest.raises(TypeError, match=r"Communicator\.init\(nranks, rank, unique_id\)"):
        ncclpy.Communicator(2, 0, ncclpy.get_unique_id())


def test_init_takes_the_current_device_by_default():
    testing.need_devices(2)
    with device_module.using(1):
        comm = ncclpy.Communicator.init(1, 0, ncclpy.get_unique_id())
        assert device_module.current() == 1
    assert comm.device == 1
    comm.close()


def test_init_restores_the_current_device():
    testing.need_devices(3)
    with device_module.using(1):
        with ncclpy.Communicator.init(1, 0, ncclpy.get_unique_id(), device=2) as comm:
            assert comm.device == 2
            assert device_module.current() == 1
        testing.close_all(ncclpy.Communicator.init_all(range(3)))
        assert device_module.current() == 1


def test_unique_id_as_bytes():
    uid = ncclpy.get_unique_id()
    assert len(bytes(uid)) == 128
    assert ncclpy.UniqueId.from_bytes(bytes(uid)) == uid != ncclpy.get_unique_id()
    for wrong in (b"", bytes(127), bytes(129)):
        with pytest.raises(ValueError, match=str(len(wrong))):
            ncclpy.UniqueId.from_bytes(wrong)
    for wrong in (128, "x" * 128):  # bytes(128) are 128 zeros
        with pytest.raises(TypeError, match=type(wrong).__name__):
            ncclpy.UniqueId(wrong)
    comm = ncclpy.Communicator.init(1, 0, bytes(uid), device=0)
    comm.close()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((0, 0), "nranks"),
        ((-1, 0), "nranks"),
        ((2, 2), "rank 2 of 2"),
        ((2, -1), "rank"),
        (("2", 0), "nranks: expected an int, got '2'"),  # as read from os.environ
        ((2, "0"), "rank: expected an int, got '0'"),
        ((2, 0.0), r"rank: expected an int, got 0\.0"),
        ((2, None), "rank: expected an int, got None"),
    ],
)
def test_init_rejects(arguments, word):
    with pytest.raises((TypeError, ValueError), match=word):
        testing.run_with_deadline(lambda: ncclpy.Communicator.init(*arguments, ncclpy.get_unique_id(), device=0), 10)


def test_init_rejects_devices_and_ids():
    uid = ncclpy.get_unique_id()
    hint = "NCCLPY_HOST_DEVICES" if ncclpy.library().engine == "host" else "CUDA_VISIBLE_DEVICES"
    for device in (-1, ncclpy.device_count(), 1 << 40, -(1 << 80)):
        with pytest.raises(ValueError, match=rf"device {device} does not exist.*{hint}"):
            ncclpy.Communicator.init(1, 0, uid, device=device)
    with pytest.raises(TypeError, match=r"device: expected its number .* got 'cuda:0'"):
        ncclpy.Communicator.init(1, 0, uid, device="cuda:0")
    for wrong in (b"short", "text", None, 5):
        with pytest.raises((TypeError, ValueError), match="unique"):
            ncclpy.Communicator.init(1, 0, wrong, device=0)
    for wrong, kind in ((-1, ValueError), ("5", TypeError), (float("nan"), ValueError)):
        with pytest.raises(kind, match=f"timeout: expected seconds >= 0 or None, got {wrong!r}"):
            ncclpy.Communicator.init(1, 0, uid, device=0, timeout=wrong)
    with pytest.raises(TypeError, match="config"):
        ncclpy.Communicator.init(1, 0, uid, device=0, config={"blocking": False})


def test_one_device_for_two_ranks_is_refused():
    def make(rank):
        return rank.init(device=0)

    with pytest.raises(ncclpy.NcclError) as raised:
        testing.run_threads(2, make, timeout=30)
    assert re.search(r"(?i)duplicate|same|invalid", str(raised.value))  # not in the other rank's error, a note


def test_initialisation_that_fails_in_the_background_names_its_communicator():
    def make(rank):
        return rank.init(device=0, timeout=30)

    with pytest.raises(ncclpy.NcclError, match=r"^initialisation of <ncclpy.Communicator rank \d of 2 on device 0"):
        testing.run_threads(2, make, timeout=60)


def test_config_reaches_nccl(arrays):
    def rank(rank):
        comm = rank.init(config=ncclpy.Config(min_ctas=1, max_ctas=4, comm_name="testing", split_share=True))
        return testing.own_sum(arrays, comm, 1)

    assert testing.run_threads(2, rank) == [2, 2]


@pytest.mark.parametrize("field", ["min_ctas", "max_ctas"])
def test_config_that_nccl_refuses(field):
    with pytest.raises(ncclpy.NcclError, match=r"[Ii]nvalid"):
        ncclpy.Communicator.init(1, 0, ncclpy.get_unique_id(), device=0, config=ncclpy.Config(**{field: -5}))


def test_from_handle(arrays, comms2):
    # A handle with another owner is used, never destroyed.
    borrowed = [ncclpy.Communicator.from_handle(comm.handle) for comm in comms2]
    assert [(comm.rank, comm.nranks, comm.device) for comm in borrowed] == [(0, 2, 0), (1, 2, 1)]
    testing.all_ones(arrays, borrowed)
    for comm in borrowed:
        comm.close()
    testing.all_ones(arrays, comms2)


def test_from_handle_refuses_null():
    with pytest.raises(ValueError, match="NULL"):
        ncclpy.Communicator.from_handle(0)


def test_repr_names_rank_and_device(comms2):
    for comm in comms2:
        assert f"rank {comm.rank} of 2 on device {comm.device}" in repr(comm)
    comms2[0].abort()
    assert "abort" in repr(comms2[0])


# Closing, aborting, and use afterwards


def test_close_twice(comm1):
    comm1.close()
    assert comm1.closed
    comm1.close()


def test_with_closes():
    with ncclpy.Communicator.init(1, 0, ncclpy.get_unique_id(), device=0) as comm:
        assert not comm.closed
    assert comm.closed


def test_with_closes_after_an_exception():
    with pytest.raises(KeyError):
        with ncclpy.Communicator.init(1, 0, ncclpy.get_unique_id(), device=0) as comm:
            raise KeyError
    assert comm.closed


USES = {
    "all_reduce": lambda comm: comm.all_reduce((64, 0, "float32")),
    "send": lambda comm: comm.send((64, 0, "float32"), 0),
    "barrier": lambda comm: comm.barrier(),
    "split": lambda comm: comm.split(0, 0),
    "finalize": lambda comm: comm.finalize(),
    "async_error": lambda comm: comm.async_error(),
    "wait_ready": lambda comm: comm.wait_ready(1),
    "pre_mul_sum": lambda comm: comm.pre_mul_sum(2, "float32"),
    "register": lambda comm: comm.register((64, 16, "float32")),
    "window": lambda comm: comm.window((64, 16, "float32")),
    "handle": lambda comm: comm.handle,
}


@pytest.mark.parametrize("use", USES)
def test_use_after_close(comm1, use):
    comm1.close()
    with pytest.raises(ValueError, match="closed"):
        testing.run_with_deadline(lambda: USES[use](comm1), 10)


@pytest.mark.parametrize("use", USES)
def test_use_after_abort(comm1, use):
    comm1.abort()
    with pytest.raises(ncclpy.NcclAborted, match="abort"):
        testing.run_with_deadline(lambda: USES[use](comm1), 10)


def test_use_after_close_in_a_group(comms2, arrays):
    comms2[1].close()
    part = arrays.make(np.zeros(1, np.float32), 0)

    def call():
        with ncclpy.group():
            comms2[0].all_reduce(arrays.argument(part))
            comms2[1].all_reduce((64, 0, "float32"))

    with pytest.raises(ValueError, match="closed"):
        testing.run_with_deadline(call, 10)


def test_abort_twice_and_close_after(comm1):
    comm1.abort()
    comm1.abort()
    comm1.close()
    assert comm1.closed


def test_abort_after_close_does_nothing(comm1):
    comm1.close()
    comm1.abort()
    assert comm1.closed


def test_abort_of_a_communicator_that_was_never_initialised():
    comm = ncclpy.Communicator.__new__(ncclpy.Communicator)
    comm.abort()
    assert comm.closed


@pytest.fixture
def unmade_window(comms2, host_engine):
    """A window of rank 0 that its group never makes: close() cannot deregister it, so the communicator stays open."""
    group = ncclpy.group()
    group.__enter__()
    yield comms2[0].window(np.ones(16))
    group.__exit__(KeyError, KeyError(), None)


def test_close_that_fails_changes_nothing(comms2, unmade_window):
    with pytest.raises(ValueError, match="window"):
        comms2[0].close()
    assert not comms2[0].closed
    assert "(" not in repr(comms2[0])


def test_close_that_fails_leaves_a_revoked_communicator_its_children(comms2, unmade_window):
    comms2[0].revoke()
    with pytest.raises(ValueError, match="window"):
        comms2[0].close()
    comms2[0].split(0)  # and not "was finalized; only close() and abort() are left"


def test_abort_during_a_close_that_fails_counts(comms2, unmade_window):
    operators = [comms2[0].pre_mul_sum(2.0, "float32") for _ in range(32)]  # close() waits at one
    stream = ncclpy.Stream(0)

    def call():
        with pytest.raises(ncclpy.NcclAborted):
            comms2[0].all_reduce(np.ones(4), stream=stream)

    with ncclpy.faults("rank=0 call=AllReduce do=hang") as faults, ThreadPoolExecutor(2) as pool:
        stuck = pool.submit(call)
        testing.wait_for(lambda: faults.fired, "the call")
        aborted = pool.submit(lambda: (time.sleep(0.2), comms2[0].abort()))
        with pytest.raises(ValueError, match="window"):
            comms2[0].close()
        aborted.result(10)
        stuck.result(10)
    assert comms2[0].closed
    assert "(aborted)" in repr(comms2[0])
    del operators
    stream.close()


def test_finalize_then_close(comms2):
    def rank(rank):
        comms2[rank.rank].finalize()
        comms2[rank.rank].close()

    testing.run_threads(2, rank, comms=comms2)


def test_close_finishes_issued_operations(comm1, arrays):
    send, recv = (arrays.make(np.full(1 << 18, value, np.float32), 0) for value in (7, 0))
    with ncclpy.Stream(0) as stream:
        comm1.all_reduce(arrays.argument(send), arrays.argument(recv), stream=stream)
        comm1.close()
        stream.synchronize()
    assert np.all(arrays.read(recv) == 7)


def test_children_are_closed_first(comms2):
    def rank(rank):
        parent = comms2[rank.rank]
        child = parent.split(0, 0)
        grandchild = child.split(0, 0)
        parent.close()
        assert grandchild.closed and child.closed and parent.closed
        child.close()

    testing.run_threads(2, rank, comms=comms2)


def test_closed_child_leaves_its_parent_usable(comms2, arrays):
    def rank(rank):
        comms2[rank.rank].split(0, 0).close()

    testing.run_threads(2, rank, comms=comms2)
    testing.all_ones(arrays, comms2)


def test_aborting_a_parent_ends_its_children(comms2):
    def rank(rank):
        return comms2[rank.rank].split(0, 0)

    children = testing.run_threads(2, rank, comms=comms2)
    testing.abort_all(comms2)
    for child in children:
        child.close()
        assert child.closed


def test_parent_does_not_keep_children_alive(comms2):
    def rank(rank):
        child = comms2[rank.rank].split(0, 0)
        child.close()
        return weakref.ref(child)

    children = testing.run_threads(2, rank, comms=comms2)
    gc.collect()
    assert [child() for child in children] == [None, None]


def test_dropped_child_warns(comm1):
    with pytest.warns(ResourceWarning, match="test_lifecycle.py"):
        comm1.split(0, 0)
        gc.collect()


def test_dropped_communicator_warns_once_with_its_creation_site():
    def create():
        return ncclpy.Communicator.init(1, 0, ncclpy.get_unique_id(), device=0)

    comm = create()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del comm
        gc.collect()
    messages = [str(warning.message) for warning in caught if issubclass(warning.category, ResourceWarning)]
    assert len(messages) == 1
    line = create.__code__.co_firstlineno + 1
    assert f"{__file__}:{line}" in messages[0], messages[0]


@pytest.mark.parametrize("end", ["close", "abort"])
def test_ended_communicator_does_not_warn(end):
    comm = ncclpy.Communicator.init(1, 0, ncclpy.get_unique_id(), device=0)
    getattr(comm, end)()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del comm
        gc.collect()


# Resources of a communicator


def test_async_error_of_a_healthy_communicator(comm1):
    assert comm1.async_error() in (None, ncclpy.Result.SUCCESS)


def test_register(comm1, arrays):
    part = arrays.make(np.ones(1024, np.float32), 0)
    registration = comm1.register(arrays.argument(part))
    comm1.all_reduce(arrays.argument(part))
    registration.close()
    registration.close()
    assert registration.closed


def test_close_frees_the_rest_where_a_resource_fails(comm1, arrays, host_engine):
    parts = [arrays.argument(arrays.make(np.ones(1024, np.float32), 0)) for _ in range(2)]
    registrations = [comm1.register(part) for part in parts]
    with ncclpy.faults("call=CommDeregister nth=1 do=error:ncclSystemError"):
        with pytest.raises(ncclpy.NcclError, match="ncclCommDeregister"):
            comm1.close()
    assert comm1.closed and all(registration.closed for registration in registrations)
    comm1.close()


def test_close_frees_the_rest_where_a_child_fails(comms2, host_engine):
    children = testing.run_threads(2, lambda rank: comms2[rank.rank].split(0), comms=comms2)
    with ncclpy.faults("rank=0 call=CommDestroy nth=1 do=error:ncclSystemError"):
        with pytest.raises(ncclpy.NcclError, match="ncclCommDestroy"):
            testing.run_with_deadline(comms2[0].close)
    assert comms2[0].closed and children[0].closed
    children[1].abort()


def test_register_refuses_another_device(comms2):
    with pytest.raises(ValueError, match=r"buf: .* device 1"):
        comms2[0].register(ncclpy.Buffer(4096, 1, "float32", device=comms2[1].device))
