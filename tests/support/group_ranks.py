"""Process groups with ranks as threads of this process, over a store for threads."""

from __future__ import annotations

import contextlib
import functools
import os
import time

import thread_ranks

import ncclpy
import testing
from ncclpy.bootstrap import LocalStore

#: Seconds that a test may take, more than any wait in it. NCCLPY_TEST_PATIENCE multiplies it, for slow tools.
DEADLINE = 60.0 * float(os.environ.get("NCCLPY_TEST_PATIENCE", "1"))


def run_groups(size, body, *, store=None, **options):
    """Call ``body(group)`` for each rank in its own thread and return the results.

    The groups are closed afterwards, or aborted if a rank fails; the error that was raised first is raised.
    """
    testing.need_devices(size)
    store = LocalStore() if store is None else store
    options.setdefault("timeout", DEADLINE / 2)
    groups = []

    def run(rank):
        groups.append(group := ncclpy.ProcessGroup(store, rank, size, device=rank, **options))
        result = body(group)
        group.close(DEADLINE / 4)
        return result

    def abort(reason):
        threads = thread_ranks.start([functools.partial(_abort, group, reason) for group in list(groups)], "abort ")
        thread_ranks.join(threads, time.monotonic() + 10)

    return thread_ranks.run_ranks(size, run, DEADLINE, abort)


def _abort(group, reason):
    with contextlib.suppress(ncclpy.NcclError):  # the failure that caused the abort is reported instead
        group.abort(reason)
        group.close()
