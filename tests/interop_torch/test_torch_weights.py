"""Weights sent from a trainer to inference engines: `WeightSender` and `WeightReceiver`."""

from __future__ import annotations

import threading

import pytest
import torch
from group_ranks import DEADLINE, run_groups

import ncclpy
import testing
from ncclpy.bootstrap import LocalStore
from ncclpy.interop.torch import WeightReceiver, WeightSender

SENDER = 1


def on_device(tensor, group):
    return tensor if ncclpy.library().engine == "host" else tensor.to(f"cuda:{group.device}")


def weights_of(group, value=1.0):
    """Return weights of many types and shapes, which begin and end within buckets of 256 bytes."""
    generator = torch.Generator().manual_seed(int(value))
    made = {
        "float32": torch.randn(7, 11, generator=generator),
        "bfloat16": torch.randn(129, generator=generator).bfloat16(),
        "float8": torch.randn(3, 5, generator=generator).to(torch.float8_e4m3fn),
        "complex": torch.randn(5, dtype=torch.complex64, generator=generator),
        "bool": torch.rand(33, generator=generator) > 0.5,
        "int64, not contiguous": torch.arange(300).view(20, 15).t() * int(value),
        "scalar": torch.tensor(value, dtype=torch.float64),
        "empty": torch.empty(0, 4),
    }
    return {name: on_device(tensor, group) for name, tensor in made.items()}


def assert_equal(found, wanted):
    assert list(found) == list(wanted)
    for name, tensor in found.items():
        assert (tensor.dtype, tensor.shape) == (wanted[name].dtype, wanted[name].shape), name
        assert torch.equal(
            tensor.contiguous().view(-1).view(torch.uint8), wanted[name].contiguous().view(-1).view(torch.uint8)
        ), name


def member_of(group, **options):
    return WeightSender(group, bucket_bytes=256, **options) if group.rank == SENDER else WeightReceiver(group)


def test_weights_of_all_types_arrive():
    def body(group):
        member = member_of(group)
        for version in (1, 2):
            if group.rank == SENDER:
                assert member.send(weights_of(group, version), version) == (0, 2)
            else:
                found = member.receive()
                assert found.version == member.version == version
                assert_equal(found.tensors, weights_of(group, version))

    run_groups(3, body)


def test_tensors_of_the_engine_receive_weights():
    def body(group):
        member = member_of(group)
        if group.rank == SENDER:
            return member.send(weights_of(group, 5.0), 7)
        into = {name: torch.zeros_like(each) for name, each in weights_of(group).items()}
        into["float32"] = on_device(torch.zeros(11, 7), group).t()
        addresses = {name: each.data_ptr() for name, each in into.items()}
        found = member.receive(dict(reversed(into.items())))
        assert found.version == 7 and found.tensors["float32"] is into["float32"]
        assert_equal(into, weights_of(group, 5.0))
        assert {name: each.data_ptr() for name, each in into.items()} == addresses
        return ()

    assert run_groups(2, body)[SENDER] == (0,)


def test_layout_is_sent_only_when_it_changes():
    def body(group):
        member, counts, weight = member_of(group), [], on_device(torch.ones(4), group)
        for weights in ({"a": weight}, {"a": 2 * weight}, {"b": weight}, {"b": weight}):
            before = group.seq
            if group.rank == SENDER:
                member.send(weights, 1)
            else:
                assert_equal(member.receive().tensors, weights)
            counts.append(group.seq - before)
        return counts

    # Two exchanges, the bucket and the barrier; and the layout.
    assert run_groups(2, body) == [[5, 4, 5, 4]] * 2


def test_weights_are_quantised_on_the_way():
    calls = []

    def quantize(name, tensor):
        calls.append(name)
        if name == "bias":
            return tensor
        scale = tensor.abs().amax()
        return {name: (tensor / scale * 127).round().to(torch.int8), f"{name}.scale": scale}

    def body(group):
        weights = {"weight": on_device(torch.linspace(-2, 2, 400), group), "bias": on_device(torch.ones(3), group)}
        member = member_of(group, **({"quantize": quantize} if group.rank == SENDER else {}))
        for version in (1, 2):
            if group.rank == SENDER:
                member.send(weights, version)
                continue
            found = member.receive().tensors
            assert list(found) == ["weight", "weight.scale", "bias"]
            assert found["weight"].dtype == torch.int8 and found["weight.scale"].item() == 2.0
            torch.testing.assert_close(found["weight"].float() / 127 * 2, weights["weight"], atol=0.01, rtol=0)

    run_groups(2, body)
    assert calls == ["weight", "bias"] * 3  # once more before the first transfer, for the types


@pytest.mark.parametrize(
    ("into", "said"),
    [
        ({}, "rank 2: into: the sender has 'w', this rank has not"),
        ({"w": (4,), "x": (1,)}, "rank 2: into: this rank has 'x', the sender has not"),
        (
            {"w": (2, 2)},
            r"rank 2: into: 'w' is torch.float32 of shape \(2, 2\), the sender's is torch.float32 of shape \(4,\)",
        ),
    ],
)
def test_weights_that_a_receiver_cannot_take_are_refused_on_all_ranks(into, said):
    def body(group):
        member, weight = member_of(group), on_device(torch.ones(4), group)
        own = {name: on_device(torch.zeros(shape), group) for name, shape in into.items()} if group.rank == 2 else None
        with pytest.raises(ValueError, match=said):
            member.send({"w": weight}, 1) if group.rank == SENDER else member.receive(own)
        if group.rank != SENDER:
            assert member.version is None
            return member.receive().tensors["w"].tolist()
        return member.send({"w": weight}, 1)  # the group works

    assert run_groups(3, body) == [[1.0] * 4, (0, 2), [1.0] * 4]


