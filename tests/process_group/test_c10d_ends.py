"""Ends and restarts of groups: the first half of the process group cases of PyTorch's test_c10d_nccl.

Each is rewritten for `ncclpy.ProcessGroup` with the same assertions. The other half is in test_c10d_operations.py.

- abort_pg, close_pg, restart_pg, restart_pg_after_error, abort_in_destroy_pg, close_multi_pg_unordered: test_… of that
  name
- abort_in_destroy_multi_pgs: test_abort_in_destroy_multi_pgs; no call ends all groups of a process, each is ended
- abort_in_destroy_mixed_empty_pgs: test_abort_in_destroy_mixed_empty_pgs
- destruct_before_terminate_pg: test_fork_cannot_use_group_and_dropped_group_does_no_harm in
  test_group_processes.py
- nccl_dist_backend_error: test_nccl_dist_backend_error
- nccl_errors_blocking: test_nccl_errors_blocking; with a killed process, where the engine detects it,
  test_killed_rank_ends_group_on_all_ranks in test_group_processes.py
- nccl_errors_nonblocking: test_nccl_errors_nonblocking
- nccl_blocking_wait_with_barrier: test_nccl_blocking_wait_with_barrier
- error_detection_and_propagation: test_error_detection_and_propagation
- nccl_errors_dump: test_on_error_exit_ends_the_process in test_group_ends.py; on_error="exit" dumps, then ends
- timeout_dumps, timeout_dumps_on_stuck_ranks, trace_while_stuck: test_… of that name
- trace_while_active: test_trace_while_active; "only active" means neither completed nor failed
- long: test_long
- batched_send_recv: test_batched_send_recv
- invalid_nccl_blocking_wait_env does not apply: the call (`wait` or `synchronize`), not a variable, decides whether a
  wait blocks. Invalid options: test_invalid_options
"""

from __future__ import annotations

import json
import threading
import time

import numpy as np
import pytest
from group_ranks import DEADLINE

import ncclpy
import testing
from ncclpy.bootstrap import LocalStore

ONES = np.ones(100, np.float32)


def abort_pg(world):
    with world.group() as group:
        world.sum(group, ONES)
        world.meet()
        array = world.array(ONES)
        if world.rank == 0:
            work = world.call(group.all_reduce, array)  # rank 1 does not begin it
            aborting = threading.Thread(target=group.abort, args=("it is stuck",))
            aborting.start()
            with pytest.raises(ncclpy.NcclAborted, match="it is stuck"):
                work.wait(DEADLINE)
            world.lib.read(array)  # the device still works
            aborting.join(DEADLINE)
            assert not aborting.is_alive()
        testing.wait_for(lambda: group.error is not None, "the news")


def test_abort_pg(run):
    run(abort_pg)


def close_pg(world, eager):
    group = world.group()
    if eager:
        group.connect(timeout=DEADLINE)
    total = world.sum(group, ONES)
    group.close()
    with pytest.raises(ValueError, match="is closed"):
        world.sum(group, ONES)
    return float(total[0])


@pytest.mark.parametrize("eager", [True, False])
def test_close_pg(run, eager):
    assert run(close_pg, eager) == [2, 2]


def restart_pg(world):
    totals = []
    for count in (100, 25):
        with world.group() as group:
            totals.append(world.sum(group, np.full(count, 1.0, np.float32)).tolist())
        with pytest.raises(ValueError, match="is closed"):
            world.sum(group, ONES)
    return totals == [[2.0] * 100, [2.0] * 25]


def test_restart_pg(run):
    assert run(restart_pg) == [True, True]


def restart_pg_after_error(world):
    group = world.group()
    world.sum(group, ONES)
    world.meet()
    assert group.error is None
    if world.rank == 0:
        begun = time.monotonic()
        work = world.call(group.all_reduce, world.array(ONES), timeout=0.3)
        assert isinstance(work.exception(DEADLINE), ncclpy.NcclTimeout) and group.error is work.exception()
        assert 0.3 <= time.monotonic() - begun < DEADLINE / 3
    testing.wait_for(lambda: group.error is not None, "the news")
    group.abort("all of them")
    with world.group() as again:
        total = world.sum(again, ONES)
        assert again.error is None and group.error is not None
    group.close()
    return float(total[0])


