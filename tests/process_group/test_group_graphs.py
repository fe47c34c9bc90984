"""Operations of process groups in CUDA graphs: capture on the user's stream, and replay."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref

import numpy as np
import pytest
from driver_calls import DriverError
from graphs import GLOBAL, RELAXED, THREAD_LOCAL, Graph, driver
from group_ranks import DEADLINE, run_groups

import ncclpy
import testing

pytestmark = pytest.mark.usefixtures("no_collection")

RAW = testing.RawArrays()
MODES = pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED], ids=["global", "thread_local", "relaxed"])


class Side:
    """A rank's stream, arrays at fixed addresses, and steps in which both ranks wait for each other."""

    meeting = threading.Barrier(2)

    def __init__(self, group):
        self.group = group
        self.stream = ncclpy.Stream(group.device)

    def meet(self):
        """Wait for the other rank: in global mode its calls could invalidate this rank's capture."""
        self.meeting.wait(DEADLINE / 2)

    @contextlib.contextmanager
    def capture(self, graph):
        """Capture while the other rank captures too, or waits in meet()."""
        self.meet()
        with graph.capture():
            yield
        self.meet()

    def array(self, value, count=1000):
        return RAW.make(np.full(count, value, np.float32), self.group.device)

    def fill(self, array, value):
        testing.write(array.pointer, np.full(array.count, value, np.float32), array.device)

    def read(self, array):
        """Return the one value that all elements have."""
        (value,) = set(RAW.read(array).tolist())
        return value

    def all_reduce(self, array, recv=None, **options):
        return self.group.all_reduce(
            array.buffer, None if recv is None else recv.buffer, stream=self.stream, **options
        )

    def warm(self, *arrays):
        """Have NCCL connect the ranks for the operations captured later."""
        for array in arrays:
            self.all_reduce(array).wait(DEADLINE)


def run(body, **options):
    """Call ``body(side)`` on two ranks; a failure of one ends the waits of both."""
    Side.meeting = threading.Barrier(2)

    def one(group):
        try:
            side = Side(group)
            result = body(side)
            side.stream.close()
            return result
        except BaseException:
            Side.meeting.abort()
            raise

    return run_groups(2, one, **options)


@MODES
def test_operations_in_one_graph(mode):
    """Replay several collectives and a batch of messages in both directions with new inputs."""

    def body(side):
        group, other = side.group, 1 - side.group.rank
        given, summed = side.array(0), side.array(0)
        gathered, sent, got = side.array(0, 2000), side.array(0), side.array(0)

        def operations():
            works = [side.all_reduce(given, summed)]
            works.append(group.all_gather(summed.buffer, gathered.buffer, stream=side.stream))
            with group.coalescing() as work:
                group.send(sent.buffer, other, stream=side.stream)
                group.recv(got.buffer, other, stream=side.stream)
            return [*works, work]

        for work in operations():
            work.wait(DEADLINE)
        with Graph(side.stream, mode) as graph:
            with side.capture(graph):
                works = operations()
                assert graph.is_capturing()
            assert [work.state for work in works] == ["captured"] * 3
            results = []
            for step in range(10):
                side.fill(given, step * (group.rank + 1))
                side.fill(sent, 100 * group.rank + step)
                graph.launch()
                results.append([side.read(array) for array in (summed, gathered, got)])
        assert group.seq == 4, "collectives are numbered when they are captured, and not at replays"
        return results

    for rank, results in enumerate(run(body)):
        assert results == [[3 * step, 3 * step, 100 * (1 - rank) + step] for step in range(10)]


def test_lists_and_pairs_in_a_graph():
    """Capture uneven parts, a barrier, and sends on a pair's communicator."""

    def body(side):
        group, rank = side.group, side.group.rank
        group.connect(peers=[1 - rank])
        parts = [side.array(0, r + 1) for r in range(2)]
        mine, passed = side.array(rank + 1, rank + 1), side.array(rank, 10)

        def operations():
            group.all_gather(mine.buffer, [part.buffer for part in parts], stream=side.stream)
            if rank == 0:
                group.send(passed.buffer, 1, stream=side.stream)
            else:
                group.recv(passed.buffer, 0, stream=side.stream)
            return group.barrier(stream=side.stream)

        operations().wait(DEADLINE)
        group.wait_for_pending_works(DEADLINE)
        with Graph(side.stream) as graph:
            with side.capture(graph):
                assert operations().state == "captured"
            for value in (5, 6):
                side.fill(mine, 10 * rank + value)
                if rank == 0:
                    side.fill(passed, value)
                graph.launch()
                assert side.read(passed) == value
                assert [side.read(part) for part in parts] == [value, 10 + value]

    run(body)


