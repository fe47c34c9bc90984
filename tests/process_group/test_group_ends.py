"""How groups end: missing ranks, deadlines, aborts on all ranks, hooks, and close."""

from __future__ import annotations

import _thread
import contextlib
import gc
import itertools
import re
import threading
import time
import weakref

import numpy as np
import pytest
import thread_ranks
from group_ranks import DEADLINE, run_groups

import ncclpy
import testing
from ncclpy.bootstrap import FileStore, LocalStore, TCPStore
from ncclpy.peers.inquiry import Inquiries
from ncclpy.process_group import lifecycle, membership
from ncclpy.process_group.group_status import GroupStatus


def test_missing_rank_is_named(arrays):
    group = ncclpy.ProcessGroup(LocalStore(), 1, 3, device=0, timeout=0.3)
    array = arrays.argument(arrays.make(np.ones(3), 0))
    work = group.all_reduce(array)
    with pytest.raises(ncclpy.NcclTimeout, match=r"is pending .*the 3 ranks of communicator 'all', which"):
        work.wait(0.01)
    assert isinstance(work.exception(DEADLINE), ncclpy.NcclTimeout)
    assert work.exception().missing == [0, 2]
    assert "ranks 0, 2 of 3 did not arrive" in str(work.exception())
    with pytest.raises(ncclpy.NcclAborted, match=r"process group 'default' has ended: .*ranks 0, 2 of 3") as caught:
        group.all_reduce(array)
    assert caught.value.__cause__ is group.error is work.exception()
    with pytest.raises(ncclpy.NcclAborted, match="has ended"):
        group.connect()
    group.close()


@pytest.mark.parametrize("call", ["all_reduce", "wait", "recover"])
def test_reader_of_a_stream_that_a_call_has_told_is_not_interrupted(host_engine, monkeypatch, call):
    """The other readers are told when the other ranks are: by then this thread may handle the error."""
    begun, tells = threading.Event(), threading.Event()
    abort_when_confirmed, decide = lifecycle.abort_when_confirmed, membership.decide

    def abort_later(*arguments):
        assert tells.wait(DEADLINE)
        abort_when_confirmed(*arguments)

    def handle_error():
        tells.set()
        for _ in range(300):  # an asynchronous exception would be raised here
            time.sleep(0.001)

    def decide_later(store, name, rank, *arguments):
        if rank == 0:
            handle_error()
        return decide(store, name, rank, *arguments)

    monkeypatch.setattr(lifecycle, "abort_when_confirmed", abort_later)
    monkeypatch.setattr(membership, "decide", decide_later)

    def body(group):
        group.all_reduce(np.ones(3)).wait(DEADLINE)
        if group.rank == 0:
            work = group.all_reduce(np.ones(3))
            work.synchronize()
            begun.set()
            testing.wait_for(work.is_completed, "the end of the group", DEADLINE)
            if call != "recover":
                with pytest.raises(ncclpy.NcclAborted):
                    work.wait(DEADLINE) if call == "wait" else group.all_reduce(np.ones(3))
                handle_error()
        else:
            assert begun.wait(DEADLINE)
            group.abort("a test")
        if call == "recover":
            assert group.recover(DEADLINE / 4).survivors == (0, 1)

    run_groups(2, body)


