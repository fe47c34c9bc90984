"""Start, failure and end of groups of the torch backend, and what their works and futures report."""

from __future__ import annotations

import datetime
import gc
import inspect
import subprocess
import sys
import textwrap
import threading
import time
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager, _get_split_source
from torch_ranks import Group, error_of

import testing
from ncclpy.interop.torch import backend_of
from ncclpy.interop.torch.work import CoalescedWork, TorchWork

CPU = torch.device("cpu")


def groups(rank, size):
    found = []
    half = dist.new_group([1, 3])
    if rank in (1, 3):
        tensor = torch.full((2,), float(rank))
        dist.all_reduce(tensor, group=half)
        found += [dist.get_rank(half), tensor.tolist(), half.group_name != ""]
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    tensor = torch.full((1,), float(rank))
    dist.all_reduce(tensor, group=mesh.get_group("b"))
    if half is not dist.GroupMember.NON_GROUP_MEMBER:
        dist.destroy_process_group(half)
    return [*found, tensor.item(), dist.get_backend()]


def test_groups_and_meshes(ranks4):
    assert ranks4.run(groups) == [
        [1.0, "ncclpy"],
        [0, [4.0, 4.0], True, 1.0, "ncclpy"],
        [5.0, "ncclpy"],
        [1, [4.0, 4.0], True, 5.0, "ncclpy"],
    ]


def devices(rank, size):
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    dist.barrier()
    return tensor.tolist(), sorted(each.type for each in dist.group.WORLD._device_types)


@pytest.mark.parametrize(
    "backend", ["ncclpy", "cpu:ncclpy,cuda:ncclpy", "cpu:gloo,cuda:ncclpy", "cpu:ncclpy", "NCCLPY"]
)
def test_names_of_backends(host_engine, ranks2, backend):
    found, types = ranks2.run(devices, backend=backend)[0]
    assert found == [2.0, 2.0] and types == (["cpu", "cuda"] if "cuda" in backend else ["cpu"])


def chosen_devices(rank, size):
    """Return the devices that torch's helpers choose for a group, after using them."""
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spec = ChunkShardingSpec(dim=0, placements=[f"rank:{each}/cpu" for each in range(size)])
        part = sharded_tensor.ones(spec, 4, 3)
        out = torch.zeros(4, 3) if rank == 0 else None
        part.gather(dst=0, out=out)
        half = dist.new_group([0, 1])
        chosen = dist.distributed_c10d._get_pg_default_device(), dist.distributed_c10d._get_object_coll_device(half)
    return [str(each) for each in chosen], None if out is None else out.sum().item()


@pytest.mark.parametrize("backend", ["ncclpy", "cpu:ncclpy", "cpu:gloo,cuda:ncclpy"])
def test_helpers_of_torch_choose_devices_that_exist(ranks2, backend):
    assert ranks2.run(chosen_devices, backend=backend) == [(["cpu", "cpu"], 12.0), (["cpu", "cpu"], None)]


def beside_gloo(rank, size):
    over = [dist.new_group(backend=each) for each in ("gloo", "ncclpy")]
    tensor = torch.ones(1)
    for group in over:
        dist.all_reduce(tensor, group=group)
    return tensor.item()


def test_beside_gloo(ranks2):
    assert ranks2.run(beside_gloo, backend="gloo") == [4.0, 4.0]


def options(rank, size):
    backend = dist.group.WORLD._get_backend(CPU)
    before = backend._get_sequence_number_for_group()
    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.wait()
    return (
        before,
        backend._get_sequence_number_for_group(),
        work._get_duration() >= 0,
        getattr(backend, "supports_coalescing", True),
    )


def wrong_options(rank, size):
    return error_of(
        lambda: dist.init_process_group("ncclpy", store=dist.HashStore(), rank=0, world_size=1, pg_options=3)
    )


def test_options_of_the_group(ranks2):
    assert ranks2.run(options, pg_options={"timing": True, "check": "first"}) == [(0, 1, True, True)] * 2
    assert all("mapping of options" in error for error in ranks2.run(wrong_options, backend=None))


