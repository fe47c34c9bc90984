"""Process groups with ranks as threads of this process, over a store for threads."""

from __future__ import annotations

import os
import threading
import time
import traceback

import ncclpy
import testing
from ncclpy.bootstrap import LocalStore

#: Seconds that a test may take, more than any wait in it. NCCLPY_TEST_PATIENCE multiplies it, for slow tools.
DEADLINE = 60.0 * float(os.environ.get("NCCLPY_TEST_PATIENCE", "1"))


def run_groups(size, body, *, store=None, **options):
    """Call ``body(group)`` for each rank in its own thread and return the results.

    The groups are closed afterwards, or aborted if a rank fails; the error of the first failed rank is raised.
    """
    testing.need_devices(size)
    store = LocalStore() if store is None else store
    options.setdefault("timeout", DEADLINE / 2)
    results, errors = [None] * size, {}

    def run(rank):
        group = None
        try:
            group = ncclpy.ProcessGroup(store, rank, size, device=rank, **options)
            results[rank] = body(group)
            group.close(DEADLINE / 4)
        except BaseException as error:
            errors[rank] = (time.monotonic(), error, traceback.format_exc())
            if group is not None:
                group.abort(f"rank {rank} failed: {error}")
                group.close()

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + DEADLINE
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    stuck = [thread.name for thread in threads if thread.is_alive()]
    assert not stuck, f"{stuck} not done after {DEADLINE} s"
    if errors:
        rank, (_, error, text) = min(errors.items(), key=lambda item: item[1][0])
        raise AssertionError(f"rank {rank} of {sorted(errors)} failed first:\n{text}") from error
    return results
