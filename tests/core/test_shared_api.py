"""Communicator, ProcessGroup, Manager and Coordinator have one word for one thing."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from warm_ranks import run_ranks

import ncclpy
import testing
from ncclpy.bootstrap import LocalStore


@pytest.fixture
def comm():
    with ncclpy.Communicator.init(1, 0, ncclpy.get_unique_id(), device=0) as made:
        yield made


CLASSES = [ncclpy.Communicator, ncclpy.ProcessGroup, ncclpy.Manager, ncclpy.Coordinator]


@pytest.mark.parametrize("kind", CLASSES)
def test_close_takes_a_timeout(kind):
    timeout = inspect.signature(kind.close).parameters["timeout"]
    assert timeout.default is None and timeout.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD


@pytest.mark.parametrize("kind", CLASSES)
def test_abort_takes_a_reason_and_a_timeout(kind):
    _, reason, timeout = inspect.signature(kind.abort).parameters.values()
    assert (reason.name, reason.default, reason.kind) == ("reason", None, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    assert (timeout.name, timeout.default, timeout.kind) == ("timeout", None, inspect.Parameter.KEYWORD_ONLY)


@pytest.mark.parametrize("kind", [ncclpy.Communicator, ncclpy.ProcessGroup])
def test_operations_take_a_stream(kind):
    for name in (
        "all_reduce",
        "broadcast",
        "reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "gather",
        "scatter",
    ):
        parameters = inspect.signature(getattr(kind, name)).parameters
        assert parameters["stream"].default is None and parameters["timeout"].default is None, name


def test_reason_of_an_abort_is_in_later_errors(comm):
    comm.abort("the loss is no number")
    with pytest.raises(ncclpy.NcclAborted, match="the loss is no number"):
        comm.all_reduce(np.ones(1))


def test_abort_with_a_timeout_has_aborted_the_communicators(host_engine):
    with ncclpy.Manager() as manager:
        work = manager.all_reduce("k", np.ones(2), device=0, num_local=2)
        manager.abort("enough", timeout=30)
        assert "enough" in str(work.exception(30))
        manager.reset(0.0)
        both = [manager.all_reduce("k", np.ones(2), device=device, num_local=2) for device in range(2)]
        assert [each.result(30).tolist() for each in both] == [[2.0, 2.0]] * 2


@pytest.mark.parametrize("op", ["avg", "average", "AVERAGE"])
def test_average_has_two_names(comm, arrays, op):
    array = arrays.make(np.full(3, 4.0, np.float32), comm.device)
    comm.all_reduce(arrays.argument(array), op=op)
    assert arrays.read(array).tolist() == [4.0] * 3


def test_classes_made_from_env_meet_in_one_store(host_engine, tmp_path):
    testing.need_processes(2)
    codes, said = run_ranks(
        tmp_path,
        2,
        """
        class Own(ncclpy.ProcessGroup):
            pass

        with Own.from_env() as group, ncclpy.Manager.from_env(timeout=60) as manager:
            assert type(group) is Own and type(manager) is ncclpy.Manager
            if group.rank == 0:
                group.store.set("key", ncclpy.Manager.generate_communicator_key())
            key = group.store.get("key", 60)
            manager.signal_multi_node_ready("k")
            work = manager.all_reduce(
                "k", np.full(2, group.rank + 1.0), device=group.device, num_local=1, num_global=2,
                communicator_key=key, global_rank=group.rank,
            )
            print(work.result(60)[0], group.all_reduce(np.ones(2)).result(60)[0], flush=True)
        """,
    )
    assert codes == [0, 0] and said.count("3.0 2.0") == 2, said


def test_class_made_from_env_without_a_launcher_is_an_error(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for kind in (ncclpy.Communicator, ncclpy.ProcessGroup, ncclpy.Manager):
        with pytest.raises(RuntimeError):
            kind.from_env()


class Unspeakable:
    """A reason whose text raises."""

    def __str__(self):
        raise RuntimeError("no text")


def test_abort_for_a_reason_without_text_aborts(host_engine, comm):
    comm.abort(Unspeakable())
    with pytest.raises(ncclpy.NcclAborted, match="Unspeakable"):
        comm.all_reduce(np.ones(1))
    with ncclpy.ProcessGroup(LocalStore(), 0, 1, device=0) as group:
        coordinator = ncclpy.Coordinator(group)
        coordinator.abort(Unspeakable())
        assert "Unspeakable" in str(coordinator.error)


@pytest.mark.parametrize("timeout", [float("inf"), 1e10, 10**400])
def test_coordinator_waits_for_any_time(host_engine, timeout):
    with ncclpy.ProcessGroup(LocalStore(), 0, 1, device=0) as group:
        ncclpy.Coordinator(group, timeout=timeout).close()
        ncclpy.Coordinator(group).close(timeout)


@pytest.mark.parametrize(("timeout", "kind"), [(-1, ValueError), (float("nan"), ValueError), ("x", TypeError)])
def test_coordinator_refuses_what_is_no_time(host_engine, timeout, kind):
    with ncclpy.ProcessGroup(LocalStore(), 0, 1, device=0) as group, ncclpy.Coordinator(group) as coordinator:
        for end in (coordinator.close, lambda timeout: coordinator.abort(timeout=timeout)):
            with pytest.raises(kind, match="timeout: expected seconds >= 0 or None"):
                end(timeout)
        assert coordinator.error is None


@pytest.mark.parametrize("kind", [ncclpy.ProcessGroup, ncclpy.Manager])
@pytest.mark.parametrize("end", ["close", "abort"])
def test_end_of_an_object_that_was_not_initialised_is_refused(kind, end):
    with pytest.raises(RuntimeError, match=f"this {kind.__name__} was not initialised"):
        getattr(kind.__new__(kind), end)()