@MODES
def test_capture_without_communicator_is_refused(mode):
    """The capture and the group stay valid, and nothing is begun."""

    def body(side):
        group, array, memory = side.group, side.array(1), side.array(1)
        with Graph(side.stream, mode) as graph:
            with side.capture(graph):
                with pytest.raises(
                    ValueError, match=r"'all' is not made yet.* call connect\(\), or run the operation"
                ):
                    side.all_reduce(array)
                assert group.seq == 0 and group.communicator is None
                driver().cuMemsetD8Async(memory.pointer, 0, 4000, side.stream.handle)
            graph.launch()
        assert side.read(memory) == 0, "what was captured besides is there"
        side.warm(array)
        assert side.read(array) == 2
        with Graph(side.stream, mode) as graph, side.capture(graph):
            with pytest.raises(ValueError, match=rf"'0:1' is not made .*call connect\(peers=\[{1 - group.rank}\]\)"):
                group.send(array.buffer, 1 - group.rank, stream=side.stream)
        graph.close()
        states = [entry["state"] for entry in ncclpy.recorder.snapshot()["entries"] if entry["operation"] == "send"]
        assert set(states) == {"failed"}, "none is shown as pending"

    ncclpy.recorder.resize(1000)
    run(body)


def test_captured_work_refuses_wait_and_result():
    def body(side):
        group, array, told = side.group, side.array(1), []
        side.warm(array)
        group.on_completion(told.append)
        with Graph(side.stream) as graph, ncclpy.Stream(group.device) as other:
            copied = side.array(0)
            with side.capture(graph):
                work = side.all_reduce(array)
                assert work.state == "captured" and work.duration is None and group.seq == 2
                asked = (work.wait, work.result, work.exception, work.is_started, work.is_completed, work.future)
                for ask in (*asked, work.__await__):
                    with pytest.raises(ValueError, match="was captured into a CUDA graph: it runs whenever"):
                        ask()
                with pytest.raises(ValueError, match="was captured into a CUDA graph"):
                    work.add_done_callback(told.append)
                with pytest.raises(ValueError, match="the legacy default stream cannot be part"):
                    work.synchronize()
                work.synchronize(side.stream)  # the stream of the capture itself
                work.synchronize(other)  # joins the capture
                driver().cuMemcpyAsync(copied.pointer, array.pointer, 4000, other.handle)
                side.stream.wait(other.record())
            with pytest.raises(ValueError, match="was captured into a CUDA graph"):
                work.synchronize(other)  # the capture has ended
            group.wait_for_pending_works(DEADLINE)
            graph.launch()
            assert side.read(copied) == 4 and work.state == "captured" and group.seq == 2
        assert not told, "replays are no operations of the group's"
        (entry,) = (
            entry for entry in ncclpy.recorder.snapshot()["entries"]
            if entry["state"] == "captured" and entry["device"] == group.device
        )  # fmt: skip
        assert entry["communicator"].startswith("works") and entry["sequence"] == 1 and entry["launched"]
        assert "Work all_reduce" in repr(work) and "captured" in repr(work)

    ncclpy.recorder.resize(1000)
    run(body, name="works", timing=True)


def test_captured_work_does_not_hold_arrays():
    def body(side):
        array = side.array(1)
        side.warm(array)
        buffer = array.buffer
        with Graph(side.stream) as graph:
            with side.capture(graph):
                kept = [side.group.all_reduce(buffer, stream=side.stream)]
                with side.group.coalescing() as work:
                    side.group.all_reduce(buffer, stream=side.stream)
                kept.append(work)
            gone = weakref.ref(buffer.owner)
            del buffer
            array = RAW.make(np.zeros(1, np.float32), side.group.device)
            testing.wait_for(lambda: gone() is None, "the end of the array")  # the monitor may hold it a little longer
            return all(work.state == "captured" for work in kept)

    assert run(body) == [True, True]


def test_eager_operations_between_replays():
    """Eager operations before a replay are launched first: all ranks need the same order."""

    def body(side):
        x, y = side.array(1), side.array(0)
        side.warm(side.array(0))
        with Graph(side.stream) as graph:
            with side.capture(graph):
                side.all_reduce(x, y)
            for _ in range(10):
                graph.launch(wait=False)
                work = side.all_reduce(y, x)  # ordered behind the replay by its producer
                work.synchronize(side.stream)
            work.wait(DEADLINE)
            return side.read(x), side.group.seq

    assert run(body) == [(4.0**10, 12)] * 2


