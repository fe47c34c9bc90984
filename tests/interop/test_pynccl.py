"""The interface of vLLM's PyNcclCommunicator, on CPU tensors."""

from __future__ import annotations

import inspect
import logging
import threading
import time

import pytest

import ncclpy
import testing
from ncclpy.bootstrap import LocalStore
from ncclpy.interop.pynccl import PyNcclCommunicator

torch = pytest.importorskip("torch", reason="needs torch")
import torch.distributed as dist  # noqa: E402

pytestmark = pytest.mark.usefixtures("host_engine")

DEADLINE = 30

#: The methods of vLLM's class in 2026, `change_state` of earlier ones, and `reduce` and `scatter` of classes modelled
#: on it, with the names of their parameters.
METHODS = {
    "__init__": "self, group, device, library_path=None",
    "all_gather": "self, output_tensor, input_tensor, stream=None",
    "all_gatherv": "self, output_tensor, input_tensor, sizes, stream=None",
    # vLLM's default is torch's ReduceOp.SUM, which is not imported here.
    "all_reduce": "self, in_tensor, out_tensor=None, op=None, stream=None",
    "batch_isend_irecv": "self, p2p_ops, stream=None",
    "broadcast": "self, tensor, src, stream=None",
    "change_state": "self, enable=None, stream=None",
    "deregister_comm_window": "self, window",
    "destroy": "self",
    "from_unique_id_bytes": "cls, unique_id_bytes, rank, world_size, device, library_path=None",
    "group_end": "self",
    "group_start": "self",
    "recv": "self, tensor, src, stream=None",
    "reduce": "self, output_tensor, input_tensor, root, op=None, stream=None",
    "reduce_scatter": "self, output_tensor, input_tensor, op=None, stream=None",
    "reduce_scatterv": "self, output_tensor, input_tensor, sizes, op=None, stream=None",
    "register_comm_window": "self, tensor",
    "register_comm_window_raw": "self, ptr, size",
    "resume": "self",
    "scatter": "self, output_tensor, input_tensor, sizes, root, stream=None",
    "send": "self, tensor, dst, stream=None",
    "suspend": "self",
}


@pytest.mark.parametrize("name", METHODS)
def test_names_and_parameters_are_vllms(name):
    method = inspect.getattr_static(PyNcclCommunicator, name)
    parameters = inspect.signature(getattr(method, "__func__", method)).parameters.values()
    given = [each for each in parameters if each.kind is not each.KEYWORD_ONLY]
    written = [each.name + ("" if each.default is each.empty else f"={each.default!r}") for each in given]
    assert ", ".join(written) == METHODS[name]
    # `timeout` is ncclpy's addition, keyword-only.
    assert {each.name for each in parameters} - {each.name for each in given} <= {"timeout"}


def test_nothing_else_is_public():
    assert {name for name in vars(PyNcclCommunicator) if not name.startswith("_")} | {"__init__"} == set(METHODS)


def in_ranks(size, program, **options):
    """Call ``program(communicator)`` in one thread per rank, over a store; return the results."""
    store = LocalStore()
    options = {"device": "cpu", "timeout": DEADLINE} | options

    def body(rank):
        made = PyNcclCommunicator((store, rank.rank, size), **options)
        try:
            return program(made)
        finally:
            made.comm.close()

    return testing.run_threads(size, body, DEADLINE)


def test_attributes_of_a_communicator():
    def program(made):
        assert made.available and not made.disabled and made.stream is None
        assert (made.comm.rank, made.comm.nranks, made.comm.device) == (made.rank, made.world_size, made.rank)
        assert made.comm.timeout == DEADLINE and made.device == torch.device("cpu") and made.nccl_version == 23203
        return made.rank, bytes(made.unique_id)

    found = in_ranks(3, program)
    assert [rank for rank, _ in found] == [0, 1, 2] and len({unique_id for _, unique_id in found}) == 1


