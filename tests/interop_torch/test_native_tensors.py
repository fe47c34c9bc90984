"""Tensors that the extension reads itself: for every tensor, results and errors are those of the other readers."""

from __future__ import annotations

import sys
import warnings

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch_ranks import Ranks

import ncclpy
from ncclpy.core.arguments.datatypes import read_by
from ncclpy.interop.torch import build as torch_build
from ncclpy.interop.torch import extension as torch_extension
from ncclpy.interop.torch import read_tensors_natively

KINDS = [torch.Tensor, torch.nn.Parameter]
DTYPES = [
    *("int8 uint8 int32 uint32 int64 uint64 float16 float32 float64 bfloat16 float8_e4m3fn float8_e5m2".split()),
    *("bool complex32 complex64 complex128 int16 uint16 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu".split()),
]


class Asked(TorchFunctionMode):
    """Note which methods of torch are called: the other readers ask each tensor whether it is a lazy view."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


def is_read_natively(tensor):
    """Read a tensor; return whether that called no method of the tensor."""
    with Asked() as asked:
        ncclpy.Buffer.of(tensor)
    return asked.names == []


def outcome(tensor):
    """Return everything that shows how a tensor was read, or the error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # older releases warn once of a fake tensor's address
            buffer = ncclpy.Buffer.of(tensor)
    except Exception as error:
        return type(error), str(error)
    try:
        dtype = torch.from_dlpack(buffer).dtype  # what NCCL's type stands for
    except Exception as error:
        dtype = type(error), str(error)
    return buffer.pointer, buffer.count, buffer.dtype, buffer.nbytes, buffer.device, dtype


@pytest.fixture
def native(extension, host_engine):
    """Make the extension read tensors; return a function that calls another without it."""
    read_tensors_natively()
    reader = sys.modules["ncclpy_torch_backend"].tensor_reader()

    def otherwise(call):
        read_by(KINDS, None)
        try:
            return call()
        finally:
            read_by(KINDS, reader)

    yield otherwise
    read_by(KINDS, reader)


def with_dtype(dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of complex32
        return torch.zeros(3, dtype=getattr(torch, dtype))


PLAIN = {
    "no dimension": lambda: torch.tensor(3.0),
    "three dimensions": lambda: torch.zeros(2, 3, 4),
    "no element": lambda: torch.zeros(0),
    "no element, strided": lambda: torch.zeros(0, 3).t(),
    "a view": lambda: torch.zeros(10)[3:7],
    "one row": lambda: torch.zeros(4, 3)[2],
    "one element of many": lambda: torch.zeros(4, 3)[:1, :1],
    "odd strides of one": lambda: torch.zeros(200).as_strided((1, 3), (100, 1)),
    "requires grad": lambda: torch.zeros(3, requires_grad=True),
    "of a graph": lambda: torch.zeros(3, requires_grad=True) * 2,
    "detached": lambda: torch.zeros(3, requires_grad=True).detach(),
    "a parameter": lambda: torch.nn.Parameter(torch.zeros(2, 3)),
    "a parameter of integers": lambda: torch.nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False),
    "shared": lambda: torch.zeros(3).share_memory_(),
    "inference": lambda: _in_inference(),
    "numpy's": lambda: torch.from_numpy(np.zeros(3)),
    "resolved": lambda: torch.zeros(3, dtype=torch.complex64).conj().resolve_conj(),
    "a real part": lambda: torch.zeros(1, dtype=torch.complex64).real,
    "copied when written": lambda: torch._lazy_clone(torch.zeros(3)),
}


def _in_inference():
    with torch.inference_mode():
        return torch.zeros(3)


def _without_storage():
    tensor = torch.zeros(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def _quantized():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8)


def _nested(**options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], **options)


def _fake():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.zeros(3)


class Derived(torch.Tensor):
    """A subclass as users write it."""


class Wrapper(torch.Tensor):
    """A tensor without memory, as are wrappers of __torch_dispatch__."""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (3,))

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError


def _csr():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.eye(3).to_sparse_csr()


def _named():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.zeros(3, names=("n",))


ODD = {
    "negative": lambda: torch._neg_view(torch.zeros(3)),
    "imaginary": lambda: torch.zeros(1, dtype=torch.complex64).conj().imag,
    "conjugate": lambda: torch.zeros(3, dtype=torch.complex64).conj(),
    "conjugate of none": lambda: torch.zeros(0, dtype=torch.complex64).conj(),
    "every second": lambda: torch.zeros(8)[::2],
    "transposed": lambda: torch.zeros(2, 3).t(),
    "expanded": lambda: torch.zeros(1).expand(4),
    "channels last": lambda: torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "csr": _csr,
    "nested": _nested,
    "jagged": lambda: _nested(layout=torch.jagged),
    "quantized": _quantized,
    "mkldnn": lambda: torch.zeros(3).to_mkldnn(),
    "meta": lambda: torch.zeros(3, device="meta"),
    "fake": _fake,
    "zeros without memory": lambda: torch._efficientzerotensor(3),
    "storage taken away": _without_storage,
    "names": _named,
    "derived": lambda: torch.zeros(3).as_subclass(Derived),
    "a derived parameter": lambda: torch.nn.Parameter(torch.zeros(3).as_subclass(Derived)),
    "a wrapper": Wrapper,
    "not made yet": torch.nn.UninitializedParameter,
    "uint1": lambda: torch.empty(4, dtype=torch.uint1),
    "int4": lambda: torch.empty(4, dtype=torch.int4),
    "bits16": lambda: torch.empty(4, dtype=torch.bits16),
    "two in a byte": lambda: torch.empty(4, dtype=torch.float4_e2m1fn_x2),
}


