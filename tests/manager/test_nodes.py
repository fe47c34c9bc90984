"""Collectives of several processes. On GPUs each looks like a node of its own, with sockets in between."""

from __future__ import annotations

import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import ncclpy
import testing
from ncclpy.bootstrap import LocalStore, TCPStore


def be_a_node(rank):
    """Make NCCL take this process for another machine; the host engine has no such notion."""
    os.environ["NCCL_HOSTID"] = f"node{rank.rank}"
    os.environ["NCCL_NET"] = "Socket"


def devices_a_node(nodes):
    each = min(2, ncclpy.device_count() // nodes)
    if each == 0:
        pytest.skip(f"needs {nodes} devices, there are {ncclpy.device_count()}")
    return each


def add(manager, rank, each, key, name, lib, **options):
    """Add all local participants of an all-reduce, in any order; return works and arrays."""
    nodes = rank.nranks
    works, arrays = [], []
    local = list(range(rank.rank * each, (rank.rank + 1) * each))
    random.shuffle(local)
    for device in local:
        array = lib.make(np.full(1000, device + 1.0, np.float32), device)
        works.append(
            manager.all_reduce(
                name,
                lib.argument(array),
                device=device,
                num_local=each,
                num_global=nodes * each,
                communicator_key=key,
                global_rank=device,
                **options,
            )
        )
        arrays.append(array)
    return works, arrays


def several_nodes(rank, each, port):
    be_a_node(rank)
    lib, key = testing.arrays(), bytes(rank.unique_id())
    total = each * rank.nranks
    store = None if port is None else TCPStore("127.0.0.1", port)
    with ncclpy.Manager(timeout=40, store=store) as manager:
        for round_ in range(5):
            names = [f"{round_}/{i}" for i in range(4)]
            shuffled = random.sample(names, 4)
            if round_ % 2:
                manager.signal_multi_node_ready(names[0])  # before any participant is added
            found = {name: add(manager, rank, each, key, name, lib) for name in shuffled}
            for name in names[round_ % 2 :]:
                manager.signal_multi_node_ready(name)
            for works, arrays in found.values():
                for work, array in zip(works, arrays, strict=True):
                    work.wait(40)
                    assert np.unique(lib.read(array)).tolist() == [total * (total + 1) / 2]
        return manager.stats()["communicators_made"]


@pytest.mark.parametrize("nodes", [2, 4])
def test_several_nodes(nodes):
    each = devices_a_node(nodes)
    assert testing.run_processes(nodes, several_nodes, each, None) == [1] * nodes


def test_several_nodes_that_meet_in_a_store():
    each = devices_a_node(2)
    with TCPStore("127.0.0.1", 0, serve=True) as store:
        assert testing.run_processes(2, several_nodes, each, store.port) == [1] * 2
        assert store.keys("ncclpy/manager/") == []


def broadcast(rank, each):
    be_a_node(rank)
    lib, key = testing.arrays(), bytes(rank.unique_id())
    nodes, root = rank.nranks, each * rank.nranks - 1
    with ncclpy.Manager(timeout=40) as manager:
        works, arrays = [], []
        for device in range(rank.rank * each, (rank.rank + 1) * each):
            array = lib.make(np.full(10, device, np.float32), device)
            join = manager.broadcast_send if device == root else manager.broadcast_recv
            works.append(
                join(
                    "b",
                    lib.argument(array),
                    device=device,
                    num_local=each,
                    num_global=each * nodes,
                    communicator_key=key,
                    global_rank=device,
                    root=root,
                )
            )
            arrays.append(array)
        manager.signal_multi_node_ready("b")
        for work in works:
            work.wait(40)
        return [float(lib.read(array)[0]) for array in arrays]


def test_root_on_another_node():
    each = devices_a_node(2)
    root = 2 * each - 1
    assert testing.run_processes(2, broadcast, each) == [[root] * each] * 2


def one_stays_away(rank, each):
    be_a_node(rank)
    lib, key = testing.arrays(), bytes(rank.unique_id())
    manager = ncclpy.Manager(timeout=40)
    works, _ = add(manager, rank, each, key, "first", lib)
    manager.signal_multi_node_ready("first")
    for work in works:
        work.wait(40)
    if rank.rank == 1:
        rank.unique_id()  # returns when the other node is done
        manager.abort("the other node has given up")
        manager.reset()
        manager.close()
        return "stayed away"
    begun = time.monotonic()
    works, _ = add(manager, rank, each, key, "second", lib, timeout=0.5)
    manager.signal_multi_node_ready("second")
    errors = [work.exception(20) for work in works]
    assert all(isinstance(error, ncclpy.NcclTimeout) for error in errors), errors
    assert "'second'" in str(errors[0])
    assert time.monotonic() - begun > 0.45, "before its deadline"
    rank.unique_id()
    assert manager.stats()["communicators"] == 0
    manager.close()
    return "timed out"


def test_missing_node_ends_the_wait_of_the_others():
    each = devices_a_node(2)
    assert testing.run_processes(2, one_stays_away, each) == ["timed out", "stayed away"]


def claims(rank, port, places):
    """Take part as rank and of a size that belong to another process; return the error and this process's id."""
    be_a_node(rank)
    place, size = places[rank.rank]
    lib, key = testing.arrays(), bytes(rank.unique_id())
    with TCPStore("127.0.0.1", port) as store:
        manager = ncclpy.Manager(timeout=40, store=store)
        numbers = {"num_local": 1, "num_global": size, "global_rank": place, "communicator_key": key}
        array = lib.argument(lib.make(np.ones(4, np.float32), rank.device))
        work = manager.all_reduce("k", array, device=rank.device, **numbers)
        manager.signal_multi_node_ready("k")
        error = work.exception(30)
        store.barrier("both have heard", rank.rank, 2)
        manager.close()
    return type(error).__name__, str(error), os.getpid()


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ([(0, 2), (0, 2)], "global_rank: rank 0 of communicator"),
        ([(1, 2), (1, 2)], "global_rank: rank 1 of communicator"),
        ([(0, 2), (1, 3)], "with different sizes: by rank"),
        ([(0, 3), (2, 4)], "with different sizes: by rank"),
    ],
)
def test_rank_added_twice_or_with_another_size_is_an_error_in_both_processes(places, words):
    with TCPStore("127.0.0.1", 0, serve=True) as store:
        said = testing.run_processes(2, claims, store.port, places)
    assert sorted(kind for kind, _, _ in said) == ["NcclRemoteError", "ValueError"], said
    for _, text, _ in said:
        assert words in text and all(f"process {pid} on " in text for _, _, pid in said), said