def test_ordinal_chooses_the_device_of_the_host_engine():
    store = LocalStore()

    def body(rank):
        made = PyNcclCommunicator((store, rank.rank, 2), 3 - rank.rank, timeout=DEADLINE)
        made.comm.close()
        return made.comm.device, made.device.type

    assert testing.run_threads(2, body, DEADLINE) == [(3, "cpu"), (2, "cpu")]


OPERATORS = [
    (None, 7.0), (dist.ReduceOp.SUM, 7.0), (dist.ReduceOp(dist.ReduceOp.MAX), 4.0), (dist.ReduceOp.MIN, 1.0),
    (dist.ReduceOp.PRODUCT, 8.0), (dist.ReduceOp.AVG, 7 / 3), ("avg", 7 / 3), (ncclpy.MIN, 1.0),
]  # fmt: skip


def test_all_reduce_makes_a_new_tensor():
    def program(made):
        for dtype in (torch.float32, torch.bfloat16):
            tensor = torch.full((2, 3), 2.0**made.rank, dtype=dtype)
            for op, expected in OPERATORS:
                result = made.all_reduce(tensor, op=op)
                assert result is not tensor and (tensor == 2.0**made.rank).all() and result.shape == tensor.shape
                assert (result == torch.tensor(expected, dtype=dtype)).all(), (op, result)
                into = torch.empty(2, 3, dtype=dtype)
                assert made.all_reduce(tensor, into, op) is into and torch.equal(into, result)

    in_ranks(3, program)


def test_operators_unknown_to_nccl_are_refused():
    def program(made):
        with pytest.raises(TypeError, match="op: 'BXOR' is not a reduction operator"):
            made.all_reduce(torch.ones(1), op=dist.ReduceOp.BXOR)

    in_ranks(2, program)


def test_gathers_and_scatters():
    def program(made):
        rank, size = made.rank, made.world_size
        everything = torch.empty(size * 2, 2)
        made.all_gather(everything, torch.full((2, 2), float(rank)))
        assert everything[:, 0].tolist() == [0, 0, 1, 1, 2, 2]
        sizes = [3, 0, 2]
        rows = torch.empty(5, 4)
        made.all_gatherv(rows, torch.full((sizes[rank], 4), float(rank)), sizes)
        assert rows[:, 3].tolist() == [0, 0, 0, 2, 2]
        part = torch.empty(2)
        made.reduce_scatter(part, torch.arange(6.0) * (rank + 1))
        assert part.tolist() == [12.0 * rank, 12.0 * rank + 6]
        part = torch.empty(sizes[rank], 2)
        made.reduce_scatterv(part, torch.arange(10.0).reshape(5, 2) + rank, sizes, dist.ReduceOp.MAX)
        start = sum(sizes[:rank])
        assert torch.equal(part, torch.arange(10.0).reshape(5, 2)[start : start + sizes[rank]] + 2)
        with pytest.raises(ValueError, match=r"sizes: \[3, 0, 1\] are 4 rows, and output_tensor has 5"):
            made.all_gatherv(rows, part, [3, 0, 1])
        with pytest.raises(ValueError, match="sizes: 2 numbers for 3 ranks"):
            made.reduce_scatterv(part, rows, [3, 2])

    in_ranks(3, program)


def test_to_and_from_one_rank():
    def program(made):
        rank = made.rank
        into, sent = torch.zeros(2), torch.full((2,), rank + 1.0)
        made.reduce(into, sent, 1)
        assert into.tolist() == ([6.0, 6.0] if rank == 1 else [0.0, 0.0]) and sent.tolist() == [rank + 1.0] * 2
        made.reduce(into if rank == 2 else None, sent, 2, dist.ReduceOp.MAX)
        assert rank != 2 or into.tolist() == [3.0, 3.0]
        sizes = [3, 0, 2]
        part, rows = torch.zeros(sizes[rank], 2), torch.arange(10.0).reshape(5, 2)
        made.scatter(part, rows if rank == 0 else None, sizes, 0)
        start = sum(sizes[:rank])
        assert torch.equal(part, rows[start : start + sizes[rank]])
        if rank == 0:
            with pytest.raises(ValueError, match=r"sizes: \[3, 0, 1\] are 4 rows, and input_tensor has 5"):
                made.scatter(part, rows, [3, 0, 1], 0)

    in_ranks(3, program)


