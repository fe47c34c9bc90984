"""Participants that disagree: all get the same error, which names the devices and what each brought."""

from __future__ import annotations

import numpy as np
import pytest
from manager_clients import DEADLINE, Data, check_usable, finish, one_error, some_devices, sum_works

import ncclpy
import testing

KEY = ("step", 7)


class Case:
    """Three participants; the second differs from the others."""

    def __init__(self, add, words, cure=None):
        self.add, self.words, self.cure = add, words, cure


def add_reduce(m, d, r, **changes):
    options = {"device": r, "num_local": 3, "op": "sum"} | changes
    return m.all_reduce(KEY, d.input(options["device"]), **options)


def second(**changes):
    return lambda m, d, r: add_reduce(m, d, r, **(changes if r == 1 else {}))


def operation(m, d, r):
    if r == 1:
        return m.broadcast_send(KEY, d.input(r), device=r, num_local=3)
    return add_reduce(m, d, r)


def dtype(m, d, r):
    return m.all_reduce(KEY, Data(3, dtype=np.float64 if r == 1 else np.float32).input(r), device=r, num_local=3)


def count(m, d, r):
    return m.all_reduce(KEY, Data(3, count=7 if r == 1 else 9).input(r), device=r, num_local=3)


def flavour(m, d, r):
    return m.all_reduce(KEY, np.zeros(3, bool if r == 1 else np.uint8), op="max", device=r, num_local=3)


def rooted(roots, senders):
    def add(m, d, r):
        method = m.broadcast_send if r in senders else m.broadcast_recv
        return method(KEY, d.input(r), device=r, num_local=3, root=roots[r])

    return add


def multi_node(**changes):
    """Return calls of three of four ranks; the fourth would be on another node."""

    def add(m, d, r):
        options = {
            "device": r, "num_local": 3, "num_global": 4, "global_rank": r, "communicator_key": bytes(range(128)),
        }  # fmt: skip
        return m.all_reduce(KEY, d.input(r), **(options | (changes if r == 1 else {})))

    return add


CASES = {
    "operation": Case(operation, ["operation", "device 0 arrived first with all_reduce", "device 1 passes broadcast"]),
    "operator": Case(
        second(op="max"), ["reduction operator", "device 0 arrived first with sum", "device 1 passes max"]
    ),
    "dtype": Case(dtype, ["data type", "device 0 arrived first with float32", "device 1 passes float64"]),
    "count": Case(count, ["element count", "device 0 arrived first with 9", "device 1 passes 7"]),
    "num_local": Case(
        second(num_local=2, num_global=3), ["num_local", "device 0 arrived first with 3", "device 1 passes 2"]
    ),
    "num_local alone": Case(
        second(num_local=2), ["(num_local)", "device 0 arrived first with 3", "device 1 passes 2"]
    ),
    "num_global": Case(second(num_global=5), ["num_global", "device 0 arrived first with 3", "device 1 passes 5"]),
    "a communicator key and none": Case(
        second(communicator_key=bytes(range(128))),
        ["communicator key", "device 0 arrived first with none", "device 1 passes 0001020304050607"],
    ),
    "communicator key": Case(
        multi_node(communicator_key=bytes(range(1, 129))),
        ["communicator key", "device 0 arrived first with 0001020304050607", "device 1 passes 0102030405060708"],
    ),
    "the end of the communicator key": Case(
        multi_node(communicator_key=bytes(range(127)) + b"!"), ["communicator key", "device 0", "device 1"]
    ),
    "a short communicator key": Case(
        multi_node(communicator_key=b"short"), ["communicator key", "device 1 passes 73686f7274"]
    ),
    "duplicate device": Case(second(device=0), ["two participants on device 0"]),
    "duplicate rank": Case(multi_node(global_rank=0), ["two participants of global rank 0", "devices 0 and 1"]),
    "no global rank": Case(multi_node(global_rank=None), ["global rank", "device 0", "device 1"]),
    "global rank": Case(multi_node(global_rank=4), ["global rank 4", "device 1", "there are 4"]),
    "no root": Case(rooted([None] * 3, []), ["no root"]),
    "two roots": Case(rooted([None] * 3, [0, 1]), ["two roots", "devices 0 and 1"]),
    "roots that differ": Case(rooted([2, 0, 2], [2]), ["root", "device 0 arrived first with 2", "device 1 passes 0"]),
    "a root that says another": Case(rooted([None, None, 1], [2]), ["device 2", "rank 2", "root is 1"]),
    "a root that does not know": Case(rooted([1, None, None], [2]), ["two roots", "device 2", "device 0", "rank 1"]),
    "a root that never came": Case(rooted([None, 1, None], []), ["device 1", "rank 1"]),
    "a root that does not exist": Case(rooted([None, 3, None], [0]), ["root 3", "device 1", "3 ranks"]),
}


