"""A coordinator over a group that continues with other ranks."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from group_ranks import DEADLINE

import ncclpy
import testing
from ncclpy.bootstrap import LocalStore
from ncclpy.coordinator import Coordinator
from ncclpy.core.runtime import device as device_module


def test_survivors_continue_after_recover():
    store, lost, meet = LocalStore(), threading.Event(), threading.Barrier(3)

    def rank(each):
        with device_module.using(each.rank):
            group = ncclpy.ProcessGroup(store, each.rank, 3, device=each.rank, timeout=DEADLINE / 2)
            coordinator = Coordinator(group)
            array = np.ones(2)
            coordinator.all_reduce("x", array).wait(DEADLINE)
            part = coordinator.process_set([0, 2], DEADLINE) if each.rank != 1 else None
            pending = coordinator.all_reduce("y", np.ones(2)) if each.rank != 1 else None
            meet.wait(DEADLINE)
            if each.rank == 1:
                coordinator.abort("this rank goes", timeout=DEADLINE)
                group.close()
                lost.set()
                return array.tolist()
            error = pending.exception(DEADLINE)
            assert "ended by rank 1: this rank goes" in str(error)
            with pytest.raises(ncclpy.NcclAborted):
                coordinator.barrier("z")
            lost.wait(DEADLINE)
            group.recover(2.0)
            coordinator.all_reduce("x", array).wait(DEADLINE)
            assert coordinator.rank == group.rank and coordinator.size == group.size == 2 and coordinator.error is None
            with pytest.raises(ncclpy.NcclAborted, match="its coordinator continues with other ranks"):
                part.barrier("x")
            part = coordinator.process_set([1, 0], DEADLINE)
            part.all_reduce("x", array).wait(DEADLINE)
            with coordinator:
                pass
            group.close()
            return array.tolist()

    assert testing.run_threads(3, rank, DEADLINE) == [[12.0] * 2, [3.0] * 2, [12.0] * 2]


def test_reconfigured_group_ends_operations_in_flight():
    store, meet = LocalStore(), threading.Barrier(2)

    def rank(each):
        with device_module.using(each.rank):
            group = ncclpy.ProcessGroup(store, each.rank, 2, device=each.rank, timeout=DEADLINE / 2)
            coordinator = Coordinator(group)
            coordinator.barrier("x").wait(DEADLINE)
            pending = coordinator.all_reduce(f"of rank {each.rank} alone", np.ones(1))
            handles = [None, None]
            store.set(f"handle {each.rank}", group.reconfigure_handle().encode())
            handles = [store.get(f"handle {r}").decode() for r in range(2)]
            group.reconfigure(handles[::-1], uuid="turned")
            meet.wait(DEADLINE)
            array = np.array([float(each.rank)])
            coordinator.broadcast("x", array, root=0).wait(DEADLINE)
            assert "continues with other ranks" in str(pending.exception(DEADLINE))
            coordinator._leave()
            coordinator.close(DEADLINE)
            group.close()
            return coordinator.rank, array[0]

    assert testing.run_threads(2, rank, DEADLINE) == [(1, 1.0), (0, 1.0)]