def test_two_senders_are_refused_on_all_ranks():
    def body(group):
        member = WeightReceiver(group) if group.rank == 0 else WeightSender(group)
        with pytest.raises(ValueError, match="ranks 1, 2 of process group 'default' all send weights"):
            member.receive() if group.rank == 0 else member.send({}, 1)

    run_groups(3, body)


def test_receivers_without_a_sender_stop_at_the_deadline_of_the_first():
    def body(group):
        with pytest.raises(ncclpy.NcclTimeout, match="no rank of process group 'default' has sent weights"):
            WeightReceiver(group).receive(timeout=0.3 if group.rank == 0 else None)

    run_groups(2, body)


@pytest.mark.parametrize("call", ["send", "receive", "bucket_bytes"])
def test_invalid_arguments_are_refused(call):
    def body(group):
        with pytest.raises(
            ValueError, match="version: expected at least 1, got 0" if call == "send" else "expected at least 1"
        ):
            if call == "bucket_bytes":
                WeightSender(group, bucket_bytes=0)
            WeightSender(group).send({}, 0)

    run_groups(1, body)


def test_error_of_the_sender_in_the_middle_is_raised_on_all_ranks():
    def quantize(name, tensor):
        if tensor[0] == 2.0:
            raise ArithmeticError("no scale")
        return tensor

    def body(group):
        if group.rank == SENDER:
            sender = WeightSender(group, quantize=lambda name, tensor: tensor, bucket_bytes=256)
            sender.send({"w": on_device(torch.ones(400), group)}, 1)
            sender._quantize = quantize
            with pytest.raises(ArithmeticError):
                sender.send({"w": on_device(torch.full((400,), 2.0), group)}, 2)
            return None
        member = WeightReceiver(group)
        first = member.receive().tensors["w"]
        with pytest.raises(ncclpy.NcclAborted, match="rank 1 could not send weights: ArithmeticError: no scale"):
            member.receive()
        assert member.version == 1 and first.tolist() == [1.0] * 400
        with pytest.raises(ncclpy.NcclAborted):
            member.receive({"w": first})
        return member.version

    assert run_groups(2, body)[0] == 1


def test_receiver_that_joins_takes_part_in_the_next_transfer():
    store, versions, asked = LocalStore(), {}, threading.Event()

    def newcomer():
        member = WeightReceiver.join(store, device=2, timeout=DEADLINE / 2)
        for _ in range(2):
            found = member.receive()
            versions[found.version] = found.tensors["w"].tolist()
        member.group.close(DEADLINE / 4)

    def body(group):
        member = member_of(group)
        version = 0
        while group.size == 2 or version < last[0]:
            version += 1
            if version == 2 and group.rank == 0:
                thread.start()
            if group.rank == SENDER:
                member.send({"w": on_device(torch.full((300,), float(version)), group)}, version)
            else:
                assert member.receive().version == version
            if group.size == 3 and not asked.is_set():
                last[0] = version + 1
                asked.set()
        return version

    testing.need_devices(3)
    last, thread = [0], threading.Thread(target=newcomer)
    done = run_groups(2, body, store=store)
    thread.join(DEADLINE)
    assert done[0] == done[1] == last[0] and versions == {each: [float(each)] * 300 for each in (last[0] - 1, last[0])}


def test_others_receive_again_without_a_rank_that_dies_in_the_middle():
    def body(group):
        if group.rank == SENDER:
            sender = WeightSender(group, bucket_bytes=256)
            sender.send({"w": on_device(torch.ones(2000), group)}, 1)
            with pytest.raises(ncclpy.NcclError) as caught:
                sender.send({"w": on_device(torch.full((2000,), 2.0), group)}, 2)
            assert "engine is gone" in str(caught.value)
            group.recover(2)
            return sender.send({"w": on_device(torch.full((2000,), 2.0), group)}, 2)
        member = WeightReceiver(group)
        into = {"w": on_device(torch.zeros(2000), group)}
        assert member.receive(into).version == 1
        if group.rank == 2:
            buckets = member._member.broadcast_buckets
            member._member.broadcast_buckets = lambda *args: group.abort("the engine is gone") or buckets(*args)
            with pytest.raises(ncclpy.NcclAborted):
                member.receive(into)
            return None
        with pytest.raises(ncclpy.NcclError):
            member.receive(into)
        assert member.version is None  # `into` may have values of both
        group.recover(2)
        assert member.receive(into).version == member.version == 2
        return into["w"].tolist()

    assert run_groups(3, body) == [[2.0] * 2000, (0,), None]


def test_sender_is_replaced():
    store = LocalStore()

    def successor():
        sender = WeightSender.join(store, device=1, timeout=DEADLINE / 2)
        sent.append(sender.send({"w": on_device(torch.full((3,), 9.0), sender.group)}, 9))
        sender.group.close(DEADLINE / 4)

    def body(group):
        if group.rank == SENDER:
            group.abort("the trainer is gone")
            return None
        member = WeightReceiver(group)
        with pytest.raises(ncclpy.NcclError):
            member.receive()
        group.recover(2)
        if group.rank == 0:
            thread.start()
        return member.receive(timeout=DEADLINE / 2).tensors["w"].tolist()

    testing.need_devices(3)
    sent, thread = [], threading.Thread(target=successor)
    assert run_groups(3, body, store=store) == [[9.0] * 3, None, [9.0] * 3]
    thread.join(DEADLINE)
    assert sent == [(0, 1)]
