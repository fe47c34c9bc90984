"""Groups of processes that are started by `ncclpy run`, killed, forked, or dropped."""

from __future__ import annotations

import re

import pytest
from group_fixtures import launched
from warm_ranks import run_ranks

import testing

pytestmark = pytest.mark.usefixtures("host_engine")


def test_group_of_launched_processes(tmp_path):
    code, said = launched(
        tmp_path,
        3,
        """
        with ncclpy.init_process_group(timeout=60, name="started") as group:
            total = group.all_reduce(np.full(2, group.rank)).result(60)
            got = np.zeros(1, np.int64)
            works = [group.send(np.full(1, group.rank), (group.rank + 1) % 3), group.recv(got, (group.rank - 1) % 3)]
            for work in works:
                work.wait(60)
            print("rank", group.rank, "of", group.size, "device", group.device, total.tolist(), int(got[0]))
        """,
    )
    assert code == 0, said
    for rank in range(3):
        assert f"rank {rank} of 3 device {rank} [3, 3] {(rank - 1) % 3}" in said


def test_killed_rank_ends_group_on_all_ranks(tmp_path):
    """Rank 0, in a collective with the killed rank, sees its end; rank 2 waits for nothing, and hears by the store."""
    codes, said = run_ranks(
        tmp_path,
        3,
        """
        group = ncclpy.init_process_group(timeout=60)
        group.all_reduce(np.ones(2)).wait(60)
        group.store.barrier("all are done", group.rank, 3)  # or its end would be that of what came before
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if group.rank == 0:
            error = group.all_reduce(np.ones(2)).exception(60)
        end = time.monotonic() + 60
        while group.error is None and time.monotonic() < end:
            time.sleep(0.01)
        print("rank", group.rank, "has heard:", group.error, flush=True)
        group.close()
        """,
    )
    assert codes == [0, -9, 0], said
    assert re.search(r"rank 0 has heard: nccl\w+: remote process exited", said), said  # in this call or the next
    assert "rank 2 has heard: process group 'default' was ended by rank 0 of 3" in said, said
    assert said.count("rank 1 of 3 is dead") >= 2, said


def test_rank_that_is_not_started_is_named(tmp_path):
    codes, said = run_ranks(
        tmp_path,
        3,
        """
        from pathlib import Path
        if os.environ["RANK"] != "2":
            group = ncclpy.init_process_group(timeout=0.5)
            came = [Path(__file__).with_name(f"rank {rank}") for rank in (0, 1)]
            came[group.rank].touch()  # on a busy machine a process may begin seconds after another
            while not all(each.exists() for each in came):
                time.sleep(0.01)
            print("rank", group.rank, "says", repr(group.all_reduce(np.ones(2)).exception(60)), flush=True)
            group.close()
        """,
    )
    assert codes == [0] * 3, said
    late = "rank 2 of 3 did not arrive to make communicator 'all' of process group 'default' within 500 ms"
    assert late in said, said


def test_init_process_group_without_launcher_is_an_error():
    said = testing.run_python(
        """
        import ncclpy
        try:
            ncclpy.init_process_group()
        except RuntimeError as error:
            print(error)
        """,
        env={"RANK": None, "WORLD_SIZE": None},
        warm=True,
    ).stdout
    assert "ncclpy run" in said


def test_fork_cannot_use_group_and_dropped_group_does_no_harm():
    testing.run_python(
        """
        import gc, os, threading, time, warnings, weakref
        import numpy as np, ncclpy
        from ncclpy.bootstrap import LocalStore

        store = LocalStore()
        group = ncclpy.ProcessGroup(store, 0, 1, device=0)
        group.all_reduce(np.ones(3)).wait(30)
        if os.fork() == 0:
            try:
                group.all_reduce(np.ones(3))
            except Exception as error:
                os._exit(0 if "fork" in str(error) else 1)
            os._exit(2)
        assert os.wait()[1] == 0

        gone = weakref.ref(group)
        work = group.all_reduce(np.ones(3))
        del group
        work.wait(30)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            end = time.monotonic() + 30
            while (gone() is not None or not told) and time.monotonic() < end:
                gc.collect()
                time.sleep(0.01)
        assert gone() is None
        assert any("by its ProcessGroup" in str(each.message) for each in told), told
        again = ncclpy.ProcessGroup(store, 0, 1, device=0)
        again.all_reduce(np.ones(3)).wait(30)
        again.close()
        """,
        warm=True,
    )


def test_rank_of_process_that_ended_before_meeting_is_told_apart():
    """Rank 1 makes the group and exits, rank 2 never makes it: the store tells them apart."""
    testing.run_python(
        """
        import os, signal, time
        import numpy as np, ncclpy
        from ncclpy.bootstrap import TCPStore

        with TCPStore("127.0.0.1", 0, serve=True) as store:
            if os.fork() == 0:
                own = TCPStore("127.0.0.1", store.port)
                group = ncclpy.ProcessGroup(own, 1, 3, device=1, name="told")
                own.set("rank 1 was there", b"")
                os.kill(os.getpid(), signal.SIGKILL)
            store.get("rank 1 was there", 60)
            assert os.wait()[1] == signal.SIGKILL
            end = time.monotonic() + 60
            while store.keys("ncclpy/group/told/1/alive") and time.monotonic() < end:  # the server hears of it
                time.sleep(0.01)
            with ncclpy.ProcessGroup(store, 0, 3, device=0, timeout=0.5, name="told") as group:
                said = str(group.all_reduce(np.ones(2)).exception(60))
        assert said.startswith("ranks 1-2 of 3 did not arrive"), said
        assert "rank 1's process has ended" in said and "rank 2 has not made this group" in said, said
        """,
        warm=True,
    )