@MODES
def test_capture_stays_valid_while_other_thread_uses_group(mode):
    """That thread and the monitor query events for its works, and the captures stay valid."""

    def body(side):
        x, y, z = side.array(1), side.array(1), side.array(2)
        side.warm(x)
        errors = []

        def others(stream):
            try:
                for _ in range(20):
                    side.group.all_reduce(y.buffer, op="max", stream=stream).wait(DEADLINE)
                    work = side.group.barrier(stream=stream)
                    while not work.is_completed():
                        time.sleep(0.0002)
            except BaseException as error:
                errors.append(error)

        with ncclpy.Stream(side.group.device) as stream, Graph(side.stream, mode) as graph:
            side.group.all_reduce(y.buffer, op="max", stream=stream).wait(DEADLINE)
            side.group.barrier(stream=stream).wait(DEADLINE)
            thread = threading.Thread(target=others, args=(stream,))
            with side.capture(graph):
                thread.start()
                thread.join(DEADLINE / 2)
                assert not thread.is_alive() and not errors, errors
                side.all_reduce(z)
                assert graph.is_capturing()
            graph.launch()
            return side.read(z), side.read(y)

    assert run(body) == [(4, 1)] * 2


@MODES
def test_earlier_work_can_be_waited_for_during_capture(mode):
    """Query and wait for an operation on the group's stream in the middle of a capture."""

    def body(side):
        x, y = side.array(1), side.array(1)
        side.warm(x)
        with ncclpy.Stream(side.group.device) as stream, Graph(side.stream, mode) as graph:
            with side.capture(graph):
                work = side.group.all_reduce(x.buffer, stream=stream)
                work.is_completed()
                work.is_started()
                work.wait(DEADLINE)
                assert work.is_completed() and work.exception() is None
                side.all_reduce(y)
                assert graph.is_capturing()
            graph.launch()
        return side.read(x), side.read(y)

    assert run(body, timing=True) == [(4, 2)] * 2


def test_communicators_are_made_and_closed_while_others_capture(host_engine):
    """In global mode a call of any thread could invalidate the capture; ncclpy's threads avoid such calls."""

    def body(side):
        group, array, got = side.group, side.array(1), side.array(0)
        group.connect()
        with Graph(side.stream, GLOBAL) as graph, ncclpy.Stream(group.device) as stream:
            with side.capture(graph):
                if group.rank == 0:
                    work = group.send(array.buffer, 1, stream=stream)
                else:
                    work = group.recv(got.buffer, 0, stream=stream)
                work.wait(DEADLINE)
                part = group.new_group([0, 1])
                part.barrier().wait(DEADLINE)
                part.close()
                part = group.new_group([0, 1])
                part.connect()
                side.meet()
                if group.rank == 0:
                    part.abort("as a test")
                testing.wait_for(lambda: part.error is not None, "the end of the part")
                part.close()
                assert graph.is_capturing()
                side.all_reduce(array)
            graph.launch()
        return side.read(array)

    assert run(body) == [2, 2]


def test_monitor_ignores_captured_operations():
    """No deadline applies while a graph is not launched, nor to a long replay."""

    def body(side):
        array = side.array(1)
        side.warm(array)
        with Graph(side.stream) as graph:
            with side.capture(graph):
                side.all_reduce(array, timeout=0.5)
            if side.group.rank == 0:
                graph.launch(wait=False)
            time.sleep(0.8)
            assert side.group.error is None
            if side.group.rank == 1:
                graph.launch(wait=False)
            side.stream.synchronize(DEADLINE / 2)
        return side.read(array)

    assert run(body) == [4, 4]


def test_abort_ends_replay():
    def body(side):
        array = side.array(1)
        side.warm(array)
        graph = Graph(side.stream)
        with side.capture(graph):
            side.all_reduce(array)
        if side.group.rank == 0:
            graph.launch(wait=False)  # the other rank does not launch its graph
            time.sleep(0.05)
            side.group.abort("enough")
        testing.wait_for(lambda: side.group.error is not None, "the end of the group")
        side.stream.synchronize(DEADLINE / 2)
        graph.close()  # an abort waits until the graph is closed
        with pytest.raises(ncclpy.NcclAborted, match="enough"):
            side.all_reduce(array)

    run(body)


