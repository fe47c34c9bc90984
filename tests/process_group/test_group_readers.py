"""Threads that read results by a stream while their group ends in unusual ways: each is told of it once."""

from __future__ import annotations

import _thread
import contextlib
import threading
import time

import numpy as np
import pytest
import thread_ranks
from group_ranks import DEADLINE, run_groups

import ncclpy
import testing
from ncclpy.bootstrap import LocalStore
from ncclpy.peers.inquiry import Inquiries
from ncclpy.process_group import lifecycle
from ncclpy.process_group.group_status import GroupStatus


@contextlib.contextmanager
def reading(group, outcomes, **options):
    """Begin an operation that has to fail; after the block read its result by a stream, as a framework does."""
    array, stream = np.ones(4), ncclpy.Stream(group.rank)
    try:
        work = group.all_reduce(array, **options)
        yield work, stream
        outcomes.append(read(stream, array))
    except ncclpy.NcclError as error:
        outcomes.append(error)


def read(stream, array):
    end = time.monotonic() + DEADLINE
    while not stream.is_done():
        assert time.monotonic() < end
        time.sleep(0.001)
    time.sleep(0.05)
    return f"read {array[0]}"


def is_told_nothing():
    """Stay for a while in bytecode, where an asynchronous exception would be raised."""
    for _ in range(300):
        time.sleep(0.001)


def run_until_abort(body, nthreads=2):
    """Call ``body(group, meet)`` on rank 0; rank 1 aborts the group once it has met the other threads at `meet`."""
    meet = threading.Barrier(nthreads)

    def rank(group):
        group.all_reduce(np.ones(4)).wait(DEADLINE)
        if group.rank == 0:
            body(group, meet)
        else:
            meet.wait(DEADLINE)
            group.abort("a test")

    run_groups(2, rank)


@pytest.fixture
def tells(monkeypatch):
    """Return an event: until it is set, no reader is told, and nothing is aborted."""
    tells, abort_when_confirmed = threading.Event(), lifecycle.abort_when_confirmed

    def abort_later(*arguments):
        assert tells.wait(DEADLINE)
        abort_when_confirmed(*arguments)

    monkeypatch.setattr(lifecycle, "abort_when_confirmed", abort_later)
    return tells


@pytest.fixture
def noted(monkeypatch):
    """Return two events: the first is set once rank 0 has noted its readers; the second lets rank 0 continue."""
    noted, goes_on, begin_end = threading.Event(), threading.Event(), GroupStatus.begin_end

    def begin_end_later(self):
        begin_end(self)
        if self.rank == 0:
            noted.set()
            assert goes_on.wait(DEADLINE)

    monkeypatch.setattr(GroupStatus, "begin_end", begin_end_later)
    return noted, goes_on


@pytest.mark.parametrize("call", ["reconfigure", "recover", "close", "abort"])
def test_call_that_ends_operations_tells_the_other_threads(host_engine, call):
    handles, meet = {}, threading.Barrier(2)

    def body(group):
        outcomes, begun = [], threading.Event()

        def reads():
            with reading(group, outcomes) as (work, stream):
                work.synchronize(stream)
                begun.set()

        group.all_reduce(np.ones(4)).wait(DEADLINE)
        handles[group.rank] = group.reconfigure_handle()
        meet.wait(DEADLINE)
        thread = threading.Thread(target=reads)
        if group.rank == 0:
            thread.start()
            assert begun.wait(DEADLINE)
        meet.wait(DEADLINE)
        if call == "reconfigure":
            group.reconfigure([handles[0], handles[1]], uuid="again", timeout=DEADLINE)
        elif call == "recover":
            group.recover(DEADLINE / 4)
        elif group.rank == 1:
            testing.wait_for(lambda: group.error is not None, "the news", DEADLINE)
        elif call == "abort":
            group.abort("a test")
        else:
            with pytest.raises(ncclpy.NcclTimeout):
                group.close(0.3)
        if group.rank == 0:
            thread.join(DEADLINE)
        return [type(each) for each in outcomes]

    assert run_groups(2, body)[0] == [ncclpy.NcclAborted]


def test_rank_that_does_not_exit_because_its_group_is_reconfigured_tells_readers(host_engine, monkeypatch):
    listen, hears = GroupStatus.listen, threading.Event()

    def listen_later(self, ended, *more):
        def ended_later(told):
            assert hears.wait(DEADLINE)
            ended(told)

        return listen(self, ended_later if self.rank == 0 else ended, *more)

    monkeypatch.setattr(GroupStatus, "listen", listen_later)
    store, handles, meet, outcomes = LocalStore(), {}, threading.Barrier(2), []

    def body(rank):
        on_error = "abort" if rank else "exit"
        with ncclpy.ProcessGroup(store, rank, 2, device=rank, timeout=DEADLINE / 2, on_error=on_error) as group:
            group.all_reduce(np.ones(4)).wait(DEADLINE)
            handles[rank] = group.reconfigure_handle()
            meet.wait(DEADLINE)
            if rank == 0:
                with reading(group, outcomes, timeout=2.5) as (work, stream):  # rank 1 tells its plan after a second
                    work.synchronize(stream)
                hears.set()
            group.reconfigure([handles[0], handles[1]], uuid="again", timeout=DEADLINE / 2)

    thread_ranks.run_ranks(2, body, DEADLINE)
    assert [type(each) for each in outcomes] == [ncclpy.NcclTimeout]


