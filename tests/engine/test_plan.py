"""Plans: recorded once, launched many times by one call or as CUDA graphs; on GPUs and on the host engine."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import thread_ranks

import ncclpy
import testing
from ncclpy.core.runtime import device as device_module


class Ranks:
    """Communicators of one process, each with a send buffer, a receive buffer and a stream."""

    def __init__(self, comms, lib, count=1000):
        self.comms, self.lib = comms, lib
        self.send = [lib.make(np.full(count, comm.rank + 1.0, np.float32), comm.device) for comm in comms]
        self.recv = [lib.make(np.zeros(count, np.float32), comm.device) for comm in comms]
        self.streams = [ncclpy.Stream(comm.device) for comm in comms]
        for comm in comms:
            ncclpy.synchronize(comm.device)

    def all_reduce(self, streams=True):
        for comm, send, recv, stream in zip(self.comms, self.send, self.recv, self.streams, strict=True):
            arguments = self.lib.argument(send), self.lib.argument(recv)
            comm.all_reduce(*arguments, stream=stream if streams else None)

    def synchronize(self):
        for stream in self.streams:
            stream.synchronize()

    def received(self):
        """Return the value that each rank has received, one for each, and reset it to 0."""
        self.synchronize()
        found = [np.unique(self.lib.read(recv)).tolist() for recv in self.recv]
        assert all(len(values) == 1 for values in found), found
        for i, comm in enumerate(self.comms):
            fresh = self.lib.make(np.zeros(len(self.recv[i]), np.float32), comm.device)
            self._copy(self.recv[i], fresh, comm.device)
        return [values[0] for values in found]

    def _copy(self, to, source, device):
        if isinstance(to, np.ndarray):
            to[:] = source
        elif hasattr(to, "copy_"):
            to.copy_(source)
        else:
            ncclpy.core.runtime.device.copy(to.pointer, source.pointer, 4 * len(to))
        ncclpy.synchronize(device)


@pytest.fixture
def ranks(comms2, arrays):
    return Ranks(comms2, arrays)


def recorded(body):
    plan = ncclpy.Plan()
    with plan.record():
        body()
    return plan


def deadline(function, *arguments):
    return testing.run_with_deadline(lambda: function(*arguments), 30)


def test_recording_launches_nothing_and_a_launch_everything(ranks):
    plan = recorded(ranks.all_reduce)
    assert len(plan) == 2
    assert ranks.received() == [0, 0]
    for _ in range(3):
        deadline(plan.launch)
        assert ranks.received() == [3, 3]


def test_streams_of_the_arrays_themselves(ranks):
    plan = recorded(lambda: ranks.all_reduce(streams=False))
    for _ in range(2):
        deadline(plan.launch)
        for comm in ranks.comms:
            ncclpy.synchronize(comm.device)
        assert ranks.received() == [3, 3]


@pytest.mark.parametrize("streams", [True, False], ids=["streams", "no streams"])
def test_graph_replays_the_plan(ranks, streams):
    plan = recorded(lambda: ranks.all_reduce(streams))
    deadline(plan.launch)  # NCCL connects the ranks
    ranks.received()
    graph = deadline(plan.capture)
    for comm in ranks.comms:
        ncclpy.synchronize(comm.device)
    assert ranks.received() == [0, 0]  # capturing runs nothing
    for _ in range(5):
        deadline(graph.launch)
        for comm in ranks.comms:
            ncclpy.synchronize(comm.device)
        assert ranks.received() == [3, 3]
    graph.close()
    with pytest.raises(ValueError, match="closed"):
        graph.launch()
    deadline(plan.launch)
    assert ranks.received() == [3, 3]


def test_several_operations(ranks):
    more = Ranks(ranks.comms, ranks.lib, 10)

    def body():
        ranks.all_reduce()
        for comm, recv, stream in zip(more.comms, more.send, ranks.streams, strict=True):
            comm.broadcast(more.lib.argument(recv), root=1, stream=stream)

    plan = recorded(body)
    assert len(plan) == 4
    for _ in range(2):
        deadline(plan.launch)
        assert ranks.received() == [3, 3]
        assert [float(more.lib.read(array)[0]) for array in more.send] == [2, 2]


def test_lists_of_buffers(comms2, host_engine):
    counts = [2, 3]
    rows = [[np.full(count, 10.0 * comm.rank + peer) for peer, count in enumerate(counts)] for comm in comms2]
    columns = [[np.zeros(counts[comm.rank]) for _ in comms2] for comm in comms2]
    total = [np.zeros(count) for count in counts]
    given = []
    plan = recorded(lambda: [exchange_lists(*each, given) for each in zip(comms2, rows, columns, total, strict=True)])
    for launch in range(3):
        for row in rows:
            for part in row:
                part += launch
        deadline(plan.launch)
        added = sum(range(launch + 1))
        assert [[set(part) for part in mine] for mine in columns] == [
            [{0.0 + added}, {10.0 + added}], [{1.0 + added}, {11.0 + added}]
        ]  # fmt: skip
        assert [set(part) for part in total] == [{10.0 + 2 * added}, {12.0 + 2 * added}]
    assert all(view() is not None for view in given)
    del plan
    assert all(view() is None for view in given)


def exchange_lists(comm, row, column, total, given):
    """Call with views that are referenced nowhere else, and note weak references to them."""
    lists = [[part.view() for part in parts] for parts in (row, column, row)]
    given += [weakref.ref(view) for views in lists for view in views]
    comm.all_to_all(lists[0], lists[1])
    comm.reduce_scatter(lists[2], total)


def test_messages(ranks):
    (first, second), (send, _), (_, recv) = ranks.comms, ranks.send, ranks.recv

    def body():
        first.send(ranks.lib.argument(send), 1, stream=ranks.streams[0])
        second.recv(ranks.lib.argument(recv), 0, stream=ranks.streams[1])

    plan = recorded(body)
    for _ in range(2):
        deadline(plan.launch)
        assert ranks.received() == [0, 1]


def test_many_small_operations_of_one_communicator(comm1, arrays):
    parts = [arrays.make(np.full(8, i, np.float32), 0) for i in range(64)]
    out = [arrays.make(np.zeros(8, np.float32), 0) for _ in range(64)]
    stream = ncclpy.Stream(0)

    def body():
        for a, b in zip(parts, out, strict=True):
            comm1.all_reduce(arrays.argument(a), arrays.argument(b), stream=stream)

    ncclpy.synchronize(0)
    plan = recorded(body)
    deadline(plan.launch)
    stream.synchronize()
    assert [float(arrays.read(b)[0]) for b in out] == list(range(64))


def test_all_available_devices(arrays):
    count = ncclpy.device_count()
    for comms in testing.communicators(count):
        ranks = Ranks(comms, arrays)
        plan = recorded(ranks.all_reduce)
        for _ in range(20):
            deadline(plan.launch)
        assert ranks.received() == [count * (count + 1) / 2] * count
        with deadline(plan.capture) as graph:
            for _ in range(20):
                deadline(graph.launch)
            assert ranks.received() == [count * (count + 1) / 2] * count


def test_invalid_call_raises_at_recording(ranks):
    plan = ncclpy.Plan()
    with pytest.raises(ValueError, match="recv: all_reduce needs 1000 elements"):
        with plan.record():
            ranks.all_reduce()
            short = ranks.lib.argument(ranks.recv[0][:10])
            ranks.comms[0].all_reduce(ranks.lib.argument(ranks.send[0]), short)
    assert len(plan) == 0
    with pytest.raises(ValueError, match="empty"):
        plan.launch()


def test_plan_is_refused_in_groups_and_twice(ranks):
    plan = recorded(ranks.all_reduce)
    with pytest.raises(RuntimeError, match="recorded already"):
        plan.record()
    with ncclpy.group():
        with pytest.raises(ValueError, match="inside a group"):
            plan.launch()
        with pytest.raises(ValueError, match="inside a group"):
            plan.capture()
        with pytest.raises(ValueError, match="inside a group"), ncclpy.Plan().record():
            pass
    with pytest.raises(ValueError, match=r"made inside plan\.record"), ncclpy.Plan().record():
        ncclpy.Communicator.init(1, 0, ncclpy.get_unique_id(), device=0)


def test_graph_needs_one_stream_per_device(ranks):
    def body():
        ranks.all_reduce()
        Ranks(ranks.comms, ranks.lib).all_reduce()

    plan = recorded(body)
    with pytest.raises(ValueError, match="uses 2 streams"):
        plan.capture()


def test_plan_of_blocking_and_nonblocking_communicators_is_refused(ranks):
    """NCCL refuses them as one group but not launched by one thread per device; which of the two depends on timing."""
    arrays = ranks.lib
    data = arrays.make(np.ones(7, np.float32), 1)
    config = ncclpy.Config(blocking=False)
    with ncclpy.Communicator.init(1, 0, ncclpy.get_unique_id(), device=1, config=config).wait_ready(20) as other:
        plan = ncclpy.Plan()
        with pytest.raises(ValueError, match="blocking"), plan.record():
            ranks.comms[0].all_reduce(arrays.argument(ranks.send[0]))
            other.all_reduce(arrays.argument(data))
        with pytest.raises(ValueError, match="empty"):
            plan.launch()


def test_communicator_with_a_deadline_can_be_captured(arrays):
    with ncclpy.Communicator.init(1, 0, ncclpy.get_unique_id(), device=0, timeout=20) as comm:
        array = arrays.make(np.full(4, 3, np.float32), 0)
        twice = comm.pre_mul_sum(2.0, "float32")
        plan = recorded(lambda: comm.all_reduce(arrays.argument(array), op=twice, stream=0))
        with deadline(plan.capture) as graph:
            deadline(graph.launch)
            ncclpy.synchronize(0, timeout=20)
        assert (arrays.read(array) == 6).all()


def test_nonblocking_communicator_cannot_be_captured(arrays):
    config = ncclpy.Config(blocking=False)
    with ncclpy.Communicator.init(1, 0, ncclpy.get_unique_id(), device=0, config=config).wait_ready(20) as comm:
        array = arrays.make(np.ones(4, np.float32), 0)
        plan = recorded(lambda: comm.all_reduce(arrays.argument(array), stream=0))
        deadline(plan.launch)
        with pytest.raises(ValueError, match="nonblocking"):
            plan.capture()
        ncclpy.synchronize(0)


def test_closed_communicator_or_stream_is_named(ranks):
    plan = recorded(ranks.all_reduce)
    deadline(plan.launch)
    graph = deadline(plan.capture)
    ranks.synchronize()
    ranks.streams[1].close()
    for launch in (plan.launch, graph.launch):
        with pytest.raises(ValueError, match="a stream of this plan, on device 1, is closed"):
            launch()
    testing.close_all(ranks.comms)
    with pytest.raises(ValueError, match="is closed"):
        plan.launch()
    with pytest.raises(ValueError, match="this graph is closed"):
        graph.launch()


def test_closed_operator_is_named(ranks):
    """NCCL gives its number to the next operator, which would be used silently."""
    operators = [comm.pre_mul_sum(2.0, "float32") for comm in ranks.comms]

    def body():
        for comm, send, recv, stream, op in zip(
            ranks.comms, ranks.send, ranks.recv, ranks.streams, operators, strict=True
        ):
            comm.all_reduce(ranks.lib.argument(send), ranks.lib.argument(recv), op=op, stream=stream)

    plan = recorded(body)
    deadline(plan.launch)
    with deadline(plan.capture) as graph:
        assert ranks.received() == [6.0, 6.0]
        operators[1].close()
        others = [comm.pre_mul_sum(3.0, "float32") for comm in ranks.comms]
        for call in (plan.launch, graph.launch, plan.capture):
            with pytest.raises(ValueError, match="a reduction operator of this plan is closed"):
                call()
    del others


def test_plan_is_recorded_once(ranks):
    plan = ncclpy.Plan()
    first, second = plan.record(), plan.record()
    with first:
        ranks.all_reduce()
    with pytest.raises(RuntimeError, match="recorded meanwhile"), second:
        ranks.all_reduce()
        ranks.all_reduce()
    assert len(plan) == len(ranks.comms)
    deadline(plan.launch)
    ranks.synchronize()


def test_aborted_communicator_is_named(ranks):
    plan = recorded(ranks.all_reduce)
    testing.abort_all(ranks.comms)
    with pytest.raises(ncclpy.NcclAborted):
        plan.launch()


def test_plan_keeps_its_streams(ranks):
    plan = recorded(ranks.all_reduce)
    streams = [weakref.ref(stream) for stream in ranks.streams]
    deadline(plan.launch)
    ranks.synchronize()
    ranks.streams = []
    assert all(stream() is not None for stream in streams)
    deadline(plan.launch)
    for comm in ranks.comms:
        ncclpy.synchronize(comm.device)
    del plan
    assert all(stream() is None for stream in streams)


def test_threads_may_launch_one_plan(ranks):
    plan = recorded(ranks.all_reduce)

    def body(number):
        for _ in range(50):
            plan.launch()

    thread_ranks.run_ranks(4, body, 30)
    assert ranks.received() == [3, 3]


def test_capturing_takes_its_turn_on_a_communicator(ranks, host_engine):
    """NCCL requires the calls on one communicator to be made one after the other, captured ones too."""
    plan = recorded(ranks.all_reduce)
    testing.check_takes_its_turn(
        ranks.comms, lambda: ranks.comms[1].all_reduce(ranks.recv[1], stream=ranks.streams[1]), plan.capture
    )


def test_current_device_is_unchanged(arrays):
    testing.need_devices(2)
    array = arrays.make(np.ones(4, np.float32), 1)
    with ncclpy.Communicator.init(1, 0, ncclpy.get_unique_id(), device=1) as comm, ncclpy.Stream(1) as stream:
        plan = recorded(lambda: comm.all_reduce(arrays.argument(array), stream=stream))
        with device_module.using(0):
            deadline(plan.launch)  # one device: launched by this thread
            plan.launch()
            assert device_module.current() == 0
            with plan.capture() as graph:
                graph.launch()
                assert device_module.current() == 0
        stream.synchronize()


def test_error_of_nccl_is_raised(ranks, host_engine):
    plan = recorded(ranks.all_reduce)
    with ncclpy.faults("rank=1 call=AllReduce nth=1 do=error:ncclSystemError"):
        with pytest.raises(ncclpy.NcclError, match="unhandled system error"):
            deadline(plan.launch)
    testing.abort_all(ranks.comms)


def test_after_a_pause_the_calling_thread_launches_for_all(host_engine):
    """Waking the devices' threads takes longer than one group for all; without a pause each thread launches."""
    testing.run_python(
        """
        import os, time
        os.sched_getaffinity = lambda pid: set(range(64))  # a thread a device
        import numpy as np, ncclpy
        comms = ncclpy.Communicator.init_all([0, 1])
        arrays = [np.ones(4, np.float32) for _ in comms]
        plan = ncclpy.Plan()
        with plan.record():
            for comm, array in zip(comms, arrays):
                comm.all_reduce(array, op="max")
        plan.launch()

        def groups(launches):
            with ncclpy.faults("call=GroupEnd nth=* do=delay:0us") as faults:
                for _ in range(launches):
                    plan.launch()
                return len(faults.fired)

        for _ in range(5):
            time.sleep(0.05)
            assert groups(1) == 1
        assert groups(300) < 300
        graph = plan.capture()
        for pause in (0.05, 0.0, 0.0, 0.05):
            time.sleep(pause)
            graph.launch()
            assert all((array == 1).all() for array in arrays)
        graph.close()
        for comm in comms:
            comm.close()
        """,
        timeout=60,
        warm=True,
    )