def late(rank, size, how):
    limit = datetime.timedelta(seconds=0.5)
    dist.barrier()  # connects the ranks, which may take as long as the group's timeout
    if rank == 1:
        until = time.monotonic() + 20
        while backend_of().group.error is None and time.monotonic() < until:
            time.sleep(0.01)
        return error_of(lambda: dist.all_reduce(torch.ones(1)))
    if how == "call":
        call = dist.AllreduceOptions()
        call.timeout = limit
        return error_of(lambda: dist.group.WORLD.allreduce([torch.ones(1)], call).wait())
    if how == "barrier":
        if "timeout" not in inspect.signature(dist.barrier).parameters:  # before torch 2.12
            dist.distributed_c10d._get_default_group().set_timeout(limit)
            return error_of(dist.barrier)
        return error_of(lambda: dist.barrier(timeout=limit))
    if how == "monitored":
        return error_of(lambda: dist.group.WORLD.monitored_barrier(limit))
    dist.distributed_c10d._get_default_group().set_timeout(limit)
    return error_of(lambda: dist.all_reduce(torch.ones(1)))


@pytest.mark.parametrize("how", ["call", "barrier", "monitored", "group"])
def test_deadline_names_the_missing_rank(ranks2, how):
    first, second = ranks2.run(late, how)
    assert first.startswith("DistBackendError: ") and "rank 1" in first
    assert second.startswith("DistBackendError: ") and "rank 0" in second


def waits(rank, size):
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["go on"])
    work = dist.all_reduce(tensor := torch.ones(1), async_op=True)
    said = error_of(lambda: work.wait(datetime.timedelta(seconds=0.1))) if rank == 0 else None
    store.set("go on", "")
    work.wait()  # the operation has continued
    return said, tensor.item()


def test_timeout_of_a_wait_ends_the_wait_alone(ranks2):
    (said, mine), others = ranks2.run(waits)
    assert said.startswith("DistBackendError: all_reduce") and "after 0.1 s" in said and "rank 1" in said
    assert mine == 2 and others == (None, 2)


def calls_alone(rank, size, how):
    dist.barrier()
    if rank == 1:
        testing.wait_for(lambda: backend_of().group.error is not None, "the end")
        return error_of(dist.barrier)
    dist.distributed_c10d._get_default_group().set_timeout(datetime.timedelta(seconds=0.5))
    work = dist.all_reduce(torch.ones(1), async_op=True)
    return error_of(work.wait if how == "wait" else work.get_future().wait)


@pytest.mark.parametrize("how", ["wait", "future"])
def test_error_says_where_this_rank_called_the_failed_operation(ranks2, how):
    """It names neither the line of the wait nor torch's own lines."""
    first, second = ranks2.run(calls_alone, how)
    line = calls_alone.__code__.co_firstlineno + 6
    assert f"This rank called all_reduce #1 at interop_torch/test_torch_ends.py:{line}" in first, first
    assert "rank 0 of 2: all_reduce" in second and "This rank called" not in second, second


def disagree(rank, size):
    tensor = torch.ones(2 if rank else 3)
    future = dist.all_reduce(tensor, async_op=True).get_future()
    seen = []
    # C++ takes an exception that Python sets in a future for a value, with which DDP's reducer ends the process.
    chained = future.then(lambda each: seen.append("called") or each.value())
    return error_of(future.wait), error_of(chained.wait), error_of(lambda: dist.all_reduce(tensor))


def test_future_fails_with_its_operation(host_engine, ranks2):
    for said in ranks2.run(disagree):
        assert all("2 float32" in each and "3 float32" in each for each in said[:2]), said
        assert said[0].startswith("DistBackendError") and said[2].startswith("DistBackendError")


def fails_in_backward(rank, size):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    if rank == 1:
        dist.group.WORLD.abort()
        return "aborted"
    return error_of(lambda: model(torch.ones(1, 2)).sum().backward())