def test_restart_pg_after_error(run):
    assert run(restart_pg_after_error) == [2, 2]


def abort_in_destroy_pg(world):
    try:
        with world.group() as group:
            world.sum(group, ONES)
            world.meet()
            raise KeyError("in the block")
    except KeyError:
        pass
    with pytest.raises(ncclpy.NcclAborted, match=r"has ended.*in the block"):
        world.sum(group, ONES)
    with pytest.raises(ncclpy.NcclAborted, match="has ended"):
        group.connect()
    return type(group.error).__name__


def test_abort_in_destroy_pg(run):
    """A with block that an exception leaves aborts the group, which cannot be used afterwards."""
    assert run(abort_in_destroy_pg) == ["NcclAborted"] * 2


def abort_in_destroy_multi_pgs(world):
    group = world.group()
    parts = [group.new_group([0, 1]), group.new_group([1, 0])]
    totals = [float(world.sum(each, ONES)[0]) for each in (group, *parts)]
    arrays = [world.array(ONES) for _ in totals]  # allocated before the device is stuck
    world.meet()
    if world.rank == 0:  # stuck in all groups
        works = [world.call(each.all_reduce, array) for each, array in zip((group, *parts), arrays, strict=True)]
        for each in (group, *parts):
            each.abort("the end")
        assert all(isinstance(work.exception(DEADLINE), ncclpy.NcclAborted) for work in works)
    for each in (group, *parts):  # the parent of the other groups first
        testing.wait_for(lambda each=each: each.error is not None, "the news")
        each.close()
    return totals


def test_abort_in_destroy_multi_pgs(run):
    assert run(abort_in_destroy_multi_pgs) == [[2, 2, 2]] * 2


def abort_in_destroy_mixed_empty_pgs(world):
    group = world.group()
    unused, used = group.new_group([0, 1]), group.new_group([0, 1])
    totals = [float(world.sum(each, ONES)[0]) for each in (group, used)]
    for each in (group, unused, used):
        each.close()
        with pytest.raises(ValueError, match="is closed"):
            each.barrier()
    return totals


def test_abort_in_destroy_mixed_empty_pgs(run):
    assert run(abort_in_destroy_mixed_empty_pgs) == [[2, 2]] * 2


def close_multi_pg_unordered(world):
    with world.group() as group:
        parts = [group.new_group([0, 1]), group.new_group([0, 1])]
        totals = [float(world.sum(each, ONES)[0]) for each in (group, *parts)]
        for part in parts[:: 1 if world.rank else -1]:
            part.close()
        del part, parts
        return [*totals, float(world.sum(group, ONES)[0])]


def test_close_multi_pg_unordered(run):
    assert run(close_multi_pg_unordered) == [[2, 2, 2, 2]] * 2


def nccl_dist_backend_error(world):
    group = ncclpy.ProcessGroup(world.store, world.rank, world.size, device=0, timeout=DEADLINE / 2)
    array = world.lib.make(ONES, 0)
    with pytest.raises(ncclpy.NcclError) as caught:
        # The call itself raises if the other rank was refused, and ended the group, earlier.
        world.call(group.broadcast, array, root=0).wait(DEADLINE)
    assert isinstance(caught.value, RuntimeError)
    group.close()
    return str(caught.value)


def test_nccl_dist_backend_error(run):
    """Both ranks use one device, which NCCL refuses unless it is told not to."""
    testing.need_devices(2)
    errors = run(nccl_dist_backend_error)
    assert any("invalid usage" in error for error in errors), errors


def nccl_errors_blocking(world):
    group = world.group()
    world.sum(group, ONES)
    world.meet()
    if world.rank == 0:
        with pytest.raises(ncclpy.NcclError) as caught:
            world.call(group.all_reduce, world.array(ONES), timeout=0.3).wait(DEADLINE)
        error = str(caught.value)
    else:
        error = None
    group.close()
    return error