def test_messages_and_groups():
    def program(made):
        rank, size = made.rank, made.world_size
        tensor = torch.full((4,), float(rank))
        made.broadcast(tensor, 2)
        assert tensor.tolist() == [2.0] * 4
        if rank == 0:
            made.send(torch.arange(4.0), 1)
        elif rank == 1:
            made.recv(tensor, 0)
            assert tensor.tolist() == [0, 1, 2, 3]
        given, taken = torch.full((3,), float(rank)), torch.empty(3)
        made.group_start()
        made.send(given, (rank + 1) % size)
        made.recv(taken, (rank - 1) % size)
        made.group_end()
        assert taken.tolist() == [float((rank - 1) % size)] * 3
        with pytest.raises(RuntimeError, match="group_end: no group is open in this thread"):
            made.group_end()

    in_ranks(3, program)


class Ask:
    """The attributes of a torch.distributed.P2POp."""

    def __init__(self, op, tensor, group_peer):
        self.op, self.tensor, self.group_peer = op, tensor, group_peer


def test_batches():
    def program(made):
        rank, size = made.rank, made.world_size
        taken = torch.empty(2)
        made.batch_isend_irecv(
            [
                Ask(dist.isend, torch.full((2,), float(rank)), (rank + 1) % size),
                Ask(dist.irecv, taken, (rank - 1) % size),
            ]
        )
        assert taken.tolist() == [float((rank - 1) % size)] * 2
        with pytest.raises(ValueError, match=r"expected torch\.distributed\.isend and irecv"):
            made.batch_isend_irecv([Ask(dist.isend, taken, 0), Ask(dist.all_reduce, taken, 0)])
        made.comm.barrier()  # none of the batch was launched

    in_ranks(3, program)


def test_streams():
    """A given stream is passed on; the stream of `change_state` is used by calls that name none."""

    def program(made):
        array = torch.ones(3)
        with ncclpy.Stream(made.comm.device) as stream:
            made.all_reduce(array, array, stream=stream)
            stream.synchronize(DEADLINE)
            with made.change_state(stream=stream):
                assert made.stream is stream
                made.all_reduce(array, array)
                stream.synchronize(DEADLINE)
        assert made.stream is None
        return array[0].item()

    assert in_ranks(2, program) == [4.0] * 2


def test_change_state():
    def program(made):
        with pytest.raises(KeyError), made.change_state(enable=False):
            assert made.disabled
            tensor = torch.ones(2)
            assert made.all_reduce(tensor) is None
            for call in (made.all_gather, made.reduce_scatter):
                assert call(tensor, tensor) is None
            for call in (made.all_gatherv, made.reduce_scatterv):
                assert call(tensor, tensor, [2]) is None
            assert made.reduce(tensor, tensor, 0) is None and made.scatter(tensor, tensor, [2], 0) is None
            for call in (made.send, made.recv, made.broadcast):
                assert call(tensor, 0) is None
            assert made.batch_isend_irecv([Ask(dist.isend, tensor, 0)]) is None
            assert tensor.tolist() == [1, 1]
            with made.change_state():
                assert not made.disabled and made.all_reduce(tensor).tolist() == [2, 2]
            assert made.disabled
            raise KeyError
        assert not made.disabled

    in_ranks(2, program)


def test_windows():
    def program(made):
        tensor = torch.zeros(8)
        window = made.register_comm_window(tensor)
        assert isinstance(window, ncclpy.Window) and window.handle
        made.deregister_comm_window(None)
        peer = window.peer(1 - made.rank, "float32")
        tensor[:] = made.rank + 5
        made.comm.barrier()
        import numpy as np

        assert np.asarray(peer).tolist() == [6.0 - made.rank] * 8
        made.comm.barrier()
        made.deregister_comm_window(window)
        assert window.closed and made._windows == []
        memory = torch.zeros(4)
        window = made.register_comm_window_raw(memory.data_ptr(), 16)
        made.deregister_comm_window(window)
        assert window.closed

    in_ranks(2, program)