def test_reader_of_a_stream_that_another_operations_failure_has_told_is_not_interrupted(host_engine, monkeypatch):
    """Two operations fail at once: the second ends the group, a call raises the error of the first."""
    asks, second, failed, told, tells = itertools.count(), *(threading.Event() for _ in range(4))
    both_ready = threading.Barrier(2)
    abort_when_confirmed, begin_end = lifecycle.abort_when_confirmed, GroupStatus.begin_end

    def ask(*_):
        if next(asks) == 0:
            assert second.wait(DEADLINE)
        else:
            second.set()
            assert failed.wait(DEADLINE)
        return None, None

    def begin_end_later(group_status):
        begin_end(group_status)
        if group_status.rank == 0:
            failed.set()
            assert told.wait(DEADLINE)

    def abort_later(*arguments):
        assert tells.wait(DEADLINE)
        abort_when_confirmed(*arguments)

    monkeypatch.setattr(Inquiries, "ask", ask)
    monkeypatch.setattr(GroupStatus, "begin_end", begin_end_later)
    monkeypatch.setattr(lifecycle, "abort_when_confirmed", abort_later)

    def body(group):
        group.all_reduce(np.ones(3)).wait(DEADLINE)
        both_ready.wait(DEADLINE)  # the end would also end rank 1's wait for this
        if group.rank == 0:
            first, synchronized = group.all_reduce(np.ones(3), timeout=0.5), threading.Event()
            # The error is raised in this thread, which has made the group, as `threading` does not know the other one.
            _thread.start_new_thread(lambda: (first.synchronize(), synchronized.set()), ())
            assert synchronized.wait(DEADLINE)
            with pytest.raises(ncclpy.NcclTimeout):
                group.all_reduce(np.ones(3)).wait(DEADLINE)
            told.set()
            tells.set()
            for _ in range(300):  # an asynchronous exception would be raised here
                time.sleep(0.001)
        testing.wait_for(lambda: group.error is not None, "the end of the group", DEADLINE)

    with ncclpy.faults("rank=0 call=AllReduce nth=3 do=error:ncclRemoteError"):
        run_groups(2, body)


def test_abort_ends_wait_for_missing_ranks(host_engine):
    """An abort ends the thread that makes the communicator, and a call of `split`, long before the deadline."""

    def making():
        return [each for each in threading.enumerate() if each.name == "ncclpy-init" and each not in before]

    before = threading.enumerate()
    with ncclpy.ProcessGroup(LocalStore(), 0, 2, device=0, timeout=20 * DEADLINE) as group:
        work = group.all_reduce(np.ones(3))
        assert making()
        threading.Timer(0.2, group.abort, ["enough"]).start()
        with pytest.raises(ncclpy.NcclAborted, match=r"has ended: .* enough"):
            group.split(0)
        assert isinstance(work.exception(DEADLINE), ncclpy.NcclAborted)
        testing.wait_for(lambda: not making(), "its end")


@pytest.mark.parametrize("moment", ["at once", "later"])
def test_abort_ends_communicator_init(host_engine, moment):
    """Rank 1 comes to the rendezvous, and makes no call of NCCL."""

    def making():
        return [each for each in threading.enumerate() if each.name == "ncclpy-init" and each not in before]

    before, store = threading.enumerate(), LocalStore()
    with ncclpy.ProcessGroup(store, 0, 2, device=0, timeout=20 * DEADLINE) as group:
        store.set("ncclpy/group/default/1/communicator/all/here/1", b"")
        work = group.all_reduce(np.ones(3))
        testing.wait_for(lambda: store.check(["ncclpy/group/default/1/communicator/all/outcome"]), "the meeting")
        if moment == "later":
            time.sleep(0.2)
        group.abort("enough")
        assert isinstance(work.exception(DEADLINE), ncclpy.NcclAborted)
        testing.wait_for(lambda: not making(), "its end")


@pytest.mark.parametrize("late", [0, 2])
def test_late_rank_hears_which_ranks_were_missing(host_engine, late):
    """The first rank to give up tells all ranks, also those that arrive later."""

    def body(rank):
        said = None
        if rank == late:
            assert given_up.wait(DEADLINE)
        timeout = 0.3 if rank == 1 else 20 * DEADLINE
        with ncclpy.ProcessGroup(store, rank, 4, device=rank, timeout=timeout, on_error="report") as group:
            try:
                group.all_reduce(np.ones(3)).wait(DEADLINE)
            except ncclpy.NcclError as error:  # of the work, or of the call if the group ended before it
                said = str(error)
            given_up.set()
        return said

    store, given_up = LocalStore(), threading.Event()
    for text in thread_ranks.run_ranks(3, body, DEADLINE):
        assert f"ranks {late}, 3 of 4 did not arrive" in text.replace("2-3", "2, 3")


