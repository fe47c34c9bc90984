"""Behaviour of the torch backend on GPUs, as far as stand-ins show it; test_torch_gpu.py has tests on real GPUs."""

from __future__ import annotations

import contextlib
import types

import pytest
import torch
import torch.distributed as dist
from torch_ranks import Group, error_of

from ncclpy.interop.torch import registration as torch_registration
from ncclpy.interop.torch.backend import TorchBackend
from ncclpy.interop.torch.registration import _gpu
from ncclpy.interop.torch.tensors import bring
from ncclpy.interop.torch.work import TorchWork, _stream_of

CPU = torch.device("cpu")


class Stream:
    """A stream of a GPU that notes what is enqueued on it, and is its own event."""

    cuda_stream, is_done = 0, False

    def __init__(self, device=0):
        self.device, self.enqueued = device, []

    def record_event(self):
        self.enqueued.append("event")
        return self

    def wait_event(self, event):
        self.enqueued.append(("wait", event))

    def query(self):
        return self.is_done


class Begun:
    """An operation on a GPU that is done."""

    device, state = 0, "completed"

    def is_completed(self):
        return True

    def wait(self, seconds):
        pass

    def synchronize(self, stream):
        pass


@pytest.fixture
def streams(monkeypatch):
    """Make torch use streams that note what is enqueued; the last of the list is current."""
    made = [Stream()]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made[-1])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: id(made[-1]), raising=False)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)

    @contextlib.contextmanager
    def current(stream):
        made.append(stream)
        yield
        made.pop()

    monkeypatch.setattr(torch.cuda, "stream", current)
    _stream_of.cache_clear()
    yield made
    _stream_of.cache_clear()


def test_streams_of_a_gpu_wait_for_copies_after_an_operation(streams):
    seen = []
    work = TorchWork(Begun(), [], (lambda: streams[-1].enqueued.append("copy"),), False, Group())
    work.when_done(lambda tensors, error: seen.append(streams[-1]))
    copied = seen[0]
    assert copied.enqueued[:2] == ["copy", "event"]
    assert not work.is_completed()  # the copy is only enqueued
    for wait in (lambda: work.wait(1.0), work.wait, work.synchronize):
        streams.append(Stream())
        wait()
        assert streams.pop().enqueued == [("wait", copied)]
    copied.is_done = True
    assert work.is_completed() and work.is_success()


def test_futures_of_a_gpu_share_a_stream(streams):
    seen = []
    for _ in range(3):
        TorchWork(Begun(), [], (), False, Group()).when_done(lambda tensors, error: seen.append(streams[-1]))
    assert seen[0] is seen[1] is seen[2] and seen[0] is not streams[0]
    TorchWork(Begun(), [], (), False, Group(), source=1).when_done(lambda tensors, error: seen.append(streams[-1]))
    assert seen[3] not in seen[:3], "what comes from a rank may come late"


def test_copy_on_a_gpu_records_its_stream(streams):
    class Made:
        is_cuda, is_sparse, device = True, False, 0

        def record_stream(self, stream):
            self.stream = stream

    made, place = Made(), torch.zeros(2)
    with pytest.raises(TypeError, match="Made"):
        bring(made, place)  # torch does not know the class
    assert made.stream is streams[-1]


def as_on_gpus(made):
    """Return a backend that makes its group at the first operation, and a list of the devices for which it is made."""
    devices = []

    def make(device):
        devices.append(device)
        return made

    return TorchBackend(0, 1, make, True, 1.0, None, None), devices


def test_barrier_makes_the_group_on_the_named_device(extension, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    for how, expected in (("device", 3), ("device_ids", 2), ("bound", 1), ("both", 3)):
        backend, devices = as_on_gpus(Group())
        group = extension(0, 1, lambda backend=backend: backend)
        options = dist.BarrierOptions()
        if how in ("device", "both"):
            options.device = torch.device("cuda", 3)
        if how == "device_ids":
            options.device_ids = [2]
        if how in ("bound", "both"):
            world = dist.ProcessGroup(dist.HashStore(), 0, 1)
            world.bound_device_id = torch.device("cuda", 1)
            world._register_backend(CPU, dist.ProcessGroup.BackendType.CUSTOM, group)
        assert group._get_sequence_number_for_group() == 0 and devices == [], "a question makes no group"
        group.barrier(options)
        assert devices == [torch.device("cuda", expected)], how
        assert group._get_sequence_number_for_group() == 3


@pytest.mark.parametrize(
    ("current", "local", "expected"), [(0, None, 1), (0, "0", 0), (0, "2", 0), (1, "0", 1)], ids=str
)
def test_barrier_without_a_device_chooses_the_gpu_of_the_rank(monkeypatch, current, local, expected):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_RANK", local)
    assert _gpu(5) == expected
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: int(device == 0))
    assert _gpu(5) == current, "where its tensors are"