@pytest.mark.parametrize("fail_fast", [False, True])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_disagreement(make_manager, case, fail_fast):
    some_devices(3, 3)
    manager = make_manager(fail_fast=fail_fast)
    data = Data(3)
    works = []
    for r in range(3):
        works.append(case.add(manager, data, r))
        states = {work.state for work in works}
        if r < 2:  # all are waited for, unless fail_fast is set
            assert states == {"pending"} or (fail_fast and r == 1 and states == {"failed"})
    error = one_error(works)
    assert type(error) is ValueError
    for word in [repr(KEY), *case.words]:
        assert word in str(error), error
    assert manager.pending() == []
    check_usable(manager, KEY, range(3))


def test_fail_fast_fails_at_once(make_manager):
    n = some_devices(3)
    manager = make_manager(fail_fast=True)
    data = Data(n)
    works = [
        manager.all_reduce("k", data.input(r), op="sum" if r == 0 else "max", device=r, num_local=n) for r in range(2)
    ]
    assert [work.state for work in works] == ["failed", "failed"]
    works += [manager.all_reduce("k", data.input(r), device=r, num_local=n) for r in range(2, n)]
    one_error(works)
    check_usable(manager, "k", range(n))


def test_flavour_of_a_type(manager, host_engine):
    error = one_error([flavour(manager, None, r) for r in range(3)])
    for word in ("data type", "device 0 arrived first with uint8", "device 1 passes bool"):
        assert word in str(error)


def test_one_participant_too_many(manager):
    some_devices(3, 3)
    data = Data(3)
    name = ncclpy.Manager.generate_communicator_key()
    works = [
        manager.all_reduce(
            "k", data.input(r), device=r, num_local=2, num_global=4, global_rank=r, communicator_key=name
        )
        for r in range(3)
    ]
    error = one_error(works)
    for word in ("'k'", "one participant too many", "device 2", "2 have arrived"):
        assert word in str(error)
    check_usable(manager, "k", range(3))


@pytest.mark.parametrize("length", [0, 127, 129])
def test_length_of_a_communicator_key_is_checked(manager, length):
    some_devices(2)
    data = Data(2)
    works = [
        manager.all_reduce(
            "k",
            data.input(r),
            device=r,
            num_local=2,
            num_global=4,
            global_rank=r,
            communicator_key=bytes([1]) * length,
        )
        for r in range(2)
    ]
    manager.signal_multi_node_ready("k")
    assert "communicator key" in str(one_error(works))


def test_communicator_key_on_one_node_is_refused(manager):
    some_devices(2)
    data = Data(2)
    works = [
        manager.all_reduce("k", data.input(r), device=r, num_local=2, communicator_key=bytes(128)) for r in range(2)
    ]
    assert "on this node" in str(one_error(works))


def test_communicator_key_keeps_its_members(make_manager):
    some_devices(2)
    nodes = [make_manager(), make_manager()]
    name = ncclpy.Manager.generate_communicator_key()

    def add(key, r, **changes):
        data = Data(2)
        options = {"device": r, "num_local": 1, "num_global": 2, "global_rank": r, "communicator_key": name} | changes
        work = nodes[r].all_reduce(key, data.input(options["device"]), **options)
        nodes[r].signal_multi_node_ready(key)
        return work

    finish([add("first", r) for r in range(2)])
    for changes in ({"global_rank": 1}, {"device": 1}, {"num_global": 3}):
        error = add("second", 0, **changes).exception(DEADLINE)
        assert isinstance(error, ValueError) and "communicator key" in str(error) and "members" in str(error), error
    finish([add("third", r) for r in range(2)])


def test_first_disagreement_is_reported(manager):
    some_devices(3, 3)
    data = Data(3)
    works = [
        manager.all_reduce("k", data.input(0), op="sum", device=0, num_local=3),
        manager.all_reduce("k", data.input(1), op="min", device=1, num_local=3),
        manager.broadcast_send("k", data.input(2), device=2, num_local=3),
    ]
    assert "reduction operator" in str(one_error(works))


# Defects of TensorFlow's class after which the Manager is designed, other than cases of disagreement.


def test_signal_before_the_first_participant_counts(make_manager):
    some_devices(2)
    nodes = [make_manager(), make_manager()]
    name = ncclpy.Manager.generate_communicator_key()
    for node in nodes:
        node.signal_multi_node_ready("k")
    data = Data(2)
    works = [
        nodes[r].all_reduce(
            "k", data.input(r), device=r, num_local=1, num_global=2, global_rank=r, communicator_key=name
        )
        for r in range(2)
    ]
    finish(works)
    for r in range(2):
        data.check(r, sum(data.values), in_place=True)
    # The signal counts once.
    works = [
        nodes[r].all_reduce(
            "k", data.input(r), device=r, num_local=1, num_global=2, global_rank=r, communicator_key=name
        )
        for r in range(2)
    ]
    assert [work.state for work in works] == ["pending"] * 2
    for node in nodes:
        node.signal_multi_node_ready("k")
    finish(works)