def test_suspend_and_resume():
    def program(made):
        made.suspend()
        made.suspend()
        with pytest.raises(ValueError, match="suspended"):
            made.all_reduce(torch.ones(1))
        made.resume()
        made.resume()
        return made.all_reduce(torch.ones(1)).item()

    assert in_ranks(2, program, timeout=None) == [2.0] * 2


def test_suspend_with_a_deadline_says_why_not():
    def program(made):
        with pytest.raises(ValueError, match="shares memory with its guard"):
            made.suspend()
        return made.all_reduce(torch.ones(1)).item()

    assert in_ranks(2, program) == [2.0] * 2


def test_calls_after_destroy():
    def program(made):
        made.destroy()
        made.destroy()
        assert made.comm.closed and not made.available and made.disabled
        assert made.all_reduce(torch.ones(1)) is None
        with made.change_state():
            assert made.disabled
        with pytest.raises(RuntimeError, match="has no communicator to register memory with"):
            made.register_comm_window(torch.ones(1))
        made.suspend()
        made.resume()

    in_ranks(2, program)


def test_world_of_one_is_disabled():
    made = PyNcclCommunicator((LocalStore(), 0, 1), "cpu")
    assert (made.rank, made.world_size, made.available, made.disabled) == (0, 1, False, True)
    assert made.all_reduce(torch.ones(1)) is None
    made.destroy()


def test_variable_of_vllm_disables_the_communicator(monkeypatch):
    monkeypatch.setenv("VLLM_DISABLE_PYNCCL", "1")
    made = PyNcclCommunicator((LocalStore(), 1, 2), "cpu")
    assert made.disabled and not made.available and made.rank == 1


def test_without_nccl_the_communicator_is_disabled_and_a_warning_says_why(monkeypatch, caplog):
    from ncclpy.interop import pynccl

    def missing():
        raise ncclpy.LibraryNotFound("no libnccl.so.2 in /nowhere")

    monkeypatch.setattr(pynccl, "library", missing)
    with caplog.at_level(logging.WARNING, "ncclpy"):
        made = PyNcclCommunicator((LocalStore(), 1, 2), "cpu")
    assert made.disabled and "rank 1 is disabled: no libnccl.so.2 in /nowhere" in caplog.text


def test_other_library_is_refused():
    with pytest.raises(RuntimeError, match="ncclpy already uses"):
        PyNcclCommunicator((LocalStore(), 0, 2), "cpu", "/nowhere/libnccl.so.2")


def test_tensors_of_another_device_are_refused():
    def program(made):
        elsewhere = torch.empty(2, device="meta")
        with pytest.raises(ValueError, match="in_tensor: the tensor is on meta, and this communicator works on cpu"):
            made.all_reduce(elsewhere)
        with pytest.raises(ValueError, match="output_tensor: the tensor is on meta"):
            made.all_gather(elsewhere, torch.ones(1))

    in_ranks(2, program)
    with pytest.raises(ValueError, match="cuda:0 cannot be communicated by the host engine"):
        PyNcclCommunicator.from_unique_id_bytes(bytes(ncclpy.get_unique_id()), 0, 2, "cuda:0")


def test_invalid_groups_are_refused():
    for group in (3, object(), "world"):
        with pytest.raises((TypeError, RuntimeError), match="group: "):
            PyNcclCommunicator(group, "cpu")
    with pytest.raises(TypeError, match=r"\(store, rank, world_size\), got 2 items"):
        PyNcclCommunicator((LocalStore(), 0), "cpu")
    with pytest.raises(RuntimeError, match=r"init_process_group\('gloo'\)"):
        PyNcclCommunicator(None, "cpu")


def test_missing_rank_is_named():
    began = time.monotonic()
    with pytest.raises(ncclpy.NcclTimeout, match="rank 1 of 2") as raised:
        PyNcclCommunicator((LocalStore(), 0, 2), "cpu", timeout=0.3)
    assert raised.value.missing == [1] and time.monotonic() - began < 20