def one_of(manager, rank, size, key, name="step 0"):
    """Add rank `rank` of an all-reduce, on the device of that number, as a process with this rank alone."""
    lib = testing.arrays()
    array = lib.argument(lib.make(np.ones(4, np.float32), rank))
    numbers = {"num_local": 1, "num_global": size, "global_rank": rank}
    work = manager.all_reduce(name, array, device=rank, communicator_key=key, **numbers)
    manager.signal_multi_node_ready(name)
    return work


def test_ranks_missing_in_the_store_are_named():
    """The first to time out tells the others: a Manager without a timeout, and one that joins later."""
    testing.need_devices(3)
    store, key = LocalStore(), ncclpy.Manager.generate_communicator_key()
    managers = [ncclpy.Manager(timeout=timeout, store=store) for timeout in (None, 0.5, None)]
    works = [one_of(managers[rank], rank, 4, key) for rank in (0, 1)]
    errors = [work.exception(30) for work in works]
    errors.append(one_of(managers[2], 2, 4, key, "it comes later").exception(30))
    for error, name in zip(errors, ("step 0", "step 0", "it comes later"), strict=True):
        assert isinstance(error, ncclpy.NcclTimeout) and error.missing == [2, 3], error
        head, _, tail = str(error).partition(" did not arrive to make communicator '")
        assert head == f"key '{name}': ranks 2-3 of 4" and testing.without_line(tail).endswith("' within 500 ms"), (
            error
        )
    works = [one_of(manager, rank, 3, bytes(reversed(key))) for rank, manager in enumerate(managers)]
    for manager in managers:
        manager.abort("the test ends")
        manager.close()
    assert all(isinstance(work.exception(30), ncclpy.NcclError) for work in works)


def test_close_raises_no_failure_that_follows_an_abort(host_engine):
    """The communicators cannot be made of such an id, which is found out before, during or after the abort."""
    for pause in range(40):
        store, key = LocalStore(), ncclpy.Manager.generate_communicator_key()
        managers = [ncclpy.Manager(store=store) for _ in range(3)]
        works = [one_of(manager, rank, 3, bytes(reversed(key))) for rank, manager in enumerate(managers)]
        time.sleep(1e-4 * pause)
        for manager in managers:
            manager.abort("the test ends")
        for manager in managers:
            manager.close()
        assert all(isinstance(work.exception(30), ncclpy.NcclError) for work in works)


