"""Coordinators whose ranks are threads of this process, over a store for threads."""

from __future__ import annotations

from group_ranks import DEADLINE

import ncclpy
import testing
from ncclpy.bootstrap import LocalStore
from ncclpy.coordinator import Coordinator
from ncclpy.core import device as device_module


def run_coordinators(size, body, *, over="store", shut=True, **options):
    """Call ``body(coordinator)`` for each rank in a thread of its own and return what they return.

    Over ``"store"`` or ``"group"``. They are shut down afterwards, or, when a rank fails, ended for all.
    """
    testing.need_devices(size)
    store = LocalStore()

    def rank(each):
        with device_module.using(testing.device_of(each.rank)):
            if over == "group":
                with ncclpy.ProcessGroup(store, each.rank, size, device=each.rank, timeout=DEADLINE / 2) as group:
                    return _with(Coordinator(group, **options), body, shut)
            return _with(Coordinator((store, each.rank, size), **options), body, shut)

    return testing.run_threads(size, rank, DEADLINE)


def _with(coordinator, body, shut):
    if not shut:
        return body(coordinator)
    with coordinator:
        return body(coordinator)