class FirstDevice(Exception):
    """The device for which a group is made."""


class OnGpu:
    """A tensor of GPU 1, with what an operation reads of it before the group is made."""

    device, dtype, is_sparse = torch.device("cuda", 1), torch.float32, False

    def numel(self):
        return 4


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("broadcast", [["t"], 0]),
        ("allreduce", [["t"], 0]),
        ("reduce", [["t"], 0, 0]),
        ("allgather", [[["t"]], ["t"]]),
        ("all_gather_single", ["t", "t"]),
        ("gather", [[["t"]], ["t"], 0]),
        ("scatter", [["t"], [["t"]], 0]),
        ("reduce_scatter", [["t"], [["t"]], 0]),
        ("reduce_scatter_single", ["t", "t", 0]),
        ("all_to_all_single", ["t", "t", [], []]),
        ("alltoall", [["t"], ["t"]]),
        ("send", [["t"], 0]),
        ("recv", [["t"], 0]),
        ("allreduce_coalesced", [["t"], 0]),
        ("allgather_coalesced", [[["t"]], ["t"]]),
        ("all_gather_single_coalesced", [["t"], ["t"]]),
        ("reduce_scatter_single_coalesced", [["t"], ["t"], 0]),
    ],
)
@pytest.mark.parametrize("together", [False, True])
def test_first_tensor_decides_on_which_gpu_the_group_is(name, arguments, together):
    """Torch's current device, which may be another one, does not decide."""

    def make(device):
        raise FirstDevice(device)

    def placed(argument):
        if isinstance(argument, list):
            return [placed(each) for each in argument]
        return OnGpu() if argument == "t" else argument

    backend = TorchBackend(0, 1, make, True, 1.0, None, None)
    if together:
        backend.start_coalescing()
    with pytest.raises(FirstDevice) as found:
        getattr(backend, name)(*placed(arguments), None)
    assert found.value.args == (torch.device("cuda", 1),)


@pytest.mark.parametrize("end", ["abort", "shutdown"])
def test_group_that_has_ended_before_its_first_use_is_not_made(end):
    backend, devices = as_on_gpus(Group())
    getattr(backend, end)()
    assert "has ended" in error_of(lambda: backend.barrier(None)) and devices == []


def test_profiler_waits_for_no_gpu(extension):
    """A GPU operation's range ends with the call: a wait for more would become part of a graph that is captured."""

    class OnGpuWork:
        def future_devices(self):
            return [torch.device("cuda", 0)]

        def when_done(self, tell):
            raise AssertionError("it is not to be asked")

    class Backend:
        def allreduce(self, tensors, op, timeout):
            return OnGpuWork()

    group = extension(0, 1, Backend)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        work = group.allreduce([torch.ones(2)], dist.AllreduceOptions())
    assert [event.name for event in profile.events() if event.name.startswith("ncclpy:")] == ["ncclpy:all_reduce"]
    del work


def test_group_unused_by_some_ranks_matches_when_it_is_made_again(monkeypatch):
    """On GPUs the first operation makes the group; how often it was made is counted when torch makes it."""
    monkeypatch.setattr(torch_registration.library, "library", lambda: types.SimpleNamespace(engine="cuda"))
    monkeypatch.setattr(torch_registration, "wrapped", lambda rank, size, make: make())
    store = dist.HashStore()
    for number in (1, 2):
        for rank in range(2):
            made = torch_registration._make_backend(store, rank, [0, 1], 1.0, "0", {})
            made.store.set(f"{rank}", f"{number}")
        assert store.get(f"ncclpy/{number}/0") == store.get(f"ncclpy/{number}/1") == str(number).encode()