WARNED_OF_GRAPH = """
import logging, threading
import numpy as np, ncclpy, testing
from graphs import Graph

said, handler = [], logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("ncclpy").addHandler(handler)
stream = ncclpy.Stream(0)
array = testing.RawArrays().make(np.ones(4, np.float32), 0).buffer

def fail(way):
    if way == "group":
        with ncclpy.ProcessGroup(ncclpy.bootstrap.LocalStore(), 0, 1, device=0) as group:
            group.all_reduce(array, stream=stream).wait(10)
            graph = Graph(stream)
            with graph.capture():
                group.all_reduce(array, stream=stream)
            graph.close()
            group.abort("a test")
        return
    comm, = ncclpy.Communicator.init_all([0], timeout=10)
    if way == "plan":
        plan = ncclpy.Plan()
        with plan.record():
            comm.all_reduce(array, stream=stream)
        graph = plan.capture()
        graph.launch()
        stream.synchronize(10)
        graph.close()
    elif way == "capture":
        graph = Graph(stream)
        with graph.capture():
            comm.all_reduce(array, stream=stream)
        graph.close()
    comm.abort("a test")
"""


@pytest.mark.parametrize("way", ["communicator", "plan", "capture", "group"])
def test_abort_with_a_graph_of_the_program_is_warned_of_once(host_engine, way):
    testing.run_python(
        WARNED_OF_GRAPH
        + f"""
for _ in range(2):
    fail({way!r})
warnings = [text for text in said if "has captured operations of it in CUDA graphs" in text]
assert len(warnings) == {int(way in ("capture", "group"))}, said
""",
        warm=True,
    )


def test_earlier_operation_is_launched_before_capture(host_engine):
    """NCCL gets one thread's operations in order, also if a lane still has an earlier one to launch."""

    def body(side):
        array = side.array(1)
        side.group.connect()
        with Graph(side.stream) as graph:
            with side.capture(graph):
                early = side.group.all_reduce(np.ones(4))  # the first of its kind: a lane makes the call
                side.all_reduce(array)
                assert early.state != "pending"
            graph.launch()
        return side.read(array), side.group.seq

    with ncclpy.faults("call=AllReduce do=delay:300ms"):
        assert run(body) == [(2, 2)] * 2


def test_stuck_earlier_operation_leaves_capture_valid(host_engine):
    """Nothing is captured, and the capture stays valid."""

    def body(side):
        array = side.array(1)
        side.group.connect()
        with Graph(side.stream) as graph:
            with side.capture(graph):
                early = side.group.all_reduce(np.ones(4))
                with pytest.raises(
                    ncclpy.NcclTimeout, match=r"begun before the operation to be captured.* is not launched yet"
                ):
                    side.all_reduce(array, timeout=0.05)
                assert early.state == "pending" and side.group.seq == 1 and side.group.error is None
                assert graph.is_capturing()
            side.group.abort("it was stuck")
            assert early.exception(DEADLINE) is not None

    with ncclpy.faults("call=AllReduce do=hang"):
        run(body)


def test_stuck_captured_call_ends_at_deadline(host_engine):
    """NCCL may wait for other ranks when it captures a call that they have not run before."""

    def body(side):
        array = side.array(1)
        side.group.connect()
        side.meet()
        graph = Graph(side.stream)
        if side.group.rank == 0:
            with graph.capture(), pytest.raises(ncclpy.NcclTimeout, match="AllReduce"):
                side.all_reduce(array, timeout=0.3)
        testing.wait_for(lambda: side.group.error is not None, "the end of the group")
        graph.close()

    with ncclpy.faults("rank=0 call=AllReduce do=hang") as faults:
        run(body)
    assert faults.fired


def test_ended_group_refuses_capture(host_engine):
    """A call that NCCL refuses ends the group, as outside of a capture, and all ranks hear of the end."""

    def body(side):
        array = side.array(1)
        side.warm(array)
        side.meet()  # both ranks are warm before the group ends
        graph = Graph(side.stream)
        if side.group.rank == 0:
            with ncclpy.faults("rank=0 call=AllReduce nth=1 do=error:ncclSystemError"):
                with graph.capture():
                    with pytest.raises(ncclpy.NcclError, match=r"was not captured.*ncclSystemError") as error:
                        side.all_reduce(array)
            assert side.group.error is error.value and side.group.seq == 1
            graph.close()
        testing.wait_for(lambda: side.group.error is not None, "the end of the group")
        with graph.capture():
            with pytest.raises(ncclpy.NcclAborted, match="ncclSystemError"):
                side.all_reduce(array)
        graph.close()

    run(body)


