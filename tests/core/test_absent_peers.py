"""Sends and receives without a peer, as MPI's PROC_NULL: the ends of a line need no case of their own."""

from __future__ import annotations

import numpy as np
import pytest

import conformance
import ncclpy
import testing


@pytest.fixture(scope="module", params=conformance.worlds(), ids="{}ranks".format)
def comms(request):
    yield from testing.communicators(request.param)


def test_send_and_recv_without_a_peer_do_nothing(comms, arrays):
    comm = comms[0]
    array = arrays.make(np.full(3, 7, np.float32), comm.device)
    testing.run_with_deadline(lambda: comm.send(arrays.argument(array), None))
    testing.run_with_deadline(lambda: comm.recv(arrays.argument(array), None))
    testing.run_with_deadline(lambda: comm.sendrecv(arrays.argument(array), None, arrays.argument(array), None))
    assert arrays.read(array).tolist() == [7, 7, 7]


def test_sendrecv_along_a_line_leaves_the_first_rank_as_it_was(comms, arrays):
    size = len(comms)
    sends = [arrays.make(np.full(3, rank, np.float32), comm.device) for rank, comm in enumerate(comms)]
    recvs = [arrays.make(np.full(3, -1, np.float32), comm.device) for comm in comms]

    def shift(rank):
        after = rank.rank + 1 if rank.rank + 1 < size else None
        before = rank.rank - 1 if rank.rank else None
        send, recv = arrays.argument(sends[rank.rank]), arrays.argument(recvs[rank.rank])
        comms[rank.rank].sendrecv(send, after, recv, before)

    testing.run_threads(size, shift, comms=comms)
    assert [arrays.read(recv).tolist() for recv in recvs] == [[rank - 1] * 3 for rank in range(size)]


@pytest.mark.parametrize("method", ["send", "recv"])
def test_closed_communicator_without_a_peer_is_an_error(arrays, method):
    with ncclpy.Communicator.init(1, 0, ncclpy.get_unique_id(), device=0) as comm:
        pass
    with pytest.raises(ValueError, match="is closed"):
        getattr(comm, method)(np.ones(1), None)


CALLS = {
    "send": lambda target, buf, **options: target.send(buf, None, **options),
    "recv": lambda target, buf, **options: target.recv(buf, None, **options),
    "sendrecv to none": lambda target, buf, **options: target.sendrecv(buf, None, np.zeros(2), None, **options),
    "sendrecv from none": lambda target, buf, **options: target.sendrecv(np.zeros(2), None, buf, None, **options),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_arguments_beside_no_peer_are_checked(host_engine, comm1, call):
    group = ncclpy.ProcessGroup(ncclpy.bootstrap.LocalStore(), 0, 1, device=0)
    with group:
        for target in (comm1, group):
            for error, words, given, options in (
                ((TypeError, ValueError), "no data type", np.array([None, None]), {}),
                ((TypeError, ValueError), "contiguous", np.zeros(4)[::2], {}),
                (TypeError, "stream", np.zeros(2), {"stream": "text"}),
                (ValueError, "timeout", np.zeros(2), {"timeout": -1}),
                (TypeError, "timeout", np.zeros(2), {"timeout": "text"}),
            ):
                with pytest.raises(error, match=words):
                    call(target, given, **options)
            assert call(target, None) is None or call(target, None).is_completed(), "no buffer is needed"
    with pytest.raises(ValueError, match="closed"):
        call(group, np.zeros(2))


def test_read_only_buffer_is_refused_by_a_receive_without_a_peer(host_engine, comm1):
    closed = np.zeros(2)
    closed.flags.writeable = False
    comm1.send(closed, None)
    for call in (lambda: comm1.recv(closed, None), lambda: comm1.sendrecv(closed, None, closed, None)):
        with pytest.raises(ValueError, match="read-only"):
            call()


def test_tag_beside_no_peer_is_checked(host_engine):
    with ncclpy.ProcessGroup(ncclpy.bootstrap.LocalStore(), 0, 1, device=0) as group:
        for call in (group.send, group.recv):
            with pytest.raises((TypeError, ValueError), match="tag"):
                call(np.zeros(2), None, "text")


def test_timeout_beside_no_peer_needs_a_communicator_that_can_be_ended(host_engine, comm1):
    with pytest.raises(ValueError, match="abortable"):
        comm1.send(np.ones(1), None, timeout=5.0)


def test_plan_of_calls_without_a_peer_does_nothing(host_engine, comm1):
    array, plan = np.ones(2), ncclpy.Plan()
    with plan.record():
        comm1.send(array, None)
        comm1.sendrecv(array, None, array, None)
    assert len(plan) == 0
    plan.launch()
    plan.launch(timeout=5.0)
    with plan.capture() as graph:
        graph.launch()
    with pytest.raises(ValueError, match="closed"):
        graph.launch()
    with pytest.raises(RuntimeError, match="recorded already"):
        plan.record()
    assert array.tolist() == [1, 1]


def test_group_of_calls_without_a_peer_does_nothing(host_engine, comm1):
    with ncclpy.group(timeout=5.0):
        comm1.recv(np.ones(2), None)


def test_size_is_the_number_of_ranks(comms):
    assert [comm.size for comm in comms] == [comm.nranks for comm in comms] == [len(comms)] * len(comms)
