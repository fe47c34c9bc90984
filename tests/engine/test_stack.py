"""The Python stack of a thread, as text for other ranks and for dumps."""

from __future__ import annotations

import json
import threading

import pytest

import ncclpy
import testing
from ncclpy.engine.stack import as_stack, in_short, python_stack


def names(stack):
    return [each.rpartition(" in ")[2] for each in stack]


def test_stack_of_another_thread_has_the_innermost_frame_first():
    there, done = threading.Event(), threading.Event()

    def inner():
        there.set()
        done.wait(30)

    def outer():
        inner()

    thread = threading.Thread(target=outer)
    thread.start()
    try:
        assert there.wait(30)
        found = python_stack(thread.ident)
    finally:
        done.set()
        thread.join(30)
    assert [each for each in names(found) if each in ("inner", "outer")] == ["inner", "outer"]
    assert any("test_stack.py:" in each and each.endswith(" in inner") for each in found)


def test_stack_of_a_thread_that_has_ended_is_that_of_the_main_thread():
    thread = threading.Thread(target=int)
    thread.start()
    thread.join(30)
    here = "test_stack_of_a_thread_that_has_ended_is_that_of_the_main_thread"
    for found in (python_stack(thread.ident), python_stack()):
        assert names(found)[0] == here and "python_stack" not in names(found)


@pytest.mark.parametrize("name", ["f" * 3000, "ü" * 90])
def test_stack_of_deep_recursion_with_long_names_is_cut_to_two_kib(name):
    scope = {"python_stack": python_stack}
    source = f"def {name}(depth):\n    return {name}(depth - 1) if depth else python_stack()\n"
    exec(compile(source, "a\n" * 5000, "exec"), scope)
    found = scope[name](200)
    assert 1 < len(found) <= 32 and names(found)[0] == name[:100]
    assert len(json.dumps(found)) <= 2048 and all(each.isprintable() for each in found)


@pytest.mark.parametrize("told", [None, 7, "text", {"a": 1}, ["fine", 3], [["nested"]]])
def test_invalid_stack_of_another_process_is_ignored(told):
    assert as_stack(told) == ()


def test_stack_of_another_process_is_cut_to_the_same_size():
    found = as_stack(["\x1b[2J" + "a" * 10**6] * 10**4)
    assert 0 < len(json.dumps(found)) <= 2048 and all(each.isprintable() for each in found)


def test_sentence_has_the_innermost_frames_and_the_ends_of_paths():
    stack = [
        "/home/me/job/train.py:41 in load",
        "/home/me/job/train.py:88 in main",
        "x.py:1 in <module>",
        "y.py:2 in f",
    ]
    assert (
        in_short(stack) == "job/train.py:41 in load, called by job/train.py:88 in main, called by x.py:1 in <module>"
    )
    library = ["/usr/lib/python3.13/threading.py:363 in wait", "/v/lib/python3.13/site-packages/x/y.py:3 in f"]
    assert in_short([*library, *stack[:1]]) == "python3.13/threading.py:363 in wait, called by job/train.py:41 in load"
    assert in_short(library) == "python3.13/threading.py:363 in wait, called by x/y.py:3 in f"
    assert in_short(["odd"]) == "odd" and in_short([]) == ""


def test_dump_has_the_stack_of_the_main_thread():
    found = ncclpy.recorder.snapshot()["stack"]
    assert names(found)[0] == "test_dump_has_the_stack_of_the_main_thread"


def test_stack_is_read_while_a_finaliser_starts_a_thread():
    """On Python 3.11 `sys._current_frames` may run the finaliser, and deadlocks in this program."""
    code = """
import gc, threading
from ncclpy.engine.stack import python_stack

class Cycle:
    def __init__(self):
        self.own = self

    def __del__(self):
        finalised.append(threading.Thread(target=int))
        finalised[-1].start()

def waits(depth):  # in frames of which no object has been made
    return waits(depth - 1) if depth else (begun.set(), done.wait())

begun, done, finalised = threading.Event(), threading.Event(), []
waiting = threading.Thread(target=waits, args=(50,))
waiting.start()
begun.wait()
Cycle()
gc.set_threshold(1)
assert len(python_stack(waiting.ident)) > 10
gc.collect()
done.set()
waiting.join()
print(len(finalised))
"""
    assert testing.run_python(code).stdout == "1\n"