def test_meeting_leaves_nothing_in_store(host_engine):
    def body(group):
        group.connect(peers=[1 - group.rank])
        testing.wait_for(lambda: not [key for key in store.keys() if "communicator" in key])

    store = LocalStore()
    run_groups(2, body, store=store)


def test_failure_is_in_store_before_close_returns(arrays, monkeypatch):
    """Otherwise a process that fails, closes its group and exits would not tell the other ranks."""

    class Slow(LocalStore):
        def _compare_set(self, *args):
            time.sleep(0.1)
            return super()._compare_set(*args)

    monkeypatch.setattr("ncclpy.process_group.lifecycle._TELL_TIMEOUT", DEADLINE)
    store = Slow()
    group = ncclpy.ProcessGroup(store, 0, 2, device=0, timeout=0.1)
    work = group.all_reduce(arrays.argument(arrays.make(np.ones(3), 0)))
    assert isinstance(work.exception(DEADLINE), ncclpy.NcclTimeout)
    group.close()
    told = [key for key in store.keys() if key.endswith("/ended")]
    assert told and b"rank 1 of 2 did not arrive" in store.get(told[0])


def test_connect_waits_until_the_communicator_stands():
    def body(group):
        assert group.communicator is None
        if group.rank == 0:
            with pytest.raises(ncclpy.NcclTimeout, match=r"communicator 'all' of 2 ranks is not made after 0\.05 s"):
                group.connect(timeout=0.05)
            late.set()
        assert late.wait(DEADLINE)
        group.connect()
        return group.communicator.nranks, group.seq

    late = threading.Event()
    assert run_groups(2, body) == [(2, 0)] * 2


@pytest.mark.parametrize("how", ["operation", "block", "group"])
def test_deadline_ends_the_group_on_all_ranks(arrays, how):
    """Rank 1 does not begin the second collective; all ranks hear of the end, also a rank that waits for nothing."""

    def body(group):
        array = arrays.argument(arrays.make(np.ones(3), group.device))
        group.all_reduce(array).wait(DEADLINE)
        together.wait(DEADLINE)  # a rank that has yet to see its end would see the abort
        if group.rank == 1:
            testing.wait_for(lambda: group.error is not None, "the news")
            error = group.error
            assert isinstance(error, ncclpy.NcclTimeout) and "was ended by rank 0 of 2" in str(error)
        else:
            with group.deadline(0.5) if how == "block" else contextlib.nullcontext():
                work = group.all_reduce(array, timeout=0.5 if how == "operation" else None)
            error = work.exception(DEADLINE)
            assert isinstance(error, ncclpy.NcclTimeout) and group.error is error
        assert [(each.rank, each.state) for each in error.ranks] == [(0, "running"), (1, "idle")]
        assert "rank 1 has finished all_reduce #0 and is in no operation" in str(error)
        with pytest.raises(ncclpy.NcclAborted, match="has ended") as caught:
            group.barrier()
        assert caught.value.__cause__ is error
        return "all_reduce on device 0" in str(error)

    together = threading.Barrier(2)
    # Also the seconds in which the communicator must be made; NCCL takes some for the first one on a GPU.
    shortest = 1 if ncclpy.library().engine == "host" else 8
    assert run_groups(2, body, timeout=shortest if how == "group" else DEADLINE / 2) == [True, True]


def test_deadline_entered_twice_ends_with_outer_block(host_engine):
    with ncclpy.ProcessGroup(LocalStore(), 0, 1, device=0, timeout=DEADLINE) as group:
        group.connect()
        deadline = group.deadline(0.05)
        with deadline, deadline:
            pass
        with ncclpy.faults("call=AllReduce at=run do=hang"):
            work = group.all_reduce(np.ones(1))
            with pytest.raises(ncclpy.NcclTimeout, match=r"is (pending|launched) after"):
                work.wait(0.5)
            group.abort("enough")