@pytest.mark.parametrize("what", [*PLAIN, *DTYPES])
def test_plain_tensors_are_read_natively(native, what):
    if what in DTYPES and not hasattr(torch, what):
        pytest.skip(f"this torch has no {what}")
    tensor = PLAIN[what]() if what in PLAIN else with_dtype(what)
    found = outcome(tensor)
    assert isinstance(found[0], int), found
    # DLPack has these types about since torch has its exchange API.
    known = not what.startswith("float8") or hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
    assert is_read_natively(tensor) == known
    assert found == native(lambda: outcome(tensor))
    assert not native(lambda: is_read_natively(tensor))


@pytest.mark.parametrize("what", ODD)
def test_other_tensors_are_read_or_refused_as_by_other_readers(native, what):
    try:
        tensor = ODD[what]()
    except (RuntimeError, AttributeError, TypeError) as error:
        pytest.skip(f"this torch has none: {error}")
    assert outcome(tensor) == native(lambda: outcome(tensor))
    if outcome(tensor)[0] is not int:
        assert outcome(torch.zeros(3))[1] == 3  # no error is left behind


TRANSFORMS = {
    "vmap": lambda call: torch.vmap(call)(torch.zeros(2, 4)),
    "grad": lambda call: torch.func.grad(lambda x: call(x).sum())(torch.zeros(4)),
    "jvp": lambda call: torch.func.jvp(call, (torch.zeros(4),), (torch.ones(4),)),
    "functionalize": lambda call: torch.func.functionalize(call)(torch.zeros(4)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_wrappers_of_torch_func_are_refused_as_by_other_readers(native, transform):
    def seen():
        found = []
        TRANSFORMS[transform](lambda tensor: (found.append(outcome(tensor)), tensor)[1])
        return found

    assert len(seen()) == 1
    assert seen() == native(seen)


def test_tensor_is_read_as_it_is_now(native):
    tensor = torch.zeros(4)
    other = torch.ones(3, 2, dtype=torch.float64)
    assert ncclpy.Buffer.of(tensor).count == 4
    for change in (
        lambda: tensor.resize_(5000),
        lambda: tensor.set_(torch.arange(8.0).untyped_storage(), 2, (2, 3)),
        lambda: tensor.t_(),
        lambda: tensor.t_(),
        lambda: setattr(tensor, "data", other.float()),
        lambda: setattr(tensor, "data", other),
        lambda: tensor.untyped_storage().resize_(0),
        lambda: tensor.untyped_storage().resize_(48),
        lambda: tensor.resize_(0),
        lambda: tensor.requires_grad_(),
    ):
        change()
        assert outcome(tensor) == native(lambda: outcome(tensor)), tensor


def test_memory_that_is_copied_when_written_is_copied(native, comm1):
    first = torch.arange(4.0)
    second = torch._lazy_clone(first)
    assert is_read_natively(second)
    assert ncclpy.Buffer.of(second).pointer != ncclpy.Buffer.of(first).pointer
    comm1.all_reduce(torch.ones(4), second)
    assert (first.tolist(), second.tolist()) == ([0, 1, 2, 3], [1, 1, 1, 1])


def test_calls_and_groups(native, comms2):
    sums = [torch.full((4,), 1.0 + rank) for rank in range(2)]
    weights = [torch.nn.Parameter(torch.full((3,), 2.0 + rank)) for rank in range(2)]
    with ncclpy.group(), Asked() as asked:
        for comm, each, weight in zip(comms2, sums, weights, strict=True):
            comm.all_reduce(each)
            comm.broadcast(weight, root=1)
    assert asked.names == []
    assert [each.tolist() for each in sums] == [[3.0] * 4] * 2
    assert [each.tolist() for each in weights] == [[3.0] * 3] * 2
    with pytest.raises(TypeError, match="send: NCCL cannot reduce int16"):
        comms2[0].all_reduce(torch.zeros(3, dtype=torch.int16))
    with pytest.raises(ValueError, match="recv"):
        comms2[0].all_reduce(torch.zeros(3), torch.zeros(4))


def reads_natively(rank, size):
    return is_read_natively(torch.zeros(3)), is_read_natively(torch.nn.Parameter(torch.zeros(3)))


def test_backend_of_torch_distributed_enables_native_reading(extension, host_engine):
    one = Ranks(1)
    try:
        assert one.run(reads_natively, backend=None) == [(False, False)]
        assert one.run(reads_natively) == [(True, True)]
    finally:
        one.close()


def test_reading_natively_twice_changes_nothing(native):
    read_tensors_natively()
    assert is_read_natively(torch.zeros(3))


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    words = r"read_tensors_natively\(\) builds .* no C\+\+ compiler: .* leave the call out"
    with pytest.raises(RuntimeError, match=words):
        torch_build.built(torch, torch_extension._READER)


@pytest.mark.gpu
def test_memory_of_gpus(extension):
    read_tensors_natively()
    reader = sys.modules["ncclpy_torch_backend"].tensor_reader()
    tensors = [torch.zeros(3, device=device) for device in range(torch.cuda.device_count())]
    tensors += [torch.zeros(3, dtype=torch.bfloat16, device="cuda")[1:], torch.zeros(3).pin_memory()]
    found = [outcome(tensor) for tensor in tensors]
    assert all(is_read_natively(tensor) for tensor in tensors)
    assert [each[4] for each in found] == [*range(torch.cuda.device_count()), 0, None]
    try:
        read_by(KINDS, None)
        assert found == [outcome(tensor) for tensor in tensors]
    finally:
        read_by(KINDS, reader)
