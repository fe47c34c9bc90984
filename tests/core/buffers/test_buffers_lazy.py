"""Tensors that do not hold their values in their memory, or have none: every reader refuses them by argument."""

from __future__ import annotations

import fake_torch
import numpy as np
import pytest
from buffer_checks import quickly, rejects

import ncclpy


class DLPackTensor:
    """An object with DLPack's methods that can be lazily negated or conjugated, as torch's tensors can."""

    def __init__(self, array, *, negative=False, conjugate=False):
        self.array, self.negative, self.conjugate = array, negative, conjugate

    def is_neg(self):
        return self.negative

    def is_conj(self):
        return self.conjugate

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("kind", [*fake_torch.KINDS, DLPackTensor])
@pytest.mark.parametrize("dtype", [np.float32, np.complex64, np.int32])
def test_lazy_tensors_are_refused(host_engine, comm, kind, dtype):
    good = np.zeros(3, dtype)
    with rejects("send", "negative", ".resolve_neg()", kind=ValueError):
        quickly(comm.all_reduce, kind(np.ones(3, dtype), negative=True), good)
    with rejects("recv", "negative", ".resolve_neg()", kind=ValueError):
        quickly(comm.broadcast, good, kind(np.ones(3, dtype), negative=True), root=1)
    if dtype is np.complex64:
        with rejects("send", "conjugate", ".resolve_conj()", kind=ValueError):
            quickly(comm.all_reduce, kind(np.ones(3, dtype), conjugate=True), good)


@pytest.mark.parametrize("kind", [*fake_torch.KINDS, DLPackTensor])
def test_plain_tensors_are_read(host_engine, kind):
    array = np.zeros((2, 3), np.complex64)
    buffer = ncclpy.Buffer.of(kind(array))
    assert (buffer.pointer, buffer.count, buffer.nbytes) == (array.ctypes.data, 12, 48)


BROKEN = {
    "meta": ({"device": "meta"}, "meta"),
    "sparse": ({"layout": "torch.sparse_coo"}, "sparse_coo"),
    "csr": ({"layout": "torch.sparse_csr"}, "sparse_csr"),
    "nested": ({"is_nested": True}, "nested"),
    "quantized": ({"is_quantized": True}, "quantized"),
}


@pytest.mark.parametrize("kind", fake_torch.KINDS)
@pytest.mark.parametrize("what", BROKEN)
def test_tensors_without_plain_memory(host_engine, comm, kind, what):
    flags, word = BROKEN[what]
    if kind is fake_torch.ExchangeTensor:
        flags = flags | {"refuses": True}
    with rejects("send", word):
        quickly(comm.all_reduce, kind(np.zeros(4, np.float32), **flags))
    with rejects("recv", word):
        quickly(comm.all_reduce, np.zeros(4, np.float32), kind(np.zeros(4, np.float32), **flags))


@pytest.mark.parametrize("kind", fake_torch.KINDS)
def test_tensor_without_address_is_refused(host_engine, comm, kind):
    class Wrapper(kind):
        refuses = True

        def data_ptr(self):
            raise RuntimeError("Cannot access data pointer of Tensor that doesn't have storage\nraised from …")

    Wrapper.__module__ = "torch"
    with rejects("send", "Cannot access data pointer", kind=TypeError) as caught:
        quickly(comm.all_reduce, Wrapper(np.zeros(4, np.float32)))
    assert "raised from" not in str(caught.value)


def test_fake_tensor_is_not_passed_to_nccl_as_null(host_engine, comm):
    fake = fake_torch.ExchangeTensor(np.zeros(4, np.float32), fake=True)
    with rejects("send", "NULL pointer", "4 elements", kind=ValueError):
        quickly(comm.all_reduce, fake)


def test_tensor_refused_only_by_c_function_is_read_by_attributes(host_engine):
    array = np.zeros(4, np.uint16)
    buffer = ncclpy.Buffer.of(fake_torch.ExchangeTensor(array, dtype="bits16", refuses=True))
    assert (buffer.pointer, buffer.nbytes) == (array.ctypes.data, 8)


def test_is_neg_attribute_that_is_not_a_method_is_ignored(host_engine):
    class Other(DLPackTensor):
        is_neg = is_conj = True

    assert ncclpy.Buffer.of(Other(np.zeros(3, np.float32))).count == 3


# The same tests with torch itself.


def test_torch_lazy_negation(torch, comm):
    # The imaginary part of a conjugate only flips the sign bit lazily: -2 lies in memory as 2.
    lazy = torch.tensor([1 + 2j]).conj().imag
    assert lazy.is_neg() and lazy.is_contiguous() and lazy.item() == -2
    for tensor in (lazy, torch._neg_view(torch.arange(4.0))):
        with rejects("send", "negative", "tensor.resolve_neg()", kind=ValueError):
            quickly(comm.all_reduce, tensor)
        with rejects("buf", "tensor.resolve_neg()", kind=ValueError):
            quickly(comm.recv, tensor, 1)
    assert ncclpy.Buffer.of(lazy.resolve_neg()).count == 1


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, about experimental or deprecated kinds
def test_torch_tensors_without_plain_memory(torch, comm):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.zeros(4)
    tensors = {
        "meta": torch.zeros(4, device="meta"),
        "sparse_coo": torch.zeros(4).to_sparse(),
        "sparse_csr": torch.zeros(4, 4).to_sparse_csr(),
        "nested": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        "quantized": torch.quantize_per_tensor(torch.zeros(4), 1.0, 0, torch.qint8),
        "NULL pointer": fake,
    }
    for word, tensor in tensors.items():
        with rejects("send", word):
            quickly(comm.all_reduce, tensor)
        with rejects("recv", word):
            quickly(comm.broadcast, torch.zeros(4), tensor, root=1)


def test_torch_wrapper_of_functorch(torch, comm):
    def call(tensor):
        with rejects("send", "no memory of its own", kind=TypeError):
            comm.all_reduce(tensor)
        return tensor

    torch.vmap(call)(torch.zeros(2, 4))