def test_nccl_errors_blocking(run):
    """Rank 1 leaves; the wait of rank 0 in a collective ends with an error."""
    error, _ = run(nccl_errors_blocking)
    assert "all_reduce" in error


def nccl_errors_nonblocking(world):
    with world.group() as group:
        world.sum(group, ONES)
        world.meet()
        array = world.array(ONES)
        if world.rank == 1:
            world.meet()  # rank 0 has begun, and waits on its stream
        work = world.call(group.all_reduce, array)
        if world.rank == 0:
            if world.lib.name == "torch":
                work.synchronize()
            assert not work.is_completed()
            world.meet()
        work.wait(DEADLINE)
        return float(world.lib.read(array)[0])


def test_nccl_errors_nonblocking(run):
    """An operation that waits for a late rank blocks no call, and is no error."""
    assert run(nccl_errors_nonblocking) == [2, 2]


def nccl_blocking_wait_with_barrier(world):
    group = world.group()
    group.barrier().wait(DEADLINE)
    world.meet()
    if world.rank == 0:
        with pytest.raises(ncclpy.NcclTimeout, match="was not done within its timeout"):
            group.barrier(timeout=0.3).wait(DEADLINE)
    group.close()
    return group.seq


def test_nccl_blocking_wait_with_barrier(run):
    assert run(nccl_blocking_wait_with_barrier) == [2, 1]


def error_detection_and_propagation(world):
    group = world.group()
    group.barrier().wait(DEADLINE)
    world.meet()
    assert group.error is None
    if world.rank == 0:
        work = world.call(group.all_reduce, world.array(ONES), timeout=0.3)
        assert work.exception(DEADLINE) is group.error
    testing.wait_for(lambda: group.error is not None, "the news")
    name, text = type(group.error).__name__, str(group.error)
    group.abort("all of them")  # later errors do not replace the first
    assert str(group.error) == text
    group.close()
    return name, text


def test_error_detection_and_propagation(run):
    (first, _), (second, text) = run(error_detection_and_propagation)
    assert (first, second) == ("NcclTimeout", "NcclTimeout")
    assert "was ended by rank 0 of 2: all_reduce on device 0" in text


def test_timeout_dumps(tmp_path):
    testing.need_devices(2)
    testing.run_python(
        """
        import numpy as np, ncclpy
        from group_fixtures import in_threads

        def program(world):
            group = world.group()
            world.sum(group, np.ones(3))
            world.meet()
            if world.rank == 0:
                work = world.call(group.all_reduce, world.array(np.ones(3)), timeout=0.3)
                assert isinstance(work.exception(30), ncclpy.NcclTimeout)
            world.meet()
            group.close()

        in_threads(2, program)
        """,
        env={"NCCLPY_DUMP_DIR": str(tmp_path)},
    )
    (path,) = tmp_path.iterdir()
    entries = json.loads(path.read_text())["entries"]
    late = [each for each in entries if each["sequence"] == 1]
    assert [(each["operation"], each["rank"], each["state"]) for each in late] == [("all_reduce", 0, "failed")]


def timeout_dumps_on_stuck_ranks(world, folder):
    group, written = world.group(name="timeout-dumps"), threading.Event()

    def dump(error):
        ncclpy.recorder.dump(f"{folder}/{world.rank}.json", reason=str(error))
        written.set()

    group.on_abort(dump)
    world.sum(group, ONES)
    world.meet()
    if world.rank == 0:
        work = world.call(group.all_reduce, world.array(ONES), timeout=0.3)
        assert isinstance(work.exception(DEADLINE), ncclpy.NcclTimeout)
    assert written.wait(DEADLINE)  # rank 1 is stuck elsewhere
    group.close()


