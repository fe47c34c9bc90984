"""Operations that torch's C++ starts on the process group directly, and those that go through the Python layer."""

from __future__ import annotations

import datetime
import functools
import gc
import signal
import threading
import weakref

import pytest
import torch
import torch.distributed as dist
from torch_ranks import error_of, on_own_device

import ncclpy
from ncclpy.interop.torch import backend_of

METHODS = (
    "broadcast", "allreduce", "reduce", "all_gather_single", "reduce_scatter_single", "send", "recv", "stand_for",
)  # fmt: skip


def noted():
    """Return a list to which the names of the layer's methods are added when they are called."""
    backend, passed = backend_of(), []

    def note(name, method, *arguments):
        passed.append(name)
        return method(*arguments)

    for name in METHODS:
        setattr(backend, name, functools.partial(note, name, getattr(backend, name)))
    return passed


@on_own_device
def plain(rank, size):
    dist.barrier()  # on GPUs the first operation makes the group
    passed, found = noted(), []
    tensor = torch.full((4,), float(rank + 1))
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    found.append(tensor.tolist())
    dist.broadcast(tensor.add_(rank), 1)
    found.append(tensor.tolist())
    dist.reduce(tensor, 0)
    found.append(tensor.tolist() if rank == 0 else None)
    parts, part = torch.empty(8), torch.full((4,), float(rank))
    dist.all_gather_into_tensor(parts, part)
    found.append(parts.tolist())
    dist.reduce_scatter_tensor(part, parts, dist.ReduceOp.AVG)
    found.append(part.tolist())
    if rank == 0:
        dist.send(part, 1, tag=3)
    else:
        dist.recv(part.zero_(), 0, tag=3)
    return passed, [*found, part.tolist()]


def test_plain_tensors_go_to_the_group_directly(ranks2):
    (_, first), (_, second) = found = ranks2.run(plain)
    assert [passed for passed, _ in found] == [[], []]
    assert first[:2] == second[:2] == [[2.0] * 4, [3.0] * 4]
    assert first[2] == [6.0] * 4
    assert [each[3] for each in (first, second)] == [[0.0] * 4 + [1.0] * 4] * 2
    assert (first[4], second[4], second[5]) == ([0.0] * 4, [1.0] * 4, [0.0] * 4)


@on_own_device
def odd(rank, size):
    passed, found = noted(), []

    def went(call):
        call()
        found.append(passed.copy())
        passed.clear()

    group = dist.group.WORLD
    complex_numbers = torch.ones(2, dtype=torch.complex64)
    went(lambda: dist.all_reduce(torch.ones(4, 2)[:, 0]))
    went(lambda: dist.all_reduce(torch._neg_view(torch.ones(2))))
    went(lambda: group.broadcast([complex_numbers.conj()], dist.BroadcastOptions()).wait())
    went(lambda: dist.all_reduce(torch.ones(2).to_sparse()))
    went(lambda: dist.all_reduce(torch.ones(2), dist._make_nccl_premul_sum(2.0)))
    went(lambda: dist.all_gather_into_tensor(torch.ones(4, 2)[:, 0], torch.ones(2)))
    options = dist.AllreduceOptions()
    options.timeout = datetime.timedelta(seconds=20)
    went(lambda: group.allreduce([torch.ones(2)], options).wait())

    with torch.profiler.profile():
        went(lambda: dist.all_reduce(torch.ones(2)))
    went(lambda: dist.all_reduce(torch.ones(2)))
    backend_of().set_timeout(20.0)
    went(lambda: dist.all_reduce(torch.ones(2)))
    return found


def test_other_operations_go_through_the_layer(ranks2):
    reduced = ["allreduce"]
    expected = [reduced, reduced, ["broadcast"], reduced, reduced, ["all_gather_single"]]
    expected += [reduced, reduced, [], reduced]
    assert ranks2.run(odd) == [expected] * 2


