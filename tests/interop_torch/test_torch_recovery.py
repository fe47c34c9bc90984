"""A job continues without a rank that has died, and names it; a user's test shows the same without a death."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from foreign_stores import free_port
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_ranks import Ranks

import ncclpy
import testing
from ncclpy.interop.torch import backend_of, recover
from ncclpy.interop.torch.store import TorchStore

STEPS, DIES_IN, LOST_RANK = 8, 3, 2


def train(rank, step_of, on_error):
    """Train for `STEPS` steps; return the losses, and what `on_error` returned for a failure."""
    torch.manual_seed(0)
    module = nn.Linear(8, 1)
    model, step, losses, said = DistributedDataParallel(module), 0, [], None
    while step < STEPS:
        try:
            optimizer = torch.optim.SGD(module.parameters(), 0.005)
            optimizer.zero_grad()
            step_of(step)
            loss = (model(torch.ones(4, 8) * (rank + 1)) - 1).square().mean()
            loss.backward()
            optimizer.step()
        except RuntimeError as error:
            said = on_error(error)
            if said is None:
                return None
            model = DistributedDataParallel(module)  # it broadcasts rank 0's parameters
            continue
        losses.append(loss.item())
        step += 1
    return losses, said, dist.get_world_size()


def job(rank, size, folder):
    dist.init_process_group(
        "ncclpy",
        store=dist.FileStore(str(folder / "store"), size),
        rank=rank,
        world_size=size,
        pg_options={"on_error": "abort"},
    )
    died = 0.0

    def step_of(step):
        if step == DIES_IN and rank == LOST_RANK and dist.get_world_size() == size:
            (folder / "killed").write_text(repr(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)

    def on_error(error):
        nonlocal died
        found = recover(timeout=5)
        died = time.monotonic()
        return str(error), found

    return *train(rank, step_of, on_error), died


def test_three_ranks_continue_without_the_fourth(extension, tmp_path):
    testing.need_processes(4)
    with contextlib.closing(Ranks(4)) as ranks:
        found = ranks.run(job, tmp_path, backend=None, ends=[LOST_RANK])
    assert found.pop(LOST_RANK) is None
    killed = float((tmp_path / "killed").read_text())
    for losses, (said, recovery), size, resumed in found:
        assert size == 3 and recovery.survivors == (0, 1, 3) and recovery.lost == (LOST_RANK,)
        assert "rank 2 of 4 is dead" in said, said
        assert len(losses) == STEPS and losses[-1] < losses[0]
        print(f"{resumed - killed:.3f} s from the kill to the new world")
        assert resumed - killed < 20  # 2 s on an idle machine


def in_a_unit_test(rank, size):
    plan = f"rank={LOST_RANK} call=AllReduce nth=5 do=error:ncclRemoteError"
    with ncclpy.faults(plan) if rank == LOST_RANK else contextlib.nullcontext():

        def on_error(error):
            if rank == LOST_RANK:  # this rank had the fault, and leaves
                backend_of().group.close()
                return None
            return recover(timeout=1)

        return train(rank, lambda step: None, on_error)


def test_recovery_in_a_users_test(ranks4):
    found = ranks4.run(in_a_unit_test)
    assert found.pop(LOST_RANK) is None
    for losses, recovery, size in found:
        assert size == 3 and recovery.lost == (LOST_RANK,) and losses[-1] < losses[0]


def leave_recovery_late(rank, size, port):
    """Recover over a store that rank 0 serves; rank 1 learns late that all have come."""
    ask = TorchStore._ask

    def ask_late(store, call, *arguments):
        if "the reconfiguration" in repr(arguments):
            time.sleep(0.5)
        return ask(store, call, *arguments)

    dist.init_process_group("ncclpy", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(TorchStore, "_ask", ask_late)
        found = recover(timeout=20)
    dist.all_reduce(tensor := torch.ones(1))
    return found.survivors, tensor.item()


def test_rank_that_leaves_a_recovery_last_still_has_the_store(ranks4):
    """The rank that serves the store leaves first, and ends the old world."""
    assert ranks4.run(leave_recovery_late, free_port(), backend=None) == [((0, 1, 2, 3), 4.0)] * 4


def options_of(rank, size):
    """Recover with the options of the world; on a CPU alone it cannot be bound to a device."""
    given, begin = {}, dist.init_process_group

    def init(*arguments, device_id=None, **options):
        given.update(options, device_id=device_id)
        begin(*arguments, **options)

    with contextlib.suppress(dist.DistBackendError):  # ranks past it end the group, perhaps before others are
        dist.barrier()
    dist.group.WORLD.bound_device_id = torch.device("cpu", 0)
    if rank == LOST_RANK:
        backend_of().group.close()
        return None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "init_process_group", init)
        recover(timeout=1)
    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.wait()
    return given["device_id"], given["pg_options"], work._get_duration() >= 0, backend_of().timeout_ms()


def test_options_and_device_stay(ranks4):
    limit = datetime.timedelta(seconds=21)
    found = ranks4.run(options_of, pg_options={"timing": True}, timeout=limit)
    assert found.pop(LOST_RANK) is None
    assert found == [(torch.device("cpu", 0), {"on_error": "abort", "timing": True}, True, 21_000)] * 3


def test_recover_under_torchs_own_check():
    said = testing.run_python(
        """
        import torch, torch.distributed as dist
        from ncclpy.interop.torch import backend_of, recover
        dist.init_process_group("ncclpy", store=dist.HashStore(), rank=0, world_size=1)
        assert hasattr(dist.group.WORLD._get_backend(torch.device("cpu")), "wrapped_pg")
        backend_of().group.abort("a test")
        print(recover(timeout=1).survivors)
        dist.all_reduce(torch.ones(2))
        dist.destroy_process_group()
        """,
        env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
    )
    assert said.stdout == "(0,)\n"
