"""Every collective of the Manager compared with numpy, with participants from several threads."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from manager_clients import Data, finish, from_threads, some_devices

import ncclpy
import testing


def test_reduce_scatter(manager):
    n = some_devices(4)
    data = Data(n, count=50 * n).outputs(50)
    finish(
        from_threads(
            [
                functools.partial(
                    manager.reduce_scatter, "k", data.input(r), data.output(r), "max", device=r, num_local=n
                )
                for r in range(n)
            ]
        )
    )
    wanted = functools.reduce(np.maximum, data.values)
    for r in range(n):
        data.check(r, wanted[50 * r : 50 * (r + 1)])


def test_all_to_all(manager):
    n = some_devices(4)
    data = Data(n, count=50 * n).outputs(50 * n)
    finish(
        from_threads(
            [
                functools.partial(manager.all_to_all, "k", data.input(r), data.output(r), device=r, num_local=n)
                for r in range(n)
            ]
        )
    )
    for r in range(n):
        data.check(r, np.concatenate([values[50 * r : 50 * (r + 1)] for values in data.values]))


@pytest.mark.parametrize("in_place", [False, True])
def test_reduce(manager, in_place):
    n = some_devices(4)
    for root in range(n):
        data = Data(n, seed=root).outputs(1000)
        calls = [
            functools.partial(
                manager.reduce_recv, root, data.input(r), None if in_place else data.output(r), device=r, num_local=n
            )
            if r == root
            else functools.partial(manager.reduce_send, root, data.input(r), device=r, num_local=n)
            for r in range(n)
        ]
        works = from_threads(calls, seed=root)
        finish(works)
        data.check(root, sum(data.values), in_place)
        assert [work.result() is None for work in works] == [r != root for r in range(n)]


def test_gather(manager):
    n = some_devices(4)
    for root in range(n):
        data = Data(n, seed=root).outputs(1000 * n)
        calls = [
            functools.partial(manager.gather_recv, root, data.input(r), data.output(r), device=r, num_local=n)
            if r == root
            else functools.partial(manager.gather_send, root, data.input(r), device=r, num_local=n)
            for r in range(n)
        ]
        finish(from_threads(calls, seed=root))
        data.check(root, np.concatenate(data.values))


def test_scatter(manager):
    n = some_devices(4)
    for root in range(n):
        data = Data(n, count=100 * n, seed=root).outputs(100)
        calls = [
            functools.partial(manager.scatter_send, root, data.input(r), data.output(r), device=r, num_local=n)
            if r == root
            else functools.partial(manager.scatter_recv, root, data.output(r), device=r, num_local=n)
            for r in range(n)
        ]
        finish(from_threads(calls, seed=root))
        for r in range(n):
            data.check(r, data.values[root][100 * r : 100 * (r + 1)])


@pytest.mark.parametrize("op", ["sum", "prod", "max", "min", "avg"])
def test_operators(manager, op):
    n = some_devices(2)
    data = Data(n, dtype=np.float64)
    finish([manager.all_reduce("k", data.input(r), op=op, device=r, num_local=n) for r in range(n)])
    stack = np.stack(data.values)
    wanted = stack.mean(0) if op == "avg" else getattr(stack, op)(0)
    for r in range(n):
        data.check(r, wanted, in_place=True)


@pytest.mark.parametrize(("datatype", "dtype"), testing.DTYPES.items(), ids=str)
def test_data_types(manager, datatype, dtype):
    n = some_devices(2)
    if datatype.name.startswith("FLOAT8") and ncclpy.library().version < (2, 24, 3):
        pytest.skip("8-bit floats need NCCL 2.24.3")
    data = Data(n, dtype=dtype)
    finish([manager.all_reduce("k", data.input(r), device=r, num_local=n) for r in range(n)])
    wanted = sum(values.astype(np.float64) for values in data.values).astype(dtype)
    for r in range(n):
        data.check(r, wanted, in_place=True)


def test_bool_and_complex_of_the_host_engine(manager, host_engine):
    flags = [np.array([True, False, False]), np.array([False, False, True])]
    finish([manager.all_reduce("k", flags[r], device=r, num_local=2) for r in range(2)])
    assert flags[0].tolist() == flags[1].tolist() == [True, False, True]
    numbers = [np.array([1 + 2j, 3j]), np.array([1j, 1 + 0j])]
    finish([manager.all_reduce("k", numbers[r], device=r, num_local=2) for r in range(2)])
    assert numbers[0].tolist() == [1 + 3j, 1 + 3j]


def test_one_participant(manager):
    data = Data(1)
    work = manager.all_reduce("alone", data.input(0), device=0, num_local=1)
    finish([work])
    data.check(0, data.values[0], in_place=True)


def test_no_elements(manager):
    n = some_devices(2)
    data = Data(n, count=0)
    finish([manager.all_reduce("k", data.input(r), device=r, num_local=n) for r in range(n)])


def test_all_devices(manager):
    n = some_devices(8)
    for step in range(5):
        data = Data(n, seed=step)
        finish(
            from_threads(
                [functools.partial(manager.all_reduce, step, data.input(r), device=r, num_local=n) for r in range(n)],
                seed=step,
            )
        )
        for r in range(n):
            data.check(r, sum(data.values), in_place=True)


def test_any_hashable_is_a_key(manager):
    n = some_devices(2)
    for key in ("name", 7, ("step", 3, "bias"), b"bytes", frozenset({1}), None):
        data = Data(n)
        finish([manager.all_reduce(key, data.input(r), device=r, num_local=n) for r in range(n)])
    with pytest.raises(TypeError, match="unhashable"):
        manager.all_reduce([1], Data(1).input(0), device=0, num_local=1)


def test_device_is_that_of_the_array(manager):
    n = some_devices(2)
    lib = testing.RawArrays()
    parts = [lib.make(np.ones(4, np.float32), device) for device in range(n)]
    works = [manager.all_reduce("k", part.buffer, num_local=n) for part in parts]
    assert [work.device for work in works] == list(range(n))
    finish(works)
    assert all(np.all(lib.read(part) == n) for part in parts)


def test_array_in_cpu_memory_is_on_the_current_device(manager, host_engine):
    with ncclpy.core.runtime.device.using(3):
        work = manager.all_reduce("k", np.ones(3), num_local=1)
    assert work.device == 3
    finish([work])


def test_current_device_is_unchanged(manager):
    n = some_devices(2)
    device = ncclpy.core.runtime.device
    with device.using(n - 1):
        data = Data(n)
        works = [manager.all_reduce("k", data.input(r), device=r, num_local=n) for r in range(n)]
        assert device.current() == n - 1
        finish(works)
        # An error must not leave another device current.
        with pytest.raises(ValueError, match="device"):
            manager.all_reduce("k", data.input(0), device=10_000, num_local=n)
        with pytest.raises(TypeError, match="stream"):
            manager.all_reduce("k", data.input(0), device=0, num_local=n, stream="no stream")
        bad = [manager.all_reduce("bad", data.input(r), device=r, num_local=n, num_global=n + r) for r in range(n)]
        assert bad[0].exception(20) is not None
        assert device.current() == n - 1


REFUSED = [
    ("unsupported dtype", lambda m: m.all_reduce("k", np.zeros(3, np.int16), device=0, num_local=2), "int16"),
    ("no array", lambda m: m.all_reduce("k", object(), device=0, num_local=2), "send"),
    ("strided", lambda m: m.all_reduce("k", np.zeros((4, 4))[:, 1], device=0, num_local=2), "contiguous"),
    ("read-only", lambda m: m.broadcast_recv("k", b"bytes", device=0, num_local=2), "read-only|recv"),
    ("size", lambda m: m.all_gather("k", np.zeros(3), np.zeros(4), device=0, num_local=2), "6 elements"),
    ("types", lambda m: m.all_reduce("k", np.zeros(3), np.zeros(3, int), device=0, num_local=2), "float64"),
    ("op", lambda m: m.all_reduce("k", np.zeros(3), op="median", device=0, num_local=2), "median"),
    ("op number", lambda m: m.all_reduce("k", np.zeros(3), op=77, device=0, num_local=2), "77"),
    ("avg of bool", lambda m: m.all_reduce("k", np.zeros(3, bool), op="avg", device=0, num_local=2), "avg of bool"),
    ("parts", lambda m: m.all_to_all("k", np.zeros(3), np.zeros(3), device=0, num_local=2), "multiple of 2"),
    (
        "parts of complex numbers",
        lambda m: m.all_to_all("k", np.zeros(3, complex), np.zeros(3, complex), device=0, num_local=2),
        "multiple of 2 elements.* got 3",
    ),
    ("nobody", lambda m: m.all_reduce("k", np.zeros(3), device=0, num_local=0), "num_local"),
    ("fewer", lambda m: m.all_reduce("k", np.zeros(3), device=0, num_local=2, num_global=1), "num_global"),
    ("callback", lambda m: m.all_reduce("k", np.zeros(3), device=0, num_local=2, on_done=3), "on_done"),
    ("timeout", lambda m: m.all_reduce("k", np.zeros(3), device=0, num_local=2, timeout=-1), "timeout"),
    ("communicator key", lambda m: m.all_reduce("k", np.zeros(3), device=0, num_local=2, communicator_key=5), "bytes"),
    ("key of text", lambda m: m.all_reduce("k", np.zeros(3), device=0, num_local=2, communicator_key="s"), "bytes"),
    ("rank", lambda m: m.all_reduce("k", np.zeros(3), device=0, num_local=2, global_rank=-3), "global_rank"),
    ("rank of 0.5", lambda m: m.all_reduce("k", np.zeros(3), device=0, num_local=2, global_rank=0.5), "global_rank"),
    (
        "large rank",
        lambda m: m.all_reduce("k", np.zeros(3), device=0, num_local=2, global_rank=1 << 40),
        "global_rank",
    ),
    ("root", lambda m: m.broadcast_recv("k", np.zeros(3), device=0, num_local=2, root=-3), "root"),
    ("root of 0.5", lambda m: m.broadcast_recv("k", np.zeros(3), device=0, num_local=2, root=0.5), "root"),
    ("2.0 of them", lambda m: m.all_reduce("k", np.zeros(3), device=0, num_local=2.0), "num_local"),
    ("very many", lambda m: m.all_reduce("k", np.zeros(3), device=0, num_local=2, num_global=1 << 40), "num_global"),
    ("producer", lambda m: m.all_reduce("k", np.zeros(3), device=0, num_local=2, stream="x"), "stream"),
]


@pytest.mark.parametrize(("call", "said"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_refused_call_leaves_the_key_unchanged(manager, host_engine, call, said):
    ncclpy.recorder.resize(2000)
    with pytest.raises((TypeError, ValueError), match=said):
        call(manager)
    assert manager.pending() == []
    assert "pending" not in [entry["state"] for entry in ncclpy.recorder.snapshot()["entries"]]
    finish([manager.all_reduce("k", np.ones(3), device=r, num_local=2) for r in range(2)])