@pytest.mark.parametrize("call", ["synchronize", "wait"])
def test_thread_that_begins_to_read_while_readers_are_noted_gets_the_error(host_engine, noted, call):
    is_noted, goes_on = noted
    outcomes = []

    def body(group, meet):
        other = group.all_reduce(np.ones(4))
        with reading(group, outcomes) as (work, stream):
            threading.Timer(3, goes_on.set).start()
            if call == "synchronize":
                meet.wait(DEADLINE)
                assert is_noted.wait(DEADLINE)
            work.synchronize(stream)
            if call == "wait":  # it waits when the readers are noted, and leaves the wait before the works fail
                meet.wait(DEADLINE)
                with contextlib.suppress(ncclpy.NcclTimeout):
                    other.wait(2)

    run_until_abort(body)
    assert [type(each) for each in outcomes] == [ncclpy.NcclAborted]


def test_each_thread_that_has_a_stream_wait_gets_the_error(host_engine):
    outcomes = []

    def body(group, meet):
        work = group.all_reduce(array := np.ones(4))

        def reads():
            stream = ncclpy.Stream(0)
            try:
                work.synchronize(stream)
                meet.wait(DEADLINE)
                outcomes.append(read(stream, array))
            except ncclpy.NcclError as error:
                outcomes.append(error)

        threads = thread_ranks.start([reads] * 2, "reader ")
        thread_ranks.join(threads, time.monotonic() + DEADLINE)

    run_until_abort(body, 3)
    assert [type(each) for each in outcomes] == [ncclpy.NcclAborted] * 2


def test_future_of_a_failed_work_tells_its_thread_nothing(host_engine, tells):
    outcomes = []

    def body(group, meet):
        first = group.all_reduce(np.ones(4))
        with reading(group, outcomes) as (work, stream):
            work.synchronize(stream)
            meet.wait(DEADLINE)
            testing.wait_for(first.is_completed, "the end of the group", DEADLINE)
            first.future()  # the program does not read it
            tells.set()

    run_until_abort(body)
    assert [type(each) for each in outcomes] == [ncclpy.NcclAborted]


def test_no_thread_stands_in_for_one_that_a_call_has_told(host_engine, tells):
    def body(group, meet):
        done, errors = threading.Event(), []

        def reads():  # in a thread that `threading` does not know
            try:
                work = group.all_reduce(np.ones(4))
                work.synchronize()
                meet.wait(DEADLINE)
                testing.wait_for(work.is_completed, "the end of the group", DEADLINE)
                group.all_reduce(np.ones(4))
            except ncclpy.NcclError as error:
                errors.append(error)
            done.set()

        _thread.start_new_thread(reads, ())
        assert done.wait(DEADLINE) and errors
        tells.set()
        is_told_nothing()

    run_until_abort(body)


def test_thread_that_aborts_a_group_is_not_told_that_it_failed_meanwhile(host_engine, monkeypatch, tells):
    asks, ended = threading.Event(), threading.Event()

    def ask(*_):
        if threading.current_thread().name == "aborts":
            asks.set()
            assert ended.wait(DEADLINE)
        return None, None

    monkeypatch.setattr(Inquiries, "ask", ask)

    def body(group):
        group.all_reduce(np.ones(4)).wait(DEADLINE)
        if group.rank == 1:
            assert asks.wait(DEADLINE)
            group.abort("a test")
            return
        threading.current_thread().name = "aborts"
        work = group.all_reduce(np.ones(4))
        work.synchronize()
        work.add_done_callback(lambda _: ended.set())
        group.abort("enough")
        tells.set()
        is_told_nothing()

    run_groups(2, body)


@pytest.mark.parametrize("place", ["in a call of C", "in close() of another group"])
def test_thread_that_reads_results_of_two_groups_is_told_of_both(host_engine, place):
    stores, reads, told = [LocalStore() for _ in range(3)], threading.Event(), []

    def body(rank):
        groups = [
            ncclpy.ProcessGroup(store, rank, 2, device=rank, timeout=DEADLINE, name=name)
            for name, store in zip(["first", "second", "idle"], stores, strict=True)
        ]
        for group in groups:
            group.all_reduce(np.ones(4)).wait(DEADLINE)
        if rank == 0:
            for group in groups[:2]:
                group.all_reduce(np.ones(4)).synchronize(ncclpy.Stream(0))
            groups[2].all_reduce(np.ones(4))
        if rank == 0:
            try:
                reads.set()  # the other rank may abort before this call has returned
                groups[2].close() if place.endswith("group") else time.sleep(2)
            except ncclpy.NcclError as error:
                told.append(str(error))
            is_told_nothing()
        else:
            assert reads.wait(DEADLINE)
            for group in groups[:2]:
                group.abort("a test")
            time.sleep(1.5)
            groups[2].all_reduce(np.ones(4)).wait(DEADLINE)
        for group in groups:
            group.close()

    thread_ranks.run_ranks(2, body, DEADLINE)
    assert len(told) == 1 and "'first'" in told[0] and "'second'" in told[0], told


def test_thread_with_the_ident_of_a_reader_that_has_ended_is_told_nothing(host_engine):
    """Most systems give a new thread the ident of the last one that has ended."""
    idents, begun = [], threading.Event()

    def later():
        idents.append(threading.get_ident())
        begun.set()
        is_told_nothing()
        idents.append("told nothing")

    def body(group, meet):
        def reads():
            group.all_reduce(np.ones(4)).synchronize(ncclpy.Stream(0))
            idents.append(threading.get_ident())

        for function in reads, later:
            thread = threading.Thread(target=function)
            thread.start()
            if function is reads:
                thread.join(DEADLINE)
        assert begun.wait(DEADLINE)
        with pytest.raises(ncclpy.NcclAborted):  # the thread that has made the group is told in place of the reader
            meet.wait(DEADLINE)
            is_told_nothing()
        thread.join(DEADLINE)

    run_until_abort(body)
    assert idents == [idents[0], idents[0], "told nothing"]
