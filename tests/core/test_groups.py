"""Groups: several devices from one thread, aggregation, send and receive merged, nesting, several communicators."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import numpy as np
import pytest
import thread_ranks

import ncclpy
import testing


def grouped(body):
    """Run `body` inside a group, in a thread with a deadline."""

    def call():
        with ncclpy.group():
            body()

    testing.run_with_deadline(call)


def filled(lib, comm, value, count=4):
    return lib.make(np.full(count, value, np.float32), comm.device)


def values(lib, part):
    """Return the one value that all elements have."""
    found = np.unique(lib.read(part))
    assert len(found) == 1, found
    return float(found[0])


def in_step(lib, comms):
    """Check that all ranks still agree on which operation is next."""
    parts = [filled(lib, comm, 1) for comm in comms]
    grouped(lambda: [comm.all_reduce(lib.argument(part)) for comm, part in zip(comms, parts, strict=True)])
    assert [values(lib, part) for part in parts] == [len(comms)] * len(comms)


def test_several_devices_from_one_thread(comms4, arrays):
    parts = [filled(arrays, comm, comm.rank) for comm in comms4]
    grouped(lambda: [comm.all_reduce(arrays.argument(part)) for comm, part in zip(comms4, parts, strict=True)])
    assert [values(arrays, part) for part in parts] == [6] * 4


def test_aggregation_of_different_collectives(comms2, arrays):
    first = [filled(arrays, comm, 1 + comm.rank) for comm in comms2]
    second = [arrays.make(np.arange(3, dtype=np.int64) + comm.rank, comm.device) for comm in comms2]
    third = [filled(arrays, comm, 10 * (1 + comm.rank)) for comm in comms2]

    def body():
        for comm, a, b, c in zip(comms2, first, second, third, strict=True):
            comm.broadcast(arrays.argument(a), root=1)
            comm.all_reduce(arrays.argument(b), op="max")
            comm.all_reduce(arrays.argument(c))

    grouped(body)
    assert [values(arrays, part) for part in first] == [2, 2]
    assert all(arrays.read(part).tolist() == [1, 2, 3] for part in second)
    assert [values(arrays, part) for part in third] == [30, 30]


def test_operations_on_one_buffer_run_in_order(comms2, arrays):
    # One stream, so the second sum adds the results of the first.
    parts = [filled(arrays, comm, 1) for comm in comms2]
    streams = [ncclpy.Stream(comm.device) for comm in comms2]

    for _ in range(2):
        grouped(lambda: [
            comm.all_reduce(arrays.argument(part), stream=stream)
            for comm, part, stream in zip(comms2, parts, streams, strict=True)
        ])  # fmt: skip
    for stream in streams:
        stream.synchronize()
        stream.close()
    assert [values(arrays, part) for part in parts] == [4, 4]


def test_send_and_receive_merge_into_an_exchange(comms4, arrays):
    # Every rank sends to both neighbours and receives from both: without a group all would wait for each other.
    sends = [filled(arrays, comm, comm.rank) for comm in comms4]
    lefts, rights = ([filled(arrays, comm, -1) for comm in comms4] for _ in range(2))

    def rank(rank):
        comm = comms4[rank.rank]
        left, right = (comm.rank - 1) % 4, (comm.rank + 1) % 4
        with ncclpy.group():
            comm.send(arrays.argument(sends[comm.rank]), left)
            comm.send(arrays.argument(sends[comm.rank]), right)
            comm.recv(arrays.argument(lefts[comm.rank]), left)
            comm.recv(arrays.argument(rights[comm.rank]), right)
        return values(arrays, lefts[comm.rank]), values(arrays, rights[comm.rank])

    found = testing.run_threads(4, rank, comms=comms4)
    assert found == [((r - 1) % 4, (r + 1) % 4) for r in range(4)]


def test_send_to_oneself(comm1, arrays):
    send, recv = filled(arrays, comm1, 5), filled(arrays, comm1, 0)

    def body():
        comm1.send(arrays.argument(send), 0)
        comm1.recv(arrays.argument(recv), 0)

    grouped(body)
    assert values(arrays, recv) == 5


def test_several_messages_between_two_ranks_keep_their_order(comms2, arrays):
    sends = [filled(arrays, comms2[0], value, count=1 + value) for value in range(5)]
    recvs = [filled(arrays, comms2[1], -1, count=1 + value) for value in range(5)]

    def body():
        for part in sends:
            comms2[0].send(arrays.argument(part), 1)
        for part in recvs:
            comms2[1].recv(arrays.argument(part), 0)

    grouped(body)
    assert [values(arrays, part) for part in recvs] == [0, 1, 2, 3, 4]


def test_collectives_and_messages_in_one_group(comms2, arrays):
    sums = [filled(arrays, comm, 1) for comm in comms2]
    message, box = filled(arrays, comms2[0], 9), filled(arrays, comms2[1], 0)

    def body():
        comms2[0].send(arrays.argument(message), 1)
        for comm, part in zip(comms2, sums, strict=True):
            comm.all_reduce(arrays.argument(part))
        comms2[1].recv(arrays.argument(box), 0)

    grouped(body)
    assert values(arrays, box) == 9
    assert [values(arrays, part) for part in sums] == [2, 2]


def test_nesting_starts_at_the_outermost_end(comms2, arrays):
    layers = [[filled(arrays, comm, layer + comm.rank) for comm in comms2] for layer in range(3)]

    def body():
        for layer in layers:
            with ncclpy.group():
                for comm, part in zip(comms2, layer, strict=True):
                    comm.all_reduce(arrays.argument(part))
            # An inner end starts nothing: the values are still the ranks' own.
            assert values(arrays, layer[1]) != values(arrays, layer[0])

    grouped(body)
    assert [[values(arrays, part) for part in layer] for layer in layers] == [[1, 1], [3, 3], [5, 5]]


def test_nothing_starts_before_the_end(comms2, arrays):
    parts = [filled(arrays, comm, 1) for comm in comms2]

    def call():
        with ncclpy.group():
            for comm, part in zip(comms2, parts, strict=True):
                comm.all_reduce(arrays.argument(part))
            assert [values(arrays, part) for part in parts] == [1, 1]
        assert [values(arrays, part) for part in parts] == [2, 2]

    testing.run_with_deadline(call)


def test_several_communicators(comms2, arrays):
    def rank(rank):
        return comms2[rank.rank].split(0, -rank.rank)

    reversed_comms = testing.run_threads(2, rank, comms=comms2)
    first, second = ([filled(arrays, comm, 1 + comm.rank) for comm in comms2] for _ in range(2))

    def body():
        for comm, part in zip(comms2, first, strict=True):
            comm.broadcast(arrays.argument(part), root=0)
        for comm, part in zip(reversed_comms, second, strict=True):
            comm.broadcast(arrays.argument(part), root=0)

    grouped(body)
    assert [values(arrays, part) for part in first] == [1, 1]
    assert [values(arrays, part) for part in second] == [2, 2], "rank 0 of the second world is the other device"
    testing.close_all(reversed_comms)


def test_empty_groups_do_nothing(comms2, arrays):
    with ncclpy.group():
        pass
    with ncclpy.group():
        with ncclpy.group():
            pass
    in_step(arrays, comms2)


def test_group_is_entered_once():
    group = ncclpy.group()
    with group:
        pass
    with pytest.raises(RuntimeError, match="entered before"):
        with group:
            pass


class Mishap(Exception):
    pass


def test_exception_launches_nothing(comms2, arrays):
    parts = [filled(arrays, comm, 1) for comm in comms2]

    def call():
        with ncclpy.group():
            for comm, part in zip(comms2, parts, strict=True):
                comm.all_reduce(arrays.argument(part))
            raise Mishap

    with pytest.raises(Mishap):
        testing.run_with_deadline(call)
    assert [values(arrays, part) for part in parts] == [1, 1]
    in_step(arrays, comms2)


def test_exception_on_one_rank_leaves_communicator_usable(comms2, arrays):
    # Only rank 0's part was recorded: if it had been launched, the next sum would pair with it.
    part = filled(arrays, comms2[0], 100)

    def call():
        with ncclpy.group():
            comms2[0].all_reduce(arrays.argument(part))
            raise Mishap

    with pytest.raises(Mishap):
        testing.run_with_deadline(call)
    in_step(arrays, comms2)
    assert values(arrays, part) == 100


def test_rejected_buffer_in_a_group_launches_nothing(comms2, arrays):
    part, short = filled(arrays, comms2[0], 100), filled(arrays, comms2[1], 1, count=3)

    def call():
        with ncclpy.group():
            comms2[0].all_reduce(arrays.argument(part))
            comms2[1].all_reduce(arrays.argument(short), arrays.argument(filled(arrays, comms2[1], 0)))

    with pytest.raises(ValueError, match="recv"):
        testing.run_with_deadline(call)
    in_step(arrays, comms2)
    assert values(arrays, part) == 100


def test_caught_exception_of_inner_group_drops_only_its_part(comms2, arrays):
    kept, dropped = ([filled(arrays, comm, 1) for comm in comms2] for _ in range(2))

    def body():
        for comm, part in zip(comms2, kept, strict=True):
            comm.all_reduce(arrays.argument(part))
        with pytest.raises(Mishap):
            with ncclpy.group():
                for comm, part in zip(comms2, dropped, strict=True):
                    comm.all_reduce(arrays.argument(part))
                raise Mishap

    grouped(body)
    assert [values(arrays, part) for part in kept] == [2, 2]
    assert [values(arrays, part) for part in dropped] == [1, 1]


def test_exception_while_communicators_are_made(arrays):
    testing.need_devices(2)
    uid = ncclpy.get_unique_id()
    made: list = []

    def call():
        with ncclpy.group():
            made.append(ncclpy.Communicator.init(2, 0, uid, device=0))
            raise Mishap

    with pytest.raises(Mishap):
        testing.run_with_deadline(call)
    with pytest.raises(ncclpy.NcclError, match="was never initialised"):
        made[0].barrier()
    made[0].close()
    comms = ncclpy.Communicator.init_all(range(2))
    in_step(arrays, comms)
    testing.close_all(comms)


def test_call_refused_by_nccl_names_itself_and_leaves_communicators_usable(comms2, arrays):
    # NCCL refuses what Python cannot check: an operator that does not exist.
    from ncclpy import bindings

    part = filled(arrays, comms2[0], 1)
    with pytest.raises(ncclpy.NcclError) as caught:
        bindings.all_reduce(4096, 4096, 1, ncclpy.DataType.FLOAT32, 99, comms2[0].handle, 0)
    assert caught.value.function == "ncclAllReduce"
    in_step(arrays, comms2)
    assert values(arrays, part) == 1


def test_groups_of_two_threads_are_apart(comms2, arrays):
    # A group belongs to its thread: calls of the other thread are not recorded in it.
    inside, outside = threading.Event(), threading.Event()
    parts = [filled(arrays, comm, 1) for comm in comms2]
    others = [filled(arrays, comm, 5) for comm in comms2]

    def first():
        with ncclpy.group():
            comms2[0].all_reduce(arrays.argument(parts[0]))
            inside.set()
            assert outside.wait(20)
            comms2[1].all_reduce(arrays.argument(parts[1]))

    def second():
        assert inside.wait(20)
        with ncclpy.group():
            for comm, part in zip(comms2, others, strict=True):
                comm.all_reduce(arrays.argument(part))
        assert [values(arrays, part) for part in others] == [10, 10]
        outside.set()

    thread_ranks.run_ranks(2, lambda number: (first, second)[number](), 30)
    assert [values(arrays, part) for part in parts] == [2, 2]


def test_group_keeps_its_buffers_alive(comms2, arrays):
    class Tracked:
        """A buffer of the CUDA array interface; the class counts destroyed ones."""

        gone = 0

        def __init__(self, part):
            self.part = part
            if ncclpy.library().engine == "host":
                pointer = part.ctypes.data if arrays.name == "numpy" else part.data_ptr()
                self.__cuda_array_interface__ = {
                    "data": (pointer, False), "shape": tuple(part.shape), "typestr": "<f4", "version": 3,
                }  # fmt: skip
            else:
                self.__cuda_array_interface__ = part.__cuda_array_interface__

        def __del__(self):
            Tracked.gone += 1

    if arrays.name == "ncclpy.Buffer":
        pytest.skip("plain memory has no __cuda_array_interface__")

    # A group keeps its buffers until it ends; the memory must live until the work on the stream is done.
    parts = [filled(arrays, comm, 1) for comm in comms2]

    def call():
        with ncclpy.group():
            for comm, part in zip(comms2, parts, strict=True):
                comm.all_reduce(Tracked(part))
            gc.collect()
            assert Tracked.gone == 0
        for comm in comms2:
            ncclpy.synchronize(comm.device)

    testing.run_with_deadline(call)
    gc.collect()
    assert Tracked.gone == 2


def test_group_keeps_the_arrays_of_a_list_alive(host_engine, comms2):
    sends = [np.full(2 + comm.rank, comm.rank + 1.0) for comm in comms2]
    parts = [[np.zeros(2), np.zeros(3)] for _ in comms2]
    views = [[part.view() for part in mine] for mine in parts]  # passed to the call, and referenced nowhere else
    refs = [weakref.ref(view) for mine in views for view in mine]

    def call():
        with ncclpy.group():
            for comm, send, mine in zip(comms2, sends, views, strict=True):
                comm.all_gather(send, mine)
                mine.clear()
            assert all(ref() is not None for ref in refs)

    testing.run_with_deadline(call)
    assert [[part.tolist() for part in mine] for mine in parts] == [[[1, 1], [2, 2, 2]]] * 2
    assert all(ref() is None for ref in refs)


def test_simulate_estimates_and_launches_nothing(comms2, arrays):
    testing.need_function("ncclGroupSimulateEnd")
    parts = [filled(arrays, comm, 1, count=1 << 16) for comm in comms2]

    def call():
        with ncclpy.group(simulate=True) as group:
            for comm, part in zip(comms2, parts, strict=True):
                comm.all_reduce(arrays.argument(part))
        return group.estimated_time_us

    estimate = testing.run_with_deadline(call)
    assert isinstance(estimate, float) and estimate > 0
    assert [values(arrays, part) for part in parts] == [1, 1]
    in_step(arrays, comms2)


def test_simulate_inside_a_real_group_is_refused():
    with ncclpy.group():
        with pytest.raises(ValueError, match="simulate"):
            with ncclpy.group(simulate=True):
                pass


def test_thousands_of_operations_in_one_group(comms2, arrays):
    parts = [[filled(arrays, comm, 1, count=2) for _ in range(300)] for comm in comms2]

    def body():
        for comm, mine in zip(comms2, parts, strict=True):
            for part in mine:
                comm.all_reduce(arrays.argument(part))

    grouped(body)
    assert {values(arrays, part) for mine in parts for part in mine} == {2}


def test_barrier(comms4):
    # No rank leaves before the last one enters.
    entered = [0]
    lock = threading.Lock()

    def rank(rank):
        time.sleep(0.05 * rank.rank)
        with lock:
            entered[0] += 1
        comms4[rank.rank].barrier()
        return entered[0]

    assert testing.run_threads(4, rank, comms=comms4) == [4] * 4


def test_barrier_in_a_group(comms2):
    grouped(lambda: [comm.barrier() for comm in comms2])


def test_group_is_exited_once_and_by_the_thread_that_entered_it(comm1):
    for never in (ncclpy.group(), ncclpy.group()):
        with pytest.raises(RuntimeError, match="not open"):
            never.__exit__(None, None, None)
    group = ncclpy.group()
    with group:
        with pytest.raises(RuntimeError, match="not open"):
            testing.run_with_deadline(lambda: group.__exit__(None, None, None))
    with pytest.raises(RuntimeError, match="not open"):
        group.__exit__(None, None, None)
    comm1.barrier()  # and no group is left open


def test_ranks_that_disagree_raise_and_get_no_wrong_data(host_engine, comms2):
    # Arrays in CPU memory: the end of the group waits for the data, so it must not return as if they were there.
    def both(counts):
        for comm, count in zip(comms2, counts, strict=True):
            comm.all_reduce(np.ones(count))

    with pytest.raises(ncclpy.NcclError, match=r"rank 0 calls AllReduce of 4 .*rank 1 .* of 5 ") as raised:
        grouped(lambda: both([4, 5]))
    assert raised.value.result == ncclpy.Result.INVALID_USAGE
    with pytest.raises(ncclpy.NcclError, match="do not agree"):
        grouped(lambda: both([4, 4]))  # the communicator stays broken
    for comm in comms2:
        comm.abort()


def test_single_calls_that_disagree_raise_on_both_ranks(host_engine, comms2):
    def call(rank):
        with pytest.raises(ncclpy.NcclError, match="do not agree"):
            comms2[rank].all_reduce(np.ones(4), op="max" if rank else "sum")

    thread_ranks.run_ranks(2, call, 20)
    for comm in comms2:
        comm.abort()


def test_rest_of_a_group_waits_for_its_own_stream(host_engine):
    """An inner group on another stream is dropped."""
    (here,), (there,) = (ncclpy.Communicator.init_all([device]) for device in (0, 1))
    send, recv = np.ones(3), np.zeros(3)
    with ncclpy.faults("call=AllReduce at=run nth=1 do=delay:300ms"):
        with ncclpy.group():
            here.all_reduce(send, recv)
            with pytest.raises(KeyError), ncclpy.group():
                there.all_reduce(send)
                raise KeyError
        assert recv.tolist() == [1, 1, 1]
    here.close()
    there.close()


def test_wait_of_a_group_has_its_own_deadline(host_engine):
    """The time that the group's calls spent waiting for another thread inside the communicator does not count."""
    (comm,) = ncclpy.Communicator.init_all([0], timeout=1.2)
    with (
        ncclpy.Stream(0) as stream,
        ncclpy.faults("call=Broadcast do=delay:800ms; call=AllReduce at=run do=delay:700ms") as faults,
    ):
        inside = threading.Thread(target=lambda: comm.broadcast(np.ones(2), stream=stream))
        inside.start()
        testing.wait_for(lambda: faults.fired)
        begun = time.monotonic()
        with ncclpy.group():
            comm.all_reduce(np.ones(2))
        assert time.monotonic() - begun > 1.2, "longer than the deadline of each"
        inside.join()
    comm.close()
