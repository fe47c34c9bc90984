"""Refusals and reprs in words for people: pickling, closed communicators, arguments out of range."""

from __future__ import annotations

import copy
import inspect
import pickle
import re

import numpy as np
import pytest

import ncclpy
import testing
from ncclpy import errors


def objects(comm):
    """Yield an object of each kind that belongs to this process, and the advice in its error."""
    part = np.zeros(4, np.float32)
    with ncclpy.Manager() as manager:
        yield comm, r"pass bytes\(unique_id\)"
        yield comm.register(part), r"Communicator.register\(\)"
        yield comm.pre_mul_sum(2, "float32"), r"Communicator.pre_mul_sum\(\)"
        yield ncclpy.group(), "open a new one"
        yield ncclpy.Plan(), "record it in the process"
        yield ncclpy.Buffer(4096, 4, "float32"), "pass the array"
        yield ncclpy.Stream(0), "make one where it is used"
        yield ncclpy.Event(0), "make one where it is used"
        yield manager, "make one in each process"
        work = manager.all_reduce("k", part, device=0, num_local=1)
        yield work, "pass its result"
        work.wait(20)


@pytest.mark.parametrize("call", [pickle.dumps, copy.copy, copy.deepcopy])
def test_objects_of_this_process_are_not_pickled_or_copied(comm1, host_engine, call):
    seen = set()
    for thing, advice in objects(comm1):
        name = "group" if isinstance(thing, ncclpy.group) else type(thing).__name__
        with pytest.raises(TypeError, match=rf"^ncclpy\.{name} cannot be pickled or copied: .*; .*{advice}"):
            call(thing)
        seen.add(name)
    assert len(seen) == 10


@pytest.mark.parametrize("call", [pickle.dumps, copy.copy])
def test_window_is_not_pickled(comm1, host_engine, call):
    with comm1.window(np.zeros(4, np.float32)) as window:
        with pytest.raises(TypeError, match=r"^ncclpy\.Window cannot be pickled .*Communicator.window\(\)"):
            call(window)


def test_closed_communicator_cannot_be_entered():
    comm = ncclpy.Communicator.init_all([0])[0]
    comm.close()
    with pytest.raises(ValueError, match="is closed; make a new communicator"), comm:
        raise AssertionError("the block must not begin")
    comm = ncclpy.Communicator.init_all([0])[0]
    comm.abort()
    with pytest.raises(ncclpy.NcclAborted, match="make a new communicator"), comm:
        raise AssertionError("the block must not begin")


def test_communicator_may_be_entered_before_it_is_made():
    uid = ncclpy.get_unique_id()
    with ncclpy.group():
        comm = ncclpy.Communicator.init(1, 0, uid, device=0)
        comm.__enter__()
    with comm:
        assert comm.is_ready()


def test_group_repr_shows_recorded_calls(comm1, host_engine):
    group = ncclpy.group()
    assert repr(group) == "<ncclpy.group, not entered>"
    with group:
        comm1.all_reduce(np.ones(2))
        with ncclpy.group() as inner:
            assert repr(inner) == "<ncclpy.group, 0 calls recorded>"
            comm1.all_reduce(np.ones(2))
            assert repr(inner) == "<ncclpy.group, 1 calls recorded>"
        assert repr(group) == "<ncclpy.group, 2 calls recorded>"
    with ncclpy.group(simulate=True) as group:
        assert repr(group) == "<ncclpy.group(simulate=True), 0 calls recorded>"


def test_registration_repr_shows_its_memory(comm1, host_engine):
    array = np.zeros(4, np.float32)
    with comm1.register(array) as registration:
        assert repr(registration) == (f"<ncclpy.Registration of 16 bytes at {array.ctypes.data:#x} with {comm1!r}>")
    assert repr(registration) == "<ncclpy.Registration (closed)>"


@pytest.mark.parametrize(
    "kind", [ncclpy.Manager, ncclpy.Buffer, ncclpy.Stream, ncclpy.Event], ids=lambda kind: kind.__name__
)
def test_signatures_are_those_of_the_constructors(kind):
    """The signatures are in the docstrings: each documented parameter must be accepted, with its default."""
    signature = inspect.signature(kind)
    documented = re.findall(r"^    (\w+(?:, \w+)*) : ", kind.__doc__.partition("Attributes\n")[0], re.M)
    assert ", ".join(documented).split(", ") == list(signature.parameters)
    given = {"pointer": 0, "count": 0, "dtype": "uint8"} if kind is ncclpy.Buffer else {}
    defaults = {name: each.default for name, each in signature.parameters.items() if each.default is not each.empty}
    positional = [name for name, each in signature.parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
    for options in ({}, defaults):
        made = kind(**given, **options)
        if kind is not ncclpy.Buffer:
            made.close()
    with pytest.raises(TypeError):
        kind(*[given.get(name, None) for name in positional], None)  # the others are keyword-only
    assert not kind.__doc__.startswith(kind.__name__)


LARGE = 2**40


@pytest.mark.parametrize("value", [LARGE, -LARGE, 2**70])
@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("root", lambda comm, value: comm.broadcast(np.zeros(1), root=value)),
        ("peer", lambda comm, value: comm.send(np.zeros(1), value)),
        ("op", lambda comm, value: comm.all_reduce(np.zeros(1), op=value)),
        ("color", lambda comm, value: comm.split(value)),
        ("key", lambda comm, value: comm.split(0, value)),
        ("exclude", lambda comm, value: comm.shrink([value])),
        ("nranks", lambda comm, value: comm.grow(value)),
        ("nranks", lambda comm, value: ncclpy.Communicator.init(value, 0, ncclpy.get_unique_id(), device=0)),
        ("rank", lambda comm, value: ncclpy.Communicator.init(1, value, ncclpy.get_unique_id(), device=0)),
        ("device", lambda comm, value: ncclpy.Communicator.init(1, 0, ncclpy.get_unique_id(), device=value)),
        ("priority", lambda comm, value: ncclpy.Stream(0, priority=value)),
        ("device", lambda comm, value: ncclpy.Stream(value)),
        ("device", lambda comm, value: ncclpy.Buffer(0, 0, "int8", device=value)),
        ("num_local", lambda comm, value: ncclpy.Manager().all_reduce(0, np.zeros(1), device=0, num_local=value)),
        ("max_communicators", lambda comm, value: ncclpy.Manager(max_communicators=value)),
        ("capacity", lambda comm, value: ncclpy.recorder.resize(value)),
    ],
)  # fmt: skip
def test_numbers_out_of_range_name_their_argument(comm1, host_engine, argument, call, value):
    with pytest.raises(ValueError, match=rf"^{argument}\b.*{value}|^{argument}: .*bits is too large"):
        call(comm1, value)