def test_ddps_backward_raises_the_error_that_ended_the_group(ranks2):
    first, second = ranks2.run(fails_in_backward)
    assert "rank 1" in first and "aborted" in first and second == "aborted"


def fails_after(rank, size):
    def breaks():
        raise OverflowError("no space")

    backend = backend_of()
    begun = backend.group.barrier()
    works = [TorchWork(begun, [], (breaks,), True, Group()) for _ in range(2)]
    found = [error_of(works[0].wait) for _ in range(2)]
    found += [works[0].is_completed(), works[0].is_success(), works[0].failure()]
    begun.wait()
    return [*found, works[1].is_completed(), works[1].is_success(), works[1].failure(), error_of(works[1].synchronize)]


def test_failure_after_an_operation_is_seen_by_waits_and_callbacks(ranks2):
    said = "OverflowError: no space"
    assert ranks2.run(fails_after)[0] == [said, said, True, False, "no space", True, False, "no space", said]


def odd_results(rank, size):
    backend = backend_of()
    backend.barrier = lambda timeout: TorchWork(backend.group.barrier(), ["no tensor"], (), True, backend.group)
    future = dist.group.WORLD.barrier().get_future()
    return error_of(future.wait)


def test_future_of_an_invalid_result_ends(ranks2):
    assert all(said.startswith("DistBackendError: ") for said in ranks2.run(odd_results))


def refuses_once(rank, size):
    work = dist.all_reduce(torch.ones(1), async_op=True)
    inner, asked = work.python, []

    class Refuses:
        def when_done(self, tell):
            asked.append(1)
            if len(asked) == 1:
                raise OverflowError("not now")
            inner.when_done(tell)

        def __getattr__(self, name):
            return getattr(inner, name)

    backend = backend_of()
    backend.barrier = lambda timeout: Refuses()
    wrapped = dist.group.WORLD.barrier()
    first = error_of(wrapped.get_future)
    wrapped.get_future().wait()
    return first


def test_future_that_was_refused_can_be_asked_for_again(ranks2):
    assert ranks2.run(refuses_once) == ["OverflowError: not now"] * 2


def after_an_abort(rank, size):
    dist.barrier()
    dist.group.WORLD.abort()
    batch = [dist.P2POp(dist.isend, torch.ones(1), 1 - rank), dist.P2POp(dist.irecv, torch.ones(1), 1 - rank)]
    return error_of(lambda: dist.batch_isend_irecv(batch))


def test_batch_after_an_abort_raises_torchs_error(ranks2):
    for said in ranks2.run(after_an_abort):
        assert said.startswith("DistBackendError: "), said


def test_block_waits_on_the_cpu_if_one_of_its_operations_does():
    for kinds, blocks in {(): True, (False,): False, (True,): True, (True, False): True, (False, True): True}.items():
        together = CoalescedWork(None)
        for each in kinds:
            together.note(each)
        assert together.blocks_cpu == blocks


DAEMON = """
    import os, sys, threading, time, torch, torch.distributed as dist, ncclpy.interop.torch

    rank, folder, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    dist.init_process_group("ncclpy", store=dist.FileStore(folder + "/" + how, 2), rank=rank, world_size=2)
    if how != "connect":
        dist.barrier()
    entered = threading.Event()

    def waits():
        entered.set()
        dist.barrier()

    def polls():
        work = dist.all_reduce(torch.ones(1), async_op=True)
        while not work.is_completed():
            entered.set()

    if rank == 0:
        threading.Thread(target=polls if how == "poll" else waits, daemon=True).start()
        entered.wait()
        time.sleep(0.3)
    else:
        sys.stdin.read()
        os._exit(0)
"""


@pytest.mark.parametrize("how", ["wait", "poll", "connect"])
def test_daemon_thread_in_a_work_does_not_abort_the_process(extension, tmp_path, how):
    if how != "connect":
        testing.need_processes(2)
    command = [sys.executable, "-c", textwrap.dedent(DAEMON)]
    with subprocess.Popen([*command, "1", str(tmp_path), how], stdin=subprocess.PIPE, cwd=tmp_path) as peer:
        try:
            one = subprocess.run(
                [*command, "0", str(tmp_path), how], capture_output=True, text=True, timeout=60, cwd=tmp_path
            )
        finally:
            peer.kill()
    assert one.returncode == 0 and "terminate" not in one.stderr, one.stderr