def test_unique_id_of_the_program_is_used():
    unique_id = bytes(ncclpy.get_unique_id())

    def body(rank):
        made = PyNcclCommunicator.from_unique_id_bytes(unique_id, rank.rank, 2, rank.rank, timeout=DEADLINE)
        result = made.all_reduce(torch.ones(2)).tolist()
        made.comm.close()
        return result

    assert testing.run_threads(2, body, DEADLINE) == [[2.0, 2.0]] * 2


def test_several_communicators_over_one_store():
    store = LocalStore()

    def body(rank):
        found = []
        for _ in range(3):
            made = PyNcclCommunicator((store, rank.rank, 2), "cpu", timeout=DEADLINE)
            found.append(bytes(made.unique_id))
            made.comm.close()
        return found

    first, second = testing.run_threads(2, body, DEADLINE)
    assert first == second and len(set(first)) == 3


class Stateless:
    """A group in the shape of vLLM's StatelessProcessGroup: each sender counts its broadcasts."""

    def __init__(self, said, rank, world_size):
        self._said, self.rank, self.world_size = said, rank, world_size
        self._counts = {}

    def broadcast_obj(self, obj, src):
        number = self._counts[src] = self._counts.get(src, 0) + 1
        if self.rank == src:
            with self._said["changed"]:
                self._said[src, number] = obj
                self._said["changed"].notify_all()
            return obj
        with self._said["changed"]:
            assert self._said["changed"].wait_for(lambda: (src, number) in self._said, DEADLINE)
        return self._said[src, number]


def test_stateless_group():
    said = {"changed": threading.Condition()}

    def body(rank):
        made = PyNcclCommunicator(Stateless(said, rank.rank, 3), torch.device("cpu"), timeout=DEADLINE)
        result = made.all_reduce(torch.full((2,), float(made.rank)))
        made.comm.close()
        return result.tolist()

    assert testing.run_threads(3, body, DEADLINE) == [[3.0, 3.0]] * 3


def test_store_of_torch():
    theirs = dist.HashStore()

    def body(rank):
        made = PyNcclCommunicator((theirs, rank.rank, 2), "cpu", timeout=DEADLINE)
        made.comm.close()
        return made.comm.nranks

    assert testing.run_threads(2, body, DEADLINE) == [2, 2]


def beside_gloo(rank, path):
    """Run a rank of torch's gloo backend: the default group, and a part of it with ranks other than the world's."""
    import datetime

    dist.init_process_group(
        "gloo",
        init_method=f"file://{path}",
        rank=rank.rank,
        world_size=3,
        timeout=datetime.timedelta(seconds=DEADLINE),
    )
    found = []
    part = dist.new_group([2, 1])
    for group in (None, dist.group.WORLD, part):
        if group is part and rank.rank == 0:
            continue
        made = PyNcclCommunicator(group, rank.rank, timeout=DEADLINE)
        found.append((made.rank, made.world_size, made.all_reduce(torch.full((2,), rank.rank + 1.0))[0].item()))
        after, before = (rank.rank + 1) % 3, (rank.rank - 1) % 3
        if group is part:
            after = before = 3 - rank.rank  # torch's calls take the rank in the world
        taken = torch.empty(2)
        made.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, torch.full((2,), float(rank.rank)), after, group),
                dist.P2POp(dist.irecv, taken, before, group),
            ]
        )
        assert taken.tolist() == [before] * 2, taken
        made.comm.close()
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_group_of_torch(tmp_path):
    found = testing.run_processes(3, beside_gloo, str(tmp_path / "store"))
    assert [each[:2] for each in found] == [[(rank, 3, 6.0)] * 2 for rank in range(3)]
    assert found[1][2] == (0, 2, 5.0) and found[2][2] == (1, 2, 5.0)


def test_without_torch_the_error_says_what_to_do():
    done = testing.run_python(
        """
        import sys
        sys.modules["torch"] = None
        from ncclpy.interop.pynccl import PyNcclCommunicator
        try:
            PyNcclCommunicator(None, 0)
        except ModuleNotFoundError as error:
            print(error)
        """,
        warm=True,
    )
    assert "which cannot be imported" in done.stdout and "pip install torch" in done.stdout