def test_reduce_recv_is_the_root(manager):
    n = some_devices(3)
    data = Data(n).outputs(1000)
    works = [manager.reduce_recv("k", data.input(0), data.output(0), device=0, num_local=n)]
    works += [manager.reduce_send("k", data.input(r), device=r, num_local=n) for r in range(1, n)]
    finish(works)
    data.check(0, sum(data.values))
    assert "no root" in str(
        one_error([manager.reduce_send("k", data.input(r), device=r, num_local=n) for r in range(n)])
    )


def test_first_participant_may_only_receive(manager):
    n = some_devices(3)
    data = Data(n)
    works = [manager.broadcast_recv("k", data.input(r), device=r, num_local=n) for r in range(1, n)]
    works.append(manager.broadcast_send("k", data.input(0), device=0, num_local=n))
    finish(works)
    for r in range(n):
        data.check(r, data.values[0], in_place=True)


def test_launch_error_reaches_all_siblings(manager, host_engine):
    works, check = sum_works(manager, "warm", range(4))
    check()
    with ncclpy.faults("rank=2 call=AllReduce do=error:ncclInternalError") as faults:
        works, _ = sum_works(manager, "k", range(4))
        error = one_error(works)
    assert faults.fired
    assert isinstance(error, ncclpy.NcclError) and error.result == ncclpy.Result.INTERNAL_ERROR
    assert manager.stats()["communicators"] == 0
    check_usable(manager, "k", range(4))
    assert manager.stats()["communicators_made"] == 2


def test_error_during_the_operation_reaches_all_siblings(manager, host_engine):
    _, check = sum_works(manager, "warm", range(4))
    check()
    with ncclpy.faults("rank=2 call=AllReduce at=run do=error:ncclRemoteError"):
        works, _ = sum_works(manager, "k", range(4))
        error = one_error(works)
    assert isinstance(error, ncclpy.NcclError) and error.result == ncclpy.Result.REMOTE_ERROR
    check_usable(manager, "k", range(4))


def test_error_in_making_communicators_reaches_all(manager, host_engine):
    with ncclpy.faults("rank=1 call=CommInitRankConfig do=error:ncclSystemError") as faults:
        first, _ = sum_works(manager, "k", range(3))
        error = one_error(first)
    assert faults.fired
    assert isinstance(error, ncclpy.NcclError)
    assert manager.stats()["communicators"] == 0
    check_usable(manager, "k", range(3))


def test_work_in_flight_reports_the_abort(manager, host_engine):
    _, check = sum_works(manager, "warm", range(3))
    check()
    with ncclpy.faults("rank=1 call=AllReduce at=run do=hang") as faults:
        works, _ = sum_works(manager, "k", range(3))
        works[0].synchronize(ncclpy.Stream(0))  # launched
        assert works[0].state == "launched"
        testing.wait_for(lambda: faults.fired)
        manager.abort("no more")
        error = one_error(works)
    assert isinstance(error, ncclpy.NcclAborted) and "no more" in str(error)


class TestMemory:
    """One launch runs all participants at once: no participant may use memory that another one writes."""

    @pytest.fixture(autouse=True)
    def on_cpu_memory(self, host_engine):
        testing.need_devices(2)

    @pytest.mark.parametrize("ranks", [(None, None), (0, 1)])
    def test_part_at_a_wrong_place_is_refused(self, manager, ranks):
        arrays = [np.arange(4.0) for _ in range(2)]
        if ranks[0] is None:  # ranks, and so parts, are known when all have come
            works = [manager.all_gather(KEY, b[2:4], b, device=r, num_local=2) for r, b in enumerate(arrays)]
            error = one_error(works)
            assert "device 0" in str(error) and "rank 0" in str(error)
        else:
            with pytest.raises(ValueError) as caught:
                manager.all_gather(KEY, arrays[0][2:4], arrays[0], device=0, num_local=2, global_rank=0)
            error = caught.value
        assert type(error) is ValueError and "recv: it overlaps send" in str(error), error
        assert [array.tolist() for array in arrays] == [[0, 1, 2, 3]] * 2
        check_usable(manager, KEY, range(2))

    def test_memory_that_is_no_part_is_refused_at_once(self, manager):
        array = np.arange(4.0)
        with pytest.raises(ValueError, match="recv: it overlaps send"):
            manager.all_gather(KEY, array[1:3], array, device=0, num_local=2)
        assert manager.pending() == []
        check_usable(manager, KEY, range(2))

    def test_in_place_is_accepted_before_the_rank_is_known(self, manager):
        arrays = [np.arange(4.0) + 10 * rank for rank in range(2)]
        finish(
            [manager.reduce_scatter(KEY, b, b[2 * r : 2 * r + 2], device=r, num_local=2) for r, b in enumerate(arrays)]
        )
        assert [array.tolist() for array in arrays] == [[10, 12, 2, 3], [10, 11, 14, 16]]

    def test_one_array_of_two_participants_is_refused(self, manager):
        array = np.ones(4)
        works = [manager.all_reduce(KEY, array, device=r, num_local=2) for r in range(2)]
        error = one_error(works)
        assert "all_reduce of device 1 writes" in str(error) and "all_reduce of device 0 writes" in str(error)
        assert array.tolist() == [1] * 4
        check_usable(manager, KEY, range(2))