@on_own_device
def in_a_block(rank, size):
    dist.all_reduce(torch.ones(1))  # on GPUs the first operation makes the group
    passed = noted()
    device = torch.empty(0).device
    group, backend = dist.group.WORLD, dist.group.WORLD._get_backend(device)
    tensors = [torch.ones(2) * each for each in range(3)]
    dist.all_reduce(tensors[2])
    group._start_coalescing(device)
    backend.allreduce(tensors[:1])
    backend.allreduce(tensors[1:2])
    group._end_coalescing(device).wait()
    return passed, backend_of().group.seq, [each.tolist() for each in tensors]


def test_operations_of_a_block_belong_to_the_block(ranks2):
    expected = (["allreduce", "allreduce"], 3, [[0.0] * 2, [2.0] * 2, [4.0] * 2])
    assert ranks2.run(in_a_block) == [expected] * 2


@on_own_device
def beside_a_block(rank, size):
    dist.barrier()
    device = torch.empty(0).device
    group, backend = dist.group.WORLD, dist.group.WORLD._get_backend(device)
    tensors, passed = [torch.ones(2), torch.full((2,), 5.0)], noted()
    group._start_coalescing(device)
    backend.allreduce(tensors[:1])
    other = threading.Thread(target=lambda: backend.allreduce(tensors[1:]).wait())
    other.start()
    other.join(20)
    seen = [other.is_alive(), *[each.tolist() for each in tensors]]  # the other's is done, the block's not begun
    group._end_coalescing(device).wait()
    return passed, seen, tensors[0].tolist()


def test_block_belongs_to_its_thread(ranks2):
    expected = (["allreduce", "allreduce"], [False, [1.0] * 2, [10.0] * 2], [2.0] * 2)
    assert ranks2.run(beside_a_block) == [expected] * 2


def asked_by_two(rank, size):
    """Wait for a work, while another thread asks for its result."""
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    if rank == 1:
        store.wait(["both are in it"])
    work, told = dist.all_reduce(torch.ones(2), async_op=True), []
    if rank == 0:
        asks = threading.Thread(target=lambda: told.extend([work.is_completed(), len(work.result())]))
        waits = threading.Thread(target=work.wait)
        waits.start()
        asks.start()
        asks.join(20)
        store.set("both are in it", "")
        waits.join(20)
        told.append(waits.is_alive())
    work.wait()
    return told, work.result()[0].tolist()


def test_work_is_asked_while_another_thread_waits_for_it(ranks2):
    assert ranks2.run(asked_by_two) == [([False, 1, False], [2.0] * 2), ([], [2.0] * 2)]


def called_away(rank, size):
    """Wait for an operation that the other rank begins late, until a signal handler raises; it continues."""
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    if rank == 1:
        store.wait(["called away"])
        dist.all_reduce(torch.ones(2))
        return None

    def handler(*_):
        raise ncclpy.NcclTimeout("the handler's")

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        return error_of(lambda: dist.all_reduce(torch.ones(2)))
    finally:
        signal.signal(signal.SIGALRM, before)
        store.set("called away", "")


def test_error_of_a_signal_handler_ends_the_wait(ranks2):
    said, nothing = ranks2.run(called_away)
    assert said.startswith("DistBackendError: the handler's") and nothing is None


def refused_and_let_go(rank, size):
    dist.all_reduce(torch.ones(1))
    dist.group.WORLD.abort()
    backend = weakref.ref(backend_of())
    gc.collect()
    gc.disable()
    try:
        said = error_of(lambda: dist.all_reduce(torch.ones(1)))
        dist.destroy_process_group()
        return said.partition(":")[0], backend() is None
    finally:
        gc.enable()


def test_refused_operation_keeps_nothing(ranks2):
    assert ranks2.run(refused_and_let_go) == [("DistBackendError", True)] * 2