@pytest.mark.parametrize("pointer", [-1, 2**64])
def test_pointer_out_of_range_is_refused(pointer):
    with pytest.raises(ValueError, match=rf"pointer: expected an int from 0 to {2**64 - 1}, got {pointer}"):
        ncclpy.Communicator.from_handle(pointer)


@pytest.mark.parametrize(("argument", "call"), [
    ("key", lambda comm: comm.split(0, "1")),
    ("priority", lambda comm: ncclpy.Stream(0, priority=0.5)),
    ("pointer", lambda comm: ncclpy.Communicator.from_handle("x")),
    ("max_communicators", lambda comm: ncclpy.Manager(max_communicators="2")),
    ("capacity", lambda comm: ncclpy.recorder.resize("2")),
    ("counts", lambda comm: comm.all_gather(np.zeros(1), np.zeros(1), [1.0])),
])  # fmt: skip
def test_argument_that_is_not_a_number_is_named(comm1, host_engine, argument, call):
    with pytest.raises(TypeError, match=f"^{argument}: expected"):
        call(comm1)


def test_timeout_beyond_all_floats_is_infinite():
    ncclpy.Communicator.init(1, 0, ncclpy.get_unique_id(), device=0, timeout=10**400).close()
    with pytest.raises(ValueError, match="timeout: expected seconds"):
        ncclpy.Manager(timeout=-(10**400))


def test_more_participants_than_devices_are_refused():
    some = ncclpy.device_count() + 1
    with ncclpy.Manager() as manager:
        with pytest.raises(ValueError, match=rf"num_local: {some} participants .* it sees {some - 1}"):
            manager.all_reduce("k", (4096, 1, "float32"), device=0, num_local=some)
        assert manager.pending() == []


def test_dropped_manager_warns_with_the_line_that_made_it():
    done = testing.run_python(
        """
        import gc, threading, warnings
        import ncclpy, testing
        warnings.simplefilter("always", ResourceWarning)
        lib, told, show = testing.arrays(), threading.Event(), warnings.showwarning
        warnings.showwarning = lambda *warning: (show(*warning), told.set())
        def drop():
            manager = ncclpy.Manager()  # the line
            part = lib.make(__import__("numpy").ones(4, "float32"), 0)
            manager.all_reduce("k", lib.argument(part), device=0, num_local=1).wait(30)
        drop()
        gc.collect()
        told.wait(30)  # a thread of ncclpy may have the last reference, and release it later
        """,
        warm=True,
    )
    warned = [line for line in done.stderr.splitlines() if "unclosed <ncclpy.Communicator" in line]
    assert len(warned) == 1 and "made at <string>:8, by its Manager" in warned[0], done.stderr


def test_subinterpreter_is_refused():
    done = testing.run_python(
        """
        import os
        import ncclpy
        try:  # one that shares the GIL: an editable install starts a process on import
            import _interpreters
            other = _interpreters.create("legacy")
        except ImportError:
            import _xxsubinterpreters as _interpreters
            other = _interpreters.create(isolated=False)
        code = "try: import ncclpy\\nexcept ImportError as error: print('said:', error, flush=True)"
        _interpreters.run_string(other, code)
        os._exit(0)  # not as usual: Python 3.10, which would end the other one first, got stuck in that twice
        """,
        warm=True,
    )
    assert "said: ncclpy does not support subinterpreters" in done.stdout, done


@pytest.mark.parametrize(
    ("duration", "text"),
    [(0, "0 s"), (-1, "0 s"), (1.59e-6, "less than 1 ms"), (0.02, "20 ms"), (0.00123, "1.23 ms"), (0.99949, "999 ms"),
     (0.9996, "1 s"), (1.0, "1 s"), (1.5, "1.5 s"), (12.34, "12.3 s"), (600, "600 s"), (3600.4, "3600 s"),
     (1e9, "1000000000 s")],
)  # fmt: skip
def test_durations_as_text(duration, text):
    assert errors.seconds(duration) == text