@pytest.mark.parametrize("waits", ["by a stream", "not yet"])
def test_close_raises_the_error_by_which_another_process_ended_a_work(waits):
    testing.need_devices(2)
    store, key, closing = LocalStore(), ncclpy.Manager.generate_communicator_key(), []

    def take_part(rank):
        manager, stream = ncclpy.Manager(timeout=60, store=store), ncclpy.Stream(rank)
        one_of(manager, rank, 2, key, "first").wait(30)
        if rank == 1:
            testing.wait_for(lambda: closing and "closed" in repr(closing[0]), "the other one to be in close()")
            manager.abort("enough")
        else:
            work = one_of(manager, rank, 2, key, "second")
            if waits == "by a stream":
                work.synchronize(stream)
            closing.append(manager)
            with pytest.raises(ncclpy.NcclAborted, match="was ended by rank 1 of 2: the Manager was aborted: enough"):
                manager.close()
            stream.synchronize(30)
        manager.close()
        stream.close()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(take_part, range(2)))


def test_rank_of_a_process_that_has_ended_is_told_apart(host_engine):
    """Rank 1 joins and ends, rank 2 never joins: the store knows which ranks were there."""
    testing.run_python(
        """
        import os, signal, time
        import numpy as np, ncclpy
        from ncclpy.bootstrap import TCPStore

        key = b"k" * 128
        alive = f"ncclpy/manager/{key.hex()}/alive/1"

        def add(store, rank, timeout):
            manager = ncclpy.Manager(timeout=timeout, store=store)
            numbers = {"num_local": 1, "num_global": 3, "global_rank": rank, "communicator_key": key}
            work = manager.all_reduce("step 0", np.ones(4), device=rank, **numbers)
            manager.signal_multi_node_ready("step 0")
            return manager, work

        with TCPStore("127.0.0.1", 0, serve=True) as store:
            if os.fork() == 0:
                own = TCPStore("127.0.0.1", store.port)
                manager, work = add(own, 1, 60)
                own.get(alive, 60)
                os.kill(os.getpid(), signal.SIGKILL)
            assert os.wait()[1] == signal.SIGKILL
            end = time.monotonic() + 60
            while store.check([alive]) and time.monotonic() < end:  # the server hears of it
                time.sleep(0.01)
            manager, work = add(store, 0, 0.5)
            error = work.exception(60)
            manager.close()
        assert error.missing == [1, 2], error
        assert str(error).startswith("key 'step 0': ranks 1-2 of 3 did not arrive to make communicator '"), error
        said = str(error).partition(". This rank called ")[0]
        assert said.endswith(" within 500 ms; rank 1's process has ended"), error
        """,
        warm=True,
    )


@pytest.mark.parametrize("dies", [0, 1])
def test_end_of_a_process_ends_the_wait_for_it(host_engine, dies):
    """A rank arrives and is killed, before another rank arrives."""
    testing.run_python(
        f"""
        import os, signal
        import numpy as np, ncclpy
        from ncclpy.bootstrap import TCPStore

        key = b"k" * 128
        here = f"ncclpy/manager/{{key.hex()}}/communicator/here/"

        def add(store, rank):
            manager = ncclpy.Manager(timeout=60, store=store)
            numbers = {{"num_local": 1, "num_global": 3, "global_rank": rank, "communicator_key": key}}
            work = manager.all_reduce("step 0", np.ones(4), device=rank, **numbers)
            manager.signal_multi_node_ready("step 0")
            return manager, work

        with TCPStore("127.0.0.1", 0, serve=True) as store:
            if os.fork() == 0:
                own = TCPStore("127.0.0.1", store.port)
                manager, work = add(own, {dies})
                own.get(here + "{dies}", 60)
                own.get("the other one is there", 60)
                os.kill(os.getpid(), signal.SIGKILL)
            manager, work = add(store, {1 - dies})
            store.get(here + "{1 - dies}", 60)
            store.set("the other one is there", b"")
            error = work.exception(30)
            manager.close()
        assert type(error) is ncclpy.NcclRemoteError, repr(error)
        assert "rank {dies} of 3 will not arrive to make communicator '" in str(error), error
        assert "': its process has ended" in str(error), error
        """,
        warm=True,
    )