@pytest.mark.parametrize("kind", ["local", "file", "tcp"])
def test_abort_reaches_all_ranks(arrays, kind, tmp_path):
    stores = {
        "local": LocalStore,
        "file": lambda: FileStore(tmp_path / "s"),
        "tcp": lambda: TCPStore("127.0.0.1", 0, serve=True),
    }
    told, together = [], threading.Barrier(2)

    def body(group):
        group.on_abort(lambda error: told.append((group.rank, str(error))))
        array = arrays.argument(arrays.make(np.ones(2), group.device))
        group.all_reduce(array).wait(DEADLINE)
        together.wait(DEADLINE)
        if group.rank == 1:
            group.abort("enough")
            group.abort("once more")
        testing.wait_for(lambda: group.error is not None, "the news")
        with pytest.raises(ncclpy.NcclAborted, match="enough"):
            group.all_reduce(array)
        return str(group.error)

    with stores[kind]() as store:
        errors = run_groups(2, body, store=store)
    does = r"enough\. process group 'default': ranks 0-1 have finished all_reduce #0 and are in no operation since .*s"
    does += r"\. Python of rank 0: .*"
    assert re.fullmatch(f"process group 'default' was aborted by rank 1: {does}", errors[1])
    assert re.fullmatch(f"process group 'default' was ended by rank 1 of 2: {does}", errors[0])
    assert "Python of rank 1" not in errors[0] + errors[1], "its error has a traceback"
    testing.wait_for(lambda: len(told) == 2)
    assert sorted(told) == list(enumerate(errors))


def test_failed_operation_ends_group_with_first_error(host_engine):
    def body(group):
        array = np.ones(2)
        group.all_reduce(array).wait(DEADLINE)
        together.wait(DEADLINE)  # a rank that has yet to see its end would see the abort
        faults = ncclpy.faults("rank=0 call=AllReduce do=error:ncclInternalError")
        with faults if group.rank == 0 else contextlib.nullcontext():
            works = []
            with contextlib.suppress(ncclpy.NcclAborted):  # if the other rank's failure is known already
                for _ in range(3):
                    works.append(group.all_reduce(array))
            errors = [work.exception(DEADLINE) for work in works]
        assert all(isinstance(error, ncclpy.NcclError) for error in errors)
        return group.rank == 1 or (type(errors[0]) is ncclpy.NcclError and group.error is errors[0])

    together = threading.Barrier(2)
    assert run_groups(2, body) == [True, True]


def test_wait_timeout_keeps_operation_running(arrays):
    def body(group):
        made = arrays.make(np.ones(2), group.device)
        array = arrays.argument(made)
        group.all_reduce(array).wait(DEADLINE)
        if group.rank == 1:
            testing.wait_for(late.is_set)
        work = group.all_reduce(array)
        if group.rank == 0:
            with pytest.raises(ncclpy.NcclTimeout, match=r"is (pending|launched) after"):
                work.wait(0.05)
            late.set()
        work.wait(DEADLINE)
        return arrays.read(made).tolist()

    late = threading.Event()
    assert run_groups(2, body) == [[4, 4]] * 2


def test_arrays_are_held_until_operation_cannot_touch_them(host_engine):
    class Watched(np.ndarray):
        pass

    def body(group):
        group.all_reduce(np.ones(2)).wait(DEADLINE)
        send = np.ones(2).view(Watched)
        alive = weakref.ref(send)
        if group.rank == 1:
            testing.wait_for(late.is_set)
        group.all_reduce(send)
        if group.rank == 0:
            del send
            gc.collect()
            assert alive() is not None
            late.set()
        else:
            del send
        testing.wait_for(lambda: alive() is None, "letting go")

    late = threading.Event()
    run_groups(2, body)


