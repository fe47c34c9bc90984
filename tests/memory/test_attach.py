"""memory.attach, and the functions behind it that allocators of frameworks call without the GIL."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
import types

import numpy as np
import pytest
from leak_check import is_allocated

import ncclpy
import testing
from ncclpy import memory
from ncclpy.memory import registry as allocator


@pytest.fixture
def functions():
    """Return the two functions as a framework finds them: by name, in the library's file."""
    library = ctypes.CDLL(allocator.open_allocator())
    alloc, free = getattr(library, allocator.ALLOC), getattr(library, allocator.FREE)
    alloc.restype, alloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    free.restype, free.argtypes = None, [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    return alloc, free


def test_functions_are_found_by_name(functions):
    assert tuple(ctypes.cast(each, ctypes.c_void_p).value for each in functions) == allocator.addresses()


def test_memory_of_the_functions_is_in_the_registry(comm1, functions, registry, host_engine):
    alloc, free = functions
    pointer = alloc(5000, 0, None)
    assert (pointer, 5000, 0) in registry.segments(0)
    comm1.all_reduce((pointer, 1250, "float32"))
    assert (pointer, 5000, 0) in registry.registered(comm1)
    free(pointer, 5000, 0, None)
    assert registry.segments(0) == []
    assert registry.drain() and not is_allocated(pointer)


def test_too_much_memory_is_null(functions, registry, host_engine):
    alloc, free = functions
    before = registry.counters()
    assert alloc(1 << 50, 0, None) is None
    assert alloc(64, 10_000, None) is None and alloc(64, -1, None) is None
    free(None, 0, 0, None)
    free(12345, 0, 0, None)  # not allocated here
    assert registry.counters() == before


def test_memory_being_freed_makes_room_for_the_next_allocation(functions, registry, host_engine):
    """Free and allocate again at once, as torch does when memory is short."""
    alloc, free = functions
    for _ in range(50):
        pointer = alloc(1 << 20, 0, None)
        free(pointer, 1 << 20, 0, None)
    assert registry.drain()


def test_free_waits_for_its_stream(functions, registry, host_engine):
    alloc, free = functions
    pointer = alloc(1 << 16, 0, None)
    comms = ncclpy.Communicator.init_all(range(2), abortable=True)
    with ncclpy.Stream(0) as stream, ncclpy.Stream(1) as other:
        testing.connect(comms)
        comms[0].all_reduce((pointer, 1000, "int32"), stream=stream)  # waits for the other rank
        behind = alloc(64, 0, None)  # no communicator uses it
        with ncclpy.core.runtime.device.using(0):
            free(behind, 64, 0, stream.handle)
        assert not registry.drain(0.2) and is_allocated(behind)
        second = memory.alloc(4000, 1)
        comms[1].all_reduce(second.buffer("int32"), stream=other)
        stream.synchronize()
        other.synchronize()
        assert registry.drain() and not is_allocated(behind)
    free(pointer, 1 << 16, 0, None)
    del second
    testing.close_all(comms)


def test_functions_run_no_python(host_engine):
    """A thread unknown to Python frees memory while another thread holds the GIL until that is done."""
    testing.run_python(
        """
        import ctypes
        from ncclpy import memory
        from ncclpy.memory import registry as allocator
        _, free = allocator.addresses()
        libc = ctypes.PyDLL(None)  # calls keep the GIL
        libc.pthread_create.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
        libc.pthread_join.argtypes = [ctypes.c_ulong, ctypes.c_void_p]
        for _ in range(20):
            pointer, thread = allocator.take(64, 0), ctypes.c_ulong()
            assert libc.pthread_create(ctypes.byref(thread), None, free, pointer) == 0
            assert libc.pthread_join(thread, None) == 0
        registry = memory.SegmentRegistry.default()
        assert registry.segments() == [] and registry.drain()
        """,
        warm=True,
    )


def test_threads_allocate_at_once(functions, registry, host_engine):
    alloc, free = functions
    done = []

    def churn():
        for _ in range(200):
            pointer = alloc(64, 0, None)
            free(pointer, 64, 0, None)
        done.append(True)

    threads = [threading.Thread(target=churn) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(done) == 4
    assert registry.drain()


def test_functions_do_not_wait_for_a_communicator(functions, registry, host_engine):
    """A thread is in a call of the communicator, waits for its peer, and has the communicator's lock."""
    alloc, free = functions
    comms = ncclpy.Communicator.init_all(range(2), abortable=True)
    testing.connect(comms)
    used = alloc(4000, 0, None)
    thread = threading.Thread(target=lambda: comms[0].all_reduce((used, 1000, "int32")))
    thread.start()

    def beside():
        more = [alloc(64, 0, None) for _ in range(10)]
        for pointer in more:
            free(pointer, 64, 0, None)

    testing.run_with_deadline(beside, 10)
    with ncclpy.group():
        second = memory.alloc(4000, 1)
        comms[1].all_reduce(second.buffer("int32"))
    thread.join(20)
    assert not thread.is_alive()
    free(used, 4000, 0, None)
    del second
    testing.close_all(comms)
    assert registry.drain()


def test_take_and_give(registry, host_engine):
    pointer = allocator.take(100, 1)
    assert registry.segments(1) == [(pointer, 100, 1)]
    allocator.give(pointer, 1)
    assert registry.drain() and registry.segments(1) == []


def test_forked_child_allocates_nothing(host_engine):
    testing.run_python(
        """
        import ctypes, os
        from ncclpy import memory
        from ncclpy.memory import registry as allocator
        library = ctypes.CDLL(allocator.open_allocator())
        alloc, free = library.ncclpy_segment_alloc, library.ncclpy_segment_free
        alloc.restype = ctypes.c_void_p
        alloc.argtypes = [ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
        free.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
        pointer = alloc(64, 0, None)
        child = os.fork()
        if child == 0:
            free(pointer, 64, 0, None)
            os._exit(0 if alloc(64, 0, None) is None else 1)
        assert os.waitpid(child, 0)[1] == 0
        ctypes.memset(pointer, 1, 64)
        free(pointer, 64, 0, None)
        assert memory.SegmentRegistry.default().drain()
        """,
        warm=True,
    )


@pytest.mark.parametrize("framework", ["torch", "cupy", "rmm", "cuda.core"])
def test_host_engine_has_no_allocators_of_gpus(host_engine, framework):
    with pytest.raises(ncclpy.NcclUnsupported, match=f"{framework}'s allocator serves GPU memory"):
        memory.attach(framework)


def test_bad_arguments(host_engine):
    with pytest.raises(ValueError, match=r"'numpy' is none of 'torch', 'cupy', 'rmm', 'cuda\.core'"):
        memory.attach("numpy")
    with pytest.raises(ValueError, match="'cupy''s has none"):
        memory.attach("cupy", hooks=True)
    with pytest.raises(ncclpy.NcclUnsupported, match="host engine"):
        memory.attach("torch", hooks=True)


class Stub:
    """A framework with its current allocator at the end of a list."""

    def __init__(self):
        self.current = ["its own"]

    def source(self):
        outer = self

        class Source:
            resource = "ours"

            def install(self):
                outer.current.append(self.resource)

            def remove(self):
                outer.current.pop()

            def inside(self):
                raise ncclpy.NcclUnsupported("no context")

        return Source()


def test_attached_once(monkeypatch):
    stub = Stub()
    monkeypatch.setattr("ncclpy.memory.attachment.source_of", lambda name, what, device: stub.source())
    attached = memory.attach("cupy")
    assert stub.current == ["its own", "ours"] and attached.resource == "ours" and attached.framework == "cupy"
    with pytest.raises(RuntimeError, match=r"cupy is attached already, by <ncclpy.memory.Attachment of cupy>"):
        memory.attach("cupy")
    attached.close()
    attached.close()
    assert stub.current == ["its own"] and attached.closed and attached.resource is None
    with pytest.raises(ValueError, match="closed"), attached.use():
        pass
    with memory.attach("cupy"):
        assert stub.current == ["its own", "ours"]
    assert stub.current == ["its own"]


class TheirBuffer:
    """A buffer of cuda.core, over numpy's memory."""

    def __init__(self, pointer, size, owner, mr=None):
        self.handle, self.size, self.owner, self.mr, self.closed = pointer, size, owner, mr, []

    @staticmethod
    def from_handle(pointer, size, mr=None, stream=None):
        return TheirBuffer(pointer, size, None, mr)

    def close(self, stream=None):
        self.closed.append(stream)
        if self.mr is not None:
            self.mr.deallocate(self.handle, self.size, stream=stream)


class TheirResource:
    """A memory resource of cuda.core."""

    device_id = 0

    def __init__(self):
        self.made = []

    def allocate(self, size, stream=None):
        memory = np.zeros(size, np.uint8)
        self.made.append(TheirBuffer(memory.ctypes.data, size, memory))
        return self.made[-1]

    def deallocate(self, ptr, size, stream=None):
        raise AssertionError("their buffer does that")


def test_memory_of_another_resource_is_registered(monkeypatch, comms2, registry, host_engine):
    """The memory returns to its resource when no communicator uses it any more; no thread waits for that."""
    core = types.ModuleType("cuda.core")
    core.Buffer, core.MemoryResource = TheirBuffer, type("MemoryResource", (), {})
    cuda = types.ModuleType("cuda")
    cuda.core = core
    monkeypatch.setitem(sys.modules, "cuda", cuda)
    monkeypatch.setitem(sys.modules, "cuda.core", core)
    theirs = TheirResource()
    attached = memory.attach(theirs)
    assert isinstance(attached.resource, core.MemoryResource) and attached.framework == "TheirResource"
    with pytest.raises(RuntimeError, match="attached already"):
        memory.attach(theirs)
    testing.connect(comms2)  # before there is a segment, so that the call that uses it also registers it
    buffer = attached.resource.allocate(4000, stream=None)
    unused = attached.resource.allocate(64, stream=None)
    assert sorted(registry.segments()) == sorted([(buffer.handle, 4000, 0), (unused.handle, 64, 0)])
    unused.close("s")
    first, second = theirs.made
    assert second.closed == ["s"]
    attached.close()
    thread = threading.Thread(target=lambda: comms2[0].all_reduce((buffer.handle, 1000, "float32")))
    thread.start()
    while not registry.registered(comms2[0]):
        time.sleep(0.001)
    buffer.close("t")
    time.sleep(0.1)
    assert first.closed == []
    comms2[1].all_reduce(np.ones(1000, np.float32))
    thread.join(20)
    assert registry.drain() and first.closed == ["t"]


def test_missing_framework_is_named(monkeypatch):
    """As on a machine with GPUs where the package is not installed."""
    monkeypatch.setattr("ncclpy.memory.frameworks.library", lambda: types.SimpleNamespace(engine="cuda"))
    monkeypatch.setattr("ncclpy.core.runtime.device.current", lambda: 0)
    for framework, package in (("torch", "torch"), ("cupy", "cupy"), ("rmm", "rmm"), ("cuda.core", "cuda")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ImportError, match=f"attach: {framework} cannot be imported here"):
            memory.attach(framework)