def test_timeout_dumps_on_stuck_ranks(processes, tmp_path):
    """Both ranks dump, also the missing one, and the dumps tell which rank is missing."""
    processes.run(timeout_dumps_on_stuck_ranks, str(tmp_path))
    said = {}
    for rank in range(2):
        entries = json.loads((tmp_path / f"{rank}.json").read_text())["entries"]
        mine = [each for each in entries if "timeout-dumps" in str(each["communicator"])]
        said[rank] = [(each["sequence"], each["state"]) for each in mine]
    assert said == {0: [(0, "completed"), (1, "failed")], 1: [(0, "completed")]}


def entries_of(name, rank):
    found = ncclpy.recorder.snapshot()["entries"]
    return [each for each in found if name in str(each["communicator"]) and each["rank"] == rank]


def trace_while_stuck(world):
    with world.group(name=f"while stuck {world.how}") as group:
        world.sum(group, ONES)
        world.meet()
        array = world.array(ONES)
        if world.rank == 1:
            work = world.call(group.all_reduce, array)
            testing.wait_for(lambda: work.state == "launched")
        seen = [(each["sequence"], each["state"]) for each in entries_of(group.name, world.rank)]
        world.meet()
        if world.rank == 0:
            work = world.call(group.all_reduce, array)
        work.wait(DEADLINE)
    return seen


def test_trace_while_stuck(run):
    assert run(trace_while_stuck) == [[(0, "completed")], [(0, "completed"), (1, "launched")]]


def trace_while_active(world):
    with world.group(name=f"while active {world.how}", timing=True) as group:
        world.sum(group, ONES)
        world.meet()
        array = world.array(ONES)
        if world.rank == 1:
            work = world.call(group.all_reduce, array)
        found = entries_of(group.name, world.rank)
        active = [each["sequence"] for each in found if each["state"] not in ("completed", "failed")]
        world.meet()
        if world.rank == 0:
            work = world.call(group.all_reduce, array)
        work.wait(DEADLINE)
        assert work.duration >= 0
    return active


def test_trace_while_active(run):
    assert run(trace_while_active) == [[], [1]]


def long(world):
    ncclpy.recorder.resize(10)
    try:
        with world.group() as group:
            for _ in range(12):
                world.call(group.broadcast, world.array(ONES), root=0).wait(DEADLINE)
            return [(each["sequence"], each["state"]) for each in ncclpy.recorder.snapshot()["entries"]]
    finally:
        ncclpy.recorder.resize(2000)


def test_long(processes):
    """With more operations than the recorder keeps, the newest are kept."""
    assert processes.run(long) == [[(number, "completed") for number in range(2, 12)]] * 2


def batched_send_recv(world, counts):
    with world.group(name=f"batched {len(counts)} {world.how}", timing=True) as group:
        for _ in range(20):
            arrays = [world.array(np.full(count, 2.0 * world.rank, np.float32)) for count in counts]
            with group.coalescing() as work:
                for array in arrays:
                    world.call(group.send if world.rank else group.recv, array, 1 - world.rank)
            work.wait(DEADLINE)
            assert all((world.lib.read(array) == 2).all() for array in arrays)
        found = entries_of(group.name, world.rank)
        assert group.seq == 0, "a collective was counted"
    return [(each["operation"], each["sequence"], each["state"], each["count"]) for each in found]


@pytest.mark.parametrize("counts", [[6], [6, 25, 1]])
def test_batched_send_recv(run, counts):
    for rank, found in enumerate(run(batched_send_recv, counts)):
        operation = "send" if rank else "recv"
        assert found == [(operation, number, "completed", sum(counts)) for number in range(20)]


def test_invalid_options(arrays):
    for error, words, options in (
        (ValueError, "on_error", {"on_error": "abc"}),
        (ValueError, "timeout", {"timeout": -1}),
        (TypeError, "timeout", {"timeout": "abc"}),
        (ValueError, "blocking", {"config": ncclpy.Config(blocking=False)}),
        (TypeError, "config", {"config": {"max_ctas": 4}}),
        (ValueError, "name", {"name": ""}),
        (ValueError, "rank", {"rank": 2}),
    ):
        with pytest.raises(error, match=words):
            ncclpy.ProcessGroup(LocalStore(), **({"rank": 0, "size": 2, "device": 0} | options))