def test_completion_hook_receives_operations(arrays):
    told = []

    def body(group):
        if group.rank == 0:
            group.on_completion(told.append)
        first, second = (
            arrays.make(np.ones(count, dtype), group.device) for count, dtype in ((3, np.float32), (2, float))
        )
        group.all_reduce(arrays.argument(first)).wait(DEADLINE)
        with group.coalescing() as work:
            group.all_reduce(arrays.argument(first))
            group.broadcast(arrays.argument(second))
        work.wait(DEADLINE)

    run_groups(2, body, timing=True, name="told")
    testing.wait_for(lambda: len(told) == 2)
    first, second = told
    assert (first.group, first.rank, first.operation, first.seq, first.count, first.nbytes) == (
        "told", 0, "all_reduce", 0, 3, 12,
    )  # fmt: skip
    assert first.error is None and first.created <= first.launched <= first.completed and first.duration >= 0
    assert (second.seq, second.count, second.nbytes) == (1, 5, 28)


def test_close_waits_for_begun_operations(arrays):
    def body(group):
        made = arrays.make(np.full(100_000, group.rank), group.device)
        array = arrays.argument(made)
        for _ in range(20):
            group.all_reduce(array, op="max")
        work = group.all_reduce(array)
        group.close(DEADLINE)
        assert work.is_completed()
        with pytest.raises(ValueError, match="is closed"):
            group.barrier()
        group.close()
        return arrays.read(made)[0]

    assert run_groups(2, body) == [2, 2]


@pytest.mark.parametrize("waits", ["by a stream", "not yet"])
def test_close_that_waits_for_an_operation_raises_its_failure(arrays, waits):
    groups = []

    def body(group):
        array = arrays.argument(arrays.make(np.ones(2), group.device))
        group.all_reduce(array).wait(DEADLINE)
        if group.rank == 1:
            testing.wait_for(lambda: groups and "closed" in repr(groups[0]), "rank 0 to be in close()")
            group.abort("enough")
            return
        work, stream = group.all_reduce(array), ncclpy.Stream(group.device)
        if waits == "by a stream":
            work.synchronize(stream)
        groups.append(group)
        with pytest.raises(ncclpy.NcclAborted, match="was ended by rank 1 of 2: enough"):
            group.close()
        assert isinstance(work.exception(DEADLINE), ncclpy.NcclAborted)
        group.close()
        stream.synchronize(DEADLINE)
        stream.close()

    run_groups(2, body)


@pytest.mark.parametrize("asks", ["nothing", "wait", "error", "a call"])
def test_close_raises_unreported_failure(host_engine, asks):
    failed = threading.Barrier(2)

    def body(group):
        group.connect()
        if group.rank == 0:
            work = group.all_reduce(np.ones(2), timeout=0.3)
            testing.wait_for(work.is_completed, "its failure")
            if asks == "wait":
                with pytest.raises(ncclpy.NcclTimeout):
                    work.wait()
            elif asks == "error":
                assert isinstance(group.error, ncclpy.NcclTimeout)
            elif asks == "a call":
                for kind in (ncclpy.NcclTimeout, ncclpy.NcclAborted):  # the program has the failure from the first one
                    with pytest.raises(kind):
                        group.all_reduce(np.ones(2))
        failed.wait(DEADLINE)
        if group.rank == 0 and asks == "nothing":
            with pytest.raises(ncclpy.NcclTimeout, match="has ended: all_reduce on device 0 was not done within"):
                group.close()
        group.close()  # rank 1 had no work in flight: nothing to raise

    run_groups(2, body)


