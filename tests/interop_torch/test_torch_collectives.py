"""Every collective of c10d has the results of gloo, for all kinds of tensors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager
from torch_ranks import error_of

import ncclpy.interop.torch

SIZES = (0, 1, 3, 1000, 70_000)
#: Types that torch 2.6 lacks.
NEWER = [getattr(torch, name) for name in ("float8_e8m0fnu",) if hasattr(torch, name)]


def part(rank, count, dtype):
    return (torch.arange(count) % 7 + rank + 1).to(dtype)


def reductions(rank, size, dtype):
    found = {}
    for count in SIZES:
        for op in ("SUM", "PRODUCT", "MIN", "MAX"):
            tensor = part(rank, count, dtype)
            dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
            found["all_reduce", op, count] = tensor
        tensor = part(rank, count, dtype)
        dist.reduce(tensor, dst=1)
        found["reduce", count] = tensor if rank == 1 else None
        output = torch.empty(count, dtype=dtype)
        dist.reduce_scatter(output, [part(rank + each, count, dtype) for each in range(size)])
        found["reduce_scatter", count] = output
        output = torch.empty(count, dtype=dtype)
        dist.reduce_scatter_tensor(output, part(rank, count * size, dtype))
        found["reduce_scatter_tensor", count] = output
    return found


def moves(rank, size, dtype):
    found = {}
    for count in SIZES:
        tensor = part(rank, count, dtype)
        dist.broadcast(tensor, src=size - 1)
        found["broadcast", count] = tensor
        outputs = [torch.zeros(count, dtype=dtype) for _ in range(size)]
        dist.all_gather(outputs, part(rank, count, dtype))
        found["all_gather", count] = outputs
        output = torch.zeros(count * size, dtype=dtype)
        dist.all_gather_into_tensor(output, part(rank, count, dtype))
        found["all_gather_into_tensor", count] = output
        outputs = [torch.zeros(count, dtype=dtype) for _ in range(size)] if rank == 1 else None
        dist.gather(part(rank, count, dtype), outputs, dst=1)
        found["gather", count] = outputs
        output = torch.zeros(count, dtype=dtype)
        dist.scatter(output, [part(each, count, dtype) for each in range(size)] if rank == 0 else None, src=0)
        found["scatter", count] = output
        if rank == 0:
            dist.send(part(3, count, dtype), dst=1)
        elif rank == 1:
            output = torch.zeros(count, dtype=dtype)
            dist.recv(output, src=0)
            found["recv", count] = output
    return found


def exchanges(rank, size, dtype):
    found = {}
    for count in SIZES:
        output = torch.zeros(count * size, dtype=dtype)
        dist.all_to_all_single(output, part(rank, count * size, dtype))
        found["all_to_all_single", count] = output
        rows = [(rank + each) % 3 for each in range(size)]  # rows sent to each rank, and received from each
        output = torch.zeros(sum(rows), 5, dtype=dtype)
        sent = part(rank, sum(rows) * 5, dtype).reshape(-1, 5)
        dist.all_to_all_single(output, sent, rows, rows)
        found["rows", count] = output
    return found


def same(ours, theirs):
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        for name, found in mine.items():
            assert found is None or not isinstance(found, list) or len(found) == len(other[name])
            torch.testing.assert_close(found, other[name], msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16], ids=str)
def test_reductions_are_gloos(ranks4, dtype):
    same(ranks4.run(reductions, dtype), ranks4.run(reductions, dtype, backend="gloo"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.uint8, torch.float16], ids=str)
def test_moves_are_gloos(ranks4, dtype):
    same(ranks4.run(moves, dtype), ranks4.run(moves, dtype, backend="gloo"))


def test_exchanges_are_gloos(ranks4):
    same(ranks4.run(exchanges, torch.float32), ranks4.run(exchanges, torch.float32, backend="gloo"))


def beyond_gloo(rank, size):
    average = torch.full((3,), float(rank))
    dist.all_reduce(average, op=dist.ReduceOp.AVG)
    scaled = torch.full((3,), float(rank + 1))
    dist.all_reduce(scaled, op=dist._make_nccl_premul_sum(0.5))
    uneven = [torch.zeros(each + 1) for each in range(size)]
    dist.all_gather(uneven, torch.full((rank + 1,), float(rank)))
    lists = [torch.zeros(rank + 1) for _ in range(size)]
    dist.all_to_all(lists, [torch.full((each + 1,), float(rank)) for each in range(size)])
    output = torch.zeros(rank + 1)
    dist.reduce_scatter(output, [torch.ones(each + 1) for each in range(size)])
    return (
        average.tolist(),
        scaled.tolist(),
        [each.tolist() for each in uneven],
        [each.tolist() for each in lists],
        output.tolist(),
    )


def test_collectives_that_gloo_lacks(ranks4):
    for rank, (average, scaled, uneven, lists, output) in enumerate(ranks4.run(beyond_gloo)):
        assert average == [1.5] * 3 and scaled == [5.0] * 3
        assert uneven == [[float(each)] * (each + 1) for each in range(4)]
        assert lists == [[float(each)] * (rank + 1) for each in range(4)]
        assert output == [4.0] * (rank + 1)


def mixed(rank, size):
    """Call the same collectives in a different form on each rank."""
    exchanged = torch.zeros(2 * size)
    rows = [[2] * size] * 2 if rank else []
    dist.all_to_all_single(exchanged, torch.arange(2.0 * size) + 10 * rank, *rows)
    gathered, apart = torch.zeros(2 * size), [torch.zeros(2) for _ in range(size)]
    summed = torch.zeros(2)
    whole = torch.arange(2.0 * size) + rank
    if rank == 0:
        dist.all_gather_into_tensor(gathered, torch.full((2,), 1.0))
        dist.reduce_scatter_tensor(summed, whole)
    elif rank == 1:
        dist.all_gather(list(gathered.chunk(size)), torch.full((2,), 2.0))
        dist.reduce_scatter(summed, list(whole.chunk(size)))
    else:
        dist.all_gather(apart, torch.full((2,), rank + 1.0))
        dist.reduce_scatter(summed, [each.clone() for each in whole.chunk(size)])
        gathered = torch.cat(apart)
    return exchanged.tolist(), gathered.tolist(), summed.tolist()


def test_forms_of_one_collective_match(ranks4):
    for rank, (exchanged, gathered, summed) in enumerate(ranks4.run(mixed)):
        assert exchanged == [10.0 * each + 2 * rank + i for each in range(4) for i in range(2)]
        assert gathered == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0]
        assert summed == [8.0 * rank + 6, 8.0 * rank + 10]


def flat(rank, size):
    """Receive into lists of equal parts that cannot be received into in place."""
    reached = torch.zeros(size + 1, 2)
    dist.all_gather([reached[size - each] for each in range(size)], torch.full((2,), rank + 1.0))
    strided = torch.zeros(3, 2 * size)
    dist.all_gather(list(strided.chunk(size, 1)), torch.arange(6.0).reshape(3, 2) + 10 * rank)
    negative = torch.zeros(size, 2)
    parts = (torch.arange(2.0 * size) * (1 + 1j)).conj().imag.chunk(size)
    assert parts[0].is_neg()
    dist.reduce_scatter(negative[rank], list(parts), op=dist.ReduceOp.MAX)
    scaled = torch.zeros(2)
    dist.reduce_scatter(scaled, list(torch.ones(2 * size).chunk(size)), op=dist._make_nccl_premul_sum(0.5))
    shaped = [torch.zeros(2, 2), torch.zeros(4), torch.zeros(1, 4), torch.zeros(4, 1)]
    dist.group.WORLD.allgather([shaped], [torch.full((4,), rank + 1.0)]).wait()
    found = [each.tolist() for each in (reached, strided, negative[rank], scaled)]
    return found + [each.sum().item() for each in shaped]


def test_parts_anywhere_in_memory(ranks4):
    for rank, (reached, strided, negative, scaled, *shaped) in enumerate(ranks4.run(flat)):
        assert reached == [[0.0, 0.0]] + [[5.0 - each] * 2 for each in range(1, 5)]
        assert strided == [[10.0 * each + row * 2 + i for each in range(4) for i in range(2)] for row in range(3)]
        assert negative == [-2.0 * rank, -2.0 * rank - 1] and scaled == [2.0, 2.0]
        assert shaped == [4.0, 8.0, 12.0, 16.0]


def coalesced(rank, size):
    group = dist.group.WORLD
    device = torch.device("cpu")
    many = [torch.full((each + 1,), float(rank)) for each in range(3)]
    before = group._get_backend(device)._get_sequence_number_for_group()
    with _coalescing_manager(group, async_ops=True) as manager:
        for tensor in many:
            dist.all_reduce(tensor)
    manager.wait()
    outputs = [torch.zeros(size * (each + 1)) for each in range(2)]
    with _coalescing_manager(group):
        for each, output in enumerate(outputs):
            dist.all_gather_into_tensor(output, torch.full((each + 1,), float(rank)))
    parts = [torch.zeros(each + 1) for each in range(2)]
    with _coalescing_manager(group, device):  # in a block of the backend, too
        for each, output in enumerate(parts):
            dist.reduce_scatter_tensor(output, torch.ones(size * (each + 1)))
    after = group._get_backend(device)._get_sequence_number_for_group()
    return [each.tolist() for each in (*many, *outputs, *parts)], after - before


def test_coalesced_collectives_are_one_launch(ranks2):
    expected = [[1.0], [1.0] * 2, [1.0] * 3, [0.0, 1.0], [0.0, 0.0, 1.0, 1.0], [2.0], [2.0] * 2]
    for found, launches in ranks2.run(coalesced):
        assert found == expected and launches == 3


def left_by_an_exception(rank, size):
    # Not by dist.all_reduce: torch queues those calls itself, and keeps them when an exception is raised.
    group, device, tensors = dist.group.WORLD, torch.device("cpu"), [torch.ones(2) for _ in range(3)]
    works = []
    for _ in range(2):
        with pytest.raises(KeyError), _coalescing_manager(group, device):
            works.append(group.allreduce([tensors[0]]))
            raise KeyError
    with _coalescing_manager(group, device):
        group.allreduce([tensors[1]])
    with pytest.raises(KeyError), _coalescing_manager(group, device):
        raise KeyError
    ncclpy.interop.torch.backend_of().drop_coalescing()
    group.allreduce([tensors[2]]).wait()
    with pytest.raises(dist.DistBackendError, match="block was left by an exception"):
        works[0].wait()
    return [each.tolist() for each in tensors]


def test_block_left_by_an_exception_is_dropped(ranks2):
    assert ranks2.run(left_by_an_exception) == [[[1.0] * 2, [2.0] * 2, [2.0] * 2]] * 2


def big_exchange(rank, size):
    sent = torch.full((1 << 21,), float(rank))
    received = torch.empty_like(sent)
    peer = 1 - rank
    # Both ranks send first: one after the other, the sends would wait for each other.
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)])
    for work in works:
        work.wait()
    return received.unique().tolist(), len(works)


def test_batch_of_sends_and_receives_is_one_launch(ranks2):
    assert ranks2.run(big_exchange) == [([1.0], 1), ([0.0], 1)]


def objects(rank, size):
    gathered = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * (rank * 1000)})
    listed = [f"from {rank}", rank] if rank == 0 else [None, None]
    dist.broadcast_object_list(listed, src=0)
    mine = [None]
    dist.scatter_object_list(mine, [f"to {each}" for each in range(size)] if rank == 0 else None, src=0)
    onto = [None] * size if rank == 1 else None
    dist.gather_object(rank * 2, onto, dst=1)
    return [len(each["text"]) for each in gathered], listed, mine, onto


def test_objects(ranks2):
    assert ranks2.run(objects) == [
        ([0, 1000], ["from 0", 0], ["to 0"], None),
        ([0, 1000], ["from 0", 0], ["to 1"], [0, 2]),
    ]


def sparse(rank, size):
    made = torch.sparse_coo_tensor([[rank, 3]], torch.full((2, 2), rank + 1.0), (5, 2))
    dist.all_reduce(made)
    return made.to_dense()


def test_sparse_sums_are_gloos(ranks2):
    for ours, theirs in zip(ranks2.run(sparse), ranks2.run(sparse, backend="gloo"), strict=True):
        torch.testing.assert_close(ours, theirs)


def sparse_of(rank, size, sizes, place):
    made = torch.sparse_coo_tensor([[place[rank]]] * len(sizes[rank]), [1.0], sizes[rank], check_invariants=False)
    said = error_of(lambda: dist.all_reduce(made))
    dist.barrier()  # the group stays usable
    return said


@pytest.mark.parametrize(
    ("sizes", "place"),
    [([(1,), (1001,)], (0, 1000)), ([(5, 4), (4, 5)], (0, 1)), ([(2,) * 9, (2,) * 8 + (3,)], (0, 1))],
    ids=["outside", "turned", "nine dimensions"],
)
def test_sparse_tensors_of_different_sizes_are_an_error_on_all_ranks(ranks2, sizes, place):
    first, second = ranks2.run(sparse_of, sizes, place)
    assert first == second and first.startswith("ValueError: all_reduce_sparse: rank 1 passes")
    if len(sizes[0]) < 9:
        assert f"of shape {sizes[0]}" in first and f"of shape {sizes[1]}" in first


def test_sparse_index_outside_of_the_size_is_an_error_on_all_ranks(ranks2):
    said = ranks2.run(sparse_of, [(4,), (4,)], (0, 1 << 40))
    assert said[0] == said[1] and "size is 4 but found index" in said[0]


# The values of a tensor need not be those in its memory.


def lazy(rank, size):
    def made():
        return torch.tensor([1 + 2j, 3 - 4j]) * (rank + 1)

    negative, summed, conjugate = made().conj().imag, made().conj().imag, made().conj()
    assert negative.is_neg() and summed.is_neg() and conjugate.is_conj()
    dist.broadcast(negative, src=0)
    dist.all_reduce(summed)
    lists = [torch.zeros(2) for _ in range(size)]
    dist.all_gather(lists, made().conj().imag)
    dist.group.WORLD.allreduce([conjugate]).wait()  # torch.distributed's own all_reduce refuses it
    return [each.tolist() for each in (negative, summed, *lists, conjugate)]


def test_lazy_negation_and_conjugation(ranks2):
    first, second = [-2.0, 4.0], [-4.0, 8.0]
    expected = [first, [-6.0, 12.0], first, second, [3 - 6j, 9 + 12j]]
    assert ranks2.run(lazy) == [expected, expected]


def lazy_over_gloo(rank, size):
    dist.all_reduce(torch.zeros(1), group=dist.new_group(backend="ncclpy"))  # its extension is loaded now
    tensor = torch.tensor([1 + 2j, 3 - 4j]).conj().imag if rank == 0 else torch.zeros(2)
    dist.broadcast(tensor, src=0)
    return tensor.tolist()


def test_lazy_tensors_of_other_backends_work_as_before(ranks2):
    assert ranks2.run(lazy_over_gloo, backend="gloo")[1] == [-2.0, 4.0]


def strided(rank, size):
    base = torch.arange(24.0).reshape(4, 6) + 100 * rank
    across, every = base.t(), base[:, ::2]
    dist.all_reduce(across)
    outputs = [torch.zeros(6, 4).t() for _ in range(size)]
    dist.all_gather(outputs, base)
    into = torch.zeros(6, 8).t()[:, ::2]
    dist.broadcast(into.copy_(every[:1, 0]) if rank == 0 else into, src=0)
    work = dist.all_reduce(every, async_op=True)
    while not work.is_completed():
        pass
    seen = every.clone()  # without a wait
    work.wait()
    return base, outputs, into, seen


def test_tensors_that_are_not_contiguous(ranks2):
    plain = [torch.arange(24.0).reshape(4, 6) + 100 * rank for rank in range(2)]
    once = plain[0] + plain[1]
    for base, outputs, into, seen in ranks2.run(strided):
        for output in outputs:
            torch.testing.assert_close(output, once)
        assert into.unique().tolist() == [once[0, 0].item()]
        torch.testing.assert_close(seen, 2 * once[:, ::2])
        expected = once.clone()
        expected[:, ::2] *= 2
        torch.testing.assert_close(base, expected)


def where_autograd_looks(rank, size):
    turned = torch.nn.Parameter((torch.arange(6.0).reshape(2, 3) * (rank + 1)).t())
    weight = torch.nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last).weight
    torch.nn.init.constant_(weight, rank + 1.0)
    with torch.inference_mode():
        inferred = torch.full((2, 3), rank + 1.0).t()
    sent = torch.nn.Parameter(torch.full((2, 3), rank + 1.0).t())
    outputs = [torch.nn.Parameter(torch.zeros(3, 2)), torch.nn.Parameter(torch.zeros(2, 3).t())]
    work = dist.broadcast(turned, 0, async_op=True)
    work.get_future().wait()
    for tensor in (weight, inferred):
        dist.broadcast(tensor, 0)
        dist.all_reduce(tensor)
    dist.all_gather(outputs, sent)
    dist.all_reduce(sent, op=dist._make_nccl_premul_sum(0.5))
    assert turned.requires_grad and turned.grad_fn is None and inferred.is_inference()
    return [each.detach().clone() for each in (turned, weight, inferred, *outputs, sent)]


def test_parameters_and_inference_tensors_receive(ranks2):
    for turned, *others in ranks2.run(where_autograd_looks):
        torch.testing.assert_close(turned, torch.arange(6.0).reshape(2, 3).t())
        assert [each.unique().tolist() for each in others] == [[2.0], [2.0], [1.0], [2.0], [1.5]]


def multiplied(rank, size):
    half = dist._make_nccl_premul_sum(torch.tensor([0.5]))
    made = torch.full((4,), 2.0 * (rank + 1), dtype=torch.float16)
    one, listed, scalar = (torch.zeros(each, dtype=torch.float16) for each in ((2,), (2,), ()))
    scalar += rank
    dist.reduce_scatter_tensor(one, made, op=half)
    dist.reduce_scatter(listed, list(made.chunk(2)), op=half)
    for tensor in (made, scalar):
        dist.all_reduce(tensor, op=half)
    return [each.tolist() for each in (one, listed, made, scalar)]


def test_tensor_as_a_factor_keeps_the_type(ranks2):
    assert ranks2.run(multiplied) == [[[3.0] * 2, [3.0] * 2, [3.0] * 4, 0.5]] * 2


UNUSUAL = [
    torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.complex32, torch.complex128, torch.bool,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, *NEWER,
]  # fmt: skip


def unusual(rank, size):
    found = []
    for dtype in UNUSUAL:
        width = torch.empty((), dtype=dtype).element_size()
        made = (torch.arange(4 * width, dtype=torch.uint8) % 2 + (0 if dtype is torch.bool else rank)).view(dtype)
        outputs = [torch.empty_like(made) for _ in range(size)]
        dist.all_gather(outputs, made)
        taken = made if rank == 0 else torch.empty_like(made)
        dist.broadcast(taken, src=0)
        if rank == 0:
            dist.send(made, 1)
        else:
            dist.recv(received := torch.empty_like(made), 0)
            assert received.view(torch.uint8).tolist() == taken.view(torch.uint8).tolist()
        found.append([each.view(torch.uint8).tolist() for each in (*outputs, taken)])
    return found


def test_unusual_types_are_moved_as_bytes(ranks2):
    ours = ranks2.run(unusual)
    assert ours[0] == ours[1]
    for dtype, (first, second, taken) in zip(UNUSUAL, ours[0], strict=True):
        assert first == taken == [i % 2 for i in range(len(first))], dtype
        assert dtype is torch.bool or second == [1 + i % 2 for i in range(len(second))], dtype


def refused(rank, size):
    said = []
    for call in (
        lambda: dist.all_reduce(torch.ones(2, dtype=torch.int16)),
        lambda: dist.all_reduce(torch.ones(2, dtype=torch.int32), op=dist.ReduceOp.BAND),
        lambda: dist.recv(torch.ones(2)),
        lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3)),
    ):
        try:
            call()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_invalid_arguments_raise_and_are_named(ranks2):
    said = ranks2.run(refused)[0]
    assert len(said) == 4
    assert "int16" in said[0] and "BAND" in said[1] and said[1].startswith("DistBackendError")
    assert "rank" in said[2] and "3" in said[3]