@on_own_device
def what_works_tell(rank, size):
    dist.all_reduce(torch.ones(1))  # on GPUs the first operation makes the group
    passed = noted()
    work = dist.all_reduce(tensor := torch.ones(2), async_op=True)
    work.wait()
    work.wait()
    asked = passed.copy()
    told = [work.is_completed(), work.is_success(), [each.tolist() for each in work.result()]]
    value = [each.tolist() for each in work.get_future().wait()]
    dist.all_reduce(torch.ones(1))
    message = dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0)
    message.wait()
    source = message._source_rank()
    later = dist.all_reduce(torch.ones(1), async_op=True)
    later.wait()
    return asked, told, value, passed[:1], [each.python.sequence_number() for each in (work, later)], source


def test_results_and_states_of_a_work(ranks2):
    tensors = [[2.0, 2.0]]
    for rank, found in enumerate(ranks2.run(what_works_tell)):
        assert found == ([], [True, True, tensors], tensors, ["stand_for"], [2, 4], 0 if rank else -1)


def raised_by(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__, type(error.__cause__).__name__
    return None


def after_an_abort(rank, size):
    dist.all_reduce(torch.ones(1))
    store = dist.distributed_c10d._get_default_store()
    begun = dist.all_reduce(torch.ones(1), async_op=True) if rank == 0 else None
    if rank == 0:
        store.set("begun", "")
        found = [raised_by(begun.wait), raised_by(begun.wait), begun.is_completed(), begun.is_success()]
    else:
        store.wait(["begun"])
        dist.group.WORLD.abort()
        found = []
    return found, raised_by(lambda: dist.all_reduce(torch.ones(1)))


def test_errors_are_torchs(ranks2):
    (waited, refused), (_, aborted) = ranks2.run(after_an_abort)
    failed = ("DistBackendError", "NcclAborted")
    assert waited == [failed, failed, True, False]
    assert refused is not None and refused[0] == aborted[0] == "DistBackendError"


@pytest.mark.parametrize("call", ["broadcast", "reduce"])
def test_root_of_more_than_32_bits_does_not_exist(ranks2, call):
    for said in ranks2.run(far_root, call):
        assert said.startswith("ValueError: root: rank 4294967296"), said


def far_root(rank, size, call):
    return error_of(lambda: getattr(dist, call)(torch.ones(1), 1 << 32))


def wrong(rank, size):
    said = error_of(lambda: dist.all_gather_into_tensor(torch.ones(3), torch.ones(2)))
    dist.all_reduce(tensor := torch.ones(1))
    return said, tensor.item()


def test_invalid_sizes_are_the_groups_error(ranks2):
    for said, after in ranks2.run(wrong):
        assert said.startswith("ValueError: "), said
        assert after == 2


def over_its_time(rank, size):
    dist.all_reduce(torch.ones(1))
    with backend_of().group.deadline(0.2):
        begun = dist.all_reduce(torch.ones(1), async_op=True) if rank == 0 else None
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["given up"])
        return None
    try:
        return error_of(begun.wait)
    finally:
        store.set("given up", "")


def test_deadline_of_the_group_applies_to_its_operations(ranks2):
    said, _ = ranks2.run(over_its_time)
    assert said.startswith("DistBackendError: all_reduce") and "rank 1" in said


@pytest.mark.parametrize("operator", [dist.ReduceOp.BAND, dist.ReduceOp.BXOR], ids=["and", "xor"])
def test_operators_unknown_to_nccl_are_refused(ranks2, operator):
    for said in ranks2.run(refused, operator):
        assert "NCCL has no reduction by" in said


def refused(rank, size, operator):
    return error_of(lambda: dist.all_reduce(torch.ones(1, dtype=torch.int32), operator))


def test_operators_by_torchs_number():
    from ncclpy.interop.torch.tensors import OPERATORS

    theirs = {"SUM": "SUM", "AVG": "AVG", "PROD": "PRODUCT", "MIN": "MIN", "MAX": "MAX"}
    for i, ours in enumerate(OPERATORS):
        assert int(getattr(dist.ReduceOp, theirs[ncclpy.ReduceOp(ours).name])) == i
