"""Threads that read a result by a stream, and wait in no call of ncclpy: an abort must stop them from reading on."""

from __future__ import annotations

import contextlib
import threading
import time

import numpy as np
import pytest

import ncclpy
import testing
from ncclpy.core.runtime import stream_readers, wait

DEADLINE = 20.0


@pytest.fixture
def comms3(arrays):
    testing.need_devices(3)
    comms = ncclpy.Communicator.init_all(range(3), timeout=DEADLINE)
    testing.connect(comms)
    yield comms
    testing.abort_all(comms)


class Reader(threading.Thread):
    """Start an operation on a stream, wait for the stream as a framework does, and read the result."""

    def __init__(self, arrays, comm, **options):
        super().__init__()
        self.arrays, self.comm, self.options = arrays, comm, options
        self.stream = ncclpy.Stream(comm.device)
        self.memory = arrays.make(np.ones(4, np.float32), comm.device)
        self.begun, self.outcomes = threading.Event(), []
        self.start()

    def run(self):
        try:
            self.comm.all_reduce(self.arrays.argument(self.memory), stream=self.stream, **self.options)
            self.begun.set()
            self.wait()
            self.outcomes.append(self.arrays.read(self.memory)[0])
        except ncclpy.NcclError as error:
            self.outcomes.append(error)
            self.stay()

    def wait(self):
        while not self.stream.is_done():
            time.sleep(0.001)

    def stay(self):
        """Stay in the handler for a while: nothing is raised a second time."""
        try:
            end = time.monotonic() + 0.3
            while time.monotonic() < end:
                time.sleep(0.001)
        except ncclpy.NcclError as error:
            self.outcomes.append(error)

    def outcome(self):
        self.join(2 * DEADLINE)
        self.stream.close()
        assert len(self.outcomes) == 1, self.outcomes
        return self.outcomes[0]


def test_deadline_is_raised_in_the_threads_of_all_ranks_of_the_process(arrays, comms3):
    readers = [Reader(arrays, comms3[0], timeout=0.5), Reader(arrays, comms3[1])]
    errors = [reader.outcome() for reader in readers]
    assert [type(error) for error in errors] == [ncclpy.NcclTimeout] * 2
    assert "rank 0 of the same communicator was aborted" in str(errors[1])


def test_abort_is_raised_in_other_threads_than_its_own(arrays, comms3):
    readers = [Reader(arrays, comm) for comm in comms3[:2]]
    for reader in readers:
        assert reader.begun.wait(DEADLINE)
    comms3[0].abort()
    assert [type(reader.outcome()) for reader in readers] == [ncclpy.NcclAborted] * 2
    time.sleep(0.01)  # an error would be raised here


def test_thread_with_the_ident_of_a_reader_that_has_ended_is_told_nothing(arrays, comms3):
    """Most systems give a new thread the ident of the last one that has ended; the main thread is told instead."""
    idents, begun = [], threading.Event()
    memory = arrays.make(np.ones(4, np.float32), 0)

    def reads():
        comms3[0].all_reduce(arrays.argument(memory), stream=ncclpy.Stream(0))
        idents.append(threading.get_ident())

    def later():
        idents.append(threading.get_ident())
        begun.set()
        for _ in range(300):
            time.sleep(0.001)
        idents.append("told nothing")

    for function in reads, later:
        thread = threading.Thread(target=function)
        thread.start()
        if function is reads:
            thread.join(DEADLINE)
    assert begun.wait(DEADLINE)
    with pytest.raises(ncclpy.NcclAborted):
        threading.Thread(target=comms3[0].abort).start()
        thread.join(DEADLINE)
        time.sleep(0.01)
    thread.join(DEADLINE)
    assert idents == [idents[0], idents[0], "told nothing"]


def test_operation_that_was_complete_stays_a_result(arrays, comms3):
    """The thread has no operation under way when another one fails."""
    readers = [Reader(arrays, comm) for comm in comms3]
    assert [reader.outcome() for reader in readers] == [3, 3, 3]
    goes_on, told = threading.Event(), []

    class Idle(Reader):
        def wait(self):
            super().wait()
            try:
                while not goes_on.is_set():
                    time.sleep(0.001)
            except ncclpy.NcclError as error:
                told.append(error)

    idle = [Idle(arrays, comm) for comm in comms3]
    testing.wait_for(lambda: all(reader.begun.is_set() and reader.stream.is_done() for reader in idle), "the sums")
    with pytest.raises(ncclpy.NcclTimeout):
        comms3[0].all_reduce(np.ones(4), timeout=0.3)
    goes_on.set()
    assert [reader.outcome() for reader in idle] == [3, 3, 3] and not told


