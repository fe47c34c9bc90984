"""Arrays of JAX in and out, on the host engine; the code path of GPUs too, over the engine's own device memory."""

from __future__ import annotations

import time
import types

import numpy as np
import pytest

import ncclpy
import testing
from ncclpy.interop import jax as functions

jax = pytest.importorskip("jax", reason="needs JAX")
jnp = jax.numpy

pytestmark = pytest.mark.usefixtures("host_engine")

DEADLINE = 30


@pytest.fixture(params=["cpu", "device"])
def road(request, monkeypatch):
    """Choose where results are: in CPU memory, or in a device's, which without GPUs is the host engine's."""
    if request.param == "device":
        monkeypatch.setattr(functions, "library", lambda: types.SimpleNamespace(engine="cuda"))
    return request.param


def in_ranks(size, program):
    unique_id = ncclpy.get_unique_id()

    def body(rank):
        options = {"device": rank.rank, "timeout": DEADLINE}
        with ncclpy.Communicator.init(size, rank.rank, unique_id, **options) as comm:
            return program(comm)

    return testing.run_threads(size, body, 2 * DEADLINE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "uint32", "complex64", "bool"])
def test_all_reduce(road, dtype):
    def program(comm):
        array = (jnp.arange(6).reshape(2, 3) + comm.rank).astype(dtype)
        before = np.array(array)
        result = functions.all_reduce(comm, array)
        assert isinstance(result, jax.Array) and result.shape == (2, 3) and result.dtype == array.dtype
        assert (np.array(array) == before).all(), "what is sent does not change"
        return np.array(result + result if dtype != "bool" else result).tolist()

    expected = np.array([[1, 3, 5], [7, 9, 11]])
    wanted = (expected > 0).tolist() if dtype == "bool" else (2 * expected).astype(np.int64).tolist()
    assert in_ranks(2, program) == [wanted] * 2


def test_other_collectives(road):
    def program(comm):
        rank = comm.rank
        array = jnp.full((3, 2), rank + 1.0)
        assert functions.all_reduce(comm, array, "max").tolist() == [[3, 3]] * 3
        reduced = functions.reduce(comm, array, "prod", 1)
        assert reduced is None if rank != 1 else reduced.tolist() == [[6, 6]] * 3
        assert functions.broadcast(comm, array, 2).tolist() == [[3, 3]] * 3
        gathered = functions.all_gather(comm, array)
        assert gathered.shape == (3, 3, 2) and gathered[:, 0, 0].tolist() == [1, 2, 3]
        part = functions.reduce_scatter(comm, jnp.arange(12.0).reshape(6, 2) + rank)
        assert part.tolist() == (3 * np.arange(12).reshape(6, 2)[2 * rank : 2 * rank + 2] + 3).tolist()
        moved = functions.all_to_all(comm, jnp.arange(3) + 10 * rank)
        assert moved.tolist() == [rank, 10 + rank, 20 + rank]
        if rank == 0:
            assert functions.send(comm, array + 4, 2) is None
        elif rank == 2:
            assert functions.recv(comm, (3, 2), "float32", 0).tolist() == [[5, 5]] * 3
        passed = functions.send_recv(comm, jnp.array([rank]), (rank + 1) % 3, (rank - 1) % 3)
        assert passed.tolist() == [(rank - 1) % 3]
        assert functions.all_reduce(comm, jnp.float32(rank)).shape == ()
        assert functions.all_reduce(comm, jnp.zeros((0, 4))).shape == (0, 4)
        assert functions.all_reduce(comm, np.ones(2, np.float32)).tolist() == [3, 3]

    in_ranks(3, program)


def test_array_still_being_computed_is_waited_for(road):
    def program(comm):
        product = jnp.linalg.matrix_power(jnp.eye(1000), 9)  # some milliseconds
        return functions.all_reduce(comm, product[0, :3]).tolist()

    assert in_ranks(2, program) == [[2, 0, 0]] * 2


def test_results_stay(road):
    """Results are in memory of JAX, which outlives the communicator and has no other writer."""

    def program(comm):
        return [functions.all_reduce(comm, jnp.full(1000, float(number))) for number in range(20)]

    for results in in_ranks(2, program):
        assert [float(each.sum()) for each in results] == [2000.0 * number for number in range(20)]