def test_call_of_idle_rank_raises_class_of_failure_once(host_engine):
    """A rank that was in no operation raises the same class as the others; then its program knows of the failure."""

    def body(group):
        group.all_reduce(np.ones(2)).wait(DEADLINE)
        comm = group.communicator
        if group.rank == 0:
            with pytest.raises(ncclpy.NcclTimeout):
                group.all_reduce(np.ones(2), timeout=0.3).wait(DEADLINE)
        else:
            testing.wait_for(lambda: comm.closed, "the end")
            with pytest.raises(ncclpy.NcclTimeout, match="was ended by rank 0 of 2"):
                group.all_reduce(np.ones(2))
        with pytest.raises(ncclpy.NcclAborted, match="has ended"):
            group.all_reduce(np.ones(2))
        return True

    assert run_groups(2, body) == [True, True]


def test_close_aborts_unfinished_operations(arrays):
    def body(group):
        array = arrays.argument(arrays.make(np.ones(2), group.device))
        group.all_reduce(array).wait(DEADLINE)
        together.wait(DEADLINE)  # a rank that has yet to see its end would see the abort
        if group.rank == 0:
            work = group.all_reduce(array)
            with pytest.raises(ncclpy.NcclTimeout, match="1 operations were not done"):
                group.close(0.1)
            assert isinstance(work.exception(DEADLINE), ncclpy.NcclAborted)

    together = threading.Barrier(2)
    run_groups(2, body)


def test_groups_of_some_ranks(host_engine):
    def body(group):
        array = np.ones(1)
        some = group.new_group([2, 0])
        if group.rank in (0, 2):
            assert (some.rank, some.size) == ((1, 2) if group.rank == 0 else (0, 2))
            some.broadcast(array if group.rank == 0 else np.full(1, 5.0), array, root=0).wait(DEADLINE)
            some.close()
        else:
            assert some is None
        part = group.split(None if group.rank == 3 else group.rank % 2, key=-group.rank)
        if group.rank == 3:
            assert part is None
            return array[0], None
        with part:
            total = np.full(1, group.rank)
            part.all_reduce(total).wait(DEADLINE)
            return array[0], (part.rank, part.size, int(total[0]))

    assert run_groups(4, body) == [(5, (1, 2, 2)), (1, (0, 1, 1)), (5, (0, 2, 2)), (1, None)]


def test_recorder_entries_have_group_and_number(arrays):
    def body(group):
        array = arrays.make(np.ones(3), group.device)
        for _ in range(2):
            group.all_reduce(arrays.argument(array)).wait(DEADLINE)

    run_groups(2, body, name="recorded")
    found = [each for each in ncclpy.recorder.snapshot()["entries"] if "recorded" in str(each["communicator"])]
    assert sorted((each["rank"], each["sequence"]) for each in found) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len({each["communicator"] for each in found}) == 1
    assert [each["root"] for each in found] == [None] * 4


def test_parts_of_groups_of_one_name_do_not_meet(host_engine):
    """Rank 2 makes its part of the second group before rank 1 makes its part of the first."""

    def body(first):
        with ncclpy.ProcessGroup(store, first.rank, 3, device=first.device, timeout=DEADLINE / 2) as second:
            if first.rank == 1:
                assert done.wait(DEADLINE)
            parts = first.new_group([0, 1]), second.new_group([1, 2])
            if first.rank == 2:
                done.set()
            sums = []
            for part in filter(None, parts):
                with part:
                    total = np.full(1, float(first.rank))
                    part.all_reduce(total).wait(DEADLINE)
                    sums.append(total[0])
            return sums

    done, store = threading.Event(), LocalStore()
    assert run_groups(3, body, store=store) == [[1], [1, 3], [3]]


def test_hook_added_while_group_ends_is_called_once(monkeypatch):
    told, start = [], threading.Thread.start

    def late(thread):
        if thread.name == "ncclpy-group-end":  # the error is set, and the hooks are not yet called
            assert group.error is not None
            group.on_abort(lambda error: told.append("late"))
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", late)
    with ncclpy.ProcessGroup(LocalStore(), 0, 1, device=0, timeout=DEADLINE) as group:
        group.on_abort(lambda error: told.append("early"))
        group.abort("enough")
        last = threading.Event()
        group.on_abort(lambda error: last.set())
        assert last.wait(DEADLINE)
    assert sorted(told) == ["early", "late"]