def test_refused_calls_keep_capture_valid():
    def body(side):
        group, array, got = side.group, side.array(1), side.array(0)
        side.warm(array)
        with ncclpy.Stream(group.device) as other, Graph(side.stream) as graph:
            with side.capture(graph):
                with pytest.raises(ValueError, match=r"1 of the 2 streams .* are being captured"), group.coalescing():
                    side.all_reduce(array)
                    group.all_reduce(got.buffer, stream=other)
                with pytest.raises(ValueError, match=r"sends to itself is captured together .* one coalescing\(\)"):
                    group.send(array.buffer, group.rank, stream=side.stream)
                with group.coalescing() as work:
                    group.send(array.buffer, group.rank, stream=side.stream)
                    group.recv(got.buffer, group.rank, stream=side.stream)
                assert work.state == "captured" and group.seq == 1
            graph.launch()
        return side.read(got)

    assert run(body) == [2, 2]


def test_capture_skips_nan_check_and_refuses_sparse(host_engine):
    """A capture skips the NaN check, and a sparse sum is refused in it; the capture stays valid."""

    def body(side):
        array = np.full(4, np.nan)
        side.warm(side.array(0))
        with Graph(side.stream) as graph:
            with side.capture(graph):
                assert side.group.all_reduce(array, stream=side.stream).state == "captured"
                with pytest.raises(
                    ValueError, match=r"all_reduce_sparse\(\) while the producer's stream is being captured"
                ):
                    side.group.all_reduce_sparse(np.zeros(1, np.int64), np.ones(1), stream=side.stream)
                assert graph.is_capturing() and side.group.seq == 2
            array[:] = 1
            graph.launch()
        with pytest.raises(ValueError, match="4 NaNs"):
            side.group.all_reduce(np.full(4, np.nan))
        return array.tolist()

    assert run(body, check_nan=True) == [[2.0] * 4] * 2


def test_invalidated_capture_is_reported_before_nccl_call():
    """The group notices the invalid capture before a call of NCCL, and stays usable."""

    def body(side):
        array = side.array(1)
        side.warm(array)
        graph = Graph(side.stream)
        with pytest.raises(DriverError, match="cuStreamEndCapture returned 901"), graph.capture():
            driver().library.cuStreamSynchronize(side.stream.handle)  # invalidates the capture
            with pytest.raises(ncclpy.NcclError, match="CAPTURE_INVALIDATED"):
                side.all_reduce(array)
        side.warm(array)
        return side.read(array), side.group.seq

    assert run(body) == [(4, 2)] * 2


def test_graph_of_several_streams():
    """A block with inputs from several captured streams waits for all of them, and all of them wait for the block."""

    def body(side):
        x, y = side.array(0), side.array(0)
        side.warm(x, y)
        with ncclpy.Stream(side.group.device) as other, Graph(side.stream) as graph:
            with side.capture(graph):
                other.wait(side.stream.record())
                driver().cuMemsetD8Async(x.pointer, 1, 4000, side.stream.handle)
                driver().cuMemsetD8Async(y.pointer, 2, 4000, other.handle)
                with side.group.coalescing():
                    side.group.all_reduce(x.buffer, op="max", stream=side.stream)
                    side.group.all_reduce(y.buffer, op="max", stream=other)
                driver().cuMemcpyAsync(x.pointer, y.pointer, 2000, side.stream.handle)
                side.stream.wait(other.record())
            graph.launch()
        values = RAW.read(x).view(np.uint8)
        return int(values[0]), int(values[-1])

    assert run(body) == [(2, 1)] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_torch_captures(mode):
    torch = pytest.importorskip("torch", reason="needs torch")
    captures = threading.Lock()  # torch's own calls around a capture would invalidate the other rank's

    def body(group):
        torch.cuda.set_device(group.device)
        group.connect()
        given, gathered = torch.ones(1024, device="cuda"), torch.zeros(2048, device="cuda")
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            summed = given * 2
            group.all_reduce(summed).wait(DEADLINE)
            group.all_gather(summed, gathered).wait(DEADLINE)
        graph = torch.cuda.CUDAGraph()
        Side.meeting.wait(DEADLINE / 2)
        with captures, torch.cuda.graph(graph, stream=stream, capture_error_mode=mode):
            summed = given * 2
            work = group.all_reduce(summed)
            group.all_gather(summed, gathered)
            work.synchronize(torch.cuda.current_stream())
            doubled = gathered * 2
        Side.meeting.wait(DEADLINE / 2)
        results = []
        for step in range(10):
            given.fill_(step * (group.rank + 1))
            graph.replay()
            torch.cuda.synchronize()
            results.append(doubled.unique().tolist())
        work = group.all_reduce(given)
        work.synchronize(torch.cuda.current_stream())
        results.append(given.unique().tolist())
        torch.cuda.synchronize()
        del graph, work
        return results

    Side.meeting = threading.Barrier(2)
    assert run_groups(2, body) == [[[12.0 * step] for step in range(10)] + [[27.0]]] * 2
