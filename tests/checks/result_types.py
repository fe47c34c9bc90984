"""Types of results, asserted statically: the stage `types` checks this file with mypy and pyright; nothing runs it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import assert_type

import ncclpy
from ncclpy import Work


class Sent:
    """Stand for the type of an array that is sent."""


class Received:
    """Stand for the type of an array that receives."""


def work_has_type_of_result(work: Work[Received]) -> None:
    assert_type(work.result(), Received)
    assert_type(work.result(timeout=1.0), Received)
    assert_type(work.future(), Future[Received])
    assert_type(work.wait(), None)

    def done(ended: Work[Received]) -> None:
        assert_type(ended.result(), Received)

    work.add_done_callback(done)
    work.add_done_callback(lambda ended: assert_type(ended.result(), Received))

    def done_with_any(ended: Work[object]) -> None: ...

    work.add_done_callback(done_with_any)  # Work is covariant: a callback may take works of a wider type


async def awaited_work_gives_result(work: Work[Received]) -> None:
    assert_type(await work, Received)


def numpy_keeps_its_element_type(group: ncclpy.ProcessGroup, array: NDArray[np.float32]) -> None:
    assert_type(group.all_reduce(array), Work[NDArray[np.float32]])
    assert_type(group.all_reduce(array).result(), NDArray[np.float32])


def group_gives_array_that_receives(
    group: ncclpy.ProcessGroup, send: Sent, recv: Received, sends: list[Sent], recvs: list[Received]
) -> None:
    assert_type(group.all_reduce(send), Work[Sent])
    assert_type(group.all_reduce(send, None, "max"), Work[Sent])
    assert_type(group.all_reduce(send, recv), Work[Received])
    assert_type(group.broadcast(send, root=1), Work[Sent])
    assert_type(group.broadcast(None, recv), Work[Received])
    assert_type(group.reduce(send), Work[Sent | None])
    assert_type(group.reduce(send, recv, root=1), Work[Received | None])
    assert_type(group.all_gather(send, recv), Work[Received])
    assert_type(group.all_gather(send, recvs), Work[list[Received]])
    assert_type(group.reduce_scatter(send, recv), Work[Received])
    assert_type(group.reduce_scatter(sends, recv), Work[Received])
    assert_type(group.all_to_all(send, recv), Work[Received])
    assert_type(group.all_to_all(sends, recvs), Work[list[Received]])
    assert_type(group.gather(send), Work[None])
    assert_type(group.gather(send, recv), Work[Received | None])
    assert_type(group.gather(send, recvs, root=1), Work[list[Received] | None])
    assert_type(group.scatter(None, recv), Work[Received])
    assert_type(group.send(send, 1), Work[None])
    assert_type(group.recv(recv, 1), Work[Received])
    assert_type(group.sendrecv(send, 1, recv, 2), Work[Received])
    assert_type(group.barrier(), Work[None])
    assert_type(group.all_reduce_sparse(send, recv), Work[tuple[Sent, Received]])


def group_gives_lists_for_many_arrays(
    group: ncclpy.ProcessGroup, send: Sent, sends: list[Sent], recvs: list[Received]
) -> None:
    assert_type(group.all_reduce_coalesced(sends), Work[list[Sent]])
    assert_type(group.all_gather_coalesced(sends, recvs), Work[list[Received]])
    assert_type(group.reduce_scatter_coalesced(sends, recvs), Work[list[Received]])
    with group.coalescing() as work:
        group.all_reduce(send)
    assert_type(work, Work[list[Any]])


def manager_gives_array_that_receives(manager: ncclpy.Manager, send: Sent, recv: Received) -> None:
    def sent(ended: Work[Sent]) -> None: ...
    def received(ended: Work[Received]) -> None: ...
    def nothing(ended: Work[None]) -> None: ...

    assert_type(manager.all_reduce("k", send, num_local=2, on_done=sent), Work[Sent])
    assert_type(manager.all_reduce("k", send, recv, num_local=2, on_done=received), Work[Received])
    assert_type(manager.all_gather("k", send, recv, num_local=2, on_done=received), Work[Received])
    assert_type(manager.reduce_scatter("k", send, recv, num_local=2, on_done=received), Work[Received])
    assert_type(manager.all_to_all("k", send, recv, num_local=2, on_done=received), Work[Received])
    assert_type(manager.broadcast_send("k", send, num_local=2, on_done=sent), Work[Sent])
    assert_type(manager.broadcast_send("k", send, recv, num_local=2, on_done=received), Work[Received])
    assert_type(manager.broadcast_recv("k", recv, num_local=2, on_done=received), Work[Received])
    assert_type(manager.reduce_send("k", send, num_local=2, on_done=nothing), Work[None])
    assert_type(manager.reduce_recv("k", send, num_local=2, on_done=sent), Work[Sent])
    assert_type(manager.reduce_recv("k", send, recv, num_local=2, on_done=received), Work[Received])
    assert_type(manager.gather_send("k", send, num_local=2, on_done=nothing), Work[None])
    assert_type(manager.gather_recv("k", send, recv, num_local=2, on_done=received), Work[Received])
    assert_type(manager.scatter_send("k", send, recv, num_local=2, on_done=received), Work[Received])
    assert_type(manager.scatter_recv("k", recv, num_local=2, on_done=received), Work[Received])


def coordinator_gives_type_of_its_argument(
    coordinator: ncclpy.Coordinator, array: Sent, values: Received, counts: Sequence[int]
) -> None:
    assert_type(coordinator.all_reduce("n", array), Work[Sent])
    assert_type(coordinator.grouped_all_reduce(["n"], [array]), list[Work[Sent]])
    assert_type(coordinator.all_gather("n", array), Work[Sent])
    assert_type(coordinator.broadcast("n", array), Work[Sent])
    assert_type(coordinator.reduce_scatter("n", array), Work[Sent])
    assert_type(coordinator.all_to_all("n", array), Work[Sent])
    assert_type(coordinator.all_to_all("n", array, counts), Work[tuple[Sent, tuple[int, ...]]])
    assert_type(coordinator.all_reduce_sparse("n", array, values), Work[tuple[Sent, Received]])
    assert_type(coordinator.barrier("n"), Work[None])