def test_thread_that_calls_again_raises_once(arrays, comms3):
    """The call raises; the exception set for the thread meanwhile is withdrawn."""

    class Caller(Reader):
        def wait(self):
            self.comm.barrier()

    assert type(Caller(arrays, comms3[0], timeout=0.5).outcome()) is ncclpy.NcclTimeout


@pytest.mark.parametrize("graph", [False, True])
def test_launch_of_a_plan_is_read_by_the_launching_thread(arrays, comms3, graph):
    class Launcher(Reader):
        def run(self):
            plan = ncclpy.Plan()
            with plan.record():
                self.comm.all_reduce(self.arrays.argument(self.memory), stream=self.stream)
            launched = plan.capture() if graph else plan
            try:
                launched.launch(**({} if graph else {"timeout": 0.5}))
                self.begun.set()
                self.wait()
                self.outcomes.append(self.arrays.read(self.memory)[0])
            except ncclpy.NcclError as error:
                self.outcomes.append(error)

    reader = Launcher(arrays, comms3[0])
    if graph:
        assert reader.begun.wait(DEADLINE)
        with pytest.raises(ncclpy.NcclTimeout):
            comms3[1].all_reduce(np.ones(4), timeout=0.5)
    assert type(reader.outcome()) is ncclpy.NcclTimeout


def test_error_that_passes_cleanup_code_arrives_as_it_is():
    """Python 3.10 and 3.11 create the exception anew where it leaves such a block."""
    error, found, ready = ncclpy.NcclTimeout("late"), [], threading.Event()

    def read():
        try:
            with contextlib.ExitStack() as stack:
                stack.callback(list)
                ready.set()
                while True:
                    time.sleep(0.001)
        except BaseException as raised:
            found.append(raised)

    thread = threading.Thread(target=read)
    thread.start()
    assert ready.wait(30)
    stream_readers.raise_in_readers([wait.number_of_thread(thread.ident)], 0, error, set())
    thread.join(30)
    assert found == [error]


@pytest.mark.parametrize(
    ("own", "raised"),
    [(None, ncclpy.NcclAborted), (ValueError, ncclpy.NcclAborted), (KeyboardInterrupt, KeyboardInterrupt)],
)
def test_error_during_steps_that_must_complete_is_raised_after_them(own, raised):
    error, steps = ncclpy.NcclAborted("elsewhere"), []
    with pytest.raises(raised) as found, stream_readers.raise_at_end():
        stream_readers.raise_in_readers([wait.number_of_this_thread()], 0, error, set())
        for step in range(3):
            with stream_readers.raise_at_end():  # close() of a resource that is freed on the way
                steps.append(step)
        if own is not None:
            raise own
    assert steps == [0, 1, 2]
    assert found.value is error or own is KeyboardInterrupt
    assert own is None or type(found.value if own is raised else found.value.__context__) is own
    time.sleep(0.01)  # a second exception would be raised here


def test_thread_given_the_error_by_a_call_is_not_interrupted():
    """A call of another thread in which the error is raised makes no difference, nor does an error told before."""
    told, number = set(), wait.number_of_this_thread()
    stream_readers.note_delivery(told)
    stream_readers.raise_in_readers([number], 0, ncclpy.NcclAborted("this one"), told)
    time.sleep(0.01)  # it would be raised here
    elsewhere = set()
    thread = threading.Thread(target=stream_readers.note_delivery, args=(elsewhere,))
    thread.start()
    thread.join()
    with pytest.raises(ncclpy.NcclAborted, match="another one"):
        stream_readers.raise_in_readers([number], 0, ncclpy.NcclAborted("another one"), elsewhere)
        time.sleep(0.01)


def test_errors_that_are_set_at_once_are_raised_as_one_that_names_both():
    """CPython holds one asynchronous exception for a thread."""
    first, second, found, ready = {1}, {2}, [], threading.Event()

    def sleep():
        try:
            ready.set()
            time.sleep(1)
        except ncclpy.NcclError as raised:
            found.append(raised)

    for taken_back in (None, first, second):
        found.clear(), ready.clear()
        thread = threading.Thread(target=sleep)
        thread.start()
        assert ready.wait(30)
        errors = ncclpy.NcclTimeout("one"), ncclpy.NcclAborted("another")
        number = wait.number_of_thread(thread.ident)
        for error, told in zip(errors, (first, second), strict=True):
            stream_readers.raise_in_readers([number], 0, error, told)
        if taken_back is not None:  # as by a call of that thread
            with stream_readers._lock:
                left = [each for each in stream_readers._pending[number] if each[0] is not taken_back]
                stream_readers._set(number, left)
        thread.join(30)
        if taken_back is None:
            assert [str(each) for each in found] == ["another; and one"] and found[0].__cause__ is errors[1]
        else:
            assert found == [errors[taken_back is first]]