def test_training_step():
    """The recipe of the docs: gradients are averaged outside of compiled code."""
    weights = jnp.array([1.0, -2.0, 0.5])

    @jax.jit
    def gradient(model, inputs):
        return jax.grad(lambda model: jnp.mean((inputs @ model - inputs @ weights) ** 2))(model)

    def program(comm):
        model = jnp.zeros(3)
        for step in range(60):
            inputs = jax.random.normal(jax.random.key(2 * step + comm.rank), (16, 3))
            model = model - 0.2 * functions.all_reduce(comm, gradient(model, inputs), "avg")
        return model.tolist()

    first, second = in_ranks(2, program)
    assert first == second and np.allclose(first, weights, atol=1e-3)


def test_arrays_that_cannot_be_sent_are_refused():
    with ncclpy.Communicator.init_all([0])[0] as comm:
        with pytest.raises(TypeError, match=r"has no values yet: call ncclpy outside of jax\.jit"):
            jax.jit(lambda array: functions.all_reduce(comm, array))(jnp.ones(2))
        with pytest.raises(ValueError, match=r"the first axis of shape \(\) cannot be divided among 1 ranks"):
            functions.all_to_all(comm, jnp.float32(1))
        with ncclpy.group(), pytest.raises(RuntimeError, match="which a group receives only at its end"):
            functions.all_reduce(comm, jnp.ones(2))
        with pytest.raises(ValueError, match=r"recv: .*read-only"):
            comm.all_reduce(np.ones(2, np.float32), jnp.ones(2))
    with ncclpy.group():
        assert ncclpy.core.calls.group.in_group()
    assert not ncclpy.core.calls.group.in_group()


def test_arrays_of_several_devices():
    done = testing.run_python(
        """
        import jax, ncclpy, numpy as np
        from ncclpy.interop import jax as functions
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        array = jax.device_put(jax.numpy.arange(4.0), sharding)
        with ncclpy.Communicator.init_all([0])[0] as comm:
            try:
                functions.all_reduce(comm, array)
            except ValueError as error:
                print(error)
            print(functions.all_reduce(comm, array.addressable_shards[1].data))
        """,
        env={"XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
    )
    assert "array: it is spread over 2 devices" in done.stdout and "[2. 3.]" in done.stdout


def test_missing_rank_times_out(road):
    def program(comm):
        if comm.rank == 1:
            time.sleep(1)
            comm.abort()
            return None
        began = time.monotonic()
        with pytest.raises(ncclpy.NcclError):
            functions.all_reduce(comm, jnp.ones(2), timeout=0.3)
        assert time.monotonic() - began < 20 and comm.closed

    in_ranks(2, program)


def test_error_on_the_stream_is_raised(monkeypatch):
    """The operation stays on its stream, and the communicator knows of the error."""
    monkeypatch.setattr(functions, "library", lambda: types.SimpleNamespace(engine="cuda"))
    with ncclpy.faults("rank=0 call=AllReduce at=run do=error:ncclRemoteError"):
        comms = ncclpy.Communicator.init_all([0, 1])
        with ncclpy.Stream(1) as stream:
            comms[1].all_reduce(np.ones(2, np.float32), stream=stream)
            with pytest.raises(ncclpy.NcclError, match="has failed while an array of JAX was on its way") as raised:
                functions.all_reduce(comms[0], jnp.ones(2))
            assert raised.value.result == ncclpy.Result.REMOTE_ERROR
            for comm in comms:
                comm.abort()
            stream.synchronize(DEADLINE)


def test_ctrl_c_ends_an_operation_under_way(road):
    """The receive memory is kept until no operation can write to it."""
    testing.run_python(
        f"""
        import os, signal, threading, types
        import jax.numpy as jnp, numpy as np, ncclpy
        from ncclpy.interop import jax as functions
        if {road!r} == "device":
            functions.library = lambda: types.SimpleNamespace(engine="cuda")
        comms = ncclpy.Communicator.init_all([0, 1], abortable=True)
        array = jnp.ones(2000).block_until_ready()
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            functions.all_reduce(comms[0], array)  # rank 1 does not come
        except KeyboardInterrupt:
            pass
        assert comms[0].closed
        comms[1].abort()
        """
    )


def test_without_jax_the_error_says_what_to_do():
    done = testing.run_python("""
        import sys
        sys.modules["jax"] = None
        import ncclpy, numpy as np
        from ncclpy.interop import jax as functions
        try:
            functions.all_reduce(None, np.ones(2))
        except ModuleNotFoundError as error:
            print(error)
        """)
    assert "which cannot be imported" in done.stdout and "pip install jax" in done.stdout