def test_lost_store_ends_the_wait():
    testing.need_devices(2)
    served = TCPStore("127.0.0.1", 0, serve=True, linger=0)
    with TCPStore("127.0.0.1", served.port) as store, ncclpy.Manager(timeout=40, store=store) as manager:
        work = one_of(manager, 0, 2, ncclpy.Manager.generate_communicator_key())
        testing.wait_for(lambda: any("/here/" in key for key in served.keys("ncclpy/manager/")), "it to come")
        served.close()
        assert isinstance(work.exception(30), ncclpy.NcclError) and not isinstance(work.exception(), TimeoutError)


def one_rank_each(store, key, rank, nranks, then):
    """Take part as one of several Managers with one rank each; return the error, or None."""
    with ncclpy.Manager(timeout=60, store=store) as manager:
        work = manager.all_reduce(
            "k", np.ones(4), device=rank, num_local=1, num_global=nranks, communicator_key=key, global_rank=rank
        )
        manager.signal_multi_node_ready("k")
        then(manager)
        return work.exception(40)


def nothing(manager):
    pass


def test_failure_to_make_communicators_is_a_remote_error_on_other_ranks(host_engine):
    shared, key = LocalStore(), ncclpy.Manager.generate_communicator_key()
    with ncclpy.faults("rank=1 call=CommInitRankConfig do=error:ncclSystemError"), ThreadPoolExecutor(3) as pool:
        errors = list(pool.map(lambda rank: one_rank_each(shared, key, rank, 3, nothing), range(3)))
    assert type(errors[1]) is ncclpy.NcclError and "ncclCommInitRankConfig" in str(errors[1])
    for rank in (0, 2):
        assert type(errors[rank]) is ncclpy.NcclRemoteError
        assert f"rank 1 of 3: it failed to make them: NcclError: {errors[1]}" in str(errors[rank])


def test_abort_while_communicators_are_made_is_reported_to_other_ranks(host_engine):
    shared, key = LocalStore(), ncclpy.Manager.generate_communicator_key()

    # Rank 1 stays in the initialisation for a while, where the other rank waits for it.
    with ncclpy.faults("rank=1 call=CommInitRankConfig do=hang:300ms") as faults, ThreadPoolExecutor(2) as pool:
        other = pool.submit(one_rank_each, shared, key, 0, 2, nothing)

        def abort(manager):
            testing.wait_for(lambda: faults.fired)
            manager.abort("enough of this")

        own = pool.submit(one_rank_each, shared, key, 1, 2, abort)
        assert "enough of this" in str(own.result())
        error = other.result()
        testing.wait_for(lambda: all(thread.name != "ncclpy-init" for thread in threading.enumerate()))
    assert type(error) is ncclpy.NcclAborted
    assert "by rank 1 of 2: it failed to make them: NcclAborted: the Manager was aborted: enough of this" in str(error)


def test_last_living_process_leaves_nothing_in_the_store(host_engine):
    """Rank 1 is killed, and the other ranks learn of it."""
    testing.run_python(
        """
        import os, signal
        import numpy as np, ncclpy, testing
        from ncclpy.bootstrap import TCPStore

        served = TCPStore("127.0.0.1", 0, serve=True, linger=0)

        def take_part(rank):
            if os.fork():
                return
            store = TCPStore("127.0.0.1", served.port)
            if rank == 0:
                store.set("key", ncclpy.Manager.generate_communicator_key())
            key = store.get("key", 60)
            manager = ncclpy.Manager(timeout=60, store=store)

            def reduce(name):
                numbers = {"num_local": 1, "num_global": 3, "global_rank": rank, "communicator_key": key}
                work = manager.all_reduce(name, np.ones(4), device=rank, **numbers)
                manager.signal_multi_node_ready(name)
                return work.exception(60)

            assert reduce("first") is None
            store.barrier("all have seen it", rank, 3)
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            assert isinstance(reduce("second"), ncclpy.NcclRemoteError)
            manager.close()
            testing.wait_for(lambda: store.keys("ncclpy/manager/") == [])
            store.set(f"rank {rank} has seen it", b"")
            os._exit(0)

        for rank in range(3):
            take_part(rank)
        codes = sorted(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(3))
        assert codes == [-signal.SIGKILL, 0, 0], codes
        assert served.keys() == ["key", "rank 0 has seen it", "rank 2 has seen it"], served.keys()
        served.close()
        """,
        warm=True,
    )