def callbacks(rank, size):
    order = []

    def again(future):
        inner = torch.full((2,), 1.0)
        dist.all_reduce(inner)  # waits, in a callback
        order.append(threading.current_thread() is threading.main_thread())
        return future.value()[0] + inner

    work = dist.all_reduce(torch.full((2,), float(rank)), async_op=True)
    return work.get_future().then(again).wait().tolist(), order


def test_callbacks_of_futures_may_wait_for_collectives(ranks2):
    assert ranks2.run(callbacks) == [([3.0, 3.0], [False])] * 2


def forgotten(rank, size, columns, end):
    tensors = [torch.ones(1000, columns)[:, 0] for _ in range(50)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    del works[::2]  # neither torch nor Python has a reference to these
    gc.collect()
    for work in works:
        assert work.wait() and work.is_completed() and work.is_success() and len(work.result()) == 1
    if end == "coalesced barrier":
        with _coalescing_manager():
            dist.barrier()
    else:
        {"barrier": dist.barrier, "destroy": dist.destroy_process_group}[end]()
    return {tensor.sum().item() for tensor in tensors}


@pytest.mark.parametrize("end", ["barrier", "coalesced barrier", "destroy"])
@pytest.mark.parametrize("columns", [1, 2])  # a tensor that is not contiguous receives a copy of the result
def test_works_without_references_complete(ranks2, columns, end):
    assert ranks2.run(forgotten, columns, end) == [{2000.0}, {2000.0}]


def never_waited_for(rank, size):
    results = []
    for _ in range(30):
        parts = [torch.zeros(2) for _ in range(size)]  # torch's parts are not adjacent: the result is copied to them
        dist.all_gather(parts, torch.full((2,), rank + 1.0), async_op=True)
        results.append(weakref.ref(parts[0]))
        dist.all_reduce(torch.ones(1))
    gc.collect()
    return sum(each() is not None for each in results)


def test_works_without_waits_keep_no_tensors(ranks2):
    assert max(ranks2.run(never_waited_for)) <= 2


def profiled(rank, size):
    tensor = torch.ones(3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 0)
        dist.barrier()
        if rank == 0:
            dist.send(tensor, 1)
        else:
            dist.recv(tensor, 0)
    return sorted(event.name for event in profile.events() if event.name.startswith("ncclpy:"))


def test_ranges_of_the_profiler(ranks2):
    both = ["ncclpy:all_reduce", "ncclpy:barrier", "ncclpy:broadcast"]
    assert ranks2.run(profiled) == [[*both, "ncclpy:send"], [*both, "ncclpy:recv"]]


def ended(rank, size):
    work = dist.all_reduce(torch.ones(1), async_op=True)
    world = dist.group.WORLD
    dist.destroy_process_group()
    return work.is_completed(), error_of(lambda: world.allreduce([torch.ones(1)]).wait())


def test_operation_is_done_when_its_group_is_destroyed(ranks2):
    for completed, said in ranks2.run(ended):
        assert completed and "closed" in said


def divided(rank, size):
    """Split the world as if it were on GPUs: torch refuses to split without any."""
    world = dist.group.WORLD
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        patch.setattr(torch.accelerator, "current_accelerator", lambda *_: CPU)
        world.bound_device_id = torch.device("cpu", 0)
        part = dist.split_group(world, [[0, 2], [1, 3]], timeout=datetime.timedelta(seconds=7))
        again = dist.split_group(world, [[3, 1]])
    found = []
    for group in (part, again):
        if group is not None:
            dist.all_reduce(tensor := torch.full((2,), float(rank)), group=group)
            found.append((dist.get_rank(group), tensor.tolist()))
    # Where it can, nccl makes a new group by splitting the world's backend: it must not split this one.
    sources = world._get_backend(CPU).supports_splitting, _get_split_source(world)
    return found, backend_of(part).timeout_ms(), world._get_backend(CPU).options._timeout.total_seconds(), sources


def test_split_group(ranks4):
    limit = datetime.timedelta(seconds=20)
    for rank, (found, timeout, of_world, sources) in enumerate(ranks4.run(divided, timeout=limit)):
        assert sources == (True, None)
        expected = (rank // 2, [2.0, 2.0] if rank % 2 == 0 else [4.0, 4.0])
        assert found == [expected] * (1 + rank % 2) and timeout == 7000 and of_world == 20


def test_pools_of_torch_need_gpus(host_engine, ranks2):
    assert "host engine" in ranks2.run(pool_of_cpu)[0]


def pool_of_cpu(rank, size):
    return error_of(lambda: backend_of().mem_allocator)


def test_detail_is_torchs_own_check():
    said = testing.run_python(
        """
        import os, torch, torch.distributed as dist, torch.multiprocessing as mp, ncclpy.interop.torch

        def rank(number, port):
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(number), WORLD_SIZE="2")
            dist.init_process_group("ncclpy")
            assert ncclpy.interop.torch.backend_of().group.size == 2
            dist.all_reduce(torch.ones(2))
            try:
                dist.all_reduce(torch.ones(2)) if number else dist.broadcast(torch.ones(3), 0)
            except RuntimeError as error:
                print(str(error)[:300].replace(chr(10), " "), flush=True)
            dist.destroy_process_group()

        import socket
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = str(one.getsockname()[1])
        mp.start_processes(rank, (port,), nprocs=2, start_method="fork")
        """,
        env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
    )
    assert said.stdout.count("Detected mismatch between collectives on ranks") == 2, said.stdout + said.stderr


def in_a_block(rank, size, how):
    group, tensors = dist.group.WORLD, [torch.full((2,), rank + 1.0) for _ in range(2)]
    strided = torch.full((2, 4), rank + 1.0)[:, ::2]
    with _coalescing_manager(group, CPU, async_ops=True):
        dist.broadcast(tensors[0], src=1)  # torch waits for it
        work = dist.broadcast(strided, src=1, async_op=True)
        dist.barrier()
        early = work.get_future()
        before = strided.unique().tolist(), work.is_completed()
    held = early.wait() if how == "future" else work.get_future().wait() if how == "late future" else None
    if held is None:
        work.wait()  # after the block: waits for all of it
    return before, strided.unique().tolist(), tensors[0].tolist(), work.is_completed(), work.is_success()


@pytest.mark.parametrize("how", ["wait", "future", "late future"])
def test_works_of_a_block_are_waited_for_with_it(ranks2, how):
    expected = [2.0], [2.0] * 2, True, True
    assert ranks2.run(in_a_block, how) == [(([rank + 1.0], False), *expected) for rank in range(2)]


def of_another_thread(rank, size):
    group, tensor, seen = dist.group.WORLD, torch.full((2,), rank + 1.0), []
    with _coalescing_manager(group, CPU, async_ops=True):
        work = dist.broadcast(tensor, src=1, async_op=True)
        waits = threading.Thread(target=lambda: (work.wait(), seen.append(tensor.tolist())))
        waits.start()
        waits.join(0.1)
        assert not seen
    waits.join()
    return seen


def test_another_thread_waits_for_a_block(ranks2):
    assert ranks2.run(of_another_thread) == [[[2.0] * 2]] * 2


def polled(rank, size):
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        work, asked = dist.all_reduce(torch.ones(1), async_op=True), []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TorchWork, "_explain", lambda self, error: asked.append(error))
            for _ in range(5):
                error_of(lambda: work.wait(datetime.timedelta(seconds=0.01)))
        store.set("go on", "")
        work.wait()
        return len(asked)
    store.wait(["go on"])
    dist.all_reduce(torch.ones(1))
    return 1


def test_repeated_waits_ask_other_ranks_once(ranks2):
    assert ranks2.run(polled) == [1, 1]