def late(devices, timeout_of_comms=1.0, **options):
    """Launch a plan on lanes, with some ranks in progress for longer than the deadline; return the error's text.

    The devices' own threads launch only right after another launch, so this is tried until they do.
    """
    done = testing.run_python(
        f"""
        import os
        os.sched_getaffinity = lambda pid: set(range(64))  # a thread a device
        import numpy as np, ncclpy
        late, fault = {devices}, "; ".join(f"rank={{r}} call=AllReduce do=busy:30s nth=2" for r in {devices})
        for _ in range(200):
            config = ncclpy.Config(blocking=False)  # which is polled, by the lane
            comms = ncclpy.Communicator.init_all(range(4), config=config, timeout={timeout_of_comms})
            for comm in comms:
                comm.wait_ready(30)
            streams = [ncclpy.Stream(comm.device) for comm in comms]
            arrays = [np.ones(4, np.float32) for _ in comms]
            plan = ncclpy.Plan()
            with plan.record():
                for comm, array, stream in zip(comms, arrays, streams):
                    comm.all_reduce(array, stream=stream)
            with ncclpy.faults(fault):
                try:
                    plan.launch()
                    plan.launch(**{options})
                except ncclpy.NcclTimeout as error:
                    told = [str(error), *getattr(error, "__notes__", [])]
                    break
                except ncclpy.NcclError:  # one group for all
                    for comm in comms:
                        comm.abort()
                    continue
        else:
            raise AssertionError("the lanes have launched nothing")
        aborted = [comm.rank for comm in comms if "aborted" in repr(comm)]
        # Operations of the others wait for these ranks: the watchdog may have aborted them at the same deadline.
        assert set(late) <= set(aborted), (aborted, late)
        assert len(told) == len(late), told
        for rank, text in zip(late, told):
            assert f"rank {{rank}} of 4" in text and "aborted" in text, told
        print(told[0], flush=True)
        os._exit(0)
        """,
        timeout=60,
        warm=True,
    )
    return done.stdout


@pytest.mark.parametrize(
    "devices",
    [pytest.param([0], marks=pytest.mark.slow), [1, 2], pytest.param([0, 1, 3], marks=pytest.mark.slow)],
    ids=str,
)
def test_all_communicators_that_are_late_are_aborted(host_engine, devices):
    """The error names the communicator that was late first, and its notes the other late ones; no others are named."""
    assert "not done after 1 s" in late(devices)


def test_deadline_of_one_launch(host_engine):
    assert "not done after 1.2 s" in late([1, 2], timeout_of_comms=30.0, timeout=1.2)


def test_deadline_of_one_launch_is_refused_by_communicators_that_cannot_be_ended(ranks):
    plan = recorded(ranks.all_reduce)
    with pytest.raises(ValueError, match=r"timeout: .* cannot be ended"):
        plan.launch(timeout=1.0)
    with pytest.raises(ValueError, match="timeout"):
        plan.launch(timeout=-1.0)
    deadline(plan.launch)
    ranks.synchronize()