@pytest.mark.parametrize("stderr", ["None", "open('/dev/full', 'w')"])
@pytest.mark.parametrize("on_error", ["exit", "exit_now"])
def test_process_exits_when_stderr_is_not_writable(on_error, stderr):
    done = testing.run_python(
        f"""
        import sys, time, numpy as np, ncclpy, testing
        from ncclpy.bootstrap import LocalStore
        group = ncclpy.ProcessGroup(LocalStore(), 0, 2, device=0, timeout=0.2, on_error={on_error!r})
        sys.stderr = {stderr}
        array = testing.arrays().make(np.ones(3), 0)
        work = group.all_reduce(testing.arrays().argument(array))
        time.sleep(30)
        """,
        check=False,
        warm=True,
    )
    assert done.returncode == 70


@pytest.mark.parametrize("on_error", ["exit", "exit_now"])
def test_on_error_exit_ends_the_process(on_error):
    done = testing.run_python(
        f"""
        import threading, time, numpy as np, ncclpy, testing
        from ncclpy.bootstrap import LocalStore
        group = ncclpy.ProcessGroup(LocalStore(), 0, 2, device=0, timeout=0.2, on_error={on_error!r})
        array = testing.arrays().make(np.ones(3), 0)
        work = group.all_reduce(testing.arrays().argument(array))
        work.add_done_callback(lambda work: print("told", flush=True))
        time.sleep(60)
        """,
        check=False,
        warm=True,
    )
    assert done.returncode == 70
    assert f"as on_error={on_error!r} says" in done.stderr and "rank 1" in done.stderr
    assert ("ncclpy-recorder" in done.stderr) == (on_error == "exit")


def test_process_exits_without_thread_for_its_exit():
    done = testing.run_python(
        """
        import time, numpy as np, ncclpy, testing
        from ncclpy.bootstrap import LocalStore
        testing.refuse_threads("ncclpy-group-exit")
        store = LocalStore()
        group = ncclpy.ProcessGroup(store, 0, 2, device=0, timeout=0.2, on_error="exit")
        store.watch("ncclpy/group/default/1/told/", lambda change: print("told", change.value, flush=True))
        work = group.all_reduce(testing.arrays().argument(testing.arrays().make(np.ones(3), 0)))
        time.sleep(30)
        """,
        check=False,
        warm=True,
    )
    assert done.returncode == 70, done.stderr
    assert "as on_error='exit' says" in done.stderr and "rank 1" in done.stderr
    assert "rank 1 of 2 did not arrive" in done.stdout, "the other ranks were not told before"


def test_process_exits_although_its_store_does_not_answer():
    """Torch's store does not answer while its server is stopped."""
    done = testing.run_python(
        """
        import time, numpy as np, ncclpy, testing
        from ncclpy.bootstrap import LocalStore
        from ncclpy.process_group import lifecycle, options
        from ncclpy.process_group.group_status import GroupStatus
        GroupStatus.confirm = lambda self: time.sleep(1000)
        lifecycle._EXIT_TELL_TIMEOUT = lifecycle.EXIT_PATIENCE = options.EXIT_PATIENCE = 0.1
        group = ncclpy.ProcessGroup(LocalStore(), 0, 2, device=0, timeout=0.2, on_error="exit")
        work = group.all_reduce(testing.arrays().argument(testing.arrays().make(np.ones(3), 0)))
        time.sleep(30)
        """,
        check=False,
        warm=True,
    )
    assert done.returncode == 70, done.stderr


def test_explicit_abort_does_not_end_the_process():
    def body(group):
        if group.rank == 0:
            group.abort("asked for")
            time.sleep(0.2)
            told = []
            group.on_abort(told.append)  # added after the end
            testing.wait_for(lambda: told)
            assert told == [group.error]

    run_groups(1, body, on_error="exit")
