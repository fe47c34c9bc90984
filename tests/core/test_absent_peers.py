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


def test_size_is_the_number_of_ranks(comms):
    assert [comm.size for comm in comms] == [comm.nranks for comm in comms] == [len(comms)] * len(comms)
